"""A local run with real processes, but daemons and agents in miniature: seconds, not minutes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_agent import FULL
from virtual_world import make_job

from holdfast_cli.commands.show import progress_line
from holdfast_cli.local import Commands, LocalCluster, LocalSettings, Status, read_status
from holdfast_cli.local.cluster import held_bytes
from holdfast_cli.local.directory import RunDirectory
from holdfast_cli.local.faults import kill_node
from holdfast_cli.local.node_record import read_record, write_record
from holdfast_cli.local.processes import kill_marked, marked_processes
from holdfast_cli.local.supervisor import Supervisor
from holdfast_cli.main import main
from holdfast_core.errors import InvalidJobError, MemoryBudgetError, StorageError, UnreachableError
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.job.status import ConditionStatus, StrengthStatus
from holdfast_core.node_failures import FailureKind, NodeFailure
from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.observe.views import ConditionType

HELPERS = Path(__file__).parents[1] / "helpers"
WAIT_S = 60.0
ENDLESS = 10**6
PATIENT, QUICK = 120, 7
"""Missed heartbeats, of half a second, after which a node is lost: where none shall be, whatever
else the machine has to do, and where the test kills one."""


@pytest.fixture
def run_directory() -> Iterator[Path]:
    """A run leaves neither processes nor memory behind; nor does a test that fails."""
    with tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp") as path:
        left = RunDirectory(Path(path) / "run", tiny_job().key)
        yield left.path
        processes, memory = kill_marked(left.mark()), left.memory.exists()
        shutil.rmtree(left.memory, ignore_errors=True)
        assert (processes, memory) == (0, False)


def tiny_job(
    steps: int = ENDLESS,
    *,
    nodes: int = 2,
    spares: int = 1,
    missed: int = PATIENT,
    policy: dict[str, Any] | None = None,
    **spec: object,
) -> MoETrainingJob:
    job = make_job(
        nodes,
        nproc=2,
        spares=spares,
        detection={"heartbeatSeconds": 0.5, "missedHeartbeats": missed, "hangSeconds": 600},
        spec=spec,
        **(policy or {}),
    )
    job.container["command"] = ["train", str(steps)]
    return job


def settings(path: Path) -> LocalSettings:
    commands = Commands(
        daemon_program=(sys.executable, str(HELPERS / "fake_daemon.py")),
        agent_program=(sys.executable, str(HELPERS / "fake_agent.py")),
    )
    return LocalSettings(directory=path, commands=commands)


def runs_in(epoch: int) -> Callable[[Status], bool]:
    def condition(status: Status) -> bool:
        ranks = [rank for member in status.local.members for rank in member.ranks]
        return (
            status.epoch == epoch
            and len(ranks) == status.local.world_size
            and all(rank.state == "HEALTHY" and rank.step >= 2 for rank in ranks)
        )

    return condition


def test_a_job_runs_to_its_end_and_leaves_nothing_behind(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        async with LocalCluster(tiny_job(20), settings(run_directory)) as cluster:
            assert await cluster.finished(timeout_s=WAIT_S) is Outcome.COMPLETE
            memory = cluster.directory.memory
            assert memory.is_dir()
        assert not memory.exists()
        assert marked_processes(cluster.directory.mark()) == []

    asyncio.run(scenario())
    status = read_status(run_directory / "status.json")
    assert status.phase == "Complete" and any(
        (c.type, c.status) == (ConditionType.COMPLETE, ConditionStatus.TRUE)
        for c in status.conditions
    )
    assert not (run_directory / "nodes.json").exists()
    assert main(["history", "--dir", str(run_directory)]) == 2
    assert "keeps no history, because it has no catalogue" in capsys.readouterr().err


def test_a_rank_a_daemon_and_a_node_can_be_lost(run_directory: Path) -> None:
    async def scenario() -> None:
        async with LocalCluster(tiny_job(missed=QUICK), settings(run_directory)) as cluster:
            await cluster.wait_for(runs_in(1), timeout_s=WAIT_S)
            await cluster.kill_rank(1)
            status = await cluster.wait_for(runs_in(2), timeout_s=WAIT_S)
            assert status.recoveries == 1

            await cluster.kill_daemon("n0")
            status = await cluster.wait_for(
                lambda s: s.local.revision == 1 and s.local.nodes[0].connected, timeout_s=WAIT_S
            )
            assert status.epoch == 2 and status.local.nodes[0].incarnation == 2

            await cluster.kill_node("n1")
            status = await cluster.wait_for(runs_in(3), timeout_s=WAIT_S)
            assert [member.node for member in status.local.members] == ["n0", "n2"]
            assert [node.role for node in status.local.nodes] == ["member 0", "lost", "member 1"]
            assert not Path(status.local.nodes[1].root).exists()
            assert marked_processes(cluster.directory.mark("n1")) == []

            last = status.local.recoveries[-1]
            assert "member 1 lost with node n1" in last.cause
            assert last.epoch == 3 and last.source == "local"
            record, _ = read_record(cluster.directory.node_failures_file, time.time())
            found = {(node, each.kind, each.epoch) for node in record for each in record[node]}
            assert found == {("n0", "LostRank", 1), ("n1", "LostNode", 2)}
            with pytest.raises(InvalidJobError, match="node n1 is lost already"):
                await cluster.kill_node("n1")

    asyncio.run(scenario())


def test_a_daemon_that_takes_long_to_end_is_on_its_way_back(run_directory: Path) -> None:
    """It has closed its stream, and its process still runs; the control loop is told so, lest it
    takes the node for lost."""

    async def scenario() -> None:
        async with LocalCluster(tiny_job(), settings(run_directory)) as cluster:
            await cluster.wait_for(runs_in(1), timeout_s=WAIT_S)
            lingers, before = cluster.directory.memory / "n1" / "lingers", cluster.status.local
            lingers.touch()
            os.kill(before.nodes[1].daemon_pid, signal.SIGTERM)
            await cluster.wait_for(lambda s: not s.local.nodes[1].connected, timeout_s=WAIT_S)
            assert cluster._control is not None
            seen = cluster._control._observe().nodes
            assert (seen["n0"].returning, seen["n1"].returning) == (False, True)
            lingers.unlink()
            back = await cluster.wait_for(lambda s: s.local.nodes[1].connected, timeout_s=WAIT_S)
            assert back.epoch == 1
            assert back.local.nodes[1].incarnation == before.nodes[1].incarnation + 1
            assert not cluster._control._observe().nodes["n1"].returning

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_node_that_is_lost_during_a_look_is_lost_once(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed_at = Supervisor.daemon_changed_at

    def look(supervisor: Supervisor, node: str) -> float:
        if node == "n1" and not supervisor.is_dead(node) and dies.is_set():
            kill_node(supervisor._directory, node)
        return changed_at(supervisor, node)

    async def scenario() -> None:
        async with LocalCluster(tiny_job(missed=QUICK), settings(run_directory)) as cluster:
            await cluster.wait_for(runs_in(1), timeout_s=WAIT_S)
            dies.set()
            status = await cluster.wait_for(runs_in(2), timeout_s=WAIT_S)
            assert [member.node for member in status.local.members] == ["n0", "n2"]
            assert "member 1 lost with node n1" in status.local.recoveries[-1].cause

    dies = asyncio.Event()
    monkeypatch.setattr(Supervisor, "daemon_changed_at", look)
    asyncio.run(scenario())


def test_a_job_goes_on_without_a_node_and_with_it_when_it_is_back(run_directory: Path) -> None:
    async def scenario() -> None:
        policy = {"joinWaitSeconds": 1}
        job = tiny_job(nodes=3, spares=0, missed=QUICK, policy=policy, minNodes=2)
        async with LocalCluster(job, settings(run_directory)) as cluster:
            await cluster.wait_for(runs_in(1), timeout_s=WAIT_S)
            await cluster.kill_node("n1")
            status = await cluster.wait_for(runs_in(2), timeout_s=WAIT_S)
            assert [member.index for member in status.local.members] == [0, 2]
            assert {member.state for member in status.members} == {"running"}
            assert "members 2/3 (at least 2)" in progress_line(status)
            await asyncio.to_thread(
                main, ["inject", "start-node", "n1", "--dir", str(run_directory)]
            )
            status = await cluster.wait_for(
                lambda status: status.local.nodes[1].role.startswith("joining"), timeout_s=WAIT_S
            )
            assert status.local.nodes[1].role == "joining as member 1: starting"
            assert "members 2/3 (at least 2), 1 joining" in progress_line(status)
            status = await cluster.wait_for(runs_in(3), timeout_s=WAIT_S)
            assert [member.node for member in status.local.members] == ["n0", "n1", "n2"]
            assert status.recoveries == 1
            assert status.strength == StrengthStatus(active=3, desired=3, minimum=2)
            with pytest.raises(InvalidJobError, match="is not lost"):
                await cluster.start_node("n1")

    asyncio.run(scenario())


def standby_of(cluster: LocalCluster, node: str) -> int:
    """Pid of the standby agent on the node; 0 without one."""
    record = cluster.directory.read_record()
    assert record is not None
    standby = record.nodes[node].standby
    return 0 if standby is None else standby.process.pid


def has_standby(node: str) -> Callable[[Status], bool]:
    return lambda status: any(n.name == node and n.standby == "ready" for n in status.local.nodes)


async def wait_for_another_standby(cluster: LocalCluster, node: str, before: int) -> int:
    await cluster.wait_for(
        lambda status: has_standby(node)(status) and standby_of(cluster, node) != before,
        timeout_s=WAIT_S,
    )
    return standby_of(cluster, node)


def test_the_agent_that_waits_on_a_spare_becomes_that_of_a_lost_member(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        async with LocalCluster(
            tiny_job(spares=2, missed=QUICK), settings(run_directory)
        ) as cluster:
            await cluster.wait_for(has_standby("n2"), timeout_s=WAIT_S)
            pid = standby_of(cluster, "n2")
            assert pid and not standby_of(cluster, "n3")
            await cluster.wait_for(
                lambda _: has_standby("n2")(read_status(cluster.directory.status_file)),
                timeout_s=WAIT_S,
            )
            assert main(["status", "--dir", str(run_directory), "--once"]) == 0
            shown = capsys.readouterr().out
            assert "standby ready on n2" in shown and "on n3\n" not in shown

            await cluster.kill_node("n1")
            await cluster.wait_for(runs_in(2), timeout_s=WAIT_S)
            record = cluster.directory.read_record()
            assert record is not None
            assert {m: a.process.pid for m, a in record.nodes["n2"].agents.items()} == {1: pid}
            logs = {path.name for path in (run_directory / "logs").iterdir()}
            assert {"member-1.log", "member-1.1.log"} <= logs and "standby-n2.log" not in logs
            await cluster.wait_for(has_standby("n3"), timeout_s=WAIT_S)

            os.kill(pid, signal.SIGKILL)  # it is watched like any member's agent
            status = await cluster.wait_for(runs_in(3), timeout_s=WAIT_S)
            assert [member.node for member in status.local.members] == ["n0", "n2"]
            assert "the agent of member 1" in status.local.recoveries[-1].cause

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_standby_agent_that_dies_is_started_again_and_costs_the_job_nothing(
    run_directory: Path,
) -> None:
    async def scenario() -> None:
        async with LocalCluster(tiny_job(missed=QUICK), settings(run_directory)) as cluster:
            await cluster.wait_for(has_standby("n2"), timeout_s=WAIT_S)
            first = standby_of(cluster, "n2")
            os.kill(first, signal.SIGKILL)
            second = await wait_for_another_standby(cluster, "n2", first)
            posted = [e.message for e in cluster.events if e.reason == "StandbyExited"]
            assert posted == [
                "the standby agent on n2 was killed by SIGKILL (code 137); starting it again in 1 s"
            ]
            assert (cluster.status.epoch, cluster.status.recoveries) == (1, 0)
            await cluster.kill_daemon("n2")
            await cluster.wait_for(
                lambda s: s.local.nodes[2].connected and s.local.nodes[2].incarnation == 2,
                timeout_s=WAIT_S,
            )
            assert standby_of(cluster, "n2") == second
            await cluster.kill_node("n0")
            await cluster.wait_for(runs_in(2), timeout_s=WAIT_S)
            record = cluster.directory.read_record()
            assert record is not None and record.nodes["n2"].agents[0].process.pid == second

    asyncio.run(scenario())


def test_a_control_loop_takes_over_standby_agents_and_stops_those_it_does_not_want(
    run_directory: Path,
) -> None:
    async def scenario() -> None:
        first = LocalCluster(tiny_job(), settings(run_directory))
        await first.start()
        await first.wait_for(has_standby("n2"), timeout_s=WAIT_S)
        pid = standby_of(first, "n2")
        await first.detach()
        second = LocalCluster(tiny_job(), settings(run_directory))
        await second.start()
        await second.wait_for(has_standby("n2"), timeout_s=WAIT_S)
        assert standby_of(second, "n2") == pid
        await second.detach()
        without = replace(settings(run_directory), standbys=0)
        async with LocalCluster(tiny_job(), without) as third:
            await third.wait_for(lambda _: not standby_of(third, "n2"), timeout_s=WAIT_S)
            assert marked_processes(third.directory.mark("n2", "agent")) == []
            await third.wait_for(runs_in(1), timeout_s=WAIT_S)

    asyncio.run(scenario())


def test_workers_that_wait_for_room_are_reported_and_shown(run_directory: Path) -> None:
    full = run_directory / FULL

    async def scenario() -> None:
        async with LocalCluster(tiny_job(), settings(run_directory)) as cluster:
            agent_waits = "the agent of member 0 on n0 waits: NoRoom: the disk is full"
            status = await cluster.wait_for(
                lambda s: agent_waits in s.local.reason, timeout_s=WAIT_S
            )
            assert status.local.reason == f"0 of 4 ranks are at work in epoch 1; {agent_waits}"
            assert agent_waits in progress_line(status)
            full.unlink()
            status = await cluster.wait_for(runs_in(1), timeout_s=WAIT_S)
            posted = [
                event.message for event in status.local.events if event.reason == "WorkersWait"
            ]
            assert "those of member 0 on n0: NoRoom: the disk is full" in posted
            assert len(set(posted)) == len(posted)

    full.parent.mkdir(parents=True)
    full.touch()
    asyncio.run(scenario())


def test_notice_for_a_node_has_a_copy_made(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        job = tiny_job(spares=0, persistence={"uri": "file:///nowhere"})
        async with LocalCluster(job, settings(run_directory)) as cluster:
            await cluster.wait_for(runs_in(1), timeout_s=WAIT_S)
            assert main(["inject", "notice", "n1", "--dir", str(run_directory)]) == 0
            assert "node n1 will be taken away" in capsys.readouterr().out
            asked = [cluster.directory.root(node) / "persist" for node in ("n0", "n1")]
            await cluster.wait_for(
                lambda _: all(path.exists() and path.read_text() for path in asked),
                timeout_s=WAIT_S,
            )
            posted = [event for event in cluster.events if event.reason == "CopyRequested"]
            assert len(posted) == 1 and "notice given by holdfast inject" in posted[0].message
            assert [path.read_text().splitlines() for path in asked] == [[job.key]] * 2

    asyncio.run(scenario())


def test_a_run_takes_over_what_an_earlier_control_loop_left(run_directory: Path) -> None:
    async def scenario() -> None:
        first = LocalCluster(tiny_job(), settings(run_directory))
        await first.start()
        before = await first.wait_for(runs_in(1), timeout_s=WAIT_S)
        await first.kill_rank(0)
        before = await first.wait_for(runs_in(2), timeout_s=WAIT_S)
        await first.detach()
        first.directory.status_file.unlink()  # may be deleted at any time

        async with LocalCluster(tiny_job(), settings(run_directory)) as second:
            after = await second.wait_for(runs_in(2), timeout_s=WAIT_S)
            assert [node.daemon_pid for node in after.local.nodes] == [
                node.daemon_pid for node in before.local.nodes
            ]
            assert after.local.members[0].ranks[0].pid == before.local.members[0].ranks[0].pid
            assert second.events[0].reason == "Adopted"
            await second.kill_rank(2)
            await second.wait_for(runs_in(3), timeout_s=WAIT_S)

    asyncio.run(scenario())


def test_without_a_status_every_daemon_of_an_earlier_run_is_waited_for(
    run_directory: Path,
) -> None:
    """The only member's daemon does not dial, and the other node could take the job."""

    async def scenario() -> None:
        job = tiny_job(nodes=1, redundancy={"type": "None"})
        first = LocalCluster(job, settings(run_directory))
        await first.start()
        before = await first.wait_for(runs_in(1), timeout_s=WAIT_S)
        daemon = before.local.nodes[0].daemon_pid
        os.kill(daemon, signal.SIGSTOP)
        await first.detach()
        first.directory.status_file.unlink()

        async with LocalCluster(job, settings(run_directory)) as second:
            await second.wait_for(
                lambda s: "waiting for the daemon on n0, whose memory may hold" in s.local.reason,
                timeout_s=WAIT_S,
            )
            os.kill(daemon, signal.SIGCONT)
            after = await second.wait_for(runs_in(1), timeout_s=WAIT_S)
            assert after.local.members[0].ranks[0].pid == before.local.members[0].ranks[0].pid

    asyncio.run(scenario())


