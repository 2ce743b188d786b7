"""The session of a process that stays when its world changes.

It makes a new session with the daemon for each world, as a newly started process would: a session
belongs to one epoch, and none of it carries over into the next. The model, the optimizers and the
stateful objects stay; a restore writes into them.

A lost rank ends the world. The step that it cuts off is undone (`_undo`). The ranks of the next
world state what they have and reach a verdict (`World.stand`), and `_enter` carries it out:
training continues live, lost ranks recover alone, or all ranks restore the recovery line.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import msgspec
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast._agree.exchange import Exchange
from holdfast._capture.partial_state import START, PartialState
from holdfast._causes import drop_frames
from holdfast._daemon.handles import SaveHandle
from holdfast._elastic.connections import Begun
from holdfast._elastic.pipeline import BoundaryReplay, Pipeline
from holdfast._elastic.sharded import Replaced, WorldSharded
from holdfast._elastic.stage_replay import agree_on_replay, hand_over_logs, return_logs
from holdfast._elastic.step_checks import StepAgainError, StepChecks
from holdfast._elastic.step_start import STATE_BYTES_MAX, StepStart
from holdfast._elastic.world import World
from holdfast._save.tally import SaveCounters
from holdfast._session.interface import Session, TrainingState, WorldSession
from holdfast._state.capture import LiveState
from holdfast._state.collect import reset_scalers
from holdfast._state.dtensors import is_dtensor
from holdfast._state.nested import StepHooks
from holdfast._state.program_start import ProgramStart
from holdfast._steps import TrainStep, steps_of
from holdfast_core.elastic_experts.reports import PlanReport
from holdfast_core.errors import (
    BeginsAnewError,
    HoldfastError,
    InvalidJobError,
    SaveFailedError,
    UnreachableError,
)
from holdfast_core.protection.replaying import ReplayPlan, ReplayProgress
from holdfast_core.protection.standing import (
    RankStanding,
    StandingAction,
    StandingVerdict,
    can_lose_member,
    can_lose_rank,
)
from holdfast_core.snapshots.units import UnitKind

_log = logging.getLogger("holdfast")


def check_staying(model: nn.Module, world: World) -> None:
    """Refuse a model that holds process groups of its own, if they cannot be formed again.

    Raises:
        InvalidJobError: DDP wraps the model, or its parameters are DTensors and this process stays
            in a world whose groups do not, or in worlds of any size without `world.sharded`.
    """
    if any(isinstance(part, DistributedDataParallel) for part in model.modules()):
        raise InvalidJobError(
            "this DistributedDataParallel keeps the buckets of one world: wrap the module by "
            "`world.ddp(module, …)` instead, which makes another one in each world"
        )
    if not world.stays:
        return
    built = (part for part in model.modules() if isinstance(part, WorldSharded))
    again = {id(each) for part in built for each in part.parameters()}
    sharded = [each for each in model.parameters() if is_dtensor(each)]
    if sharded and not world.groups_stay:
        raise InvalidJobError(
            f"this model keeps process groups (FSDP2 or another use of DTensor), which do not stay "
            f"when this world changes: {world.why_groups_go}. Otherwise leave `world` out, so that "
            f"all processes start again after a failure"
        )
    if world.any_size and not again.issuperset(map(id, sharded)):
        raise InvalidJobError(
            "this model is sharded over the ranks of one world (FSDP2 or another use of DTensor), "
            "and this process stays in worlds of any size (any_size=True): let a function build "
            "it, and give holdfast.init what `world.sharded(build)` returns"
        )


def reset_sharded(model: nn.Module) -> None:
    """Undo what a forward or backward pass that was cut off has left in FSDP2's modules: gathered
    parameters, gradients and the order of the pass."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # The script has not imported it, and importing it takes long.
        return
    # Before torch 2.15 only steps that are executed again come here; their passes were whole.
    if not hasattr(fsdp.FSDPModule, "reset_iter_state"):
        return
    for part in model.modules():
        if isinstance(part, fsdp.FSDPModule) and part._get_fsdp_state()._is_root is not False:
            part.reset_iter_state()


@dataclass(frozen=True, slots=True)
class HeldState:
    """The training state that this process has between two steps."""

    step: int | None = None
    """Number of completed steps; None before the first restore."""
    torn: str = ""
    """Why this is not exactly the state after `step`; empty if it is."""
    adds_up: bool = False
    """Whether gradients may belong to the state, because no optimizer stepped in the last step."""
    alone: bool = False
    """Whether this rank restores the line, or repeats steps after it, while other ranks keep their
    state. Until it has reached these it counts as a rank whose state is lost."""


