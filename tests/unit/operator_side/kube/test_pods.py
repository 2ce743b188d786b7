"""Pods as the reconciler sees them."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from samples import make_job

from holdfast_core.snapshots.membership import Member, Membership
from holdfast_operator.kube.client.api import Object
from holdfast_operator.kube.pods.manifests import TrainerVolume, pod_manifest
from holdfast_operator.kube.pods.pods import (
    UNNUMBERED,
    TrainerPod,
    adopted_agents,
    agents,
    pod_names,
    read_pod,
)
from holdfast_operator.reconciler.observe.views import AgentState

UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available",
}


def pod(status: Object | None = None, attempt: int = 1, node: str = "n0", **metadata: Any) -> Any:
    made = pod_manifest(make_job(), 0, node, attempt, TrainerVolume.CSI)
    made["metadata"] |= {"uid": f"uid-{attempt}", **metadata}
    made["status"] = status or {"phase": "Pending"}
    return made


def container(**state: Any) -> Object:
    return {"name": "trainer", "state": state}


def seen(raw: Object) -> TrainerPod:
    found = read_pod(raw)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("status", "state", "code", "reason", "message"),
    [
        ({}, AgentState.STARTING, None, "", ""),
        (
            {"phase": "Pending", "conditions": [UNSCHEDULABLE]},
            AgentState.STARTING,
            None,
            "Unschedulable",
            "0/3 nodes are available",
        ),
        (
            {
                "phase": "Pending",
                "containerStatuses": [
                    container(waiting={"reason": "ImagePullBackOff", "message": "not found"})
                ],
            },
            AgentState.STARTING,
            None,
            "ImagePullBackOff",
            "not found",
        ),
        (
            {"phase": "Running", "containerStatuses": [container(running={})]},
            AgentState.RUNNING,
            None,
            "",
            "",
        ),
        (
            {
                "phase": "Running",
                "containerStatuses": [
                    {"name": "sidecar", "state": {"running": {}}},
                    container(terminated={"exitCode": 42, "reason": "Error"}),
                ],
            },
            AgentState.EXITED,
            42,
            "Error",
            "",
        ),
        (
            {"phase": "Succeeded", "containerStatuses": [container(terminated={"exitCode": 0})]},
            AgentState.EXITED,
            0,
            "",
            "",
        ),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory."},
            AgentState.EXITED,
            137,
            "Evicted",
            "The node was low on memory.",
        ),
    ],
)
def test_the_state_of_a_pod_is_that_of_its_trainer(
    status: Object, state: AgentState, code: int | None, reason: str, message: str
) -> None:
    found = seen(pod(status))
    assert (found.state, found.exit_code) == (state, code)
    assert (found.reason, found.message) == (reason, message)


@pytest.mark.parametrize("order", list(permutations(("trainer", "istio-proxy", "log-shipper"))))
@pytest.mark.parametrize("code", [0, 1])
def test_the_trainer_is_found_by_its_name_wherever_webhooks_put_their_containers(
    order: tuple[str, ...], code: int
) -> None:
    states = {
        "trainer": {"terminated": {"exitCode": code, "message": "ValueError: bad batch"}},
        "istio-proxy": {"running": {}},
        "log-shipper": {"waiting": {"reason": "ImagePullBackOff"}},
    }
    raw = pod({"phase": "Running"})
    named = {each["name"]: each for each in raw["spec"]["containers"]}
    raw["spec"]["containers"] = [named.get(name, {"name": name}) for name in order]
    for listed in permutations(order):
        statuses = [{"name": name, "state": states[name]} for name in listed]
        raw["status"]["containerStatuses"] = statuses
        found = seen(raw)
        assert (found.state, found.exit_code) == (AgentState.EXITED, code)
        assert found.last_lines == ("ValueError: bad batch" if code else "")
        assert found.others_run and found.trainer_ended


def test_a_pod_that_is_stopped_is_no_agent_once_its_trainer_has_ended() -> None:
    ended = container(terminated={"exitCode": 143})
    sidecar = {"name": "log-shipper", "state": {"running": {}}}
    status: Object = {"phase": "Running", "containerStatuses": [sidecar, ended]}
    raw = pod(status, deletionTimestamp="2026-01-01T00:00:00Z")
    assert agents([seen(raw)]) == ()
    (agent,) = agents([seen(raw), seen(pod(attempt=2))])
    assert agent.state is AgentState.STARTING
    evicted = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    status["conditions"] = [evicted]
    (agent,) = agents([seen(raw)])
    assert agent.disruption == "EvictionByEvictionAPI: the pod was evicted, as by kubectl drain"


def test_the_end_of_a_failed_containers_log_is_kept_without_secrets() -> None:
    log = "ModuleNotFoundError: No module named 'torch'\nkey open sesame\n"
    ended = {"exitCode": 1, "reason": "Error", "message": log}
    raw = pod({"phase": "Failed", "containerStatuses": [container(terminated=ended)]})
    raw["spec"]["containers"][0]["env"] = [{"name": "DB_PASSWORD", "value": "open sesame"}]
    (agent,) = agents([seen(raw)])
    assert agent.last_lines == "ModuleNotFoundError: No module named 'torch'\nkey ***"
    ended["exitCode"] = 0
    assert seen(raw).last_lines == ""


def test_a_pod_that_is_deleted_stops_and_shows_why() -> None:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    raw = pod(
        {"phase": "Running", "conditions": [condition]}, deletionTimestamp="2026-01-01T00:00:00Z"
    )
    (agent,) = agents([seen(raw)])
    assert agent.state is AgentState.STOPPING
    assert agent.disruption == "EvictionByEvictionAPI: the pod was evicted, as by kubectl drain"


def test_a_pod_with_strange_labels_belongs_to_no_job() -> None:
    raw = pod()
    raw["metadata"]["labels"]["holdfast.dev/member"] = "first"
    assert read_pod(raw) is None


def test_of_two_pods_of_a_member_on_a_node_the_one_that_stays_counts() -> None:
    old = seen(pod(attempt=1, deletionTimestamp="2026-01-01T00:00:00Z"))
    new = seen(pod(attempt=2))
    for order in ([old, new], [new, old]):
        (agent,) = agents(order)
        assert agent.state is AgentState.STARTING
    (agent,) = agents([old])
    assert agent.state is AgentState.STOPPING


def test_a_member_that_moves_has_an_agent_on_each_node() -> None:
    views = agents([seen(pod(attempt=1, node="n0")), seen(pod(attempt=2, node="n1"))])
    assert [(view.member, view.node) for view in views] == [(0, "n0"), (0, "n1")]


def adopted(
    number: str | None, status: Object | None = None, node: str = "n0", second: int = 0, **more: Any
) -> Object:
    """A pod of an indexed Job."""
    labels = {"holdfast.dev/job": "moe"}
    if number is not None:
        labels["batch.kubernetes.io/job-completion-index"] = number
    name = f"train-{number}-{second}"
    return {
        "metadata": {
            "namespace": "team",
            "name": name,
            "uid": name,
            "labels": labels | more.pop("labels", {}),
            "creationTimestamp": f"2026-01-01T00:00:{second:02}Z",
            **more,
        },
        "spec": {"nodeName": node, "containers": [{"name": "trainer"}]},
        "status": status or {"phase": "Running", "containerStatuses": [container(running={})]},
    }


@pytest.mark.parametrize(
    ("policy", "code", "ended"),
    [
        ("Never", 0, True),
        ("Never", 1, True),
        ("OnFailure", 0, True),
        ("OnFailure", 1, False),
        ("Always", 0, False),
        ("Always", 1, False),
        (None, 0, False),
    ],
)
def test_an_adopted_trainer_beside_a_sidecar_has_ended_if_its_kubelet_starts_it_no_more(
    policy: str | None, code: int, ended: bool
) -> None:
    raw = adopted("3")
    env = [{"name": "HOLDFAST_SOCKET", "value": "/run/holdfast/sockets/daemon.sock"}]
    raw["spec"]["containers"] = [{"name": "proxy"}, {"name": "trainer", "env": env}]
    raw["spec"] |= {} if policy is None else {"restartPolicy": policy}
    proxy = {"name": "proxy", "state": {"running": {}}}
    statuses = [proxy, container(terminated={"exitCode": code})]
    raw["status"] = {"phase": "Running", "containerStatuses": statuses}
    found = seen(raw)
    assert (found.state, found.exit_code) == (
        (AgentState.EXITED, code) if ended else (AgentState.STARTING, None)
    )


@pytest.mark.parametrize(
    ("labels", "number"),
    [
        ({}, 3),
        ({"holdfast.dev/member": "1"}, 1),
        ({"jobset.sigs.k8s.io/replicatedjob-replicas": "1"}, 3),
        ({"jobset.sigs.k8s.io/replicatedjob-replicas": "4"}, UNNUMBERED),
        ({"holdfast.dev/member": "first"}, UNNUMBERED),
    ],
)
def test_a_pod_of_another_controller_has_the_number_that_its_labels_give(
    labels: dict[str, str], number: int
) -> None:
    found = seen(adopted("3", labels=labels))
    assert found.adopted and found.member == number and found.job_key == "team.moe"
    stateful = adopted(None, labels={"apps.kubernetes.io/pod-index": "7"})
    assert seen(stateful).member == 7 and seen(adopted(None)).member == UNNUMBERED


def test_many_jobs_of_one_pod_each_are_numbered_by_their_job() -> None:
    jobs = {
        "jobset.sigs.k8s.io/replicatedjob-replicas": "4",
        "jobset.sigs.k8s.io/job-index": "2",
    }
    assert seen(adopted("0", labels=jobs)).member == 2


def test_the_newest_pod_of_each_number_counts_and_ended_ones_do_not() -> None:
    crashed = {"phase": "Running", "containerStatuses": [container(terminated={"exitCode": 75})]}
    pods = [
        seen(adopted("0", {"phase": "Failed"}, "n0", 1)),
        seen(adopted("0", None, "n5", 2)),
        seen(adopted("1", crashed, "n1")),
        seen(adopted("2", {"phase": "Failed"}, "n2")),
        seen(adopted("3", {"phase": "Succeeded"}, "n3")),
        seen(adopted("4", None, "n4", deletionTimestamp="2026-01-01T00:00:09Z")),
    ]
    places = tuple(
        Member(index=i, node=f"n{i}", memory_id="m", peer_address="", bulk_address="")
        for i in range(5)
    )
    membership = Membership(
        job="team.moe", epoch=1, members=places, nproc_per_node=1, groups=((0, 1, 2, 3, 4),)
    )
    found = [(a.number, a.member, a.state) for a in adopted_agents(pods, membership)]
    assert found == [
        (0, UNNUMBERED, AgentState.RUNNING),
        (1, 1, AgentState.STARTING),
        (3, 3, AgentState.EXITED),
    ]
    assert pod_names(pods, membership)[1, "n1"] == "train-1-0"
