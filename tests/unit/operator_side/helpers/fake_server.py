"""The jobs of a `FakeApi` over HTTP, for kopf: discovery, list, watch and patch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy
from typing import Any

import jsonpatch
from aiohttp import web
from fake_api import FakeApi

from holdfast_operator.kube.client.api import ApiError, Object
from holdfast_operator.kube.client.resources import GROUP, JOBS, VERSION

_HERE = f"/apis/{GROUP}/{VERSION}"


def _group(name: str, version: str) -> Object:
    found = {"groupVersion": f"{name}/{version}", "version": version}
    return {"name": name, "versions": [found], "preferredVersion": found}


def _kind(kind: str, plural: str, *, namespaced: bool = True) -> Object:
    verbs = ["get", "list", "watch", "patch", "create"]
    return {
        "kind": kind,
        "name": plural,
        "singularName": "",
        "namespaced": namespaced,
        "verbs": verbs,
    }


_DISCOVERY: dict[str, Object] = {
    "/api": {"versions": ["v1"]},
    "/api/v1": {
        "resources": [
            _kind("Namespace", "namespaces", namespaced=False),
            _kind("Event", "events"),
        ]
    },
    "/apis": {"groups": [_group(GROUP, VERSION), _group("apiextensions.k8s.io", "v1")]},
    "/apis/apiextensions.k8s.io/v1": {
        "resources": [_kind("CustomResourceDefinition", JOBS.plural, namespaced=False)]
    },
    _HERE: {
        "resources": [
            _kind("MoETrainingJob", JOBS.plural),
            _kind("MoETrainingJob", f"{JOBS.plural}/status"),
        ]
    },
}
_DISCOVERY["/apis/apiextensions.k8s.io/v1"]["resources"][0]["name"] = "customresourcedefinitions"


class FakeServer:
    """Serves the jobs of `api`. Each write of a job is passed to `send`."""

    def __init__(self, api: FakeApi) -> None:
        self._api = api
        self._streams: list[asyncio.Queue[Object]] = []

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """Listen; gives the address."""
        application = web.Application()
        application.router.add_get(f"{_HERE}/{JOBS.plural}", self._list_or_watch)
        name = f"{_HERE}/namespaces/{{namespace}}/{JOBS.plural}/{{name}}"
        application.router.add_patch(name, self._patch)
        application.router.add_get("/{path:.*}", self._discover)
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()

    def send(self, kind: str, job: Object) -> None:
        """Send an event of a job to all watches."""
        for stream in self._streams:
            stream.put_nowait({"type": kind, "object": deepcopy(job)})

    async def _discover(self, request: web.Request) -> web.Response:
        return web.json_response(_DISCOVERY[request.path])

    async def _list_or_watch(self, request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            jobs = [
                job for (plural, _, _), job in self._api.objects.items() if plural == JOBS.plural
            ]
            return web.json_response({"items": jobs, "metadata": {"resourceVersion": "1"}})
        stream: asyncio.Queue[Object] = asyncio.Queue()
        for (plural, _, _), job in self._api.objects.items():
            if plural == JOBS.plural:  # one that came after the list
                stream.put_nowait({"type": "ADDED", "object": deepcopy(job)})
        self._streams.append(stream)
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(json.dumps(await stream.get()).encode() + b"\n")
        finally:
            self._streams.remove(stream)

    async def _patch(self, request: web.Request) -> web.Response:
        namespace, name = request.match_info["namespace"], request.match_info["name"]
        try:
            found = await self._api.get(JOBS, namespace, name)
            wanted: Any = await request.json()
            assert request.content_type == "application/json-patch+json", (
                "kopf writes only finalizers"
            )
            metadata = {"finalizers": [], **jsonpatch.apply_patch(found, wanted)["metadata"]}
            body = {"metadata": {"finalizers": metadata["finalizers"]}}
            return web.json_response(await self._api.patch(JOBS, namespace, name, body))
        except jsonpatch.JsonPatchTestFailed as error:
            return web.json_response({"message": str(error)}, status=422)
        except ApiError as error:
            return web.json_response({"message": str(error)}, status=error.status)
