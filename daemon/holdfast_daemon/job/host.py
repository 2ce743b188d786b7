"""Runs one job on this node: passes events to its engine and carries out the engine's effects.

`JobHost` runs on the daemon's event loop. It adds no decisions: events go in, effects come out and
are carried out in order; background effects come back as completions. A caller that waits for
something asks the engine again after each change (`changed`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol

from holdfast_core.catalogue.events import JobEvent
from holdfast_core.errors import HoldfastError, MemoryBudgetError, StorageError
from holdfast_core.last_lines import last_lines
from holdfast_core.snapshots.layouts import encode_layout
from holdfast_core.snapshots.membership import Membership
from holdfast_core.states import EndReason
from holdfast_daemon.engine import JobEngine
from holdfast_daemon.engine.effects import (
    AtOnce,
    Completion,
    Effect,
    Note,
    Seal,
    Send,
    SendSuspect,
)
from holdfast_daemon.job.worker import EffectWorker
from holdfast_daemon.memory.arena_claims import claim_is_free
from holdfast_daemon.memory.job_storage import AdoptedJob, JobStorage
from holdfast_daemon.schedule import until_next

TICK_S = 0.25
IDLE_TICK_S = 1.0
REFUSED_S = 5.0
"""Time for which a job may not write after a trainer of it last took memory beyond its arena."""


class Sender(Protocol):
    """Sends to other daemons, best effort; the newest message of a kind wins."""

    def send(self, effect: Send, host: JobHost) -> None: ...


class Observer(Protocol):
    """Receives notes, failures and durations, for logs, metrics and the catalogue."""

    def note(self, host: JobHost, note: Note) -> None: ...

    def storage_failed(self, host: JobHost, effect: Effect, error: HoldfastError) -> None: ...

    def took(self, host: JobHost, effect: Effect, seconds: float) -> None: ...


class JobHost:
    """Runs one job's engine. All methods are for the event loop's thread."""

    def __init__(
        self,
        *,
        engine: JobEngine,
        storage: JobStorage,
        worker: EffectWorker,
        outbox: Sender,
        observer: Observer,
        on_change: Callable[[JobHost], None],
    ) -> None:
        self.engine, self.storage, self.worker = engine, storage, worker
        self.job = engine.job
        self._outbox, self._observer = outbox, observer
        self._on_change = on_change
        self._queue: deque[Effect] = deque()
        self._busy = False
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.dropped = False
        self._refused_until = 0.0
        """Time from which the job may write again, after a trainer took memory beyond its arena."""
        self.evidence: object = None
        """The engine's evidence as of the newest change; a new one is sent to the control loop at
        once."""

    def start(self, adopted: AdoptedJob) -> None:
        """Adopt the arenas and parity of an earlier daemon, and begin to tick."""
        self.carry_out(
            self.engine.adopt(
                membership=adopted.membership,
                line=adopted.line,
                retained=adopted.retained,
                arenas=[
                    (
                        arena.rank,
                        encode_layout(arena.layout),
                        arena.slots,
                        {
                            slot: (sealed.encoded, sealed.places)
                            for slot, sealed in arena.sealed.items()
                        },
                        not self._claim_is_free(arena.rank, arena.layout_id),
                    )
                    for arena in adopted.arenas
                ],
                parities=[(p.lane, p.slot, p.record.entry) for p in adopted.parities],
                now=self.now,
            )
        )
        self._tick()

    @property
    def uid(self) -> str:
        """Identity of the job whose membership is here; empty when there is none."""
        membership = self.engine.membership
        return "" if membership is None else membership.uid

    @property
    def now(self) -> float:
        return time.monotonic()

    @property
    def writer(self) -> JobEngine:
        """The engine, for a trainer that wants to write.

        Raises:
            MemoryBudgetError: a trainer of the job took memory beyond its arena a moment ago.
        """
        self._check_arenas()
        if self.now < self._refused_until:
            raise MemoryBudgetError(
                f"a trainer of job {self.job} took memory beyond its arena on this node; that "
                f"memory was taken back, and the job may not write here until {REFUSED_S:.0f} s "
                f"after this stops: end the process that extends the arena's file",
                needed_bytes=0,
                available_bytes=0,
            )
        return self.engine

    def carry_out(self, effects: list[Effect]) -> None:
        """Carry out `effects` in the engine's order; further effects are appended, not nested."""
        self._queue.extend(effects)
        if self._busy:
            return
        self._busy = True
        try:
            while self._queue and not self.dropped:
                self._one(self._queue.popleft())
        finally:
            self._busy = False
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change(self)

    async def changed(self, timeout_s: float) -> None:
        """Return after the next change, or after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def hello(self, rank: int, store_address: str, world: str) -> Membership:
        """The membership that a worker belongs to. Changes that follow from its arrival are
        reported at once. Raises as `JobEngine.hello` does."""
        effects: list[Effect] = []
        try:
            membership, effects = self.engine.hello(rank, store_address, world, self.now)
        finally:
            self.carry_out(effects)
        return membership

    def agent_waits(self, after_epoch: int) -> None:
        """Note that the member's agent left the world of `after_epoch`, and report it to the
        control loop."""
        if self.engine.agent_waits(after_epoch):
            self.carry_out([])

    def follows(self, rank: int, pid: int, size: int = 0) -> int:
        """Note that the worker of `rank` follows its worlds, and end the stream that it replaces.
        Returns and raises as `JobEngine.follows` does."""
        number = self.engine.follows(rank, pid, size)
        self.carry_out([])
        return number

    def worker_exited(
        self,
        epoch: int,
        world_rank: int,
        exit_code: int,
        written: str,
        reason: EndReason = EndReason.UNKNOWN,
        kernel: str = "",
    ) -> None:
        """Note that a worker failed, and report it to the control loop.

        Raises:
            InvalidJobError: the rank is not on this node.
        """
        # Agents cut the text and take secrets out before they send it; not all clients do.
        self.engine.worker_exited(
            epoch, world_rank, exit_code, last_lines(written), reason, last_lines(kernel)
        )
        self.carry_out([])

    def drop(self) -> None:
        """Do nothing more for the job, which has ended; its storage is the caller's to free."""
        self.stop()
        self.dropped = True
        self._changed.set()

    def stop(self) -> None:
        """Stop ticking and let running transfers give up; sealed snapshots and blocks stay."""
        if self._timer is not None:
            self._timer.cancel()
        self.worker.abandon()

    # --- inside -----------------------------------------------------------------------------------

    def _check_arenas(self) -> None:
        try:
            overgrown = self.storage.overgrown()
        except StorageError as error:
            self._observer.note(self, Note(event=JobEvent.CUT_BACK_FAILED, detail=str(error)))
            return
        if overgrown and self.now >= self._refused_until:
            cut = ", ".join(
                f"{nbytes} bytes of {path.parent.name}/{path.name}"
                for path, nbytes in overgrown.items()
            )
            detail = f"cut off what was beyond the grant: {cut}"
            self._observer.note(self, Note(event=JobEvent.ARENA_OVERGROWN, detail=detail))
        if overgrown:
            self._refused_until = self.now + REFUSED_S

    def _tick(self) -> None:
        if self.dropped:
            return
        try:
            self._check_arenas()
            for arena in self.engine.adopted_claims:
                if self._claim_is_free(arena.rank, arena.layout_id):
                    self.carry_out(self.engine.claim_ended(arena, self.now))
            self.carry_out(self.engine.tick(self.now))
        finally:  # a tick that fails is not the last one
            pause = IDLE_TICK_S if self.engine.settled else TICK_S
            self._timer = self._loop.call_later(until_next(pause, self._loop.time()), self._tick)

    def _claim_is_free(self, rank: int, layout_id: str) -> bool:
        return claim_is_free(self.storage.arena(rank, layout_id).path)

    def _one(self, effect: Effect) -> None:
        if isinstance(effect, Note):
            self._observer.note(self, effect)
        elif isinstance(effect, Send):
            if isinstance(effect, SendSuspect):
                event = JobEvent.SUSPECT
                note = Note(event=event, rank=effect.rank, generation=effect.generation)
                self._observer.note(self, note)
            self._outbox.send(effect, self)
        elif isinstance(effect, Seal):
            self._seal(effect)
        elif isinstance(effect, AtOnce):
            try:
                self.worker.apply(effect)
            except HoldfastError as error:
                self._observer.storage_failed(self, effect, error)
        else:
            began = self.now
            future = self.worker.submit(effect)
            future.add_done_callback(lambda ended: self._background_ended(effect, began, ended))

    def _seal(self, effect: Seal) -> None:
        error = None
        began = self.now
        try:
            self.worker.apply(effect)
        except HoldfastError as failure:
            error = failure
        self._observer.took(self, effect, self.now - began)
        self._complete(effect.sealed(error))

    def _background_ended(self, effect: Effect, began: float, future: Future[Completion]) -> None:
        """Called on a worker's thread."""
        if future.cancelled():
            return
        with suppress(RuntimeError):  # the loop is closed: the daemon is ending
            self._loop.call_soon_threadsafe(self._observer.took, self, effect, self.now - began)
            self._loop.call_soon_threadsafe(self._complete, future.result())

    def _complete(self, event: Completion) -> None:
        if not self.dropped:
            self.carry_out(self.engine.on_completion(event, self.now))
