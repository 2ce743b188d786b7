"""Session of a process that stays when its world changes.

For each world it makes a session with a daemon, as a process that starts again would: a session
belongs to one epoch, and nothing of it can reach the next one. Model, optimizers and stateful
objects stay; the restore writes into them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast._agree.exchange import Exchange
from holdfast._capture.partial_state import START, PartialState
from holdfast._causes import drop_frames
from holdfast._daemon.handles import SaveHandle
from holdfast._elastic.pipeline import Pipeline
from holdfast._elastic.stage_replay import agree_on_replay, hand_over_logs
from holdfast._elastic.step_start import StepStart
from holdfast._elastic.world import World
from holdfast._save.tally import SaveCounters
from holdfast._session.interface import Session, TrainingState, WorldSession
from holdfast._state.capture import LiveState
from holdfast._state.collect import reset_scalers
from holdfast._state.dtensors import is_dtensor
from holdfast._state.nested import StepHooks
from holdfast._steps import TrainStep, steps_of
from holdfast_core.elastic_experts.reports import PlanReport
from holdfast_core.errors import (
    BeginsAnewError,
    HoldfastError,
    InvalidJobError,
    UnreachableError,
)
from holdfast_core.protection.replaying import ReplayPlan
from holdfast_core.protection.standing import (
    RankStanding,
    StandingAction,
    StandingVerdict,
    can_lose_member,
)
from holdfast_core.snapshots.units import UnitKind

_log = logging.getLogger("holdfast")


def check_staying(model: nn.Module) -> None:
    """Refuse a model that holds process groups of its own, which nothing could form again.

    Raises:
        InvalidJobError: the model is wrapped by DDP, or its parameters are DTensors.
    """
    wrapped = any(isinstance(part, DistributedDataParallel) for part in model.modules())
    if wrapped or any(is_dtensor(each) for each in model.parameters()):
        raise InvalidJobError(
            "this model keeps process groups of its own (DistributedDataParallel, FSDP2 or another "
            "use of DTensor), which do not change with a world: leave `world` out, so that all "
            "processes start again after a failure"
        )


@dataclass(frozen=True, slots=True)
class HeldState:
    """Training state that this process has between two steps."""

    step: int | None = None
    """Number of completed steps; None before anything was restored or begun."""
    torn: str = ""
    """Why it is not the state after them; empty when it is."""
    adds_up: bool = False
    """Whether gradients may be part of it, because no optimizer stepped in the newest step."""


class StepBody:
    """The body of a step, from its beginning to its end."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.voted = False
        """Whether its vote has passed."""
        self.stepped = False
        """Whether an optimizer has stepped, or is about to."""
        self.cut = False
        """Whether it was cut off before its vote passed."""
        self._start: StepStart | None = None
        self._problem = ""

    def note(self, holds: TrainingState) -> None:
        """Note what the step may change before its vote."""
        try:
            self._start = StepStart(holds.live, holds.stateful, self.step - 1)
        except Exception as error:  # raised by the user's state_dict, or by torch
            self._problem = f"the state before step {self.step} could not be noted: {error}"

    def why_not_whole(self) -> str:
        """Why the step has no whole state to go back to any more; empty while it has."""
        return self._try(StepStart.check)

    def undo(self) -> str:
        """Put back what the step has changed; return why that cannot be done, or nothing."""
        if self.voted or self.stepped:
            return f"step {self.step} was cut off after its vote"
        return self._try(StepStart.put_back)

    def _try(self, action: Callable[[StepStart], None]) -> str:
        """Apply `action` to what was noted; return why that cannot be done, or nothing."""
        if self._start is None:
            return self._problem
        try:
            action(self._start)
        except HoldfastError as error:
            return f"step {self.step} was cut off: {error}"
        return ""


class Reseats(Protocol):
    """Experts in seats, which take others when the world changes: `holdfast._moe.reseating`."""

    @property
    def experts(self) -> int:
        """Experts of each layer."""

    def seated_experts(self) -> tuple[tuple[int, ...], ...]:
        """For each layer the experts in this rank's seats."""

    def follow(
        self, live: LiveState, exchange: Exchange, rank: int, *, outlived: bool, moves: bool
    ) -> None:
        """Take the seats of a plan for the present ranks. Collective."""

    def rebalance(
        self, live: LiveState, exchange: Exchange, rank: int, *, step_s: float, steps: int
    ) -> bool:
        """Take other seats in the same world, if loads are worth it. Collective."""

    def report(self, epoch: int, step: int) -> PlanReport:
        """The plan in numbers."""


