"""Which change would gain most for a job: the job as it is, simulated with one thing changed at a
time, through the same failures.

The gain of a change is the mean difference of ETTR over the runs, seed by seed. It counts only if
it exceeds noise: twice its standard error, and what the comparison of policies calls negligible.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, sqrt

from holdfast_cli.planner.effective_time.assumed_policies import (
    WINDOW_MAX,
    AssumedCosts,
    PolicyKind,
    policy_models,
)
from holdfast_cli.planner.effective_time.policy_models import Cluster, PolicyModel, Workload
from holdfast_cli.planner.effective_time.runs import TrainingRun
from holdfast_cli.planner.models.policy_comparison import NEGLIGIBLE
from holdfast_core.job.intervals import AUTO
from holdfast_core.job.snapshots import DEFAULT_GROUP_SIZE, DEFAULT_LARGE_GROUP_SIZE
from holdfast_core.snapshots.membership import Redundancy

Simulate = Callable[[PolicyModel, Workload, Cluster], Sequence[TrainingRun]]
"""Runs of a policy, by seed: every call simulates the same failures."""

WINDOWED = frozenset({PolicyKind.SPARSE_GLOBAL, PolicyKind.SPARSE_GRADS, PolicyKind.FEWER_GRADS})
PARITY = {
    1: (Redundancy.RAIM5.value, DEFAULT_GROUP_SIZE),
    2: (Redundancy.RAIM6.value, DEFAULT_LARGE_GROUP_SIZE),
}
"""Losses that parity covers, its type, and the nodes of a group."""

STORED_EVERY_S = 1800.0
"""Interval of copies in storage where the job leaves it to measurements, or keeps none yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSetting:
    """A job, or what it would be with one change."""

    kind: PolicyKind
    costs: AssumedCosts
    workload: Workload
    cluster: Cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class Lever:
    """A change, and its effect."""

    change: str
    """The change in words, with the field of the job or the flag of the command."""
    ettr: float
    gain: float
    """Mean difference of ETTR to the job as it is."""
    noise: float
    """The difference that a gain has to exceed."""
    lost_tokens: float
    every_steps: int
    """Steps from snapshot to snapshot, or of a window."""
    of_script: bool = False
    """Whether it takes a training script that is written for it."""

    @property
    def counts(self) -> bool:
        """Whether the gain is more than noise."""
        return self.gain > self.noise


@dataclass(frozen=True, kw_only=True, slots=True)
class Levers:
    """The job as it is, and the changes to it, the largest gain first."""

    mtbf_s: float | None
    kind: PolicyKind
    ettr: float
    every_steps: int
    levers: tuple[Lever, ...]


def compare_levers(
    job: JobSetting,
    possible: frozenset[PolicyKind],
    mtbf_s: float | None,
    rate_s: float,
    simulate: Simulate,
    *,
    stay_restart_s: float | None = None,
) -> Levers:
    """Simulate the job with each change.

    Args:
        job: as its document has it.
        possible: policies that the job can ask for.
        mtbf_s: mean time between failures; None where a trace is replayed.
        rate_s: the same, or that of the trace.
        stay_restart_s: time of a restart if processes stay, where they do not yet and it is known.
    """
    model = _model(job, rate_s)
    base = simulate(model, job.workload, job.cluster)
    levers = []
    for change, changed in _changes(job, possible, rate_s, stay_restart_s):
        other = _model(changed, rate_s)
        runs = simulate(other, changed.workload, changed.cluster)
        gains = [run.ettr - before.ettr for run, before in zip(runs, base, strict=True)]
        lost = statistics.fmean(run.lost_tokens for run in runs)
        if lost > other.loss_limit:
            continue
        error = statistics.stdev(gains) / sqrt(len(gains)) if len(gains) > 1 else 0.0
        levers.append(
            Lever(
                change=change,
                ettr=statistics.fmean(run.ettr for run in runs),
                gain=statistics.fmean(gains),
                noise=max(2 * error, NEGLIGIBLE),
                lost_tokens=lost,
                every_steps=_every(other),
                of_script=other.of_script,
            )
        )
    return Levers(
        mtbf_s=mtbf_s,
        kind=job.kind,
        ettr=statistics.fmean(run.ettr for run in base),
        every_steps=_every(model),
        levers=tuple(sorted(levers, key=lambda lever: (-lever.gain, lever.change))),
    )


def _model(setting: JobSetting, rate_s: float) -> PolicyModel:
    models = policy_models(setting.costs, setting.workload, setting.cluster, rate_s)
    return models[setting.kind]


def _every(model: PolicyModel) -> int:
    return model.window_steps or model.levels[0].interval_steps


