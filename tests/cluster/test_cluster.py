"""The test cluster itself: that it is a Kubernetes, and that what it breaks is broken."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import images
import pytest
from audit import Audit
from cluster import Cluster
from jobs import lend_torch
from machine import ClusterError, wait_for

from holdfast_cli.local.processes import ProcessId, is_alive, send

HELPERS = Path(__file__).parent / "helpers"
NAMESPACE = "cluster-test"
KUBELET_PORT = 10250
WAIT_S = 180.0


class Pods:
    """Pods of the test, in its namespace."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def start(self, name: str, image: str, *words: str, **spec: Any) -> None:
        container: dict[str, Any] = {"name": "main", "image": image, "imagePullPolicy": "Never"}
        if words:
            container["command"] = list(words)
        container |= spec.pop("container", {})
        spec = {"terminationGracePeriodSeconds": 0, **spec}
        self.cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"app": name}},
                "spec": {"restartPolicy": "Never", "containers": [container], **spec},
            }
        )

    def get(self, name: str) -> Any:
        return self.cluster.get("pod", name, "-n", NAMESPACE)

    def wait_phase(self, name: str, *phases: str) -> Any:
        def reached() -> Any:
            pod = self.get(name)
            return pod if pod["status"]["phase"] in phases else None

        return wait_for(f"pod {name} to be {' or '.join(phases)}", reached, WAIT_S)

    def printed(self, name: str) -> str:
        """What a pod printed that ran to its end; it must have ended well."""
        pod = self.wait_phase(name, "Succeeded", "Failed")
        printed = self.cluster.kubectl("logs", name, "-n", NAMESPACE)
        assert pod["status"]["phase"] == "Succeeded", printed
        return printed

    def python(self, name: str, image: str, code: str, **spec: Any) -> str:
        self.start(name, image, "python", "-c", code, **spec)
        return self.printed(name)


@pytest.fixture(scope="module")
def pods(cluster: Cluster) -> Iterator[Pods]:
    cluster.kubectl("create", "namespace", NAMESPACE)
    yield Pods(cluster)
    cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=true")


# -------------------------------------------------------------------------------- it is Kubernetes


def test_every_node_is_ready_and_runs_the_version_that_was_built(cluster: Cluster) -> None:
    nodes = cluster.get("nodes")["items"]
    assert {n["metadata"]["name"] for n in nodes} == set(cluster.nodes)
    server = json.loads(cluster.kubectl("version", "-o", "json"))["serverVersion"]["gitVersion"]
    assert {n["status"]["nodeInfo"]["kubeletVersion"] for n in nodes} == {server}


def test_the_daemon_image_runs_without_root(pods: Pods) -> None:
    pods.start("help", images.DAEMON, container={"args": ["--help"]})
    assert "--budget" in pods.printed("help")
    code = "import os; print(os.getuid(), os.path.exists('/etc/pip.conf'))"
    assert pods.python("whoami", images.DAEMON, code).split() == ["65532", "False"]


def test_the_operator_image_has_what_the_operator_needs_and_no_more(pods: Pods) -> None:
    code = (
        "import importlib.util as u, kopf, kubernetes.aio, holdfast_operator.reconciler.reconcile\n"
        "print([m for m in ('matplotlib', 'pip', 'redis', 'rich', 'torch') if u.find_spec(m)])"
    )
    assert pods.python("needs", images.OPERATOR, code).strip() == "[]"


def test_the_trainer_image_uses_the_torch_of_this_machine(pods: Pods) -> None:
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "containers": [
            {
                "name": "main",
                "image": images.TRAINER,
                "command": ["python", "examples/train_moe.py", "--help"],
            }
        ],
    }
    lend_torch(spec)
    metadata = {"name": "trainer", "namespace": NAMESPACE}
    pods.cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    assert "--steps" in pods.printed("trainer")


def test_names_of_services_and_pods_resolve_and_the_host_reaches_pods(pods: Pods) -> None:
    pods.start("web", images.DAEMON, "python", "-m", "http.server", "8000", "-d", "/opt/holdfast")
    pods.cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "web", "namespace": NAMESPACE},
            "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8000}]},
        }
    )
    address = pods.wait_phase("web", "Running")["status"]["podIP"]

    def answers() -> bool:
        with suppress(OSError), urllib.request.urlopen(f"http://{address}:8000", timeout=2) as page:
            return b"venv" in page.read()
        return False

    wait_for("the host to reach the pod", answers, WAIT_S)
    # The name and the address of a new service reach each node a moment later.
    code = (
        "import socket, time, urllib.request\n"
        "print(socket.gethostbyname('kubernetes.default.svc.cluster.local'))\n"
        "page, until = None, time.monotonic() + 60\n"
        "while page is None:\n"
        "    try: page = urllib.request.urlopen('http://web', timeout=10).read()\n"
        "    except OSError:\n"
        "        if time.monotonic() > until: raise\n"
        "        time.sleep(0.1)\n"
        "print(b'venv' in page)"
    )
    assert pods.python("dns", images.DAEMON, code).split() == ["10.96.0.1", "True"]


