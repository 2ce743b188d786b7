"""The cost of each snapshot policy for a job, and a recommendation.

The policies are compared before the job runs: bytes, whether the copy hides behind a step, memory,
and the expected cost of failures in time and tokens. Sparse windows need every step; every other
policy is taken at its own best interval (REFT appendix A, eq. 9), because a policy that does not
hide is not used at every step. `_ROWS` has a method for each policy whose costs follow from a
formula. The cost of another policy that leaves experts out follows from what it chooses.

Failure rates are constant, every failure returns all ranks to a snapshot in memory, and costs that
are equal for all policies (detection, rescheduling, loading) are left out. The formulas are those
of `protection.intervals`, `planner.models.expected_loss`, `protection.budget` and
`snapshots.sharding`; this module puts them together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from holdfast_cli.planner.models.expected_loss import (
    choices_of,
    loss_of_choices,
    routed_tokens,
    selective_loss,
    sequential_loss,
)
from holdfast_cli.planner.models.model_sizes import (
    CapturePlan,
    ModelSizes,
    plan_capture,
    table_of_sizes,
)
from holdfast_cli.planner.models.slots import SlotsCost, compare_slots, slots_chosen
from holdfast_cli.planner.models.sparse_plan import REPEATED_WINDOWS, plan_window
from holdfast_core.errors import InvalidJobError
from holdfast_core.experts.budgeted import Budgets, experts_within, select_local
from holdfast_core.experts.counts import Measures
from holdfast_core.experts.dynamic_k import MLT_LIMIT, PLT_LIMIT, next_k
from holdfast_core.experts.ledger import ExpertLedger
from holdfast_core.experts.pec import select_sequential
from holdfast_core.experts.recompute import GRADIENT_SHARE
from holdfast_core.experts.tables import ExpertTable
from holdfast_core.experts.token_loss import check_limit
from holdfast_core.job.intervals import AUTO
from holdfast_core.job.parsing import MoETrainingJob, PolicyType
from holdfast_core.job.snapshots import (
    Full,
    LossyPolicy,
    PartialExperts,
    Policy,
    Repeats,
    Selective,
    SparseWindows,
)
from holdfast_core.protection.budget import NodeMemory, predict
from holdfast_core.protection.intervals import (
    recoveries_per_s,
    save_overhead_s,
    snapshot_interval_steps,
    total_overhead_s,
)
from holdfast_core.quantities import format_portion
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import PAGE_BYTES, round_up
from holdfast_core.snapshots.membership import Redundancy
from holdfast_core.snapshots.units import UnitKey

NEGLIGIBLE = 0.001
"""Portion of the training's time: policies whose costs differ by less count as equal, and the one
that loses fewer tokens is better."""

SNAPSHOTS_LOOKED_AT = 32
"""Number of consecutive snapshots among which the most loaded rank is sought."""

_TOKENS = 1 << 20
"""Tokens routed in each layer and step: enough that shares of them are distinct."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumptions:
    """Assumptions of the comparison.

    Raises:
        InvalidJobError: when a value is out of range.
    """

    copy_bytes_s: float
    """Rate from the accelerators (or the trainer's memory) of one node into its memory."""
    network_bytes_s: float
    """Rate from one node to others."""
    step_s: float
    """Duration of a step without snapshots, which the copy may hide behind."""
    node_losses_per_s: float
    """Rate at which one node is lost, with its memory."""
    process_failures_per_s: float
    """Rate at which the training processes of one node fail; its memory stays."""
    first_k: int = 1
    """K from which PartialExperts starts."""
    loss_limit: float = PLT_LIMIT
    """Portion of tokens that PartialExperts may lose (PEC §3.1)."""
    selective_loss_limit: float = MLT_LIMIT
    """Portion of tokens that Selective may lose (MoEtion §4.1)."""
    routing_skew: float = 0.0
    """See `planning.expected_loss.popularity`."""

    def loss_limit_of(self, policy: PolicyType) -> float:
        """Portion of tokens that a policy may lose."""
        selective = issubclass(policy.policy, Selective)
        return self.selective_loss_limit if selective else self.loss_limit

    def __post_init__(self) -> None:
        if not min(self.copy_bytes_s, self.network_bytes_s, self.step_s) > 0:
            raise InvalidJobError(
                f"copy_bytes_s={self.copy_bytes_s}, network_bytes_s={self.network_bytes_s}, "
                f"step_s={self.step_s}: no snapshot can be taken without bandwidth and time; "
                f"give values above 0"
            )
        if self.first_k < 1:
            raise InvalidJobError(f"first_k={self.first_k}: capture at least 1 expert of a layer")


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyCost:
    """The cost of one policy."""

    policy: PolicyType
    experts: int
    """Experts in a snapshot, as the policy counts them: of each layer, or of all. Steps of a
    window, where a snapshot is spread over one."""
    settings: Mapping[str, object]
    """Settings by which a job asks for it, beside those that have their defaults."""
    grows: bool = False
    """Whether the next row is the same policy with twice as many experts, to which it grows."""
    window_steps: int = 0
    """Steps of a window; 0 where a snapshot is of one step."""
    repeats: Repeats = Repeats.TRAINING
    """Part of a window that a recovery repeats."""
    rank_bytes: int
    """Bytes that the most loaded rank captures."""
    job_bytes: int
    """Bytes that all ranks capture together, without duplicates."""
    memory_bytes: int
    """Memory of the node that needs most: arenas and parity, with the job's redundancy and the
    slots that its limit allows, and gradients if the job recomputes replicas."""
    slots: tuple[SlotsCost, ...]
    """Cost of each number of slots, without gradients."""
    copy_s: float
    """Time of the copy on the most loaded node, all its ranks together."""
    stall_s: float
    """Delay of training by one snapshot: 0 when its copy hides behind a step."""
    network_bytes: int
    """Bytes that all nodes together send to protect one snapshot; 0 without redundancy."""
    recomputed_bytes: int
    """`network_bytes` if the previous snapshot held the same experts and replicas are computed
    from their gradients (MoEtion §5.2). Equal if no expert is left out, or there are no
    replicas."""
    gradient_bytes: int
    """Additional memory for gradients on the node that needs most; 0 where there are none."""
    protect_s: float
    """Time that the most loaded node's bytes take on the network; 0 without redundancy."""
    interval_steps: int
    """Steps from snapshot to snapshot."""
    lost_steps: float
    """Steps done again after one failure, on average."""
    stalled: float
    """Portion of the training's time that snapshots add."""
    redone: float
    """Portion of the training's time that is done again."""
    lost_tokens: float
    """Portion of all routed tokens whose expert updates recoveries lose (PLT, PEC eq. 4)."""
    objection: str
    """Reason not to use the policy; empty when it may be used."""

    @property
    def overhead(self) -> float:
        """Portion of the training's time that is lost."""
        return self.stalled + self.redone


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All policies side by side."""

    costs: tuple[PolicyCost, ...]
    fitting: tuple[PolicyCost, ...]
    """Policies whose memory is within the job's `memoryPerNode`."""
    best: PolicyCost
    """Best of the policies that fit, or of all when none does."""
    reason: str
    """Reason for the choice, in a sentence."""


