"""The command line: what it understands, what it prints, how it refuses."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from holdfast_cli.local.status import LocalStatus, Status, encode
from holdfast_cli.main import kubectl, main
from holdfast_core.job.status import ConditionStatus, JobCondition, Phase, TokenLossStatus

JOB = """
apiVersion: holdfast.dev/v1alpha1
kind: MoETrainingJob
metadata: {name: run1}
spec:
  nodes: 4
  parallelism: {dp: 4}
  snapshot: {memoryPerNode: 1Gi}
  failurePolicy: {spares: 1}
  trainer: {template: {spec: {containers: [{name: t, image: i, command: [python, t.py]}]}}}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with a status, of a control loop that lives."""
    local = LocalStatus(
        job="default.run1",
        time=1e9,
        pid=os.getpid(),
        directory=str(tmp_path),
        reason="all is as it should be",
        revision=0,
        world_size=4,
        line="2.30",
        line_reason="generation 2.30: ranks [2] from parity",
        complete="3.41",
    )
    since = "2026-01-01T00:00:00Z"
    status = Status(
        phase=Phase.RUNNING,
        epoch=3,
        step=41,
        protected="3.40",
        recoveries=2,
        conditions=(
            JobCondition(
                type="Protected",
                status=ConditionStatus.TRUE,
                reason="ParityInPlace",
                message="",
                last_transition_time=since,
            ),
            JobCondition(
                type="TokenLossWithinLimit",
                status=ConditionStatus.UNKNOWN,
                reason="NotReported",
                message="",
                last_transition_time=since,
            ),
        ),
        token_loss=TokenLossStatus(text="tokens lost 1.00% (MLT 0.0200, limit 5.00%)"),
        counters={"epoch": 3},
        local=local,
    )
    (tmp_path / "status.json").write_bytes(encode(status))
    return tmp_path


@pytest.mark.parametrize("command", [[], ["run"], ["status"], ["inject"], ["plan"], ["demo"]])
def test_help_teaches_by_examples(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    assert "  holdfast " in capsys.readouterr().out


def test_stacks_are_not_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["history", "--stacks", "--json"])
    assert end.value.code == 2
    assert "not allowed with argument --stacks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not YAML"),
        ("kind: Pod", "apiVersion"),
        (JOB.replace("dp: 4", "dp: 3"), "spec.parallelism"),
        (JOB.replace("nodes: 4", "nodez: 4"), "nodez"),
    ],
)
def test_a_bad_job_is_refused_in_plain_lines(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    assert main(["run", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"holdfast: {path}") and message in error
    assert "Traceback" not in error


def test_a_job_of_another_controller_is_not_run_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("  nodes: 4", "  managedBy: example.com/other\n  nodes: 4"))
    assert main(["run", str(path), "--dir", str(tmp_path / "run")]) == 2
    assert "the job belongs to another controller" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "/nowhere/job.yaml"]) == 2
    assert "/nowhere/job.yaml cannot be read" in capsys.readouterr().err


def test_status_shows_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--dir", str(run), "--once"]) == 0
    out = capsys.readouterr().out
    for part in ("default.run1", "Running", "epoch 3", "step 41", "protected 3.40", "parity"):
        assert part in out
    assert "the run was stopped" not in out
    assert "tokens lost 1.00% (MLT 0.0200, limit 5.00%)" in out
    assert "Unknown" in out


def test_status_as_json_is_the_whole_status(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--dir", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["protected"] == "3.40" and found["conditions"][0]["type"] == "Protected"
    assert found["local"]["lineReason"] == "generation 2.30: ranks [2] from parity"


def test_status_without_a_run_is_an_error_with_its_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--dir", str(tmp_path / "none")]) == 2
    assert "--dir" in capsys.readouterr().err


def test_an_invalid_status_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "status.json").write_text("{}")
    assert main(["status", "--dir", str(tmp_path)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_the_status_of_an_earlier_version_is_refused_with_its_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    condition = {"type": "Running", "status": True, "reason": "x", "message": ""}
    earlier = {"job": "default.run1", "time": 1e9, "phase": "Running", "conditions": [condition]}
    (tmp_path / "status.json").write_text(json.dumps(earlier))
    assert main(["status", "--dir", str(tmp_path), "--once"]) == 2
    error = capsys.readouterr().err
    assert "If another version of Holdfast wrote it" in error and "`holdfast run`" in error


def test_a_fault_for_a_run_that_is_not_running_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inject", "kill-rank", "0", "--dir", str(run)]) == 2
    assert "start it before injecting a fault" in capsys.readouterr().err


def test_plan_shows_memory_and_odds(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(job), "--bytes-per-rank", "256Mi"]) == 0
    out = capsys.readouterr().out
    for part in ("1 parity groups of 4", "4 members", "limit", "REFT eq. 2", "snapshot interval"):
        assert part in out


@pytest.mark.parametrize(
    ("more", "spares", "shown"), [("", 0, False), ("", 1, True), ("  minNodes: 3\n", 0, True)]
)
def test_plan_counts_the_launcher_that_waits_where_one_may(
    job: Path, more: str, spares: int, shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write_text(job.read_text().replace("{spares: 1}", f"{{spares: {spares}}}") + more)
    assert main(["plan", str(job)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert ("0.71 GiB not of this job: measured" in out) == shown


@pytest.mark.parametrize(
    ("redundancy", "says"),
    [
        ("{type: RAIM6}", "REFT eq. 2 for 2 losses of a group"),
        ("{type: Replication, replication: {replicas: 3}}", "REFT eq. 2 for 3 losses of a group"),
        ("{type: Replication}", "REFT eq. 2;"),
    ],
)
def test_plan_shows_the_odds_of_each_redundancy(
    job: Path, redundancy: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write_text(job.read_text() + f"  redundancy: {redundancy}\n")
    assert main(["plan", str(job)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert says in out
    assert "P(a recovery line is lost in the training)" in out


def test_plan_refuses_what_does_not_fit(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(job), "--bytes-per-rank", "10Gi"]) == 2
    assert "snapshots of one node need" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-1", "inf", "many"])
def test_impossible_numbers_are_refused(
    job: Path, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", str(job), f"--days={value}"])
    assert end.value.code == 2
    assert "is not a number above 0" in capsys.readouterr().err


def test_certificates_are_made_for_each_role_and_used_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["certificates", "--out", str(tmp_path / "tls"), "--domain", "team"]
    assert main(command) == 0
    assert "operator.team.holdfast" in capsys.readouterr().out
    made = {path: path.read_bytes() for path in (tmp_path / "tls").rglob("tls.*")}
    assert len(made) == 4
    assert main(command) == 0
    assert made == {path: path.read_bytes() for path in (tmp_path / "tls").rglob("tls.*")}
    (tmp_path / "file").touch()
    assert main(["certificates", "--out", str(tmp_path / "file")]) == 2
    assert "cannot make certificates" in capsys.readouterr().err


def test_the_plugin_of_kubectl_is_the_same_program(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["kubectl-holdfast", "status", "--help"])
    with pytest.raises(SystemExit, match="0"):
        kubectl()
    assert capsys.readouterr().out.startswith("usage: kubectl holdfast status")


def test_bash_completes_commands_and_options(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out)

    def complete(*words: str) -> set[str]:
        line = " ".join(f"'{word}'" for word in words)
        asked = f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; "
        function = "_shtab_holdfast"
        command = f'{asked} {function} holdfast "{words[-1]}" ""; echo "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
        return set(done.stdout.split())

    assert {"status", "simulate"} <= complete("holdfast", "s")
    assert "kill-node" in complete("holdfast", "inject", "kill-n")
    assert "--watch" in complete("holdfast", "status", "--w")
