"""Writes one job's status: only when it has changed, at a limited rate, and checked against other
writers.

The API server takes long to write the status of a large job. The control loop waits only for the
fields that must be stored before it acts; fields that only users read are written beside the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from holdfast_core.job.parsing import API_VERSION, KIND
from holdfast_operator.kube.client.api import CONFLICT, NOT_FOUND, ApiError, KubeApi, Object
from holdfast_operator.kube.client.resources import JOBS
from holdfast_operator.kube.job.status import essence

_log = logging.getLogger(__name__)

TRIES = 3


class StatusWriter:
    """The one writer of a job's status.

    Args:
        resource: the job, as it was last seen.
        interval_s: seconds for which changes that can wait are held back.
    """

    def __init__(
        self,
        api: KubeApi,
        resource: Object,
        *,
        clock: Callable[[], float],
        interval_s: Callable[[], float],
        count: Callable[[str], None],
    ) -> None:
        self._api, self._clock = api, clock
        self._interval_s, self._count = interval_s, count
        self._metadata: Object = {}
        self.written: Object = resource.get("status") or {}
        """Status on the API server, as far as this process knows."""
        self.due_at: float | None = None
        """Time when the newest change that is held back may be written; None without one."""
        self._written_at = float("-inf")
        self._beside: asyncio.Task[bool] | None = None
        self.see(resource)

    def see(self, resource: Object) -> None:
        """Take over the job's resource version, if it is newer."""
        metadata = resource["metadata"]
        known = int(self._metadata.get("resourceVersion", -1))
        if int(metadata["resourceVersion"]) > known:
            names = ("name", "namespace", "uid", "resourceVersion")
            self._metadata = {name: metadata[name] for name in names}

    async def write(self, status: Object) -> bool:
        """Write `status` if it is due; returns whether its essence is on the server now."""
        self.due_at = None
        if status == self.written:
            return True
        if essence(status) != essence(self.written):
            await self.close()
            return await self._write(status)
        now, at_rest = self._clock(), self._beside is None or self._beside.done()
        due_at = (self._written_at if at_rest else now) + self._interval_s()
        if now < due_at:
            self.due_at = due_at
        else:
            self._beside = asyncio.get_running_loop().create_task(self._write(status))
        return True

    async def close(self) -> None:
        """Cancel the write beside the control loop, if there is one."""
        if self._beside is not None:
            self._beside.cancel()
            await asyncio.wait([self._beside])

    async def _write(self, status: Object) -> bool:
        self._written_at = self._clock()
        for _ in range(TRIES):
            try:
                await self._put(status)
            except ApiError as error:
                if error.status != CONFLICT:
                    return self._gave_up(error)
                self._count("conflict")
                if not await self._refresh():
                    return False
            else:
                self._count("written")
                self.written = status
                return True
        return False

    async def _put(self, status: Object) -> None:
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": self._metadata,
            "status": status,
        }
        self.see(await self._api.replace(JOBS, self._metadata["namespace"], body, "status"))

    async def _refresh(self) -> bool:
        """Read the job again after a conflict: another client changed it, most often its spec.
        Returns whether the write can be tried again."""
        try:
            fresh = await self._api.get(JOBS, self._metadata["namespace"], self._metadata["name"])
        except ApiError as error:
            return self._gave_up(error)
        if fresh["metadata"]["uid"] != self._metadata["uid"]:
            return False  # another job took the name
        self.see(fresh)
        return True

    def _gave_up(self, error: ApiError) -> bool:
        self._count("failed")
        if error.status != NOT_FOUND:
            _log.warning("the status of %s is not written: %s", self._metadata["name"], error)
        return False
