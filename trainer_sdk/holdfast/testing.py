"""A daemon within the process of a test, for tests of training scripts: no socket, real bytes.

    daemon = FakeDaemon(directory)
    session = holdfast.init(model=model, optimizer=optimizer, daemon=daemon)

It keeps the arenas of one rank as files in `directory`. So another FakeDaemon with the same
directory, in this process or in a new one, restores the committed snapshots. Tests can inject
failures by method and step. By default a snapshot is protected as soon as it is committed.
"""

from __future__ import annotations

import fcntl
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast._copying.arena import MappedArena
from holdfast._daemon.client import (
    AbortRequest,
    CommitRequest,
    DaemonEvent,
    Grant,
    GrantRequest,
    HeldSnapshot,
    Hello,
    LiveRequest,
    OnProgress,
    Opened,
    OpenRequest,
    ParityGroup,
    RestoreDecision,
    RestoreRequest,
    Stage,
    TrainedRequest,
    TrainerReport,
)
from holdfast_core.errors import (
    HoldfastError,
    NoRecoveryLineError,
    ProtocolError,
    RankInUseError,
    StaleEpochError,
    StorageError,
    UnknownSessionError,
    UnreachableError,
)
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.layouts import (
    SLOTS_MAX,
    Layout,
    decode_layout,
    decode_manifest,
    encode_manifest,
    layout_id,
    piece_count,
)
from holdfast_core.snapshots.manifests import Manifest
from holdfast_core.snapshots.pieces import (
    PieceMap,
    choose,
    encode_places,
    merge_digests,
    split_places,
)
from holdfast_core.states import RestorePhase, RestoreProgress, RestoreSource

_NO_STEP = -1


@dataclass(slots=True)
class _Failure:
    error: HoldfastError
    step: int | None
    times: int


@dataclass(frozen=True, slots=True)
class FakeSnapshot:
    """A sealed snapshot, in the arena of the folder `home`."""

    home: Path
    piece_map: PieceMap
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class _Granted:
    step: int
    slot: int
    places: bytes
    unchanged: bytes
    base: FakeSnapshot | None
    first_step: int