def compare_policies(
    job: MoETrainingJob,
    sizes: ModelSizes,
    groups: Sequence[Sequence[int]],
    assumed: Assumptions,
) -> Comparison:
    """The cost of each policy, and a recommendation.

    Policies that leave no expert out come first, and before all others the one that captures every
    unit. A policy may have several rows, or none if it is of no use for the job.

    Args:
        groups: the job's parity groups; none without redundancy.

    Raises:
        InvalidJobError: when the model has no experts.
    """
    table = table_of_sizes(sizes, job.topology())
    if not table.experts:
        raise InvalidJobError("the model has no experts to leave out; every snapshot is full")
    world = _World(job, table, groups, assumed)
    kinds = sorted(PolicyType, key=lambda kind: kind.policy.leaves_experts_out)
    costs = tuple(cost for kind in kinds for cost in _rows(world, kind))
    limit = job.memory_per_node_bytes
    fitting = tuple(cost for cost in costs if limit is None or cost.memory_bytes <= limit)
    best = best_of(fitting or costs, lambda cost: cost.overhead)
    reason = reason_of(costs, best, assumed)
    return Comparison(costs=costs, fitting=fitting, best=best, reason=reason)


class _World:
    """The job, its model, and the assumptions about both."""

    def __init__(
        self,
        job: MoETrainingJob,
        table: ExpertTable,
        groups: Sequence[Sequence[int]],
        assumed: Assumptions,
    ) -> None:
        self._job, self._table, self._groups, self._assumed = job, table, groups, assumed
        self._redundant = job.spec.redundancy.type is not Redundancy.NONE
        self._replicates = job.spec.redundancy.type is Redundancy.REPLICATION
        self._recomputes = job.spec.snapshot.policy.chosen.recompute
        topology = job.topology()
        self._whole = plan_capture(table, topology, partial=False)
        self._apart = plan_capture(table, topology, partial=True)

    def full(self, kind: PolicyType) -> list[PolicyCost]:
        """The cost of capturing every unit."""
        units = self._table.units
        return [self._cost(kind, len(self._table.experts), self._whole, [units], 0.0, {})]

    def windows(self, kind: PolicyType) -> list[PolicyCost]:
        """The cost of windows, for each of what a recovery may repeat. Without what the job would
        be refused with: windows with saves further apart than a step, or windows that repeat
        training in a job that may go on with fewer nodes, or with experts in seats."""
        if self._job.spec.snapshot.interval.steps != 1:
            return []
        spec = self._job.spec
        other_ranks = spec.may_shrink or spec.elastic is not None
        possible = (Repeats.OPTIMIZER,) if other_ranks else tuple(Repeats)
        return [cost for repeats in possible for cost in self._window(kind, repeats)]

    def _window(self, kind: PolicyType, repeats: Repeats) -> list[PolicyCost]:
        """The cost of windows as long as the budgets of a step require; none if one step is
        enough. Gradients have as many bytes as weights, so saves cost the same whether a recovery
        repeats training or only the optimizer."""
        assumed, spec = self._assumed, self._job.spec
        losses, asked = spec.redundancy.losses, spec.snapshot.policy.chosen
        adapts_to = asked.window_steps if asked.adapts else 0
        rates = [assumed.copy_bytes_s, *([assumed.network_bytes_s / losses] if losses else [])]
        plan = plan_window(self._table, min(rates) * assumed.step_s * spec.nodes, adapts_to)
        if plan.window == 1:
            return []
        # Each save is divided between ranks as a full snapshot is.
        whole = self._whole.loads(self._table.units)
        whole_bytes = self._table.snapshot_bytes(self._table.units)
        share = plan.save_bytes / whole_bytes
        node_bytes = max(self._by_node(whole))
        copy_s = node_bytes * share / assumed.copy_bytes_s
        of_window, of_slot = (one / whole_bytes for one in (plan.window_bytes, plan.slot_bytes))
        protect_s = node_bytes * of_window / plan.window * losses / assumed.network_bytes_s
        stall_s = save_overhead_s(copy_s, assumed.step_s)
        # A recovery repeats windows, and the steps until the newest one was protected.
        rate_per_s = recoveries_per_s(
            spec.nodes,
            node_losses_per_s=assumed.node_losses_per_s,
            process_failures_per_s=assumed.process_failures_per_s,
            redundant=self._redundant,
        )
        windows = REPEATED_WINDOWS - (repeats is Repeats.OPTIMIZER)
        lost_steps = windows * plan.window + protect_s * plan.window / assumed.step_s
        nodes_of = partial(self._nodes, self._whole, scale=of_slot)
        cost = PolicyCost(
            policy=kind,
            experts=plan.window,
            settings=(
                {"window": AUTO, "maxWindow": adapts_to} if adapts_to else {"window": plan.window}
            )
            | ({} if repeats is Repeats.TRAINING else {"repeats": repeats.value}),
            window_steps=plan.window,
            repeats=repeats,
            rank_bytes=round(max(whole) * share),
            job_bytes=plan.save_bytes,
            memory_bytes=max(
                node.total_bytes for node in nodes_of(self._slots_chosen(self._whole, of_slot))
            ),
            slots=compare_slots(
                nodes_of,
                interval_of=lambda _: plan.window * assumed.step_s,
                copy_s=copy_s,
                protect_s=protect_s * plan.window,
                without_weights=True,
            ),
            network_bytes=plan.window_bytes // plan.window * losses,
            recomputed_bytes=plan.window_bytes // plan.window * losses,
            gradient_bytes=0,
            copy_s=copy_s,
            stall_s=stall_s,
            protect_s=protect_s,
            interval_steps=1,
            lost_steps=lost_steps,
            stalled=stall_s / assumed.step_s,
            redone=rate_per_s * lost_steps * assumed.step_s,
            lost_tokens=0.0,
            objection="",
        )
        return [cost]

    def partial(self, kind: PolicyType) -> list[PolicyCost]:
        """The cost of capturing K experts of each layer in turn, for each K that Dynamic-K would go
        through (PEC §3.1): the first one, doubled as long as experts are left out."""
        most = self._table.experts_max
        ks = [min(self._assumed.first_k, most)]
        while 2 * ks[-1] < most:
            ks.append(2 * ks[-1])
        costs = []
        for k in ks:
            numbers = range(min(-(-most // k), SNAPSHOTS_LOOKED_AT))
            chosen = [select_sequential(self._table, k, number).units for number in numbers]
            loss = sequential_loss(self._table, k)
            asked = {"expertsPerLayer": k}
            costs.append(self._cost(kind, k, self._apart, chosen, loss, asked, grows=True))
        return costs

    def lossy(self, kind: PolicyType) -> list[PolicyCost]:
        """The cost of a policy by what it chooses in consecutive snapshots, with the settings that
        the job gives it."""
        assumed, table = self._assumed, self._table
        asked = self._job.spec.snapshot.policy.chosen
        policy = asked if isinstance(asked, kind.policy) else kind.policy()
        assert isinstance(policy, LossyPolicy)
        ranks = self._job.world_size
        per_rank = self._job.spec.nproc_per_node
        measures = Measures(
            host_bytes_s=int(assumed.copy_bytes_s / per_rank),
            network_bytes_s=int(assumed.network_bytes_s / per_rank) if self._redundant else 0,
            step_us=max(1, round(assumed.step_s * 1e6)),
        )
        routed = routed_tokens(table, assumed.routing_skew, _TOKENS)
        chosen = choices_of(policy, table, routed, measures, ranks, SNAPSHOTS_LOOKED_AT)
        loss = loss_of_choices(table, chosen, assumed.routing_skew)
        most = max(len(units) for units in chosen)
        experts, _ = policy.shown_k(policy.first_k, most, table.units)
        settings = settings_given(policy)
        return [self._cost(kind, experts, self._apart, chosen, loss, settings)]

    def selective(self, kind: PolicyType) -> list[PolicyCost]:
        """The cost of capturing as many experts as the budgets of a step hold (MoEtion §4.2). The
        network's budget counts only with redundancy, because a snapshot here is protected as a
        whole."""
        assumed = self._assumed
        budgets = Budgets.of(
            host_bytes_s=assumed.copy_bytes_s,
            network_bytes_s=assumed.network_bytes_s,
            step_s=assumed.step_s,
            links=self._job.spec.nodes,
        )
        within = [budgets.local_bytes, *([budgets.remote_bytes] if self._redundant else [])]
        dense = self._table.dense_bytes
        total = experts_within(self._table, min(within), reserved_bytes=dense).experts
        loss = selective_loss(self._table, total, assumed.routing_skew)
        chosen = self._selections(total)
        return [self._cost(kind, total, self._apart, chosen, loss, {"experts": total})]

    def _selections(self, total: int) -> list[tuple[UnitKey, ...]]:
        """Selections of algorithm 1 of MoEtion in consecutive snapshots after a full one."""
        table = self._table
        if total >= len(table.experts):
            return [table.units]
        routed = routed_tokens(table, self._assumed.routing_skew, _TOKENS)
        ledger = ExpertLedger.start(table.units).captured(Generation(0, 0), table.units)
        chosen = []
        for step in range(1, min(-(-len(table.experts) // total), SNAPSHOTS_LOOKED_AT) + 1):
            ledger = ledger.routed(routed)
            chosen.append(select_local(table, ledger, total).units)
            ledger = ledger.captured(Generation(0, step), chosen[-1]).pruned({})
        return chosen

    def _cost(
        self,
        policy: PolicyType,
        experts: int,
        plan: CapturePlan,
        selections: Sequence[Sequence[UnitKey]],
        loss: float,
        settings: Mapping[str, object],
        *,
        grows: bool = False,
    ) -> PolicyCost:
        """The cost of capturing `selections` in turn.

        Args:
            loss: loss of a recovery, in snapshots' worth of tokens.
        """
        assumed, nodes = self._assumed, self._job.spec.nodes
        by_rank = [plan.loads(units) for units in selections]
        node_bytes = max(load for loads in by_rank for load in self._by_node(loads))
        copy_s = node_bytes / assumed.copy_bytes_s
        # For each loss that is to be survived, a node sends as many bytes as it captured.
        protect_s = node_bytes * self._job.spec.redundancy.losses / assumed.network_bytes_s
        stall_s = save_overhead_s(copy_s, assumed.step_s)
        # The best interval at the rate of recoveries, for the slots that fit.
        losses_per_s = assumed.node_losses_per_s if self._redundant else 0.0
        rate_per_s = recoveries_per_s(
            nodes,
            node_losses_per_s=assumed.node_losses_per_s,
            process_failures_per_s=assumed.process_failures_per_s,
            redundant=self._redundant,
        )
        steps_of = partial(
            self._interval_steps, copy_s=copy_s, protect_s=protect_s, rate_per_s=rate_per_s
        )
        steps = steps_of(self._slots_chosen(plan))
        interval_s = steps * assumed.step_s
        # A snapshot is usable once its copy has ended; after a lost node, once it is protected.
        late_s = copy_s + protect_s * nodes * losses_per_s / rate_per_s
        redone = total_overhead_s(
            save_overhead_s=0.0,
            interval_s=interval_s,
            total_s=1.0,
            failure_rate_per_s=rate_per_s,
            restart_s=late_s,
        )
        lost_tokens = min(1.0, rate_per_s * interval_s * loss)
        job_bytes = max(self._table.snapshot_bytes(units) for units in selections)
        recomputed_bytes, gradient_bytes = self._gradients(policy, plan, job_bytes)
        return PolicyCost(
            policy=policy,
            experts=experts,
            settings=settings,
            grows=grows,
            rank_bytes=max(max(loads) for loads in by_rank),
            job_bytes=job_bytes,
            memory_bytes=self._memory_bytes(plan) + self._recomputes * gradient_bytes,
            slots=self._slots(plan, steps_of, copy_s, protect_s),
            network_bytes=job_bytes * self._job.spec.redundancy.losses,
            recomputed_bytes=recomputed_bytes,
            gradient_bytes=gradient_bytes,
            copy_s=copy_s,
            stall_s=stall_s,
            protect_s=protect_s,
            interval_steps=steps,
            lost_steps=redone / rate_per_s / assumed.step_s,
            stalled=stall_s / interval_s,  # the first term of REFT eq. 4
            redone=redone,
            lost_tokens=lost_tokens,
            objection=self._objection(policy, experts, lost_tokens, grows=grows),
        )

    def _gradients(self, policy: PolicyType, plan: CapturePlan, job_bytes: int) -> tuple[int, int]:
        """`PolicyCost.recomputed_bytes` and `gradient_bytes` of snapshots of `job_bytes`."""
        losses = self._job.spec.redundancy.losses
        if not policy.policy.leaves_experts_out or not self._replicates:
            return job_bytes * losses, 0
        dense_bytes = self._table.dense_bytes
        carried = dense_bytes + int((job_bytes - dense_bytes) * GRADIENT_SHARE)
        more = self._memory_bytes(plan, gradients=True) - self._memory_bytes(plan)
        return carried * losses, more

    def _by_node(self, loads: Sequence[int]) -> list[int]:
        ranks = self._job.spec.nproc_per_node
        return [sum(loads[at : at + ranks]) for at in range(0, len(loads), ranks)]

    def _interval_steps(
        self, slots: int, *, copy_s: float, protect_s: float, rate_per_s: float
    ) -> int:
        return snapshot_interval_steps(
            copy_s=copy_s,
            protect_s=protect_s,
            slots=slots,
            step_s=self._assumed.step_s,
            rate_per_s=rate_per_s,
            asked_steps=self._job.spec.snapshot.interval.least_steps,
        )

    def _slots(
        self,
        plan: CapturePlan,
        steps_of: Callable[[int], int],
        copy_s: float,
        protect_s: float,
    ) -> tuple[SlotsCost, ...]:
        asked_steps = self._job.spec.snapshot.interval.asked_steps
        return compare_slots(
            partial(self._nodes, plan),
            interval_of=lambda slots: asked_steps(steps_of(slots)) * self._assumed.step_s,
            copy_s=copy_s,
            protect_s=protect_s,
        )

    def _slots_chosen(self, plan: CapturePlan, scale: float = 1.0) -> int:
        return slots_chosen(
            self._job.spec.snapshot.slot_choices,
            partial(self._nodes, plan, scale=scale),
            self._job.memory_per_node_bytes,
        )

    def _memory_bytes(self, plan: CapturePlan, *, gradients: bool = False) -> int:
        slots = self._slots_chosen(plan)
        return max(node.total_bytes for node in self._nodes(plan, slots, gradients=gradients))

    def _nodes(
        self, plan: CapturePlan, slots: int, *, gradients: bool = False, scale: float = 1.0
    ) -> tuple[NodeMemory, ...]:
        loads = [round(load * scale) for load in plan.loads(self._table.units)]
        if gradients:
            always = plan.loads(())
            loads = [
                load + int((load - rest) * GRADIENT_SHARE)
                for load, rest in zip(loads, always, strict=True)
            ]
        return predict(
            [round_up(load, PAGE_BYTES) for load in loads],
            self._groups,
            self._job.spec.nproc_per_node,
            slots=slots,
            redundancy=self._job.spec.redundancy.type,
            replicas=max(self._job.spec.redundancy.losses, 1),
            mirrored=self._job.spec.redundancy.mirror_replicas,
        )

    def _objection(self, policy: PolicyType, experts: int, lost: float, *, grows: bool) -> str:
        if grows:
            grown = next_k(
                experts,
                first_k=experts,
                experts_max=self._table.experts_max,
                lost_by_k={experts: round(lost * _TOKENS)},
                total_tokens=_TOKENS,
                limit=self._assumed.loss_limit,
            )
            return f"K would grow to {grown.k}" if grown.k > experts else ""
        if policy.policy.leaves_experts_out:
            limit = self._assumed.loss_limit_of(policy)
            passed = check_limit("the expected loss of tokens", lost, limit).passed
            return "S would grow" if passed else ""
        return ""


_ROWS: dict[type[Policy], Callable[[_World, PolicyType], list[PolicyCost]]] = {
    Full: _World.full,
    SparseWindows: _World.windows,
    PartialExperts: _World.partial,
    Selective: _World.selective,
    LossyPolicy: _World.lossy,
}
"""Class of a policy → its rows, and those of policies that are derived from it."""


def _rows(world: _World, kind: PolicyType) -> list[PolicyCost]:
    """The rows of a policy: those of the nearest class that it is derived from."""
    rows = next((_ROWS[each] for each in kind.policy.__mro__ if each in _ROWS), None)
    return [] if rows is None else rows(world, kind)


def settings_given(policy: Policy) -> dict[str, object]:
    """Settings of a policy that differ from their defaults, as a job document has them."""
    given: dict[str, object] = msgspec.to_builtins(policy)
    default = msgspec.to_builtins(type(policy)())
    return {name: value for name, value in given.items() if value != default[name]}


def best_of(costs: Sequence[PolicyCost], lost: Callable[[PolicyCost], float]) -> PolicyCost:
    """The policy that loses the fewest tokens among those that cost (almost) the least time. Of
    equal policies it is the one whose recoveries repeat no past steps, and then the one with the
    fewest bytes.

    Args:
        lost: gives the portion of the training's time that a policy loses.
    """
    allowed = [cost for cost in costs if not cost.objection] or costs
    least = min(lost(cost) for cost in allowed)
    close = [cost for cost in allowed if lost(cost) <= least + NEGLIGIBLE]
    # The policy that captures every unit comes first, so it wins ties.
    return min(
        close,
        key=lambda c: (
            c.lost_tokens,
            c.window_steps > 0,
            c.window_steps > 0 and c.repeats is Repeats.TRAINING,
            c.job_bytes,
        ),
    )


def reason_of(costs: Sequence[PolicyCost], best: PolicyCost, assumed: Assumptions) -> str:
    """The reason for the choice, in a sentence."""
    full, step = costs[0], f"a step of {_seconds(assumed.step_s)}"
    if best is full:
        if not full.stall_s:
            return (
                f"its copy of {_seconds(full.copy_s)} hides behind {step} and no recovery loses a "
                f"token; leaving experts out would save less than {NEGLIGIBLE:.1%} of the time"
            )
        return (
            f"its copy of {_seconds(full.copy_s)} does not hide behind {step}, but every "
            f"{full.interval_steps} steps it costs {format_portion(full.overhead)} of the time and "
            f"no tokens, and no other policy that may be used saves {NEGLIGIBLE:.1%} or more"
        )
    if full.stall_s:
        hides = "comes closer to hiding" if best.stall_s else "hides"
        what = f"copy of {_seconds(best.copy_s)} {hides} behind {step} where Full's takes"
        of_full = full.copy_s
    else:
        what = f"protection takes {_seconds(best.protect_s)} on the network where Full's takes"
        of_full = full.protect_s
    reason = (
        f"its {what} {_seconds(of_full)}, which lowers the time lost from "
        f"{format_portion(full.overhead)} to {format_portion(best.overhead)}, for "
        f"{format_portion(best.lost_tokens)} of all routed tokens"
    )
    if best.window_steps:
        reason += (
            "; only for training whose steps have the same bits when they are repeated"
            if best.repeats is Repeats.TRAINING
            else "; only where nothing but the optimizer's step changes parameters"
        )
    return reason


def _seconds(value: float) -> str:
    return f"{float(f'{value:.2g}'):g} s"
