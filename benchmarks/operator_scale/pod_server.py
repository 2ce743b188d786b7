"""An API server that has only pods, for `ways`: a list, a watch that expires, and fewer pods after.

Prints its address, then waits. The list has all pods. The first watch changes each of them three
times and then expires, so that the client has to list again. By then every second pod is gone. The
next watch brings one pod more, with the name `last`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from aiohttp import web

Object = dict[str, Any]
CHANGES = 3
JOB_LABEL, MEMBER_LABEL, ATTEMPT_LABEL = (
    f"holdfast.dev/{each}" for each in ("job", "member", "attempt")
)


def pod(name: str, version: int) -> Object:
    """A trainer's pod of some 5 kB, as an API server returns it."""
    fields: Object = {f"f:{letter}": {"f:x": {}, "f:y": {}} for letter in "abcdefghijklmnopqrst"}
    condition = {
        "status": "True",
        "lastProbeTime": None,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    types = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
    env = [{"name": f"VARIABLE_{n}", "value": f"the value of variable {n}"} for n in range(20)]
    container = {"name": "trainer", "image": "registry/trainer:1", "command": ["train"], "env": env}
    labels = {JOB_LABEL: "moe", MEMBER_LABEL: name.rpartition("-")[2], ATTEMPT_LABEL: "1"}
    if not labels[MEMBER_LABEL].isdigit():
        labels[MEMBER_LABEL] = "0"
    manager = {"manager": "kubelet", "operation": "Update", "apiVersion": "v1", "fieldsV1": fields}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid of {name}",
            "resourceVersion": str(version),
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": labels,
            "managedFields": [manager, {**manager, "subresource": "status"}],
        },
        "spec": {"nodeName": "node", "containers": [container], "restartPolicy": "Never"},
        "status": {
            "phase": "Running",
            "podIP": f"10.0.{version % 256}.1",
            "conditions": [{"type": each, **condition} for each in types],
            "containerStatuses": [
                {
                    "name": "trainer",
                    "image": "registry/trainer:1",
                    "imageID": "",
                    "ready": True,
                    "restartCount": 0,
                    "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
                }
            ],
        },
    }


def _kind(kind: str, plural: str, *, namespaced: bool = True) -> Object:
    verbs = ["get", "list", "watch", "patch", "create"]
    found = {"kind": kind, "name": plural, "singularName": kind.lower(), "verbs": verbs}
    return {**found, "namespaced": namespaced}


class PodServer:
    """Serves `count` pods."""

    def __init__(self, count: int) -> None:
        self._count, self._lists, self._watches, self._events = count, 0, 0, 0

    def application(self) -> web.Application:
        application = web.Application()
        add = application.router.add_get
        add("/api", lambda _: _answer({"versions": ["v1"]}))
        kinds = [_kind("Pod", "pods"), _kind("Event", "events")]
        namespaces = _kind("Namespace", "namespaces", namespaced=False)
        add("/api/v1", lambda _: _answer({"resources": [*kinds, namespaces]}))
        group = {"version": "v1"}
        crds = "apiextensions.k8s.io"
        groups = [{"name": crds, "versions": [group], "preferredVersion": group}]
        crd = _kind("CustomResourceDefinition", "customresourcedefinitions", namespaced=False)
        add("/apis", lambda _: _answer({"groups": groups}))
        add(f"/apis/{crds}/v1", lambda _: _answer({"resources": [crd]}))
        add("/api/v1/pods", self._pods)
        add("/events", lambda _: _answer({"posted": self._events}))
        application.router.add_post("/{path:.*}/events", self._event)
        return application

    async def _pods(self, request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            self._watches += 1
            return await self._watch(request)
        self._lists += 1
        step = 1 if self._lists == 1 else 2
        items = [pod(f"pod-{n}", n + 1) for n in range(0, self._count, step)]
        return web.json_response(
            {
                "items": items,
                "metadata": {"resourceVersion": str(500_000 + 1_000_000 * (self._lists - 1))},
            }
        )

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        version = 1_000_000 * self._watches
        if self._watches == 1:
            for change in range(CHANGES * self._count):
                version += 1
                await _send(response, "MODIFIED", pod(f"pod-{change % self._count}", version))
            await _send(response, "ERROR", {"kind": "Status", "code": 410, "message": "expired"})
            return response
        await _send(response, "ADDED", pod("last", version))
        await asyncio.Event().wait()
        return response

    async def _event(self, request: web.Request) -> web.Response:
        self._events += 1
        return await _answer(await request.json())


async def _answer(body: Object) -> web.Response:
    return web.json_response(body)


async def _send(response: web.StreamResponse, kind: str, found: Object) -> None:
    await response.write(json.dumps({"type": kind, "object": found}).encode() + b"\n")


async def _serve(count: int) -> None:
    runner = web.AppRunner(
        PodServer(count).application(), access_log=None, handler_cancellation=True
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
