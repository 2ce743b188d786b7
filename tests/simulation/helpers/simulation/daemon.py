"""A daemon process in the simulation: the real engine over a virtual disk and network."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from simulation.bucket import Bucket
from simulation.disk import Disk
from simulation.fibers import Fiber, Killed
from simulation.transfers import VirtualWorker
from simulation.vault import Vault
from simulation.world import Daemon, World

from holdfast_core.errors import HoldfastError
from holdfast_core.snapshots.pieces import PieceMap
from holdfast_daemon.engine import EngineSettings, JobEngine
from holdfast_daemon.engine.effects import (
    AtOnce,
    Background,
    BuildParity,
    CommitSet,
    Completion,
    Effect,
    FetchManifest,
    Loading,
    LoadStored,
    ManifestFetched,
    Note,
    ParityBuilt,
    PersistRank,
    RankPersisted,
    Rebuild,
    Seal,
    Send,
    SendDirective,
    SendReport,
    SendSuspect,
)

TICK_S = 0.25


class VirtualDaemon:
    """One incarnation of a daemon. Dead once `alive` is false; another takes over the disk."""

    def __init__(
        self, world: World, node: str, disk: Disk, *, bucket: Bucket, vault: Vault | None
    ) -> None:
        self.world, self.node, self.disk = world, node, disk
        self._bucket = bucket
        self.alive = True
        self.paused = False
        self._inbox: list[Callable[[], None]] = []
        self._queue: deque[Effect] = deque()
        self._busy = False
        disk.incarnation += 1
        self.engine = JobEngine(
            job="job",
            node=node,
            memory_id=disk.memory_id,
            incarnation=disk.incarnation,
            settings=EngineSettings(),
        )
        self._worker = VirtualWorker(world, self, disk, bucket=bucket, vault=vault)
        self._moving: Fiber[Completion] | None = None
        """The transfer that runs now."""
        self._stall_s = 0.0
        """Seconds that the storage call it waits for takes; 0 where it waits for another daemon."""

    @property
    def now(self) -> float:
        """Time on this node's own clock, which may jump."""
        return self.world.clock.now + self.world.clock_offset[self.node]

    # --- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Adopt what is on the disk and begin to tick. Call it once the cluster has this daemon, so
        that faults which strike meanwhile strike it, and not the one before."""
        self._adopt()
        self._tick()

    def _adopt(self) -> None:
        disk = self.disk
        disk.remove_unreadable()
        for found in disk.arenas.values():
            found.reading.clear()  # the process that read is gone
        saved = disk.saved_epoch()
        self.carry_out(
            self.engine.adopt(
                membership=saved.membership if saved else None,
                line=saved.line if saved else None,
                retained=saved.retained if saved else None,
                arenas=[
                    (
                        rank,
                        arena.encoded_layout,
                        arena.slots,
                        {slot: (one.encoded, one.places) for slot, one in arena.sealed.items()},
                        self.world.is_claimed(self.node, rank),
                    )
                    for (rank, _), arena in disk.arenas.items()
                ],
                parities=[(*key, record.entry) for key, record in disk.records.items()],
                now=self.now,
            )
        )

    def _tick(self) -> None:
        if not self.alive:
            return
        self.call(self._look)
        self.world.clock.after(TICK_S, self._tick)

    def _look(self) -> None:
        for arena in self.engine.adopted_claims:
            if not self.world.is_claimed(self.node, arena.rank):
                self.carry_out(self.engine.claim_ended(arena, self.now))
        self.carry_out(self.engine.tick(self.now))

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` now, or when the process is continued: messages wait in the buffers of a
        process that SIGSTOP has stopped."""
        if not self.alive:
            return
        if self.paused:
            self._inbox.append(action)
        else:
            action()

    def resume(self) -> None:
        self.paused = False
        waiting, self._inbox = self._inbox, []
        for action in waiting:
            if self.alive:
                action()

    # --- effects ----------------------------------------------------------------------------------

    def carry_out(self, effects: list[Effect]) -> None:
        """Carry out effects in the order of the engine; the process may die before or after each
        of them."""
        self._queue.extend(effects)
        if self._busy:
            return
        self._busy = True
        while self._queue and self.alive:
            effect = self._queue.popleft()
            self.world.clock.happens()
            name = type(effect).__name__
            self.world.strike(self.node, f"before {name}")
            if self.alive:
                self._one(effect)
                self.world.strike(self.node, f"after {name}")
        self._busy = False

    def _one(self, effect: Effect) -> None:
        if isinstance(effect, Note):
            self.world.noted(self.node, effect)
        elif isinstance(effect, Send):
            self._send(effect)
        elif isinstance(effect, Seal):
            self._seal(effect)
        elif isinstance(effect, AtOnce):
            self._worker.apply(effect)
        else:
            self._check_room(effect)
            self._worker.submit(effect)

    def _seal(self, effect: Seal) -> None:
        assert effect.manifest.generation.epoch == self.engine.memory.epoch, "old epoch sealed"
        error = None
        try:
            self._worker.apply(effect)
        except HoldfastError as failure:
            error = failure
        self.carry_out(self.engine.on_completion(effect.sealed(error), self.now))

    def _check_room(self, effect: Background) -> None:
        """Check that background work does not write where something is sealed."""
        if isinstance(effect, BuildParity):
            sealed = (effect.lane, effect.slot) in self.disk.records
            assert not sealed, "a sealed parity block is overwritten"
        if isinstance(effect, Rebuild | LoadStored):
            manifest = effect.manifest
            arena = self.disk.arena(effect.rank, manifest.layout_id)
            assert effect.slot not in arena.sealed, "a sealed slot is overwritten"
            arena.check_free(PieceMap(effect.slot, effect.places), manifest.payload_bytes)

    # --- background work --------------------------------------------------------------------------

    def begin(self, effect: Background, work: Callable[[], Completion]) -> None:
        """Run `work` a little later: in one go, or from one wait for bytes to the next."""
        if isinstance(effect, PersistRank):
            arena = self.disk.arena(effect.rank, effect.manifest.layout_id)
            piece_map = PieceMap(effect.slot, effect.places)
            arena.reading[effect.slot] = piece_map, effect.manifest.payload_bytes
        if isinstance(effect, BuildParity | Rebuild | Loading | PersistRank | CommitSet):
            fiber = Fiber(work)
            self.world.fibers.append(fiber)
            self._later(lambda: self._go_on(effect, fiber), 0.01)
        else:
            self._later(lambda: self._end(effect, work()), 0.02)

    def pause_transfer(self, source: str) -> None:
        """Wait for the next bytes, from inside a transfer from the node `source`."""
        assert self._moving is not None
        self._moving.pause()
        self.world.strike_transfer(self.node, source)
        if not self.alive:
            raise Killed

    def pause_storage(self) -> None:
        """Wait for storage, from inside a call to it."""
        assert self._moving is not None
        self._stall_s = self._bucket.stall_s()
        self._moving.pause()
        self.world.strike(self.node, "while it waits for storage")
        if not self.alive:
            raise Killed

    def _later(self, action: Callable[[], None], most_s: float) -> None:
        rng = self.world.clock.rng
        self.world.clock.after(rng.uniform(0.0002, most_s), lambda: self.call(action))

    def _go_on(self, effect: Background, fiber: Fiber[Completion]) -> None:
        self._moving = fiber
        fiber.resume()
        self._moving = None
        if fiber.result is not None:
            self._end(effect, fiber.result)
        elif self.alive:
            stalls = self.world.clock.rng.random() < 0.004
            stall_s, self._stall_s = self._stall_s, 0.0
            self._later(lambda: self._go_on(effect, fiber), stall_s or (0.5 if stalls else 0.0008))

    def _end(self, effect: Background, event: Completion) -> None:
        self.world.strike(self.node, f"during {type(effect).__name__}")
        if not self.alive:
            return
        if isinstance(event, ParityBuilt) and event.entry is not None:
            self.world.check_block(self.node, event.lane, event.slot)
        if isinstance(effect, FetchManifest) and isinstance(event, ManifestFetched):
            # Whoever is left alone of a parity group keeps what it needs to rebuild the others.
            assert effect.peers or not event.error, f"{self.node} is alone: {event.error}"
        if isinstance(event, RankPersisted):
            arena = self.disk.arenas.get((event.rank, event.layout_id))
            if arena is not None:
                arena.reading.pop(event.slot, None)
        self.carry_out(self.engine.on_completion(event, self.now))

    def _send(self, effect: Send) -> None:
        world, to = self.world, effect.to.node
        epoch = self.engine.memory.epoch

        def deliver() -> None:
            daemon = world.daemons.get(to)
            if daemon is None:
                return
            daemon.call(lambda: _receive(world, self, daemon, effect, epoch))

        world.network.send(self.node, to, deliver)


def _receive(
    world: World,
    sender: Daemon,
    receiver: Daemon,
    effect: Send,
    epoch: int,
) -> None:
    now, engine = receiver.now, receiver.engine
    match effect:
        case SendReport():
            receiver.carry_out(engine.on_report(effect.report, now))
        case SendDirective():
            receiver.carry_out(engine.on_directive(effect.directive, now))
        case SendSuspect():
            receiver.carry_out(engine.on_suspect(epoch, effect.rank, effect.generation, now))
    answer = engine.memory.epoch
    world.network.send(
        receiver.node,
        sender.node,
        lambda: sender.call(
            lambda: sender.carry_out(sender.engine.on_peer_epoch(answer, sender.now))
        ),
    )
