"""The durable storage of a simulated cluster: one for all daemons, slow, and often out of order.

The daemons use the real storage library over a simulated place: calls take time, any process may
die meanwhile, and calls fail at random and for a while. The checks look at what a restore would
read.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Sequence

from simulation.fibers import Broken
from simulation.world import Daemon, World

from holdfast_core.durable.sets import MANIFEST_FILE, set_name
from holdfast_core.errors import CorruptError, HoldfastError, StorageError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Tier
from holdfast_storage.roots import StoredFile, Unfinished
from holdfast_storage.sets import SetStore

JOB = "job"
GRACE_S = 3.0
OUTAGES = 3
PERSISTING = ("persist_ordered", "persisted", "persist_failed", "persist_given_up")
"""Events that daemons note about persisting."""


class Bucket:
    """The stored files, and the behaviour of storage in this schedule."""

    def __init__(self, cluster: World, seed: int, *, is_used: bool) -> None:
        self.cluster = cluster
        # A generator of its own, so that a tier does not change what the cluster draws.
        self.rng = random.Random(seed * 7919 + 1)
        self.tier: Tier | None = None
        if is_used:
            self.tier = Tier(
                uri="virtual://",
                every_steps=self.rng.choice((1, 2, 3)),
                keep=self.rng.choice((1, 2, 3)),
                keep_every=self.rng.choice((0, 4)),
            )
        self.objects: dict[str, tuple[bytes, float]] = {}
        """By path, the bytes and the time at which they appeared."""
        self.complete: set[Generation] = set()
        """Generations whose sets were complete at any time."""
        self.error_rate = self.rng.choice((0.0, 0.0, 0.01, 0.05))
        self.stall_rate = self.rng.choice((0.0, 0.0, 0.03))
        self.outages = [
            (begins, begins + self.rng.uniform(0.1, 2.0))
            for begins in (self.rng.uniform(0.0, 6.0) for _ in range(self.rng.randint(0, OUTAGES)))
        ]

    def store(self, daemon: Daemon | None = None) -> SetStore:
        """The job's sets, as `daemon` reaches them; without a daemon, at once and without
        failures."""
        return SetStore(
            "memory://virtual",
            JOB,
            root=VirtualRoot(self, daemon),
            wall=lambda: self.cluster.clock.now,
            grace_s=GRACE_S,
        )

    def is_down(self) -> bool:
        """Whether this call fails."""
        now = self.cluster.clock.now
        down = any(begins <= now < ends for begins, ends in self.outages)
        return down or self.rng.random() < self.error_rate

    def stall_s(self) -> float:
        """Seconds by which this call takes longer than usual."""
        return self.rng.uniform(0.5, 3.0) if self.rng.random() < self.stall_rate else 0.0

    def appeared(self, path: str) -> None:
        """Record that a file was written. If it makes a set complete, check the set against what
        was captured."""
        name = path.removeprefix(f"{JOB}/").split("/")
        if name[-1] != MANIFEST_FILE:
            return
        generation = self._check_set(name[0])
        self.complete.add(generation)
        self.cluster.counts["set_complete"] += 1

    @property
    def newest(self) -> Generation | None:
        """The newest generation whose set was complete at any time."""
        return max(self.complete, default=None)

    def announced(self, generation: Generation) -> None:
        """Check that a generation that a daemon calls persisted is."""
        assert generation in self.complete, f"{generation} is called persisted, and is not"

    def check(self) -> None:
        """Check that all complete sets are right, and that the newest ever is still there."""
        stored = self.store().complete()
        assert not stored.rejected, f"sets that cannot be read: {stored.rejected}"
        found = [self._check_set(set_name(s.generation)) for s in stored]
        assert max(found, default=None) == self.newest, (
            f"set {self.newest} was complete, and {found} are left"
        )

    def has_come_back(self, wanted: Generation) -> bool:
        """Whether persistence has reached `wanted`, now that faults have ended."""
        if self.tier is None:
            return True
        self.outages, self.error_rate, self.stall_rate = [], 0.0, 0.0
        return self.newest is not None and self.newest >= wanted

    def _check_set(self, name: str) -> Generation:
        store = self.store()
        stored = next(s for s in store.complete() if set_name(s.generation) == name)
        assert stored.world_size == self.cluster.members * self.cluster.nproc
        assert stored.generation not in self.cluster.windows, (
            f"set {stored.generation} holds units of different steps"
        )
        for rank in range(stored.world_size):
            found = store.open_rank(stored, rank)
            data = bytearray(found.content.payload_bytes)
            found.read_into(0, found.pieces, memoryview(data))
            assert data == self.cluster.captured[rank, stored.generation], (
                f"set {stored.generation} in storage has other bytes of rank {rank}"
            )
        return stored.generation


class VirtualRoot:
    """A `holdfast_storage.roots.TierRoot` through which one daemon reaches the bucket."""

    def __init__(self, bucket: Bucket, daemon: Daemon | None) -> None:
        self._bucket, self._daemon = bucket, daemon

    def write(
        self,
        path: str,
        nbytes: int,
        parts: Iterable[memoryview],
        stop: threading.Event | None = None,
    ) -> None:
        data = bytearray()
        for part in parts:
            data += part
            self._wait(f"writing {path}")
        assert len(data) == nbytes
        self._put(path, bytes(data))

    def create(self, path: str, data: bytes) -> bool:
        self._wait(f"writing {path}")
        if path in self._bucket.objects:
            return False
        self._put(path, data)
        return True

    def size(self, path: str) -> int | None:
        self._wait(f"looking at {path}")
        found = self._bucket.objects.get(path)
        return None if found is None else len(found[0])

    def read(self, path: str, start: int, buffer: memoryview) -> None:
        self._wait(f"reading {path}")
        if path not in self._bucket.objects:
            raise StorageError(f"{path} is not there")
        found = self._bucket.objects[path][0][start : start + len(buffer)]
        if len(found) < len(buffer):
            raise CorruptError(f"{path} ends too early")
        buffer[:] = found

    def files(self, path: str) -> list[StoredFile]:
        self._wait(f"listing {path}")
        return [
            StoredFile(path=name, bytes=len(data), modified_s=at)
            for name, (data, at) in sorted(self._bucket.objects.items())
            if name.startswith(f"{path}/")
        ]

    def unfinished(self, path: str) -> list[Unfinished]:
        del path
        return []

    def discard(self, unfinished: Unfinished) -> None:
        raise AssertionError(f"{unfinished} was never begun")

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            self._wait(f"deleting {path}")
            self._bucket.objects.pop(path, None)

    def _put(self, path: str, data: bytes) -> None:
        self._bucket.objects[path] = data, self._bucket.cluster.clock.now
        try:
            self._bucket.appeared(path)
        except (AssertionError, HoldfastError) as error:
            raise Broken(error) from error
        self._wait(f"the answer about {path}")

    def _wait(self, what: str) -> None:
        """Let the call take its time, and perhaps fail."""
        if self._daemon is None:
            return
        self._daemon.pause_storage()
        if self._bucket.is_down():
            raise StorageError(f"{what} failed: storage is out of order")
