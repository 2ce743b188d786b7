"""`holdfast status JOB` looks at the run of this machine, or else at the cluster."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from holdfast_cli.local.directory import default_directory
from holdfast_cli.main import main

NAME = "not-running"
JOB = {
    "metadata": {"name": NAME, "namespace": "default", "uid": "u"},
    "status": {"phase": "Running"},
}
FILE = f"""\
apiVersion: holdfast.dev/v1alpha1
kind: MoETrainingJob
metadata: {{name: {NAME}, namespace: team-a}}
spec:
  nodes: 2
  parallelism: {{dp: 2}}
  redundancy: {{raim5: {{groupSize: 2}}}}
  trainer: {{template: {{spec: {{containers: [{{name: t, image: i, command: [x]}}]}}}}}}
"""


class ApiServer(ThreadingHTTPServer):
    """Has one job, in every namespace that it is asked for in."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, ApiServer)
        self.server.asked.append(self.path.partition("?")[0])
        one = self.path.endswith(f"/{NAME}")
        body = json.dumps(JOB if one else {"items": [], "metadata": {}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """In a kubeconfig that the environment names."""
    with ApiServer() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [
                {"name": "c", "cluster": {"server": f"http://127.0.0.1:{found.server_port}"}}
            ],
            "users": [{"name": "u", "user": {}}],
        }
        (tmp_path / "config").write_text(json.dumps(config))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        yield found
        found.shutdown()
        thread.join()


def jobs_in(namespace: str) -> str:
    return f"/apis/holdfast.dev/v1alpha1/namespaces/{namespace}/moetrainingjobs/{NAME}"


def test_without_a_run_of_that_name_the_cluster_is_looked_at(
    server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", NAME]) == 0
    captured = capsys.readouterr()
    assert f"default/{NAME}  Running" in captured.out
    assert captured.err == (
        f"no such run on this machine; looking at the cluster of {tmp_path / 'config'}\n"
    )
    assert server.asked[0] == jobs_in("default")


def test_a_job_of_a_cluster_may_be_named_by_its_file_or_with_its_namespace(
    server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text(FILE)
    assert main(["status", str(tmp_path / "job.yaml")]) == 0
    assert main(["status", f"team-b.{NAME}"]) == 0
    chosen = ("--kubeconfig", str(tmp_path / "config"))
    assert main(["status", *chosen, "-n", "team-c", str(tmp_path / "job.yaml")]) == 0
    asked = [path for path in server.asked if path.endswith(NAME)]
    assert asked == [jobs_in("team-a"), jobs_in("team-b"), jobs_in("team-c")]


def test_without_a_kubeconfig_only_this_machine_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert main(["status", NAME]) == 2
    assert str(default_directory(f"default.{NAME}")) in capsys.readouterr().err


def test_a_directory_is_of_this_machine(
    server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--dir", str(tmp_path / "run"), NAME]) == 2
    assert server.asked == []
