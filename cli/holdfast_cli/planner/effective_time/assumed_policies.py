"""The policies that a simulation compares, derived from the sizes of a model and the rates of a
cluster.

It assumes that state is spread evenly over the nodes, that the experts of a layer are equally
large, and that layers route alike; experts are equally popular unless `popularity` is given.
`planner.models.policy_comparison` knows a job's layout rank by rank; here a job may have any number
of GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from math import ceil

from holdfast_cli.planner.effective_time.policy_models import (
    AfterLoss,
    Cluster,
    Level,
    PolicyModel,
    Workload,
    checkfreq_interval_steps,
    oracle_interval_steps,
)
from holdfast_cli.planner.effective_time.skew import frozen_portion, lost_by_load, lost_in_turn
from holdfast_cli.planner.models.seated_experts import Survives
from holdfast_cli.planner.models.slots import WITHOUT_WEIGHTS
from holdfast_core.errors import InvalidJobError
from holdfast_core.experts.dynamic_k import PLT_LIMIT
from holdfast_core.protection.intervals import interval_steps, least_interval_s, save_overhead_s
from holdfast_core.snapshots.layouts import SLOTS_MAX

WINDOW_MAX = 16
"""Longest window: recovery grows with it."""


class PolicyKind(StrEnum):
    """A policy to simulate."""

    FULL = "full"
    PARTIAL = "partial"
    SELECTIVE = "selective"
    FEWER = "fewer"
    STAGES = "stages"
    ELASTIC = "elastic"
    CHECKFREQ = "checkfreq"
    GEMINI = "gemini"
    SPARSE = "sparse"
    SPARSE_GLOBAL = "sparse-global"
    SPARSE_GRADS = "sparse-grads"
    FEWER_GRADS = "fewer-grads"


MEANINGS = {
    PolicyKind.FULL: "Full, at the interval that costs least (REFT eq. 9; steps: auto)",
    PolicyKind.PARTIAL: "PartialExperts, K doubles from 1 on when too many tokens are lost (PEC)",
    PolicyKind.SELECTIVE: "Selective, as many experts as a step hides (MoEtion)",
    PolicyKind.FEWER: "Full, and with minNodes: the job goes on with fewer nodes",
    PolicyKind.STAGES: "Full, and only failed stages do steps again, from logs (elastic.Pipeline)",
    PolicyKind.ELASTIC: "Full, and goes on with fewer nodes from copies that live (holdfast.moe)",
    PolicyKind.CHECKFREQ: "Full to storage, the least interval that adds at most 3 % (CheckFreq)",
    PolicyKind.GEMINI: "Full in memory, at the best interval for each MTBF (Gemini's oracle)",
    PolicyKind.SPARSE: "windows of W steps, only failed stages replay (elastic.Pipeline)",
    PolicyKind.SPARSE_GLOBAL: "windows of W steps, all ranks go back (Sparse)",
    PolicyKind.SPARSE_GRADS: "windows of W steps, optimizers catch up (Sparse, repeats: Optimizer)",
    PolicyKind.FEWER_GRADS: "the same, and with minNodes: the job goes on with fewer nodes",
}

NOT_BUILT = frozenset({PolicyKind.CHECKFREQ, PolicyKind.GEMINI})
"""What no job can ask for in this version: shown for comparison, never recommended."""

OF_SCRIPTS = frozenset({PolicyKind.STAGES, PolicyKind.SPARSE, PolicyKind.ELASTIC})
"""What the training script decides, not the job: shown for comparison, never recommended."""

SHRINKING = frozenset({PolicyKind.FEWER, PolicyKind.FEWER_GRADS})
"""What takes a job with `minNodes` below `nodes`."""


SEATED = frozenset(
    {PolicyKind.PARTIAL, PolicyKind.SELECTIVE, PolicyKind.ELASTIC, PolicyKind.SPARSE_GRADS}
)
"""What jobs whose experts are in seats can ask for: all of these continue from copies that live."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AssumedCosts:
    """Sizes and rates from which the policies are derived.

    Raises:
        InvalidJobError: when a value is out of range.
    """

    expert_bytes: int
    """Training state of all experts of all layers."""
    other_bytes: int
    """Training state of everything else."""
    experts_per_layer: int
    moe_layers: int
    copy_bytes_s: float
    """Rate from the accelerators of one node into its memory."""
    network_bytes_s: float
    """Rate from one node to others."""
    storage_bytes_s: float
    """Rate from one node to storage and back."""
    losses: int = 1
    """Losses that redundancy covers: a node sends as many bytes as it captured for each."""
    group_nodes: int = 0
    """Nodes of a protection group; 0: enough nodes for the snapshots in memory are always left."""
    stored_every_s: float = 0.0
    """Time between copies in storage; 0: there are none."""
    interval_steps: int = 0
    """Steps from snapshot to snapshot that the job asks for; 0: as many as cost least."""
    window_steps: int = 0
    """Steps of a window that the job asks for; 0: the least whose saves a step hides."""
    window_max: int = WINDOW_MAX
    """Most steps of a window that is as long as a step requires."""
    first_experts: int = 1
    """First K of experts that take turns."""
    slower: float = 0.0
    """Portion by which a step is longer that a snapshot is taken in, even where its copy hides."""
    loss_limit: float = PLT_LIMIT
    """Portion of tokens that policies which leave experts out may lose."""
    popularity: tuple[float, ...] = ()
    """Portions of a layer's tokens that its experts get; empty: equal ones."""
    survives: Survives | None = None
    """Probability that experts in seats live on; None: the job has no seats."""
    seated_on: int = 1
    """The fewest nodes whose seats hold all experts of a layer."""
    frozen_saves: float = 0.0
    """Portion of a step that the repetition of a window saves for a frozen expert: MoEvement's
    third (§3.5), or 0 where their gradients are computed and dropped."""

    def __post_init__(self) -> None:
        sizes = min(self.expert_bytes, self.other_bytes, self.slower, self.losses)
        rates = min(self.copy_bytes_s, self.network_bytes_s, self.storage_bytes_s)
        if sizes < 0 or not rates > 0 or min(self.experts_per_layer, self.moe_layers) < 1:
            raise InvalidJobError(
                f"{self}: give sizes of at least 0, rates above 0, and at least one expert"
            )
        if self.popularity and len(self.popularity) != self.experts_per_layer:
            raise InvalidJobError(
                f"popularity of {len(self.popularity)} experts: a layer has "
                f"{self.experts_per_layer}"
            )

    @property
    def portions(self) -> tuple[float, ...]:
        """Portions of tokens of all experts of a layer."""
        return self.popularity or (1 / self.experts_per_layer,) * self.experts_per_layer

    @property
    def state_bytes(self) -> int:
        """Training state of the whole job, in one copy."""
        return self.expert_bytes + self.other_bytes


