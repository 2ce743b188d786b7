"""Transfers between simulated daemons: manifests, and streams that can end in the middle.

The daemon's own code asks, answers, verifies and combines (`worker`, and `group`, `combining`,
`update` and `changes` of `parity`); only the wire between two daemons is a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from functools import partial
from itertools import chain
from typing import Any, Protocol

from simulation.bucket import JOB, Bucket, VirtualRoot
from simulation.disk import Disk
from simulation.fibers import Broken
from simulation.vault import Vault, VaultSets
from simulation.world import Daemon, World

from holdfast_core.errors import HoldfastError, StaleEpochError, StorageError, UnreachableError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.manifests import Manifest
from holdfast_core.snapshots.membership import Member
from holdfast_daemon.durable.loader import Loader, SetReader
from holdfast_daemon.durable.persister import Persister
from holdfast_daemon.durable.stored_sets import TierSets
from holdfast_daemon.engine.effects import Background, BuildParity, Completion
from holdfast_daemon.epoch_scope import EpochScope
from holdfast_daemon.job.worker import EffectWorker
from holdfast_daemon.memory.job_bytes import ReadInto
from holdfast_daemon.parity.changes import change_of
from holdfast_daemon.parity.combining import Effort
from holdfast_daemon.parity.mirrored import MirroredFetch
from holdfast_daemon.transport.protocol import Kind, Request

SENT_BYTES = 16
"""Bytes that are sent together: one piece of the simulated snapshots."""


class Host(Daemon, Protocol):
    """The daemon that runs the work."""

    def begin(self, effect: Background, work: Callable[[], Completion]) -> None:
        """Run `work` a little later."""
        ...

    def pause_transfer(self, source: str) -> None:
        """Wait for the next bytes, from inside a transfer from the node `source`."""
        ...


class VirtualWorker(EffectWorker):
    """The daemon's worker over a virtual disk; a defect in it ends the schedule."""

    def __init__(
        self, world: World, daemon: Host, disk: Disk, *, bucket: Bucket, vault: Vault | None
    ) -> None:
        wire = Wire(world, daemon)
        saved = disk.saved_epoch()

        def open_sets(uri: str, job: str) -> SetReader:
            if vault is not None:
                return VaultSets(vault, lambda: daemon.pause_transfer(daemon.node))
            return TierSets(uri, job, root=VirtualRoot(bucket, daemon))

        super().__init__(
            disk,
            bulk=wire,
            peers=wire,
            executor=Starter(daemon),
            persister=Persister(
                disk,
                open_store=lambda uri: bucket.store(daemon),
                executor=Starter(daemon),
            ),
            membership=saved.membership if saved else None,
            effort=Effort(threads=1, stride_bytes=SENT_BYTES),
            loader=Loader(disk, JOB, open_sets, stride_bytes=SENT_BYTES),
        )
        self._counts = world.counts

    def _carry_out(self, effect: Background, scope: EpochScope) -> Completion:
        try:
            return super()._carry_out(effect, scope)
        except HoldfastError:
            raise
        except Exception as error:
            raise Broken(error) from error

    def _from_changes(
        self,
        effect: BuildParity,
        block: memoryview,
        manifests: Mapping[int, Manifest],
        layouts: Mapping[int, bytes],
        fetch: MirroredFetch,
        scope: EpochScope,
    ) -> tuple[int, bytes] | None:
        made = super()._from_changes(effect, block, manifests, layouts, fetch, scope)
        self._counts["parity_updated" if made else "parity_built"] += 1
        return made


class Starter(Executor):
    """Lets a daemon begin the work that its worker submits. The end of work is an event, so no
    caller waits for a future."""

    def __init__(self, daemon: Host) -> None:
        self._daemon = daemon

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._daemon.begin(args[0], partial(fn, *args, **kwargs))
        return Future()


class Wire:
    """Connections of one daemon to the others."""

    def __init__(self, world: World, daemon: Host) -> None:
        self._world, self._daemon = world, daemon

    def open(self, address: str, request: Request) -> WireStream:
        """Open a stream, as `parity.group.BulkOpener` does."""
        source = self._source(address, request.epoch)
        parts = _asked(source.disk, request)
        first = next(parts, b"")  # raises if the request cannot be answered
        return WireStream(chain((first,), parts), partial(self._wait, source))

    def fetch_manifest(
        self, member: Member, job: str, epoch: int, rank: int, generation: Generation
    ) -> tuple[bytes, bytes]:
        """Fetch a manifest and layout, as `parity.group.PeerClient` does."""
        source = self._source(member.node, epoch)
        return source.disk.describe(rank, generation) or (b"", b"")

    def _source(self, node: str, epoch: int) -> Daemon:
        source = self._world.reachable_daemon(self._daemon.node, node)
        if source is None:
            raise UnreachableError(f"{node} does not answer")
        if epoch < source.engine.memory.epoch:
            raise StaleEpochError(f"{node} is in epoch {source.engine.memory.epoch}")
        return source

    def _wait(self, source: Daemon, part: bytes) -> bytes:
        """`part` as it arrives; any fault may strike meanwhile."""
        self._daemon.pause_transfer(source.node)
        if self._world.reachable_daemon(self._daemon.node, source.node) is not source:
            raise UnreachableError(f"the connection to {source.node} ended")
        if not part or not self._world.wire_flips():
            return part
        flipped = bytearray(part)
        flipped[self._world.clock.rng.randrange(len(part))] ^= 0x20
        return bytes(flipped)


class WireStream:
    """A `parity.combining.Stream` of the parts that a daemon sends."""

    def __init__(self, parts: Iterator[bytes], wait: Callable[[bytes], bytes]) -> None:
        self._parts, self._wait = parts, wait
        self._arrived = b""

    def read_into(self, view: memoryview) -> None:
        while len(self._arrived) < len(view):
            try:
                part = next(self._parts)
            except (StopIteration, HoldfastError) as error:
                raise UnreachableError("the connection ended too early") from error
            self._arrived += self._wait(part)
        view[:] = self._arrived[: len(view)]
        self._arrived = self._arrived[len(view) :]

    def close(self) -> None:
        """Do nothing: the stream holds no resource."""


def _asked(disk: Disk, request: Request) -> Iterator[bytes]:
    """The reply to a request, part by part as it is read. Raises HoldfastError."""
    match request.kind:
        case Kind.CHANGE:
            return change_of(disk, request)
        case Kind.SNAPSHOT:
            held = disk.held(request.index, request.generation)
            nbytes, read_into = held.manifest.payload_bytes, held.read_into
        case Kind.PARITY:
            block = disk.parity(request.index, request.generation)
            nbytes, read_into = len(block), partial(_copy, block)
    if request.offset + request.nbytes > nbytes:
        raise StorageError(f"{request.nbytes} bytes at {request.offset} of {nbytes} asked for")
    end = request.offset + request.nbytes
    return (
        _read(read_into, at, min(SENT_BYTES, end - at))
        for at in range(request.offset, end, SENT_BYTES)
    )


def _copy(block: memoryview, start: int, view: memoryview) -> None:
    view[:] = block[start : start + len(view)]


def _read(read_into: ReadInto, start: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    read_into(start, memoryview(data))
    return bytes(data)