class ElasticSession(Session):
    """A session in each world, one after the other.

    Args:
        world: the training world.
        make: makes the session of the present world. Collective.
        optimizers: their gradients are dropped when a step is cut off.
        exchange_timeout_s: time that the fastest rank waits for the slowest at the end.
        votes: whether ranks vote before each step of the optimizer, so that training can go on from
            what they have. Equal on all ranks.
        pipeline: the script's boundaries between pipeline stages, if it has any.
        reseats: the model's experts in seats, if it has any.
        rebalance_steps: steps from one look at their loads to the next; 0: none. Equal on all
            ranks.
    """

    def __init__(
        self,
        world: World,
        make: Callable[[], WorldSession],
        optimizers: Sequence[Any],
        exchange_timeout_s: float,
        *,
        votes: bool = False,
        pipeline: Pipeline | None = None,
        reseats: Reseats | None = None,
        rebalance_steps: int = 0,
    ) -> None:
        self._world, self._make, self._reseats = world, make, reseats
        self._rebalance_steps = rebalance_steps
        self._bodies_s = 0.0
        """Time of the bodies of steps since the last look at loads."""
        self._began_s = 0.0
        """When the newest body began."""
        self._optimizers, self._timeout_s = tuple(optimizers), exchange_timeout_s
        self._votes = votes and world.stays
        self._pipeline = pipeline
        self._replaying: ReplayPlan | None = None
        """Replay of which this rank's steps are a part."""
        self._tried_replay = False
        """Whether the newest step has been recovered by a replay, or was to be: a second one would
        fail alike."""
        self._protected = 0
        """Step that a restore of the newest protected generation brings back, as far as this
        process knows. Any thread."""
        self._restored: int | None = None
        """Step to which a replay that differed has led back."""
        self._cause: Exception | None = None
        self._saves = False
        """Whether the loop of `steps` saves."""
        self._held = HeldState()
        self._body: StepBody | None = None
        """The step whose body runs, or was cut off."""
        self._verdict: StandingVerdict | None = None
        """Verdict of the next world that was reached within a step."""
        self._session: WorldSession
        self._exchange: Exchange
        self._begin()
        self._hooks = StepHooks(self._optimizers, self._before_optimizer)

    def _begin(self, kept: PartialState = START) -> None:
        """Make what belongs to one world. Collective.

        Args:
            kept: state of the policy in the world before.
        """
        self._session = self._make()
        self._session.follow(kept)
        self._exchange = self._world.exchange(self._timeout_s)

    # --- the loop ---------------------------------------------------------------------------------

    def steps(self, total: int, *, seed: int | None = None) -> Iterator[TrainStep]:
        self._saves = True
        return steps_of(self, total, seed)

    def begin_steps(self) -> int:
        """Restore; see `Runner`."""
        try:
            return self.restore() or 0
        except Exception as error:
            if not self.survives(error):
                raise
        return self.go_back()

    def begin(self, step: int) -> None:
        """Note the state before `step`; see `Runner`."""
        self._body, self._began_s = StepBody(step), time.monotonic()
        if self._pipeline is not None:
            self._pipeline.log.drop_to(self._protected)
            self._pipeline.begin(step)
        if self._votes and (holds := self._session.holds) is not None:
            self._body.note(holds)

    def complete(self, step: int) -> bool:
        """Save the state after `step`, unless its world has ended; see `Runner`.

        Raises:
            InvalidJobError: in a process that was forked from this one.
            Exception: the failure of a collective that the script has caught: what it computed is
                not the state after `step`.
        """
        self._world.check_process()
        failure, body = self._world.failure, self._body
        if failure is not None:
            if not self.survives(failure):
                raise failure
            drop_frames(failure)
        if failure is not None or body is None or body.cut:
            return False
        if self._replaying is not None:
            return self._complete_repeated(self._replaying, body)
        if self._votes:
            if not (body.voted or self._passes_at_its_end(body)):
                return False
        elif self._world.ended:
            return False
        self._hold(body)
        self._tried_replay = False
        if self._world.ended:
            return False
        handle = self._session.save(step)
        if self._pipeline is not None:
            handle.protected.add_done_callback(partial(self._note_protected, handle))
        return self._rebalance(step)

    def survives(self, error: Exception) -> bool:
        """Whether the loop goes on after `error`; see `Runner`."""
        if not self._world.survives(error):
            return False
        _log.warning("a step was cut off: %s: %s", type(error).__name__, error)
        self._cause = error
        return True

    def go_back(self) -> int:
        """Enter the next world, and go on there live or restore; see `Runner`.

        Raises:
            BeginsAnewError: there is nothing to go on from, and nothing was protected yet. Only
                a process that starts anew can begin from the beginning.
            Exception: the failure that cut the step off, when no new world came.
        """
        while True:
            restored, self._restored = self._restored, None
            if restored is not None:
                return restored
            self._undo()
            self._replaying = None
            if self._pipeline is not None:
                self._pipeline.end_replay()
            cause, self._cause = self._cause, None
            verdict, self._verdict = self._verdict, None
            while verdict is None or verdict.action is StandingAction.FORWARD:
                verdict = self._world.stand(self._standing(), cause)
            kept = self._session.leave()
            try:
                self._world.form()
                self._begin(kept)
                step = self._enter(verdict)
            except Exception as error:
                if not self.survives(error):
                    raise
                continue
            if step is None:
                raise BeginsAnewError(
                    f"epoch {self._world.epoch} starts from the beginning, because nothing was "
                    f"protected yet; this process ends so that a new one can"
                )
            return step

    def finish_steps(self) -> bool:
        """Wait until all ranks have completed all steps; see `Runner`."""
        try:
            self._exchange.gather(b"")
        except Exception as error:
            if not self.survives(error):
                raise
            return False
        return True

    # --- the vote ---------------------------------------------------------------------------------

    def _before_optimizer(self, optimizer: object) -> None:
        """Vote before the first optimizer of a step changes a byte; then wait for the save."""
        body = self._body
        if body is not None and not body.stepped:
            if self._votes and not body.voted and self._replaying is None:
                self._vote(body)
            body.stepped = True
        self._session.before_step(optimizer)

    def _vote(self, body: StepBody) -> None:
        """Return when all ranks are known to have complete gradients of this step: the vote passed,
        or its world ended and a rank for which it passed is left. Collective.

        Raises:
            UnreachableError: the step is cut off.
            InvalidJobError: ranks are at different steps.
        """
        if body.cut:
            raise UnreachableError(f"step {body.step} was cut off; leave its body")
        if self._world.failure is not None:
            raise UnreachableError(
                f"step {body.step} has no complete gradients: a collective failed"
            ) from self._world.failure
        try:
            [total] = self._exchange.add([body.step])
        except Exception as error:
            if not self.survives(error):
                raise
            drop_frames(error)
            total = None
        if total is None:
            body.cut = not self._has_vote_passed_elsewhere(body)
            if body.cut:
                raise UnreachableError(f"step {body.step} was cut off before its vote passed")
        elif total != body.step * self._world.size:
            raise InvalidJobError(
                f"ranks are at different steps, this one at {body.step}: each rank runs the body "
                f"of each step of session.steps once"
            )
        body.voted = True

    def _passes_at_its_end(self, body: StepBody) -> bool:
        """Vote on a step in which no optimizer stepped, so that each step has one vote."""
        try:
            self._vote(body)
        except Exception as error:
            if not self.survives(error):
                raise
            return False
        return True

    def _has_vote_passed_elsewhere(self, body: StepBody) -> bool:
        """State in the next world that this rank has complete gradients of the step; return whether
        the vote passed for a rank that is left. This process has no groups meanwhile."""
        cause, self._cause = self._cause, None
        while True:
            verdict = self._world.stand(self._standing(body), cause)
            if verdict.action is not StandingAction.FORWARD:
                self._verdict = verdict
                return False
            if verdict.step == body.step:
                return True

    def _standing(self, voting: StepBody | None = None) -> RankStanding:
        """State what this process has, between two steps or in the vote of `voting`."""
        held, holds = self._held, self._session.holds
        if held.step is None:
            return RankStanding()
        if not self._votes or holds is None:
            return RankStanding(step=held.step, torn="its script or policy cannot go on live")
        torn = held.torn or (voting.why_not_whole() if voting is not None else "")
        if self._session.repeats:
            torn = torn or "units are frozen until the window of steps is repeated"
        if held.adds_up:
            torn = torn or f"gradients may add up over steps: none stepped in step {held.step}"
        try:
            sources = holds.live.sources()
        except HoldfastError as error:
            torn, sources = torn or str(error), ()
        given = [one for one in sources if one.seats is None]
        return RankStanding(
            step=held.step,
            ready=voting is not None and not torn,
            torn=torn,
            topology=str(holds.topology),
            rank=holds.rank,
            unshared=any(one.private and not (one.eager or one.of_stack) for one in given),
            experts=any(one.unit.kind is UnitKind.EXPERT for one in given),
            logs=self._pipeline is not None and not self._tried_replay,
            held=() if self._reseats is None else self._reseats.seated_experts(),
            layer_experts=0 if self._reseats is None else self._reseats.experts,
        )

    def _undo(self) -> None:
        """Put back what a step that was cut off has left, as far as it can be."""
        body, self._body = self._body, None
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        if (holds := self._session.holds) is not None:
            reset_scalers(self._optimizers, holds.stateful)
        if body is not None and self._held.step is not None:
            problem = body.undo() if self._votes else ""
            self._held = replace(self._held, torn=self._held.torn or problem)

    def _enter(self, verdict: StandingVerdict | None, no_replay: str = "") -> int | None:
        """Go on in a world whose groups are formed; return the number of completed steps, None
        where nothing was protected. Collective.

        Args:
            no_replay: why no stage repeats steps alone, where one was to.
        """
        session, held = self._session, self._held
        live = verdict is not None and verdict.action is StandingAction.LIVE
        if self._reseats is not None and (holds := session.holds) is not None:
            outlived = held.step is not None
            self._reseats.follow(
                holds.live, self._exchange, holds.rank, outlived=outlived, moves=live
            )
        if live and verdict is not None and session.go_on(verdict, held.torn):
            self._hold_after(verdict.step, keeps_log=held.step is not None)
            return verdict.step
        if verdict is not None and verdict.action is StandingAction.REPLAY:
            found = self._replay(held)
            if not isinstance(found, str):
                return found
            no_replay = found
        elif verdict is not None and not live and self._pipeline is not None:
            no_replay = verdict.reason
        if held.step is not None:
            self._held = replace(held, torn="its restore was cut off")
        step = session.restore(no_replay)
        if step is not None or held.step is None:
            self._hold_after(step or 0)
        if (
            step is None
            and held.step is None
            and not can_lose_member(self._standing(), self._world.size, self._world.nproc)
        ):
            self._world.begin_alone()
        return step

    def _hold(self, body: StepBody) -> None:
        """Take the state after a completed step as what this process has."""
        self._held, self._body = HeldState(body.step, adds_up=not body.stepped), None
        if self._pipeline is not None:
            self._pipeline.complete(body.step)

    def _hold_after(self, step: int, *, keeps_log: bool = False) -> None:
        """Take the state after `step`, to which this process was brought, as what it has."""
        self._held = HeldState(step)
        if self._reseats is not None and self._session.holds is not None:
            self._session.on_reseated(self._reseats.report(self.epoch, step), moved=False)
        if self._pipeline is not None and not keeps_log:
            self._pipeline.log.restart(step)

    def _note_protected(self, handle: SaveHandle, protected: Future[int]) -> None:
        if protected.exception() is None:
            self._protected = max(self._protected, handle._first)

    def _rebalance(self, step: int) -> bool:
        """After each `rebalance_steps` steps, let experts take other seats if loads are worth it;
        return False when the world has ended meanwhile. Collective."""
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

    def _replay(self, held: HeldState) -> int | str:
        """Let lost stages repeat steps alone; return the number of completed steps, or the reason
        why all ranks have to restore. Collective."""
        session, pipeline = self._session, self._pipeline
        if pipeline is None:
            return "this rank's script has no pipeline"
        self._tried_replay = True
        plan = agree_on_replay(session, pipeline, self._exchange, held.step, held.torn)
        if isinstance(plan, str):
            return plan
        replay = hand_over_logs(plan, pipeline, self._exchange, self._world.rank)
        if isinstance(replay, str):
            return replay
        own = self._world.rank in plan.scope
        session.restore_stages(own=own)
        if not own:
            return self._end_replay(plan)
        self._hold_after(plan.line)
        if plan.line == plan.target:
            return self._end_replay(plan)
        self._replaying, pipeline.replay = plan, replay
        return plan.line

    def _complete_repeated(self, plan: ReplayPlan, body: StepBody) -> bool:
        """Go on after a step that this rank has repeated, and that nobody saves again; return False
        when its world has ended, or has gone back to the line."""
        self._session.on_step_repeated(body.step)
        self._hold(body)
        if self._world.ended:
            return False
        if body.step < plan.target:
            return True
        self._replaying = None
        try:
            step = self._end_replay(plan)
        except Exception as error:
            if not self.survives(error):
                raise
            return False
        if step != plan.target:
            self._restored = step
        return step == plan.target

    def _end_replay(self, plan: ReplayPlan) -> int:
        """Wait until all lost stages have come to the others' step, and go on with it; where a
        replay differed, restore the line on all ranks. Collective.

        Returns:
            The number of completed steps.
        """
        assert self._pipeline is not None
        texts = self._world.gather_patiently(self._pipeline.end_replay())
        problems = [text for text in texts if text]
        for text in problems:
            _log.error("a replay differs from the first execution: %s", text)
        repeated_after = plan.line if self._world.rank in plan.scope else None
        if not problems and self._session.end_replay(plan.target, repeated_after):
            self._held = HeldState(plan.target)
            return plan.target
        self._session.close()
        self._begin()
        step = self._enter(None, problems[0] if problems else "replicas of a stage differ")
        assert step is not None, "the line of an epoch stays"
        return step

    # --- everything else is the present session's -------------------------------------------------

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
            return self._session.save(step)
        handle = SaveHandle(0)
        handle._fail(InvalidJobError("session.steps saves after each step: call no save beside it"))
        return handle

    def count_tokens(
        self, layer: int, counts: Sequence[float] | torch.Tensor, assignments: int | None = None
    ) -> None:
        self._session.count_tokens(layer, counts, assignments)

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