def policy_models(
    costs: AssumedCosts, workload: Workload, cluster: Cluster, mtbf_s: float
) -> dict[PolicyKind, PolicyModel]:
    """Every policy at this MTBF, in the order of `PolicyKind`."""
    makers: dict[PolicyKind, Callable[[], PolicyModel]] = {}
    maker = _Maker(costs, workload, cluster, mtbf_s)
    makers[PolicyKind.FULL] = partial(maker.full, PolicyKind.FULL)
    first_k = costs.first_experts
    makers[PolicyKind.PARTIAL] = partial(maker.some_experts, PolicyKind.PARTIAL, first_k, 0)
    makers[PolicyKind.SELECTIVE] = maker.selective
    makers[PolicyKind.FEWER] = partial(maker.full, PolicyKind.FEWER, after_loss=AfterLoss.FEWER)
    makers[PolicyKind.STAGES] = maker.stages
    makers[PolicyKind.ELASTIC] = partial(maker.full, PolicyKind.ELASTIC, after_loss=AfterLoss.LIVE)
    makers[PolicyKind.CHECKFREQ] = maker.checkfreq
    makers[PolicyKind.GEMINI] = maker.gemini
    makers[PolicyKind.SPARSE] = partial(maker.sparse, PolicyKind.SPARSE, by_stage=True)
    makers[PolicyKind.SPARSE_GLOBAL] = partial(
        maker.sparse, PolicyKind.SPARSE_GLOBAL, by_stage=False
    )
    makers[PolicyKind.SPARSE_GRADS] = maker.gradients
    makers[PolicyKind.FEWER_GRADS] = maker.gradients_of_fewer
    models = {
        kind: replace(
            makers[kind](),
            built=kind not in NOT_BUILT,
            of_script=kind in OF_SCRIPTS,
            name=kind.value,
        )
        for kind in PolicyKind
    }
    if costs.survives is None:
        return models
    # Any line is restored as by another world.
    catch_up_s = models[PolicyKind.FEWER_GRADS].catch_up_s
    models[PolicyKind.SPARSE_GRADS] = replace(
        models[PolicyKind.SPARSE_GRADS], catch_up_s=catch_up_s
    )
    in_seats = {
        kind: replace(
            models[kind], after_loss=AfterLoss.LIVE, survives=costs.survives, of_script=False
        )
        for kind in SEATED
    }
    return models | in_seats


