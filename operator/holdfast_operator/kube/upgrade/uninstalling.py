"""`holdfast-operator release-finalizers`: prepares the uninstallation of the operator.

Without an operator, a job with the operator's finalizer cannot be deleted, and neither can its
namespace. So the finalizers are removed first. A running operator would add them again, so this
command ends it by taking its Lease, which no other process gets before `LEASE_S` have passed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from holdfast_operator.kube.client.api import CONFLICT, NOT_FOUND, ApiError, KubeApi, Object, pages
from holdfast_operator.kube.client.leader import RETRY_S
from holdfast_operator.kube.client.resources import JOBS, LEASES
from holdfast_operator.kube.client.times import Sleep
from holdfast_operator.kube.job.finalizer import FINALIZER
from holdfast_operator.reconciler.observe.timestamps import micro_timestamp

_log = logging.getLogger(__name__)

LEASE_S = 60
"""Duration of the Lease: longer than it takes to delete the Deployment of the operator."""
OPERATOR_ENDS_S = 2 * RETRY_S
"""Time for the operator to end: it looks at its Lease every `RETRY_S`."""
TRIES = 10


async def release_finalizers(
    api: KubeApi,
    *,
    namespace: str,
    lease: str,
    identity: str,
    watch_namespaces: Collection[str],
    wall: Callable[[], float],
    sleep: Sleep = asyncio.sleep,
) -> int:
    """End the operator and take its finalizer off every job; returns how many had it.

    Args:
        namespace: where the operator's Lease is.
        identity: name of this process.
        watch_namespaces: namespaces of the jobs; empty for all.
        wall: seconds since the Unix epoch.

    Raises:
        ApiError: when the API server refuses something.
    """
    await _take_lease(api, namespace, lease, identity, wall)
    await sleep(OPERATOR_ENDS_S)
    return sum([await _release_all(api, each) for each in watch_namespaces or ("",)])


async def _release_all(api: KubeApi, namespace: str) -> int:
    released = 0
    async for page in pages(api, JOBS, namespace):
        for job in page["items"]:
            released += await _release(api, job)
    return released


async def _take_lease(
    api: KubeApi, namespace: str, name: str, identity: str, wall: Callable[[], float]
) -> None:
    for _ in range(TRIES):
        now = micro_timestamp(wall())
        spec = {
            "holderIdentity": identity,
            "leaseDurationSeconds": LEASE_S,
            "acquireTime": now,
            "renewTime": now,
        }
        try:
            there = await api.get(LEASES, namespace, name)
            held = {**(there.get("spec") or {}), **spec}
            await api.replace(LEASES, namespace, {**there, "spec": held})
            return
        except ApiError as error:
            if error.status == NOT_FOUND:
                return  # no operator has ever led
            if error.status != CONFLICT:
                raise
    raise ApiError(
        f"the Lease {namespace}/{name} could not be taken: it changed {TRIES} times meanwhile. "
        f"Try again",
        status=CONFLICT,
    )


async def _release(api: KubeApi, job: Object) -> bool:
    """Take the finalizer off a job; returns whether the job had it."""
    for _ in range(TRIES):
        metadata = job["metadata"]
        finalizers = metadata.get("finalizers") or []
        if FINALIZER not in finalizers:
            return False
        name = f"{metadata['namespace']}/{metadata['name']}"
        left = [each for each in finalizers if each != FINALIZER]
        version = metadata["resourceVersion"]
        body = {"metadata": {"finalizers": left, "resourceVersion": version}}
        try:
            await api.patch(JOBS, metadata["namespace"], metadata["name"], body)
            _log.info("released %s", name)
            return True
        except ApiError as error:
            if error.status == NOT_FOUND:
                return True
            if error.status != CONFLICT:
                raise
        try:
            job = await api.get(JOBS, metadata["namespace"], metadata["name"])
        except ApiError as error:
            if error.status == NOT_FOUND:
                return True
            raise
    raise ApiError(
        f"the finalizer stays on {name}: it changed {TRIES} times meanwhile. Try again",
        status=CONFLICT,
    )
