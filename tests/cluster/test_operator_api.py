"""The operator as a process, before a real API server and scheduler, with daemons that speak
Control and have no memory behind them: pods, status, events, fencing, restarts of the operator.

The trainers' image does not exist: what pods do is not what is tested here.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from control_daemons import ControlDaemons
from holdfast_system import Job
from machine import wait_for
from operator_process import OperatorProcess

from holdfast_operator.kube.manifests import SOCKETS_PATH

RESOURCE = Path(__file__).resolve().parents[2] / "crds" / "holdfast.dev_moetrainingjobs.yaml"
NAMESPACE = "operator-api"
NODES = ("node1", "node2", "node3", "node4", "node5")
WAIT_S = 60.0

Document = dict[str, Any]


def job(name: str, **spec: Any) -> Document:
    """Four members of one rank and a spare; two seconds of silence make a lost node."""
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "MoETrainingJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "nodes": 4,
            "parallelism": {"dp": 4, "ep": 4},
            "failurePolicy": {
                "spares": 1,
                "detection": {"heartbeatSeconds": 0.5, "missedHeartbeats": 4},
            },
            "trainer": {
                "template": {
                    "spec": {
                        "containers": [
                            {"name": "trainer", "image": "localhost/none", "command": ["train"]}
                        ]
                    }
                }
            },
            **spec,
        },
    }


class World:
    """The cluster, one operator, its daemons."""

    def __init__(self, cluster: Cluster, operator: OperatorProcess, daemons: ControlDaemons):
        self.cluster, self.operator, self.daemons = cluster, operator, daemons

    def kubectl(self, *words: str) -> str:
        return self.cluster.kubectl(*words, "-n", NAMESPACE)

    def items(self, *words: str) -> list[Document]:
        found: list[Document] = self.cluster.get(*words, "-n", NAMESPACE)["items"]
        return found

    def status(self, name: str) -> Document:
        found: Document = self.cluster.get("moejob", name, "-n", NAMESPACE).get("status", {})
        return found

    def until(self, name: str, wanted: Callable[[Document], object]) -> Document:
        """The job's status once it is as wanted."""
        document = {"metadata": {"name": name, "namespace": NAMESPACE}}
        return Job(self.cluster, document).wait(
            f"the status of {name}", lambda status: bool(wanted(status)), WAIT_S
        )

    def runs_in(self, name: str, epoch: int) -> Document:
        return self.until(name, lambda s: s["phase"] == "Running" and s["epoch"] == epoch)

    def pods(self, name: str) -> dict[str, str]:
        """Name of each pod → the node it is for."""
        pods = self.items("pods", "-l", f"holdfast.dev/job={name}")
        return {
            pod["metadata"]["name"]: pod["metadata"]["annotations"]["holdfast.dev/node"]
            for pod in pods
            if "deletionTimestamp" not in pod["metadata"]
        }

    def scheduled(self, name: str) -> dict[str, str]:
        """Name of each pod → the node that the scheduler chose."""
        pods = self.items("pods", "-l", f"holdfast.dev/job={name}")
        return {pod["metadata"]["name"]: pod["spec"].get("nodeName", "") for pod in pods}

    def events(self, name: str) -> list[tuple[str, str]]:
        """(reason, message) of the job's events."""
        chosen = f"involvedObject.name={name},involvedObject.kind=MoETrainingJob"
        events = self.items("events", "--field-selector", chosen)
        return [(event["reason"], event["message"]) for event in events]

    def told(self, name: str, reason: str, part: str = "") -> None:
        """Return once an event says so."""
        wait_for(
            f"the event {reason} {part!r}",
            lambda: any(r == reason and part in m for r, m in self.events(name)),
            WAIT_S,
        )

    def delete(self, name: str) -> None:
        """Delete the job, and wait until it is gone."""
        self.kubectl("delete", "moejob", name, f"--timeout={WAIT_S:.0f}s")


@pytest.fixture(scope="module")
def namespace(cluster: Cluster) -> Iterator[str]:
    cluster.kubectl("apply", "-f", str(RESOURCE))
    cluster.kubectl("wait", "--for=condition=Established", "-f", str(RESOURCE))
    cluster.kubectl("create", "namespace", NAMESPACE)
    for node in NODES:
        # What a daemon's pod makes: a pod that cannot mount it takes minutes to be deleted.
        cluster.run_on_node(node, "mkdir", "-p", SOCKETS_PATH)
    yield NAMESPACE
    cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


