"""Failures of nodes, remembered over jobs, and how much they still count against a node.

A few nodes of a cluster cause many of its failures, and each job by itself forgets them: a node
that fails again after every restart would be taken again and again. So control loops record which
node failed in which way, and members go to nodes that have failed less, as long as there are some.

A failure weighs less with every half-life. A script that fails alike on several nodes before its
job's first step is an error of the script, and counts against none of them (decision 0031). The
record is bounded, and merging the same failure twice changes nothing, so that two writers may add
theirs to one copy. It is a preference and never a condition: nothing waits for it. Pure.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from enum import StrEnum
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from holdfast_core.idle_checks import IdleCheck
from holdfast_core.kernel_messages import is_device
from holdfast_core.quantities import format_count

NODES_MAX = 256
"""Nodes in a record: those that failed last."""
FAILURES_MAX = 8
"""Failures of one node in a record, the newest."""
NAME_CHARACTERS_MAX = 253
"""Longest name of a node, as in Kubernetes; what has a longer one is no node."""
JOB_CHARACTERS_MAX = 128
"""Characters that are kept of a job's key."""
ALIKE_CHARACTERS = 16
"""Characters of the mark by which failures are alike."""
AT_DIGITS = 3
"""Digits of a time in a record behind the point. All have as many: failures are ordered by time."""
REPEAT_S = 600.0
"""Time within which failures of a node in the same epoch of one job are one failure: a control
loop that starts again may see it once more, and a node fails in several ways at once. A job that is
made again begins its epochs anew. A node that is slow throughout an epoch failed once in it."""
CHECK_REPEAT_S = 86400.0
"""Time within which failures of the same check of a node without a job are one failure: a check
that goes on failing is found again by a daemon that has started again."""
FUTURE_S = 86400.0
"""How far ahead the clock of another writer may be. What is later is nonsense, and would never
fade."""
HALF_LIFE_S = 2 * 86400.0
"""Time in which a failure loses half of its weight, if nobody says otherwise."""
FADED = 0.01
"""Part of its weight at which a failure is forgotten."""
CLEAN_BELOW = 0.25
"""Score below which a node counts as clean: after two half-lives, one lost rank is forgiven."""
RATED_S = 1.0
"""Longest age of ratings that are not computed again."""
PROBLEM_SCORE = 1.0
"""Score of a node about which its cluster reports a problem."""


class FailureKind(StrEnum):
    """What happened on a node."""

    LOST_NODE = "LostNode"
    """The node, or its daemon with the memory, was lost."""
    LOST_RANK = "LostRank"
    """A rank or an agent ended while training ran."""
    HANG = "Hang"
    """A rank on the node held all others up."""
    FAILED_START = "FailedStart"
    """A rank or an agent ended before training ran."""
    FAILED_CHECK = "FailedCheck"
    """A check of the node failed, before an agent took part."""
    HARDWARE_FAULT = "HardwareFault"
    """A rank failed after the kernel had reported a fault of the node's hardware."""
    STRAGGLING = "Straggling"
    """A rank on the node was slow, step after step, and all others waited for it."""
    CORRUPTION = "Corruption"
    """A rank on the node had wrong bytes, and nothing else failed."""


WEIGHTS: Mapping[FailureKind, float] = {
    FailureKind.LOST_NODE: 2.0,
    FailureKind.LOST_RANK: 1.0,
    FailureKind.HANG: 1.0,
    FailureKind.FAILED_START: 1.0,
    FailureKind.FAILED_CHECK: 2.0,
    FailureKind.HARDWARE_FAULT: 2.0,
    FailureKind.STRAGGLING: 0.5,
    FailureKind.CORRUPTION: 2.0,
}
_LASTING = frozenset({FailureKind.STRAGGLING, FailureKind.CORRUPTION})
"""Kinds that last: however often they are seen in an epoch, they are one failure in it."""
IN_WORDS: Mapping[FailureKind, str] = {
    FailureKind.LOST_NODE: "node lost",
    FailureKind.LOST_RANK: "rank lost",
    FailureKind.HANG: "hang",
    FailureKind.FAILED_START: "failed start",
    FailureKind.FAILED_CHECK: "failed check",
    FailureKind.HARDWARE_FAULT: "hardware fault",
    FailureKind.STRAGGLING: "slow rank",
    FailureKind.CORRUPTION: "wrong bytes",
}


