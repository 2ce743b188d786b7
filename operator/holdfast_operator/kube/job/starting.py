"""Creates the pods of one job's members, a few at a time, while its control loop continues:
thousands of pods take long, and a failure must not wait for them.

It decides nothing. A pod that is still to be created counts as a starting agent, as if it existed:
so the next turn neither requests it again nor misses it, and can cancel it like a pod that has not
started.

A pod that the API server refuses, for example because of a quota, is tried again after growing
pauses, one pod at a time: each turn requests it, and no event announces that it would be accepted
now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_operator.kube.client.api import CONFLICT, ApiError
from holdfast_operator.kube.job.world import LoopContext
from holdfast_operator.kube.pods.shared_objects import BEING_COLLECTED, EXISTS
from holdfast_operator.reconciler.observe.views import StartAgent

AT_ONCE = 16
"""Number of pods of one job that are created at once, however many are wanted."""
RETRY_S = 1.0
"""Pause after the first refusal, and after a request without a useful answer."""
RETRY_S_MAX = 30.0
"""Longest pause: each refusal doubles it."""
NAMES_MAX = 16
"""Number of names that are tried for a pod when other owners have pods of these names."""

_SHARED = -1
"""Stands for what the pods share among the members whose pods were refused."""


class PodStarter:
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
        self._refused: dict[int, ApiError] = {}
        """Member → the newest answer that its pod cannot be made, until it is made."""
        self._pause_s = RETRY_S
        self._retry_at = float("-inf")

    @property
    def attempts(self) -> Mapping[int, int]:
        """The highest attempt that was ever started, by member."""
        return self._attempts

    @property
    def pending(self) -> tuple[StartAgent, ...]:
        """Agents that are wanted and whose pods do not exist yet."""
        return (*self._wanted.values(), *self._under_way)

    @property
    def refusal(self) -> ApiError | None:
        """The API server's reason for refusing a wanted pod: the pod of the first such member, so
        that the reason stays the same. None when it refuses none."""
        return self._refused[min(self._refused)] if self._refused else None

    def take_back(self, starts: Iterable[StartAgent]) -> None:
        """Cancel the creation of these agents' pods. A creation under way continues, and its pod
        has to be deleted."""
        for each in starts:
            if self._wanted.get(each.member) == each:
                del self._wanted[each.member]

    def want(self, job: MoETrainingJob, starts: Iterable[StartAgent]) -> None:
        """Create these pods as well, unless a refusal is too recent: then a later call has to ask
        for them again."""
        new = {each.member: each for each in starts if each not in self._under_way}
        self._forget_refusals({*new, *(each.member for each in self.pending)}, job)
        if self._world.clock() < self._retry_at:
            return
        self._wanted.update(new)
        if new:
            for pod in (each for each in self._world.pods.of(job.key) if not each.adopted):
                self._attempts[pod.member] = max(pod.attempt, self._attempts.get(pod.member, 0))
        self._begin(job)

    def mend(self, job: MoETrainingJob) -> None:
        """Make what the job's pods share again, where somebody has deleted it."""
        if not self._tasks and self._lacks(job) and self._world.clock() >= self._retry_at:
            self._begin_task(self._work(job))

    def note_loss(self, member: int, heartbeat_at: float) -> None:
        """Note that the member was lost with a node whose last heartbeat was at `heartbeat_at`, in
        monotonic seconds."""
        self._lost_at[member] = heartbeat_at

    def failures(self) -> list[ApiError]:
        """Failed requests since the last call. The next turn requests those pods again."""
        found, self._failed = self._failed, []
        return found

    def close(self) -> None:
        """Begin no more creations, and cancel those under way."""
        self._wanted = {}
        for task in self._tasks:
            task.cancel()

    def _begin(self, job: MoETrainingJob) -> None:
        """Begin to create the wanted pods; after a refusal only one, to see whether it is
        accepted."""
        most = 1 if self._refused else AT_ONCE
        for _ in range(min(len(self._wanted), most - len(self._tasks))):
            self._begin_task(self._work(job))

    def _begin_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, job: MoETrainingJob) -> None:
        member = _SHARED
        try:
            while await self._prepare(job):
                start = self._wanted.pop(next(iter(self._wanted)))
                member = start.member
                self._under_way.add(start)
                try:
                    await self._start(job, start)
                finally:
                    self._under_way.discard(start)
                self._accept(job, member)
                member = _SHARED
        except ApiError as error:
            self._wanted = {}  # what is refused for one is refused for most
            self._refuse(member, error)

    async def _prepare(self, job: MoETrainingJob) -> bool:
        """Make what pods share, where it is missing; returns whether there are any to create."""
        async with self._preparing:
            due = self._wanted and self._prepared_for != job.metadata.uid
            if due or self._lacks(job):
                await self._world.trainers.prepare(job)
                self._prepared_for = job.metadata.uid
                self._refused.pop(_SHARED, None)
        return bool(self._wanted)

    async def _start(self, job: MoETrainingJob, start: StartAgent) -> None:
        member = start.member
        for _ in range(NAMES_MAX):
            attempt = self._attempts[member] = self._attempts.get(member, 0) + 1
            try:
                if await self._world.trainers.start(job, member, start.node, attempt):
                    break
            except ApiError as error:
                if error.is_final and self._attempts[member] == attempt:
                    self._attempts[member] -= 1  # no pod has the name
                raise
        else:
            text = f"the last {NAMES_MAX} names for a pod of member {member} belong to others' pods"
            raise ApiError(f"{text}: delete those", status=CONFLICT, reason=EXISTS)
        lost_at = self._lost_at.pop(member, None)
        if lost_at is not None:
            self._world.metrics.observe("replacement_seconds", self._world.clock() - lost_at)

    def _accept(self, job: MoETrainingJob, member: int) -> None:
        """Note that a pod was created: others follow at once."""
        self._refused.pop(member, None)
        if not self._refused:
            self._pause_s, self._retry_at = RETRY_S, float("-inf")
            self._begin(job)

    def _refuse(self, member: int, error: ApiError) -> None:
        """Note that a request failed, and pause."""
        self._failed.append(error)
        self._prepared_for = ""  # what pods share may be what is missing
        if error.status:
            self._refused[member] = error
        now = self._world.clock()
        if now < self._retry_at:
            return  # one of several at once
        if error.is_final and error.reason != BEING_COLLECTED:
            self._retry_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, RETRY_S_MAX)
        else:
            self._retry_at = now + RETRY_S

    def _forget_refusals(self, members: set[int], job: MoETrainingJob) -> None:
        """Forget those of pods that are not wanted any more, while one of a wanted pod is left."""
        if not self._refused:
            return
        kept = members | ({_SHARED} if members or self._lacks(job) else set())
        left = {m: error for m, error in self._refused.items() if m in kept}
        if left or not members:
            self._refused = left

    def _lacks(self, job: MoETrainingJob) -> bool:
        return self._world.trainers.lacks(job)
