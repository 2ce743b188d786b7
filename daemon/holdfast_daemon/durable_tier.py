"""A daemon's way to the durable tier: threads of each job, the limit of bandwidth that all jobs
share, a good end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from holdfast_daemon.allowance import Allowance
from holdfast_daemon.durable.access import TierAccess
from holdfast_daemon.durable.persister import Persister
from holdfast_daemon.durable.stored_sets import TierSets
from holdfast_daemon.host import JobHost
from holdfast_daemon.job_threads import JobThreads
from holdfast_daemon.memory.job_bytes import JobBytes
from holdfast_daemon.settings import DaemonSettings
from holdfast_storage.sets import SetStore


class DurableTier:
    """Of one daemon. For the event loop's thread.

    Args:
        threads: of each job that writes.
    """

    def __init__(self, threads: int, access: TierAccess) -> None:
        self._tier_access = access
        self._threads = JobThreads(threads, "persist")
        self._allowance = Allowance()

    @classmethod
    def of(cls, settings: DaemonSettings) -> DurableTier:
        """That of a daemon with these settings. Raises InvalidJobError, as `TierAccess` does."""
        return cls(settings.threads, TierAccess(settings.storage_locations, settings.root))

    def persister(self, job: str, storage: JobBytes) -> Persister:
        """Writes what `job` has in `storage`."""
        return Persister(
            storage,
            open_store=lambda uri: SetStore(uri, job, place=self._tier_access.place(uri, job)),
            executor=self._threads.of(job),
            allowance=self._allowance,
        )

    def open_sets(self, uri: str, job: str) -> TierSets:
        """What storage holds of `job` below `uri`.

        Raises:
            HoldfastError: the job may not reach it, or it is of a kind that cannot be reached.
        """
        return TierSets(uri, job, place=self._tier_access.place(uri, job))

    def release(self, job: str) -> None:
        """Let the threads of a job end that has left the node."""
        self._threads.release(job)

    async def drain(self, hosts: Iterable[JobHost], grace_s: float) -> list[str]:
        """Before the daemon ends: have persisted what would be due soon, and wait for that.

        Returns:
            The jobs of which it was not finished within `grace_s`.
        """
        waiting = [host for host in hosts if host.engine.is_due_soon(host.now)]
        for host in waiting:
            host.carry_out(host.engine.request_persist(host.now))
        loop = asyncio.get_running_loop()
        until = loop.time() + grace_s
        while waiting and (left := until - loop.time()) > 0:
            await waiting[0].changed(left)
            waiting = [h for h in waiting if not h.dropped and h.engine.wants_persist]
        return [host.job for host in waiting]

    def close(self) -> None:
        """Wait for nothing: a storage that hangs must not keep the daemon from ending."""
        self._threads.close(wait=False)
