"""`holdfast plan`: how much memory a job will take, and what its redundancy is worth.

This module computes with `holdfast_core` and formats tables. It decides nothing and looks at no
machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, expm1

from rich.console import Group, RenderableType
from rich.table import Table

from holdfast_cli.planner.models.boundary_logs import BoundaryLogs, plan_logs
from holdfast_cli.planner.models.fewer_nodes import (
    SlotBytesOf,
    memory_of_sizes,
    most_experts,
    slot_bytes_of_model,
    slot_bytes_of_state,
)
from holdfast_cli.planner.models.model_sizes import ModelSizes
from holdfast_cli.planner.models.policy_comparison import Assumptions, Comparison, compare_policies
from holdfast_cli.planner.models.recommending import Recommendation, recommend
from holdfast_cli.planner.models.reliability import (
    FailureModel,
    checkpoint_survival,
    parity_survival,
    time_to,
)
from holdfast_cli.planner.models.slots import SlotsCost, compare_slots, slots_chosen
from holdfast_cli.planner.plan_views import fewer_nodes_view, logs_view, sources_view
from holdfast_cli.planner.policy_view import comparison_view, effective_view
from holdfast_cli.planner.seeds import generator
from holdfast_core.job.intervals import StepInterval
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.protection.budget import NodeMemory, fits, predict
from holdfast_core.protection.codes import code_for
from holdfast_core.protection.groups import form_groups
from holdfast_core.protection.intervals import (
    group_loss_rate_per_s,
    recoveries_per_s,
    snapshot_interval_steps,
)
from holdfast_core.quantities import format_bytes
from holdfast_core.snapshots.layouts import PAGE_BYTES, round_up
from holdfast_core.snapshots.membership import Redundancy

WITHOUT_WEIGHTS_TEXT = (
    "without weights: with snapshot.storeComputeWeights: false, where 16-bit weights, 2 of a "
    "parameter's 14 bytes of state, follow from float32 masters"
)

DAY_S = 86400.0
COPY_BYTES_S = 10e9
"""Default rate at which the ranks of a node copy snapshots."""
NETWORK_BYTES_S = 2.5e9
"""Default rate from node to node: about the rate of one stream between daemons."""
WAITING_LAUNCHER_BYTES = 724 * 1024**2
"""Memory of a launcher that waits for a world, with the process that workers are forked from: as
`make bench NAME=launching` printed it with torch 2.15 for CPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SentAtBoundaries:
    """The data that a rank sends over each boundary of its pipeline stage."""

    activation_bytes: int
    """Output of a stage for one micro-batch, as one rank sends it."""
    micro_batches: int
    """Micro-batches of one rank in a step."""
    log_received: bool = False
    """Whether ranks also log what they receive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """Assumptions of the plan."""

    bytes_per_rank: int | None = None
    """Payload of one rank's snapshot; no memory is planned when None."""
    node_mtbf_days: float = StepInterval().node_mtbf_days
    """Mean time between losses of one node."""
    process_mtbf_days: float = StepInterval().process_mtbf_days
    """Mean time between failures of one node's training processes."""
    replace_s: float = 60.0
    """Seconds from the loss of a node until its state is protected again elsewhere."""
    snapshot_s: float | None = None
    """Time to copy one rank's snapshot; one second for each 10 GB when None."""
    step_s: float = 1.0
    """Time of one training step."""
    days: float = 30.0
    """Length of the training."""
    sent: SentAtBoundaries | None = None
    """None leaves the logs of pipeline stages out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedModel:
    """The job's model, and the assumptions for comparing policies."""

    sizes: ModelSizes
    assumed: Assumptions

    @property
    def state_bytes(self) -> int:
        """Training state of all ranks together, one copy."""
        return sum(self.sizes.experts.values()) + self.sizes.other_bytes

    def __str__(self) -> str:
        layers = self.sizes.by_layer.values()
        counts = sorted({len(units) for units in layers})
        return (
            f"{len(layers)} MoE layers of {' or '.join(map(str, counts))} experts, "
            f"{_short(self.state_bytes)} of training state, "
            f"{1 - self.sizes.other_bytes / self.state_bytes:.0%} of it in experts"
        )


def compare_and_recommend(job: MoETrainingJob, model: PlannedModel) -> Recommendation:
    """Compare the snapshot policies, and simulate a training with each.

    Raises:
        InvalidJobError: when the model has no experts.
    """
    comparison = compare_policies(job, model.sizes, parity_groups(job), model.assumed)
    return recommend(comparison, job, model.assumed, generator)


