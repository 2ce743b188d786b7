"""One way to do a part of the operator's work, measured in a process of its own: see `ways`.

Prints one JSON object: processor seconds, seconds, growth of resident memory, and what it counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp

EQUAL_EVENTS = 100
SETTLE_S = 3.0
"""Time for requests that are queued when the last pod is seen."""

Figures = dict[str, float]
Way = Callable[[str], Coroutine[None, None, Figures]]


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Meter:
    """Measures from now."""

    def __init__(self) -> None:
        self._cpu_s, self._at, self._bytes = time.process_time(), time.monotonic(), resident_bytes()

    def read(self) -> Figures:
        """Figures since the beginning; the peak is that of the process."""
        return {
            "cpu_s": time.process_time() - self._cpu_s,
            "seconds": time.monotonic() - self._at,
            "grown_bytes": resident_bytes() - self._bytes,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


async def posted(address: str) -> Figures:
    """Number of events that the server received."""
    await asyncio.sleep(SETTLE_S)
    async with aiohttp.ClientSession() as session, session.get(f"{address}/events") as answer:
        return {"events_posted": (await answer.json())["posted"]}


class Uncounted:
    """Counts no requests."""

    def request(self, verb: str, resource: str, code: str) -> None:
        """Do nothing."""


async def our_api(address: str) -> Any:
    """Our adapter to the API server at `address`."""
    from kubernetes.aio import client

    from holdfast_operator.kube.client.api import Api

    settings = client.Configuration()
    settings.host = address
    return Api(client.ApiClient(settings), Uncounted())


async def by_hand(address: str) -> Figures:
    """`watches` keeps the pods, `events` posts."""
    from holdfast_operator.kube.client.events import Recorder
    from holdfast_operator.kube.client.resources import PODS
    from holdfast_operator.kube.client.watches import Cache, Watch
    from holdfast_operator.kube.pods.pods import read_pod
    from holdfast_operator.reconciler.observe.views import Event

    api = await our_api(address)
    last = asyncio.Event()
    cache: Cache[Any] = Cache(
        read_pod, lambda before, now: last.set() if now and now.name == "last" else None
    )
    meter = Meter()
    clock, ignore = time.monotonic, lambda kind: None
    watch = Watch(api, PODS, cache, clock=clock, sleep=asyncio.sleep, on_restart=ignore)
    recorder = Recorder(api, instance="i", clock=clock, wall=time.time, on_drop=lambda: None)
    tasks = [asyncio.create_task(watch.run()), asyncio.create_task(recorder.run())]
    await last.wait()
    found = meter.read() | {"pods_known": len(cache.all())}
    about = {"metadata": {"name": "last", "namespace": "team", "uid": "uid of last"}}
    for _ in range(EQUAL_EVENTS):
        recorder.post(about, Event(reason="Same", message="the same"))
    found |= await posted(address)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await api.close()
    return found


def kopf_way(*, index: bool) -> Way:
    """kopf's handlers keep the pods, in an index of kopf's or a mapping of ours, and post."""

    async def run(address: str) -> Figures:
        import kopf

        from holdfast_operator.kube.job.handlers import kopf_settings
        from holdfast_operator.kube.pods.pods import read_pod

        registry, last = kopf.OperatorRegistry(), asyncio.Event()
        known: dict[str, Any] = {}
        indexed: list[Any] = []

        @kopf.on.login(registry=registry)
        async def login(**_: Any) -> kopf.ConnectionInfo:
            return kopf.ConnectionInfo(server=address)

        if index:

            @kopf.index("", "v1", "pods", id="pods", registry=registry)
            async def pods(body: kopf.Body, **_: Any) -> Any:
                found = read_pod(dict(body))
                return {found.job_key: found} if found else None

        @kopf.on.event("", "v1", "pods", registry=registry)
        async def changed(event: kopf.RawEvent, body: kopf.Body, **kwargs: Any) -> None:
            name = str(body["metadata"]["name"])
            if index:
                indexed[:] = [kwargs["pods"]]
            elif event["type"] == "DELETED":
                known.pop(name, None)
            else:
                known[name] = read_pod(dict(body))
            if name == "last" and not last.is_set():
                last.set()
                for _ in range(EQUAL_EVENTS):
                    kopf.info(body, reason="Same", message="the same")

        settings = kopf_settings()
        settings.posting.enabled = True
        meter = Meter()
        tasks = await kopf.spawn_tasks(
            registry=registry, settings=settings, standalone=True, clusterwide=True
        )
        await last.wait()
        count = sum(len(indexed[0][key]) for key in indexed[0]) if index else len(known)
        found = meter.read() | {"pods_known": count}
        found |= await posted(address)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return found

    return run


async def plain_list(address: str) -> Figures:
    """One list of pods as plain JSON, read into `TrainerPod`."""
    from holdfast_operator.kube.client.resources import PODS
    from holdfast_operator.kube.pods.pods import read_pod

    api = await our_api(address)
    meter = Meter()
    pods = [read_pod(raw) for raw in (await api.list(PODS))["items"]]
    found = meter.read() | {"pods_known": len(pods)}
    await api.close()
    return found


async def typed_list(address: str) -> Figures:
    """One list of pods as the official client's models."""
    from kubernetes.aio import client

    settings = client.Configuration()
    settings.host = address
    async with client.ApiClient(settings) as api:
        meter = Meter()
        pods = (await client.CoreV1Api(api).list_pod_for_all_namespaces()).items
        return meter.read() | {"pods_known": len(pods)}


async def import_client(address: str) -> Figures:
    """Import of the official client, with its models."""
    meter = Meter()
    import kubernetes.aio.client  # noqa: F401 - the import is measured

    return meter.read()


async def import_kopf(address: str) -> Figures:
    """Import of kopf."""
    meter = Meter()
    import kopf  # noqa: F401 - the import is measured

    return meter.read()


WAYS: dict[str, Way] = {
    "pods: by hand": by_hand,
    "pods: kopf.on.event": kopf_way(index=False),
    "pods: kopf.index": kopf_way(index=True),
    "list: plain": plain_list,
    "list: typed": typed_list,
    "import: kubernetes.aio.client": import_client,
    "import: kopf": import_kopf,
}

if __name__ == "__main__":
    print(json.dumps(asyncio.run(WAYS[sys.argv[1]](sys.argv[2]))))
