"""Gives each job its own threads, so that hanging work of one job does not block the others.

A thread that waits for storage cannot be stopped from outside, and storage may never answer; so the
thread that waits belongs to the job whose work it does. Threads are started when there is work, and
end when the job leaves the node.
"""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor


class JobThreads:
    """Hands each job its threads. Only the event loop's thread may call it.

    Args:
        threads: number of threads for each job, at most.
        name: prefix of the threads' names.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._threads, self._name = threads, name
        self._executors: dict[str, Executor] = {}

    def of(self, job: str) -> Executor:
        """The threads of `job`, until `release`."""
        if job not in self._executors:
            self._executors[job] = ThreadPoolExecutor(self._threads, thread_name_prefix=self._name)
        return self._executors[job]

    def release(self, job: str) -> None:
        """Let the threads of a job that has left the node end; those that hang end when they
        can."""
        executor = self._executors.pop(job, None)
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)

    def close(self, *, wait: bool) -> None:
        """Start nothing more; with `wait`, return when running work has ended."""
        executors, self._executors = self._executors, {}
        for executor in executors.values():
            executor.shutdown(wait=False, cancel_futures=True)
        if wait:
            for executor in executors.values():
                executor.shutdown(wait=True)