def test_files_that_daemons_delete_while_they_are_counted_count_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "held").write_bytes(bytes(4096))
    listed: list[tuple[str, list[str], list[str]]] = [(str(tmp_path), [], ["gone", "held"])]
    monkeypatch.setattr(os, "walk", lambda _: listed)
    assert held_bytes(tmp_path) == 4096


def test_its_processes_have_certificates_and_a_token_which_go_with_the_run(
    run_directory: Path,
) -> None:
    async def scenario() -> None:
        async with LocalCluster(tiny_job(), settings(run_directory)) as cluster:
            status = await cluster.wait_for(runs_in(1), timeout_s=WAIT_S)
            assert status.local.security == "mutual TLS"
            secrets = [*run_directory.rglob("*.key"), cluster.directory.token_file]
            assert [path.stat().st_mode & 0o777 for path in secrets] == 4 * [0o600]
            assert b"--tls" in command_of(status.local.nodes[0].daemon_pid)
        assert not list(run_directory.rglob("*.key"))
        assert not cluster.directory.token_file.exists()

    asyncio.run(scenario())


def test_a_run_without_identity_is_reported_and_shown_and_daemons_restart_without_it(
    run_directory: Path,
) -> None:
    async def scenario() -> None:
        first = LocalCluster(tiny_job(), settings(run_directory))
        await first.start()
        before = await first.wait_for(runs_in(1), timeout_s=WAIT_S)
        await first.detach()
        without = replace(settings(run_directory), insecure=True)
        async with LocalCluster(tiny_job(), without) as second:
            status = await second.wait_for(
                lambda s: (
                    len(s.local.nodes) == 3 and all(n.incarnation == 2 for n in s.local.nodes)
                ),
                timeout_s=WAIT_S,
            )
            assert status.local.security == "insecure"
            posted = [event for event in status.local.events if event.reason == "Insecure"]
            assert [event.warning for event in posted] == [True]
            assert status.local.nodes[0].daemon_pid != before.local.nodes[0].daemon_pid
            assert b"--insecure" in command_of(status.local.nodes[0].daemon_pid)

    asyncio.run(scenario())


