"""Training worlds in the simulation: one worker per rank, in lockstep, saving as the SDK does."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from simulation.checking import check_all_is_read
from simulation.disk import DiskArena
from simulation.world import Daemon, World

from holdfast_core.errors import (
    HoldfastError,
    NoRecoveryLineError,
    SnapshotSkippedError,
    StaleEpochError,
    UnknownSessionError,
    UnreachableError,
)
from holdfast_core.job.snapshots import PolicyType
from holdfast_core.snapshots import layouts
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import Layout
from holdfast_core.snapshots.membership import Membership
from holdfast_core.snapshots.pieces import PieceMap, bit_map
from holdfast_daemon.engine.answers import Granted
from holdfast_daemon.engine.slots import ArenaView, Slot

PIECE_BYTES = 16
FROZEN_PIECES = 3
POLL_S = 0.02


def tensor_bytes_of(rank: int, world_size: int) -> int:
    """Bytes of a rank's tensors: ranks are of unequal size, and rank 0 has only extras. Another
    world divides the tensors in another way."""
    return (rank * (37 + 8 * world_size)) % 101


def extras_bytes_of(rank: int, generation: Generation) -> int:
    return 4 + (rank + generation.step) % 7


def content(rank: int, world_size: int, generation: Generation) -> bytes:
    """Payload that `rank` captures in `generation`. Timelines differ, so that mixing them shows.
    The first pieces are frozen, so that parity is made from changes, too."""
    seed = rank * 1_000_003 + generation.step * 1009 + generation.epoch
    tensor_bytes = tensor_bytes_of(rank, world_size)
    data = random.Random(seed).randbytes(tensor_bytes + extras_bytes_of(rank, generation))
    frozen = min(FROZEN_PIECES, tensor_bytes // PIECE_BYTES) * PIECE_BYTES
    return random.Random(rank).randbytes(frozen) + data[frozen:]


def layout_of(rank: int, world_size: int, world_rank: int) -> bytes:
    """Layout of `rank`, which knows itself by its number in torch's world."""
    return layouts.encode_layout(
        Layout(
            rank=world_rank,
            world_size=world_size,
            topology="simulated",
            entries=(),
            extras_offset=tensor_bytes_of(rank, world_size),
            extras_capacity=16,
            piece_bytes=PIECE_BYTES,
        )
    )


