"""Election of one operator at a time: the process holds and renews a Lease, or ends.

The official client's election is not used: it ends on a connection error, writes local time as UTC,
and does not give the Lease back when it stops, so that the next leader would wait until it expires.
Times in the Lease are never compared with the local clock, since clocks differ: a Lease has expired
once it has been seen unchanged for its duration.
"""

from __future__ import annotations

import logging

from holdfast_operator.kube.client.api import NOT_FOUND, ApiError, KubeApi, Object
from holdfast_operator.kube.client.resources import LEASES
from holdfast_operator.kube.client.times import Clock, Sleep
from holdfast_operator.reconciler.observe.timestamps import micro_timestamp

_log = logging.getLogger(__name__)

LEASE_S = 15
RENEW_DEADLINE_S = 10.0
"""Seconds without a renewal after which a leader stops: fewer than `LEASE_S`, so that it stops
before another process may lead."""
RETRY_S = 2.0


class Leader:
    """A candidate for one Lease.

    Args:
        identity: name of this process; it stays the same when the pod's container restarts.
        clock: monotonic seconds.
        wall: seconds since the Unix epoch.
    """

    def __init__(
        self,
        api: KubeApi,
        *,
        namespace: str,
        name: str,
        identity: str,
        clock: Clock,
        wall: Clock,
        sleep: Sleep,
    ) -> None:
        self._sleep = sleep
        self._api, self._namespace, self._name = api, namespace, name
        self._identity, self._clock, self._wall = identity, clock, wall
        self._seen: tuple[str, float] = ("", clock())
        """(version of the Lease, time since which it is unchanged) while another process holds it;
        else the version is empty."""
        self.leads = False

    async def acquire(self) -> None:
        """Wait until this process leads."""
        while not await self._try():
            await self._sleep(RETRY_S)
        self.leads = True
        _log.info("%s leads", self._identity)

    async def keep(self) -> None:
        """Renew the Lease; returns when it is lost."""
        renewed_at = self._clock()
        while self._clock() - renewed_at < RENEW_DEADLINE_S:
            await self._sleep(RETRY_S)
            began = self._clock()
            if await self._try():
                renewed_at = began
            elif self._held_by_another():
                break
        self.leads = False

    async def release(self) -> None:
        """Give the Lease back, so that another process may lead at once."""
        if not self.leads:
            return
        self.leads = False
        try:
            lease = await self._api.get(LEASES, self._namespace, self._name)
            if lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                await self._api.replace(LEASES, self._namespace, lease)
        except ApiError as error:
            _log.info("cannot give the Lease back: %s", error)

    def _held_by_another(self) -> bool:
        return bool(self._seen[0])

    async def _try(self) -> bool:
        """Take or renew the Lease; returns whether this process holds it now."""
        try:
            lease = await self._api.get(LEASES, self._namespace, self._name)
        except ApiError as error:
            if error.status != NOT_FOUND:
                _log.warning("cannot read the Lease: %s", error)
                return False
            lease = {"metadata": {"name": self._name}, "spec": {}}
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if holder not in ("", self._identity) and not self._has_expired(lease):
            return False
        return await self._take(lease, spec, holder)

    def _has_expired(self, lease: Object) -> bool:
        version, since = self._seen
        if lease["metadata"]["resourceVersion"] != version:
            self._seen = (lease["metadata"]["resourceVersion"], self._clock())
            return False
        duration_s = float(lease["spec"].get("leaseDurationSeconds") or LEASE_S)
        return self._clock() - since >= duration_s

    async def _take(self, lease: Object, spec: Object, holder: str) -> bool:
        now = micro_timestamp(self._wall())
        mine = {"holderIdentity": self._identity, "leaseDurationSeconds": LEASE_S, "renewTime": now}
        if holder != self._identity:
            changes = int(spec.get("leaseTransitions") or 0) + 1
            mine |= {"acquireTime": now, "leaseTransitions": changes}
        body = {
            **lease,
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "spec": {**spec, **mine},
        }
        try:
            if "resourceVersion" in lease["metadata"]:
                await self._api.replace(LEASES, self._namespace, body)
            else:
                await self._api.create(LEASES, self._namespace, body)
        except ApiError as error:
            _log.warning("cannot take or renew the Lease: %s", error)
            return False
        self._seen = ("", self._clock())
        return True