def check_memory(
    job: MoETrainingJob, settings: PlanSettings, comparison: Comparison | None
) -> None:
    """Refuse a job if anything planned exceeds its own memory limit for a node; the tables show
    what fits.

    Raises:
        MemoryBudgetError: with the most that is needed, and the limit.
    """
    if job.memory_per_node_bytes is None:
        return
    if comparison is not None:
        needed = max(cost.memory_bytes for cost in comparison.costs)
    elif settings.bytes_per_rank is not None:
        nodes = _node_memory(job, parity_groups(job), settings.bytes_per_rank)
        needed = max(node.total_bytes for node in nodes)
    else:
        return
    fits(needed, job.memory_per_node_bytes, what="snapshots of one node")


def plan_view(
    job: MoETrainingJob,
    settings: PlanSettings,
    model: PlannedModel | None = None,
    advice: Recommendation | None = None,
) -> RenderableType:
    """The plan as tables.

    Args:
        model, advice: the model, and its policies compared; None when its sizes are not known.

    Raises:
        InvalidJobError: when an assumption is out of range.
    """
    # The shape of the job.
    spec = job.spec
    groups = parity_groups(job)
    head = (
        f"{job.key}: {spec.nodes} nodes{_fewest(job)} of {spec.nproc_per_node} ranks and "
        f"{spec.failure_policy.spares} spares; redundancy {spec.redundancy.type.value}"
    )
    if groups:
        sizes = sorted({len(group) for group in groups})
        head += f", {len(groups)} parity groups of {' or '.join(map(str, sizes))}"
    parts: list[RenderableType] = [head, ""]
    # Memory: by policy if the model's sizes are known, for one size of snapshots if that is known.
    comparison = None if advice is None else advice.comparison
    if model is not None and advice is not None and comparison is not None:
        parts.append(
            comparison_view(
                comparison,
                model.assumed,
                days=settings.days,
                model=str(model),
                limit_bytes=job.memory_per_node_bytes,
                auto=job.spec.snapshot.interval.auto,
            )
        )
        parts += ["", effective_view(advice)]
        share_bytes = model.state_bytes / spec.nodes
        parts += ["", _slots(job, comparison.best.slots, share_bytes), WITHOUT_WEIGHTS_TEXT]
        if groups:
            parts += ["", sources_view(job, model.sizes, model.assumed, comparison)]
    elif settings.bytes_per_rank is None:
        parts.append(
            "memory: give --bytes-per-rank SIZE to see what each node needs, or --expert-bytes and "
            "--other-bytes to compare snapshot policies"
        )
    else:
        parts += [_memory(job, groups, settings.bytes_per_rank), ""]
        share_bytes = settings.bytes_per_rank * spec.nproc_per_node
        costs = _slots_costs(job, groups, settings)
        parts += [_slots(job, costs, share_bytes), WITHOUT_WEIGHTS_TEXT]
    # Additions for jobs that may shrink, and for pipelines.
    slot_bytes_of = _slot_bytes_of(job, settings, model)
    if job.spec.may_shrink and slot_bytes_of is not None:
        fewer = memory_of_sizes(job, slot_bytes_of)
        more = None if model is None else most_experts(job, model.sizes)
        parts += ["", fewer_nodes_view(fewer, job.memory_per_node_bytes, more)]
    if settings.sent is not None:
        of_rank = settings.bytes_per_rank
        if model is not None:
            of_rank = model.state_bytes // job.world_size
        logs = _logs(job, replace(settings, bytes_per_rank=of_rank), settings.sent)
        parts += ["", logs_view(logs)]
    parts.append("")
    parts.append(_odds(job, settings, with_interval=comparison is None))
    return Group(*parts)


def _fewest(job: MoETrainingJob) -> str:
    """Text on the numbers of nodes with which the job continues; empty if there is only one."""
    spec = job.spec
    if not spec.may_shrink:
        return ""
    if spec.copy_nodes == 1:
        return f" (at least {spec.least_nodes})"
    return (
        f" (at least {spec.least_nodes}, and a multiple of {spec.copy_nodes}: a copy of the model "
        f"takes {spec.copy_nodes}, and others are idle)"
    )


def _logs(job: MoETrainingJob, settings: PlanSettings, sent: SentAtBoundaries) -> BoundaryLogs:
    slots = _slots_chosen(job, parity_groups(job), settings.bytes_per_rank or 0)
    best_steps = _interval_steps(job, settings, slots)
    return plan_logs(
        job,
        activation_bytes=sent.activation_bytes,
        micro_batches=sent.micro_batches,
        log_received=sent.log_received,
        interval_steps=job.spec.snapshot.interval.asked_steps(best_steps),
        lag_steps=max(1, ceil(sum(_times(job, settings)) / settings.step_s)),
    )


