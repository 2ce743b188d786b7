"""The operator as a process, before a real API server and scheduler, with daemons that speak
Control and have no memory behind them.

The trainers' image does not exist: what pods do is not what is tested with it. A test module takes
the fixtures `namespace` and `world` from here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from control_daemons import ControlDaemons
from holdfast_system import Job
from machine import ClusterError, wait_for
from operator_process import NODE_RECORD, OperatorProcess

from holdfast_operator.kube.pods.manifests import SOCKETS_PATH

RESOURCE = Path(__file__).resolve().parents[3] / "crds" / "holdfast.dev_moetrainingjobs.yaml"
NAMESPACE = "operator-api"
NODES = ("node1", "node2", "node3", "node4", "node5")
WAIT_S = 60.0

Document = dict[str, Any]

DETECTION: Document = {"heartbeatSeconds": 0.5, "missedHeartbeats": 20}


def job(name: str, **spec: Any) -> Document:
    """Four members of one rank and a spare; ten seconds of silence make a lost node: the daemons
    are in the process of the test, which the machine may hold up."""
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "MoETrainingJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "nodes": 4,
            "parallelism": {"dp": 4, "ep": 4},
            "failurePolicy": {
                "spares": 1,
                "detection": DETECTION,
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

    def wait_event(self, name: str, reason: str, part: str = "") -> None:
        """Return once the job has an event with this reason, and `part` in its message."""
        wait_for(
            f"the event {reason} {part!r}",
            lambda: any(r == reason and part in m for r, m in self.events(name)),
            WAIT_S,
        )

    def node_failures(self) -> dict[str, list[str]]:
        """Node → the kinds of the failures that are recorded of it."""
        data = self.cluster.get("configmap", NODE_RECORD, "-n", NAMESPACE).get("data") or {}
        return {node: [each["kind"] for each in json.loads(text)] for node, text in data.items()}

    def delete(self, name: str) -> None:
        """Delete the job, and wait until it is gone."""
        self.kubectl("delete", "moejob", name, f"--timeout={WAIT_S:.0f}s")


@pytest.fixture(scope="module")
def namespace(cluster: Cluster) -> Iterator[str]:
    cluster.kubectl("apply", "-f", str(RESOURCE))
    cluster.wait_served()
    wait_for("the namespace, which others may have only just left", lambda: _made(cluster), WAIT_S)
    for node in NODES:
        # What a daemon's pod makes: a pod that cannot mount it takes minutes to be deleted.
        cluster.run_on_node(node, "mkdir", "-p", SOCKETS_PATH)
    yield NAMESPACE
    cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def _made(cluster: Cluster) -> bool:
    try:
        cluster.kubectl("create", "namespace", NAMESPACE)
    except ClusterError as error:
        if "AlreadyExists" in str(error):
            return False
        raise
    return True


@pytest.fixture
def world(
    cluster: Cluster, namespace: str, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[World]:
    """The parameter, if there is one, holds further options of the operator."""
    log, options = tmp_path / "operator.log", getattr(request, "param", ())
    with (
        OperatorProcess(cluster.kubeconfig, namespace, log, options=options) as operator,
        ControlDaemons(operator.control, NODES, cluster.kubeconfig, namespace) as daemons,
    ):
        world = World(cluster, operator, daemons)
        yield world
        for each in world.items("moejob"):
            world.delete(each["metadata"]["name"])
        print(log.read_text())
