"""Points the Service that daemons dial at the leader's own pod.

The Service has no selector, because a selector would send daemons to replicas that do not lead.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging

from holdfast_operator.kube.client.api import NOT_FOUND, ApiError, KubeApi, Object
from holdfast_operator.kube.client.resources import ENDPOINT_SLICES

_log = logging.getLogger(__name__)

CHECK_S = 10.0
"""Seconds between two checks of the slice, which another client may have deleted."""


def endpoint_slice(service: str, namespace: str, address: str, port: int) -> Object:
    """The one slice of `service`. Pure."""
    kind = "IPv6" if ipaddress.ip_address(address).version == 6 else "IPv4"
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": service,
            "namespace": namespace,
            "labels": {
                "kubernetes.io/service-name": service,
                "endpointslice.kubernetes.io/managed-by": "holdfast-operator",
            },
        },
        "addressType": kind,
        "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
        "ports": [{"name": "control", "port": port, "protocol": "TCP"}],
    }


class Endpoints:
    """Keeps the slice pointed at this process. `run` it as a task while the process leads."""

    def __init__(self, api: KubeApi, wanted: Object) -> None:
        self._api, self._wanted = api, wanted

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            try:
                await self.point_here()
            except ApiError as error:
                _log.warning("cannot send daemons to this replica: %s", error)
            await asyncio.sleep(CHECK_S)

    async def point_here(self) -> None:
        """Point the slice at this process, if it is not.

        Raises:
            ApiError: when the API server refuses it.
        """
        metadata = self._wanted["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        try:
            there = await self._api.get(ENDPOINT_SLICES, namespace, name)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            await self._api.create(ENDPOINT_SLICES, namespace, self._wanted)
            return
        if _target(there) != _target(self._wanted):
            version = there["metadata"]["resourceVersion"]
            body = {**self._wanted, "metadata": {**metadata, "resourceVersion": version}}
            await self._api.replace(ENDPOINT_SLICES, namespace, body)


def _target(found: Object) -> object:
    addresses = [each.get("addresses") for each in found.get("endpoints") or []]
    ports = [(each.get("name"), each.get("port")) for each in found.get("ports") or []]
    return addresses, ports, found["metadata"].get("labels")