def test_a_pod_is_known_by_its_token_and_may_do_what_its_role_allows(pods: Pods) -> None:
    audience = "holdfast.dev/daemon"
    token = {"serviceAccountToken": {"path": "token", "audience": audience}}
    code = (
        "import json, os, ssl, urllib.error, urllib.request\n"
        "home = '/var/run/secrets/kubernetes.io/serviceaccount/'\n"
        "request = urllib.request.Request('https://kubernetes.default.svc/api/v1/pods',\n"
        "    headers={'Authorization': 'Bearer ' + open(home + 'token').read()})\n"
        "try: urllib.request.urlopen(\n"
        "    request, context=ssl.create_default_context(cafile=home + 'ca.crt'))\n"
        "except urllib.error.HTTPError as error: print(error.code)\n"
        "print(open('/token/token').read())"
    )
    printed = pods.python(
        "token",
        images.DAEMON,
        code,
        volumes=[{"name": "token", "projected": {"sources": [token]}}],
        container={"volumeMounts": [{"name": "token", "mountPath": "/token"}]},
    )
    refused, own = printed.split()
    assert refused == "403"
    review = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": own, "audiences": [audience]},
    }
    asked = pods.cluster.kubectl(
        "create", "-o", "json", "-f", "-", "--validate=false", stdin=json.dumps(review)
    )
    status = json.loads(asked)["status"]
    assert status["authenticated"] and status["audiences"] == [audience]
    assert status["user"]["username"] == f"system:serviceaccount:{NAMESPACE}:default"
    assert status["user"]["extra"]["authentication.kubernetes.io/pod-name"] == ["token"]


def test_a_memory_limit_holds(pods: Pods) -> None:
    limits = {"limits": {"memory": "64Mi"}}
    code = "x = b'x' * (256 << 20)"
    pods.start("greedy", images.DAEMON, "python", "-c", code, container={"resources": limits})
    status = pods.wait_phase("greedy", "Failed", "Succeeded")["status"]
    assert status["containerStatuses"][0]["state"]["terminated"]["reason"] == "OOMKilled"


def test_simulated_nodes_run_pods(pods: Pods) -> None:
    pods.cluster.simulate_nodes(3)
    tolerate = {"key": "kwok.x-k8s.io/node", "operator": "Exists"}
    pods.start("simulated", "no/such-image", nodeName="sim-2", tolerations=[tolerate])
    pods.wait_phase("simulated", "Running")
    pods.cluster.kubectl("delete", "pod", "simulated", "-n", NAMESPACE)
    pods.cluster.stop_simulation()
    assert {n["metadata"]["name"] for n in pods.cluster.get("nodes")["items"]} == set(
        pods.cluster.nodes
    )


# --------------------------------------------------------------------------- what breaks is broken


def _is_reachable(cluster: Cluster, name: str) -> bool:
    address = cluster.network.address_of(cluster.nodes[name].number)
    with suppress(OSError), socket.create_connection((address, KUBELET_PORT), timeout=1):
        return True
    return False


def test_a_node_loses_its_memory_with_its_power_and_keeps_its_disk(pods: Pods) -> None:
    node = pods.cluster.nodes["node2"]
    command = ("python", "-c", "import signal; signal.pause()")
    pods.start("durable", images.DAEMON, *command, nodeName="node2", restartPolicy="Always")
    pods.wait_phase("durable", "Running")
    before = pods.cluster.pod_processes("durable", NAMESPACE)
    assert before
    node.path("/run/holdfast/snapshot").write_text("in memory")
    pods.cluster.kill_node("node2")
    assert not any(Path(f"/proc/{pid}").exists() for pid in before)
    assert not _is_reachable(pods.cluster, "node2")
    pods.cluster.boot_node("node2")
    assert not node.path("/run/holdfast/snapshot").exists()

    def started_again() -> bool:
        statuses = pods.get("durable")["status"]["containerStatuses"]
        return bool(statuses[0]["restartCount"] == 1 and statuses[0]["ready"])

    wait_for("the pod to be started again", started_again, WAIT_S)


def test_a_partition_ends_all_talk_and_nothing_else(cluster: Cluster) -> None:
    first = cluster.nodes["node3"].first_process
    other = cluster.network.address_of(4)
    cluster.partition("node3")
    try:
        assert not _is_reachable(cluster, "node3")
        assert _is_reachable(cluster, "node4")
        with pytest.raises(ClusterError):
            cluster.run_on_node(
                "node3", "timeout", "2", "bash", "-c", f"</dev/tcp/{other}/{KUBELET_PORT}"
            )
        assert cluster.nodes["node3"].first_process == first
    finally:
        cluster.heal("node3")
    wait_for("node3 to be reachable", lambda: _is_reachable(cluster, "node3"), WAIT_S)


