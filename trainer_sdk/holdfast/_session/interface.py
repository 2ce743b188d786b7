"""Interface of a session: what a training script may ask for, and what it is promised. And what
`holdfast.elastic` asks of the session of one world, which it replaces in the next.

`protected` implements it with a daemon, `unprotected` without one. This module decides nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
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
from holdfast_core.elastic_experts.reports import PlanReport
from holdfast_core.errors import HoldfastError, NoRecoveryLineError
from holdfast_core.protection.standing import StandingVerdict
from holdfast_core.topology import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """What one rank trains, as its session captures it."""

    live: LiveState
    """State of the model and the optimizers."""
    stateful: Mapping[str, Stateful]
    """Other objects, by name."""
    topology: Topology
    """Topology of the present world."""
    rank: int
    """Rank of this process in it."""


class Session(ABC):
    """One rank's protection, from `holdfast.init` to `close`; as a context manager it closes."""

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Membership epoch of this training world; 0 before it is known or without a daemon."""

    @property
    @abstractmethod
    def problem(self) -> HoldfastError | None:
        """Reason why no save can succeed any more, or until replicas are equal again; None when all
        is well."""

    @property
    @abstractmethod
    def counters(self) -> SaveCounters:
        """Numbers of saves that were committed, skipped and failed, and the newest cause."""

    @property
    def holds(self) -> TrainingState | None:
        """State that this session captures; None without a daemon."""
        return None

    @abstractmethod
    def restore(self) -> int | None:
        """Load the recovery line into the model, the optimizers and the stateful objects.

        Every rank calls it, once, before its first save. All ranks restore the same step, or all
        raise. Tensors are copied into place; optimizer state that does not exist yet is allocated.

        Returns:
            The last completed step, or None for a fresh start.

        Raises:
            LayoutMismatchError: a tensor differs in name, shape or dtype from the snapshot's.
            CorruptError: bytes do not match their checksums. The state is then undefined.
            NoRecoveryLineError: the ranks' daemons named different generations, or training has
                gone on: this session has restored or saved before.
            UnreachableError: the daemon or another rank did not answer in time.
            StaleEpochError: this process belongs to a training world that has ended.
        """

    def steps(self, total: int, *, seed: int | None = None) -> Iterator[TrainStep]:
        """Restore, then yield the number of each step to run, from 1 to `total`.

            for step in session.steps(total):
                with step:
                    train_one_step()

        The end of the `with` block saves the state after the step. With a `world` of
        `holdfast.elastic`, a failure elsewhere unwinds to it: this process restores in place, and
        the loop goes on after the restored step, whose `resumed` is then true. Every rank calls it,
        once, instead of `restore` and `save`.

        Args:
            total: number of steps of the whole run.
            seed: equal on all ranks. The random generators of Python, numpy and torch are seeded
                from it, the step and the present rank when a step begins: a process that takes the
                place of a lost one then draws what that would have drawn.

        Raises:
            HoldfastError: as `restore`; also where a world has nothing to restore, because this
                process cannot begin again.
        """
        return steps_of(RestartRunner(self), total, seed)

    @abstractmethod
    def save(self, step: int) -> SaveHandle:
        """Begin to capture the state after `step` completed steps. Returns at once, never raises.

        After a restore from a sparse window it loads what the window holds of `step`, until the
        window's last step is repeated, and raises StepOrderError when a step was left out.

        Tensors must not change until the handle's `staged`: the hook on the optimizer's `step`
        waits for it, and `wait_staged` does so before any other change. A save whose tensors
        changed in place before they were copied is dropped, where the change can be detected.
        Buffers and extras are copied before this returns.

        With an optimizer that is not torch's, this returns only when the tensors are copied, until
        the loop calls `wait_staged` between saves.
        """

    @abstractmethod
    def count_tokens(
        self, layer: int, counts: Sequence[float] | torch.Tensor, assignments: int | None = None
    ) -> None:
        """Count this rank's tokens that went to each expert of a layer since the last call.

        Snapshots that leave experts out use the counts to measure what a recovery loses. Without
        them only these numbers are missing. Sparse windows order experts by them, where the policy
        says so. The call is cheap: counts on a device are added up
        there, without waiting.

        Args:
            counts: for each expert of the layer, over all ranks, the tokens that it processed;
                whole numbers [experts], on any device. With SparseWindows(order="SoftCount"), the
                sums of the gate's probabilities of these tokens.
            assignments: tokens times the experts that each was sent to, dropped ones included; by
                default the sum of `counts`.
        """

    @abstractmethod
    def bubble(self) -> AbstractContextManager[None]:
        """Mark a time in which this pipeline stage is idle: `with session.bubble(): recv()`.

        Copies of a snapshot are kept for such times, as far as recent steps had them. Without
        pipeline parallelism it does nothing.
        """

    @abstractmethod
    def capacity_factors(self, layer: int, experts: int) -> list[float]:
        """Factors for the capacity of each expert of a layer in the next step.

        A factor is 1.1 for an expert that a recovery returned to an older version, until this rank
        has made up for the tokens lost by it (MoEtion §6), as counted by `count_tokens`; otherwise
        it is 1.0. Ranks finish this at different steps, so buffers for tokens from other ranks need
        the room that `capacity_room` gives, whatever this rank's factors are. While this rank has
        tokens to make up for, the first call after `count_tokens` waits for all counts that are on
        a device at once.

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
        """Allocate the arena now rather than in the background of the first save.

        Every rank calls it, after the first optimizer step. It returns when the session is open, or
        when opening failed, which is logged.
        """

    @abstractmethod
    def wait_staged(self) -> None:
        """Return when tensors may change. Call it before every step of an optimizer that is not
        torch's, and before any other change of weights: swapping in averages, clamping."""

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
    """Session of one training world. What it does not override is that of a session without a
    daemon, which holds nothing."""

    @property
    def repeats(self) -> bool:
        """Whether steps of a sparse window are being repeated, so that units are of different
        steps."""
        return False

    @abstractmethod
    def restore(self, no_replay: str = "") -> int | None:
        """Restore; see `Session.restore`.

        Args:
            no_replay: why no pipeline stage repeats steps alone, for people.
        """

    def before_step(self, optimizer: object) -> None:
        """Return when `optimizer` may step."""

    def go_on(self, verdict: StandingVerdict, problem: str) -> bool:
        """Go on after a step from what the ranks have, before the first save. Collective.

        Args:
            verdict: LIVE; equal on all ranks.
            problem: why this rank cannot, after all; empty when it can.

        Returns:
            Whether all ranks have the state after the step; if not, it has to be restored.

        Raises:
            UnreachableError: a rank did not take part.
        """
        del verdict, problem
        return False

    def on_reseated(self, plan: PlanReport, *, moved: bool) -> None:
        """Note the experts' plan, and whether they have moved since the last save."""

    def follow(self, kept: PartialState) -> None:
        """Take what the session of the world before has left."""

    def leave(self) -> PartialState:
        """Close the session of a world that has ended, and return the state of its policy for the
        next one to `follow`."""
        self.close()
        return START

    # --- localized recovery -----------------------------------------------------------------------

    def line(self) -> tuple[int, int]:
        """Steps of the recovery line from which lost stages are to be restored; see
        `Restore.line`.

        Raises:
            HoldfastError: there is none, or it cannot be found out.
        """
        raise NoRecoveryLineError("no daemon protects this process, so there is no recovery line")

    def restore_stages(self, *, own: bool) -> None:
        """Restore the recovery line on some ranks, before they repeat steps. Collective.

        Args:
            own: whether this rank restores it; the others change nothing.

        Raises:
            HoldfastError: a rank could not; then all raise.
        """

    def on_step_repeated(self, step: int) -> None:
        """Go on after a step that this rank has repeated alone, with what a sparse window holds of
        it."""

    def end_replay(self, step: int, repeated_after: int | None) -> bool:
        """Go on after a step, once lost stages have repeated it. Collective; as `go_on`.

        Args:
            repeated_after: step after which this rank has repeated steps; None for none.
        """
        del step, repeated_after
        return False
