"""A pod waits for each node that a job lacks, and no longer."""

from __future__ import annotations

import asyncio

from fake_api import FakeApi
from samples import make_job

from holdfast_operator.kube.client.api import ApiError, Object
from holdfast_operator.kube.client.resources import PODS
from holdfast_operator.kube.client.watches import Cache
from holdfast_operator.kube.pods.manifests import TrainerVolume, pod_manifest
from holdfast_operator.kube.pods.placeholders import (
    PLACEHOLDER_LABEL,
    REFUSED_S,
    Placeholder,
    Placeholders,
    placeholder,
    read_placeholder,
)
from holdfast_operator.kube.pods.pods import read_pod
from holdfast_operator.reconciler.observe.views import Shortage

GPU = {
    "name": "t",
    "image": "i",
    "command": ["x"],
    "resources": {"requests": {"cpu": "1500m"}, "limits": {"nvidia.com/gpu": "8"}},
}


class Keeper:
    """The adapter before a fake API server, with the copy that a watch would keep."""

    def __init__(self) -> None:
        self.api, self.now, self.known = FakeApi(), 0.0, True
        self.cache: Cache[Placeholder] = Cache(read_placeholder, lambda before, now: None)
        self.placeholders = Placeholders(
            self.api, self.cache, are_known=lambda: self.known, clock=lambda: self.now
        )
        self.job = make_job({"containers": [GPU], "nodeSelector": {"pool": "gpu"}})

    def keep(self, count: int, *beside: str) -> list[str]:
        shortage = Shortage(count=count, beside=beside)
        asyncio.run(self.placeholders.keep(self.job, shortage))
        return self.api.made(PODS)


def test_as_many_wait_as_nodes_are_missing() -> None:
    keeper = Keeper()
    assert keeper.keep(2) == ["moe-placeholder-0", "moe-placeholder-1"]
    requests = len(keeper.api.requests)
    assert len(keeper.keep(2)) == 2
    assert len(keeper.api.requests) == requests, "nothing has changed"
    assert keeper.keep(1) == ["moe-placeholder-0"]
    assert keeper.keep(0) == []


def test_a_new_leader_takes_away_what_it_does_not_need() -> None:
    before = Keeper()
    before.keep(2)
    after = Keeper()
    after.api.objects = before.api.objects
    after.known = False
    assert len(after.keep(0)) == 2, "its watch has not told it yet what there is"
    for raw in list(after.api.objects.values()):
        after.cache.put(raw)
    after.known = True
    assert after.keep(0) == []


def test_a_refused_placeholder_is_tried_again_later() -> None:
    keeper = Keeper()
    keeper.api.refuse = ApiError("exceeded quota", status=403)
    assert keeper.keep(1) == []
    assert keeper.keep(1) == [], "not at each look"
    keeper.now += REFUSED_S
    assert keeper.keep(1) == ["moe-placeholder-0"]


def test_a_placeholder_asks_for_what_a_member_asks_and_runs_nothing_of_it() -> None:
    job = Keeper().job
    pod = placeholder(job, "moe-placeholder-0", ())
    spec, member = pod["spec"], pod_manifest(job, 0, "n0", 1, TrainerVolume.CSI)["spec"]
    assert spec["nodeSelector"] == member["nodeSelector"]
    (container,) = spec["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "1500m", "nvidia.com/gpu": "8"},
        "limits": {"nvidia.com/gpu": "8"},
    }
    assert container["command"] != member["containers"][0]["command"]
    assert "volumes" not in spec and "env" not in container


def test_each_waits_for_a_node_of_its_own_beside_those_of_the_template() -> None:
    own: Object = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    pod = placeholder(make_job({"containers": [GPU], "affinity": own}), "p", ("n0", "n1"))
    apart = pod["spec"]["affinity"]["podAntiAffinity"]
    labels = [
        term["labelSelector"]["matchLabels"]
        for term in apart["requiredDuringSchedulingIgnoredDuringExecution"]
    ]
    assert labels == [{PLACEHOLDER_LABEL: "moe"}], "trainers are kept off by none"
    assert "preferredDuringSchedulingIgnoredDuringExecution" in apart
    required = pod["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    (term,) = required["nodeSelectorTerms"]
    off = [(each["key"], each["operator"], each["values"]) for each in term["matchFields"]]
    assert off == [("metadata.name", "NotIn", [node]) for node in ("n0", "n1")]


def test_one_on_a_node_that_the_job_has_by_now_is_made_anew() -> None:
    """Its room is for a member, and another node is still missing."""
    keeper = Keeper()
    keeper.keep(1, "n0")
    (raw,) = keeper.api.objects.values()
    keeper.cache.put(keeper.api.put(PODS, {**raw, "spec": {**raw["spec"], "nodeName": "n1"}}))
    assert keeper.keep(1, "n0") == ["moe-placeholder-0"], "a node that the job does not have yet"
    assert keeper.keep(1, "n0", "n1") == []
    assert keeper.keep(1, "n0", "n1") == ["moe-placeholder-0"]


def test_a_placeholder_is_no_trainer() -> None:
    pod = placeholder(Keeper().job, "moe-placeholder-0", ())
    assert read_pod(pod) is None