class NodeFailure(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One failure of a node."""

    kind: FailureKind
    job: str
    """Key of the job; empty if none was on the node."""
    epoch: int
    """Epoch of the job in which it failed; 0 without a job."""
    at: float
    """Seconds since the Unix epoch."""
    alike: str = ""
    """Mark that failures have in common if scripts ended in the same way before their job's first
    step; empty for failures that are compared with no other."""
    device: str = ""
    """The GPU that failed, by its UUID or PCI address; empty where none is known."""
    check: str = ""
    """The check that failed; empty where it is not known."""


Record = Mapping[str, tuple[NodeFailure, ...]]
"""Node → its failures, oldest first."""


class Rating(NamedTuple):
    """How a node has done lately."""

    score: float = 0.0
    """Weight of its failures now; 0 for a clean node."""
    text: str = ""
    """The same in words, such as `3 failures in 2 days`; empty for a clean node."""
    failures: int = 0
    """Number of failures that count."""


CLEAN = Rating()


def mark_of(essence: str) -> str:
    """Mark of failures whose last lines have this essence; empty for an empty one."""
    digest = blake2b(essence.encode(errors="replace"), digest_size=ALIKE_CHARACTERS // 2)
    return digest.hexdigest() if essence else ""


def with_failures(
    record: Record, failures: Iterable[tuple[str, NodeFailure]], *, now: float, half_life_s: float
) -> dict[str, tuple[NodeFailure, ...]]:
    """`record` with more failures, each with its node, and without what has faded. A failure that
    it has already changes nothing. Where there are too many, the newest are kept."""
    found = defaultdict(list, {node: list(known) for node, known in record.items()})
    for node, failure in failures:
        if node and len(node) <= NAME_CHARACTERS_MAX:
            found[node].append(_bounded(failure, now))
    oldest = now + half_life_s * math.log2(FADED)
    kept = {node: _newest(known, oldest) for node, known in found.items()}
    newest_first = sorted(
        (node for node, known in kept.items() if known), key=lambda node: (-kept[node][-1].at, node)
    )
    return {node: kept[node] for node in sorted(newest_first[:NODES_MAX])}


def ratings(record: Record, *, now: float, half_life_s: float) -> dict[str, Rating]:
    """Rating of each node that is not clean.

    Of two nodes the one with the higher score keeps the higher score until one of them fails again
    or is clean, whatever time passes: all failures fade at the same pace.
    """
    pardoned = excused(record)
    found = {}
    for node, failures in record.items():
        counted = [failure for failure in failures if failure not in pardoned]
        ages_s = [max(0.0, now - failure.at) for failure in counted]
        weights = (WEIGHTS[failure.kind] for failure in counted)
        score = math.fsum(
            weight * 0.5 ** (age_s / half_life_s)
            for weight, age_s in zip(weights, ages_s, strict=True)
        )
        if score >= CLEAN_BELOW:
            count = format_count(len(counted), "failure")
            found[node] = Rating(score, f"{count} in {age_in_words(max(ages_s))}", len(counted))
    return found


def excused(record: Record) -> frozenset[NodeFailure]:
    """The failures that count against no node, because their script failed alike on several."""
    nodes: dict[tuple[str, str], set[str]] = defaultdict(set)
    for node, failure in _pairs(record):
        if failure.alike:
            nodes[failure.job, failure.alike].add(node)
    return frozenset(
        failure
        for _, failure in _pairs(record)
        if len(nodes.get((failure.job, failure.alike), ())) > 1
    )


def with_problem(rating: Rating, problem: str) -> Rating:
    """`rating` of a node about which its cluster reports `problem`; the same without one."""
    if not problem:
        return rating
    text = f"{rating.text}, {problem}" if rating.text else problem
    return rating._replace(score=rating.score + PROBLEM_SCORE, text=text)


class NodeMemory:
    """What one process knows of the failures of nodes: the record in a store that it shares with
    others, and its own failures that are not in there yet. Does no I/O: an adapter reads and
    writes.

    What somebody removed from the store is gone, because only failures that are new here are ever
    added to it.
    """

    def __init__(self) -> None:
        self.half_life_s = HALF_LIFE_S
        self._stored: Record = {}
        self._pending: Record = {}
        self._writing: Record = {}
        self._ratings: Mapping[str, Rating] = {}
        self._rated_at = -math.inf

    def note(self, failures: Iterable[tuple[str, NodeFailure]], now: float) -> None:
        """Add failures, each with its node."""
        self._pending = self._with(self._pending, failures, now)
        self._rated_at = -math.inf

    def see(self, stored: Record) -> None:
        """Use what the store holds now."""
        self._stored = stored
        self._rated_at = -math.inf

    def to_write(self, now: float) -> Record | None:
        """The record that the store should hold, given that it holds what was last seen; None when
        there is nothing new to write."""
        self._writing = self._pending
        merged = self._with(self._stored, _pairs(self._pending), now)
        if self._pending and merged != self._stored:
            return merged
        self._pending = {}
        return None

    def wrote(self, record: Record) -> None:
        """Note that the record of `to_write` is in the store."""
        left = {
            node: tuple(each for each in failures if each not in self._writing.get(node, ()))
            for node, failures in self._pending.items()
        }
        self._pending = {node: failures for node, failures in left.items() if failures}
        self.see(record)

    def rating(self, node: str, now: float) -> Rating:
        """How a node has done lately, as of `RATED_S` ago or later."""
        return self.ratings(now).get(node, CLEAN)

    def ratings(self, now: float) -> Mapping[str, Rating]:
        """The same for all nodes that are not clean."""
        if not 0 <= now - self._rated_at < RATED_S:
            self._ratings = ratings(self.record(now), now=now, half_life_s=self.half_life_s)
            self._rated_at = now
        return self._ratings

    def record(self, now: float) -> Record:
        """All failures that are known."""
        return self._with(self._stored, _pairs(self._pending), now)

    def _with(
        self, record: Record, failures: Iterable[tuple[str, NodeFailure]], now: float
    ) -> dict[str, tuple[NodeFailure, ...]]:
        return with_failures(record, failures, now=now, half_life_s=self.half_life_s)


def to_document(record: Record) -> dict[str, list[dict[str, object]]]:
    """Convert a record to plain values."""
    return {
        node: [msgspec.to_builtins(failure) for failure in failures]
        for node, failures in sorted(record.items())
    }


def from_document(
    document: object, *, now: float
) -> tuple[dict[str, tuple[NodeFailure, ...]], tuple[str, ...]]:
    """Read a record, and what of it could not be understood, in words. Anybody may have edited the
    document: what is no failure is left out, and the rest is kept."""
    if not isinstance(document, Mapping):
        return {}, ("it is no object of nodes",) if document is not None else ()
    found, problems = list[tuple[str, NodeFailure]](), list[str]()
    for node, values in document.items():
        if not isinstance(node, str) or not isinstance(values, list | tuple):
            problems.append(f"{str(node)[:NAME_CHARACTERS_MAX]}: no list of failures")
            continue
        for value in values[-FAILURES_MAX:]:
            failure = _failure(value, now)
            if failure is None:
                problems.append(f"{node[:NAME_CHARACTERS_MAX]}: no failure: {str(value)[:80]!r}")
            else:
                found.append((node, failure))
    return with_failures({}, found, now=now, half_life_s=math.inf), tuple(problems)


def _pairs(record: Record) -> Iterable[tuple[str, NodeFailure]]:
    return ((node, failure) for node, failures in record.items() for failure in failures)


def _failure(value: object, now: float) -> NodeFailure | None:
    try:
        failure = msgspec.convert(value, NodeFailure)
    except msgspec.ValidationError:
        return None
    possible = math.isfinite(failure.at) and 0 <= failure.at <= now + FUTURE_S
    return failure if possible and 0 <= failure.epoch < 2**63 else None


def _bounded(failure: NodeFailure, now: float) -> NodeFailure:
    return msgspec.structs.replace(
        failure,
        job=failure.job[:JOB_CHARACTERS_MAX],
        alike=failure.alike[:ALIKE_CHARACTERS],
        device=failure.device if is_device(failure.device) else "",
        check=failure.check if failure.check in set(IdleCheck) else "",
        at=round(min(failure.at, now), AT_DIGITS),
    )


def _newest(failures: Iterable[NodeFailure], oldest: float) -> tuple[NodeFailure, ...]:
    """The newest failures, oldest first, none before `oldest`, and each once: as the kind that
    weighs most, since a loss may be explained later, and with the device if one is known."""
    kept: list[NodeFailure] = []
    for failure in sorted(failures, key=_order):
        same = [index for index, each in enumerate(kept) if _is_same(failure, each)]
        if not same and failure.at >= oldest:
            kept.append(failure)
        elif same:
            known = kept[same[0]]
            heavier = WEIGHTS[failure.kind] > WEIGHTS[known.kind]
            first, second = (failure, known) if heavier else (known, failure)
            device, check = first.device or second.device, first.check or second.check
            kept[same[0]] = msgspec.structs.replace(first, at=known.at, device=device, check=check)
    return tuple(kept[-FAILURES_MAX:])


def _order(failure: NodeFailure) -> tuple[float, str, str, int, str, str, str]:
    return (
        *(failure.at, failure.kind, failure.job, failure.epoch),
        *(failure.alike, failure.device, failure.check),
    )


def _is_same(one: NodeFailure, other: NodeFailure) -> bool:
    if (one.job, one.epoch) != (other.job, other.epoch):
        return False
    if {one.kind, other.kind} & _LASTING:  # do not keep a failure that follows from counting
        return one.kind is other.kind
    is_same_check = not one.job and one.check != "" and one.check == other.check
    return abs(one.at - other.at) < (CHECK_REPEAT_S if is_same_check else REPEAT_S)


def age_in_words(seconds: float) -> str:
    """`5 minutes`, `3 hours` or `2 days`: an age, rounded up."""
    units = ((86400, "day"), (3600, "hour"))
    unit_s, unit = next((each for each in units if seconds > each[0]), (60, "minute"))
    return format_count(max(1, math.ceil(seconds / unit_s)), unit)