def command_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


@pytest.mark.slow
def test_a_node_that_was_lost_while_no_control_loop_ran_is_replaced(run_directory: Path) -> None:
    async def scenario() -> None:
        job = tiny_job(spares=2, missed=QUICK)
        first = LocalCluster(job, settings(run_directory))
        await first.start()
        await first.wait_for(runs_in(1), timeout_s=WAIT_S)
        await first.detach()
        await first.kill_node("n0")
        hang = NodeFailure(kind=FailureKind.HANG, job=job.key, epoch=1, at=time.time())
        write_record(first.directory.node_failures_file, {"n2": (hang,)})
        async with LocalCluster(job, settings(run_directory)) as second:
            status = await second.wait_for(runs_in(2), timeout_s=WAIT_S)
            assert [member.node for member in status.local.members] == ["n3", "n1"]
            assert any(event.reason == "NodeAvoided" for event in second.events)

    asyncio.run(scenario())


@pytest.mark.slow
def test_an_unseen_exit_is_read_from_its_file(run_directory: Path) -> None:
    async def scenario() -> None:
        first = LocalCluster(tiny_job(), settings(run_directory))
        await first.start()
        await first.wait_for(runs_in(1), timeout_s=WAIT_S)
        record = first.directory.read_record()
        assert record is not None
        await first.detach()
        agent = record.nodes["n1"].agents[1]
        os.kill(agent.process.pid, signal.SIGTERM)
        exit_code = first.directory.exit_file("n1", agent.attempt)
        os.waitpid(agent.process.pid, 0)
        exit_code.write_text("143")
        async with LocalCluster(tiny_job(), settings(run_directory)) as second:
            await second.wait_for(lambda s: s.epoch > 1 and runs_in(s.epoch)(s), timeout_s=WAIT_S)
            assert any("exited with code 143" in event.message for event in second.events)

    asyncio.run(scenario())