class FakeDaemon:
    """The daemon of one rank.

    Args:
        directory: directory of the arenas. On a tmpfs, copies are as fast as in production.
        rank: rank of the only trainer that this daemon serves.
        epoch: membership epoch; raise it to simulate a new training world.
        protects: whether a committed snapshot is announced as protected immediately.
        line: generation to restore; by default the newest generation that was committed when the
            first trainer of the epoch restored or opened its session.
        captured_by: number of ranks of the earlier world that captured the line, with daemons over
            the same directory; 0 if this world captured it.
        reads: ranks of that world whose snapshots this rank reads on behalf of all ranks. Together,
            the ranks of the new world must read all snapshots of the old one.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        rank: int = 0,
        world_size: int = 1,
        epoch: int = 1,
        protects: bool = True,
        line: Generation | None = None,
        captured_by: int = 0,
        reads: Sequence[int] = (),
    ) -> None:
        self.directory = Path(directory)
        self.rank = rank
        self.world_size = world_size
        self.epoch = epoch
        self.protects = protects
        self.line = line
        self.captured_by = captured_by
        self.reads = tuple(reads)
        self.parity_group: ParityGroup | None = None
        """Ranks that protect this one, for sessions that mirror replicas."""
        self.reachable = True
        self.calls: list[str] = []
        """Names of the called methods, in order."""
        self.reports: list[TrainerReport] = []
        self.unprotected: list[TrainedRequest | None] = []
        """Reports that came without a session; None for the last, when the rank trains no more."""
        self.manifests: list[Manifest] = []
        """Manifests of all snapshots committed here."""
        self._failures: dict[str, list[_Failure]] = {}
        self._gates: dict[str, threading.Event] = {}
        self._session = ""
        self._sessions = 0
        self._home = self.directory
        self._layout: Layout | None = None
        self._granted: _Granted | None = None
        self._protected: Generation | None = line
        self._lines: dict[int, Generation | None] = {}
        """Epoch → the generation from which its training world starts."""
        self._events: queue.SimpleQueue[DaemonEvent | HoldfastError | None] = queue.SimpleQueue()
        self._lock = threading.RLock()

    # --- what tests do ----------------------------------------------------------------------------

    def fail(
        self, method: str, error: HoldfastError, *, step: int | None = None, times: int = 1
    ) -> None:
        """Let the next `times` calls of `method` raise `error`; with `step`, only calls for it."""
        self._failures.setdefault(method, []).append(_Failure(error, step, times))

    def hold(self, method: str) -> threading.Event:
        """Let calls of `method` wait until the returned event is set."""
        self._gates[method] = threading.Event()
        return self._gates[method]

    def restart(self) -> None:
        """Forget all sessions, as a daemon that restarted does; sealed snapshots stay."""
        with self._lock:
            self._session = ""
            self._granted = None
            self._events.put(UnreachableError("the daemon restarted"))
            self._events = queue.SimpleQueue()

    def announce(
        self,
        stage: str,
        generation: Generation | None = None,
        *,
        epoch: int = 0,
        ends_process: bool = False,
    ) -> None:
        """Send the trainer an event: a `Stage`, such as `protected`."""
        event = DaemonEvent(
            stage=Stage(stage), generation=generation, epoch=epoch, ends_process=ends_process
        )
        with self._lock:
            if event.stage is Stage.PROTECTED:
                self._protected = generation
            self._events.put(event)

    @property
    def granted_step(self) -> int | None:
        """Step for whose snapshot a slot is granted, neither committed nor given back; None when
        there is none. The next grant takes that slot back, as real daemons do."""
        return None if self._granted is None else self._granted.step

    def sealed(self) -> dict[Generation, FakeSnapshot]:
        """Snapshots of this rank that could be restored."""
        return self._sealed(self.rank)

    def _sealed(self, rank: int) -> dict[Generation, FakeSnapshot]:
        snapshots = {}
        for path in sorted(self.directory.glob(f"{rank}-*/slot-*.manifest")):
            try:
                content = path.read_bytes()
            except FileNotFoundError:  # that rank's daemon has just granted the slot
                continue
            encoded, places = split_places(content)
            manifest = decode_manifest(encoded)
            slot = int(path.stem.removeprefix("slot-"))
            snapshots[manifest.generation] = FakeSnapshot(
                path.parent, PieceMap(slot, places), manifest
            )
        return snapshots

    def corrupt(self, generation: Generation, byte: int) -> None:
        """Flip a byte of a sealed payload."""
        snapshot = self.sealed()[generation]
        layout = decode_layout((snapshot.home / "layout.json").read_bytes())
        piece = byte // layout.piece_bytes
        piece_map = snapshot.piece_map
        slot = piece_map.places[piece] if piece_map.places else piece_map.slot
        with (snapshot.home / "arena").open("r+b") as arena:
            arena.seek(slot * layout.slot_bytes + byte)
            value = arena.read(1)
            arena.seek(-1, os.SEEK_CUR)
            arena.write(bytes([value[0] ^ 0xFF]))

    # --- what sessions call -----------------------------------------------------------------------

    def hello(self) -> Hello:
        self._enter("hello")
        return Hello(epoch=self.epoch, world_size=self.world_size, parity_group=self.parity_group)

    def restore(
        self, request: RestoreRequest, timeout_s: float, on_progress: OnProgress
    ) -> RestoreDecision:
        del timeout_s
        epoch = request.epoch
        self._enter("restore")
        self._check_epoch(epoch)
        on_progress(RestoreProgress(phase=RestorePhase.READY, done=1, total=1))
        with self._lock:
            generation, protected = self._line(), self._protected
            if (
                protected is not None
                and protected.epoch == epoch
                and (generation is None or protected > generation)
            ):
                began = "fresh" if generation is None else f"from {generation}"
                raise NoRecoveryLineError(
                    f"rank {self.rank} restores too late: epoch {epoch} started {began}, and "
                    f"training has reached {protected} since; restore once, before the first save, "
                    f"or raise FakeDaemon.epoch to play a new world"
                )
            if generation is None:
                return RestoreDecision(
                    line=Line(generation=None, reason="no daemon holds a snapshot")
                )
            self._protected = generation
            ranks = self.reads if self.captured_by else (self.rank,)
            snapshots = [self._sealed(rank)[generation] for rank in ranks]
        return RestoreDecision(
            line=Line(generation=generation, reason=f"generation {generation} in local memory"),
            source=RestoreSource.LOCAL,
            captured_by=self.captured_by,
            snapshots=tuple(map(_readable, snapshots)),
        )

    def go_live(self, request: LiveRequest) -> None:
        self._enter("go_live")
        self._check_epoch(request.epoch)

    def _line(self) -> Generation | None:
        """Generation from which the epoch starts; decided once, as real daemons do."""
        if self.line is not None:
            return self.line
        if self.epoch not in self._lines:
            ranks = range(self.captured_by) if self.captured_by else (self.rank,)
            complete = set.intersection(*({*self._sealed(rank)} for rank in ranks))
            self._lines[self.epoch] = max(complete, default=None)
        return self._lines[self.epoch]

    def open(self, request: OpenRequest, timeout_s: float) -> Opened:
        del timeout_s
        self._enter("open")
        self._check_epoch(request.epoch)
        layout = request.layout
        decoded = decode_layout(layout)
        with self._lock:
            self._line()
            self._home = self.directory / f"{self.rank}-{layout_id(layout)}"
            self._home.mkdir(parents=True, exist_ok=True)
            (self._home / "layout.json").write_bytes(layout)
            with (self._home / "arena").open("ab") as arena:
                try:
                    os.posix_fallocate(arena.fileno(), 0, decoded.arena_bytes(SLOTS_MAX))
                except OSError as error:
                    raise StorageError(f"cannot allocate an arena: {error}") from error
            self._layout = decoded
            self._sessions += 1
            self._session = f"session-{self._sessions}"
            self._granted = None
            self._events.put(None)  # ends a watch of the previous session
            self._events = queue.SimpleQueue()
            return Opened(
                session=self._session,
                token=f"claim {self._home}",
                arena_bytes=decoded.arena_bytes(SLOTS_MAX),
                slot_bytes=decoded.slot_bytes,
                slots=SLOTS_MAX,
            )

    def claim(self, token: str, nbytes: int, timeout_s: float) -> MappedArena:
        del timeout_s
        self._enter("claim")
        descriptor = self._descriptor(token, "claim", os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise RankInUseError(f"another process holds the arena of rank {self.rank}") from error
        return MappedArena(descriptor, nbytes)

    def reader(self, token: str, nbytes: int, timeout_s: float) -> MappedArena:
        del timeout_s
        self._enter("reader")
        return MappedArena(self._descriptor(token, "read", os.O_RDONLY), nbytes, writable=False)

    def _descriptor(self, token: str, wanted: str, flags: int) -> int:
        kind, _, home = token.partition(" ")
        if kind != wanted:
            raise ProtocolError(f"token {token!r} does not entitle to {wanted}")
        return os.open(Path(home) / "arena", flags | os.O_CLOEXEC)

    def grant(self, request: GrantRequest) -> Grant:
        self._enter("grant", request.first_step or request.step)
        base, unchanged = request.base, request.unchanged
        with self._lock:
            self._check(request.session, request.epoch)
            assert self._layout is not None
            sealed = {g: held for g, held in self.sealed().items() if held.home == self._home}
            taken = {held.piece_map.slot: g for g, held in sealed.items()}
            free = [s for s in range(SLOTS_MAX) if s not in taken]
            # Kept: the newest protected snapshot of this epoch and everything newer, or the line.
            protected = self._protected
            if protected is None or protected.epoch < self.epoch:
                old = [s for s, g in taken.items() if g.epoch < self.epoch and g != self._line()]
            else:
                old = [s for s, g in taken.items() if g < protected]
            if not free and not old:
                return Grant(skipped="protection is behind")
            slot = (free or sorted(old, key=lambda s: taken[s]))[0]
            (self._home / f"slot-{slot}.manifest").unlink(missing_ok=True)
            freed = taken.get(slot)
            held = sealed.get(base) if base is not None and base != freed else None
            pieces = piece_count(self._layout.slot_bytes, self._layout.piece_bytes)
            places = choose(
                slot,
                pieces,
                [other.piece_map for g, other in sealed.items() if g != freed],
                slots=SLOTS_MAX,
                base=held.piece_map if held else None,
                unchanged=unchanged,
            )
            unchanged = unchanged if held else b""
            self._granted = _Granted(
                request.step, slot, places, unchanged, held, request.first_step
            )
            return Grant(slot=slot, places=places, carried=held is not None)

    def commit(self, request: CommitRequest) -> None:
        self._enter("commit", request.step)
        with self._lock:
            self._check(request.session, request.epoch)
            granted, self._granted = self._granted, None
            wanted = (request.step, request.slot)
            if granted is None or (granted.step, granted.slot) != wanted or self._layout is None:
                raise ProtocolError(f"slot {request.slot} was not granted for step {request.step}")
            digests = request.digests
            if granted.base is not None:
                base = granted.base.manifest.digests
                digests = merge_digests(digests, base, granted.unchanged)
            pieces = piece_count(request.payload_bytes, self._layout.piece_bytes)
            manifest = Manifest(
                job="fake",
                rank=self.rank,
                world_size=self._layout.world_size,
                generation=Generation(self.epoch, request.step),
                layout_id=self._home.name.partition("-")[2],
                payload_bytes=request.payload_bytes,
                extras_offset=self._layout.extras_offset,
                extras_bytes=request.extras_bytes,
                piece_bytes=self._layout.piece_bytes,
                digests=digests,
                nan_units=request.nan_units,
                experts=request.experts,
                first_step=granted.first_step,
            )
            path = self._home / f"slot-{request.slot}.manifest"
            places = encode_places(granted.places[:pieces])
            path.with_suffix(".new").write_bytes(encode_manifest(manifest) + places)
            path.with_suffix(".new").rename(path)
            self.manifests.append(manifest)
            if self.protects:
                self.announce("protected", manifest.generation)

    def abort(self, request: AbortRequest) -> None:
        self._enter("abort", request.step)
        with self._lock:
            self._check(request.session, request.epoch)
            if request.step == self.granted_step:
                self._granted = None

    def watch(self, session: str) -> Iterator[DaemonEvent]:
        self._enter("watch")
        with self._lock:
            self._check(session, self.epoch)
            events = self._events
        while (item := events.get()) is not None:
            if isinstance(item, HoldfastError):
                raise item
            yield item

    def progress(self, report: TrainerReport) -> None:
        self._enter("progress")
        self.reports.append(report)

    def report_without_session(self, request: TrainedRequest) -> None:
        self._enter("trained")
        self._check_epoch(request.epoch)
        self.unprotected.append(None if request.closed else request)

    def close_session(self, session: str) -> None:
        self._enter("close_session")
        with self._lock:
            self._check(session, self.epoch)
            self._session = ""
            self._events.put(None)

    def close(self) -> None:
        with self._lock:
            self._events.put(None)
        for gate in self._gates.values():
            gate.set()

    def _enter(self, method: str, step: int = _NO_STEP) -> None:
        self.calls.append(method)
        gate = self._gates.get(method)
        if gate is not None:
            gate.wait()
        if not self.reachable:
            raise UnreachableError("the daemon does not answer")
        for failure in self._failures.get(method, []):
            if failure.times and failure.step in (None, step):
                failure.times -= 1
                raise failure.error

    def _check(self, session: str, epoch: int) -> None:
        self._check_epoch(epoch)
        if session != self._session:
            raise UnknownSessionError(f"no session {session!r}; open a new one")

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise StaleEpochError(f"epoch {epoch} has ended; the current epoch is {self.epoch}")


def _readable(held: FakeSnapshot) -> HeldSnapshot:
    layout = decode_layout((held.home / "layout.json").read_bytes())
    return HeldSnapshot(
        manifest=held.manifest,
        layout=layout,
        slot=held.piece_map.slot,
        token=f"read {held.home}",
        arena_bytes=layout.arena_bytes(SLOTS_MAX),
        places=held.piece_map.places,
    )
