"""Model of a job, its cluster and its policy for simulations, and the closed form.

The effective training time ratio (ETTR) is the portion of the wall clock in which a job does work
that counts (MoEvement §2.4): it neither waits for snapshots, nor finds and repairs a failure, nor
repeats lost work. Work is counted in steps at full strength, so that a job that goes on with fewer
nodes is charged for the missing ones.

Times are in seconds, losses of tokens in steps' worth of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from holdfast_cli.planner.models.seated_experts import Survives, two_copies
from holdfast_core.errors import InvalidJobError


class AfterLoss(StrEnum):
    """Reaction of a job to the loss of a node."""

    FIXED = "waits for a node"
    FEWER = "goes on with fewer nodes, from a snapshot"
    LIVE = "goes on with fewer nodes, from copies that live (Lazarus)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The training that failures interrupt.

    Raises:
        InvalidJobError: when a value is out of range.
    """

    step_s: float
    """Time of a step that neither snapshots nor failures disturb."""
    stages: int = 1
    """Stages of a pipeline: S."""
    micro_batches: int = 1
    """Micro-batches that pass through a pipeline in a step: M."""

    def __post_init__(self) -> None:
        if not self.step_s > 0 or min(self.stages, self.micro_batches) < 1:
            raise InvalidJobError(
                f"step_s={self.step_s}, stages={self.stages}, micro_batches={self.micro_batches}: "
                f"give a time longer than 0, and at least one of each"
            )

    def alone(self, stages: int) -> float:
        """Portion of a step that `stages` neighbouring stages need to replay it from logs: they
        fill and drain no other stage (MoEvement §3.4)."""
        return (self.micro_batches + stages - 1) / (self.micro_batches + self.stages - 1)


def pipeline_step_s(
    micro_batch_s: float, *, stages: int, micro_batches: int, sync_s: float, update_s: float
) -> float:
    """T_iter = (M + S - 1) · max t_s + T_sync + T_update (MoEvement appendix C).

    Args:
        micro_batch_s: forward and backward of one micro-batch on the slowest stage.
        sync_s: what reducing gradients adds.
        update_s: the optimizer.
    """
    return (micro_batches + stages - 1) * micro_batch_s + sync_s + update_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The nodes, and the cost of a failure before any step is repeated.

    Raises:
        InvalidJobError: when a value is out of range.
    """

    nodes: int
    spares: int
    """Nodes that stand by, beside `nodes`."""
    detect_s: float
    """Time from a failure until it is known."""
    restart_s: float
    """Time from the detection of a failure to the first step: new processes, groups, state."""
    replacement_s: float
    """Time from the loss of a node until another one comes, as a member or as a spare."""
    node_losses: float = 1.0
    """Portion of the failures that lose a node; the others only end its processes."""
    reform_s: float = 0.0
    """Replaces `restart_s` if training continues from surviving copies."""
    join_wait_s: float = 0.0
    """Time from the arrival of a node until it joins a job that went on without it."""
    least_nodes: int = 1
    """Fewest nodes with which a job continues, if it may continue with fewer."""
    copy_nodes: int = 1
    """Nodes of a copy of the model: a job that continues with fewer trains with a multiple."""

    def __post_init__(self) -> None:
        times = (self.detect_s, self.restart_s, self.replacement_s, self.reform_s)
        if self.nodes < 1 or self.spares < 0 or not min(*times, self.join_wait_s) >= 0:
            raise InvalidJobError(f"{self}: give at least one node, and no number or time below 0")
        if not 0 <= self.node_losses <= 1:
            raise InvalidJobError(f"node_losses={self.node_losses}: a portion lies from 0 to 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """Snapshots of one number of experts."""

    experts: int
    interval_steps: int
    stall_s: float
    """Time that one snapshot adds to training."""
    lost_tokens: float = 0.0
    """Mean loss of one recovery, in steps' worth of tokens."""
    losses: tuple[float, ...] = ()
    """Equally likely losses with this mean; empty: each recovery loses the mean."""
    usable_after_s: float = 0.0
    """Time from a save until it can be restored: copied, and protected if it has to be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyModel:
    """A policy, as far as time is concerned.

    Raises:
        InvalidJobError: when there is no level, or one without an interval.
    """

    name: str
    levels: tuple[Level, ...]
    """What snapshots hold, from the beginning on; the next one each time that recoveries have lost
    more tokens than the level may (Dynamic-K, PEC §3.1)."""
    built: bool = True
    """Whether a job can ask for it in this version."""
    of_script: bool = False
    """Whether the training script decides it, not the job."""
    loss_limit: float = 1.0
    """Portion of all tokens that the levels may lose together."""
    window_steps: int = 0
    """Steps over which one complete state is saved (W of MoEvement §3.2); 0: in each save."""
    catches_up: bool = False
    """Whether a restore brings back a window's last step, with its gradients; else its first."""
    catch_up_s: float = 0.0
    """Time from a restore until the optimizers have repeated their steps, with gradients that come
    from other nodes."""
    replay_saves: float = 0.0
    """Portion of a window's steps that their repetition saves because experts are frozen in it:
    those of later slots need no gradients of their weights (MoEvement §3.5, appendix D)."""
    by_stage: bool = False
    """Whether only the stages that failed compute again, from logs (MoEvement §3.4)."""
    after_loss: AfterLoss = AfterLoss.FIXED
    survives: Survives = two_copies
    """Probability that copies live on, where training continues from these."""
    load_s: float = 0.0
    """Time to load a snapshot, beyond `Cluster.restart_s`."""
    covers: int | None = None
    """Nodes of one protection group that may be lost in one recovery; if more are, the snapshots in
    memory are lost with them. None: any number."""
    group_nodes: int = 1
    """Nodes of a protection group."""
    stored_every_steps: int = 0
    """Interval of copies in storage, for what is lost in memory; 0: none, training begins anew."""
    stored_load_s: float = 0.0
    """Time to load such a copy, beyond `Cluster.restart_s`."""

    def __post_init__(self) -> None:
        if not self.levels or min(level.interval_steps for level in self.levels) < 1:
            raise InvalidJobError(f"{self.name}: give at least one level with an interval")
        if not 0 <= self.replay_saves < 1:
            raise InvalidJobError(f"{self.name}: a repetition saves a portion of 0 to 1 of a step")

    def repeated(self, steps: float) -> float:
        """Time of the repetition of `steps`, in steps: less in the first W, where experts are
        frozen."""
        return steps - self.replay_saves * min(steps, self.window_steps)

    def overhead(self, step_s: float, level: int = 0) -> float:
        """Time that snapshots add to a step, as a portion of the step."""
        chosen = self.levels[level]
        return chosen.stall_s / (chosen.interval_steps * step_s)


