"""The interface of a session: `Session` for training scripts, and `WorldSession` for
`holdfast.elastic`, which makes a new session for each world.

`protected` implements both with a daemon, `unprotected` without one. This module decides nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType

import torch

from holdfast._capture.partial_state import START, PartialState
from holdfast._daemon.handles import SaveHandle
from holdfast._save.tally import SaveCounters
from holdfast._state.capture import LiveState
from holdfast._state.collect import Stateful
from holdfast._steps import RestartRunner, TrainStep, steps_of
from holdfast_core.corruption import Divergence
from holdfast_core.elastic_experts.reports import PlanReport
from holdfast_core.errors import HoldfastError, NoRecoveryLineError
from holdfast_core.protection.replaying import ReplayPlan
from holdfast_core.protection.standing import StandingVerdict
from holdfast_core.topology import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """The training state of one rank, which its session captures."""

    live: LiveState
    """State of the model and the optimizers."""
    stateful: Mapping[str, Stateful]
    """The other objects to capture, by name."""
    topology: Topology
    """Topology of the present world."""
    rank: int
    """Rank of this process in the present world."""


class Session(ABC):
    """The protection of one rank, from `holdfast.init` to `close`. As a context manager, it closes
    itself at the end of the block."""

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Membership epoch of this training world; 0 without a daemon, or before it is known."""

    @property
    @abstractmethod
    def problem(self) -> HoldfastError | None:
        """Why saves cannot succeed; None if they can. The problem is permanent, except that
        replicas which differ may become equal again."""

    @property
    @abstractmethod
    def counters(self) -> SaveCounters:
        """Counts of committed, skipped and failed saves, and the newest cause of a failure."""

    @property
    def holds(self) -> TrainingState | None:
        """The state that this session captures; None without a daemon."""
        return None

    @abstractmethod
    def restore(self) -> int | None:
        """Load the recovery line into the model, the optimizers and the stateful objects.

        Every rank calls it once, before its first save. Either all ranks restore the same step, or
        all raise. Tensors are filled in place. Optimizer state that does not exist yet is
        allocated.

        Returns:
            The last completed step; None for a fresh start.

        Raises:
            LayoutMismatchError: a tensor differs from the snapshot in name, shape or dtype.
            CorruptError: bytes do not match their checksums. The state is then undefined.
            NoRecoveryLineError: the daemons of the ranks named different generations, or this
                session has restored or saved before.
            UnreachableError: the daemon or another rank did not answer in time.
            StaleEpochError: the training world of this process has ended.
        """

    def steps(self, total: int, *, seed: int | None = None) -> Iterator[TrainStep]:
        """Restore, and yield each step to run, from the first one after the restored step to
        `total`.

            for step in session.steps(total):
                with step:
                    train_one_step()

        The end of the `with` block saves the state after the step. With a `world` of
        `holdfast.elastic`, a failure elsewhere also ends the block: this process then recovers in
        place, and the loop continues with the next step to run, whose `resumed` is true. Every rank
        calls this once, instead of `restore` and `save`.

        Args:
            total: number of steps of the whole run.
            seed: equal on all ranks; None seeds nothing. When a step begins, the random generators
                of Python, numpy and torch are seeded from this number, the step and the present
                rank, so that a process that replaces a lost one draws the same random numbers.

        Raises:
            HoldfastError: as for `restore`; or a later world has nothing to restore, and this
                process cannot start from the beginning again.
        """
        return steps_of(RestartRunner(self), total, seed)

    @abstractmethod
    def save(self, step: int) -> SaveHandle:
        """Begin to capture the state after `step` completed steps. Returns at once, and does not
        raise (with two exceptions, below): the handle reports failures.

        Tensors must not change before the handle's `staged` is done. The hook on the optimizer's
        `step` waits for it; before any other change, call `wait_staged`. If tensors changed in
        place before they were copied, and the change can be detected, the save is dropped. Buffers
        and extras are copied before this returns.

        After a restore from a sparse window, the steps of the window are repeated. Before the last
        of them, `save` captures nothing; it loads the window's state for the next step instead, and
        raises StepOrderError if a step was left out.

        If the settings require protection, and this or an earlier save was refused, this raises
        ProtectionRequiredError. So does the hook on the optimizer's `step`.

        If an optimizer is not torch's, this returns only when the tensors are copied, until the
        loop has called `wait_staged` between two saves.
        """

    def backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        *,
        retain_graph: bool | None = None,
    ) -> None:
        """Compute the gradients of `loss`, as `loss.backward(gradient, retain_graph)` does.

        While the steps of a sparse window are repeated, this leaves out the gradients of frozen
        units, which is faster (MoEvement §3.3). These parameters then keep the gradient that they
        had, usually None. The other gradients have the same bits.

        Call it only if nothing between here and the optimizer's step depends on the gradients of
        other parameters, or needs all of them to be there. Clipping by the norm of all gradients
        does; so does a loss scaler, in a step that it leaves out. If the window ends with another
        state than in its first execution, `save` raises InvalidJobError.

        All gradients are computed all the same with `DistributedDataParallel`, with
        `checkpoint(use_reentrant=True)`, of parameters with hooks, of DTensors, of stacked experts,
        and where the optimizer holds other parameters than the model. Hooks on tensors within the
        graph may not run.

        Args:
            loss: tensor of one element, scaled or not; or of any shape, with `gradient`.
            gradient: the gradient of `loss`, of its shape.
            retain_graph: whether to keep the graph.

        Raises:
            RuntimeError: as for `torch.Tensor.backward`.
        """
        loss.backward(gradient, retain_graph=retain_graph)

    @abstractmethod
    def count_tokens(
        self, layer: int, counts: Sequence[float] | torch.Tensor, assignments: int | None = None
    ) -> None:
        """Count the tokens that this rank has sent to each expert of a layer since the last call.

        Snapshots that leave experts out need the counts to measure the tokens that a recovery
        loses; without counts, only these measurements are missing. Sparse windows order experts by
        the counts if the policy says so. The call is cheap: counts on a device are added up there,
        without waiting.

        Args:
            counts: the tokens that each expert of the layer processed, for the experts of all
                ranks: whole numbers [experts], on any device. With
                SparseWindows(order="SoftCount"), the sums of the gate's probabilities for these
                tokens.
            assignments: number of tokens times the number of experts to which each was sent,
                including dropped ones; by default the sum of `counts`.
        """

    @abstractmethod
    def bubble(self) -> AbstractContextManager[None]:
        """Mark a time in which this pipeline stage is idle: `with session.bubble(): recv()`.

        Snapshots are copied at such times, as far as the idle time of recent steps allows. The
        waits of `elastic.Pipeline`, of Megatron-Core's schedules and, since torch 2.8, of torch's
        are marked already; a bubble within a bubble counts once. `counters.bubble_s` and
        `counters.bubble_bytes` are the totals. Without pipeline parallelism, this does nothing.
        """

    @abstractmethod
    def capacity_factors(self, layer: int, experts: int) -> list[float]:
        """Return the factor for the capacity of each expert of a layer in the next step.

        If a recovery returned an expert to an older version, its factor is 1.1 until this rank has
        made up for the lost tokens (MoEtion §6), according to `count_tokens`. Otherwise the factor
        is 1.0. Ranks make up for their tokens at different steps, so give buffers for tokens from
        other ranks the room of `capacity_room`, whatever the factors of this rank are. While this
        rank has tokens to make up for, the first call after `count_tokens` waits for the counts on
        all devices.

        Args:
            experts: number of the layer's experts, over all ranks.

        Returns:
            A factor for each expert, in the order of `count_tokens`.
        """

    @property
    @abstractmethod
    def capacity_room(self) -> float:
        """Largest factor that any rank may give any expert before the next restore: 1.0 or 1.1,
        equal on all ranks."""

    @abstractmethod
    def prepare(self) -> None:
        """Allocate the arena now, rather than in the background of the first save.

        Every rank calls it after the first optimizer step. It returns when the session is open. If
        the session cannot be opened, this logs the reason and returns.
        """

    @abstractmethod
    def wait_staged(self) -> None:
        """Wait until tensors may change. Call it before every step of an optimizer that is not
        torch's, and before every other change of weights, such as clamping or swapping in
        averages."""

    @abstractmethod
    def close(self) -> None:
        """Finish the save in progress and end the session. The daemon keeps its snapshots."""

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class WorldSession(Session):
    """The session of one training world. `holdfast.elastic` calls the methods below. Their defaults
    suit a session without a daemon, which captures nothing."""

    @property
    def repeats(self) -> bool:
        """Whether the steps of a sparse window are being repeated. Until the end of the window,
        units have the states of different steps."""
        return False

    @property
    def diverged(self) -> str:
        """Why no other rank may go on with the state of this one: replicas differ, and wrong values
        have reached all of them with the gradients. Empty while they are not known to."""
        return ""

    @abstractmethod
    def restore(self, no_replay: str = "") -> int | None:
        """Restore; see `Session.restore`.

        Args:
            no_replay: why lost ranks do not recover alone, for the log and the status.
        """

    def before_step(self, optimizer: object) -> None:
        """Wait until `optimizer` may step. The hook on its `step` calls it."""

    def on_step_checked(self, found: Divergence, spoils: str) -> None:
        """Note that a step whose gradients were computed more than once was not the same each time.

        Args:
            spoils: why the state of all ranks is wrong from now on, so that nothing is saved any
                more; empty if it is right.
        """

    def go_on(self, verdict: StandingVerdict, problem: str) -> bool:
        """Continue live after the step of `verdict`, from the state that the ranks have. Called
        before the first save of this world. Collective.

        Args:
            verdict: its action is LIVE; equal on all ranks.
            problem: why this rank cannot continue after all; empty if it can.

        Returns:
            Whether all ranks now have the state after the step. If not, they must restore.

        Raises:
            UnreachableError: a rank did not take part.
        """
        del verdict, problem
        return False

    def on_reseated(self, plan: PlanReport, *, moved: bool) -> None:
        """Note the expert plan, and whether experts have moved since the last save."""

    def follow(self, kept: PartialState) -> None:
        """Take over the state of the policy that the session of the previous world left."""

    def leave(self) -> PartialState:
        """Close the session of a world that has ended. Return the state of its policy, which the
        session of the next world takes over (`follow`)."""
        self.close()
        return START

    # --- localized recovery -----------------------------------------------------------------------

    def line(self) -> tuple[int, int, bool]:
        """Return the steps of the recovery line from which lost ranks can be restored alone, and
        whether it is a sparse window; see `Restore.line`.

        Raises:
            HoldfastError: there is no such line, or the daemon did not answer.
        """
        raise NoRecoveryLineError("no daemon protects this process, so there is no recovery line")

    def hand_over(self, verdict: StandingVerdict, apart: Collection[int]) -> bool:
        """Give the new ranks of `verdict` the state that live ranks have, before the ranks `apart`
        restore the recovery line. Collective.

        Returns:
            Whether they have it; equal on all ranks. If not, all ranks must restore.

        Raises:
            UnreachableError: a rank did not take part.
        """
        del verdict, apart
        return False

    def restore_lost(self, plan: ReplayPlan, *, own: bool) -> str:
        """Restore the recovery line on the ranks of `plan` alone. Collective.

        Args:
            own: whether this rank restores the line. If not, its state does not change.

        Returns:
            Why the state of some rank is not that of the line, if it is to be: then all ranks must
            restore. Empty if it is. Equal on all ranks.

        Raises:
            HoldfastError: a rank could not restore. Then all ranks raise.
        """
        del plan, own
        return ""

    def on_step_repeated(self, step: int) -> None:
        """Note that this rank has repeated `step` alone. Within a sparse window, load the window's
        state for the next step."""

    def end_replay(self, step: int, repeated_after: int | None) -> bool:
        """Continue after `step`, which the lost ranks have now reached as well. Collective.

        Args:
            repeated_after: the step that this rank restored, and after which it repeated steps;
                None if it kept its state.

        Returns:
            Whether all ranks now have the state after the step. If not, they must restore.
        """
        del step, repeated_after
        return False
