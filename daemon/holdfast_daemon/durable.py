"""What a daemon's jobs share of the durable tier: threads, the limit of bandwidth, a good end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from holdfast_daemon.allowance import Allowance
from holdfast_daemon.engine import persist_leader
from holdfast_daemon.holding import Holding
from holdfast_daemon.host import JobHost
from holdfast_daemon.persister import Persister, Store
from holdfast_storage.sets import SetStore


class DurableTier:
    """Of one daemon. For the event loop's thread."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="persist")
        self._allowance = Allowance()

    def persister(self, job: str, storage: Holding) -> Persister:
        """Writes what `job` has in `storage`."""
        return Persister(
            storage,
            open_store=lambda uri: open_store(uri, job),
            executor=self._executor,
            allowance=self._allowance,
        )

    async def drain(self, hosts: Iterable[JobHost], grace_s: float) -> list[str]:
        """Before the daemon ends: have persisted what would be due soon, and wait for that.

        Returns:
            The jobs of which it was not finished within `grace_s`.
        """
        waiting = [
            host for host in hosts if persist_leader.is_due_soon(host.engine.memory, host.now)
        ]
        for host in waiting:
            host.carry_out(host.engine.request_persist(host.now))
        loop = asyncio.get_running_loop()
        until = loop.time() + grace_s
        while waiting and (left := until - loop.time()) > 0:
            await waiting[0].changed(left)
            waiting = [h for h in waiting if not h.dropped and h.engine.memory.persist.wanted]
        return [host.job for host in waiting]

    def close(self) -> None:
        """Wait for nothing: a storage that hangs must not keep the daemon from ending."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def open_store(uri: str, job: str) -> Store:
    """The sets of `job` below `uri`.

    Raises:
        HoldfastError: `uri` is not of a storage that can be reached from here.
    """
    return SetStore(uri, job)
