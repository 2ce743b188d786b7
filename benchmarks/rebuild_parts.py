"""The floor of each part of a rebuild, by itself: the daemon's own routines, in this process, on as
many threads, with buffers that are warm and nobody beside them.

A rebuild fetches what is left of a payload's stripes, adds it up, verifies the result and writes it
into the arena. Before that, survivors verify what they hold, and the new node asks for the manifest
and allocates the arena. `bare.BarePath` is the floor of fetching.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.floors import READ_BYTES, SHARED_MEMORY, SharedBuffer
from benchmarks.measure import timed
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import PIECE_BYTES, first_bad_piece, piece_digests
from holdfast_core.snapshots.membership import Membership
from holdfast_daemon.memory.files import RealFiles, SharedFile
from holdfast_daemon.net.peers import PeerReader
from holdfast_daemon.parity.build import verify, verify_in_place
from holdfast_daemon.parity.combining import STRIDE_BYTES, THREADS, over_segments
from holdfast_daemon.parity.multiplying import xor_into

REBUILD = ("combined", "verified", "written")
"""Parts of a rebuild, beside the fetch."""

BEFORE = ("survivors", "asked", "allocated")
"""What comes before it, from the new membership on."""


class RebuildParts:
    """Measures the parts of rebuilding one of `nodes` members with RAIM5.

    Args:
        payload_bytes: bytes of each member's payload.
        arena_bytes: bytes of the arena that the new node allocates.
    """

    def __init__(self, nodes: int, payload_bytes: int, arena_bytes: int) -> None:
        self._nodes, self._payload_bytes, self._arena_bytes = nodes, payload_bytes, arena_bytes
        self._buffers = [memoryview(bytearray(b"\1" * STRIDE_BYTES)) for _ in range(THREADS)]
        self._other = memoryview(bytearray(b"\2" * STRIDE_BYTES))
        self._digests = piece_digests(self._other, PIECE_BYTES)
        self._held = SharedBuffer(payload_bytes)
        self._held_digests = piece_digests(memoryview(self._held.mapping), PIECE_BYTES)

    def __call__(self, ask: Callable[[], object]) -> dict[str, float]:
        """Seconds of each part; `ask` gets the manifest from a peer."""
        return {
            "combined": timed(self._combine),
            "verified": timed(lambda: self._each(self._verify)),
            "survivors": timed(self._verify_survivors),
            "asked": timed(ask),
            **self._arena(),
        }

    def _each(self, do: Callable[[int, memoryview, int], None]) -> None:
        """Call `do(at, buffer, nbytes)` for each stride of the payload, on the threads of a
        rebuild."""
        free = list(self._buffers)

        def run(start: int, end: int) -> None:
            buffer = free.pop()
            for at in range(start, end, STRIDE_BYTES):
                do(at, buffer, min(STRIDE_BYTES, end - at))

        over_segments(self._payload_bytes, STRIDE_BYTES, THREADS, run)

    def _combine(self) -> None:
        """Add the other members' chunks to the parity: one of the inputs is received where the sum
        is made."""

        def add(at: int, buffer: memoryview, nbytes: int) -> None:
            for _ in range(self._nodes - 2):
                xor_into(buffer[:nbytes], self._other[:nbytes])

        self._each(add)

    def _verify(self, at: int, buffer: memoryview, nbytes: int) -> None:
        first_bad_piece(self._other[:nbytes], self._digests, PIECE_BYTES)

    def _verify_survivors(self) -> None:
        """Verify the snapshot of each survivor, and its parity block."""
        block = memoryview(self._held.mapping)[: self._payload_bytes // (self._nodes - 1)]
        for _ in range(self._nodes - 1):
            verify(self._read, self._payload_bytes, self._held_digests, PIECE_BYTES)
            verify_in_place(block, self._held_digests, PIECE_BYTES)

    def _read(self, at: int, view: memoryview) -> None:
        os.preadv(self._held.descriptor, [view], at)

    def _arena(self) -> dict[str, float]:
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as directory:
            path = Path(directory) / "arena"
            allocated_s = timed(lambda: RealFiles().allocate(path, 0, self._arena_bytes))
            file = SharedFile(path)
            written_s = timed(lambda: self._each(lambda at, b, n: file.write(at, b[:n])))
        return {"allocated": allocated_s, "written": written_s}


def ask_for_manifest(
    membership: Membership, others: Sequence[int], rank: int, generation: Generation
) -> None:
    """Ask the first of `others` for the rank's manifest, as a daemon that never spoke to it."""
    reader = PeerReader()
    try:
        member = membership.member(others[0])
        manifest, _ = reader.fetch_manifest(
            member, membership.job, membership.epoch, rank, generation
        )
    finally:
        reader.close()
    if not manifest:
        raise RuntimeError(f"{member.node} has no manifest of rank {rank} of {generation}")


def use_memory(nbytes: int) -> None:
    """Take shared memory, write it and free it, so that the kernel has it at hand.

    A virtual machine may give its free memory back to the host, which takes longer to return a page
    than anything that is measured here does with it.
    """
    with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        zeros = bytes(READ_BYTES)
        for at in range(0, nbytes, READ_BYTES):
            os.pwrite(file.fileno(), zeros[: nbytes - at], at)
