"""Threads that each job has for itself: work of one that hangs holds nobody else's.

Storage that never answers cannot be given up from outside; so who waits for it does so on threads
of its own job. They are started when there is work, and end when the job leaves the node.
"""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor


class JobThreads:
    """Hands each job its threads. Only the event loop's thread may call it.

    Args:
        threads: of each job.
        name: what a thread's name begins with.
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
        """Let the threads of a job end that has left the node; those that hang, when they can."""
        executor = self._executors.pop(job, None)
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)

    def close(self, *, wait: bool) -> None:
        """Begin nothing more; with `wait`, return when what runs has ended."""
        executors, self._executors = self._executors, {}
        for executor in executors.values():
            executor.shutdown(wait=False, cancel_futures=True)
        if wait:
            for executor in executors.values():
                executor.shutdown(wait=True)
