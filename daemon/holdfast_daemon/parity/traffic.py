"""Network traffic for making parity on a node: counted, and kept below a limit.

Training uses the same network, so a job or a node may have a limit. It applies to generations of
the running epoch, for which nothing waits. Fetches that a restart waits for are not limited:
rebuilds, and parity of the line that an epoch began from, without which the next loss of a node
would destroy that line.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from holdfast_core.snapshots.generations import Generation
from holdfast_daemon.epoch_scope import EpochScope
from holdfast_daemon.limits.allowance import Allowance
from holdfast_daemon.parity.combining import Stream
from holdfast_daemon.parity.group import GroupFetch
from holdfast_daemon.parity.recomputing import Recomputed
from holdfast_daemon.transport.protocol import Kind

PART_BYTES = 256 * 1024
"""Bytes read, and counted against a limit, at a time."""

WINDOW_S = 10.0
"""Time constant of the shown rate: bytes fetched that long ago count by 1/e."""


class NodeTraffic:
    """Traffic of all jobs of a daemon for parity: bytes fetched, or computed instead. Thread-safe.

    Args:
        limit_bytes_s: the daemon's limit; 0: none.
        clock: monotonic seconds.
    """

    def __init__(self, limit_bytes_s: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_bytes_s, self.clock = limit_bytes_s, clock
        self.allowance = Allowance(clock)
        self.recomputed = Recomputed()
        self.received_bytes = 0
        """Bytes fetched for parity so far."""
        self.mirrored_bytes = 0
        """Bytes taken from mirrors on this node instead."""
        self._lock = threading.Lock()

    def of_job(self) -> JobTraffic:
        """A counter of the traffic of one more job."""
        return JobTraffic(self)

    def count(self, nbytes: int) -> None:
        with self._lock:
            self.received_bytes += nbytes

    def count_mirrored(self, nbytes: int) -> None:
        with self._lock:
            self.mirrored_bytes += nbytes


class JobTraffic:
    """Traffic of one job for parity. Thread-safe."""

    def __init__(self, node: NodeTraffic) -> None:
        self._node = node
        self._allowance = Allowance(node.clock)
        self._lock = threading.Lock()
        self._rate = 0.0
        self._rated_at = node.clock()

    @property
    def recomputed(self) -> Recomputed:
        """Counters of replicas' pieces that are computed rather than fetched."""
        return self._node.recomputed

    @property
    def bytes_s(self) -> float:
        """Bytes a second fetched recently, as a decaying average over `WINDOW_S`."""
        with self._lock:
            return self._rate_at(self._node.clock())

    def paced(self, fetch: GroupFetch, generation: Generation, scope: EpochScope) -> PacedFetch:
        """Wrap `fetch` for parity of `generation`: counted and within the limits."""
        membership = scope.current()
        limits = (membership.protection_bytes_s, self._node.limit_bytes_s)
        urgent = generation.epoch < membership.epoch
        return PacedFetch(fetch, self, (0, 0) if urgent else limits, scope)

    def take(self, nbytes: int, limits: tuple[int, int], scope: EpochScope) -> None:
        """Wait until `nbytes` may be read, within the limit of the job and that of all jobs of the
        node. Raises StaleEpochError when the epoch ends first."""
        for allowance, limit in zip((self._allowance, self._node.allowance), limits, strict=True):
            allowance.take(nbytes, limit, scope.ended.wait)
        scope.check()

    def count(self, nbytes: int) -> None:
        self._node.count(nbytes)
        with self._lock:
            now = self._node.clock()
            self._rate = self._rate_at(now) + nbytes / WINDOW_S
            self._rated_at = now

    def count_mirrored(self, nbytes: int) -> None:
        """Count bytes that a mirror on this node had, so that they were not fetched."""
        self._node.count_mirrored(nbytes)

    def _rate_at(self, now: float) -> float:
        return self._rate * math.exp((self._rated_at - now) / WINDOW_S)


@dataclass(frozen=True, slots=True)
class PacedFetch:
    """The bytes of a parity group, counted and within the limits of the job and of the node, in
    bytes a second; 0: no limit."""

    fetch: GroupFetch
    traffic: JobTraffic
    limits: tuple[int, int]
    scope: EpochScope

    def open(self, position: int, kind: Kind, offset: int, nbytes: int, row: int = 0) -> Stream:
        return self._paced(self.fetch.open(position, kind, offset, nbytes, row))

    def open_change(
        self, position: int, base: Generation, offset: int, nbytes: int, piece_bytes: int
    ) -> Stream:
        return self._paced(self.fetch.open_change(position, base, offset, nbytes, piece_bytes))

    def _paced(self, stream: Stream) -> Stream:
        return PacedStream(stream, self.traffic, self.limits, self.scope)


@dataclass(frozen=True, slots=True)
class PacedStream:
    """A stream that is read part by part, as the limit allows. The sender waits meanwhile: TCP
    accepts no more than the receiver's buffer holds."""

    stream: Stream
    traffic: JobTraffic
    limits: tuple[int, int]
    scope: EpochScope

    def read_into(self, view: memoryview) -> None:
        size = PART_BYTES if any(self.limits) else max(len(view), 1)
        for at in range(0, len(view), size):
            part = view[at : at + size]
            self.traffic.take(len(part), self.limits, self.scope)
            self.stream.read_into(part)
            self.traffic.count(len(part))

    def close(self) -> None:
        self.stream.close()
