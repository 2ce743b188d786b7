"""All jobs of this operator: a control loop for each, and the events that wake it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Iterable

from holdfast_core.job.parsing import MANAGER
from holdfast_core.job.status import ENDED, Phase
from holdfast_core.metric_definitions import job_labels
from holdfast_operator.kube.client.amounts import Amounts
from holdfast_operator.kube.client.api import NOT_FOUND, ApiError, Object, pages
from holdfast_operator.kube.client.pacing import HEARTBEAT_S_MAX, heartbeats_s
from holdfast_operator.kube.client.resources import JOBS
from holdfast_operator.kube.job.finalizer import free_memory
from holdfast_operator.kube.job.job_loop import JobLoop
from holdfast_operator.kube.job.world import LoopContext
from holdfast_operator.kube.metrics import OperatorMetrics
from holdfast_operator.reconciler.failures.unprotected import UNPROTECTED
from holdfast_operator.reconciler.observe.views import ConditionType, Event
from holdfast_operator.reconciler.upgrade_plan import JobRequirements

_log = logging.getLogger(__name__)

HOUSEKEEPING_S = 5.0
ORPHAN_S = 60.0
"""Seconds until the API server is asked about an unknown job that holds memory."""


class Fleet:
    """The jobs. kopf calls `carry_out`, `see` and `free` in the course of a job's life; `run` does
    the housekeeping."""

    def __init__(self) -> None:
        self._world: LoopContext | None = None
        self._loops: dict[str, JobLoop] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._unknown_since: dict[str, float] = {}
        self._listed: dict[str, str] | None = None
        """Key → uid of each job that was there when this process began; None until they have been
        listed."""
        self._all_known = False

    def begin(self, world: LoopContext) -> None:
        """Use `world` for the control loops of all jobs that begin from now on."""
        self._world = world

    # --- what wakes jobs ----------------------------------------------------------------------

    def wake(self, keys: Iterable[str]) -> None:
        """Wake the loops of these jobs; without keys, those of all jobs that are not running, or
        lack members."""
        found = list(keys)
        for key in found:
            loop = self._loops.get(key)
            if loop is not None:
                loop.wake()
        if not found:
            for loop in self._loops.values():
                if loop.status.get("phase") != Phase.RUNNING or _is_short(loop.status):
                    loop.wake()

    def see(self, kind: str | None, resource: Object) -> None:
        """Note that a job changed or disappeared; `kind` is the kind of the watch's event."""
        key = _key(resource)
        loop = self._loops.get(key)
        if loop is not None and loop.uid != resource["metadata"]["uid"]:
            return  # an earlier job of this name
        if kind == "DELETED":
            self._forget(key)
        elif loop is not None:
            loop.see(resource)

    # --- the life of a job --------------------------------------------------------------------

    async def carry_out(self, resource: Object, stopped: Awaitable[object]) -> None:
        """Run the job's control loop until `stopped`, or until the job is gone."""
        assert self._world is not None
        key = _key(resource)
        if key in self._tasks:
            await _end(self._tasks[key])  # that of an earlier job of this name
        loop = self._loops[key] = JobLoop(self._world, resource)
        task = self._tasks[key] = asyncio.create_task(loop.run(), name=f"job {key}")
        waiting = asyncio.ensure_future(stopped)
        try:
            await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            await _end(task)
            if self._loops.get(key) is loop:
                del self._loops[key], self._tasks[key]

    async def free(self, resource: Object) -> None:
        """Stop the pods of a deleted job, and have daemons free its memory."""
        assert self._world is not None
        await free_memory(self._world, resource)

    async def report_forbidden(self, namespace: str, name: str, error: ApiError) -> None:
        """Post an event on the job: a request about it, which is repeated, was forbidden."""
        assert self._world is not None
        try:
            job = await self._world.api.get(JOBS, namespace, name)
        except ApiError as unread:
            _log.warning("%s.%s: %s; no event shows it: %s", namespace, name, error, unread)
            return
        message = f"{error}; trying again. Grant the operator's service account this right"
        self._world.recorder.post(job, Event(reason="Forbidden", message=message, warning=True))

    # --- what others ask ----------------------------------------------------------------------

    def upgrade_requirements(self) -> list[JobRequirements] | None:
        """What jobs require of the replacement of their daemons, where they require anything; None
        while there may be a job that no control loop has looked at yet."""
        if not self._all_known:
            listed = self._listed
            if listed is None or not all(map(self._is_known, listed, listed.values())):
                return None
            self._all_known = True
        required = (loop.upgrade_requirements() for loop in self._loops.values())
        return [each for each in required if each is not None]

    def _is_known(self, key: str, uid: str) -> bool:
        loop = self._loops.get(key)
        return loop is not None and (loop.has_looked or loop.uid != uid)

    def requests_of(self, key: str) -> Amounts:
        """Amounts that a member of the job takes from its node."""
        loop = self._loops.get(key)
        if loop is None or loop.wants is None or not loop.holds_requests:
            return ()
        return loop.wants.requests

    def status_s(self) -> float:
        """Seconds for which status changes that can wait are held back: this bounds the writes per
        second, however many jobs there are."""
        return max(2.0, 0.1 * len(self._loops))

    def oldest_look_s(self, now: float) -> float:
        """Seconds since the last turn of the control loop that has waited longest."""
        return max((now - loop.looked_at for loop in self._loops.values()), default=0.0)

    # --- housekeeping -------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self.list_jobs()
            await asyncio.sleep(HOUSEKEEPING_S)
            self.adjust()
            self.free_earlier()
            await self.free_orphans()

    async def list_jobs(self) -> None:
        """Find out which jobs there are, until all of them have been looked at. Jobs that are
        being deleted, and those of other managers, have no control loop."""
        assert self._world is not None
        if self._all_known:
            return
        found: list[Object] = []
        try:
            for namespace in self._world.watch_namespaces or ("",):
                async for page in pages(self._world.api, JOBS, namespace):
                    found += page["items"]
        except ApiError as error:
            _log.warning("jobs cannot be listed, so no daemon is renewed yet: %s", error)
            return
        ours = (job for job in found if "deletionTimestamp" not in job["metadata"])
        self._listed = {
            _key(job): job["metadata"]["uid"]
            for job in ours
            if (job.get("spec") or {}).get("managedBy", MANAGER) == MANAGER
        }

    def adjust(self) -> None:
        """Bring heartbeats and gauges up to date."""
        assert self._world is not None
        world = self._world
        wanted = [loop.heartbeat_s for loop in self._loops.values()]
        most = min((each for each in wanted if each is not None), default=HEARTBEAT_S_MAX)
        world.server.set_heartbeat_s(heartbeats_s(most))
        statuses = [loop.status for loop in self._loops.values()]
        phases = Counter(status.get("phase", Phase.WAITING) for status in statuses)
        for phase in Phase:
            world.metrics.set("jobs", phases[phase], phase=phase)
        self._show_jobs(world.metrics)
        going = [s for s in statuses if s.get("phase") not in ENDED]
        world.metrics.set("ranks_desired", sum(s.get("desired", 0) for s in going))
        world.metrics.set("ranks_ready", sum(s.get("ready", 0) for s in going))
        for name in ("desired", "active", "minimum", "joining"):
            count = sum((s.get("strength") or {}).get(name, 0) for s in going)
            world.metrics.set(f"members_{name}", count)
        world.metrics.set("jobs_short", sum(map(_is_short, going)))
        connected = sum(view.connected for view in world.server.nodes().values())
        world.metrics.set("daemons_connected", connected)

    def _show_jobs(self, metrics: OperatorMetrics) -> None:
        """Bring the series of single jobs up to date."""
        of = {tuple(job_labels(key).values()): loop.status for key, loop in self._loops.items()}
        phases = {(*job, s.get("phase", Phase.WAITING)): 1.0 for job, s in of.items()}
        metrics.replace_all("job_phase", phases)
        metrics.replace_all("job_recoveries", {j: s.get("recoveries", 0) for j, s in of.items()})
        metrics.replace_all("job_unprotected", {j: _is_unprotected(s) for j, s in of.items()})
        metrics.replace_all("job_stragglers", {j: _slow(s) for j, s in of.items()})
        metrics.replace_all("job_slow_links", {j: _slow_links(s) for j, s in of.items()})
        metrics.replace_all("job_divergences", {j: _diverged(s) for j, s in of.items()})
        metrics.replace_all("job_members_missing", {j: _missing(s) for j, s in of.items()})

    def free_earlier(self) -> None:
        """Free the memory of jobs that were deleted while some of their daemons were away, and
        whose names have other jobs now."""
        assert self._world is not None
        for key, loop in self._loops.items():
            self._world.server.free_earlier(key, loop.uid)

    async def free_orphans(self) -> None:
        """Free the memory of jobs that were deleted while no operator was running. The API server
        is asked about each, because freeing the memory of a job that exists would lose its
        training."""
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

    def _forget(self, key: str) -> None:
        assert self._world is not None
        if key in self._tasks:  # it went without waiting for its finalizer
            self._tasks[key].cancel()
        if not self._world.server.holders(key):
            self._world.server.forget(key)


def _is_short(status: Object) -> bool:
    """Whether the job trains without some of its members."""
    return _missing(status) > 0


def _slow(status: Object) -> int:
    """Number of ranks for which the others wait in each step."""
    return int(status.get("stragglerCount") or 0)


def _slow_links(status: Object) -> int:
    """Number of nodes with slow links, and of single slow links."""
    return len(status.get("slowLinks") or ())


def _diverged(status: Object) -> int:
    """How often replicas of the job have diverged."""
    return int(status.get("corruptionCount") or 0)


def _is_unprotected(status: Object) -> bool:
    """Whether ranks of the job train while their saves are refused."""
    return any(
        each["type"] == ConditionType.PROTECTED and each["reason"] in UNPROTECTED
        for each in status.get("conditions") or ()
    )


def _missing(status: Object) -> int:
    """Number of members that the job continues without."""
    found = status.get("strength") or {}
    active: int = found.get("active", 0)
    goes_on = active > 0 and status.get("phase") not in (Phase.SUSPENDED, *ENDED)
    return max(0, int(found.get("desired", 0)) - active) if goes_on else 0


def _key(resource: Object) -> str:
    metadata = resource["metadata"]
    return f"{metadata['namespace']}.{metadata['name']}"


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
