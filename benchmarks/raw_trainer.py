"""A rank without torch: speaks the daemon's protocol and saves a payload of plain bytes.

Protection and rebuilding, which follow the commit, do not depend on how the bytes were captured,
and four of these ranks fit where four torch processes would not.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import threading
import time
from collections.abc import Collection
from pathlib import Path

import grpc
import numpy as np
from xxhash import xxh3_64_intdigest

from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import (
    PIECE_BYTES,
    Entry,
    Layout,
    TensorRole,
    encode_layout,
    piece_count,
)
from holdfast_core.snapshots.pieces import packed
from holdfast_protos import codec, trainer_pb2, trainer_pb2_grpc

WITHIN_S = 60.0


def layout_of(rank: int, world_size: int, payload_bytes: int) -> Layout:
    """Layout of one tensor of bytes, without extras."""
    blob = Entry(
        unit="embeddings",
        tensor="blob",
        role=TensorRole.COMPUTE,
        dtype="uint8",
        shape=(payload_bytes,),
        start=0,
        nbytes=payload_bytes,
        offset=0,
    )
    return Layout(
        rank=rank,
        world_size=world_size,
        topology=f"dp={world_size}",
        entries=(blob,),
        extras_offset=payload_bytes,
        extras_capacity=0,
    )


class RawTrainer:
    """One rank in one epoch."""

    def __init__(self, daemon_socket: Path, job: str, rank: int, world_size: int) -> None:
        self._channel = grpc.insecure_channel(f"unix:{daemon_socket}")
        self._stub: trainer_pb2_grpc.TrainerStub = trainer_pb2_grpc.TrainerStub(self._channel)
        self.job, self.rank, self._world_size = job, rank, world_size
        self.epoch = 0
        self.protected_at: dict[Generation, float] = {}
        self._changed = threading.Condition()
        self._session = ""
        self._filled = 0
        """Step of the newest payload."""
        self._claim: socket.socket | None = None
        self._descriptor = -1

    def hello(self, epoch: int) -> None:
        """Wait until the daemon has `epoch`."""
        until = time.monotonic() + WITHIN_S
        while self.epoch != epoch:
            request = trainer_pb2.HelloRequest(
                protocol_version=codec.PROTOCOL_VERSION, job=self.job, rank=self.rank
            )
            try:
                self.epoch = self._stub.Hello(request, wait_for_ready=True).epoch
            except grpc.RpcError:
                if time.monotonic() > until:
                    raise

    def restore(self) -> trainer_pb2.RestoreDecision:
        """The decision where to start; returns when the bytes, if any, are on this node."""
        request = trainer_pb2.RestoreRequest(job=self.job, rank=self.rank, epoch=self.epoch)
        for progress in self._stub.Restore(request, timeout=WITHIN_S):
            if progress.HasField("decision"):
                return progress.decision
        raise RuntimeError(f"rank {self.rank} got no decision where to start")

    def open(self, payload_bytes: int, arena_socket: Path) -> None:
        """Claim and map the arena, and begin to watch."""
        layout = layout_of(self.rank, self._world_size, payload_bytes)
        reply = self._stub.Open(
            trainer_pb2.OpenRequest(
                job=self.job,
                rank=self.rank,
                epoch=self.epoch,
                layout=encode_layout(layout),
                largest_slot_bytes=layout.slot_bytes,
                pid=os.getpid(),
            ),
            timeout=WITHIN_S,
        )
        self._session, self._slot_bytes = reply.session, reply.slot_bytes
        self._claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._claim.connect(str(arena_socket))
        self._claim.sendall(reply.token.encode() + b"\n")
        answer, descriptors, _, _ = socket.recv_fds(self._claim, 4096, 1)
        if not descriptors:
            raise RuntimeError(f"rank {self.rank}: {answer.decode()}")
        self._descriptor = descriptors[0]
        self._arena = mmap.mmap(self._descriptor, reply.arena_bytes)
        threading.Thread(target=self._watch, daemon=True).start()

    def fill(
        self, step: int, payload: bytes | bytearray, written: Collection[int] | None = None
    ) -> None:
        """Copy `payload` into the slot that the daemon grants, and prepare for `commit`.

        Args:
            written: the pieces that changed since the last call; the others are carried over.
                None: all have changed.
        """
        count = piece_count(len(payload), PIECE_BYTES)
        flags = np.zeros(count, dtype=bool)
        flags[list(range(count) if written is None else written)] = True
        request = trainer_pb2.GrantRequest(session=self._session, epoch=self.epoch, step=step)
        if not flags.all():
            request.base.CopyFrom(codec.generation_to_proto(Generation(self.epoch, self._filled)))
            request.unchanged = packed(~flags)
        reply = self._stub.Grant(request)
        if reply.skipped:
            raise RuntimeError(f"rank {self.rank} got no slot: {reply.skipped}")
        if not flags.all() and not reply.carried:
            raise RuntimeError(f"rank {self.rank}: nothing was carried over")
        slots = reply.places or bytes([reply.slot]) * count
        digests = np.zeros(count, dtype="<u8")
        for piece in np.flatnonzero(flags).tolist():
            at = piece * PIECE_BYTES
            part = memoryview(payload)[at : at + PIECE_BYTES]
            there = slots[piece] * self._slot_bytes + at
            self._arena[there : there + len(part)] = part
            digests[piece] = xxh3_64_intdigest(part)
        self._filled = step
        self._request = trainer_pb2.CommitRequest(
            session=self._session,
            epoch=self.epoch,
            step=step,
            slot=reply.slot,
            payload_bytes=len(payload),
            digests=digests.tobytes(),
        )

    def commit(self) -> None:
        """Seal the filled snapshot."""
        self._stub.Commit(self._request, timeout=WITHIN_S)

    def sent_bytes(self) -> int:
        """Bytes that this node's daemon has sent to others."""
        status = json.loads(self._stub.Status(trainer_pb2.StatusRequest()).json)
        return int(status["sent_bytes"])

    def wait_protected(self, step: int) -> float:
        """Time, by `time.perf_counter`, of the notice that `step` or a newer one is protected."""

        def when() -> list[float]:
            return [
                at
                for generation, at in self.protected_at.items()
                if generation >= Generation(self.epoch, step)
            ]

        with self._changed:
            if not self._changed.wait_for(lambda: bool(when()), WITHIN_S):
                raise TimeoutError(f"step {step} of rank {self.rank} was not protected in time")
            return min(when())

    def close(self) -> None:
        """End as a dying trainer does: the claim's connection breaks."""
        self._channel.close()
        if self._claim is not None:
            self._claim.close()
            self._arena.close()  # it holds a duplicate of the descriptor, and so the claim
            os.close(self._descriptor)
            self._claim = None

    def _watch(self) -> None:
        request = trainer_pb2.WatchRequest(session=self._session)
        try:
            for event in self._stub.Watch(request):
                if event.HasField("protected"):
                    with self._changed:
                        generation = codec.generation_from_proto(event.protected)
                        self.protected_at[generation] = time.perf_counter()
                        self._changed.notify_all()
        except (grpc.RpcError, ValueError):
            return  # the session, or the node, is gone