class _Maker:
    """Derives policies from costs."""

    def __init__(
        self, costs: AssumedCosts, workload: Workload, cluster: Cluster, mtbf_s: float
    ) -> None:
        self._costs, self._step_s = costs, workload.step_s
        self._cluster, self._mtbf_s = cluster, mtbf_s

    def _times(self, nbytes: float) -> tuple[float, float]:
        """Times to copy and to protect `nbytes` of state, on one node."""
        share = nbytes / self._cluster.nodes
        costs = self._costs
        return share / costs.copy_bytes_s, share * costs.losses / costs.network_bytes_s

    def _stall_s(self, nbytes: float) -> float:
        """Time that one snapshot adds to training."""
        copy_s, _ = self._times(nbytes)
        return save_overhead_s(copy_s, self._step_s) + self._costs.slower * self._step_s

    def _level(
        self,
        nbytes: float,
        steps: int,
        *,
        experts: int,
        lost: float = 0.0,
        losses: tuple[float, ...] = (),
    ) -> Level:
        """Snapshots of `nbytes`, every `steps` steps."""
        return Level(
            experts=experts,
            interval_steps=steps,
            stall_s=self._stall_s(nbytes),
            lost_tokens=lost,
            losses=losses,
            usable_after_s=self._usable_after_s(nbytes),
        )

    def _usable_after_s(self, nbytes: float) -> float:
        copy_s, protect_s = self._times(nbytes)
        return copy_s + protect_s * self._cluster.node_losses

    def _interval(self, nbytes: float) -> int:
        """The interval that the job asks for, where protection can follow; else the best one, as
        jobs with `steps: auto` derive it from their measurements."""
        copy_s, protect_s = self._times(nbytes)
        least_s = least_interval_s(copy_s=copy_s, protect_s=protect_s, slots=SLOTS_MAX)
        if asked := self._costs.interval_steps:
            # A save that finds no slot is skipped, and the next one asked for is taken.
            return asked * max(1, ceil(least_s / (asked * self._step_s)))
        return interval_steps(
            overhead_s=self._stall_s(nbytes),
            least_s=least_s,
            step_s=self._step_s,
            rate_per_s=1 / self._mtbf_s,
        )

    def full(self, kind: PolicyKind, *, after_loss: AfterLoss = AfterLoss.FIXED) -> PolicyModel:
        nbytes, experts = self._costs.state_bytes, self._costs.experts_per_layer
        level = self._level(nbytes, self._interval(nbytes), experts=experts)
        return self._model(kind, (level,), after_loss=after_loss)

    def stages(self) -> PolicyModel:
        return replace(self.full(PolicyKind.STAGES), by_stage=True)

    def _model(
        self,
        kind: PolicyKind,
        levels: tuple[Level, ...],
        *,
        after_loss: AfterLoss = AfterLoss.FIXED,
    ) -> PolicyModel:
        costs = self._costs
        stored = costs.stored_every_s
        return PolicyModel(
            name=kind,
            levels=levels,
            loss_limit=costs.loss_limit,
            after_loss=after_loss,
            covers=costs.losses if costs.group_nodes else None,
            group_nodes=max(1, costs.group_nodes),
            stored_every_steps=max(1, round(stored / self._step_s)) if stored else 0,
            stored_load_s=self._stored_s(costs.state_bytes),
        )

    def _stored_s(self, nbytes: float) -> float:
        """Time in which the nodes together write `nbytes` to storage, or load them."""
        return nbytes / self._cluster.nodes / self._costs.storage_bytes_s

    def some_experts(
        self, kind: PolicyKind, first: int, reserved: int, *, by_load: bool = False
    ) -> PolicyModel:
        """Snapshots of K experts of each layer, K = `first` and its doubles.

        Args:
            by_load: whether those with the most unsaved tokens are captured; otherwise they take
                turns.
            reserved: experts of the whole model that were asked for; 0: `first` of each layer.
        """
        costs = self._costs
        most = costs.experts_per_layer
        levels, k = [], min(first, most)
        while True:
            share = k / most if not reserved or k > first else reserved / (most * costs.moe_layers)
            nbytes = costs.other_bytes + costs.expert_bytes * min(share, 1.0)
            steps = self._interval(nbytes)
            # Experts that take turns lack (E / K - 1) / 2 snapshots on average (PEC eq. 4).
            lost = steps * (1 / share - 1) / 2 if share < 1 else 0.0
            losses: tuple[float, ...] = ()
            if costs.popularity and share < 1:
                if by_load:
                    lost = steps * lost_by_load(costs.popularity, share * most)
                else:
                    losses = tuple(steps * each for each in lost_in_turn(costs.popularity, k))
            levels.append(self._level(nbytes, steps, experts=k, lost=lost, losses=losses))
            if k >= most:
                break
            k = min(2 * k, most)
        return self._model(kind, tuple(levels))

    def selective(self) -> PolicyModel:
        costs, nodes = self._costs, self._cluster.nodes
        rate = costs.copy_bytes_s
        if costs.losses:
            rate = min(rate, costs.network_bytes_s / costs.losses)
        room = max(0.0, rate * self._step_s * nodes - costs.other_bytes)
        share = min(1.0, room / costs.expert_bytes) if costs.expert_bytes else 1.0
        total = max(1, int(share * costs.experts_per_layer * costs.moe_layers))
        first = max(1, ceil(total / costs.moe_layers))
        return self.some_experts(PolicyKind.SELECTIVE, first, total, by_load=True)

    def checkfreq(self) -> PolicyModel:
        costs = self._costs
        nbytes = costs.state_bytes
        stall_s = self._stall_s(nbytes)
        stored_s = self._stored_s(nbytes)
        steps = max(checkfreq_interval_steps(stall_s, self._step_s), ceil(stored_s / self._step_s))
        level = self._level(nbytes, steps, experts=costs.experts_per_layer)
        level = replace(level, usable_after_s=stored_s)
        model = self._model(PolicyKind.CHECKFREQ, (level,))
        return replace(model, load_s=stored_s, covers=None)

    def gemini(self) -> PolicyModel:
        costs, cluster = self._costs, self._cluster
        nbytes = costs.state_bytes
        stall_s = self._stall_s(nbytes)
        repair_s = cluster.detect_s + cluster.restart_s
        steps = oracle_interval_steps(stall_s, self._step_s, repair_s, self._mtbf_s)
        least = ceil(max(self._times(nbytes)) / self._step_s)
        level = self._level(nbytes, max(steps, least), experts=costs.experts_per_layer)
        return self._model(PolicyKind.GEMINI, (level,))

    def sparse(self, kind: PolicyKind, *, by_stage: bool) -> PolicyModel:
        costs = self._costs
        window = costs.window_steps or next(
            (w for w in range(1, costs.window_max) if self._fits(w)), costs.window_max
        )
        nbytes = self._slot_bytes(window)
        level = self._level(nbytes, 1, experts=costs.experts_per_layer)
        return replace(
            self._model(kind, (level,)),
            window_steps=window,
            by_stage=by_stage,
            replay_saves=costs.frozen_saves * frozen_portion(costs.portions, window),
        )

    def gradients(self) -> PolicyModel:
        """Windows that hold gradients in place of weights. A restore can use them once the whole
        window is protected, and copies them, those of half the units on average, to the
        accelerators for each step that it repeats: the arithmetic of these steps is short beside
        that."""
        model = self.sparse(PolicyKind.SPARSE_GRADS, by_stage=False)
        [level], window = model.levels, model.window_steps
        copy_s, protect_s = self._times(self._slot_bytes(window))
        usable_after_s = copy_s + protect_s * window * self._cluster.node_losses
        level = replace(level, usable_after_s=usable_after_s)
        return replace(
            model,
            levels=(level,),
            catches_up=True,
            replay_saves=0.0,
            catch_up_s=self._frames_bytes(window) / self._costs.copy_bytes_s,
        )

    def gradients_of_fewer(self) -> PolicyModel:
        """Such windows in a job that goes on with fewer nodes. Another world first gets the
        gradients from the ranks that captured them."""
        model = self.gradients()
        fetch_s = self._frames_bytes(model.window_steps) / self._costs.network_bytes_s
        return replace(model, after_loss=AfterLoss.FEWER, catch_up_s=model.catch_up_s + fetch_s)

    def _frames_bytes(self, window: int) -> float:
        """Gradients of a node that a recovery from such a window uses, on average."""
        of_job = self._costs.state_bytes * (1 - WITHOUT_WEIGHTS) * (window - 1) / 2
        return of_job / self._cluster.nodes

    def _slot_bytes(self, window: int) -> float:
        """The largest save of a window: a part of the full state, and the compute weights of all
        units whose turn comes later (MoEvement §3.2), or the gradients of those before."""
        state = self._costs.state_bytes
        weights = 1 - WITHOUT_WEIGHTS
        return state * (WITHOUT_WEIGHTS / window + weights * (window - 1) / window)

    def _fits(self, window: int) -> bool:
        return max(self._times(self._slot_bytes(window))) <= self._step_s
