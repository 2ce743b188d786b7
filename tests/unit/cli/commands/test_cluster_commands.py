"""Commands for jobs in a cluster, against an API server that keeps objects, and a kubectl that runs
a pod's commands here."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from prometheus_client.exposition import generate_latest

from holdfast_cli.commands import cluster_profile
from holdfast_cli.main import main
from holdfast_daemon.metrics import DaemonMetrics

JOBS = "/apis/holdfast.dev/v1alpha1/namespaces/team-a/moetrainingjobs"
JOB = f"{JOBS}/llm"
PODS = "/api/v1/namespaces/team-a/pods"
SYSTEM = "/api/v1/namespaces/holdfast-system"
DAEMON_SETS = "/apis/apps/v1/namespaces/holdfast-system/daemonsets"

Object = dict[str, Any]


def pod(member: int) -> Object:
    return {
        "metadata": {
            "name": f"llm-{member}-1",
            "uid": f"u{member}",
            "labels": {"holdfast.dev/member": str(member)},
        },
        "spec": {"containers": [{"name": "trainer"}]},
        "status": {"containerStatuses": [{"name": "trainer", "state": {"running": {}}}]},
    }


class ApiServer(ThreadingHTTPServer):
    """Objects by path. A patch that asks for a copy has one stored at once, and one that asks for a
    failed job to go on has it go on."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        members = [{"index": n, "pod": f"llm-{n}-1", "node": f"n{n}"} for n in range(2)]
        self.objects: dict[str, Object] = {
            JOB: {
                "metadata": {"name": "llm", "namespace": "team-a"},
                "spec": {
                    "nodes": 2,
                    "nprocPerNode": 2,
                    "persistence": {"uri": "s3://b"},
                    "trainer": {},
                },
                "status": {"phase": "Running", "protected": "2.8", "members": members},
            },
            **{f"{PODS}/llm-{n}-1": pod(n) for n in range(2)},
            PODS: {"items": [pod(1), pod(0)]},
        }
        self.changes: list[tuple[str, str]] = []
        self.conflicts = 0
        """Number of writes before which somebody else writes the same object."""
        self.queries: list[dict[str, list[str]]] = []
        self.texts: dict[str, Callable[[], bytes]] = {}
        """Path → what makes the text there, for each request."""

    @property
    def job(self) -> Object:
        return self.objects[JOB]


class _Handler(BaseHTTPRequestHandler):
    server: ApiServer

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _path(self) -> str:
        parts = urlsplit(self.path)
        self.server.queries.append(parse_qs(parts.query))
        return parts.path

    def do_GET(self) -> None:
        path = self._path()
        if path.endswith("/log"):
            self._answer(200, f"hello of {path.split('/')[-2]}\nlast".encode())
        elif path in self.server.texts:
            self._answer(200, self.server.texts[path]())
        elif path in self.server.objects:
            self._answer(200, json.dumps(self.server.objects[path]).encode())
        else:
            self._answer(404, b'{"message": "there is no such thing"}')

    def do_PATCH(self) -> None:
        path = self._path()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.changes.append(("patch", json.dumps(body)))
        found = self.server.objects[path]
        found["spec"] |= body.get("spec", {})
        asked = body.get("metadata", {}).get("annotations", {})
        if "holdfast.dev/persist" in asked:
            found["status"]["persisted"] = found["status"]["protected"]
        if "holdfast.dev/resume" in asked:
            found["status"]["phase"] = "Starting"
        self._answer(200, json.dumps(found).encode())

    def do_PUT(self) -> None:
        path = self._path()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        found = self.server.objects[path]["metadata"]
        self.server.changes.append(("put", path))
        if self.server.conflicts:
            self.server.conflicts -= 1
            found["resourceVersion"] += "1"
        if body["metadata"]["resourceVersion"] != found["resourceVersion"]:
            self._answer(409, b'{"message": "it has changed", "reason": "Conflict"}')
            return
        self.server.objects[path] = body
        self._answer(200, json.dumps(body).encode())

    def do_DELETE(self) -> None:
        self.server.changes.append(("delete", self._path()))
        self._answer(200, b"{}")

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    with ApiServer() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{found.server_port}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {}}],
        }
        (tmp_path / "config").write_text(json.dumps(config))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        yield found
        found.shutdown()
        thread.join()


