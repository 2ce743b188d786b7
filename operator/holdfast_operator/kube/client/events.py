"""Events, which report decisions to users. Posting them never delays or ends a control loop."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable

from holdfast_core.job.parsing import API_VERSION, KIND
from holdfast_core.last_lines import within_bytes
from holdfast_operator.kube.client.api import ApiError, KubeApi, Object
from holdfast_operator.kube.client.resources import EVENTS
from holdfast_operator.reconciler.observe.timestamps import micro_timestamp
from holdfast_operator.reconciler.observe.views import EVENT_BYTES_MAX, Event

_log = logging.getLogger(__name__)

CONTROLLER = "holdfast.dev/operator"
DEFAULT_NAMESPACE = "default"
WAITING_MAX = 1000
REPEAT_S = 300.0
"""Seconds for which an event is not posted again with the same reason and message about the same
object."""
REMEMBERED_MAX = 4096


class Recorder:
    """A queue of events, posted one after another. `run` it as a task.

    Args:
        instance: name of this operator's pod.
        clock: monotonic seconds.
        wall: seconds since the Unix epoch.
        on_drop: called for each event that could not be posted.
    """

    def __init__(
        self,
        api: KubeApi,
        *,
        instance: str,
        clock: Callable[[], float],
        wall: Callable[[], float],
        on_drop: Callable[[], None],
    ) -> None:
        self._api, self._instance = api, instance
        self._clock, self._wall, self._on_drop = clock, wall, on_drop
        self._queue: asyncio.Queue[tuple[str, Object]] = asyncio.Queue(WAITING_MAX)
        self._posted_at: OrderedDict[tuple[str, str, str], float] = OrderedDict()

    def post(self, about: Object, event: Event) -> None:
        """Queue `event` about an object: a job, unless the object has another `kind`. Events about
        objects without a namespace are in the default one, as those of the kubelet are."""
        metadata = about["metadata"]
        key = (metadata["uid"], event.reason, event.message)
        now = self._clock()
        if now - self._posted_at.get(key, float("-inf")) < REPEAT_S:
            return
        self._posted_at[key] = now
        while len(self._posted_at) > REMEMBERED_MAX:
            self._posted_at.popitem(last=False)
        body = self._body(about, event)
        try:
            self._queue.put_nowait((body["metadata"]["namespace"], body))
        except asyncio.QueueFull:
            self._on_drop()

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            namespace, body = await self._queue.get()
            try:
                await self._api.create(EVENTS, namespace, body)
            except ApiError as error:
                self._on_drop()
                _log.info("cannot post an event: %s", error)
            finally:
                self._queue.task_done()

    async def flush(self, timeout_s: float) -> None:
        """Wait until all queued events are posted, for `timeout_s` at most."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._queue.join()
        except TimeoutError:
            _log.info("%d events were not posted in time", self._queue.qsize())

    def _body(self, about: Object, event: Event) -> Object:
        metadata = about["metadata"]
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {
                "name": f"{metadata['name']}.{secrets.token_hex(8)}",
                "namespace": metadata["namespace"] or DEFAULT_NAMESPACE,
            },
            "eventTime": micro_timestamp(self._wall()),
            "reportingController": CONTROLLER,
            "reportingInstance": self._instance,
            "action": event.reason,
            "reason": event.reason,
            "note": within_bytes(event.message, EVENT_BYTES_MAX),
            "type": "Warning" if event.warning else "Normal",
            "regarding": {
                "apiVersion": about.get("apiVersion", API_VERSION),
                "kind": about.get("kind", KIND),
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
        }
