"""An API server in memory: objects by path, resource versions, conflicts; no schema, no watches."""

from __future__ import annotations

import copy
from typing import Any

from holdfast_operator.kube.client.api import CONFLICT, NOT_FOUND, ApiError, KubeApi, Object
from holdfast_operator.kube.client.resources import Resource


class FakeApi(KubeApi):
    """`KubeApi` in memory. The next request raises `refuse`, once."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.requests: list[tuple[str, str, str]] = []
        """(verb, kind of object, name)."""
        self.refuse: ApiError | None = None
        self.graces_s: list[int] = []
        """Grace with which each deletion was asked for."""
        self._version = 100

    def put(self, resource: Resource, body: Object) -> Object:
        """Write an object, as another client would."""
        self._version += 1
        kept = copy.deepcopy(body)
        kept["metadata"] |= {"resourceVersion": str(self._version)}
        kept["metadata"].setdefault("uid", f"uid-{self._version}")
        metadata = kept["metadata"]
        self.objects[(resource.plural, metadata.get("namespace", ""), metadata["name"])] = kept
        return copy.deepcopy(kept)

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        self._note("get", resource, name)
        return copy.deepcopy(self._find(resource, namespace, name))

    async def create(
        self, resource: Resource, namespace: str, body: Object, **query: str
    ) -> Object:
        name = body["metadata"]["name"]
        self._note("create", resource, name)
        if (resource.plural, namespace, name) in self.objects:
            raise ApiError("there already", status=CONFLICT, reason="AlreadyExists")
        if "dryRun" in query:
            return body
        return self.put(
            resource, {**body, "metadata": {**body["metadata"], "namespace": namespace}}
        )

    async def replace(
        self, resource: Resource, namespace: str, body: Object, subresource: str = ""
    ) -> Object:
        name = body["metadata"]["name"]
        self._note(f"update {subresource}".strip(), resource, name)
        found = self._find(resource, namespace, name)
        wanted = body["metadata"].get("resourceVersion")
        if wanted not in (None, found["metadata"]["resourceVersion"]):
            raise ApiError("changed meanwhile", status=CONFLICT, reason="Conflict")
        if subresource:
            return self.put(resource, {**found, subresource: body[subresource]})
        return self.put(resource, {**body, "metadata": {**found["metadata"], **body["metadata"]}})

    async def patch(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        body: Object,
        subresource: str = "",
    ) -> Object:
        """Patch an object, or its status. An object that is being deleted goes with its last
        finalizer."""
        self._note(f"patch {subresource}".strip(), resource, name)
        found = self._find(resource, namespace, name)
        version = body.get("metadata", {}).get("resourceVersion")
        if version not in (None, found["metadata"]["resourceVersion"]):
            raise ApiError("changed meanwhile", status=CONFLICT, reason="Conflict")
        if subresource:
            merged = {**(found.get(subresource) or {}), **body[subresource]}
            kept = {key: value for key, value in merged.items() if value is not None}
            return self.put(resource, {**found, subresource: kept})
        patched = _merged(found, body)
        if "deletionTimestamp" in patched["metadata"] and not patched["metadata"]["finalizers"]:
            del self.objects[(resource.plural, namespace, name)]
            return {"kind": "Status"}
        return self.put(resource, patched)

    async def delete(
        self, resource: Resource, namespace: str, name: str, *, uid: str = "", grace_s: int = -1
    ) -> Object:
        self._note("delete", resource, name)
        self.graces_s.append(grace_s)
        found = self._find(resource, namespace, name)
        if uid and found["metadata"]["uid"] != uid:
            raise ApiError("another one", status=CONFLICT, reason="Conflict")
        if grace_s == 0:
            del self.objects[(resource.plural, namespace, name)]
            return {"kind": "Status"}
        found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        return {**self.put(resource, found), "kind": "Pod"}

    def made(self, resource: Resource) -> list[str]:
        """Names of all objects of a kind."""
        return sorted(name for plural, _, name in self.objects if plural == resource.plural)

    async def list(self, resource: Resource, namespace: str = "", **query: str) -> Object:
        self._note("list", resource, "")
        found = [body for (plural, _, _), body in self.objects.items() if plural == resource.plural]
        return {"items": copy.deepcopy(found)}

    def _find(self, resource: Resource, namespace: str, name: str) -> Any:
        try:
            return self.objects[(resource.plural, namespace, name)]
        except KeyError:
            raise ApiError("not there", status=NOT_FOUND, reason="NotFound") from None

    def _note(self, verb: str, resource: Resource, name: str) -> None:
        self.requests.append((verb, resource.plural, name))
        refusal, self.refuse = self.refuse, None
        if refusal is not None:
            raise refusal


def _merged(target: Any, patch: Any) -> Any:
    """Merge as RFC 7386 does."""
    if not isinstance(patch, dict):
        return patch
    found = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = _merged(found.get(key), value)
    return found
