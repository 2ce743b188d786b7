"""The arena of a real daemon, mapped and pinned by the SDK as a session does it.

The copy engine works on it without a session's control calls, so that only bytes are measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from benchmarks.cluster import Cluster, Daemon
from benchmarks.gpu.room import ARENA_COPIES, MIB
from benchmarks.measure import timed
from holdfast._copying.arena import MappedArena
from holdfast._copying.devices import Device, device_of
from holdfast._copying.placed import Placed
from holdfast._daemon.client import GrpcClient, RestoreRequest
from holdfast._daemon.link import Link
from holdfast._settings import Settings
from holdfast_core.errors import HoldfastError
from holdfast_core.snapshots.layouts import PAGE_BYTES, Layout
from holdfast_core.snapshots.membership import Redundancy

JOB = "figures"
SPARE_BYTES = 64 * MIB
WITHIN_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenArena:
    """An arena with a slot to write."""

    device: Device
    placed: Placed
    opened_s: float
    """Seconds until the arena was allocated by the daemon, mapped and pinned."""
    daemon: Daemon

    def part(self, nbytes: int) -> OpenArena:
        """The same arena with slots of only `nbytes`."""
        layout = replace(self.placed.layout, extras_offset=nbytes)
        return replace(self, placed=replace(self.placed, layout=layout))

    @contextmanager
    def readers(self) -> Iterator[Callable[[], Placed]]:
        """Yield a function that maps the same snapshot anew, as each restore does; all mappings end
        together."""
        path = next((self.daemon.root / "jobs" / JOB / "arenas").glob("*/arena"))
        nbytes = path.stat().st_size
        mapped: list[MappedArena] = []

        def reader() -> Placed:
            arena = MappedArena(os.open(path, os.O_RDONLY), nbytes, writable=False)
            mapped.append(arena)
            return replace(
                self.placed,
                arena=arena.view(0, nbytes),
                address=arena.address,
                descriptor=arena.descriptor,
            )

        try:
            yield reader
        finally:
            for arena in mapped:
                arena.close()


@contextmanager
def one_daemon(state_bytes: int) -> Iterator[Daemon]:
    """Start a daemon with room for one rank of `JOB`, whose state has `state_bytes`."""
    with Cluster(ARENA_COPIES * state_bytes + SPARE_BYTES) as cluster:
        daemon = cluster.start("node-0")
        cluster.control.place(JOB, 1, [daemon.node], redundancy=Redundancy.NONE)
        yield daemon


@contextmanager
def opened_arena(nbytes: int, device: torch.device) -> Iterator[OpenArena]:
    """Open an arena whose slots hold `nbytes`."""
    with one_daemon(nbytes) as daemon:
        settings = Settings()
        client = GrpcClient(daemon.socket, JOB, 0, "", settings.rpc_timeout_s, None)
        ours = device_of([torch.empty(1, device=device)])
        link = Link(client, ours, settings, lambda event: None)
        layout = Layout(
            rank=0,
            world_size=1,
            topology="dp1",
            entries=(),
            extras_offset=nbytes,
            extras_capacity=PAGE_BYTES,
        )
        _wait_for(client)
        opened_s = timed(lambda: link.open(layout, layout.slot_bytes))
        try:
            placed, _ = link.grant(1)
            yield OpenArena(device=ours, placed=placed, opened_s=opened_s, daemon=daemon)
        finally:
            link.end()
            client.close()


def _wait_for(client: GrpcClient) -> None:
    """Return when the daemon knows the job."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        try:
            if client.hello().epoch == 1:
                client.restore(RestoreRequest(epoch=1), WITHIN_S, lambda progress: None)
                return
        except HoldfastError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)
