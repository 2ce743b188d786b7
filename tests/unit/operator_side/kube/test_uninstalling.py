"""Jobs must not wait for an operator that was uninstalled."""

from __future__ import annotations

import asyncio

import pytest
from fake_api import FakeApi

from holdfast_operator.kube.client.api import CONFLICT, ApiError, Object
from holdfast_operator.kube.client.resources import JOBS, LEASES, Resource
from holdfast_operator.kube.job.finalizer import FINALIZER
from holdfast_operator.kube.upgrade.uninstalling import LEASE_S, OPERATOR_ENDS_S, release_finalizers

OTHER = "example.com/theirs"


class JobsApi(FakeApi):
    """Lists in pages of one and patches metadata. `changing` is how often another client writes the
    job right before each patch."""

    def __init__(self) -> None:
        super().__init__()
        self.changing = 0

    async def list(self, resource: Resource, namespace: str = "", **query: str) -> Object:
        assert query["limit"] == "500"
        names = sorted(
            key for key in self.objects if key[0] == resource.plural and namespace in ("", key[1])
        )
        at = int(query.get("continue", "0"))
        more = {"continue": str(at + 1)} if at + 1 < len(names) else {}
        return {"items": [self.objects[name] for name in names[at : at + 1]], "metadata": more}

    async def patch(
        self, resource: Resource, namespace: str, name: str, body: Object, subresource: str = ""
    ) -> Object:
        found = self.objects[(resource.plural, namespace, name)]
        if self.changing:
            self.changing -= 1
            found = self.put(resource, found)
        if body["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]:
            raise ApiError("changed meanwhile", status=CONFLICT, reason="Conflict")
        return self.put(resource, {**found, "metadata": {**found["metadata"], **body["metadata"]}})


def job(name: str, *finalizers: str, namespace: str = "default") -> Object:
    return {"metadata": {"name": name, "namespace": namespace, "finalizers": list(finalizers)}}


def finalizers(api: FakeApi, name: str, namespace: str = "default") -> list[str]:
    found: list[str] = api.objects[("moetrainingjobs", namespace, name)]["metadata"]["finalizers"]
    return found


def release(api: JobsApi, *watch_namespaces: str) -> tuple[int, list[float]]:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        lease = api.objects.get(("leases", "hf", "op"))
        assert lease is None or lease["spec"]["holderIdentity"] == "leaver"
        slept.append(seconds)

    count = asyncio.run(
        release_finalizers(
            api,
            namespace="hf",
            lease="op",
            identity="leaver",
            watch_namespaces=watch_namespaces,
            wall=lambda: 1e9,
            sleep=sleep,
        )
    )
    return count, slept


def test_every_job_loses_our_finalizer_and_keeps_those_of_others() -> None:
    api = JobsApi()
    api.put(JOBS, job("a", FINALIZER))
    api.put(JOBS, job("b", OTHER, FINALIZER, namespace="elsewhere"))
    api.put(JOBS, job("c", OTHER))
    assert release(api)[0] == 2
    assert finalizers(api, "a") == []
    assert finalizers(api, "b", "elsewhere") == [OTHER]
    assert finalizers(api, "c") == [OTHER]


def test_only_jobs_of_the_watched_namespaces_are_released() -> None:
    api = JobsApi()
    for namespace in ("default", "one", "two"):
        api.put(JOBS, job("a", FINALIZER, namespace=namespace))
    assert release(api, "one", "two")[0] == 2
    assert finalizers(api, "a") == [FINALIZER]


def test_the_operator_is_ended_first_and_given_time_to_end() -> None:
    api = JobsApi()
    spec = {"holderIdentity": "operator-1", "leaseDurationSeconds": 15, "leaseTransitions": 3}
    api.put(LEASES, {"metadata": {"name": "op", "namespace": "hf"}, "spec": spec})
    _, slept = release(api)
    assert slept == [OPERATOR_ENDS_S]
    lease = api.objects[("leases", "hf", "op")]["spec"]
    assert (lease["holderIdentity"], lease["leaseDurationSeconds"]) == ("leaver", LEASE_S)


def test_a_job_that_changes_meanwhile_is_released_all_the_same() -> None:
    api = JobsApi()
    api.put(JOBS, job("a", FINALIZER))
    api.changing = 2
    assert release(api)[0] == 1
    assert finalizers(api, "a") == []


def test_a_job_that_never_stops_changing_is_an_error_that_names_it() -> None:
    api = JobsApi()
    api.put(JOBS, job("a", FINALIZER))
    api.changing = 1000
    with pytest.raises(ApiError, match=r"default/a: it changed 10 times"):
        release(api)