def expected_redone_s(model: PolicyModel, workload: Workload) -> float:
    """E[R] without detection and restart: time of the steps that are repeated after one failure.
    Operators that have yet to get their full state cost as much as the others, unless
    `replay_saves`: their gradients are computed and dropped, so that the bits stay those of the
    first execution.

    Half an interval (MoEvement §2.4), or 3/2 W with windows: the newest complete window ended up to
    W steps ago and began W steps before that (§3.6). Half a window if a restore brings back the
    window's last step.
    """
    if model.after_loss is AfterLoss.LIVE:
        return workload.step_s / 2
    level = model.levels[0]
    windows = 0.5 if model.catches_up else 1.5
    steps = windows * model.window_steps if model.window_steps else level.interval_steps / 2
    redone_s = model.repeated(steps) * workload.step_s + level.usable_after_s + model.catch_up_s
    if model.by_stage:
        return redone_s * workload.alone(1)
    return redone_s * (1 + model.overhead(workload.step_s))


def closed_form_ettr(
    model: PolicyModel, workload: Workload, cluster: Cluster, mtbf_s: float
) -> float:
    """ETTR = 1 / (1 + overhead) · 1 / (1 + E[R] / MTBF) (MoEvement appendix C).

    E[R] includes detection and restart. The formula leaves out failures during recoveries, a lack
    of spares, snapshots that are lost with nodes, and levels after the first. Missing nodes count
    if the job goes on without them.
    """
    restart_s = (
        cluster.reform_s if model.after_loss is AfterLoss.LIVE else cluster.restart_s + model.load_s
    )
    repair_s = cluster.detect_s + restart_s
    redone_s = expected_redone_s(model, workload)
    ratio = 1 / (1 + model.overhead(workload.step_s)) / (1 + (repair_s + redone_s) / mtbf_s)
    if model.after_loss is AfterLoss.FIXED:
        return ratio
    away_s = (cluster.replacement_s + cluster.join_wait_s) * cluster.node_losses
    missing = max(0.0, away_s / mtbf_s - cluster.spares) / cluster.nodes
    return ratio * max(0.0, 1 - missing)


def checkfreq_interval_steps(stall_s: float, step_s: float, *, cap: float = 0.03) -> int:
    """The smallest interval at which snapshots add no more than `cap` (CheckFreq's rule, as
    MoEvement §5.2 configures it)."""
    # What rounding adds to a whole number is not another step.
    return max(1, ceil(stall_s / (cap * step_s) - 1e-9))


def oracle_interval_steps(stall_s: float, step_s: float, repair_s: float, mtbf_s: float) -> int:
    """The interval with the greatest closed-form ETTR, which Gemini's oracle picks for each MTBF
    (MoEvement §5.2).

    (1 + s / I)(1 + (D + I / 2) / MTBF) is least at I = √(2 s (MTBF + D)); the better one of the two
    neighbouring whole numbers of steps is returned.
    """

    def cost(steps: int) -> float:
        interval_s = steps * step_s
        return (1 + stall_s / interval_s) * (1 + (repair_s + interval_s / 2) / mtbf_s)

    below = max(1, int((2 * stall_s * (mtbf_s + repair_s)) ** 0.5 / step_s))
    return min((below, below + 1), key=cost)