def test_a_job_is_suspended_and_resumed_once(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("suspend", "suspend", "resume"):
        assert main([command, "-n", "team-a", "llm"]) == 0
    assert [json.loads(body)["spec"]["suspend"] for _, body in server.changes] == [True, False]
    assert "nothing has changed" in capsys.readouterr().out
    for command in ("suspend", "resume"):
        server.job["status"]["phase"] = "Complete"
        assert main([command, "-n", "team-a", "llm"]) == 2
        assert "job team-a/llm has ended: Complete" in capsys.readouterr().err


def test_a_failed_job_that_keeps_its_snapshots_goes_on(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.job["spec"]["suspend"] = True
    server.job["status"] |= {"phase": "Failed", "epoch": 3, "keptUntil": "2026-01-01T04:00:00Z"}
    assert main(["resume", "-n", "team-a", "llm"]) == 0
    ((_, body),) = server.changes
    assert list(json.loads(body)["metadata"]["annotations"]) == ["holdfast.dev/resume"]
    assert server.job["spec"]["suspend"] is False
    assert "it resumes from its newest protected generation" in capsys.readouterr().out


def test_a_failed_job_whose_snapshots_were_freed_is_not_resumed(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.job["status"] |= {"phase": "Failed", "epoch": 3}
    assert main(["resume", "-n", "team-a", "llm"]) == 2
    error = capsys.readouterr().err
    assert "no longer in memory" in error and "it starts from the beginning" in error
    server.job["status"]["persisted"] = "2.5"
    assert main(["resume", "-n", "team-a", "llm"]) == 2
    assert "it starts from generation 2.5 in durable storage" in capsys.readouterr().err
    assert main(["persist", "-n", "team-a", "llm"]) == 2
    assert server.changes == []


def test_a_failed_job_that_never_had_its_nodes_tries_again(server: ApiServer) -> None:
    server.job["status"] = {"phase": "Failed", "epoch": 0}
    assert main(["resume", "-n", "team-a", "llm"]) == 0


def test_a_failed_job_is_persisted_while_it_keeps_its_snapshots(server: ApiServer) -> None:
    server.job["status"] |= {"phase": "Failed", "keptUntil": "2026-01-01T04:00:00Z"}
    assert main(["persist", "-n", "team-a", "llm"]) == 0


def test_a_copy_is_asked_for_by_an_annotation_and_waited_for(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["persist", "team-a.llm"]) == 0
    assert "generation 2.8 of job team-a/llm is in durable storage" in capsys.readouterr().out
    ((_, body),) = server.changes
    assert list(json.loads(body)["metadata"]["annotations"]) == ["holdfast.dev/persist"]
    del server.job["spec"]["persistence"]
    assert main(["persist", "-n", "team-a", "llm"]) == 2
    assert "has no durable storage" in capsys.readouterr().err


def test_logs_have_the_member_and_ranks_of_each_line(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["logs", "-n", "team-a", "llm", "--tail", "5"]) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "member 0 ranks 0-1 | hello of llm-0-1",
        "member 0 ranks 0-1 | last",
        "member 1 ranks 2-3 | hello of llm-1-1",
        "member 1 ranks 2-3 | last",
    ]
    assert {"container": ["trainer"], "tailLines": ["5"]} in server.queries


def put_sidecar_first(pod: Object, sidecar: Object, **trainer: Object) -> None:
    """Change a pod as a webhook does that puts its container first."""
    pod["metadata"]["annotations"] = {"holdfast.dev/container": "trainer"}
    pod["spec"]["containers"].insert(0, {"name": "istio-proxy"})
    states = [{"name": "istio-proxy", "state": sidecar}]
    states += [{"name": "trainer", "state": trainer}] if trainer else []
    pod["status"]["containerStatuses"] = states


def test_logs_are_those_of_the_trainer_where_a_sidecar_comes_first(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    later, first = server.objects[PODS]["items"]
    put_sidecar_first(first, {"waiting": {}}, terminated={"exitCode": 1})
    put_sidecar_first(later, {"running": {}})
    assert main(["logs", "-n", "team-a", "llm"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "member 0 ranks 0-1 | hello of llm-0-1",
        "member 0 ranks 0-1 | last",
    ]
    assert server.queries[-1]["container"] == ["trainer"]


def test_of_two_daemons_on_a_node_the_one_that_stays_is_killed(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    ending = {"name": "daemon-old", "deletionTimestamp": "2026-01-01T00:00:00Z"}
    for order in ([ending, {"name": "daemon-new"}], [{"name": "daemon-new"}, ending]):
        server.changes.clear()
        items = [{"metadata": metadata} for metadata in order]
        server.objects[f"{SYSTEM}/pods"] = {"items": items}
        assert main(["inject", "kill-daemon", "n1", "-n", "team-a", "--yes"]) == 0
        assert server.changes == [("delete", f"{SYSTEM}/pods/daemon-new")]
    capsys.readouterr()


def test_logs_that_are_followed_end_with_the_job(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.job["status"]["phase"] = "Complete"
    assert main(["logs", "-n", "team-a", "llm", "-f", "--rank", "3"]) == 0
    selectors = [each["labelSelector"][0] for each in server.queries if "labelSelector" in each]
    assert selectors[0].endswith("holdfast.dev/member=1")
    assert {"container": ["trainer"], "follow": ["true"]} in server.queries
    assert main(["logs", "-n", "team-a", "llm", "--rank", "4"]) == 2
    assert "members 0 to 1 and ranks 0 to 3" in capsys.readouterr().err


def test_logs_of_pods_that_another_controller_makes_have_its_numbers(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.job["spec"]["trainer"] = {"external": True}
    pods = server.objects[PODS]["items"]
    for each, number in zip(pods, ("1", "0"), strict=True):
        each["metadata"]["labels"] = {"batch.kubernetes.io/job-completion-index": number}
    pods.append({"metadata": {"name": "other", "uid": "u", "labels": {}}})  # without a number
    assert main(["logs", "-n", "team-a", "llm"]) == 0
    firsts = [line for line in capsys.readouterr().out.splitlines() if "hello" in line]
    assert sorted(firsts) == [
        "member 0 ranks 0-1 | hello of llm-0-1",
        "member 1 ranks 2-3 | hello of llm-1-1",
    ]
    selectors = [each["labelSelector"] for each in server.queries if "labelSelector" in each]
    assert selectors == [["holdfast.dev/job=llm"]]
    assert main(["logs", "-n", "team-a", "llm", "--rank", "2"]) == 0
    assert "llm-0-1" not in capsys.readouterr().out


def test_the_last_lines_of_a_trainer_that_failed_outlive_its_pod(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = {"text": "rank 1 exited with 1", "lastLines": "ValueError: no", "epoch": 2}
    server.job["status"]["lastFailure"] = failure
    assert main(["logs", "-n", "team-a", "llm", "--previous"]) == 0
    assert capsys.readouterr().out == "ValueError: no\n"


def test_a_fault_is_named_first_and_injected_only_with_yes(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.objects[f"{SYSTEM}/pods"] = {"items": [{"metadata": {"name": "holdfast-daemon-x"}}]}
    chosen = ["-n", "team-a", "--job", "llm"]
    for fault, target in (("delete-pod", "1"), ("kill-daemon", "n1"), ("kill-rank", "3")):
        assert main(["inject", fault, target, *chosen]) == 2
        assert "nothing was done; add --yes" in capsys.readouterr().out
    assert server.changes == []
    assert main(["inject", "delete-pod", "1", *chosen, "--yes"]) == 0
    assert main(["inject", "kill-daemon", "n1", *chosen, "--yes"]) == 0
    assert server.changes == [
        ("delete", f"{PODS}/llm-1-1"),
        ("delete", f"{SYSTEM}/pods/holdfast-daemon-x"),
    ]


@pytest.mark.parametrize("fault", ["kill-node", "corrupt"])
def test_faults_of_local_runs_are_refused_with_what_to_do_instead(
    server: ApiServer, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inject", fault, "1", "-n", "team-a", "--job", "llm", "--yes"]) == 2
    assert f"{fault} is for local runs" in capsys.readouterr().err


def test_a_cluster_without_a_catalogue_says_how_to_get_one(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon: Object = {"spec": {"template": {"spec": {"containers": [{"name": "daemon"}]}}}}
    server.objects[DAEMON_SETS] = {"items": [daemon]}
    assert main(["history", "-n", "team-a", "llm"]) == 2
    assert "install with redis.enabled=true" in capsys.readouterr().err


def has_catalogue(server: ApiServer, url: bytes) -> None:
    reference = {"secretKeyRef": {"name": "own", "key": "url"}}
    container = {"name": "daemon", "env": [{"name": "HOLDFAST_REDIS_URL", "valueFrom": reference}]}
    daemon: Object = {"spec": {"template": {"spec": {"containers": [container]}}}}
    server.objects[DAEMON_SETS] = {"items": [daemon]}
    server.objects[f"{SYSTEM}/secrets/own"] = {"data": {"url": base64.b64encode(url).decode()}}


def test_a_catalogue_outside_the_cluster_is_read_where_its_secret_names_it(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    has_catalogue(server, b"redis://:secret@127.0.0.1:1/0")
    assert main(["history", "-n", "team-a", "llm"]) == 2
    said = capsys.readouterr().err
    assert "Redis did not answer" in said and "secret" not in said


def test_without_a_cluster_commands_for_one_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert main(["suspend", "llm"]) == 2
    assert "`holdfast suspend` needs a job in a cluster" in capsys.readouterr().err


# A pod shows its own processes. Here these are the children of the test: others, of tests beside it
# as well, must not be taken for ranks and killed.
_PROCESSES_OF_POD = """
import os

def is_own(pid, parent=str(os.getppid())):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[1] == parent
    except OSError:
        return False

os.listdir = lambda path, listed=os.listdir: [each for each in listed(path) if is_own(each)]
"""


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File with the words of each call of a kubectl that forwards port 1 and runs commands here."""
    calls = tmp_path / "calls"
    script = f"""#!{sys.executable}
import os, sys
words = sys.argv[1:]
with open({str(calls)!r}, "a") as calls:
    print(*words, file=calls)
if "port-forward" in words:
    print("Forwarding from 127.0.0.1:1 -> 6379", flush=True)
    os.execvp("sleep", ["sleep", "1000"])
command = words[words.index("--") + 1 :]
os.execv(sys.executable, [sys.executable, "-c", {_PROCESSES_OF_POD!r} + command[2], *command[3:]])
"""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "kubectl").write_text(script)
    (tmp_path / "bin" / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return calls


def test_a_catalogue_in_the_cluster_is_read_through_a_forwarded_port(
    server: ApiServer, kubectl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    has_catalogue(server, b"redis://:secret@holdfast-redis.holdfast-system.svc:6379/0")
    assert main(["history", "-n", "team-a", "llm"]) == 2
    assert "Redis did not answer" in capsys.readouterr().err
    (call,) = kubectl.read_text().splitlines()
    assert call.endswith(
        "-n holdfast-system port-forward --address 127.0.0.1 svc/holdfast-redis :6379"
    )


@contextmanager
def process_with_arena(folder: Path, rank: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that maps the arena that its daemon has made for a rank, as a trainer does."""
    arena = folder / "arenas" / f"{rank}-1" / "arena"
    arena.parent.mkdir(parents=True)
    arena.write_bytes(bytes(4096))
    maps = f"""
import mmap, os, time
file = os.open({str(arena)!r}, os.O_RDWR)
kept = mmap.mmap(file, 4096)
print("ready", flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", maps], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_signal_goes_to_the_process_that_has_the_arena_of_the_rank(
    server: ApiServer, kubectl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with process_with_arena(tmp_path, 3) as process:
        chosen = ["-n", "team-a", "--job", "llm", "--yes"]
        assert main(["inject", "kill-rank", "2", *chosen]) == 2
        assert "rank 2 has no process with snapshots now" in capsys.readouterr().err
        assert main(["inject", "kill-rank", "3", *chosen]) == 0
        assert process.wait() == -signal.SIGKILL
    assert f"sent SIGKILL to rank 3 (pid {process.pid} of its pod)" in capsys.readouterr().out
    assert "-n team-a exec llm-1-1 -c trainer -- python -c" in kubectl.read_text()


def test_pods_that_another_controller_has_let_change_places_are_known_by_its_numbers(
    server: ApiServer, kubectl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.job["spec"]["trainer"] = {"external": True}
    for each, number in zip(server.objects[PODS]["items"], ("0", "1"), strict=True):
        each["metadata"]["labels"] = {"batch.kubernetes.io/job-completion-index": number}
    chosen = ["-n", "team-a", "--job", "llm", "--yes"]
    with process_with_arena(tmp_path, 1) as process:  # member 0's, where pod 1 is
        assert main(["inject", "kill-rank", "3", *chosen]) == 0
        assert process.wait() == -signal.SIGKILL
    assert "sent SIGKILL to rank 3" in capsys.readouterr().out
    assert "-n team-a exec llm-0-1 -c trainer -- python -c" in kubectl.read_text()
    assert main(["inject", "delete-pod", "0", *chosen]) == 0
    assert server.changes == [("delete", f"{PODS}/llm-1-1")]
    server.objects[PODS]["items"].clear()
    assert main(["inject", "kill-rank", "3", *chosen]) == 2
    assert "has no pod of member 1 now" in capsys.readouterr().err


RECORD = f"{SYSTEM}/configmaps/holdfast-node-record"


def recorded(server: ApiServer) -> None:
    """Let the operator have recorded failures of two nodes."""
    failure = {"kind": "LostRank", "job": "team-a.llm", "epoch": 3, "at": time.time() - 7000}
    texts = {"n7": json.dumps([{**failure, "kind": "LostNode"}, failure]), "n8": "?"}
    texts |= {"n9": json.dumps([failure])}
    annotations = {"holdfast.dev/half-life-hours": "24"}
    metadata = {"name": "holdfast-node-record", "resourceVersion": "5", "annotations": annotations}
    server.objects[RECORD] = {"kind": "ConfigMap", "metadata": metadata, "data": texts}


def test_nodes_that_have_failed_are_listed_with_the_half_life_of_the_cluster(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(server)
    assert main(["nodes", "--context", "c"]) == 0
    out, err = capsys.readouterr()
    assert "rank lost, team-a.llm in epoch 3, 2 hours ago" in out
    assert "a failure counts half after 24 hours" in out
    assert "n8: no list of failures" in err
    assert main(["nodes", "--context", "c", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["half_life_hours"] == 24
    assert [(each["name"], each["avoided"]) for each in found["nodes"]] == [
        ("n7", True),
        ("n9", True),
    ]
    assert server.changes == []


def test_nodes_that_the_operator_has_closed_are_marked(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(server)
    mark, ready = "holdfast.dev/suspect", {"conditions": [{"type": "Ready", "status": "True"}]}
    marked = {
        "n3": ({mark: "Cordon"}, {"unschedulable": True}),
        "n7": ({mark: "Taint"}, {"taints": [{"key": mark, "effect": "NoSchedule"}]}),
        "n9": ({}, {"unschedulable": True}),
    }
    items = [
        {"metadata": {"name": name, "annotations": notes}, "spec": spec, "status": ready}
        for name, (notes, spec) in marked.items()
    ]
    server.objects["/api/v1/nodes"] = {"items": items, "metadata": {}}
    assert main(["nodes", "--context", "c", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["nodes"]
    assert [(each["name"], each["closed"]) for each in found] == [
        ("n7", "tainted"),
        ("n9", ""),
        ("n3", "cordoned"),
    ]
    assert main(["nodes", "--context", "c"]) == 0
    assert "avoided, tainted" in capsys.readouterr().out


def test_a_repaired_node_is_forgotten_although_the_operator_writes_too(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(server)
    server.conflicts = 2
    assert main(["nodes", "--context", "c", "--forget", "n7"]) == 0
    assert "the failures of n7 are forgotten" in capsys.readouterr().out
    assert [verb for verb, _ in server.changes] == ["put"] * 3
    body = server.objects[RECORD]
    assert set(body["data"]) == {"n9"}
    assert body["metadata"]["annotations"] == {"holdfast.dev/half-life-hours": "24"}
    assert main(["nodes", "--context", "c", "--forget", "n7"]) == 2
    expected = "no failures of n7 are recorded; there are those of n9"
    assert expected in capsys.readouterr().err


def test_a_cluster_that_remembers_no_failures_says_how_to_have_it_do_so(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["nodes", "--context", "c"]) == 2
    error = capsys.readouterr().err
    assert "operator.nodeRecord.enabled" in error and "--system-namespace" in error


def test_a_story_has_what_the_nodes_of_the_job_are_remembered_for_if_the_record_may_be_read(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.job["metadata"]["uid"] = "u"
    server.job["status"]["members"] = [{"index": 0, "node": "n9"}, {"index": 1, "node": "n1"}]
    server.objects["/apis/events.k8s.io/v1/namespaces/team-a/events"] = {"items": []}
    assert main(["why", "-n", "team-a", "llm"]) == 0
    assert "remembered" not in capsys.readouterr().out
    recorded(server)
    assert main(["why", "-n", "team-a", "llm"]) == 0
    told = capsys.readouterr().out
    assert "n9: rank lost, team-a.llm in epoch 3, 2 hours ago" in told and "n7" not in told


# --- profile --------------------------------------------------------------------------------------


def measured_daemon(staged_s: float) -> Callable[[], bytes]:
    """The metrics of a daemon, whose job takes a step for each request."""
    metrics, steps, llm = DaemonMetrics(), count(1), "team-a.llm"
    metrics.set("save_staged_seconds", staged_s, job=llm)
    metrics.set("save_staged_seconds", 100.0, job="team-b.llm")
    metrics.set("state_bytes", 3200, job=llm, part="experts")
    metrics.set("state_bytes", 800, job=llm, part="other")
    metrics.add("protection_bytes", 500.0)  # of all jobs
    metrics.observe("encode_seconds", 2.0, job=llm)

    def expose() -> bytes:
        metrics.set("generation_step", next(steps), job=llm, stage="committed")
        return generate_latest(metrics.registry)

    return expose


@pytest.fixture
def training(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> ApiServer:
    """A job that trains on two nodes, and daemons on them and on a third."""
    monkeypatch.setattr(cluster_profile, "POLL_S", 0.1)
    spec = server.job["spec"]
    spec["persistence"] = {"uri": "s3://bucket/tier"}
    spec |= {
        "parallelism": {"dp": 4},
        "model": {"numExperts": 4, "numMoELayers": 2},
        "trainer": {
            "template": {"spec": {"containers": [{"name": "trainer", "command": ["train"]}]}}
        },
    }
    server.objects[JOB] |= {"apiVersion": "holdfast.dev/v1alpha1", "kind": "MoETrainingJob"}
    server.job["status"]["lastRecoveries"] = [{"cause": "a rank", "seconds": 3.0}, {"cause": "one"}]
    ports = [{"name": "peer", "containerPort": 7701}, {"name": "http", "containerPort": 7703}]
    server.objects[f"{SYSTEM}/pods"] = {
        "items": [
            {
                "metadata": {"name": f"daemon-{node}"},
                "spec": {"nodeName": f"n{node}", "containers": [{"ports": ports}]},
            }
            for node in range(3)
        ]
    }
    for node, staged_s in ((0, 0.5), (1, 2.0)):
        path = f"{SYSTEM}/pods/daemon-{node}:7703/proxy/metrics"
        server.texts[path] = measured_daemon(staged_s)
    return server


def test_a_job_in_a_cluster_is_profiled_by_the_metrics_of_its_daemons(
    training: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "-n", "team-a", "llm", "--seconds", "1"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found.pop("step_s") > 0
    assert found == {
        "gpus": 4,
        "expert_bytes": 800,
        "other_bytes": 1600,
        "experts_per_layer": 4,
        "moe_layers": 2,
        "copy_bytes_s": 2000.0,
        "restart_s": 3.0,
    }
    assert (
        "has not shown network_bytes_s, storage_bytes_s: the simulation assumes them" in printed.err
    )


def test_without_the_right_to_reach_daemons_a_profile_has_what_the_status_shows(
    training: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    training.texts.clear()
    steps = count(1)
    job = training.objects.pop(JOB)

    def trains() -> bytes:
        return json.dumps(job | {"status": job["status"] | {"step": next(steps)}}).encode()

    training.texts[JOB] = trains
    assert main(["profile", "-n", "team-a", "llm", "--seconds", "1"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["step_s"] > 0
    assert {"copy_bytes_s", "expert_bytes"}.isdisjoint(found)
    assert "to get pods/proxy in namespace holdfast-system" in printed.err
    assert "has not shown copy_bytes_s, network_bytes_s, storage_bytes_s, expert_byt" in printed.err


def test_a_job_that_shrank_is_profiled_with_the_ranks_that_it_has(
    training: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    training.job["status"]["members"].pop()
    assert main(["profile", "-n", "team-a", "llm", "--seconds", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"] == 2


def test_a_job_that_recovers_while_it_is_measured_is_not_profiled(
    training: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = f"{SYSTEM}/pods/daemon-0:7703/proxy/metrics"
    expose, epochs = training.texts[daemon], count(3)

    def recover() -> bytes:
        training.job["status"]["epoch"] = next(epochs)
        return expose()

    training.texts[daemon] = recover
    assert main(["profile", "-n", "team-a", "llm", "--seconds", "1"]) == 2
    assert "had to recover, or changed its nodes, while it was meas" in capsys.readouterr().err


def test_daemons_are_named_whose_metrics_cannot_be_read(
    training: ApiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the job's last node, which is not the one whose steps are timed."""
    never, ask = threading.Event(), cluster_profile._metrics
    daemon = f"{SYSTEM}/pods/daemon-1:7703/proxy/metrics"

    async def impatient(api: Any, options: Any, pod: str, port: int) -> str:
        if pod == "daemon-1":  # the last one that is asked; the others may take their time
            monkeypatch.setattr(cluster_profile, "METRICS_S", 0.1)
        return await ask(api, options, pod, port)

    monkeypatch.setattr(cluster_profile, "_metrics", impatient)
    training.texts[daemon] = lambda: b"" * never.wait(30)
    steps = count(1)

    def trains() -> bytes:
        return json.dumps(job | {"status": job["status"] | {"step": next(steps)}}).encode()

    job = training.objects.pop(JOB)
    training.texts[JOB] = trains
    assert main(["profile", "-n", "team-a", "llm", "--seconds", "1"]) == 0
    assert "daemon-1 has not sent its metrics in 0.1 s" in capsys.readouterr().err
    never.set()
    training.objects[f"{SYSTEM}/pods"]["items"][1]["spec"]["containers"] = [{"ports": []}]
    assert main(["profile", "-n", "team-a", "llm", "--seconds", "1"]) == 0
    assert "pods daemon-1 have no port named http" in capsys.readouterr().err


def test_a_job_that_does_not_train_is_not_profiled(
    training: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    training.job["status"]["phase"] = "Suspended"
    assert main(["profile", "-n", "team-a", "llm"]) == 2
    assert "does not train (Suspended); profile it while it is Running" in capsys.readouterr().err
