"""A real Kubernetes on this machine, as tests use it: start it, talk to it, break it, end it.

    with Cluster(nodes=5) as cluster:
        cluster.load_image(archive)
        cluster.apply(document)
        cluster.kill_node("node2")

A cluster occupies a slot, which gives it names and addresses. Slot 0 belongs to `make cluster`;
tests take the first free one of the others, so that both run side by side. A process that starts a
cluster in a slot first clears what a crashed predecessor left there, and only that: processes are
known by pid and start time, everything else by the slot's name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import binaries
import breakage
import cgroups
import evidence
import images
import slots
from machine import STATE, ClusterError, require, run, search_path, wait_for
from network import NODES_MAX, Network
from nodes import Node
from processes import Processes
from servers import ControlPlane

Document = Mapping[str, Any]

_READY_S, _SERVED_S = 120.0, 60.0
_SIMULATED = {"kwok.x-k8s.io/node": "fake"}
_INOTIFY_INSTANCES = 2048
"""Each kubelet and containerd takes several; the usual limit is 128 for all of them."""


class Cluster:
    """Nodes `node1` … `nodeN` and their control plane. A context manager that owns all of it."""

    def __init__(
        self,
        nodes: int = 5,
        *,
        slot: int | None = None,
        attach: bool = False,
        node_grace_s: int = 50,
    ) -> None:
        """
        Args:
            nodes: how many to start.
            slot: which slot to take; the first free one when None.
            attach: use what runs in the slot already, instead of taking it; see `running`.
            node_grace_s: how long a node whose kubelet is silent stays Ready. Simulated nodes
                renew their leases five times within it, which thousands should not do often.

        Raises:
            ClusterError: when the machine lacks something, or the slot is taken; says what.
        """
        if not 1 <= nodes <= NODES_MAX:
            raise ClusterError(f"{nodes} nodes: a cluster has 1 to {NODES_MAX}")
        require()
        self.binaries = binaries.build()
        self._pause_archive = images.build_pause(self.binaries)
        self._held = ExitStack()
        if attach and slot is not None:
            self.slot = slot
        else:
            self.slot, lock = slots.take(slot)
            self._held.enter_context(lock)
        self.home = STATE / str(self.slot)
        self.network = Network(self.slot)
        path = f"{self.binaries.search_path}:{search_path()}"
        self.processes = Processes(self.home / "processes", self.home / "logs", path)
        self.control_plane = ControlPlane(
            home=self.home / "control-plane",
            network=self.network,
            binaries=self.binaries,
            processes=self.processes,
            node_grace_s=node_grace_s,
        )
        self.nodes = {f"node{number}": self._node(number) for number in range(1, nodes + 1)}

    @classmethod
    def running(cls, slot: int = slots.PERSONS_SLOT) -> Self:
        """The cluster that runs in `slot`; the process that started it goes on owning it.

        Raises:
            ClusterError: when there is none.
        """
        with suppress(OSError, ValueError):
            count = json.loads((STATE / str(slot) / "nodes.json").read_text())
            found = cls(count, slot=slot, attach=True)
            if found.processes.find("kube-apiserver") is not None:
                return found
        raise ClusterError("no cluster is running: start one with `make cluster`")

    # ------------------------------------------------------------------------- beginning and end

    def __enter__(self) -> Self:
        self._held.enter_context(slots.sigterm_interrupts())
        try:
            self.start()
        except BaseException:
            self._end("start")
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end("end" if kind is not None else None)

    def _end(self, logs: str | None) -> None:
        with self._held:
            try:
                if logs is not None:
                    self.collect_logs(logs)
            finally:
                self.stop()

    def start(self) -> None:
        """Start everything; returns when every node is Ready.

        Raises:
            ClusterError: when something does not start.
        """
        self.stop()
        _raise_inotify_limit()
        self.home.mkdir(parents=True)
        (self.home / "nodes.json").write_text(json.dumps(len(self.nodes)))
        for name in ("kubectl", "helm"):
            self.commands.mkdir(exist_ok=True)
            (self.commands / name).symlink_to(self.binaries.find(name))
        self.network.create(len(self.nodes))
        self.control_plane.start(list(self.nodes))
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            list(pool.map(Node.boot, self.nodes.values()))
        self.wait_ready()

    def stop(self) -> None:
        """End all processes in this slot, also those of others, and delete its files."""
        homes = self.home.glob("node*[0-9]")
        nodes = [self._node(int(home.name.removeprefix("node"))) for home in homes]
        for node in nodes:
            if node.first_process is not None:
                node.kill()
        self.processes.end_all()
        self.network.destroy()
        breakage.release_disks(self.home)
        for node in nodes:
            node.erase()
        shutil.rmtree(self.home, ignore_errors=True)

    def _node(self, number: int) -> Node:
        return Node(
            number=number,
            home=self.home / f"node{number}",
            network=self.network,
            binaries=self.binaries,
            processes=self.processes,
            kubeconfigs=self.control_plane.kubeconfigs,
            pause_archive=self._pause_archive,
        )

    # --------------------------------------------------------------------------------- talking

    @property
    def kubeconfig(self) -> Path:
        """The administrator's; works from this host, which reaches nodes and pods as well."""
        return self.control_plane.kubeconfig

    @property
    def audit_log(self) -> Path:
        """The API server's; see `audit.Audit`."""
        return self.control_plane.audit_log

    @property
    def commands(self) -> Path:
        """Folder with kubectl and helm, for PATH."""
        return self.home / "bin"

    def kubectl(self, *words: str | Path, stdin: str | None = None) -> str:
        """Run kubectl as administrator; its output.

        Raises:
            ClusterError: with its output, when it fails.
        """
        return run(*self._kubectl(), *words, stdin=stdin)

    def get(self, *words: str) -> Any:
        """The object, or the list of objects, that `kubectl get` finds; an error if it does not."""
        return json.loads(self.kubectl("get", *words, "-o", "json"))

    def helm(self, *words: str | Path) -> str:
        """Run helm as administrator; its output."""
        return run(self.binaries.find("helm"), "--kubeconfig", self.kubeconfig, *words)

    def apply(self, *documents: Document | str | Path) -> None:
        """Apply objects, YAML text or files.

        Raises:
            ClusterError: with the API server's words, when it refuses one.
        """
        for document in documents:
            match document:
                case Path():
                    text = document.read_text()
                case str():
                    text = document
                case _:
                    text = json.dumps(document)
            self.kubectl("apply", "-f", "-", stdin=text)

    def wait_served(self) -> None:
        """Return when the API server serves every resource that is defined.

        `kubectl wait` fails where a definition has no conditions yet.

        Raises:
            ClusterError: when it does not within a minute.
        """

        def served() -> bool:
            found = self.get("crd")["items"]
            return all(_is_established(d) for d in found if not _is_going(d))

        wait_for("resources to be established", served, _SERVED_S)

    def load_image(self, *archives: Path) -> None:
        """Import OCI archives on every node that has power."""
        there = [node for node in self.nodes.values() if node.first_process is not None]
        with ThreadPoolExecutor(len(there) or 1) as pool:
            for archive in archives:
                list(pool.map(Node.load, there, [archive] * len(there)))

    def wait_ready(
        self,
        names: Iterable[str] | None = None,
        *,
        since: datetime | None = None,
        timeout_s: float = _READY_S,
    ) -> None:
        """Return when the nodes, all by default, are Ready, on a word given after `since`.

        Raises:
            ClusterError: when they are not within `timeout_s`.
        """
        wanted = set(self.nodes if names is None else names)

        def ready() -> bool:
            with suppress(ClusterError):
                items = self.get("nodes")["items"]
                return wanted <= {n["metadata"]["name"] for n in items if _is_ready(n, since)}
            return False

        wait_for(f"{', '.join(sorted(wanted))} to be Ready", ready, timeout_s)

    def collect_logs(self, name: str) -> Path:
        """Gather logs, objects and events in `build/cluster-logs/<name>`."""
        return evidence.collect(name, self.home, [str(word) for word in self._kubectl()])

    def _kubectl(self) -> tuple[str | Path, ...]:
        return (self.binaries.find("kubectl"), "--kubeconfig", self.kubeconfig)

    # -------------------------------------------------------------------------------- breaking

    def kill_node(self, name: str) -> None:
        """Cut a node's power: its kubelet, pods and memory are gone when this returns."""
        self.nodes[name].kill()

    def boot_node(self, name: str) -> None:
        """Give a node its power back; returns when its new kubelet says Ready."""
        since = datetime.now(UTC).replace(microsecond=0)
        self.nodes[name].boot()
        self.wait_ready([name], since=since)

    def partition(self, name: str) -> None:
        """Cut a node off the network; everything on it runs on."""
        self.network.cut(self.nodes[name].number)

    def heal(self, name: str) -> None:
        """Undo `partition`."""
        self.network.heal(self.nodes[name].number)

    def fill_memory(
        self, name: str, leave_bytes: int = 0, path: str = breakage.MEMORY
    ) -> AbstractContextManager[Path]:
        """While it lasts, the file system at `path` of a node has but `leave_bytes` left."""
        return breakage.fill_memory(self.nodes[name], leave_bytes, path)

    def slow_disk(self, name: str, path: str, bytes_s: int) -> AbstractContextManager[None]:
        """While it lasts, a node has a slow disk at `path`, a folder below /run/holdfast."""
        return breakage.slow_disk(self.nodes[name], path, bytes_s)

    @contextmanager
    def disk_of_its_own(self, name: str) -> Iterator[str]:
        """While it lasts, all that a node keeps is on a block device, which it yields: for
        `breakage.throttled`. The node loses its power before and after."""
        self.kill_node(name)
        try:
            with breakage.disk_of_its_own(self.nodes[name]) as device:
                self.boot_node(name)
                try:
                    yield device
                finally:
                    self.kill_node(name)
        finally:
            self.boot_node(name)

    def run_on_node(self, name: str, *words: str | Path) -> str:
        """Run a command in the namespaces of a node; its output."""
        return run(*self.nodes[name].command(*words))

    def pod_processes(self, pod: str, namespace: str = "default") -> list[int]:
        """Pids of all processes of a pod, as this host sees them: for signals from outside."""
        found = self.get("pod", pod, "-n", namespace)
        node = self.nodes[found["spec"]["nodeName"]]
        return cgroups.processes(node.group, f"pod{found['metadata']['uid']}")

    def simulate_nodes(self, count: int) -> None:
        """Add nodes `sim-1` … that KWOK plays; pods must tolerate `kwok.x-k8s.io/node=fake`."""
        if self.processes.find("kwok") is None:
            self.control_plane.start_kwok()
        names = [f"sim-{number}" for number in range(1, count + 1)]
        items = [simulated_node(name) for name in names]
        self.apply({"apiVersion": "v1", "kind": "List", "items": items})
        self.wait_ready(names)

    def stop_simulation(self) -> None:
        """Take the simulated nodes away, with the pods on them."""
        self.processes.end("kwok")
        self.kubectl("delete", "nodes", "-l", ",".join(f"{k}={v}" for k, v in _SIMULATED.items()))


def simulated_node(name: str) -> dict[str, Any]:
    """A node that KWOK plays, once `simulate_nodes` has started it."""
    taint = {"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": _SIMULATED,
            "labels": {"kubernetes.io/hostname": name, **_SIMULATED},
        },
        "spec": {"taints": [taint]},
    }


def _is_ready(node: Document, since: datetime | None) -> bool:
    for condition in node.get("status", {}).get("conditions", []):
        if condition["type"] == "Ready" and condition["status"] == "True":
            beat_at = datetime.fromisoformat(condition["lastHeartbeatTime"])
            return since is None or beat_at >= since
    return False


def _is_going(item: Document) -> bool:
    return "deletionTimestamp" in item["metadata"]


def _is_established(definition: Document) -> bool:
    conditions = definition.get("status", {}).get("conditions") or ()
    return any((c["type"], c["status"]) == ("Established", "True") for c in conditions)


def _raise_inotify_limit() -> None:
    limit = Path("/proc/sys/fs/inotify/max_user_instances")
    if int(limit.read_text()) < _INOTIFY_INSTANCES:
        limit.write_text(str(_INOTIFY_INSTANCES))