def test_a_full_memory_takes_no_more_and_then_does_again(cluster: Cluster) -> None:
    cluster.run_on_node("node4", "mkdir", "-p", "/run/holdfast/tests")
    mount = ("mount", "-t", "tmpfs", "-o", "size=8m", "test", "/run/holdfast/tests")
    cluster.run_on_node("node4", *mount)
    try:
        file = cluster.nodes["node4"].path("/run/holdfast/tests") / "more"
        with cluster.fill_memory("node4", leave_bytes=1 << 20, path="/run/holdfast/tests"):
            file.write_bytes(bytes(1 << 20))
            with pytest.raises(OSError) as raised:
                file.write_bytes(bytes(2 << 20))
            assert raised.value.errno == errno.ENOSPC
        file.write_bytes(bytes(2 << 20))
    finally:
        cluster.run_on_node("node4", "umount", "/run/holdfast/tests")
    with (
        pytest.raises(ClusterError, match="nothing mounted"),
        cluster.fill_memory("node4", path="/run/holdfast/tests"),
    ):
        pass


def test_a_slow_disk_is_slow(cluster: Cluster) -> None:
    with cluster.slow_disk("node5", "/run/holdfast/slow", bytes_s=1 << 20):
        file = cluster.nodes["node5"].path("/run/holdfast/slow/file")
        started = time.monotonic()
        with file.open("wb") as stream:
            stream.write(bytes(2 << 20))
            os.fsync(stream.fileno())
        assert time.monotonic() - started > 1.0
    assert not cluster.nodes["node5"].path("/run/holdfast/slow/file").exists()


# ------------------------------------------------------------------------------- it ends after all

OWNER = """
import sys
from cluster import Cluster
with Cluster(nodes=1) as cluster:
    print(cluster.slot, flush=True)
    sys.stdin.read()
"""


def _start_owner() -> tuple[subprocess.Popen[str], Cluster, list[ProcessId]]:
    """Another process with a cluster of its own; its processes."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        cwd=HELPERS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    line = owner.stdout.readline()
    assert line, f"the cluster did not start: {owner.wait()}"
    cluster = Cluster.running(int(line))
    found = map(cluster.processes.find, cluster.processes.names())
    return owner, cluster, [process for process in found if process is not None]


def _end(owner: subprocess.Popen[str], number: int) -> None:
    owner.send_signal(number)
    with owner:
        owner.wait(60)


def test_sigterm_of_its_owner_ends_a_cluster() -> None:
    owner, cluster, processes = _start_owner()
    assert len(processes) == 6
    _end(owner, signal.SIGTERM)
    assert not any(map(is_alive, processes))
    assert not cluster.home.exists()
    assert not cluster.network.exists()


def test_what_a_crashed_owner_left_is_cleared_and_nothing_else(cluster: Cluster) -> None:
    owner, crashed, processes = _start_owner()
    _end(owner, signal.SIGKILL)
    assert all(map(is_alive, processes))
    # A record of a process that is not its own: the same pid, another start.
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        (crashed.processes.records / "bystander").write_text(json.dumps([bystander.pid, 1]))
        with Cluster(nodes=1, slot=crashed.slot) as heir:
            assert not any(map(is_alive, processes))
            assert heir.get("nodes")["items"]
        assert bystander.poll() is None
        assert cluster.get("nodes")["items"]
    finally:
        bystander.kill()
        bystander.wait()
        for process in processes:
            send(process, signal.SIGKILL)


def test_a_machine_without_go_gets_one_sentence() -> None:
    command = [sys.executable, "cli.py", "up"]
    done = subprocess.run(
        command, cwd=HELPERS, env={"PATH": "/nowhere"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "The test cluster compiles Kubernetes: install Go 1.26 or newer (https://go.dev/dl)."
    ]


def test_an_audit_may_begin_in_the_middle_of_a_line(tmp_path: Path) -> None:
    """The API server writes while a test looks, and no line is half written for long."""
    log = tmp_path / "audit.log"
    first, second, third = (_logged(verb).encode() for verb in ("get", "list", "watch"))
    half = len(second) // 2
    log.write_bytes(first + second[:half])
    within, before = Audit(log), first + second
    log.write_bytes(before)
    between = Audit(log)
    log.write_bytes(before + third + first[:half])
    for audit in (within, between):
        assert [request.permission.verb for request in audit.requests("team:mine")] == ["watch"]


def _logged(verb: str) -> str:
    entry = {
        "verb": verb,
        "user": {"username": "system:serviceaccount:team:mine"},
        "objectRef": {"resource": "pods", "namespace": "team"},
        "responseStatus": {"code": 200},
    }
    return json.dumps(entry) + "\n"
