"""A daemon's access to the durable tier: threads and a limit of bandwidth for each job, and an
orderly end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from holdfast_daemon.durable.access import TierAccess
from holdfast_daemon.durable.persister import Persister
from holdfast_daemon.durable.stored_sets import TierSets
from holdfast_daemon.job.host import JobHost
from holdfast_daemon.job_threads import JobThreads
from holdfast_daemon.memory.job_bytes import JobBytes
from holdfast_daemon.settings import DaemonSettings
from holdfast_storage.sets import SetStore


class DurableTier:
    """The durable tier of one daemon. For the event loop's thread.

    Args:
        threads: number of threads for each job that persists.
    """

    def __init__(self, threads: int, access: TierAccess) -> None:
        self._tier_access = access
        self._threads = JobThreads(threads, "persist")

    @classmethod
    def of(cls, settings: DaemonSettings) -> DurableTier:
        """The tier of a daemon with these settings. Raises as `TierAccess` does."""
        return cls(settings.threads, TierAccess(settings.storage_locations, settings.root))

    def persister(self, job: str, storage: JobBytes) -> Persister:
        """A persister of the snapshots that `job` has in `storage`."""
        return Persister(
            storage,
            open_store=lambda uri: SetStore(uri, job, root=self._tier_access.root(uri, job)),
            executor=self._threads.of(job),
        )

    def open_sets(self, uri: str, job: str) -> TierSets:
        """The sets of `job` in the storage below `uri`.

        Raises:
            HoldfastError: the job may not use that storage, or its kind is not supported.
        """
        return TierSets(uri, job, root=self._tier_access.root(uri, job))

    def release(self, job: str) -> None:
        """Let the threads of a job that has left the node end."""
        self._threads.release(job)

    async def drain(self, hosts: Iterable[JobHost], grace_s: float) -> list[str]:
        """Persist the generations that are due soon, and wait for that, before the daemon ends.

        Returns:
            The jobs that were not finished within `grace_s`.
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
        """Start nothing more, and do not wait: hanging storage must not keep the daemon running."""
        self._threads.close(wait=False)