def _changes(
    job: JobSetting, possible: frozenset[PolicyKind], rate_s: float, stay_restart_s: float | None
) -> Iterator[tuple[str, JobSetting]]:
    costs, cluster = job.costs, job.cluster
    if costs.interval_steps and job.kind not in WINDOWED:
        changed = replace(costs, interval_steps=0)
        yield f"snapshot.interval.steps: {AUTO}", replace(job, costs=changed)
    yield from _policies(job, possible)
    yield from _windows(job, rate_s)
    for losses, (name, group) in PARITY.items():
        if losses != costs.losses and cluster.nodes > losses:
            changed = replace(costs, losses=losses, group_nodes=min(group, cluster.nodes))
            yield f"redundancy.type: {name}", replace(job, costs=changed)
    if not costs.stored_every_s:
        changed = replace(costs, stored_every_s=STORED_EVERY_S)
        yield "copies in storage every 30 min (persistence)", replace(job, costs=changed)
    if cluster.node_losses and cluster.replacement_s < inf:
        # As many as are on their way at a time, with three standard deviations.
        away = cluster.replacement_s * cluster.node_losses / rate_s
        spares = max(cluster.spares + 1, ceil(away + 3 * sqrt(away)))
        changed_cluster = replace(cluster, spares=spares)
        yield (
            f"{spares} spare nodes in place of {cluster.spares} (failurePolicy.spares)",
            replace(job, cluster=changed_cluster),
        )
    if stay_restart_s is not None:
        changed_cluster = replace(cluster, restart_s=stay_restart_s)
        yield "processes that stay when their world changes", replace(job, cluster=changed_cluster)
    half = replace(cluster, detect_s=cluster.detect_s / 2)
    yield "detection in half the time (failurePolicy.detection)", replace(job, cluster=half)
    half = replace(cluster, restart_s=cluster.restart_s / 2)
    yield "restarts in half the time", replace(job, cluster=half)
    faster = replace(costs, network_bytes_s=2 * costs.network_bytes_s)
    yield "a network twice as fast", replace(job, costs=faster)
    faster = replace(costs, copy_bytes_s=2 * costs.copy_bytes_s)
    yield "copies out of devices twice as fast", replace(job, costs=faster)


_NAMES = {
    PolicyKind.FULL: "snapshot.policy.type: Full",
    PolicyKind.PARTIAL: "snapshot.policy.type: PartialExperts",
    PolicyKind.SELECTIVE: "snapshot.policy.type: Selective",
    PolicyKind.SPARSE_GLOBAL: "snapshot.policy.type: Sparse",
    PolicyKind.SPARSE_GRADS: "snapshot.policy.type: Sparse, with repeats: Optimizer",
    PolicyKind.FEWER: "minNodes below nodes, if the job's shape allows it",
    PolicyKind.FEWER_GRADS: "minNodes below nodes, and windows with repeats: Optimizer",
    PolicyKind.STAGES: "a script with elastic.Pipeline, so that only failed stages repeat steps",
    PolicyKind.ELASTIC: "a script with holdfast.moe, so that copies of experts live on",
}


def _policies(job: JobSetting, possible: frozenset[PolicyKind]) -> Iterator[tuple[str, JobSetting]]:
    """Other policies, with the interval of the job; those of windows choose their length."""
    seated = job.costs.survives is not None
    if seated:
        others = sorted(possible)
    else:
        windows = job.kind is PolicyKind.SPARSE_GRADS
        fewer = PolicyKind.FEWER_GRADS if windows else PolicyKind.FEWER
        others = [*sorted(possible), fewer, PolicyKind.ELASTIC]
    if job.workload.stages > 1:
        others.append(PolicyKind.STAGES)
    for kind in dict.fromkeys(others):
        if kind is not job.kind:
            costs = replace(job.costs, window_steps=0) if kind in WINDOWED else job.costs
            name = PolicyKind.FULL if seated and kind is PolicyKind.ELASTIC else kind
            yield _NAMES[name], replace(job, kind=kind, costs=costs)
    if seated and job.cluster.least_nodes == job.cluster.nodes > job.costs.seated_on:
        fewer_nodes = replace(job.cluster, least_nodes=job.cluster.nodes - 1)
        yield f"minNodes: {fewer_nodes.least_nodes}", replace(job, cluster=fewer_nodes)


def _windows(job: JobSetting, rate_s: float) -> Iterator[tuple[str, JobSetting]]:
    """Windows of half and of twice the length, and the shortest that a step hides."""
    if job.kind not in WINDOWED:
        return
    window = _model(job, rate_s).window_steps
    fits = _model(replace(job, costs=replace(job.costs, window_steps=0)), rate_s).window_steps
    for other in sorted({max(1, window // 2), min(2 * window, WINDOW_MAX), fits} - {window}):
        costs = replace(job.costs, window_steps=other)
        yield f"snapshot.policy.sparse.window: {other}", replace(job, costs=costs)
