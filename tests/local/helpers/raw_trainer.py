"""A trainer without torch: claims, writes and commits as the SDK does, so that hundreds fit a test.

It can stop anywhere between two steps of the protocol, which a real trainer would not.
"""

from __future__ import annotations

import mmap
import os
import random
import socket
from pathlib import Path

import grpc
from daemons import DaemonProcess
from waiting import WAIT_S, wait_for

from holdfast_core.errors import CorruptError, by_code
from holdfast_core.job.snapshots import PolicyType
from holdfast_core.snapshots import layouts
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import Layout
from holdfast_core.snapshots.manifests import Manifest
from holdfast_core.snapshots.pieces import PieceMap, bit_map, runs
from holdfast_protos import codec, trainer_pb2

EXTRAS_BYTES = 64
EXTRAS_CAPACITY = 4096
PIECE_BYTES = 4096


_captured: dict[tuple[Path, str, int, Generation], bytes] = {}
"""What trainers of this process captured, by node's memory, job, rank and generation."""


def content_of(rank: int, generation: Generation, nbytes: int) -> bytes:
    """Payload that a rank captures. Timelines differ, because the epoch is part of it."""
    seed = f"{rank} {generation.step} {generation.epoch}"
    return random.Random(seed).randbytes(nbytes + EXTRAS_BYTES)


def forget(directory: Path) -> None:
    """Forget what was captured in the memories below `directory`, which are gone."""
    for key in [key for key in _captured if key[0] == directory]:
        del _captured[key]


