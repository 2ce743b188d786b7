"""Frees the memory of a deleted job, which keeps a finalizer until that is done.

kopf adds and removes the finalizer. It never delays a deletion for long, and nothing else depends
on it: if a job disappears without it, or the operator is gone for good, the next operator finds the
memory and frees it.
"""

from __future__ import annotations

import asyncio
import logging

from holdfast_operator.kube.client.api import ApiError, Object
from holdfast_operator.kube.client.resources import GROUP
from holdfast_operator.kube.job.world import LoopContext
from holdfast_operator.reconciler.observe.views import AgentState

_log = logging.getLogger(__name__)

FINALIZER = f"{GROUP}/free-memory"
PATIENCE_S = 60.0
"""Seconds that daemons get to free the memory, from when this operator learns of the deletion. The
time that the API server writes for that is of another clock."""
TURN_S = 0.5


async def free_memory(world: LoopContext, resource: Object) -> None:
    """Stop the pods of a deleted job and have daemons free its memory; returns when that is done,
    or after `PATIENCE_S`."""
    until = world.clock() + PATIENCE_S
    while not await _freed(world, resource) and world.clock() < until:
        await asyncio.sleep(TURN_S)


async def _freed(world: LoopContext, resource: Object) -> bool:
    """Ask for everything once; returns whether there was nothing left to ask for."""
    metadata = resource["metadata"]
    key = f"{metadata['namespace']}.{metadata['name']}"
    pods = [pod for pod in world.pods.of(key) if pod.owner == metadata["uid"]]
    running = [pod for pod in pods if pod.state is not AgentState.STOPPING]
    try:
        await world.trainers.stop(running)
    except ApiError as error:
        _log.warning("%s: its pods are not stopped: %s", key, error)
    world.server.drop(key)
    holding = [name for name in world.server.holders(key) if _connected(world, name, key)]
    return not (running or holding or _member_unconnected(world, resource, key))


def _connected(world: LoopContext, node: str, key: str) -> bool:
    view = world.server.view(node, key)
    return view is not None and view.connected


def _member_unconnected(world: LoopContext, resource: Object, key: str) -> bool:
    """Whether some member's daemon has not connected since this process started."""
    status = resource.get("status") or {}
    homes = (status.get("counters") or {}).get("homes") or ()
    nodes = {*homes, *(member["node"] for member in status.get("members") or ())}
    return any(world.server.view(node, key) is None for node in nodes)
