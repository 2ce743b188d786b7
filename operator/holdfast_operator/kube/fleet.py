"""All jobs that this operator carries out: a control loop for each, and what wakes them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable

from holdfast_core.job.parsing import MANAGER
from holdfast_core.job.status import ENDED, Phase
from holdfast_operator.kube.amounts import Amounts
from holdfast_operator.kube.api import NOT_FOUND, ApiError, Object
from holdfast_operator.kube.job_loop import JobLoop
from holdfast_operator.kube.resources import JOBS
from holdfast_operator.kube.world import LoopContext
from holdfast_operator.reconciler.renewal import JobStand

_log = logging.getLogger(__name__)

HEARTBEAT_S_MIN, HEARTBEAT_S_MAX = 0.2, 1.0
"""Daemons serve many jobs: heartbeats are as frequent as the most demanding job wants, within
these."""
HOUSEKEEPING_S = 5.0
ORPHAN_S = 60.0
"""Memory of a job that this operator does not know is asked about after this long."""


class Fleet:
    """The jobs. `take_in` is told what the API server says of them; `run` keeps house."""

    def __init__(self) -> None:
        self._world: LoopContext | None = None
        self._loops: dict[str, JobLoop] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._unknown_since: dict[str, float] = {}
        self._seen_versions: dict[str, int] = {}

    def begin(self, world: LoopContext) -> None:
        """From now on, jobs have control loops in `world`."""
        self._world = world

    # --- what wakes jobs ----------------------------------------------------------------------

    def wake(self, keys: Iterable[str]) -> None:
        """Something concerns these jobs; none means all that wait for something."""
        found = list(keys)
        for key in found:
            loop = self._loops.get(key)
            if loop is not None:
                loop.wake()
        if not found:
            for loop in self._loops.values():
                if loop.status.get("phase") != Phase.RUNNING:
                    loop.wake()

    def take_in(self, kind: str | None, resource: Object) -> None:
        """A job came, changed or went, as a watch says it."""
        assert self._world is not None
        metadata = resource["metadata"]
        key = f"{metadata['namespace']}.{metadata['name']}"
        loop = self._loops.get(key)
        if kind == "DELETED" or (loop is not None and loop.uid != metadata["uid"]):
            self._end(key)
            loop = None
        if kind == "DELETED":
            return
        manager = (resource.get("spec") or {}).get("managedBy", MANAGER)
        if manager != MANAGER:
            return
        self._seen_versions[key] = int(metadata["resourceVersion"])
        if loop is not None:
            loop.see(resource)
            return
        loop = self._loops[key] = JobLoop(self._world, resource)
        self._tasks[key] = asyncio.get_running_loop().create_task(loop.run(), name=f"job {key}")

    def stands(self) -> list[JobStand]:
        """What all jobs have to say to those who replace daemons."""
        found = (loop.stand() for loop in self._loops.values())
        return [stand for stand in found if stand is not None]

    def requests_of(self, key: str) -> Amounts:
        """What a member of the job takes of its node."""
        loop = self._loops.get(key)
        if loop is None or loop.wants is None or not loop.holds_requests:
            return ()
        return loop.wants.requests

    def status_s(self) -> float:
        """How long news of a job's status that can wait is kept back: a bounded number of writes
        a second, however many jobs there are."""
        return max(2.0, 0.1 * len(self._loops))

    def oldest_look_s(self, now: float) -> float:
        """Seconds since the control loop looked that looked longest ago."""
        return max((now - loop.looked_at for loop in self._loops.values()), default=0.0)

    # --- housekeeping -------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            self.adjust()
            await self.free_orphans()

    def adjust(self) -> None:
        """Bring heartbeats and gauges up to date."""
        assert self._world is not None
        world = self._world
        wanted = [loop.heartbeat_s for loop in self._loops.values()]
        most = min((each for each in wanted if each is not None), default=HEARTBEAT_S_MAX)
        world.server.set_heartbeat_s(min(HEARTBEAT_S_MAX, max(HEARTBEAT_S_MIN, most)))
        statuses = [loop.status for loop in self._loops.values()]
        phases = Counter(status.get("phase", Phase.WAITING) for status in statuses)
        for phase in Phase:
            world.metrics.set("jobs", phases[phase], phase=phase)
        going = [s for s in statuses if s.get("phase") not in ENDED]
        world.metrics.set("ranks_desired", sum(s.get("desired", 0) for s in going))
        world.metrics.set("ranks_ready", sum(s.get("ready", 0) for s in going))
        connected = sum(view.connected for view in world.server.nodes().values())
        world.metrics.set("daemons_connected", connected)

    async def free_orphans(self) -> None:
        """Free memory of jobs that were deleted while nobody was there to see it. The API server
        is asked about each, because freeing it for a job that exists would lose its training."""
        assert self._world is not None
        now = self._world.clock()
        unknown = self._world.server.held_jobs() - self._loops.keys()
        self._unknown_since = {key: self._unknown_since.get(key, now) for key in unknown}
        for key, since in sorted(self._unknown_since.items()):
            if now - since < ORPHAN_S:
                continue
            namespace, _, name = key.partition(".")
            try:
                await self._world.api.get(JOBS, namespace, name)
            except ApiError as error:
                if error.status == NOT_FOUND and key not in self._loops:
                    _log.info("freeing the memory of %s, which does not exist any more", key)
                    self._world.server.drop(key)
            self._unknown_since[key] = now

    def _end(self, key: str) -> None:
        self._loops.pop(key, None)
        self._seen_versions.pop(key, None)
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()
        if self._world is not None and not self._world.server.holders(key):
            self._world.server.forget(key)

    async def stop(self) -> None:
        """End all control loops; the jobs go on without."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
