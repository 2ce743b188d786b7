"""The command lines of a local run's processes."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from virtual_world import make_job

from holdfast_cli.local.commands import Command, Commands
from holdfast_cli.local.directory import NodeRecord, RunDirectory, RunRecord
from holdfast_core.job.parsing import API_VERSION, KIND, parse_job


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ({"reformSeconds": 30}, []),
        ({"reformSeconds": 7.5}, ["--reform-s", "7.5"]),
        ({"reformSeconds": 31}, ["--reform-s", "31.0"]),
        ({"recheckSeconds": 60}, []),
        ({"recheckSeconds": 1800, "checkNodes": True}, ["--check-node"]),
        ({"recheckSeconds": 60, "checkNodes": True}, ["--check-node", "--recheck-s", "60.0"]),
    ],
)
def test_the_launcher_is_told_of_a_time_that_is_not_its_default(
    tmp_path: Path, policy: dict[str, Any], options: list[str]
) -> None:
    job = make_job(**policy)
    directory = RunDirectory(tmp_path, job.key)
    node = NodeRecord(name="n0", host="127.0.0.1", root=str(tmp_path))
    run = RunRecord(job=job.key, control_host="127.0.0.1")
    made = Commands().agent(directory, run, job, node, attempt=1).arguments
    launcher = list(made[: made.index("--")])
    waits = launcher.index("--wait-file")
    assert launcher[waits + 2 :] == options
    assert made[made.index("--") + 1 :] == tuple(job.command)


TEMPLATE: dict[str, Any] = {
    "spec": {
        "containers": [
            {
                "name": "trainer",
                "command": ["python", "-c", "print($$(A), '$(A)')"],
                "args": ["--steps=$(STEPS)", "$$(STEPS)", "$(UNKNOWN)", "$(HOLDFAST_JOB)", "$$$$"],
                "env": [
                    {"name": "ROOT", "value": "/data"},
                    {"name": "DATA", "value": "$(ROOT)/train"},
                    {"name": "STEPS", "value": "20"},
                    {"name": "JOB", "value": "$(HOLDFAST_JOB)"},
                    {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                ],
            }
        ]
    }
}


def _agent(tmp_path: Path, env: dict[str, str]) -> Command:
    template = deepcopy(TEMPLATE)
    given = template["spec"]["containers"][0]["env"]
    given += [{"name": name, "value": value} for name, value in env.items()]
    spec = {"nodes": 2, "parallelism": {"dp": 2}, "trainer": {"template": template}}
    head = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "a"}}
    job = parse_job({**head, "spec": spec})
    node = NodeRecord(name="n0", host="127.0.0.1", root=str(tmp_path))
    run = RunRecord(job=job.key, control_host="127.0.0.1")
    return Commands().agent(RunDirectory(tmp_path, job.key), run, job, node, attempt=1)


def test_references_to_variables_are_resolved_as_in_a_pod(tmp_path: Path) -> None:
    made = _agent(tmp_path, {})
    job = made.environment["HOLDFAST_JOB"]
    assert made.arguments[made.arguments.index("--") + 1 :] == (
        *("python", "-c", "print($(A), '$(A)')"),
        *("--steps=20", "$(STEPS)", "$(UNKNOWN)", job, "$$"),
    )
    assert made.environment["DATA"] == "/data/train"
    assert made.environment["JOB"] == "$(HOLDFAST_JOB)"  # comes later in a pod's env, too
    assert "POD" not in made.environment


def test_output_is_not_held_back_unless_the_job_or_the_shell_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    assert _agent(tmp_path, {}).environment["PYTHONUNBUFFERED"] == "1"
    assert _agent(tmp_path, {"PYTHONUNBUFFERED": "0"}).environment["PYTHONUNBUFFERED"] == "0"
    monkeypatch.setenv("PYTHONUNBUFFERED", "0")
    assert _agent(tmp_path, {}).environment["PYTHONUNBUFFERED"] == "0"


def test_trainers_of_a_local_run_listen_on_loopback_unless_somebody_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
        assert _agent(tmp_path, {}).environment[name] == "lo"
        assert _agent(tmp_path, {name: "eth1"}).environment[name] == "eth1"
