"""The finalizer, which frees the daemons' memory before a job is gone.

It never delays a deletion for long, and nothing else needs it: if a job goes without it, or the
operator is gone for good, the next operator finds the memory and frees it.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_operator.kube.api import CONFLICT, NOT_FOUND, ApiError, Object
from holdfast_operator.kube.pods import TrainerPod
from holdfast_operator.kube.resources import GROUP, JOBS
from holdfast_operator.kube.times import seconds_of
from holdfast_operator.kube.world import LoopContext
from holdfast_operator.reconciler.views import AgentState

FINALIZER = f"{GROUP}/free-memory"
PATIENCE_S = 60.0
"""Seconds after the deletion that daemons get to free the memory."""
TURN_S = 0.5


class Finalizer:
    """The finalizer of one job.

    Args:
        expected: nodes that may hold something of the job, heard or not.
    """

    def __init__(self, world: LoopContext, expected: frozenset[str]) -> None:
        self._world, self._expected = world, expected
        self._kept = False

    async def keep(self, resource: Object) -> None:
        """Put the finalizer on the job, once.

        Raises:
            ApiError: when the API server refuses it.
        """
        metadata = resource["metadata"]
        finalizers = metadata.get("finalizers") or []
        if self._kept or FINALIZER in finalizers:
            self._kept = True
            return
        self._kept = await self._patch(metadata, [*finalizers, FINALIZER])

    async def turn(self, resource: Object, pods: Sequence[TrainerPod]) -> float | None:
        """Do one step of the deletion; returns the seconds to rest after it, None when it is done.

        Raises:
            ApiError: when the API server refuses something.
        """
        metadata = resource["metadata"]
        key = f"{metadata['namespace']}.{metadata['name']}"
        finalizers = metadata.get("finalizers") or []
        if FINALIZER not in finalizers:
            return None
        running = [pod for pod in pods if pod.state is not AgentState.STOPPING]
        if running:
            await self._world.trainers.stop(running)
        server = self._world.server
        server.drop(key)
        holding = {n for n in server.holders(key) if _connected(self._world, n, key)}
        unheard = {n for n in self._expected if not _connected(self._world, n, key)}
        if (running or holding or unheard) and self._waited_s(metadata) < PATIENCE_S:
            return TURN_S
        left = [each for each in finalizers if each != FINALIZER]
        await self._patch(metadata, left)
        return TURN_S  # until the watch reports that it is gone

    def _waited_s(self, metadata: Object) -> float:
        deleted = seconds_of(metadata["deletionTimestamp"]) or 0.0
        return self._world.clocks.at_wall(self._world.clock()) - deleted

    async def _patch(self, metadata: Object, finalizers: list[str]) -> bool:
        """Set the job's finalizers; returns whether that succeeded."""
        body = {
            "metadata": {
                "finalizers": finalizers,
                "resourceVersion": metadata["resourceVersion"],
            }
        }
        try:
            await self._world.api.patch(JOBS, metadata["namespace"], metadata["name"], body)
        except ApiError as error:
            if error.status not in (CONFLICT, NOT_FOUND):
                raise
            return False  # the watch brings a newer version, and the next turn tries again
        return True


def _connected(world: LoopContext, node: str, key: str) -> bool:
    view = world.server.view(node, key)
    return view is not None and view.connected
