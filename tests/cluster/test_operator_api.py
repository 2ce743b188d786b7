"""What the operator does, as the API server shows it: pods, status, events, fencing, restarts."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from machine import wait_for
from operator_process import NODE_RECORD, OperatorProcess
from operator_world import (
    DETECTION,
    NAMESPACE,
    NODES,
    WAIT_S,
    Document,
    World,
    job,
    namespace,
    world,
)

from holdfast_cli.main import main

__all__ = ["namespace", "world"]


def test_a_job_gets_pods_and_a_status_and_is_freed_when_it_is_deleted(world: World) -> None:
    world.cluster.apply(job("whole"))
    status = world.runs_in("whole", 1)
    assert status["readyText"] == "4/4"
    assert status["nodesReady"] == 4
    assert status["restarts"] == 0
    assert [member["index"] for member in status["members"]] == [0, 1, 2, 3]
    conditions = {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]}
    assert conditions["Running"] == ("True", "AllRanksReady")
    assert conditions["Protected"] == ("True", "ParityInPlace")
    pods = wait_for("four pods", lambda: len(p := world.pods("whole")) == 4 and p, WAIT_S)
    assert pods == {f"whole-{member['index']}-1": member["node"] for member in status["members"]}
    wait_for("the scheduler to agree", lambda: world.scheduled("whole") == pods, WAIT_S)
    kinds = ("service/whole", "serviceaccount/whole-trainer", "role/whole-trainer")
    for each in (*kinds, "rolebinding/whole-trainer"):
        world.kubectl("get", each)
    world.wait_event("whole", "Scheduled", "epoch 1 begins")
    world.wait_event("whole", "Running", "4 ranks train in epoch 1 from the beginning")

    world.delete("whole")
    key = f"{NAMESPACE}.whole"
    wait_for("the memory to be free", lambda: not world.daemons.of(key), WAIT_S)
    wait_for("the pods to go", lambda: not world.pods("whole"), WAIT_S)


def test_a_lost_rank_is_restarted_and_a_silent_node_replaced(world: World) -> None:
    world.kubectl("create", "configmap", NODE_RECORD, "--from-literal=elsewhere=[]")
    world.cluster.apply(job("losses"))
    held_up = world.runs_in("losses", 1)["members"][2]["node"]
    world.daemons.lose_rank(f"{NAMESPACE}.losses", 2)
    status = world.runs_in("losses", 2)
    assert (status["restarts"], status["recoveries"]) == (1, 1)
    world.wait_event("losses", "Recovering", "rank 2 lost; restart in place in epoch 2")
    world.wait_event("losses", "Recovered", "All ranks were at work again after")
    world.wait_event("losses", "Recovered", f"or its log on {held_up}).")

    lost = status["members"][0]["node"]
    world.daemons.daemons[lost].silent = True
    status = world.runs_in("losses", 3)
    assert status["restarts"] == 2
    spare = status["members"][0]["node"]
    assert spare != lost
    assert world.pods("losses")["losses-0-2"] == spare
    assert "losses-0-1" not in world.pods("losses")
    recovery = status["lastRecoveries"][-1]
    assert f"lost with node {lost}" in recovery["cause"]
    assert recovery["source"] == "local"
    assert recovery["seconds"] >= 0
    metrics = world.operator.ask("/metrics")
    assert 'holdfast_operator_recoveries_total{cause="NodeLost"} 1.0' in metrics
    assert "holdfast_operator_replacement_seconds_count 1.0" in metrics
    # Both count against their nodes, in a record that others write as well.
    failed = {held_up: ["LostRank"], lost: ["LostNode"]}
    wait_for("the failures to be recorded", lambda: world.node_failures() == failed, WAIT_S)
    other = json.dumps([{"kind": "Hang", "job": "a.b", "epoch": 1, "at": time.time()}])
    patch = json.dumps({"data": {"elsewhere": other, lost: None}})
    world.kubectl("patch", "configmap", NODE_RECORD, "--type=merge", "-p", patch)
    world.daemons.lose_rank(f"{NAMESPACE}.losses", 3)
    last = world.runs_in("losses", 4)["members"][3]["node"]
    failed = {held_up: ["LostRank"], last: ["LostRank"], "elsewhere": ["Hang"]}
    wait_for("the records to be merged", lambda: world.node_failures() == failed, WAIT_S)
    world.kubectl("delete", "configmap", NODE_RECORD)


@pytest.fixture
def suspect(cluster: Cluster) -> Iterator[str]:
    """A node that is opened again after the test."""
    node = NODES[1]
    yield node
    cluster.kubectl("taint", "node", node, "holdfast.dev/suspect-")
    cluster.kubectl("annotate", "node", node, "holdfast.dev/suspect-")


@pytest.mark.parametrize("world", [("--suspect-nodes", "Taint")], indirect=True)
def test_a_node_that_fails_three_times_is_tainted_listed_and_avoided(
    world: World, suspect: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world.kubectl("create", "configmap", NODE_RECORD)
    everywhere = {"nodes": len(NODES), "parallelism": {"dp": len(NODES), "ep": 1}}
    for name, times in (("once", 1), ("twice", 2)):
        world.cluster.apply(job(name, **everywhere, failurePolicy={"detection": DETECTION}))
        for epoch in range(1, times + 1):
            members = world.runs_in(name, epoch)["members"]
            index = next(each["index"] for each in members if each["node"] == suspect)
            world.daemons.lose_rank(f"{NAMESPACE}.{name}", index)
        world.runs_in(name, times + 1)
        world.delete(name)

    def is_tainted() -> bool:
        taints = world.cluster.get("node", suspect)["spec"].get("taints") or []
        return any(taint["key"] == "holdfast.dev/suspect" for taint in taints)

    wait_for("the taint", is_tainted, WAIT_S)
    assert world.node_failures() == {suspect: ["LostRank"] * 3}
    world.cluster.apply(job("after"))
    members = world.runs_in("after", 1)["members"]
    assert {member["node"] for member in members} == {*NODES} - {suspect}
    world.wait_event("after", "NodeAvoided", f"instead of {suspect} (3 failures in ")

    where = ("--kubeconfig", str(world.cluster.kubeconfig), "--system-namespace", NAMESPACE)
    assert main(["nodes", *where, "--record", NODE_RECORD, "--json"]) == 0
    [listed] = json.loads(capsys.readouterr().out)["nodes"]
    assert (listed["name"], listed["avoided"], listed["closed"]) == (suspect, True, "tainted")
    assert [each["kind"] for each in listed["failures"]] == ["LostRank"] * 3
    world.kubectl("delete", "configmap", NODE_RECORD)


def test_an_operator_that_is_killed_in_a_recovery_finishes_it_once(world: World) -> None:
    world.cluster.apply(job("amnesia"))
    status = world.runs_in("amnesia", 1)
    lost = status["members"][1]["node"]
    world.daemons.daemons[lost].silent = True
    # The recovery is decided, and the operator dies while it carries it out.
    world.until("amnesia", lambda s: s["recoveries"] == 1)
    world.operator.stop(signal.SIGKILL)
    world.operator.start()
    status = world.until("amnesia", lambda s: s["phase"] == "Running" and s["epoch"] >= 2)
    assert (status["restarts"], status["recoveries"]) == (1, 1)
    wait_for("four pods", lambda: len(world.pods("amnesia")) == 4, WAIT_S)
    assert lost not in world.pods("amnesia").values()
    assert len(status["lastRecoveries"]) == 1


def test_only_one_replica_leads_and_the_other_follows_when_it_ends(
    world: World, cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    wait_for("the first to lead", lambda: "leader 1.0" in world.operator.ask("/metrics"), WAIT_S)
    log = tmp_path / "second.log"
    with OperatorProcess(cluster.kubeconfig, namespace, log, identity="replica-1") as second:
        wait_for("the second to be ready", lambda: second.ask("/readyz") == "ok\n", WAIT_S)
        metrics = wait_for("its metrics", lambda: second.ask("/metrics"), WAIT_S)
        assert "holdfast_operator_leader 0.0" in metrics
        lease = cluster.get("lease", "holdfast-operator", "-n", namespace)
        assert lease["spec"]["holderIdentity"] == "replica-0"
        assert world.operator.stop() == 0
        wait_for("the second to lead", lambda: "leader 1.0" in second.ask("/metrics"), WAIT_S)

        def port() -> int:
            target = cluster.get("endpointslice", "holdfast-control", "-n", namespace)
            return int(target["ports"][0]["port"])

        wait_for("daemons to be sent there", lambda: port() == second.control_port, WAIT_S)
    world.operator.start()


def test_a_job_that_cannot_be_carried_out_reports_why_and_waits(world: World) -> None:
    template = {
        "spec": {"containers": [{"name": "t", "command": ["x"], "image": "i", "ports": [{}]}]}
    }
    world.cluster.apply(job("broken", trainer={"template": template}))
    status = world.until("broken", lambda s: s["phase"] == "Waiting")
    scheduled = next(c for c in status["conditions"] if c["type"] == "Scheduled")
    assert (scheduled["status"], scheduled["reason"]) == ("False", "InvalidTemplate")
    assert "containerPort" in scheduled["message"]
    assert world.pods("broken") == {}
    world.wait_event("broken", "InvalidTemplate", "containerPort")
    world.kubectl("patch", "moejob", "broken", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    world.cluster.apply(job("broken", suspend=True))
    world.cluster.apply(job("broken", suspend=False))
    world.runs_in("broken", 1)


def test_a_field_that_pods_do_not_have_is_refused(world: World) -> None:
    """In a pod it would be dropped without a word, and the job would run without it."""
    container = {"name": "t", "command": ["x"], "image": "i", "resource": {"limits": {"cpu": 1}}}
    template = {"spec": {"containers": [container], "nodeSelectors": {"pool": "gpu"}}}
    world.cluster.apply(job("mistyped", trainer={"template": template}))
    status = world.until("mistyped", lambda s: s["phase"] == "Waiting")
    scheduled = next(c for c in status["conditions"] if c["type"] == "Scheduled")
    assert (scheduled["status"], scheduled["reason"]) == ("False", "InvalidTemplate")
    for field in ('"spec.containers[0].resource"', '"spec.nodeSelectors"'):
        assert f"unknown field {field}" in scheduled["message"]
    assert world.pods("mistyped") == {}


def test_a_job_without_room_shows_a_condition_and_makes_no_pods(world: World) -> None:
    template = job("x")["spec"]["trainer"]["template"]
    template["spec"]["nodeSelector"] = {"accelerator": "none-has-this"}
    world.cluster.apply(job("roomless", trainer={"template": template}))
    status = world.until("roomless", lambda s: s["phase"] == "Waiting")
    assert status["problem"].startswith("0 of 4 nodes")
    status = world.until("roomless", lambda s: "of the cluster" in s["problem"])
    assert "5 of the cluster: label accelerator is not none-has-this" in status["problem"]
    assert world.pods("roomless") == {}


def test_a_pod_waits_for_each_node_that_a_job_lacks(world: World) -> None:
    """So autoscalers, which add nodes for pods that no node takes, see what is missing."""
    for node in ("node4", "node5"):
        world.cluster.kubectl("cordon", node)
    waiting = ("pods", "-l", "holdfast.dev/placeholder=short")
    try:
        world.cluster.apply(job("short"))
        wait_for("a pod that no node takes", lambda: _unschedulable(world.items(*waiting)), WAIT_S)
        assert world.pods("short") == {}
        world.cluster.kubectl("uncordon", "node4")
        world.runs_in("short", 1)
        wait_for("its end", lambda: not world.items(*waiting), WAIT_S)
    finally:
        for node in ("node4", "node5"):
            world.cluster.kubectl("uncordon", node)


def _unschedulable(pods: list[Document]) -> bool:
    conditions = [each for pod in pods for each in pod.get("status", {}).get("conditions", ())]
    return len(pods) == 1 and any(each.get("reason") == "Unschedulable" for each in conditions)


def test_a_node_that_is_full_of_other_pods_gets_no_member(world: World) -> None:
    """A member's pod would wait there for ever, although others have room."""
    cpus = int(world.cluster.get("node", "node1")["status"]["allocatable"]["cpu"])
    template = job("x")["spec"]["trainer"]["template"]
    resources = {"requests": {"cpu": f"{600 * cpus}m"}}
    template["spec"]["containers"][0]["resources"] = resources
    other = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "other", "namespace": NAMESPACE},
        "spec": {
            "nodeName": "node1",
            "containers": [{"name": "c", "image": "localhost/none", "resources": resources}],
        },
    }
    world.cluster.apply(other)
    try:
        world.cluster.apply(job("beside", trainer={"template": template}))
        world.runs_in("beside", 1)
        assert set(world.pods("beside").values()) == set(NODES) - {"node1"}
    finally:
        world.kubectl("delete", "pod", "other", "--grace-period=0", "--force")