def unchanged_in(policy: PolicyType, rank: int, step: int, nbytes: int) -> frozenset[int]:
    """The pieces that a save of `step` carries over where possible."""
    pieces = range(nbytes // PIECE_BYTES)
    match policy:
        case PolicyType.FULL:
            return frozenset()
        case PolicyType.SELECTIVE:  # some are used often, and some hardly ever
            rng = random.Random(f"{rank} {step}")
            return frozenset(p for p in pieces if rng.random() < p % 8 / (p % 8 + 1))
        case PolicyType.SPARSE:  # all but every fourth, in turn
            return frozenset(p for p in pieces if (p + step) % 4)
        case _:  # every third, in turn
            return frozenset(p for p in pieces if (p + step) % 3 == 0)


def raw_layout(rank: int, world_size: int, nbytes: int) -> bytes:
    return layouts.encode_layout(
        Layout(
            rank=rank,
            world_size=world_size,
            topology="raw",
            entries=(),
            extras_offset=nbytes,
            extras_capacity=EXTRAS_CAPACITY,
            piece_bytes=PIECE_BYTES,
        )
    )


class RawTrainer:
    """One rank of a job, in this process."""

    def __init__(
        self,
        daemon: DaemonProcess,
        job: str,
        rank: int,
        world_size: int,
        nbytes: int,
        largest_bytes: int,
    ) -> None:
        self.daemon, self.job, self.rank = daemon, job, rank
        self.world_size, self.largest_bytes = world_size, largest_bytes
        self.largest_slot_bytes = layouts.round_up(
            largest_bytes + EXTRAS_CAPACITY, layouts.PAGE_BYTES
        )
        self.nbytes = nbytes
        self.layout = raw_layout(rank, world_size, nbytes)
        self.epoch = 0
        self.session = ""
        self.arena_socket = ""
        self._claim: socket.socket | None = None
        self._descriptor = -1
        self._arena: mmap.mmap | None = None
        self._slot_bytes = 0
        self._granted = trainer_pb2.GrantReply()
        self.carried: frozenset[int] = frozenset()
        """The pieces that the newest save carried over."""
        self._base: Generation | None = None
        """The snapshot that the next one may carry pieces over from."""
        self.policy = PolicyType.PARTIAL_EXPERTS
        """Which pieces those are, where the daemon lets it."""

    # --- joining ----------------------------------------------------------------------------------

    def hello(self, version: int = codec.PROTOCOL_VERSION) -> trainer_pb2.HelloReply:
        """Greet the daemon. Raises grpc.RpcError."""
        return self.daemon.stub().Hello(
            trainer_pb2.HelloRequest(protocol_version=version, job=self.job, rank=self.rank),
            timeout=WAIT_S,
        )

    def join(self, epoch: int) -> None:
        """Wait until the daemon is in `epoch`."""

        def joined() -> bool:
            try:
                reply = self.hello()
            except grpc.RpcError:
                return False
            self.epoch, self.arena_socket = reply.epoch, reply.arena_socket
            return self.epoch == epoch

        wait_for(f"rank {self.rank} to be welcome in epoch {epoch}", joined)

    def restore(self) -> tuple[Generation | None, bytes, str]:
        """Restore: (generation, payload, source), or (None, b"", reason) for a fresh start. The
        payload is verified as in the SDK."""
        decision = self._decision()
        if not decision.line.HasField("generation"):
            return None, b"", decision.line.reason
        manifest, payload = self._read(decision)
        assert manifest.generation == codec.generation_from_proto(decision.line.generation)
        self._base = manifest.generation
        return manifest.generation, payload, decision.source

    def restore_earlier(self) -> tuple[Generation, dict[int, bytes]]:
        """Restore what another world captured: the generation and, by the rank that captured it,
        each payload that this rank reads for all."""
        decision = self._decision()
        assert decision.captured_by
        read = [self._read(held) for held in decision.snapshots]
        generation = codec.generation_from_proto(decision.line.generation)
        assert {manifest.generation for manifest, _ in read} <= {generation}
        return generation, {manifest.rank: payload for manifest, payload in read}

    def _decision(self) -> trainer_pb2.RestoreDecision:
        request = trainer_pb2.RestoreRequest(job=self.job, rank=self.rank, epoch=self.epoch)
        decision = None
        for progress in self.daemon.stub().Restore(request, timeout=WAIT_S):
            if progress.HasField("decision"):
                decision = progress.decision
        assert decision is not None
        return decision

    def _read(
        self, held: trainer_pb2.RestoreDecision | trainer_pb2.HeldSnapshot
    ) -> tuple[Manifest, bytes]:
        """Manifest and payload of a snapshot on this node, verified."""
        manifest = layouts.decode_manifest(held.manifest)
        connection, descriptor = receive_descriptor(self.arena_socket, held.token)
        try:
            slot_bytes = layouts.decode_layout(held.layout).slot_bytes
            pieces = layouts.piece_count(manifest.payload_bytes, PIECE_BYTES)
            payload = b"".join(
                os.pread(
                    descriptor,
                    PIECE_BYTES * (run.end - run.first),
                    run.slot * slot_bytes + PIECE_BYTES * run.first,
                )
                for run in runs(PieceMap(held.slot, held.places), 0, pieces)
            )[: manifest.payload_bytes]
        finally:
            os.close(descriptor)
            connection.close()
        if layouts.piece_digests(payload, manifest.piece_bytes) != manifest.digests:
            raise CorruptError(
                f"rank {self.rank}: {manifest.generation} does not match its manifest"
            )
        return manifest, payload

    def open(self) -> trainer_pb2.OpenReply:
        """Open a session and claim the arena. Raises grpc.RpcError, or the error that the arena
        socket answered."""
        reply = self.daemon.stub().Open(
            trainer_pb2.OpenRequest(
                job=self.job,
                rank=self.rank,
                epoch=self.epoch,
                layout=self.layout,
                largest_slot_bytes=self.largest_slot_bytes,
                pid=os.getpid(),
            ),
            timeout=WAIT_S,
        )
        claim, descriptor = receive_descriptor(self.arena_socket, reply.token)
        self.session, self._slot_bytes = reply.session, reply.slot_bytes
        self._claim, self._descriptor = claim, descriptor
        self._arena = mmap.mmap(self._descriptor, reply.arena_bytes)
        return reply

    def reopen(self) -> trainer_pb2.OpenReply:
        """Give the claim back and take it again, after the daemon has restarted."""
        self.die()
        self.join(self.epoch)
        return self.open()

    # --- saving -----------------------------------------------------------------------------------

    def content(self, step: int) -> bytes:
        """The payload that this rank captures, or captured, at `step` of this epoch."""
        return self.content_at(Generation(self.epoch, step))

    def content_at(self, generation: Generation) -> bytes:
        """The payload that any trainer of this rank captured in `generation`."""
        key = (self.daemon.root.parent, self.job, self.rank, generation)
        return _captured.get(key) or content_of(self.rank, generation, self.nbytes)

    def _capture(self, step: int) -> None:
        """Record the payload of the save, now that the carried pieces are known."""
        generation = Generation(self.epoch, step)
        data = bytearray(content_of(self.rank, generation, self.nbytes))
        before = self.content_at(self._base) if self._base is not None else b""
        for piece in self.carried:
            part = slice(piece * PIECE_BYTES, (piece + 1) * PIECE_BYTES)
            data[part] = before[part]
        _captured[self.daemon.root.parent, self.job, self.rank, generation] = bytes(data)

    def save(self, step: int) -> bool:
        """Grant, copy, commit; False when the daemon skips. Raises grpc.RpcError."""
        slot = self.grant(step)
        if slot is None:
            return False
        self.copy(slot, step)
        self.commit(slot, step)
        return True

    def grant(self, step: int, first_step: int = 0) -> int | None:
        """Ask for a slot; for that of a window, if `first_step` is the step of its first save."""
        unchanged: frozenset[int] = frozenset()
        if self._base is not None:
            unchanged = unchanged_in(self.policy, self.rank, step, self.nbytes)
        reply = self.daemon.stub().Grant(
            trainer_pb2.GrantRequest(
                session=self.session,
                epoch=self.epoch,
                step=step,
                first_step=first_step,
                base=codec.optional_generation_to_proto(self._base),
                unchanged=bit_map(unchanged, self._slot_bytes // PIECE_BYTES),
            ),
            timeout=WAIT_S,
        )
        if reply.WhichOneof("outcome") != "slot":
            return None
        self._granted, self.carried = reply, unchanged if reply.carried else frozenset()
        self._capture(step)
        return reply.slot

    def copy(self, slot: int, step: int, part: float = 1.0) -> None:
        """Write the first `part` of the payload, as a fraction, into the slot."""
        assert self._arena is not None
        data = self.content(step)
        data = data[: int(len(data) * part)]
        piece_map = PieceMap(slot, self._granted.places if slot == self._granted.slot else b"")
        for run in runs(piece_map, 0, layouts.piece_count(len(data), PIECE_BYTES)):
            for piece in set(range(run.first, run.end)) - self.carried:
                chunk = data[piece * PIECE_BYTES : (piece + 1) * PIECE_BYTES]
                start = run.slot * self._slot_bytes + piece * PIECE_BYTES
                self._arena[start : start + len(chunk)] = chunk

    def commit(self, slot: int, step: int) -> None:
        data = self.content(step)
        digests = bytearray(layouts.piece_digests(data, PIECE_BYTES))
        for piece in self.carried:  # the daemon knows them
            digests[8 * piece : 8 * piece + 8] = bytes(8)
        self.daemon.stub().Commit(
            trainer_pb2.CommitRequest(
                session=self.session,
                epoch=self.epoch,
                step=step,
                slot=slot,
                payload_bytes=len(data),
                extras_bytes=EXTRAS_BYTES,
                digests=bytes(digests),
            ),
            timeout=WAIT_S,
        )
        self._base = Generation(self.epoch, step)

    def cut(self, nbytes: int = 0) -> None:
        """Truncate the arena's file, as any owner of its descriptor can. Saving afterwards kills
        this process."""
        os.ftruncate(self._descriptor, nbytes)

    @property
    def descriptor(self) -> int:
        """Descriptor of the arena, which other processes of a trainer may have as well."""
        return self._descriptor

    def die(self) -> None:
        """Close mapping, descriptor and socket, as the kernel does for a killed trainer."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._claim is not None:
            self._claim.close()
            self._claim = None


def receive_descriptor(path: str, token: str) -> tuple[socket.socket, int]:
    """(connection, descriptor) from the arena socket. Raises the error that it answers with."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(WAIT_S)
    connection.connect(path)
    connection.sendall(f"{token}\n".encode())
    data, descriptors, _, _ = socket.recv_fds(connection, 4096, 1)
    if not descriptors:
        connection.close()
        _, code, text = data.decode().strip().split(" ", 2)
        raise by_code(code, text)
    return connection, descriptors[0]
