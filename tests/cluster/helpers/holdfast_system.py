"""Holdfast on the test cluster: installed by helm, watched through the API, as its users do it."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import images
from cluster import Cluster
from machine import ROOT, ClusterError, wait_for

from holdfast_cli.commands.cluster_status import timed_events
from holdfast_cli.local import TimedEvent

NAMESPACE = "holdfast-system"
RELEASE = "holdfast"
CHART = ROOT / "charts" / "holdfast"
VALUES = {
    "operator.image": images.OPERATOR,
    "daemon.image": images.DAEMON,
    "image.pullPolicy": "IfNotPresent",
    "daemon.memory.budget": "768Mi",
    "daemon.memory.overhead": "320Mi",
    "daemon.updateStrategy.type": "OnDelete",
    "operator.resources.requests.cpu": "50m",
    "redis.enabled": "true",
    "redis.image": images.REDIS,
}
"""Our images, and what a machine of two cores that plays five nodes has to spare. No daemon is
replaced while a test looks at it; test_as_printed.py is about that."""

TIER = "/mnt/tier"
"""Durable storage of jobs: a folder of this machine, which all nodes share."""


class Holdfast:
    """The release on `cluster`."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def install(self, chart: Path = CHART, *, timeout_s: float = 180.0, **values: str) -> None:
        """Install or upgrade the chart; returns when its pods are ready.

        Args:
            values: more settings, with "__" for a dot: `redis__enabled="true"`.

        Raises:
            ClusterError: with helm's words.
        """
        tier = self.cluster.home / "shared" / "tier"
        tier.mkdir(parents=True, exist_ok=True)
        tier.chmod(0o777)
        storage = {
            "persistence.locations[0].prefix": TIER,
            "daemon.storage.volumes[0].name": "tier",
            "daemon.storage.volumes[0].hostPath.path": str(tier),
            "daemon.storage.volumeMounts[0].name": "tier",
            "daemon.storage.volumeMounts[0].mountPath": TIER,
        }
        chosen = (
            VALUES | storage | {name.replace("__", "."): value for name, value in values.items()}
        )
        settings = [word for name, value in chosen.items() for word in ("--set", f"{name}={value}")]
        self.cluster.helm(
            *("upgrade", "--install", RELEASE, chart, "--namespace", NAMESPACE),
            *(
                "--create-namespace",
                "--take-ownership",
                "--wait=legacy",
                "--timeout",
                f"{timeout_s:g}s",
                *settings,
            ),
        )

    def uninstall(self) -> None:
        self.cluster.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--wait")

    def daemon_on(self, node: str) -> str:
        """Name of the daemon's pod on `node`."""
        return self._pods("daemon", f"spec.nodeName={node}")[0]

    def daemon_set(self) -> dict[str, Any]:
        """The DaemonSet of the daemons."""
        found: dict[str, Any] = self.cluster.get("daemonset", "holdfast-daemon", "-n", NAMESPACE)
        return found

    def renewed(self) -> int:
        """How many daemons are of the newest version of their DaemonSet, as Kubernetes counts."""
        found = self.daemon_set()
        if found["status"].get("observedGeneration") != found["metadata"]["generation"]:
            return 0
        return int(found["status"].get("updatedNumberScheduled", 0))

    def change_daemons(self, word: str) -> None:
        """Make a new version of the daemons: `word` is in an annotation of their pods."""
        template = {"metadata": {"annotations": {"holdfast.dev/tests": word}}}
        patch = json.dumps({"spec": {"template": template}})
        words = ("daemonset", "holdfast-daemon", "-n", NAMESPACE, "--type=merge", "-p", patch)
        self.cluster.kubectl("patch", *words)

    def wait_daemon(self, node: str) -> None:
        """Return when the daemon on `node` is ready, on a node that may just have its power back.

        Raises:
            ClusterError: when it is not within two minutes.
        """

        def ready() -> bool:
            with suppress(ClusterError, IndexError):
                pod = self.cluster.get("pod", self.daemon_on(node), "-n", NAMESPACE)
                conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions", [])}
                there = "deletionTimestamp" not in pod["metadata"]
                return there and conditions.get("Ready") == "True"
            return False

        wait_for(f"the daemon on {node}", ready, 120.0)

    def metrics_of(self, node: str) -> str:
        """What the daemon on `node` exposes."""
        pod = self.cluster.get("pod", self.daemon_on(node), "-n", NAMESPACE)
        url = f"http://{pod['status']['podIP']}:7703/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return str(answer.read().decode())

    def volumes_on(self, node: str) -> list[dict[str, Any]]:
        """What the driver on `node` has recorded about the volumes that it has mounted."""
        found = []
        for record in self.cluster.nodes[node].path("/run/holdfast/volumes").iterdir():
            if record.suffix != ".new":  # is not all written yet
                with suppress(FileNotFoundError):  # its volume went meanwhile
                    found.append(json.loads(record.read_bytes()))
        return found

    def redis(self) -> list[str]:
        """Names of the pods of Redis: one, or none."""
        return self._pods("redis")

    def scale_redis(self, replicas: int) -> None:
        """Returns when there is none any more, or one that is ready."""
        words = ("deployment", "holdfast-redis", "-n", NAMESPACE)
        self.cluster.kubectl("scale", *words, f"--replicas={replicas}")
        wait_for("the pod of Redis", lambda: len(self.redis()) == replicas, 60.0)
        self.cluster.kubectl("rollout", "status", *words, "--timeout=60s")

    def operators(self) -> list[str]:
        """Names of the operator's pods."""
        return self._pods("operator")

    def leader(self) -> str:
        """Name of the operator's pod that leads; empty when none does."""
        with suppress(ClusterError):
            lease = self.cluster.get("lease", "holdfast-operator", "-n", NAMESPACE)
            return str(lease["spec"].get("holderIdentity") or "").partition("_")[0]
        return ""

    def wait_leader(self) -> str:
        """Name of the operator's pod that leads, once one does."""
        return wait_for("an operator to lead", self.leader, 60.0)

    def kill(self, pod: str, namespace: str = NAMESPACE) -> None:
        """SIGKILL every process of a pod, as a crash of its container does."""
        for pid in self.cluster.pod_processes(pod, namespace):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _pods(self, component: str, *fields: str) -> list[str]:
        selector = f"app.kubernetes.io/name=holdfast,app.kubernetes.io/component={component}"
        chosen = [word for field in fields for word in ("--field-selector", field)]
        found = self.cluster.get("pods", "-n", NAMESPACE, "-l", selector, *chosen)
        return [pod["metadata"]["name"] for pod in found["items"]]