def window_content(rank: int, world_size: int, first: int, last: Generation) -> bytes:
    """Payload of the window from step `first` to `last`: its saves capture pieces in turns, and the
    last one the extras."""
    data = bytearray(content(rank, world_size, last))
    window = last.step - first + 1
    for piece in range(tensor_bytes_of(rank, world_size) // PIECE_BYTES):
        captured = Generation(last.epoch, first + piece % window)
        part = slice(piece * PIECE_BYTES, (piece + 1) * PIECE_BYTES)
        data[part] = content(rank, world_size, captured)[part]
    return bytes(data)


@dataclass(kw_only=True, slots=True)
class OpenWindow:
    """A window that a worker is writing."""

    first: int
    last: Generation
    session: str
    granted: Granted
    arena: DiskArena
    data: bytes
    next_step: int


class TrainingWorld:
    """The workers of one epoch. They restore together, step together and die separately."""

    def __init__(self, cluster: World, membership: Membership) -> None:
        self.cluster, self.membership, self.epoch = cluster, membership, membership.epoch
        self.size = membership.world_size
        self.workers: dict[int, Worker] = {}
        self.restored: dict[int, Generation | None] = {}
        self.read: set[int] = set()
        """Ranks of an earlier world whose snapshots the workers read for all."""
        self.step = self.repeats_to = 0
        """Newest step, and the last one that is repeated from a window: those are not saved."""
        self._origin: int | None = None
        """Step of the first save, which captures everything and after which windows follow."""
        self._whole: list[int] = []
        """First steps of windows in whose place one save captures everything."""

    def arrived(self, rank: int, line: Generation | None) -> None:
        """Record that a worker restored. When all have, they must agree, and training continues."""
        self.restored[rank] = line
        if len(self.restored) < self.size:
            return
        lines = set(self.restored.values())
        assert len(lines) == 1, f"ranks of epoch {self.epoch} restored {lines}"
        check_all_is_read(self.membership, line, self.read)
        self.cluster.resumed(self.epoch, line)
        self.cluster.counts["resumed_from_window"] += line in self.cluster.windows
        self.step = self.cluster.windows.get(line, line.step) if line else 0
        self.repeats_to = line.step if line else 0
        self._later()

    def _later(self) -> None:
        self.cluster.clock.after(self.cluster.clock.rng.uniform(0.02, 0.08), self._train)

    def _train(self) -> None:
        """Train one step if every worker is running: collectives hang otherwise."""
        if not all(worker.running for worker in self.workers.values()):
            if any(worker.paused for worker in self.workers.values()):
                self._later()
            return
        self.step += 1
        if self.step > self.repeats_to:
            if self.cluster.policy is PolicyType.SPARSE:
                self._decide()
            for worker in self.workers.values():
                worker.save(Generation(self.epoch, self.step))
        if not self.cluster.is_finished(self.epoch, self.step):
            self._later()

    def slot(self, step: int) -> int | None:
        """Slot of a window that the save of `step` fills; None where it is of one step."""
        if self._origin is None or step in (self._origin, *self._whole):
            return None
        return (step - self._origin - 1) % self.cluster.turns

    def is_passed_over(self, step: int) -> bool:
        """Whether the save of `step` captures nothing, as an earlier one took its window's
        place."""
        return any(first < step < first + self.cluster.turns for first in self._whole)

    def _decide(self) -> None:
        """With the first save after a window, decide about the window after the next, as the ranks
        do together."""
        if self._origin is None:
            self._origin = self.step
        turns = self.cluster.turns
        if self.step <= self._origin + turns or (self.step - self._origin - 1) % turns:
            return
        wanted = max(worker.whole_after for worker in self.workers.values())
        if wanted >= max(self._whole, default=self._origin):
            self._whole.append(self.step + turns)


class Worker:
    """One trainer process."""

    def __init__(self, world: TrainingWorld, node: str, rank: int) -> None:
        self.world, self.node, self.rank = world, node, rank
        self.alive = True
        self.paused = False
        """Whether SIGSTOP has stopped it."""
        self._waiting: list[Callable[[], None]] = []
        """Actions to run when it is continued."""
        self.claimed = False
        """Whether this process holds the lock of its arena."""
        self._session: str | None = None
        self._opened_on: Daemon | None = None
        self._copying = False
        self._arena = ""
        self._base: Generation | None = None
        """The snapshot that the next one may carry pieces over from."""
        self._window: OpenWindow | None = None
        world.workers[rank] = self
        self._poll(self._restore)

    @property
    def running(self) -> bool:
        return self.alive and not self.paused

    @property
    def whole_after(self) -> int:
        """Step after which its daemon asks for a snapshot of one step; -1 while it does not."""
        daemon, session = self._opened_on, self._session
        if daemon is None or session is None or not daemon.alive or daemon.paused:
            return -1
        seen = daemon.engine.watched(session)
        return -1 if seen is None or seen.whole_after is None else seen.whole_after.step

    def kill(self) -> None:
        """Kill the process, as SIGKILL does: the kernel closes the claim, and the daemon notices
        it."""
        if not self.alive:
            return
        self.alive = self.claimed = False
        session, daemon = self._session, self._opened_on
        if session is not None and daemon is not None:
            daemon.call(
                lambda: daemon.carry_out(
                    daemon.engine.session_ended(session, clean=False, now=daemon.now)
                )
            )

    def pause(self, pause_s: float) -> None:
        """Stop the process as SIGSTOP does, and continue it after `pause_s` seconds if it lives
        that long."""
        self.paused = True
        self.world.cluster.clock.after(pause_s, self._resume)

    # --- inside -----------------------------------------------------------------------------------

    def _resume(self) -> None:
        self.paused = False
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            action()

    def _poll(self, action: Callable[[Daemon], bool]) -> None:
        """Try `action` until it returns True, across restarts of the daemon."""
        if not self.alive:
            return
        daemon = self.world.cluster.daemons.get(self.node)
        done = False
        if daemon is not None and daemon.alive and not daemon.paused and not self.paused:
            try:
                done = action(daemon)
            except StaleEpochError:
                return
            except (UnreachableError, UnknownSessionError):
                done = False
        if not done:
            self.world.cluster.clock.after(POLL_S, lambda: self._poll(action))

    def _restore(self, daemon: Daemon) -> bool:
        try:
            state = daemon.engine.restore_state(self.rank, self.world.epoch)
        except NoRecoveryLineError:
            self.kill()  # a trainer that cannot restore exits
            return True
        if not state.ready or state.line is None:
            return False
        generation = state.line.generation
        if generation is not None:
            mine = [(state.arena, state.slot)] if state.arena and state.slot else []
            present = self.world.membership.is_present(generation)
            assert len(mine) == present, f"rank {self.rank} has {len(mine)} slots of its own"
            for held in (*mine, *state.read_for_all):
                if not self._read(daemon, *held, generation):
                    self.world.cluster.restore_failed(self.rank)
                    self.kill()
                    return True
            self._base = generation if present else None
        self.world.arrived(self.rank, generation)
        self._poll(self._open)
        return True

    def _read(self, daemon: Daemon, arena: ArenaView, slot: Slot, generation: Generation) -> bool:
        """Read a snapshot; return whether its pieces match their digests."""
        assert slot.manifest is not None
        held = daemon.disk.arenas[(arena.rank, arena.layout_id)]
        data = held.read(slot.piece_map, slot.manifest.payload_bytes)
        if layouts.piece_digests(data, PIECE_BYTES) != slot.manifest.digests:
            return False
        assert data == self.world.cluster.captured[arena.rank, generation], (
            f"rank {self.rank} restored wrong bytes of rank {arena.rank} for {generation}"
        )
        self.world.read.add(arena.rank)
        return True

    def _open(self, daemon: Daemon) -> bool:
        if self._session is None or self._opened_on is not daemon:
            try:
                session, effects = daemon.engine.open(
                    rank=self.rank,
                    epoch=self.world.epoch,
                    layout=layout_of(
                        self.rank,
                        self.world.size,
                        self.world.membership.world.world_rank(self.rank),
                    ),
                    largest_slot_bytes=4096,
                    pid=1,
                    now=daemon.now,
                )
            except HoldfastError as error:
                if isinstance(error, StaleEpochError):
                    raise
                return False
            self._session, self._opened_on = session, daemon
            daemon.carry_out(effects)
            return False
        if daemon.engine.opened(self._session) is None:
            return False
        others = [w for w in self.world.cluster.workers if w.rank == self.rank and w is not self]
        if any(w.node == self.node and w.claimed for w in others):
            return False  # the kernel refuses the lock while the old process lives
        self.claimed = True
        daemon.carry_out(daemon.engine.claimed(self._session, daemon.now))
        return True

    def save(self, generation: Generation) -> None:
        """Save as the SDK does: skip when the last save is still copying, never wait, never
        raise."""
        slot, window = self.world.slot(generation.step), self._window
        daemon, session = self._opened_on, self._session
        if daemon is None or session is None or self._copying:
            return
        if self.world.is_passed_over(generation.step):
            return
        if not daemon.alive:
            self._session, self.claimed = None, False
            self._poll(self._open)
            return
        if slot:
            if window and (window.session, window.next_step) == (session, generation.step):
                self._save_slot(daemon, window, slot)
            return
        if daemon.paused:
            return
        cluster = self.world.cluster
        try:
            self._drop_window(daemon)
            unchanged = self._unchanged(generation.step)
            first = generation.step if slot is not None else 0
            if first:
                generation = Generation(generation.epoch, first + cluster.turns - 1)
            granted, effects = daemon.engine.grant(
                session,
                epoch=generation.epoch,
                step=generation.step,
                first_step=first,
                now=daemon.now,
                base=self._base if unchanged else None,
                unchanged=bit_map(unchanged, 64),
            )
        except (SnapshotSkippedError, StaleEpochError, UnknownSessionError):
            return
        daemon.carry_out(effects)
        if not daemon.alive:
            return
        opened = daemon.engine.opened(session)
        assert opened is not None
        arena = daemon.disk.arenas[(self.rank, opened.arena.layout_id)]
        assert granted.slot not in arena.sealed, "a sealed slot was granted"
        if first:
            data = window_content(self.rank, self.world.size, first, generation)
            cluster.captured[self.rank, generation] = data
            cluster.windows[generation] = first
            self._window = OpenWindow(
                first=first,
                last=generation,
                session=session,
                granted=granted,
                arena=arena,
                data=data,
                next_step=first,
            )
            self._save_slot(daemon, self._window, 0)
            return
        carried = unchanged if granted.carried else frozenset()
        data = self._captured(generation, carried)
        self._arena = opened.arena.layout_id
        arena.capture(PieceMap(granted.slot, granted.places), data[: len(data) // 2], carried)
        self._copying = True
        cluster.clock.after(
            cluster.clock.rng.uniform(0.001, 0.06),
            lambda: self._staged(daemon, session, generation, granted, data, carried),
        )
        cluster.writing(self)

    def _save_slot(self, daemon: Daemon, window: OpenWindow, slot: int) -> None:
        """Write the pieces of one save of a window, and commit it with its last one. Nothing asks
        the daemon meanwhile whether the slot is still this trainer's."""
        cluster, granted, arena = self.world.cluster, window.granted, window.arena
        assert granted.slot not in arena.sealed, "the slot of an open window is sealed"
        window.next_step += 1
        self._copying = True
        size, last = PIECE_BYTES, slot == cluster.turns - 1
        whole = tensor_bytes_of(self.rank, self.world.size) // size
        turn = frozenset(range(slot, whole, cluster.turns))
        pieces = range(layouts.piece_count(len(window.data), size))
        others = frozenset(p for p in pieces if p not in turn and not (last and p >= whole))

        def write() -> None:
            if self.paused:
                self._waiting.append(write)
                return
            self._copying = False
            if not self.alive:
                return
            arena.capture(PieceMap(granted.slot, granted.places), window.data, others)
            if last:
                self._window = None
                self._commit(daemon, window.session, window.last, granted, window.data)

        late = cluster.clock.rng.random() < 0.02  # then the next save misses the window
        cluster.clock.after(cluster.clock.rng.uniform(0.001, 0.09 if late else 0.019), write)
        cluster.writing(self)

    def _drop_window(self, daemon: Daemon) -> None:
        """Give up the window that lacks a save, if there is one, before the next one begins."""
        window, self._window = self._window, None
        if window is not None and window.session == self._session:
            daemon.carry_out(
                daemon.engine.abort(
                    window.session, epoch=window.last.epoch, step=window.last.step, now=daemon.now
                )
            )

    def _unchanged(self, step: int) -> frozenset[int]:
        """The pieces that this save does not capture: only whole pieces of tensors."""
        cluster = self.world.cluster
        whole = range(tensor_bytes_of(self.rank, self.world.size) // PIECE_BYTES)
        match cluster.policy:
            case PolicyType.FULL | PolicyType.SPARSE:
                return frozenset()
            case PolicyType.SELECTIVE:  # some are used often, others hardly ever
                rng = cluster.clock.rng
                return frozenset(p for p in whole if rng.random() < p / (p + 1))
            case _:  # some in turn
                return frozenset(p for p in whole if (p + step) % cluster.turns)

    def _captured(self, generation: Generation, carried: frozenset[int]) -> bytes:
        """The payload of a snapshot that carries over the pieces `carried`."""
        data = bytearray(content(self.rank, self.world.size, generation))
        captured = self.world.cluster.captured
        if carried and self._base is not None:
            before = captured[self.rank, self._base]
            for piece in carried:
                part = slice(piece * PIECE_BYTES, (piece + 1) * PIECE_BYTES)
                data[part] = before[part]
        captured[self.rank, generation] = bytes(data)
        return bytes(data)

    def _staged(
        self,
        daemon: Daemon,
        session: str,
        generation: Generation,
        granted: Granted,
        data: bytes,
        carried: frozenset[int],
    ) -> None:
        if self.paused:
            self._waiting.append(
                lambda: self._staged(daemon, session, generation, granted, data, carried)
            )
            return
        self._copying = False
        if not self.alive:
            return
        arena = daemon.disk.arenas.get((self.rank, self._arena))
        if arena is not None:
            # A living process writes, whatever others have decided meanwhile.
            arena.capture(PieceMap(granted.slot, granted.places), data, carried)
        self._commit(daemon, session, generation, granted, data, carried)

    def _commit(
        self,
        daemon: Daemon,
        session: str,
        generation: Generation,
        granted: Granted,
        data: bytes,
        carried: frozenset[int] = frozenset(),
    ) -> None:
        digests = bytearray(layouts.piece_digests(data, PIECE_BYTES))
        for piece in carried:
            digests[8 * piece : 8 * piece + 8] = bytes(8)

        def commit() -> None:
            try:
                effects = daemon.engine.commit(
                    session,
                    epoch=generation.epoch,
                    step=generation.step,
                    slot=granted.slot,
                    payload_bytes=len(data),
                    extras_bytes=len(data) - tensor_bytes_of(self.rank, self.world.size),
                    digests=bytes(digests),
                    nan_units=(),
                    now=daemon.now,
                )
            except HoldfastError:
                return
            daemon.carry_out(effects)
            if self.world.cluster.clock.rng.random() < 0.9:  # or the answer is lost
                self._base = generation

        daemon.call(commit)
