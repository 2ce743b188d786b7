"""What is done to pods at the API server, and how it comes back into the copy."""

from __future__ import annotations

import asyncio

import pytest
from fake_api import FakeApi
from samples import make_job

from holdfast_operator.kube.client.api import ApiError, Object
from holdfast_operator.kube.client.resources import PODS, SERVICE_ACCOUNTS, SERVICES
from holdfast_operator.kube.client.watches import Cache
from holdfast_operator.kube.metrics import OperatorMetrics
from holdfast_operator.kube.pods.manifests import TrainerVolume, pod_manifest
from holdfast_operator.kube.pods.pods import TrainerPod, read_pod
from holdfast_operator.kube.pods.trainers import PodIndex, Trainers
from holdfast_operator.reconciler.observe.views import AgentState


class Hands:
    """The adapter before a fake API server, with the copy that a watch would keep."""

    def __init__(self) -> None:
        self.api, self.woken = FakeApi(), list[str]()
        self.pods = PodIndex(self.woken.append)
        cache: Cache[TrainerPod | None] = Cache(read_pod, self.pods.change)
        self.metrics = OperatorMetrics()
        self.trainers = Trainers(self.api, cache, self.metrics, TrainerVolume.CSI)

    def seen(self) -> list[tuple[str, AgentState]]:
        return [(pod.name, pod.state) for pod in self.pods.of("team.moe")]

    def sample(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"holdfast_operator_{name}", labels) or 0.0


def test_a_pod_that_was_just_created_is_seen_before_the_watch_shows_it() -> None:
    hands = Hands()
    asyncio.run(hands.trainers.start(make_job(), 1, "n0", 1))
    assert hands.seen() == [("moe-1-1", AgentState.STARTING)]
    assert hands.woken == ["team.moe"]
    assert hands.sample("pods_created_total") == 1


def test_a_pod_that_is_there_already_is_taken_for_the_one_that_was_wanted() -> None:
    hands = Hands()
    asyncio.run(hands.trainers.start(make_job(), 1, "n0", 1))
    second = Hands()
    second.api.objects = hands.api.objects
    asyncio.run(second.trainers.start(make_job(), 1, "n0", 1))
    assert second.seen() == [("moe-1-1", AgentState.STARTING)]
    assert second.sample("pods_created_total") == 0


@pytest.mark.parametrize("owner", ["", "an-earlier-jobs-uid"])
def test_a_pod_of_another_owner_is_not_taken_for_the_one_that_was_wanted(owner: str) -> None:
    hands = Hands()
    stranger: Object = {"metadata": {"name": "moe-1-1", "namespace": "team"}, "spec": {}}
    if owner:
        job = make_job()
        stranger = pod_manifest(job, 1, "n0", 1, TrainerVolume.CSI)
        stranger["metadata"]["ownerReferences"][0]["uid"] = owner
    hands.api.put(PODS, stranger)
    assert asyncio.run(hands.trainers.start(make_job(), 1, "n0", 1)) is False
    assert hands.seen() == []
    assert asyncio.run(hands.trainers.start(make_job(), 1, "n0", 2)) is True
    assert hands.seen() == [("moe-1-2", AgentState.STARTING)]


SIDECAR = {"name": "uploader", "state": {"running": {}}}


@pytest.mark.parametrize("asked_s", [None, 120])
@pytest.mark.parametrize(
    ("trainer", "others", "force", "is_waited_for"),
    [
        ({"running": {}}, [], False, True),
        ({"running": {}}, [SIDECAR], False, True),
        ({"terminated": {"exitCode": 1}}, [], False, False),
        ({"terminated": {"exitCode": 1}}, [SIDECAR], False, True),
        ({"terminated": {"exitCode": 0}}, [SIDECAR], False, True),
        ({"terminated": {"exitCode": 0}}, [SIDECAR], True, False),  # its node is lost
    ],
)
def test_a_pod_gets_its_grace_while_a_container_works(
    asked_s: int | None, trainer: Object, others: list[Object], force: bool, is_waited_for: bool
) -> None:
    hands = Hands()
    job = make_job({} if asked_s is None else {"terminationGracePeriodSeconds": asked_s})
    asyncio.run(hands.trainers.start(job, 0, "n0", 1))
    raw = hands.api.objects["pods", "team", "moe-0-1"]
    statuses = [*others, {"name": "trainer", "state": trainer}]
    pod = read_pod({**raw, "status": {"phase": "Running", "containerStatuses": statuses}})
    assert pod is not None
    asyncio.run(hands.trainers.stop([pod], force=force))
    assert hands.api.graces_s == [(asked_s or 8) if is_waited_for else 0]


def test_a_pod_that_was_just_stopped_is_seen_stopping() -> None:
    hands = Hands()
    asyncio.run(hands.trainers.start(make_job(), 0, "n0", 1))
    asyncio.run(hands.trainers.stop(hands.pods.of("team.moe")))
    assert hands.seen() == [("moe-0-1", AgentState.STOPPING)]
    assert hands.sample("pods_deleted_total", force="false") == 1


def test_force_takes_a_pod_away_at_once() -> None:
    hands = Hands()
    asyncio.run(hands.trainers.start(make_job(), 0, "n0", 1))
    asyncio.run(hands.trainers.stop(hands.pods.of("team.moe"), force=True))
    assert hands.seen() == []
    assert hands.api.made(PODS) == []


def test_a_pod_that_is_gone_already_is_forgotten() -> None:
    hands = Hands()
    asyncio.run(hands.trainers.start(make_job(), 0, "n0", 1))
    hands.api.objects.clear()
    asyncio.run(hands.trainers.stop(hands.pods.of("team.moe")))
    assert hands.seen() == []


def test_another_pod_that_took_the_name_is_left_alone() -> None:
    hands = Hands()
    asyncio.run(hands.trainers.start(make_job(), 0, "n0", 1))
    stale = hands.pods.of("team.moe")
    hands.api.objects[("pods", "team", "moe-0-1")]["metadata"]["uid"] = "another"
    asyncio.run(hands.trainers.stop(stale))
    assert hands.api.made(PODS) == ["moe-0-1"]


def test_shared_objects_are_made_where_they_are_missing() -> None:
    hands = Hands()
    job = make_job()
    asyncio.run(hands.trainers.prepare(job))
    asyncio.run(hands.trainers.prepare(job))
    assert hands.api.made(SERVICES) == ["moe"]
    assert hands.api.made(SERVICE_ACCOUNTS) == ["moe-trainer"]


def test_a_template_with_an_account_of_its_own_gets_none_of_ours() -> None:
    hands = Hands()
    asyncio.run(hands.trainers.prepare(make_job({"serviceAccountName": "mine"})))
    assert hands.api.made(SERVICES) == ["moe"]
    assert hands.api.made(SERVICE_ACCOUNTS) == []


def test_what_the_api_server_refuses_is_raised() -> None:
    hands = Hands()
    hands.api.refuse = ApiError("forbidden", status=403)
    with pytest.raises(ApiError, match="forbidden"):
        asyncio.run(hands.trainers.start(make_job(), 0, "n0", 1))
    assert hands.seen() == []


def test_trying_out_makes_nothing() -> None:
    hands = Hands()
    asyncio.run(hands.trainers.try_out(make_job()))
    assert hands.api.made(PODS) == []
    assert hands.api.requests == [("create", "pods", "moe-0-0")]