class Job:
    """One `MoETrainingJob` of the cluster."""

    def __init__(self, cluster: Cluster, document: dict[str, Any]) -> None:
        self.cluster, self.document = cluster, document
        self.name: str = document["metadata"]["name"]
        self.namespace: str = document["metadata"].get("namespace", "default")

    def apply(self) -> None:
        self.cluster.apply(self.document)

    def delete(self) -> None:
        """Delete the job; returns when it is gone."""
        self.cluster.kubectl("delete", "moejob", self.name, "-n", self.namespace, "--timeout=120s")

    def patch(self, spec: dict[str, Any]) -> None:
        """Change the job's spec."""
        text = json.dumps({"spec": spec})
        self.cluster.kubectl(
            "patch", "moejob", self.name, "-n", self.namespace, "--type=merge", "-p", text
        )

    def status(self) -> dict[str, Any]:
        """The job's status; empty before the operator has written any."""
        found: dict[str, Any] = self.cluster.get("moejob", self.name, "-n", self.namespace)
        return found.get("status") or {}

    def wait(
        self, what: str, condition: Callable[[dict[str, Any]], bool], timeout_s: float
    ) -> dict[str, Any]:
        """Wait until the status is as wanted; returns it.

        Raises:
            ClusterError: when it is not within `timeout_s`, or the job has failed; with where it
                stands.
        """
        seen: dict[str, Any] = {}

        def probe() -> bool:
            with suppress(ClusterError):  # the API server is away with a partition
                seen.clear()
                seen.update(self.status())
            return bool(seen) and (condition(seen) or seen.get("phase") == "Failed")

        try:
            wait_for(what, probe, timeout_s)
        except ClusterError as error:
            raise ClusterError(f"{error}: {self._standing(seen)}") from error
        if not condition(seen):
            raise ClusterError(f"the job failed before {what}: {self._standing(seen)}")
        return seen

    def events(self) -> list[TimedEvent]:
        """All events of the job, oldest first."""
        chosen = f"regarding.name={self.name},regarding.kind=MoETrainingJob"
        found = self.cluster.get(
            "events.events.k8s.io", "-n", self.namespace, "--field-selector", chosen
        )
        return timed_events([item for item in found["items"] if item.get("eventTime")])

    def condition(self, kind: str) -> dict[str, Any]:
        """A condition of the job; empty when there is none."""
        found = self.status().get("conditions", ())
        return next((each for each in found if each["type"] == kind), {})

    def member(self, index: int) -> tuple[str, str]:
        """(pod, node) of a member."""
        member = next(m for m in self.status()["members"] if m["index"] == index)
        return member["pod"], member["node"]

    def rank_process(self, index: int) -> int:
        """Pid, as this host sees it, of a member's first rank: it has the arena mapped.

        Raises:
            ClusterError: when there is none within a while.
        """
        pod, _ = self.member(index)

        def probe() -> int | None:
            pids = self.cluster.pod_processes(pod, self.namespace)
            return next((pid for pid in pids if _has_arena(pid)), None)

        found = wait_for(f"the rank of member {index} to map its arena", probe, 60.0)
        assert found is not None
        return found

    def _standing(self, status: dict[str, Any]) -> str:
        last = "; ".join(f"{event.reason}: {event.message}" for event in self.events()[-5:])
        steps = f"step {status.get('step')}, protected {status.get('protectedStep')}"
        said = "; ".join(
            f"{each['type']} is {each['status']}: {each['message']}"
            for each in status.get("conditions", ())
            if each.get("message")
        )
        return f"{status.get('phase')} at {steps}: {said}; last events: {last}"


def _has_arena(pid: int) -> bool:
    with suppress(OSError):
        return "/arena" in Path(f"/proc/{pid}/maps").read_text()
    return False