def test_two_control_loops_cannot_have_one_directory(run_directory: Path) -> None:
    async def scenario() -> None:
        async with LocalCluster(tiny_job(), settings(run_directory)):
            with pytest.raises(StorageError, match="in use by another `holdfast run`"):
                await LocalCluster(tiny_job(), settings(run_directory)).start()

    asyncio.run(scenario())


def test_a_directory_keeps_its_job_and_nodes(run_directory: Path) -> None:
    async def scenario() -> None:
        first = LocalCluster(tiny_job(), settings(run_directory))
        await first.start()
        await first.detach()
        with pytest.raises(InvalidJobError, match="on 3 nodes, and this is"):
            await LocalCluster(tiny_job(spares=2), settings(run_directory)).start()
        async with LocalCluster(tiny_job(), settings(run_directory)):
            pass

    asyncio.run(scenario())


def test_waiting_for_what_cannot_come_ends_with_the_state_of_the_job(run_directory: Path) -> None:
    async def scenario() -> None:
        async with LocalCluster(tiny_job(5), settings(run_directory)) as cluster:
            with pytest.raises(UnreachableError, match="the job ended before step 100"):
                await cluster.wait_for(
                    lambda status: status.step >= 100, timeout_s=WAIT_S, what="step 100"
                )

    asyncio.run(scenario())


