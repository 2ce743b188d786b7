"""The session of a process with a daemon.

Everything here runs on the training thread. So `save` must be quick, and it must not raise: the
handle reports failures. If the settings require protection, a refusal is raised as well, by `save`
or before the next step of an optimizer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import msgspec
import torch

from holdfast._agree.exchange import Exchange
from holdfast._agree.interval import DueSaves
from holdfast._agree.replica_check import ReplicaCheck
from holdfast._agree.replicas import UnitDigests, differing, digests_of
from holdfast._capture.apart import check_states_apart
from holdfast._capture.capacity import Capacity
from holdfast._capture.optimizer_steps import OptimizerSteps
from holdfast._capture.partial_state import START, PartialState
from holdfast._capture.routers import Routers
from holdfast._capture.strategy import CaptureStrategy, SaveCall
from holdfast._capture.tokens import Tokens
from holdfast._checking.recording import WATCH, Watched
from holdfast._copying.device_hashes import hasher_of_process
from holdfast._copying.devices import Device
from holdfast._copying.engine import CopyEngine
from holdfast._daemon.client import DaemonClient, LiveRequest
from holdfast._daemon.handles import SaveHandle, completed_steps
from holdfast._daemon.unsaved import OF_PROCESS
from holdfast._restoring.replay import Replay
from holdfast._restoring.restore import Restore, Restored
from holdfast._save.saver import Saver
from holdfast._save.tally import SaveCounters
from holdfast._save.task import Task
from holdfast._session import torch_waits
from holdfast._session.interface import TrainingState, WorldSession
from holdfast._settings import Settings
from holdfast._state.capture import LiveState, TensorSource
from holdfast._state.collect import Stateful, collect_with, states_of
from holdfast._state.extras import encode_extras
from holdfast._state.in_place import InPlaceCheck
from holdfast._state.nested import StepHooks, notices_steps
from holdfast._state.unseen import UnseenState
from holdfast_core.corruption import Divergence
from holdfast_core.elastic_experts.reports import PlanReport
from holdfast_core.errors import (
    CorruptError,
    HoldfastError,
    InvalidJobError,
    NoRecoveryLineError,
    ProtectionRequiredError,
    SaveFailedError,
    SnapshotSkippedError,
    StepOrderError,
)
from holdfast_core.protection.replaying import ReplayPlan
from holdfast_core.protection.standing import StandingVerdict
from holdfast_core.states import RestoreSource
from holdfast_core.topology import Topology

_log = logging.getLogger("holdfast")
_DIGESTS = msgspec.json.Decoder(UnitDigests)


class ProtectedSession(WorldSession):
    """A session with a daemon."""

    def __init__(
        self,
        *,
        live: LiveState,
        stateful: Mapping[str, Stateful],
        topology: Topology,
        rank: int,
        client: DaemonClient,
        exchange: Exchange,
        device: Device,
        settings: Settings,
        replica_check: ReplicaCheck,
        strategy: CaptureStrategy,
        interval: DueSaves,
        hooks: bool = True,
    ) -> None:
        self._live, self._interval, self._stateful = live, interval, dict(stateful)
        self._settings, self._device = settings, device
        engine = self._engine = _engine_of(device, settings)
        rules = strategy.rules
        self._takes_apart = strategy.leaves_out or bool(rules.window)
        self._repeats = bool(rules.window)
        """Whether experts of one generation may be captured at different steps."""
        self._counts_tokens = strategy.leaves_out or rules.reorders
        self._gradients = strategy.gradients
        self._optimizer_steps = OptimizerSteps(live, rules.repeats if rules.window else None)
        self._saver = Saver(
            client, exchange, device, engine, topology, rank, settings, replica_check, strategy
        )
        self._restore = Restore(
            client=client,
            live=live,
            stateful=self._stateful,
            topology=topology,
            rank=rank,
            exchange=exchange,
            engine=engine,
            settings=settings,
            policy=strategy,
        )
        self._stale, self._reseated, self._spoils = True, False, ""
        self._sources: Sequence[TensorSource] | None = None
        self._eager: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
        self._last_step: int | None = None
        self._began = ""
        """The newest call after which a restore is refused; empty before one."""
        self._number, self._last_save_s = 0, 0.0
        self._tokens = Tokens(strategy.token_parts)
        self._capacity, self._closed, self._kept = Capacity(), False, START
        self._meter = torch_waits.measured(topology, rank, device)
        self._routers = None
        """The hooks that count tokens; None if nobody needs to know them."""
        if self._counts_tokens:
            self._routers = Routers(live, strategy, self._count, self._capacity)
        self._replay: Replay | None = None
        """The replay of a sparse window; None once its last step is repeated."""
        self._restored_from = RestoreSource.LIVE
        """Source of what this rank has restored alone; LIVE if it has not."""
        unheld = [one for one in live.optimizers if not notices_steps(one)]
        self._unheld, self._unseen = unheld, UnseenState(live.optimizers)
        before = self.before_step if hooks else None
        self._hooks = StepHooks(
            live.optimizers, before, self._after_step, watch_closures=self._repeats
        )
        self._held = not unheld
        """Whether a hook lets every optimizer wait until a save is staged."""
        self._asked = False
        """Whether the loop has called `wait_staged` since the previous save."""
        if unheld:
            _warn_of_unheld_state(unheld)

    @property
    def live(self) -> LiveState:
        """The captured state of the model and the optimizers."""
        return self._live

    @property
    def holds(self) -> TrainingState:
        return TrainingState(
            live=self._live,
            stateful=self._stateful,
            topology=self._restore.topology,
            rank=self._restore.rank,
        )

    @property
    def _watched(self) -> Watched:
        return Watched(live=self._live, stateful=self._stateful, window=self._settings.window)

    @property
    def repeats(self) -> bool:
        return self._replay is not None

    @property
    def diverged(self) -> str:
        if self._spoils:
            return self._spoils
        return "its replicas differ" if self._saver.replica_check.problem is not None else ""

    @property
    def epoch(self) -> int:
        return self._saver.epoch or 0

    @property
    def problem(self) -> HoldfastError | None:
        return self._saver.problem or self._saver.replica_check.problem or self._unseen.problem

    @property
    def counters(self) -> SaveCounters:
        return self._saver.tally.counters

    @torch.inference_mode(False)
    def restore(self, no_replay: str = "") -> int | None:
        if self._began:
            raise NoRecoveryLineError(
                f"restore() was called after {self._began} of this session: call it once, before "
                f"the first save; to return to the newest protected step, end the process and let "
                f"the job start it again"
            )
        self._saver.wait_staged()
        return self._resume(self._restore.run(no_replay), "restore()")

    def on_step_checked(self, found: Divergence, spoils: str) -> None:
        self._saver.finding = found
        if spoils:
            self._spoils = spoils
            self._saver.pipeline.problem = CorruptError(
                f"{spoils}. No snapshot is taken until the job goes back to one from before that"
            )

    def go_on(self, verdict: StandingVerdict, problem: str) -> bool:
        outcome = self._restore.go_on(verdict, problem, self._kept)
        return outcome is not None and self._goes_on(outcome)

    def on_reseated(self, plan: PlanReport, *, moved: bool) -> None:
        self.counters.plan = plan
        self._stale, self._reseated = self._stale or moved, self._reseated or moved
        if moved:
            self._optimizer_steps.on_reseated()

    def follow(self, kept: PartialState) -> None:
        self._kept = kept

    def leave(self) -> PartialState:
        self.close()
        if self._began:
            tokens, self._tokens = self._tokens, self._tokens.empty_copy()
            self._kept = self._saver.leave(self._number, tokens, self._capacity.tracker)
        return self._kept

    def line(self) -> tuple[int, int, bool]:
        return self._restore.line()

    def hand_over(self, verdict: StandingVerdict, apart: Collection[int]) -> bool:
        return self._restore.hand_over(verdict, self._kept, apart)

    def restore_lost(self, plan: ReplayPlan, *, own: bool) -> str:
        self._saver.wait_staged()
        if not own:
            return self._restore.attend(plan)
        outcome = self._restore.run(alone=plan)
        self._replay, self._restored_from = outcome.replay, outcome.source
        return outcome.differs

    def on_step_repeated(self, step: int) -> None:
        OF_PROCESS.on_save()  # Steps that were captured in their first execution are not saved.
        if self._replay is not None:
            self._continue_replay(self._replay, step)

    def end_replay(self, step: int, repeated_after: int | None) -> bool:
        return self._goes_on(self._restore.live_after(step), repeated_after)

    def _goes_on(self, outcome: Restored, repeated_after: int | None = None) -> bool:
        """Continue live from `outcome`, if all replicas have equal states. Collective."""
        problem = self._compare()
        if problem:
            _log.warning("training does not go on live: %s", problem)
            return False
        assert outcome.step is not None
        self._restore.client.go_live(
            LiveRequest(
                epoch=outcome.epoch,
                live=outcome.step,
                repeated_after=repeated_after,
                restored_from=self._restored_from,
            )
        )
        self._resume(outcome, "going on live")
        return True

    def _compare(self) -> str:
        """Compare the states of all replicas; return how they differ, empty if they are equal.
        Collective."""
        restore, fence = self._restore, self._device.fence()
        sources, topology = self._live.sources(), restore.topology
        own = digests_of(sources, topology, restore.rank, self._engine, fence)
        texts = restore.exchange.gather(msgspec.json.encode(own))
        digests = {rank: _DIGESTS.decode(text) for rank, text in enumerate(texts)}
        wrong = differing(digests, topology)
        return "; ".join(f"ranks {ranks} differ in {unit}" for unit, ranks in wrong[:3])

    def _resume(self, outcome: Restored, began: str) -> int | None:
        """Begin training after a recovery that has brought this rank to `outcome`."""
        self._stale = True
        self._saver.pipeline.resume(outcome)
        self._number = outcome.experts.ledger.snapshots
        self._capacity.resume(outcome.experts.replenishing, someone=outcome.replenishing)
        self._last_step, self._replay = outcome.step, outcome.replay
        if outcome.replenishing and self._routers is not None:
            self._routers.warn_of_capacity()
        self._began = began
        OF_PROCESS.on_restored(outcome.step)
        if WATCH.recorder is not None:
            WATCH.recorder.on_restored(self._watched, outcome.step)
        if self._replay is not None and not self._held:
            raise InvalidJobError(
                "the recovery line is a sparse window, whose steps are repeated with frozen units: "
                "that needs optimizers that are torch.optim.Optimizer; derive yours from it"
            )
        return outcome.step

    def save(self, step: int) -> SaveHandle:
        OF_PROCESS.on_save()
        recorder = WATCH.recorder
        if recorder is None:
            return self._save_or_refuse(step)
        recorder.before_save(self._watched, step)
        handle = self._save_or_refuse(step)
        recorder.after_save(self._watched, handle)
        return handle

    def _save_or_refuse(self, step: int) -> SaveHandle:
        """Take a save; the handle reports why it was not taken."""
        # A repeated step of a window was captured in its first execution.
        if self._replay is not None and self._continue_replay(self._replay, step):
            handle = SaveHandle(completed_steps(step))
            why = f"step {step} was repeated; the restored window holds it"
            handle._fail(SnapshotSkippedError(why))
            return handle
        # Any other failure goes into the handle: training must not end for it.
        handle, began_s = SaveHandle(self._last_step or 0), time.monotonic()
        try:
            handle = SaveHandle(completed_steps(step))
            self._save(handle)
        except HoldfastError as error:
            self._saver.refuse(handle, error)
        except Exception as error:
            _log.debug("unexpected failure of save(%d)", handle.step, exc_info=True)
            why = f"save({handle.step}) failed with {type(error).__name__}: {error}"
            self._saver.refuse(handle, SaveFailedError(why))
        self._count_wait(began_s)
        self._check_protection()
        return handle

    def _check_protection(self) -> None:
        """Raise ProtectionRequiredError if protection is required and a save was refused."""
        refusal = self._saver.refusal
        if self._settings.require_protection and refusal is not None:
            raise ProtectionRequiredError(
                f"{refusal} (training ends because require_protection is set)"
            ) from refusal

    def _continue_replay(self, replay: Replay, step: int) -> bool:
        """Advance a replay after its completed `step`; return False after its last step."""
        replay.advance(step)
        if not replay.over:
            self._last_step = step
            return True
        self._replay, self._stale = None, True
        return False

    def _save(self, handle: SaveHandle) -> None:
        """Hand the save to the saver's thread. Raises the reason if it is skipped."""
        # Steps must increase, because a generation is named by its step.
        if self._closed:
            raise SnapshotSkippedError("the session is closed")
        self._began = f"save({handle.step})"
        last, step = self._last_step, handle.step
        if last is not None and step <= last:
            raise StepOrderError(
                f"save({step}) after step {last}: steps must increase; pass the completed steps"
            )
        # Count the save, also if it is skipped: the n-th save must be the n-th on every rank.
        self._last_step = step
        now = time.monotonic()
        self._saver.tally.begin(step, now - self._last_save_s if self._last_save_s else 0.0)
        self._last_save_s = now
        self.counters.times = self._meter.on_step(step) or self.counters.times
        if not self._is_due(handle, now):
            return
        self._number += 1
        self._saver.on_save_called(self._number - 1, step, now)
        # Refuse saves that cannot succeed.
        if self._saver.problem is not None:
            self._saver.refuse(handle, self._saver.problem)
            return
        self._unseen.before_save(self._unheld)
        if self._unseen.problem is not None:
            raise self._unseen.problem
        if self._hooks.makes_gradients:
            raise InvalidJobError(
                f"{self._hooks.makes_gradients} is given a closure that computes gradients within "
                f"its step, where a recovery from a sparse window could freeze no unit: compute "
                f"them before step() (in Lightning, set automatic_optimization to False), or use "
                f"snapshot.policy.type Full, PartialExperts or Selective"
            )
        if self._saver.busy:
            raise SnapshotSkippedError("the previous save is still in progress")
        # Start the save. If nothing else makes optimizers wait for the copy, wait for it here.
        self._submit(self._task(handle, copies=True))
        asked, self._asked = self._asked, False
        if not (self._held or asked):
            self._saver.wait_staged()

    def _is_due(self, handle: SaveHandle, now: float) -> bool:
        """Whether to take this save. If not, the handle fails with the reason.

        Raises:
            SnapshotSkippedError: the ranks have not agreed on the interval yet.
        """
        called = self._interval.on_save_called(handle, now)
        steps = self.counters.interval_steps = self._interval.steps
        for missed in called.missed:  # Saves that other ranks have counted.
            self._number += 1
            self._saver.on_save_called(self._number - 1, missed, now)
            self._saver.replica_check.on_save_failed(missed)
        if called.undecided:
            raise SnapshotSkippedError("the ranks have not agreed on the interval yet")
        if not called.due:
            handle._fail(
                SnapshotSkippedError(
                    f"step {handle.step} is between two snapshots, which are {steps} apart"
                )
            )
        return called.due

    def _count_wait(self, began_s: float) -> None:
        """Count the time since `began_s` as time in which training waited."""
        now_s = time.monotonic()
        self._interval.add_wait(now_s - began_s)
        self._meter.on_held(began_s, now_s)

    @torch.inference_mode(False)  # what is made in that mode cannot be written outside of it
    def _task(self, handle: SaveHandle, *, copies: bool) -> Task:
        # Call the program's own code first: it may swap tensors, and change them back.
        states = states_of(self._live, self._stateful)
        with torch.no_grad():
            versions = None if self._stale else self._live.unmoved_versions()
            if versions is None:
                self._stale = True  # until all of this has succeeded
                self._live.begun.forms.check()
                found = self._live.discover()
                check_states_apart(self._live, takes_apart=self._takes_apart, repeats=self._repeats)
                self._sources = (*found, *self._gradients.sources())
                self._optimizer_steps.make_room()
                self._eager = [
                    (source.staging, source.tensor)
                    for source in self._sources
                    if source.captured and source.eager and source.staging is not None
                ]
                self._stale = False
            if self._live.unrestorable:
                raise InvalidJobError(self._live.unrestorable)
            try:
                for staging, live in self._eager:
                    staging.copy_(live)
            except RuntimeError:  # another shape, at the same address
                self._stale = True
                raise
        self._gradients.settle()
        of_tensors = self._live.of_tensors
        extras = encode_extras(collect_with(self._live, states, handle.step, of_tensors))
        if self._routers is not None and copies:
            self._routers.on_save(self._tokens.layers)
        call = SaveCall(
            number=self._number - 1,
            step=handle.step,
            extras=extras,
            optimizer_steps=self._optimizer_steps.take(),
            replenishing=self._capacity.tracker,
        )
        return Task(
            handle,
            call,
            sources=self._sources,
            gradients=self._optimizer_steps.gradients,
            more_extras_bytes=self._optimizer_steps.extras_bytes,
            fence=self._device.fence(),
            copies=copies,
            tokens=self._tokens,
            unchanged=InPlaceCheck(self._live.watched, versions) if copies else None,
            reseated=self._reseated,
        )

    def _submit(self, task: Task) -> None:
        """Hand a task to the saver's thread, which takes over what was kept here until then."""
        self._saver.submit(task)
        self._sources, self._reseated = None, False
        self._tokens = self._tokens.empty_copy()

    def backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        *,
        retain_graph: bool | None = None,
    ) -> None:
        if self._replay is None:
            super().backward(loss, gradient, retain_graph=retain_graph)
        else:
            self._replay.backward(loss, gradient, retain_graph)

    def count_tokens(
        self, layer: int, counts: Sequence[float] | torch.Tensor, assignments: int | None = None
    ) -> None:
        if self._counts_tokens:
            if self._routers is not None and self._routers.give_way(layer):
                self._tokens.drop(layer)
            self._count(layer, counts, assignments)

    def _count(
        self, layer: int, counts: Sequence[float] | torch.Tensor, assignments: int | None
    ) -> None:
        self._tokens.add(layer, counts, assignments)
        self._capacity.count(layer, counts)

    def capacity_factors(self, layer: int, experts: int) -> list[float]:
        return self._capacity.factors(layer, experts)

    @property
    def capacity_room(self) -> float:
        return self._capacity.room

    def bubble(self) -> AbstractContextManager[None]:
        bubbles = self._saver.bubbles
        return nullcontext() if bubbles is None else bubbles.bubble()

    def prepare(self) -> None:
        if self._saver.busy or self._closed or self._replay is not None:
            return
        handle = SaveHandle(self._last_step or 0)
        try:
            task = self._task(handle, copies=False)
        except HoldfastError as error:
            self._saver.refuse(handle, error)
            return
        self._submit(task)
        task.ended.wait()

    def wait_staged(self) -> None:
        self._asked = True
        began_s = time.monotonic()
        self._saver.wait_staged()
        self._engine.settle()  # The loop may capture a CUDA graph now.
        self._count_wait(began_s)

    def before_step(self, optimizer: object) -> None:
        began_s = time.monotonic()
        self._meter.before_optimizer(began_s)
        self._saver.wait_staged()
        self._count_wait(began_s)
        self._check_protection()
        self._gradients.before_step(optimizer)
        due = self._saver.strategy.gradients_due((self._last_step or 0) + 1)
        self._optimizer_steps.before_step(optimizer, due, frozen=self._replay is not None)
        if self._replay is not None:
            self._replay.before_step(optimizer)
        self._live.begun.note_modes()
        self._unseen.before_step(optimizer)

    def _after_step(self, optimizer: object) -> None:
        self._unseen.after_step()
        if self._replay is not None:
            self._replay.after_step()
        self._optimizer_steps.after_step(optimizer)

    def close(self) -> None:
        if self._closed:
            return
        self._saver.wait_staged()
        self._closed = True
        torch_waits.stop_measuring(self._meter)
        self._hooks.remove()
        if self._routers is not None:
            self._routers.remove()
        self._saver.close(self._settings.rpc_timeout_s)
        self._interval.close(self._settings.rpc_timeout_s)


def _engine_of(device: Device, settings: Settings) -> CopyEngine:
    hashes = settings.device_checksums and bool(device.members())
    return CopyEngine(settings.copy_threads, device, hasher_of_process() if hashes else None)


def _warn_of_unheld_state(optimizers: Sequence[object]) -> None:
    kinds = {type(one).__qualname__ for one in optimizers}
    _log.warning(
        "%s is not a torch.optim.Optimizer, so nothing holds it back while a save is copied: call "
        "session.wait_staged() before each change of parameters or optimizer state. Until the loop "
        "does, save() waits for its copy",
        ", ".join(sorted(kinds)),
    )
