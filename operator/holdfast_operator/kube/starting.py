"""Creates the pods of one job's members, a few at a time, while its control loop goes on looking:
thousands take long, and a failure must not wait for them.

Decides nothing. A pod that is still to be created counts as an agent that is starting, as if it
existed: so a look neither asks for it again nor misses it, and can take it back like a pod that has
not started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_operator.kube.api import ApiError
from holdfast_operator.kube.world import LoopContext
from holdfast_operator.reconciler.views import StartAgent

AT_ONCE = 16
"""Number of pods of one job that are created at once, however many are wanted."""


class Starting:
    """Creates the pods of one job.

    Args:
        attempts: member → the highest attempt that was ever started.
    """

    def __init__(self, world: LoopContext, attempts: dict[int, int]) -> None:
        self._world, self._attempts = world, attempts
        self._wanted: dict[int, StartAgent] = {}
        """Pods whose creation has not begun, by member."""
        self._under_way: set[StartAgent] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._preparing = asyncio.Lock()
        self._prepared_for = ""
        self._lost_at: dict[int, float] = {}
        """Member → last heartbeat of the node that it was lost with, until its new pod is made."""
        self._failed: list[ApiError] = []

    @property
    def pending(self) -> tuple[StartAgent, ...]:
        """Agents that are wanted and whose pods do not exist yet."""
        return (*self._wanted.values(), *self._under_way)

    def take_back(self, starts: Iterable[StartAgent]) -> None:
        """Do not create these. A creation under way goes on, and its pod has to be deleted."""
        for each in starts:
            if self._wanted.get(each.member) == each:
                del self._wanted[each.member]

    def want(self, job: MoETrainingJob, starts: Iterable[StartAgent]) -> None:
        """Create these pods as well."""
        new = {each.member: each for each in starts if each not in self._under_way}
        self._wanted.update(new)
        if new:
            for pod in (each for each in self._world.pods.of(job.key) if not each.adopted):
                self._attempts[pod.member] = max(pod.attempt, self._attempts.get(pod.member, 0))
        for _ in range(min(len(self._wanted), AT_ONCE - len(self._tasks))):
            task = asyncio.get_running_loop().create_task(self._work(job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def note_loss(self, member: int, heartbeat_at: float) -> None:
        """Note that the member was lost with a node whose last heartbeat was at `heartbeat_at`, in
        monotonic seconds."""
        self._lost_at[member] = heartbeat_at

    def failures(self) -> list[ApiError]:
        """Refusals since the last call. The next look asks for those pods again."""
        found, self._failed = self._failed, []
        return found

    def close(self) -> None:
        """Begin no more creations, and cancel those under way."""
        self._wanted = {}
        for task in self._tasks:
            task.cancel()

    async def _work(self, job: MoETrainingJob) -> None:
        try:
            while await self._prepare(job):
                start = self._wanted.pop(next(iter(self._wanted)))
                self._under_way.add(start)
                try:
                    await self._start(job, start)
                finally:
                    self._under_way.discard(start)
        except ApiError as error:
            self._wanted = {}  # what is refused for one is refused for most
            self._failed.append(error)

    async def _prepare(self, job: MoETrainingJob) -> bool:
        """Make what pods share, once; returns whether there are any to create."""
        async with self._preparing:
            if self._wanted and self._prepared_for != job.metadata.uid:
                await self._world.trainers.prepare(job)
                self._prepared_for = job.metadata.uid
        return bool(self._wanted)

    async def _start(self, job: MoETrainingJob, start: StartAgent) -> None:
        member = start.member
        attempt = self._attempts[member] = self._attempts.get(member, 0) + 1
        await self._world.trainers.start(job, member, start.node, attempt)
        lost_at = self._lost_at.pop(member, None)
        if lost_at is not None:
            self._world.metrics.observe("replacement_seconds", self._world.clock() - lost_at)
