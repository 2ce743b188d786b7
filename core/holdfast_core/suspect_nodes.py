"""Suspect nodes: those that fail again and again, which a cluster may close to new pods.

The record of a node (`node_failures`) is a preference. Closing a node concerns everybody who uses
the cluster, so it takes more than a bad score: several failures, and either some that no script
causes, or failures of several jobs. Only a share of the nodes is ever closed, whatever jobs report,
and whoever has closed the others. A node opens again when its failures have faded, and only if it
was Holdfast that closed it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from holdfast_core.node_failures import (
    CLEAN,
    FailureKind,
    NodeFailure,
    Rating,
    Record,
    excused,
    ratings,
)

SUSPECT_SCORE = 2.0
"""Score from which a node is suspect: three lost ranks within two days, say."""
OPEN_BELOW = 0.5
"""Score below which a node is opened again, far from the other limit, so that one failure more or
less does not close a node twice a day: two half-lives later at least."""
FAILURES_MIN = 3
"""Failures that a suspect node has at least: a node that is lost twice may have been repaired."""
NODES_PER_CLOSED = 10
"""At most one of so many nodes is closed; of fewer, one."""
NODES_MIN = 3
"""Nodes of which one may be closed at all."""
_OF_SCRIPTS = frozenset(
    {
        FailureKind.LOST_RANK,
        FailureKind.HANG,
        FailureKind.FAILED_START,
        FailureKind.STRAGGLING,
    }
)
"""Kinds of failure that the script of one job can cause by itself, again and again."""


class SuspectPolicy(StrEnum):
    """What the operator does to a suspect node."""

    NONE = "None"
    TAINT = "Taint"
    """Add a taint. Pods of Holdfast tolerate it, and take the node if there is no better one."""
    CORDON = "Cordon"
    """Let nothing be scheduled there."""


class Mark(StrEnum):
    """What the annotation of a node says: which policy has closed it, or that it is open again."""

    NONE = "None"
    TAINT = "Taint"
    CORDON = "Cordon"
    OPENED = "Opened"
    """Somebody has taken back what a policy did. Who closes the node after that is not Holdfast."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeState:
    """How a node is now."""

    name: str
    marked: Mark = Mark.NONE
    intact: bool = False
    """Whether it still has the taint or the cordon that its mark says."""
    closed: bool = False
    """Whether it takes no new pods, whoever closed it, or whatever is wrong with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SuspectPlan:
    """What is to be done to which nodes, in order."""

    close: tuple[str, ...] = ()
    open: tuple[str, ...] = ()
    """Nodes that Holdfast has closed, and that are suspect no more."""
    opened: tuple[str, ...] = ()
    """Nodes that Holdfast has closed, and somebody else has opened since."""
    left: tuple[str, ...] = ()
    """Suspect nodes that stay open because too many are closed."""


def suspicions(record: Record, *, now: float, half_life_s: float) -> Mapping[str, Rating]:
    """How much speaks against each node, without what a single job's script may be to blame for."""
    pardoned = excused(record)
    counted = {
        node: _counted([each for each in failures if each not in pardoned])
        for node, failures in record.items()
    }
    return ratings(counted, now=now, half_life_s=half_life_s)


def _counted(failures: list[NodeFailure]) -> tuple[NodeFailure, ...]:
    of_scripts = [failure for failure in failures if failure.kind in _OF_SCRIPTS]
    if len({failure.job for failure in of_scripts}) > 1:
        return tuple(failures)
    return tuple(failure for failure in failures if failure.kind not in _OF_SCRIPTS)


def closed_max(nodes: int) -> int:
    """Number of nodes that may be closed of `nodes`."""
    return max(1, nodes // NODES_PER_CLOSED) if nodes >= NODES_MIN else 0


def plan(
    nodes: Iterable[NodeState], suspected: Mapping[str, Rating], policy: SuspectPolicy
) -> SuspectPlan:
    """What to do to `nodes`, all of those that train, given what speaks against them.

    A node that somebody else has closed is left alone, and so is one that somebody has opened, for
    as long as its annotation is there. All closed nodes count towards the limit. What is closed
    already is never opened because of it.
    """
    states = sorted(nodes, key=lambda node: node.name)
    to_open = [
        node.name
        for node in states
        if node.marked is not Mark.NONE
        and (
            suspected.get(node.name, CLEAN).score < OPEN_BELOW
            or node.marked not in (Mark.OPENED, Mark(policy))
        )
    ]
    opened = [
        node.name
        for node in states
        if node.marked not in (Mark.NONE, Mark.OPENED)
        and not node.intact
        and node.name not in to_open
    ]
    bad = [
        node.name
        for node in states
        if node.marked is Mark.NONE and not node.closed and _is_bad(suspected, node.name)
    ]
    bad.sort(key=lambda name: (-suspected[name].score, name))
    closed = sum(node.closed and node.name not in to_open for node in states)
    room = max(0, closed_max(len(states)) - closed) if policy is not SuspectPolicy.NONE else 0
    return SuspectPlan(
        close=tuple(bad[:room]),
        open=tuple(to_open),
        opened=tuple(opened),
        left=tuple(bad[room:]),
    )


def _is_bad(suspected: Mapping[str, Rating], name: str) -> bool:
    rating = suspected.get(name, CLEAN)
    return rating.score >= SUSPECT_SCORE and rating.failures >= FAILURES_MIN
