"""A daemon process in the simulation: the real engine over a virtual disk and network."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast_core import layouts
from holdfast_core.errors import CorruptError, StorageError
from holdfast_daemon.effects import (
    AllocateArena,
    ArenaReady,
    BuildParity,
    Completion,
    Effect,
    FetchManifest,
    ForgetPeers,
    FreeParity,
    FreeSlot,
    Note,
    ParityVerified,
    Rebuild,
    RemoveArena,
    SaveEpoch,
    Seal,
    Sealed,
    SendDirective,
    SendReport,
    SendSuspect,
    SnapshotVerified,
    VerifyParity,
    VerifySnapshot,
)
from holdfast_daemon.engine import EngineSettings, JobEngine
from holdfast_daemon.simulation.disk import Disk, DiskParity
from holdfast_daemon.simulation.transfers import Transfers

if TYPE_CHECKING:
    from holdfast_daemon.simulation.cluster import Cluster

TICK_S = 0.25


class VirtualDaemon(Transfers):
    """One incarnation of a daemon. Dead once `alive` is false; another takes over the disk."""

    def __init__(self, cluster: Cluster, node: str, disk: Disk) -> None:
        self.cluster, self.node, self.disk = cluster, node, disk
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
        self._adopt()
        self._tick()

    @property
    def now(self) -> float:
        """This node's own clock, which may jump."""
        return self.cluster.clock.now + self.cluster.clock_offset[self.node]

    # --- life -------------------------------------------------------------------------------------

    def _adopt(self) -> None:
        disk = self.disk
        arenas = []
        for (rank, _), arena in disk.arenas.items():
            sealed = {}
            for slot, encoded in list(arena.manifests.items()):
                try:
                    layouts.decode_manifest(encoded)
                    sealed[slot] = (encoded, arena.places[slot])
                except CorruptError:
                    del arena.manifests[slot]
            arenas.append((rank, arena.encoded, sealed, self.cluster.is_claimed(self.node, rank)))
        membership, line, retained = disk.epoch or (None, None, None)
        self.carry_out(
            self.engine.adopt(
                membership=membership,
                line=line,
                retained=retained,
                arenas=arenas,
                parities=[
                    (lane, slot, parity.entry)
                    for (lane, slot), parity in disk.parities.items()
                    if parity.entry is not None
                ],
                now=self.now,
            )
        )

    def _tick(self) -> None:
        if not self.alive:
            return
        self.call(self._look)
        self.cluster.clock.after(TICK_S, self._tick)

    def _look(self) -> None:
        for arena in self.engine.adopted_claims:
            if not self.cluster.is_claimed(self.node, arena.rank):
                self.carry_out(self.engine.claim_ended(arena, self.now))
        self.carry_out(self.engine.tick(self.now))

    def call(self, action: Callable[[], None]) -> None:
        """Run now, or when the process is continued (SIGSTOP keeps what arrives in the buffers)."""
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
        """In the order the engine asked; the process may die before or after each of them."""
        self._queue.extend(effects)
        if self._busy:
            return
        self._busy = True
        while self._queue and self.alive:
            effect = self._queue.popleft()
            self.cluster.strike(self.node, effect, "before")
            if self.alive:
                self._one(effect)
                self.cluster.strike(self.node, effect, "after")
        self._busy = False

    def _one(self, effect: Effect) -> None:
        match effect:
            case SendReport() | SendDirective() | SendSuspect():
                self._send(effect)
            case Note():
                self.cluster.heard(self.node, effect)
            case Seal():
                self._seal(effect)
            case SaveEpoch() | FreeSlot() | RemoveArena() | FreeParity() | ForgetPeers():
                self._at_once(effect)
            case _:
                self._background(effect)

    def _at_once(
        self, effect: SaveEpoch | FreeSlot | RemoveArena | FreeParity | ForgetPeers
    ) -> None:
        disk = self.disk
        match effect:
            case SaveEpoch():
                disk.epoch = (effect.membership, effect.line, effect.retained)
            case FreeSlot():
                disk.arenas[(effect.rank, effect.layout_id)].manifests.pop(effect.slot, None)
            case RemoveArena():
                disk.arenas.pop((effect.rank, effect.layout_id), None)
            case FreeParity():
                disk.parities[(effect.lane, effect.slot)].entry = None
            case ForgetPeers():
                for key in [k for k in disk.peers if k[1] not in effect.keep]:
                    del disk.peers[key]

    def _seal(self, effect: Seal) -> None:
        assert effect.manifest.generation.epoch == self.engine.memory.epoch, "old epoch sealed"
        error = None
        if self.cluster.disk_full(self.node):
            error = StorageError("no space left on the tmpfs")
        else:
            arena = self.disk.arenas[(effect.rank, effect.layout_id)]
            arena.seal(effect.slot, effect.encoded, effect.places)
        event = Sealed(
            rank=effect.rank,
            slot=effect.slot,
            generation=effect.manifest.generation,
            error=error,
        )
        self.carry_out(self.engine.on_completion(event, self.now))

    def _background(self, effect: Effect) -> None:
        if isinstance(effect, BuildParity):
            # A block being built is scribbled over from the first byte on.
            slot = self.disk.parities.setdefault((effect.lane, effect.slot), DiskParity())
            assert slot.entry is None, "a sealed parity block was overwritten"
            slot.block = bytearray(b"\xee" * 8)

        def end() -> None:
            self.cluster.strike(self.node, effect, "during")
            if not self.alive:
                return
            event = self._result(effect)
            self.carry_out(self.engine.on_completion(event, self.now))

        self.cluster.clock.after(
            self.cluster.clock.rng.uniform(0.0005, 0.02), lambda: self.call(end)
        )

    def _result(self, effect: Effect) -> Completion:
        match effect:
            case AllocateArena():
                self.disk.allocate(effect.rank, effect.layout)
                return ArenaReady(rank=effect.rank, layout_id=effect.layout_id)
            case BuildParity():
                return self._build(effect)
            case FetchManifest():
                return self._fetch_manifest(effect)
            case Rebuild():
                return self._rebuild(effect)
            case VerifySnapshot():
                generation = effect.manifest.generation
                ok = self.disk.payload(effect.rank, generation) is not None
                return SnapshotVerified(
                    rank=effect.rank, slot=effect.slot, generation=generation, ok=ok
                )
            case VerifyParity():
                parity = self.disk.parities[(effect.lane, effect.slot)]
                ok = layouts.piece_digests(bytes(parity.block), 64) == parity.digest
                return ParityVerified(
                    lane=effect.lane, slot=effect.slot, generation=effect.generation, ok=ok
                )
            case _:
                raise AssertionError(f"not a background effect: {effect}")

    def _send(self, effect: SendReport | SendDirective | SendSuspect) -> None:
        cluster, to = self.cluster, effect.to.node
        epoch = self.engine.memory.epoch

        def deliver() -> None:
            daemon = cluster.daemons.get(to)
            if daemon is None:
                return
            daemon.call(lambda: _receive(cluster, self, daemon, effect, epoch))

        cluster.network.send(self.node, to, deliver)


def _receive(
    cluster: Cluster,
    sender: VirtualDaemon,
    receiver: VirtualDaemon,
    effect: SendReport | SendDirective | SendSuspect,
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
    cluster.network.send(
        receiver.node,
        sender.node,
        lambda: sender.call(
            lambda: sender.carry_out(sender.engine.on_peer_epoch(answer, sender.now))
        ),
    )
