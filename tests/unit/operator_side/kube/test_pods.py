"""Pods as the reconciler sees them."""

from __future__ import annotations

from typing import Any

import pytest
from samples import make_job

from holdfast_operator.kube.api import Object
from holdfast_operator.kube.manifests import TrainerVolume, pod_manifest
from holdfast_operator.kube.pods import TrainerPod, agents, read_pod
from holdfast_operator.reconciler.views import AgentState

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
    assert agent.disruption == "EvictionByEvictionAPI"


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
