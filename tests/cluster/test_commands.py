"""The `holdfast` command as a person at a shell runs it, with a kubeconfig and kubectl in PATH: one
small job goes through all commands, one after the other, and each has its effect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from cluster import Cluster
from holdfast_system import TIER, Holdfast
from jobs import PACE
from survival import Run
from typed import holdfast_command

NAME, STEPS, FIRST_STEPS, WAIT_S = "commanded", 100_000, 5, 180.0
"""More steps than any test waits for."""

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shell:
    """Where the commands are typed, and the job that they are about."""

    cluster: Cluster
    run: Run

    def type(self, *words: str, code: int = 0) -> str:
        """Run `holdfast` with these words, which has to end with `code`; what it printed."""
        return holdfast_command(self.cluster, *words, code=code)

    def wait_trains(self, after: dict[str, Any]) -> dict[str, Any]:
        """The status once an epoch after that of another status has protected steps."""

        def trains(status: dict[str, Any]) -> bool:
            epoch, _, step = status.get("protected", "0.0").partition(".")
            is_new = int(epoch) == status.get("epoch", 0) > after.get("epoch", 0)
            first = after.get("protectedStep", 0) + FIRST_STEPS
            return status.get("phase") == "Running" and is_new and int(step) >= first

        return self.run.job.wait("protected steps of a new epoch", trains, WAIT_S)

    def pods(self) -> dict[str, str]:
        """Name → uid of the job's pods."""
        label = f"holdfast.dev/job={NAME}"
        found = self.cluster.get("pods", "-n", "default", "-l", label)["items"]
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in found}


@pytest.fixture(scope="module")
def shell(cluster: Cluster, holdfast: Holdfast) -> Iterator[Shell]:
    run = Run(
        cluster,
        NAME,
        STEPS,
        arguments=(*PACE, "--seq", "32", "--dim", "32", "--layers", "1"),
        spec={
            "nodes": 2,
            "parallelism": {"dp": 2, "ep": 2},
            "redundancy": {"type": "RAIM5", "raim5": {"groupSize": 2}},
            "failurePolicy": {"spares": 0},
            "persistence": {"uri": f"{TIER}/{NAME}"},
        },
    )
    run.begin()
    found = Shell(cluster=cluster, run=run)
    found.wait_trains({})
    yield found
    run.job.delete()


def test_status_shows_what_the_operator_wrote(shell: Shell) -> None:
    shown = shell.type("status", NAME)
    assert f"default/{NAME}" in shown and "Running" in shown
    for member in shell.run.job.status()["members"]:
        assert member["node"] in shown
    assert f"{NAME} " in shell.type("status", "-n", "default")
    written = json.loads(shell.type("status", NAME, "--json"))["status"]
    assert written["protectedStep"] >= FIRST_STEPS


def test_logs_prints_what_trainers_write(shell: Shell) -> None:
    lines = shell.type("logs", NAME, "--tail", "3").splitlines()
    assert sum(line.startswith("member 0 rank 0 | step ") for line in lines) >= 2
    others = shell.type("logs", "-n", "default", NAME, "--rank", "1").splitlines()
    assert not [line for line in others if not line.startswith("member 1 rank 1 | ")]


def test_profile_measures_steps_sizes_and_rates(shell: Shell) -> None:
    found = json.loads(shell.type("profile", "-n", "default", NAME, "--seconds", "15"))
    assert found["gpus"] == 2
    for name in ("step_s", "expert_bytes", "other_bytes", "copy_bytes_s", "network_bytes_s"):
        assert found[name] > 0, name


def test_inject_does_nothing_without_yes(shell: Shell) -> None:
    words = ("inject", "kill-rank", "1", "-n", "default", "--job", NAME)
    pid = shell.run.job.rank_process(1)
    assert "nothing was done; add --yes to do it" in shell.type(*words, code=2)
    assert shell.run.job.rank_process(1) == pid


def test_a_rank_that_inject_kills_is_restored_and_history_shows_it(shell: Shell) -> None:
    before, pid = shell.run.job.status(), shell.run.job.rank_process(1)
    words = ("inject", "kill-rank", "1", "-n", "default", "--job", NAME, "--yes")
    assert "sent SIGKILL to rank 1" in shell.type(*words)
    after = shell.wait_trains(before)
    assert after["restarts"] == before["restarts"] + 1
    assert shell.run.job.rank_process(1) != pid
    assert "rank 1" in shell.type("history", NAME)
    found = json.loads(shell.type("history", NAME, "--json"))
    assert found["job"] == f"default.{NAME}"
    recovery = found["recoveries"][-1]
    assert recovery["epoch"] == after["epoch"]
    # Processes do not stay in this job: rank 0's may end by itself, as its collective fails, before
    # the new epoch comes.
    assert recovery["lost_ranks"] in ([1], [1, 0])
    assert int(recovery["line"].partition(".")[2]) >= before["protectedStep"]
    assert all(recovery["seconds"][stage] >= 0 for stage in ("new epoch", "at work", "protected"))


def test_inject_deletes_a_members_pod(shell: Shell) -> None:
    before, pods = shell.run.job.status(), shell.pods()
    pod, _ = shell.run.job.member(1)
    words = ("inject", "delete-pod", "1", "-n", "default", "--job", NAME, "--yes")
    assert f"deleted pod {pod}" in shell.type(*words)
    shell.wait_trains(before)
    assert pods[pod] not in shell.pods().values()


def test_persist_waits_for_a_copy_in_durable_storage(shell: Shell) -> None:
    before = shell.run.job.status()
    printed = shell.type("persist", NAME, "--wait", "120")
    after = shell.run.job.status()
    epoch, _, step = after["persisted"].partition(".")
    assert f"generation {after['persisted']} of job default/{NAME} is in durable" in printed
    assert (int(epoch), int(step)) >= (before["epoch"], before["protectedStep"])
    stored = shell.cluster.home / "shared" / "tier" / NAME
    assert [path for path in stored.rglob("*") if path.is_file()]


def test_a_suspended_job_has_no_pods_and_resumes_at_its_step(shell: Shell) -> None:
    job, before = shell.run.job, shell.run.job.status()
    assert "is suspended" in shell.type("suspend", NAME)
    job.wait("no pods", lambda s: s["phase"] == "Suspended" and not shell.pods(), WAIT_S)
    suspended = job.status()
    assert suspended["protectedStep"] >= before["protectedStep"]
    assert "nothing has changed" in shell.type("suspend", NAME)
    last = shell.run.log()[-1]
    assert "is resumed" in shell.type("resume", NAME)
    shell.wait_trains(suspended)
    first = next(line for line in shell.run.log() if line.epoch > last.epoch)
    assert suspended["protectedStep"] < first.step <= last.step + 1