@pytest.fixture
def world(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[World]:
    log = tmp_path / "operator.log"
    with (
        OperatorProcess(cluster.kubeconfig, namespace, log) as operator,
        ControlDaemons(operator.control, NODES, cluster.kubeconfig, namespace) as daemons,
    ):
        world = World(cluster, operator, daemons)
        yield world
        for each in world.items("moejob"):
            world.delete(each["metadata"]["name"])
        print(log.read_text())


def test_a_job_gets_pods_and_a_status_and_is_freed_when_it_is_deleted(world: World) -> None:
    world.cluster.apply(job("story"))
    status = world.runs_in("story", 1)
    assert status["readyText"] == "4/4"
    assert status["nodesReady"] == 4
    assert status["restarts"] == 0
    assert [member["index"] for member in status["members"]] == [0, 1, 2, 3]
    conditions = {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]}
    assert conditions["Running"] == ("True", "AllRanksReady")
    assert conditions["Protected"] == ("True", "ParityInPlace")
    pods = wait_for("four pods", lambda: len(p := world.pods("story")) == 4 and p, WAIT_S)
    assert pods == {f"story-{member['index']}-1": member["node"] for member in status["members"]}
    wait_for("the scheduler to agree", lambda: world.scheduled("story") == pods, WAIT_S)
    kinds = ("service/story", "serviceaccount/story-trainer", "role/story-trainer")
    for each in (*kinds, "rolebinding/story-trainer"):
        world.kubectl("get", each)
    world.told("story", "Scheduled", "epoch 1 begins")
    world.told("story", "Running", "4 ranks train in epoch 1 from the beginning")

    world.delete("story")
    key = f"{NAMESPACE}.story"
    wait_for("the memory to be free", lambda: not world.daemons.of(key), WAIT_S)
    wait_for("the pods to go", lambda: not world.pods("story"), WAIT_S)


def test_a_lost_rank_is_restarted_and_a_silent_node_replaced(world: World) -> None:
    world.cluster.apply(job("losses"))
    world.runs_in("losses", 1)
    world.daemons.lose_rank(f"{NAMESPACE}.losses", 2)
    status = world.runs_in("losses", 2)
    assert (status["restarts"], status["recoveries"]) == (1, 1)
    world.told("losses", "Recovering", "rank 2 lost; restart in place in epoch 2")

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
    log = tmp_path / "second.log"
    with OperatorProcess(cluster.kubeconfig, namespace, log, identity="replica-1") as second:
        assert "holdfast_operator_leader 0.0" in second.ask("/metrics")
        assert second.ask("/readyz") == "ok\n"
        lease = cluster.get("lease", "holdfast-operator", "-n", namespace)
        assert lease["spec"]["holderIdentity"] == "replica-0"
        assert world.operator.stop() == 0
        wait_for("the second to lead", lambda: "leader 1.0" in second.ask("/metrics"), WAIT_S)

        def port() -> int:
            target = cluster.get("endpointslice", "holdfast-control", "-n", namespace)
            return int(target["ports"][0]["port"])

        wait_for("daemons to be sent there", lambda: port() == second.control_port, WAIT_S)
    world.operator.start()


def test_a_job_that_cannot_be_carried_out_says_why_and_waits(world: World) -> None:
    template = {
        "spec": {"containers": [{"name": "t", "command": ["x"], "image": "i", "ports": [{}]}]}
    }
    world.cluster.apply(job("broken", trainer={"template": template}))
    status = world.until("broken", lambda s: s["phase"] == "Waiting")
    scheduled = next(c for c in status["conditions"] if c["type"] == "Scheduled")
    assert (scheduled["status"], scheduled["reason"]) == ("False", "InvalidTemplate")
    assert "containerPort" in scheduled["message"]
    assert world.pods("broken") == {}
    world.told("broken", "InvalidTemplate", "containerPort")
    world.kubectl("patch", "moejob", "broken", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    world.cluster.apply(job("broken", suspend=True))
    world.cluster.apply(job("broken", suspend=False))
    world.runs_in("broken", 1)


def test_a_job_without_room_shows_a_condition_and_makes_no_pods(world: World) -> None:
    template = job("x")["spec"]["trainer"]["template"]
    template["spec"]["nodeSelector"] = {"accelerator": "none-has-this"}
    world.cluster.apply(job("roomless", trainer={"template": template}))
    status = world.until("roomless", lambda s: s["phase"] == "Waiting")
    assert status["problem"].startswith("0 of 4 nodes")
    assert world.pods("roomless") == {}


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
        *("NAME", "STATE", "READY", "DESIRED", "STEP", "PROTECTED", "RESTARTS", "AGE")
    ]
    assert words[1].split()[:4] == ["columns", "Running", "4/4", "4"]
    raw = f"/apis/holdfast.dev/v1alpha1/namespaces/{NAMESPACE}/moetrainingjobs/columns/scale"
    scale = json.loads(world.cluster.kubectl("get", "--raw", raw))
    assert scale["status"]["selector"] == "holdfast.dev/job=columns"
    assert scale["status"]["replicas"] == 4