def _slot_bytes_of(
    job: MoETrainingJob, settings: PlanSettings, model: PlannedModel | None
) -> SlotBytesOf | None:
    """Slots of each rank by number of nodes; None when no sizes are known."""
    if model is not None:
        return slot_bytes_of_model(job, model.sizes)
    if settings.bytes_per_rank is not None:
        return slot_bytes_of_state(job, settings.bytes_per_rank)
    return None


def parity_groups(job: MoETrainingJob) -> tuple[tuple[int, ...], ...]:
    """The parity groups of a job with all its nodes; none without redundancy."""
    if job.spec.redundancy.type is Redundancy.NONE:
        return ()
    domains = dict.fromkeys(range(job.spec.nodes), "")
    redundancy = job.spec.redundancy
    return form_groups(domains, job.group_size, at_least=redundancy.losses + 1).groups


def _node_memory(
    job: MoETrainingJob, groups: tuple[tuple[int, ...], ...], bytes_per_rank: int
) -> tuple[NodeMemory, ...]:
    return _with_slots(job, groups, bytes_per_rank, _slots_chosen(job, groups, bytes_per_rank))


def _slots_chosen(
    job: MoETrainingJob, groups: tuple[tuple[int, ...], ...], bytes_per_rank: int
) -> int:
    nodes_of = partial(_with_slots, job, groups, bytes_per_rank)
    return slots_chosen(job.spec.snapshot.slot_choices, nodes_of, job.memory_per_node_bytes)


def _with_slots(
    job: MoETrainingJob, groups: tuple[tuple[int, ...], ...], bytes_per_rank: int, slots: int
) -> tuple[NodeMemory, ...]:
    redundancy = job.spec.redundancy
    return predict(
        [round_up(bytes_per_rank, PAGE_BYTES)] * job.world_size,
        groups,
        job.spec.nproc_per_node,
        slots=slots,
        redundancy=redundancy.type,
        replicas=max(redundancy.losses, 1),
        mirrored=redundancy.mirror_replicas,
    )


def _memory(job: MoETrainingJob, groups: tuple[tuple[int, ...], ...], bytes_per_rank: int) -> Table:
    nodes = _node_memory(job, groups, bytes_per_rank)
    limit = job.memory_per_node_bytes
    table = Table("members", "arenas", "parity", "total", "", box=None, pad_edge=False)
    by_size: dict[tuple[int, int], list[int]] = {}
    for node in nodes:
        by_size.setdefault((node.arena_bytes, node.parity_bytes), []).append(node.member)
    for (arenas, parity), members in by_size.items():
        names = f"{len(members)} members" if len(members) > 1 else f"member {members[0]}"
        sizes = (format_bytes(n) for n in (arenas, parity, arenas + parity))
        too_much = limit is not None and arenas + parity > limit
        verdict = "" if limit is None else "does not fit" if too_much else "fits"
        table.add_row(names, *sizes, verdict, style="red" if too_much else None)
    if limit is not None:
        table.add_row("limit", "", "", format_bytes(limit))
    return table


def _slots_costs(
    job: MoETrainingJob, groups: tuple[tuple[int, ...], ...], settings: PlanSettings
) -> tuple[SlotsCost, ...]:
    copy_s, protect_s = _times(job, settings)

    def interval_s(slots: int) -> float:
        steps = _interval_steps(job, settings, slots)
        return job.spec.snapshot.interval.asked_steps(steps) * settings.step_s

    return compare_slots(
        partial(_with_slots, job, groups, settings.bytes_per_rank or 0),
        interval_of=interval_s,
        copy_s=copy_s,
        protect_s=protect_s,
    )


def _slots(job: MoETrainingJob, costs: Sequence[SlotsCost], share_bytes: float) -> Table:
    """The cost of each number of slots, on the node that needs most."""
    heads = ("slots", "memory of a node", "x of its share", "between builds", "without weights")
    more = ("x of its share", "a save every", "saves skipped", "")
    table = Table(*heads, *more, box=None, pad_edge=False)
    for cost in costs:
        needed, without = cost.memory.total_bytes, cost.bytes_without_weights
        verdict = _verdict(job.memory_per_node_bytes, needed, without)
        table.add_row(
            str(cost.slots),
            _short(needed),
            f"{needed / share_bytes:.2f}",
            f"{cost.memory.settled_bytes / share_bytes:.2f}",
            _short(without),
            f"{without / share_bytes:.2f}",
            f"{cost.interval_s:.3g} s",
            f"{cost.skipped:.1%}",
            verdict,
            style="red" if verdict.startswith("does not") else None,
        )
    return table