def test_memory_that_the_machine_does_not_have_is_refused_with_both_numbers(
    run_directory: Path,
) -> None:
    job = make_job(2)
    huge = type(job)(
        api_version=job.api_version,
        kind=job.kind,
        metadata=job.metadata,
        spec=type(job.spec)(
            nodes=2,
            parallelism=job.spec.parallelism,
            trainer=job.spec.trainer,
            snapshot=type(job.spec.snapshot)(memory_per_node="900Ti"),
        ),
    )

    async def scenario() -> None:
        with pytest.raises(MemoryBudgetError, match="on 2 virtual nodes") as caught:
            await LocalCluster(huge, settings(run_directory)).start()
        assert caught.value.needed_bytes == 2 * 900 * 1024**4

    asyncio.run(scenario())


def test_paths_that_are_too_long_for_sockets_are_refused(tmp_path: Path) -> None:
    where = LocalSettings(directory=tmp_path / "run", memory=tmp_path / ("x" * 100))

    async def scenario() -> None:
        with pytest.raises(InvalidJobError, match="too long for the nodes' sockets"):
            await LocalCluster(make_job(2), where).start()

    asyncio.run(scenario())


def test_a_daemon_that_cannot_start_is_reported_with_its_last_lines(run_directory: Path) -> None:
    broken = (sys.executable, "-c", "raise SystemExit('no room here')")
    where = LocalSettings(directory=run_directory, commands=Commands(daemon_program=broken))

    async def scenario() -> None:
        async with LocalCluster(tiny_job(), where) as cluster:
            await cluster.wait_for(
                lambda status: any(
                    "no room here" in event.message for event in status.local.events
                ),
                timeout_s=WAIT_S,
            )

    asyncio.run(scenario())
