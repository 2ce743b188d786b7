"""One operator at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_api import FakeApi

from holdfast_operator.kube.client.api import ApiError, Object
from holdfast_operator.kube.client.leader import LEASE_S, RETRY_S, Leader
from holdfast_operator.kube.client.resources import LEASES


class Clock:
    """Time that passes only in `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def candidate(api: FakeApi, clock: Clock, identity: str) -> Leader:
    return Leader(
        api,
        namespace="hf",
        name="op",
        identity=identity,
        clock=clock,
        wall=lambda: 1e9 + clock(),
        sleep=clock.sleep,
    )


def lease(api: FakeApi) -> Object:
    found: Object = api.objects[("leases", "hf", "op")]
    return found


def test_the_first_candidate_creates_the_lease_and_leads(clock: Clock) -> None:
    api = FakeApi()
    first = candidate(api, clock, "a")
    asyncio.run(first.acquire())
    assert first.leads
    assert lease(api)["spec"]["holderIdentity"] == "a"
    assert lease(api)["spec"]["leaseTransitions"] == 1


def test_a_second_candidate_waits_until_the_lease_has_expired(clock: Clock) -> None:
    api = FakeApi()
    asyncio.run(candidate(api, clock, "a").acquire())
    second = candidate(api, clock, "b")
    asyncio.run(second.acquire())
    assert clock.now >= LEASE_S
    assert lease(api)["spec"]["holderIdentity"] == "b"
    assert lease(api)["spec"]["leaseTransitions"] == 2


def test_a_restarted_container_takes_its_own_lease_at_once(clock: Clock) -> None:
    api = FakeApi()
    asyncio.run(candidate(api, clock, "a").acquire())
    asyncio.run(candidate(api, clock, "a").acquire())
    assert clock.now == 0.0
    assert lease(api)["spec"]["leaseTransitions"] == 1


def test_a_lease_that_was_given_back_can_be_taken_at_once(clock: Clock) -> None:
    api = FakeApi()
    first = candidate(api, clock, "a")
    asyncio.run(first.acquire())
    asyncio.run(first.release())
    assert not first.leads
    asyncio.run(candidate(api, clock, "b").acquire())
    assert clock.now == 0.0


def test_a_leader_stops_when_another_process_holds_its_lease(clock: Clock) -> None:
    api = FakeApi()
    first = candidate(api, clock, "a")
    asyncio.run(first.acquire())
    stolen = lease(api)
    stolen["spec"]["holderIdentity"] = "b"
    api.put(LEASES, stolen)
    asyncio.run(first.keep())
    assert not first.leads
    assert clock.now <= RETRY_S
    asyncio.run(first.release())
    assert lease(api)["spec"]["holderIdentity"] == "b"


def test_a_leader_that_cannot_renew_stops_before_its_lease_expires(clock: Clock) -> None:
    class Away(FakeApi):
        away = False

        def _note(self, *request: Any) -> None:
            super()._note(*request)
            if self.away:
                raise ApiError("no answer", status=0)

    api = Away()
    first = candidate(api, clock, "a")
    asyncio.run(first.acquire())
    api.away = True
    asyncio.run(first.keep())
    assert not first.leads
    assert clock.now < LEASE_S


def test_a_candidate_that_loses_the_race_for_a_free_lease_does_not_lead_yet(clock: Clock) -> None:
    class Racing(FakeApi):
        async def get(self, *where: Any) -> Object:
            found = await super().get(*where)
            if found["spec"]["holderIdentity"] == "":
                api.put(LEASES, {**found, "spec": {**found["spec"], "holderIdentity": "b"}})
            return found

    api = Racing()
    free = {"holderIdentity": "", "leaseDurationSeconds": 1}
    api.put(LEASES, {"metadata": {"name": "op", "namespace": "hf"}, "spec": free})
    first = candidate(api, clock, "a")
    asyncio.run(first.acquire())
    assert clock.now > 0, "the first attempt lost the race"
