"""Which daemons may be replaced by a newer version now, and why others wait. Pure.

A daemon that is replaced is away for some seconds. Its memory stays, but meanwhile its parity
groups protect no new snapshot, and bear one loss less. So only one daemon of each group is away at
a time. If the job has something to lose, no daemon is replaced in a group that could not bear the
loss of a member.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Redundancy
from holdfast_operator.reconciler.observe.lookups import is_anything_saved, suspension_of
from holdfast_operator.reconciler.observe.protection import ParityGroups
from holdfast_operator.reconciler.observe.text import listed
from holdfast_operator.reconciler.observe.views import (
    ClusterView,
    Condition,
    ConditionType,
    ControlState,
)
from holdfast_operator.reconciler.report.conditions import has_all_who_captured, newest_protected

AT_ONCE_MAX = 32
"""Daemons that are replaced at the same time, however many groups there are: their nodes pull
images."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DaemonState:
    """State of the pod of one node's daemon."""

    outdated: bool
    """Whether its version differs from the version that a new pod would get."""
    serves: bool
    """Whether it is ready, and not being deleted."""
    begun: bool = True
    """Whether its process has started up. A daemon that never did, because it crashes or its image
    cannot be pulled, serves no member that could miss it."""
    ending: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequirements:
    """What one job requires of the replacement of its daemons."""

    key: str
    groups: tuple[tuple[str, ...], ...]
    """Nodes of each parity group."""
    hold: str = ""
    """Why none of its daemons may be replaced now; empty when one of each group may."""
    weak: frozenset[str] = frozenset()
    """Nodes whose memory is away, or not filled yet."""
    protected: Generation | None = None
    """Newest protected generation; None when no newer one will come soon."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpgradePlan:
    """Decision on all daemons."""

    renew: tuple[str, ...] = ()
    """Nodes whose daemons are to be replaced."""
    waiting: Mapping[str, str] = field(default_factory=dict)
    """Node → why its outdated daemon has to wait."""
    outdated: frozenset[str] = frozenset()
    total: int = 0

    @property
    def progress(self) -> str:
        return f"{self.total - len(self.outdated)} of {self.total} daemons run the new version"


def plan_upgrade(
    daemons: Mapping[str, DaemonState], jobs: Iterable[JobRequirements]
) -> UpgradePlan:
    """Choose the daemons to replace, from all daemons by node.

    The first daemon of a new version is replaced alone, and the others wait until it serves: a
    version that does not start takes down one.
    """
    # Find whom each daemon concerns, and which daemons are away already.
    outdated = [node for node, daemon in sorted(daemons.items()) if daemon.outdated]
    concerns: dict[str, list[tuple[JobRequirements, tuple[str, ...]]]] = defaultdict(list)
    for job in jobs:
        for group in job.groups:
            for node in group:
                concerns[node].append((job, group))
    away = {node for node, daemon in daemons.items() if not daemon.serves}
    under_way = {n for n in away if daemons[n].ending or not daemons[n].outdated}
    proved = any(daemon.serves and not daemon.outdated for daemon in daemons.values())
    # Judge the outdated daemons in turn, as if each chosen one were already away.
    chosen: list[str] = []
    waiting: dict[str, str] = {}
    for node in outdated:
        daemon = daemons[node]
        if daemon.ending:
            waiting[node] = "its pod is being deleted"
            continue
        if daemon.begun:
            reason = _pace(under_way.union(chosen), proved) or _objection(
                node, concerns[node], away.union(chosen), daemons.keys()
            )
            if reason:
                waiting[node] = reason
                continue
        chosen.append(node)
    return UpgradePlan(
        renew=tuple(chosen),
        waiting=waiting,
        outdated=frozenset(outdated),
        total=len(daemons),
    )


def _pace(under_way: Collection[str], proved: bool) -> str:
    if under_way and not proved:
        return f"the daemon on {min(under_way)}, the first of the new version, is not ready yet"
    if len(under_way) >= AT_ONCE_MAX:
        return f"{len(under_way)} others are being replaced"
    return ""


def _objection(
    node: str,
    concerns: Iterable[tuple[JobRequirements, tuple[str, ...]]],
    absent: Collection[str],
    known: Collection[str],
) -> str:
    for job, group in concerns:
        if job.hold:
            return f"job {job.key}: {job.hold}"
        for other in group:
            if other == node:
                continue
            if other in absent or other not in known:
                return f"job {job.key}: the daemon on {other}, of the same parity group, is away"
            if other in job.weak:
                return (
                    f"job {job.key}: the memory of {other}, of the same parity group, is not back"
                )
    return ""


def requirements_of(
    job: MoETrainingJob, state: ControlState, observed: ClusterView, now: float
) -> JobRequirements | None:
    """Requirements of the job; None when it has no members, or has ended and keeps nothing.

    Args:
        observed: every member's node, with the last report of its daemon.
    """
    membership = state.membership
    if membership is None or (state.outcome is not None and not state.kept):
        return None
    nodes = {member.index: member.node for member in membership.members}
    grouped = membership.groups or tuple((index,) for index in nodes)
    groups = tuple(tuple(nodes[index] for index in group) for group in grouped)
    protected = newest_protected(observed)
    views = observed.views(membership)
    unheard = [
        member.node for member, view in zip(membership.members, views, strict=True) if view is None
    ]
    if not is_anything_saved(job, observed, state):
        # Nothing to lose, if that is what all of them say.
        hold = f"the daemon on {listed(unheard)} has not reported yet" if unheard else ""
        return JobRequirements(key=job.key, groups=groups, hold=hold)
    weak = ParityGroups(job, membership, observed, state, now).weak
    unsure = {
        member.index
        for member, view in zip(membership.members, views, strict=True)
        if view is None or not view.verified
    }
    hold = ""
    rests = state.kept or suspension_of(job, observed) is not None
    if not rests and state.resumed_epoch != membership.epoch:
        hold = "training does not run"
    elif job.spec.redundancy.type is not Redundancy.NONE and (
        protected is None or not has_all_who_captured(membership, protected)
    ):
        hold = "it is not protected"
    return JobRequirements(
        key=job.key,
        groups=groups,
        hold=hold,
        weak=frozenset(nodes[index] for index in weak | unsure),
        protected=None if rests else protected,
    )


def outdated_condition(plan: UpgradePlan, nodes: Iterable[str]) -> Condition | None:
    """Condition of a job with members on `nodes`; None when all their daemons are up to date."""
    old = sorted(plan.outdated.intersection(nodes)) if plan.outdated else []
    if not old:
        return None
    waiting = [(node, plan.waiting[node]) for node in old if node in plan.waiting]
    waits = f"; the one on {waiting[0][0]} waits: {waiting[0][1]}" if waiting else ""
    return Condition(
        type=ConditionType.DAEMONS_OUTDATED,
        status=True,
        reason="BeingRenewed",
        message=f"the daemons on {listed(old)} run an older version{waits}",
    )
