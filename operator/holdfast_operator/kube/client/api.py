"""The API server in plain values: each call is one request, counted, with Holdfast's own errors.

The official client finds the cluster, its certificates and tokens, and keeps connections. Objects
stay plain JSON mappings, because the typed models cost more than everything else that the operator
does, and drop unknown fields. This module must not retry: its callers are level-triggered.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import client, config
from kubernetes.aio.config.config_exception import ConfigException
from yarl import URL

from holdfast_core.errors import HoldfastError, UnreachableError
from holdfast_operator.kube.client.resources import Resource

Object = dict[str, Any]
"""An object of the API, as decoded from JSON."""

REQUEST_S = 15.0
"""Time limit of a request: one that takes longer has failed."""
CONNECT_S = 5.0
CONNECTIONS_MAX = 64

PAGE = "500"
"""Objects in one page of a list."""

FORBIDDEN, NOT_FOUND, CONFLICT, GONE, TOO_MANY_REQUESTS = 403, 404, 409, 410, 429

MERGE_PATCH = "application/merge-patch+json"


class ApiError(HoldfastError):
    """The API server refused a request."""

    code = "kubernetes_api"

    def __init__(self, message: str, *, status: int, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        """HTTP status; 0 when no answer came."""
        self.reason = reason
        """The API server's reason in one word, such as AlreadyExists."""

    @property
    def is_final(self) -> bool:
        """Whether the same request would be refused again, until something else has changed."""
        return 400 <= self.status < 500 and self.status != TOO_MANY_REQUESTS


class KubeApi(Protocol):
    """The requests that the parts of the operator make. `Api` sends them to an API server; tests
    answer them from memory. Every request raises an `ApiError` when it fails.
    """

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """Read one object."""

    async def list(self, resource: Resource, namespace: str = "", **query: str) -> Object:
        """Read a list, with `items` and `metadata.resourceVersion`; `pages` reads a long one."""

    async def create(
        self, resource: Resource, namespace: str, body: Object, **query: str
    ) -> Object:
        """Create an object; returns it as the server stored it."""

    async def replace(
        self, resource: Resource, namespace: str, body: Object, subresource: str = ""
    ) -> Object:
        """Replace the object of the same name by `body`. If `body` has a
        `metadata.resourceVersion`, the server checks it."""

    async def patch(
        self, resource: Resource, namespace: str, name: str, body: Object, subresource: str = ""
    ) -> Object:
        """Merge `body` into the object (RFC 7386)."""

    async def delete(
        self, resource: Resource, namespace: str, name: str, *, uid: str = "", grace_s: int = -1
    ) -> Object:
        """Delete an object; with `uid`, only if it still has it. A `grace_s` of 0 does not wait for
        a node; a negative one leaves the time to the object. Returns the object, or a Status."""


async def pages(
    api: KubeApi, resource: Resource, namespace: str = "", **query: str
) -> AsyncIterator[Object]:
    """The pages of a list that may be long, one request each."""
    token = ""
    while True:
        more = {"continue": token} if token else {}
        page = await api.list(resource, namespace, limit=PAGE, **query, **more)
        yield page
        token = (page.get("metadata") or {}).get("continue", "")
        if not token:
            return


class RequestCounter(Protocol):
    """Counts requests to the API server: the operator's metrics do, commands do not."""

    def request(self, verb: str, resource: str, code: str) -> None:
        """Count a request. `code` is the HTTP status; `none` without a whole answer."""