def test_suspending_takes_the_pods_away_and_keeps_the_memory(world: World) -> None:
    world.cluster.apply(job("pause"))
    world.runs_in("pause", 1)
    world.kubectl("patch", "moejob", "pause", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    world.until("pause", lambda s: s["phase"] == "Suspended")
    wait_for("the pods to go", lambda: not world.pods("pause"), WAIT_S)
    assert len(world.daemons.of(f"{NAMESPACE}.pause")) == 4
    world.kubectl("patch", "moejob", "pause", "--type=merge", "-p", '{"spec":{"suspend":false}}')
    status = world.runs_in("pause", 2)
    assert status["restarts"] == 0
    wait_for("the pods to come back", lambda: len(world.pods("pause")) == 4, WAIT_S)


def test_a_job_of_another_manager_is_left_alone(world: World) -> None:
    world.cluster.apply(job("theirs", managedBy="example.com/other"))
    world.cluster.apply(job("ours"))
    world.runs_in("ours", 1)
    theirs = world.cluster.get("moejob", "theirs", "-n", NAMESPACE)
    assert "status" not in theirs
    assert "finalizers" not in theirs["metadata"]


def test_the_scale_and_the_columns_read_well(world: World) -> None:
    world.cluster.apply(job("columns"))
    world.runs_in("columns", 1)
    words = world.kubectl("get", "moejob", "columns").splitlines()
    assert words[0].split() == [
        *("NAME", "STATE", "READY", "ACTIVE", "DESIRED"),
        *("STEP", "PROTECTED", "RESTARTS", "AGE"),
    ]
    assert words[1].split()[:5] == ["columns", "Running", "4/4", "4", "4"]
    raw = f"/apis/holdfast.dev/v1alpha1/namespaces/{NAMESPACE}/moetrainingjobs/columns/scale"
    scale = json.loads(world.cluster.kubectl("get", "--raw", raw))
    assert scale["status"]["selector"] == "holdfast.dev/job=columns"
    assert scale["status"]["replicas"] == 4