class StepBody:
    """The body of one step while it runs."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.voted = False
        """Whether the vote of the step has passed."""
        self.stepped = False
        """Whether an optimizer has stepped, or is about to."""
        self.cut = False
        """Whether the step was cut off before its vote passed."""
        self.again = False
        """Whether it was cut off because all ranks run it again, to compare what they get."""
        self.proved: Begun | None = None
        """The collectives on the device that were begun before its vote, and have results; None
        before the vote, and after one at the end of the body."""
        self._start: StepStart | None = None
        self._problem = ""

    def note(self, holds: TrainingState, state_bytes_max: int) -> StepStart | None:
        """Keep the state that the step may change before its vote, so that `undo` can restore it.
        Return it; None if it cannot be noted."""
        try:
            self._start = StepStart(holds.live, holds.stateful, self.step - 1, state_bytes_max)
        except Exception as error:  # The user's state_dict or torch may raise anything.
            self._problem = f"the state before step {self.step} could not be noted: {error}"
        return self._start

    def why_not_whole(self) -> str:
        """Why the state before the step can no longer be restored; empty while it can."""
        return self._try(StepStart.check)

    def undo(self) -> str:
        """Restore the state before the step. Return why that is impossible; empty on success."""
        if self.voted or self.stepped:
            return f"step {self.step} was cut off after its vote"
        return self._try(StepStart.put_back)

    def _try(self, action: Callable[[StepStart], None]) -> str:
        """Apply `action` to the noted state. Return why it failed; empty on success."""
        if self._start is None:
            return self._problem
        try:
            action(self._start)
        except Exception as error:  # also out of memory
            return f"step {self.step} was cut off: {error}"
        return ""


class Reseats(Protocol):
    """The seats of a model's experts, implemented by `holdfast._moe.reseating`. Experts change
    seats when the world or their loads change."""

    @property
    def experts(self) -> int:
        """Number of experts in each layer."""

    def seated_experts(self) -> tuple[tuple[int, ...], ...]:
        """The experts in this rank's seats, layer by layer."""

    def follow(
        self, live: LiveState, exchange: Exchange, rank: int, *, outlived: bool, moves: bool
    ) -> None:
        """Plan the seats for the present ranks, and move experts into them. Collective."""

    def rebalance(
        self, live: LiveState, exchange: Exchange, rank: int, *, step_s: float, steps: int
    ) -> bool:
        """Move experts to other seats of the same world if their loads justify it; return whether
        any moved. Collective."""

    def report(self, epoch: int, step: int) -> PlanReport:
        """Describe the present plan, for the job's status."""