class Api:
    """A connection to the API server: `KubeApi`, and requests whose answers are streams.

    Args:
        api_client: client of the official package; `connect` makes one.
        counter: counts requests.
    """

    def __init__(self, api_client: client.ApiClient, counter: RequestCounter) -> None:
        self._client, self._counter = api_client, counter

    async def close(self) -> None:
        await self._client.close()

    async def credentials(self) -> dict[str, Any]:
        """Address of the API server and current credentials, for another client of it."""
        settings = self._client.configuration
        bearer = (await settings.auth_settings()).get("BearerToken", {}).get("value", "")
        found = {
            "server": settings.host,
            "ca_path": settings.ssl_ca_cert,
            "insecure": not settings.verify_ssl,
            "certificate_path": settings.cert_file,
            "private_key_path": settings.key_file,
            "token": bearer.partition(" ")[2],
        }
        return {name: value for name, value in found.items() if value}

    def counting(self) -> aiohttp.TraceConfig:
        """Make another client's session count its requests with this one's."""
        trace = aiohttp.TraceConfig()
        trace.on_request_end.append(self._count)
        return trace

    async def _count(
        self, session: object, context: object, ended: aiohttp.TraceRequestEndParams
    ) -> None:
        verb, what = _parse(ended.method, ended.url)
        self._counter.request(verb, what, str(ended.response.status))

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        return await self._json("get", resource, resource.path(namespace, name))

    async def list(self, resource: Resource, namespace: str = "", **query: str) -> Object:
        return await self._json("list", resource, resource.path(namespace), query=query)

    async def create(
        self, resource: Resource, namespace: str, body: Object, **query: str
    ) -> Object:
        return await self._json("create", resource, resource.path(namespace), body, query=query)

    async def replace(
        self, resource: Resource, namespace: str, body: Object, subresource: str = ""
    ) -> Object:
        path = resource.path(namespace, body["metadata"]["name"], subresource)
        return await self._json("update", resource, path, body, subresource=subresource)

    async def patch(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        body: Object,
        subresource: str = "",
    ) -> Object:
        path = resource.path(namespace, name, subresource)
        return await self._json("patch", resource, path, body, subresource=subresource)

    async def delete(
        self, resource: Resource, namespace: str, name: str, *, uid: str = "", grace_s: int = -1
    ) -> Object:
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if grace_s >= 0:
            options["gracePeriodSeconds"] = grace_s
        if uid:
            options["preconditions"] = {"uid": uid}
        return await self._json("delete", resource, resource.path(namespace, name), options)

    async def watch(
        self, resource: Resource, namespace: str, *, silence_s: float, **query: str
    ) -> AsyncIterator[Object]:
        """Yield the events of a watch until the server ends the stream. Silence for `silence_s`
        raises an ApiError."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=silence_s)
        query = {"watch": "true", "allowWatchBookmarks": "true", **query}
        path = resource.path(namespace)
        async with self._answer("watch", resource, path, None, query, timeout) as response:
            while line := await response.content.readline():
                yield json.loads(line)

    async def lines(
        self, resource: Resource, namespace: str, name: str, subresource: str, **query: str
    ) -> AsyncIterator[str]:
        """Yield the lines of a subresource that is text, until the server ends the stream."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        path = resource.path(namespace, name, subresource)
        answer = self._answer("get", resource, path, None, query, timeout, subresource)
        async with answer as response:
            rest = b""
            async for part in response.content.iter_any():
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    yield line.decode(errors="replace")
            if rest:
                yield rest.decode(errors="replace")

    async def _json(
        self,
        verb: str,
        resource: Resource,
        path: str,
        body: Object | None = None,
        *,
        query: Mapping[str, str] | None = None,
        subresource: str = "",
    ) -> Object:
        timeout = aiohttp.ClientTimeout(total=REQUEST_S, sock_connect=CONNECT_S)
        async with self._answer(
            verb, resource, path, body, query or {}, timeout, subresource
        ) as response:
            answer: Object = json.loads(await response.read())
            return answer

    @asynccontextmanager
    async def _answer(
        self,
        verb: str,
        resource: Resource,
        path: str,
        body: Object | None,
        query: Mapping[str, str],
        timeout: aiohttp.ClientTimeout,
        subresource: str = "",
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and count it; gives its answer, unless that is an error."""
        what = f"{resource.plural}/{subresource}" if subresource else resource.plural
        url = f"{self._client.configuration.host}{path}"
        headers = {"Content-Type": MERGE_PATCH if verb == "patch" else "application/json"}
        try:
            await self._client.update_params_for_auth(headers, [], ["BearerToken"])
            answer = await self._client.rest_client.request(
                _METHODS[verb],
                f"{url}?{urlencode(query)}" if query else url,
                headers=headers,
                body=body,
                _preload_content=False,
                _request_timeout=timeout,
            )
            async with answer as response:
                self._counter.request(verb, what, str(response.status))
                if response.status >= 400:
                    raise refusal(verb, path, response.status, await response.read())
                yield response
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            self._counter.request(verb, what, "none")
            text = str(error) or type(error).__name__
            raise ApiError(f"{verb} {path}: no answer: {text}", status=0) from error


_METHODS = {
    "get": "GET",
    "list": "GET",
    "watch": "GET",
    "create": "POST",
    "update": "PUT",
    "patch": "PATCH",
    "delete": "DELETE",
}


def _parse(method: str, url: URL) -> tuple[str, str]:
    """(verb, kind of object) of a request to the API server, as they are counted."""
    parts = [part for part in url.path.split("/") if part]
    parts = parts[2 if parts[:1] == ["api"] else 3 :]
    if parts[:1] == ["namespaces"] and len(parts) > 2:
        parts = parts[2:]
    if not parts:
        return "get", "discovery"
    verb = {"GET": "get", "POST": "create", "PUT": "update"}.get(method, method.lower())
    if verb == "get" and len(parts) == 1:
        verb = "watch" if "watch" in url.query else "list"
    return verb, "/".join(parts[::2])


def refusal(verb: str, path: str, status: int, body: bytes) -> ApiError:
    """Make the error of an answer, with the API server's words from its body."""
    try:
        answer = json.loads(body)
        message, reason = answer["message"], answer.get("reason", "")
    except (ValueError, TypeError, KeyError):
        message, reason = body[:200].decode(errors="replace"), ""
    return ApiError(f"{verb} {path}: {status} {message}", status=status, reason=reason)


async def connect(counter: RequestCounter, kubeconfig: str = "", context: str = "") -> Api:
    """Connect with the kubeconfig or the context, if one is given; else with the service account of
    the pod that this process runs in; else with $KUBECONFIG or ~/.kube/config.

    Raises:
        UnreachableError: when there is none of them.
    """
    settings = client.Configuration()
    settings.connection_pool_maxsize = CONNECTIONS_MAX
    try:
        if kubeconfig or context or not _in_cluster(settings):
            await config.load_kube_config(
                kubeconfig or None, context or None, client_configuration=settings
            )
    except (ConfigException, OSError) as error:
        raise UnreachableError(
            f"no cluster is configured: {error}. Give --kubeconfig FILE, set KUBECONFIG, or run "
            f"in a pod"
        ) from error
    return Api(client.ApiClient(settings), counter)


def _in_cluster(settings: client.Configuration) -> bool:
    """Use the service account's address and token, if this process runs in a pod; returns whether
    it does."""
    with suppress(ConfigException):
        config.load_incluster_config(settings)
        return True
    return False