def _verdict(limit_bytes: int | None, needed_bytes: int, without_bytes: int) -> str:
    if limit_bytes is None:
        return ""
    if needed_bytes <= limit_bytes:
        return "fits"
    return "fits without weights" if without_bytes <= limit_bytes else "does not fit"


def _short(nbytes: int) -> str:
    return format_bytes(nbytes).partition(" (")[0]


def _odds(job: MoETrainingJob, settings: PlanSettings, *, with_interval: bool) -> Table:
    table = Table("what", "figure", "from", box=None, pad_edge=False)
    for row in _odds_rows(job, settings):
        table.add_row(*row)
    if with_interval:
        table.add_row(*_interval_row(job, settings))
    if job.spec.may_shrink or job.spec.failure_policy.spares:
        table.add_row(*_launcher_row())
    return table


def _odds_rows(job: MoETrainingJob, settings: PlanSettings) -> Iterator[tuple[str, str, str]]:
    nodes = job.spec.nodes
    lost_per_day = 1 / settings.node_mtbf_days
    rate_per_s = lost_per_day / DAY_S
    yield (
        "nodes lost in the training",
        f"{nodes * lost_per_day * settings.days:.1f}",
        f"{settings.days:g} days, one loss per node in {settings.node_mtbf_days:g} days",
    )
    redundancy = job.spec.redundancy
    code = code_for(redundancy.type, job.group_size, max(redundancy.losses, 1))
    if code is not None:
        model = FailureModel(
            nodes=nodes,
            group_size=job.group_size,
            hardware_rate=lost_per_day,
            software_rate=1 / settings.process_mtbf_days,
            losses=code.rows,
        )
        in_memory = time_to(lambda days: parity_survival(model, days), 0.9)
        more = "" if code.rows == 1 else f" for {code.rows} losses of a group"
        without = time_to(lambda days: checkpoint_survival(model, days), 0.9)
        yield (
            "days until P(state lost) is 10 %, nothing replaced",
            f"{in_memory:.2f}",
            f"REFT eq. 2{more}; {without:.2f} without redundancy (eq. 3)",
        )
        rate = group_loss_rate_per_s(
            rate_per_s, job.group_size, exposure_s=settings.replace_s, losses=code.rows
        )
        lost = -expm1(-rate * nodes / job.group_size * settings.days * DAY_S)
        yield (
            "P(a recovery line is lost in the training)",
            f"{lost:.2e}",
            f"nodes replaced and rebuilt within {settings.replace_s:g} s",
        )


def _times(job: MoETrainingJob, settings: PlanSettings) -> tuple[float, float]:
    """Seconds of a copy and of protection, as far as sizes are known."""
    node_bytes = (settings.bytes_per_rank or 0) * job.spec.nproc_per_node
    snapshot_s = settings.snapshot_s
    if snapshot_s is None:
        snapshot_s = node_bytes / COPY_BYTES_S
    return snapshot_s, node_bytes * job.spec.redundancy.losses / NETWORK_BYTES_S


def _interval_steps(job: MoETrainingJob, settings: PlanSettings, slots: int) -> int:
    """The interval in steps that the comparison of policies yields for Full."""
    copy_s, protect_s = _times(job, settings)
    return snapshot_interval_steps(
        copy_s=copy_s,
        protect_s=protect_s,
        slots=slots,
        step_s=settings.step_s,
        rate_per_s=recoveries_per_s(
            job.spec.nodes,
            node_losses_per_s=1 / (settings.node_mtbf_days * DAY_S),
            process_failures_per_s=1 / (settings.process_mtbf_days * DAY_S),
            redundant=job.spec.redundancy.type is not Redundancy.NONE,
        ),
        asked_steps=job.spec.snapshot.interval.least_steps,
    )


def _interval_row(job: MoETrainingJob, settings: PlanSettings) -> tuple[str, str, str]:
    copy_s, protect_s = _times(job, settings)
    slots = _slots_chosen(job, parity_groups(job), settings.bytes_per_rank or 0)
    return (
        "snapshot interval, steps",
        str(_interval_steps(job, settings, slots)),
        f"REFT eq. 9, for lost nodes and processes; copy {copy_s:.2f} s, protection "
        f"{protect_s:.2f} s, step {settings.step_s:g} s; the job has "
        f"{job.spec.snapshot.interval.steps}",
    )


def _launcher_row() -> tuple[str, str, str]:
    return (
        "memory of a launcher that waits for a world",
        _short(WAITING_LAUNCHER_BYTES),
        "not of this job: measured with torch for CPUs (make bench NAME=launching); beside "
        "memoryPerNode, where a member is to join and on spares of holdfast run",
    )