class ElasticSession(Session):
    """A sequence of sessions: one in each world that this process lives through.

    Args:
        world: the training world.
        make: makes the session of the present world. Collective.
        optimizers: drop their gradients when a step is cut off, and get the parameters of a model
            that is built again.
        begun: state of the program at its start; None without a daemon.
        exchange_timeout_s: time that the fastest rank waits for the slowest at the end of training.
        model: whose modules of FSDP2 are reset when a step is cut off.
        votes: whether ranks vote before each optimizer step, so that training can continue live.
            Equal on all ranks.
        pipeline: the boundaries between the script's pipeline stages; None if it has none.
        reseats: the seats of the model's experts; None if it has none.
        rebalance_steps: steps between two checks of the experts' loads; 0 for no checks. Equal on
            all ranks.
        repeat_share: part of the training time in which steps are executed again, to find ranks
            that compute wrongly. Equal on all ranks.
    """

    def __init__(
        self,
        world: World,
        make: Callable[[], WorldSession],
        optimizers: Sequence[Any],
        exchange_timeout_s: float,
        *,
        begun: ProgramStart | None = None,
        model: nn.Module | None = None,
        votes: bool = False,
        pipeline: Pipeline | None = None,
        reseats: Reseats | None = None,
        rebalance_steps: int = 0,
        repeat_share: float = 0.0,
    ) -> None:
        self._world, self._make, self._reseats = world, make, reseats
        self._rebalance_steps = rebalance_steps
        self._bodies_s = 0.0
        """Time spent in the bodies of steps since loads were last checked."""
        self._began_s = 0.0
        """Time at which the newest body began."""
        self._optimizers, self._timeout_s = tuple(optimizers), exchange_timeout_s
        self._checks = None
        """The checks of steps; None where none is executed again."""
        if repeat_share and votes:
            executes_again = pipeline is None and reseats is None
            self._checks = StepChecks(repeat_share, executes_again=executes_again)
            if not executes_again:
                _log.info(
                    "repeat_steps_share: no step is executed again, because experts in seats and "
                    "stages of elastic.Pipeline cannot put back what they have sent; other ranks "
                    "repeat samples of their work"
                )
        elif repeat_share:
            _log.warning(
                "repeat_steps_share: no step is checked, because this process takes no votes: it "
                "needs a daemon, go_on_live, and optimizers of torch"
            )
        self._begun, self._model = begun, model
        self._votes = votes and (world.stays or self._checks is not None)
        self._pipeline = pipeline
        self._replaying: ReplayPlan | None = None
        """The replay in which this rank repeats steps; None outside of a replay."""
        self._progress = ReplayProgress()
        """What this rank knows of the replays since the newest step of all ranks."""
        self._protected = 0
        """Step to which a restore of the newest protected generation leads back, as far as this
        process knows. Any thread."""
        self._restored: int | None = None
        """Step to which all ranks were restored after a failed replay; None otherwise."""
        self._cause: Exception | None = None
        """The failure that ended the present world; None before one."""
        self._saves = False
        """Whether the loop of `steps` calls `save`, so that the script must not."""
        self._in_closures = False
        """Whether gradients are computed within the `step` of an optimizer."""
        self._held = HeldState()
        self._body: StepBody | None = None
        """The step whose body runs now or was cut off; None between steps."""
        self._verdict: StandingVerdict | None = None
        """Verdict of the next world, if it was reached within a step."""
        self._session: WorldSession
        self._exchange: Exchange
        self._begin()
        if pipeline is not None:
            pipeline.idle = self.bubble
        self._hooks = StepHooks(self._optimizers, self._before_optimizer)

    def _begin(self, kept: PartialState = START) -> None:
        """Make the session and the exchange of the present world. Collective.

        Args:
            kept: state of the policy in the previous world.
        """
        self._session = self._make()
        self._session.follow(kept)
        self._exchange = self._world.exchange(self._timeout_s)

    # --- the loop ---------------------------------------------------------------------------------

    def steps(self, total: int, *, seed: int | None = None) -> Iterator[TrainStep]:
        self._saves = True
        return steps_of(self, total, seed)

    def begin_steps(self) -> int:
        """Restore, and return the number of completed steps; see `Runner`."""
        try:
            return self.restore() or 0
        except Exception as error:
            if not self.survives(error):
                raise
        return self.go_back()

    def begin(self, step: int) -> None:
        """Keep the state before `step`; see `Runner`."""
        self._body, self._began_s = StepBody(step), time.monotonic()
        self._world.begin_step(step)
        if self._pipeline is not None:
            self._pipeline.log.drop_to(self._protected)
            self._pipeline.begin(step)
        if self._votes and (holds := self._session.holds) is not None:
            checks = self._checks if self._replaying is None else None
            if checks is not None and not self._held.adds_up and checks.wants(step):
                # A bit that flips from here on must not get into the save before this step.
                self._session.wait_staged()
                checks.begin(step, self._body.note(holds, sys.maxsize))
            elif self._world.stays:
                self._body.note(holds, STATE_BYTES_MAX)

    def complete(self, step: int) -> bool:
        """Save the state after `step`, unless its world has ended; see `Runner`.

        Raises:
            InvalidJobError: a process that was forked from this one called it.
            Exception: the failure of a collective which the script caught, although the state after
                `step` is then incomplete.
        """
        # Refuse the step if a collective in its body failed, even if the script caught the error.
        self._end_record()
        self._world.check_process()
        failure, body = self._world.failure, self._body
        if failure is not None:
            if not self.survives(failure):
                raise failure
            drop_frames(failure)
        if failure is not None or body is None or body.cut:
            return False
        # A repeated step was voted on and saved in its first execution.
        if self._replaying is not None:
            return self._complete_repeated(self._replaying, body)
        # Without an optimizer step there was no vote yet. Without votes, the world must still last.
        if self._votes and not (body.voted or self._passes_at_its_end(body)):
            return False
        # Messages of stages are logged as those of a complete step, with votes or without. Where
        # torch ends no process whose communicators have failed, ask these as well.
        asks = self._votes or self._pipeline is not None or self._world.groups_stay
        if asks and not self._ends_whole(body):
            return False
        if not self._votes and self._world.ended:
            return False
        # The step is complete. Note that before the save, so that it counts even if the world ends.
        self._hold(body)
        self._progress = ReplayProgress()
        if self._world.ended:
            return False
        # Save, and perhaps move experts to other seats.
        handle = self._session.save(step)
        if self._pipeline is not None:
            handle.protected.add_done_callback(partial(self._note_protected, handle))
        return self._rebalance(step)

    def survives(self, error: Exception) -> bool:
        """Whether the loop continues in another world after `error`; see `Runner`."""
        records = self._checks is not None and self._checks.records
        self._end_record()
        if self._is_run_again:
            return True
        if not self._world.survives(error):
            if records:
                _log.error(
                    "this step failed while it was recorded under a torch dispatch mode, without "
                    "compiled code, to be executed again: if it fails only then, set "
                    "failurePolicy.repeatStepsShare to 0"
                )
            return False
        _log.warning("a step was cut off: %s: %s", type(error).__name__, error)
        self._cause = error
        return True

    def go_back(self) -> int:
        """Enter the next world and recover there; return the number of completed steps; see
        `Runner`.

        Raises:
            BeginsAnewError: no rank has a state to continue from, and nothing was protected yet.
                Only new processes can start training from the beginning.
            Exception: the failure that cut the step off, if no new world came.
        """
        while True:
            # A failed replay has already restored this rank within its present world.
            restored, self._restored = self._restored, None
            if restored is not None:
                return restored
            # Return to a step's boundary: undo the step that was cut off, and end any replay.
            runs_again = self._is_run_again
            problem = self._undo()
            if runs_again:
                if problem:
                    raise InvalidJobError(
                        f"{problem}, so it cannot be executed again; set "
                        f"failurePolicy.repeatStepsShare to 0"
                    )
                return self._held.step or 0
            self._replaying = None
            if self._pipeline is not None:
                self._pipeline.end_replay()
            # Agree with the ranks of the next world on how to continue. FORWARD lets ranks within a
            # vote finish their step; then all state again what they have.
            cause, self._cause = self._cause, None
            verdict, self._verdict = self._verdict, None
            while verdict is None or verdict.action is StandingAction.FORWARD:
                verdict = self._world.stand(self._standing(), cause)
            # Form the groups, make a session, and carry the verdict out. If this world ends as
            # well, start over with the next one.
            kept = self._session.leave()
            try:
                self._world.form()
                self._build_again()
                self._begin(kept)
                step = self._enter(verdict)
            except Exception as error:
                if not self.survives(error):
                    raise
                continue
            if step is None:
                raise BeginsAnewError(
                    f"epoch {self._world.epoch} starts from the beginning, because nothing was "
                    f"protected yet; this process ends so that a new one can start there"
                )
            return step

    def finish_steps(self) -> bool:
        """Wait until all ranks have completed all steps; see `Runner`."""

        def finish() -> None:
            self._world.finish_collectives()
            self._exchange.gather(b"")

        return self._carries_out(finish)

    @property
    def rank(self) -> int:
        """Rank of this process in the present world."""
        return self._world.rank

    def gather(self, data: bytes) -> list[bytes]:
        """Gather the `data` of each rank of the present world, between two steps. Collective.

        Raises:
            UnreachableError: a rank does not take part.
        """
        return self._exchange.gather(data)

    # --- the vote ---------------------------------------------------------------------------------

    def _before_optimizer(self, optimizer: object) -> None:
        """Vote before the first optimizer of a step changes anything, and wait until the previous
        save has copied its tensors. The hook on each optimizer's `step` calls it."""
        if not self._in_closures:
            self.before_update()
        self._session.before_step(optimizer)

    def vote_in_closures(self) -> None:
        """Let `before_update` vote, and not the hook on the `step` of optimizers: a framework
        computes gradients within `step`."""
        self._in_closures = True

    def before_update(self) -> None:
        """Vote on the gradients of the present step, unless that was done. Collective.

        Raises:
            UnreachableError: the step is cut off.
        """
        body = self._body
        if body is not None and not body.stepped:
            if self._votes and not body.voted and self._replaying is None:
                self._vote(body)
            body.stepped = True

    def _vote(self, body: StepBody, *, at_end: bool = False) -> None:
        """Return once it is proved that all ranks have complete gradients of this step: the vote
        passed here, or the world ended and a surviving rank saw it pass. Collective.

        Args:
            at_end: whether the body is over, and no optimizer of this rank has stepped in it. Its
                device may then wait for collectives that the others begin after their vote, so it
                is waited for afterwards. Such gradients add up, so nothing is lost if this rank
                does not finish the step without the others. Nor is it executed again.

        Raises:
            UnreachableError: there is no such proof, so the step is cut off.
            InvalidJobError: ranks are at different steps.
            StepAgainError: the step is to be executed again.
        """
        # Do not vote on gradients that a failed collective left incomplete.
        if body.cut:
            raise UnreachableError(f"step {body.step} was cut off; leave its body")
        if self._world.failure is not None:
            raise UnreachableError(
                f"step {body.step} has no complete gradients: a collective failed"
            ) from self._world.failure
        if not at_end:
            body.proved = self._world.finish_collectives()
        # Vote: the sum is complete only if every rank has come this far. Then compare the gradients
        # with those of an earlier execution, if this step is checked.
        again = False
        try:
            total, again = self._add_vote(body, is_checked=not at_end)
        except Exception as error:
            if not self.survives(error):
                raise
            drop_frames(error)
            total = None
        # If the vote failed here, ask the surviving ranks whether it passed for one of them.
        if total is None:
            body.cut = at_end or not self._has_vote_passed_elsewhere(body)
            if body.cut:
                raise UnreachableError(f"step {body.step} was cut off before its vote passed")
        elif total != body.step * self._world.size:
            raise InvalidJobError(
                f"ranks are at different steps, this one at {body.step}: each rank runs the body "
                f"of each step of session.steps once"
            )
        if again:
            body.cut = body.again = True
            raise StepAgainError(f"step {body.step} is executed again, to compare what ranks get")
        body.voted = True

    def _add_vote(self, body: StepBody, *, is_checked: bool) -> tuple[int | None, bool]:
        """Add this rank's vote. Collective.

        Returns:
            The sum of all votes, and whether the step is to be executed again.
        """
        checks, holds, size = self._checks, self._session.holds, self._world.size
        if checks is None or holds is None:
            [total] = self._exchange.add([body.step])
            return total, False
        checks.note_time(time.monotonic() - self._began_s)
        if not is_checked:
            checks.pass_over(body.step)
        with checks.paused():
            due = is_checked and checks.is_due(body.step)
            total, wanted = self._exchange.add([body.step, int(due)])
            if total != body.step * size or not wanted:
                return total, False
            if wanted < size:
                checks.postpone(body.step)
                return total, False
            again = checks.compare(self._exchange, holds, self._optimizers)
        if (finding := checks.take_finding()) is not None:
            self._session.on_step_checked(finding.divergence, finding.spoils)
        return total, again

    def _passes_at_its_end(self, body: StepBody) -> bool:
        """Vote on a step in which no optimizer stepped, so that every step has exactly one vote.
        Return whether it passed."""
        return self._carries_out(partial(self._vote, body, at_end=True))

    def _ends_whole(self, body: StepBody) -> bool:
        """Whether collectives that were begun after the vote, or without one, have their results on
        the device, and messages between stages have arrived."""
        return self._carries_out(partial(self._world.finish_collectives, body.proved))

    def _carries_out(self, action: Callable[[], object]) -> bool:
        """Whether `action` succeeds; False if it fails, and the loop continues in another world.
        Raises other errors of it."""
        try:
            action()
        except Exception as error:
            if not self.survives(error):
                raise
            return False
        return True

    def _has_vote_passed_elsewhere(self, body: StepBody) -> bool:
        """State in the next world that this rank has complete gradients of the step. Return whether
        the vote passed for a surviving rank. This process has no process groups meanwhile."""
        cause, self._cause = self._cause, None
        while True:
            verdict = self._world.stand(self._standing(body), cause)
            if verdict.action is not StandingAction.FORWARD:
                self._verdict = verdict
                return False
            if verdict.step == body.step:
                return True

    @property
    def _is_run_again(self) -> bool:
        """Whether the step that was cut off is run again in the present world."""
        return self._body is not None and self._body.again and not self._world.ended

    def _end_record(self) -> None:
        if self._checks is not None:
            self._checks.stop()

    @property
    def _torn(self) -> str:
        """Why the state after the newest step is not to be continued from; empty if it is."""
        return self._held.torn or self._session.diverged

    def _standing(self, voting: StepBody | None = None) -> RankStanding:
        """Describe the training state of this process for the ranks of the next world.

        Args:
            voting: the step in whose vote this process is; None between two steps.
        """
        # A process without state, or without votes, cannot continue live.
        held, holds = self._held, self._session.holds
        if held.step is None or held.alone:
            return RankStanding()
        if not self._votes or holds is None:
            return RankStanding(step=held.step, torn="its script or policy cannot go on live")
        # Collect the first reason why its state is not exactly the state after a step.
        torn = self._torn or (voting.why_not_whole() if voting is not None else "")
        if self._session.repeats:
            torn = torn or "units are frozen until the window of steps is repeated"
        if held.adds_up:
            torn = torn or (
                f"gradients may add up over steps: no optimizer stepped in step {held.step}"
            )
        try:
            sources = holds.live.sources()
        except HoldfastError as error:
            torn, sources = torn or str(error), ()
        # Say which parts of the state only this rank has, so that all know what a loss would cost.
        given = [one for one in sources if one.seats is None]
        return RankStanding(
            step=held.step,
            ready=voting is not None and not torn,
            torn=torn,
            topology=str(holds.topology),
            rank=holds.rank,
            unshared=any(one.private and not (one.eager or one.of_stack) for one in given),
            experts=any(one.unit.kind is UnitKind.EXPERT for one in given),
            held=() if self._reseats is None else self._reseats.seated_experts(),
            layer_experts=0 if self._reseats is None else self._reseats.experts,
        )

    def _undo(self) -> str:
        """Undo the step that was cut off, if there is one. If that is impossible, the state of this
        process is torn from then on; return why."""
        self._end_record()
        body, self._body = self._body, None
        again, problem = body is not None and body.again, ""
        if self._model is not None and (self._world.groups_stay or again):
            reset_sharded(self._model)
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        if (holds := self._session.holds) is not None:
            reset_scalers(self._optimizers, holds.stateful)
        if self._held.step is not None and not self._held.alone:
            problem = body.undo() if body is not None and self._votes else ""
            torn = self._held.torn if again else self._torn
            self._held = replace(self._held, torn=torn or problem)
        self._world.go_back_to(self._held.step or 0)
        return problem

    def _build_again(self) -> None:
        """Build the sharded models again in a world of another size. If they lack the values of the
        old ones, the state of this process is torn from then on. Collective."""
        problem = self._world.build_again(self._optimizers, self._on_replaced)
        if problem and self._held.step is not None:
            self._held = replace(self._held, torn=self._held.torn or problem)

    def _on_replaced(self, replaced: Replaced) -> None:
        if self._begun is not None:
            self._begun.follow(replaced)

    def _enter(self, verdict: StandingVerdict | None, no_replay: str = "") -> int | None:
        """Carry out the verdict in a world whose groups are formed. Collective.

        Args:
            verdict: how to continue; None to restore the recovery line.
            no_replay: why lost ranks do not recover alone, if they should have.

        Returns:
            The number of completed steps; None if nothing was protected.
        """
        # Seats first: a restore fills the seats that experts have in this world.
        session, held = self._session, self._held
        keeps = held.step is not None and not held.alone
        live = verdict is not None and verdict.action is StandingAction.LIVE
        if self._reseats is not None and (holds := session.holds) is not None:
            self._reseats.follow(holds.live, self._exchange, holds.rank, outlived=keeps, moves=live)
        # Live: continue from the state of the ranks; new ranks get theirs from the others.
        if live and verdict is not None and session.go_on(verdict, held.torn):
            self._hold_after(verdict.step, keeps_log=keeps)
            self._return_logs(verdict.sources, ())
            return verdict.step
        # Replay: lost ranks recover alone. If they cannot, all ranks restore.
        if verdict is not None and verdict.action is StandingAction.REPLAY:
            outcome = self._replay(held, verdict)
            if not isinstance(outcome, str):
                return outcome
            no_replay = outcome
        elif verdict is not None and not live and self._pipeline is not None:
            no_replay = verdict.reason
        # Restore. Until it succeeds the state is torn, in case this world ends meanwhile.
        if held.step is not None:
            self._held = replace(held, torn="its restore was cut off")
        step = session.restore(no_replay)
        self._world.finish_collectives()  # ranks may have passed the bytes on between devices
        if step is not None or held.step is None:
            self._hold_after(step or 0)
        # A fresh start: the daemon must know if losing this member would lose everything.
        if step is None and held.step is None:
            own, world = self._standing(), self._world
            if not can_lose_member(own, world.size, world.nproc):
                world.begin_alone(held_beside=can_lose_rank(own, world.size))
        return step

    def _hold(self, body: StepBody) -> None:
        """Note that this process has the state after a completed step."""
        self._held = replace(self._held, step=body.step, adds_up=not body.stepped, torn="")
        self._body = None
        if self._pipeline is not None:
            self._pipeline.complete(body.step)

    def _hold_after(self, step: int, *, keeps_log: bool = False, alone: bool = False) -> None:
        """Note that a recovery has brought this process to the state after `step`; for `alone` see
        `HeldState`."""
        self._held = HeldState(step, alone=alone)
        self._world.go_back_to(step)
        if self._checks is not None:
            self._checks.restart(step)
        if self._reseats is not None and self._session.holds is not None:
            self._session.on_reseated(self._reseats.report(self.epoch, step), moved=False)
        if self._pipeline is not None and not keeps_log:
            self._pipeline.log.restart(step)
        # Steps after it are taken again, and what they send is needed until a later line.
        self._protected = min(self._protected, step)

    def _note_protected(self, handle: SaveHandle, protected: Future[int]) -> None:
        # A step after the one that this process has gone back to is taken again.
        if protected.exception() is None and handle._first <= (self._held.step or 0):
            self._protected = max(self._protected, handle._first)

    def _rebalance(self, step: int) -> bool:
        """Every `rebalance_steps` steps, move experts to other seats if their loads justify it.
        Return False if the world ended meanwhile. Collective."""
        self._bodies_s += time.monotonic() - self._began_s
        session, steps = self._session, self._rebalance_steps
        if self._reseats is None or not steps or step % steps:
            return True
        step_s, self._bodies_s = self._bodies_s / steps, 0.0
        if (holds := session.holds) is None:
            return True
        try:
            session.wait_staged()
            moved = self._reseats.rebalance(
                holds.live, self._exchange, holds.rank, step_s=step_s, steps=steps
            )
        except Exception as error:
            if not self.survives(error):
                raise
            return False
        if moved:
            session.on_reseated(self._reseats.report(self.epoch, step), moved=True)
        return True

    # --- localized recovery -----------------------------------------------------------------------

    def _replay(self, held: HeldState, verdict: StandingVerdict) -> int | str:
        """Let lost ranks restore the line, and repeat the steps after it, alone. Give lost ranks of
        other stages their state live. Collective.

        Returns:
            The number of completed steps, or the reason why all ranks have to restore instead.
        """
        # Agree on who restores, and repeats which steps. A replay that is cut off is followed by
        # another one, with the same logs, while that leads further.
        session, pipeline = self._session, self._pipeline
        step = None if held.alone else held.step
        replicated = verdict.sources
        plan = agree_on_replay(
            session, pipeline, self._exchange, step, held.torn, self._progress, replicated
        )
        if isinstance(plan, str):
            return plan
        # Collect the messages that the others have logged, if there are steps to repeat.
        repeats = plan.line < plan.target
        replay: BoundaryReplay | None = None
        if repeats and pipeline is not None:
            self._progress = plan.progress
            given = hand_over_logs(plan, pipeline, self._exchange, self._world.rank)
            if isinstance(given, str):
                return given
            replay = given
        # Replicas give their state to lost ranks that need not repeat anything.
        if plan.given:
            sources = {rank: replicated[rank] for rank in plan.given}
            if not session.hand_over(replace(verdict, sources=sources), plan.scope):
                return f"ranks {list(plan.given)} did not get the state of their replicas"
            self._world.finish_collectives()
            if self._world.rank in plan.given:
                self._hold_after(plan.target)
            self._return_logs(plan.given, plan.scope)
        # Restore the ranks in the scope. All others keep their state, if it proves to be that of
        # the line.
        own = self._world.rank in plan.scope
        if own:
            self._held = HeldState(plan.line, alone=True)
        differs = session.restore_lost(plan, own=own)
        if own:
            self._hold_after(plan.line, alone=True)
        if differs:
            self._held = replace(self._held, torn=differs)
        # A restored rank repeats steps from the line on, unless the line is the step of the others.
        if not own or pipeline is None or not repeats:
            return self._end_replay(plan, differs)
        self._replaying, pipeline.replay = plan, replay
        return plan.line

    def _return_logs(self, given: Collection[int], scope: Collection[int]) -> None:
        """Return their logs to the ranks that replicas have `given` their state, if their
        neighbours, outside the `scope`, have kept what they received. Collective."""
        pipeline = self._pipeline
        if pipeline is not None and pipeline.log.keeps_received and given:
            return_logs(given, {*given, *scope}, pipeline, self._exchange, self._world.rank)

    def _complete_repeated(self, plan: ReplayPlan, body: StepBody) -> bool:
        """Complete a step that this rank has repeated. It is not saved again. Return False if the
        world has ended, or if all ranks have restored the line instead."""
        if not self._ends_whole(body):
            return False
        self._session.on_step_repeated(body.step)
        self._hold(body)
        self._note_repeated(body.step)
        if self._world.ended:
            return False
        if body.step < plan.target:
            return True
        try:
            step = self._end_replay(plan)
        except Exception as error:
            if not self.survives(error):
                raise
            return False
        if step != plan.target:
            self._restored = step
        return step == plan.target

    def _note_repeated(self, step: int) -> None:
        reached = max(step, self._progress.reached)
        self._progress = msgspec.structs.replace(self._progress, reached=reached)

    def _end_replay(self, plan: ReplayPlan, problem: str = "") -> int:
        """Wait until all lost ranks have reached the step of the others, and continue with it. If a
        replay differed from the first execution, or a rank has a `problem`, restore the line on all
        ranks. Collective.

        Returns:
            The number of completed steps.
        """
        # Wait for every rank: a replay takes as long as the steps that it repeats.
        self._replaying = None
        self._world.finish_collectives()  # a repeated step has no vote that would do so
        replayed = "" if self._pipeline is None else self._pipeline.end_replay()
        texts = self._world.gather_patiently(problem or replayed)
        problems = list(dict.fromkeys(text for text in texts if text))
        for text in problems:
            _log.error("the lost ranks did not recover alone: %s", text)
        # All states belong together: continue with the next step.
        repeated_after = plan.line if self._world.rank in plan.scope else None
        if not problems and self._session.end_replay(plan.target, repeated_after):
            self._held = HeldState(plan.target)
            self._note_repeated(plan.target)
            if self._checks is not None:
                self._checks.restart(plan.target)
            return plan.target
        # Some state differs: restore on all ranks, with new sessions in the same world.
        self._session.close()
        self._begin()
        step = self._enter(None, problems[0] if problems else "replicas differ")
        assert step is not None, "the line of an epoch stays"
        return step

    # --- passed on to the session of the present world --------------------------------------------

    @property
    def epoch(self) -> int:
        return self._session.epoch

    @property
    def problem(self) -> HoldfastError | None:
        return self._session.problem

    @property
    def holds(self) -> TrainingState | None:
        return self._session.holds

    @property
    def counters(self) -> SaveCounters:
        return self._session.counters

    def restore(self) -> int | None:
        return self._enter(self._world.verdict)

    def save(self, step: int) -> SaveHandle:
        if not self._saves:
            return self._save_of_script(step)
        handle = SaveHandle(0)
        handle._fail(
            InvalidJobError("session.steps saves after each step; do not call save as well")
        )
        return handle

    def _save_of_script(self, step: int) -> SaveHandle:
        """Save for a loop without `steps`, whose ranks do not vote. Where groups stay, torch ends
        no process whose communicators have failed, so ask these whether the state is complete."""
        if self._world.groups_stay:
            try:
                self._world.finish_collectives()
            except Exception as error:  # `save` never raises.
                handle = SaveHandle(0)
                handle._fail(SaveFailedError(f"save({step}): the state is incomplete: {error}"))
                return handle
        return self._session.save(step)

    def count_tokens(
        self, layer: int, counts: Sequence[float] | torch.Tensor, assignments: int | None = None
    ) -> None:
        self._session.count_tokens(layer, counts, assignments)

    def backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        *,
        retain_graph: bool | None = None,
    ) -> None:
        self._session.backward(loss, gradient, retain_graph=retain_graph)

    def bubble(self) -> AbstractContextManager[None]:
        return self._session.bubble()

    def capacity_factors(self, layer: int, experts: int) -> list[float]:
        return self._session.capacity_factors(layer, experts)

    @property
    def capacity_room(self) -> float:
        return self._session.capacity_room

    def prepare(self) -> None:
        self._session.prepare()

    def wait_staged(self) -> None:
        self._session.wait_staged()

    def close(self) -> None:
        self._hooks.remove()
        self._session.close()
