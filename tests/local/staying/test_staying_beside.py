"""Two jobs whose processes stay share their nodes and daemons: one loses a rank, and the other does
not notice."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fault_files import fail_at
from harness import RawCluster, RawJob
from local_jobs import short_folder
from test_staying_dtensors import RANKS
from test_staying_stacks import Stack
from waiting import wait_for

from holdfast_cli.local import processes, supervisor
from holdfast_protos import codec, control_pb2

WAIT_S = 120.0


class TrainedJob:
    """A job of launchers and real trainers; the test plays its control loop."""

    def __init__(
        self, cluster: RawCluster, nodes: list[str], name: str, stack: str, directory: Path
    ) -> None:
        self._cluster = cluster
        self._raw = RawJob(cluster, nodes, name=f"team.{name}")
        self._directory = directory / name
        self._directory.mkdir()
        # What its ranks log; its cluster never starts.
        self.run = Stack(self._directory, stack)
        self._mark = f"{uuid.uuid4().hex}:{name}"
        self.begin_epoch()
        for node in nodes:
            self._launch(node)

    def _launch(self, node: str) -> None:
        daemon = self._cluster.daemons[node]
        command = [sys.executable, "-m", "holdfast.launch"]
        command += ["--socket", str(daemon.socket)]
        command += ["--job", self._raw.name, "--nodes", str(RANKS), "--nproc", "1"]
        command += ["--member-node", node, "--", *self.run.command]
        environment = os.environ | {"PYTHONUNBUFFERED": "1", processes.MARK: self._mark}
        log = self._directory / f"launcher-{node}.txt"
        supervisor.spawn(command, environment, log)  # type: ignore[attr-defined]  # forks, here

    def end(self) -> None:
        processes.kill_marked(self._mark)

    def begin_epoch(self, *restarting: int) -> None:
        """Publish the next epoch, in which ranks of `restarting` start anew."""
        self._raw.epoch += 1
        membership = replace(self._raw.membership(), restarting=frozenset(restarting))
        message = control_pb2.ControlMessage(membership=codec.membership_to_proto(membership))
        for node in self._raw.nodes:
            self._cluster.control.send(node, message)

    def pids(self) -> list[int]:
        return [one.pid for one in self.run.last() if one is not None]

    def steps(self) -> list[int]:
        """Steps that each rank has run in the present epoch; none where it has not come there."""
        last = [one for one in self.run.last() if one is not None]
        here = [one.step for one in last if one.epoch == self._raw.epoch]
        return here if len(here) == RANKS else []

    def wait_trained(self, steps: int = 20) -> None:
        """Wait until all ranks have run so many more steps in the present epoch."""
        wait_for(f"{self._raw.name} to train", self.steps, WAIT_S)
        until = max(self.steps()) + steps
        what = f"{self._raw.name} to come to step {until}"
        wait_for(what, lambda: self.steps() and min(self.steps()) >= until, WAIT_S)

    def lose(self, rank: int, point: str) -> None:
        """Kill a rank at a point, and begin an epoch once its launcher waits for one."""
        fail_at(self._directory, rank, point)
        node = self._raw.nodes[rank]

        def waits() -> bool:
            state = self._cluster.control.state(node, self._raw.name)
            return state is not None and state.agent_waiting

        wait_for("the launcher to wait", waits, WAIT_S)
        self.begin_epoch(rank)

    def report(self) -> str:
        texts = sorted(self._directory.glob("launcher-*"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in texts)


@contextmanager
def trained(**stacks: str) -> Iterator[list[TrainedJob]]:
    """Jobs that train on the same nodes: their names and stacks."""
    jobs: list[TrainedJob] = []
    with (
        RawCluster(arguments=("--metrics-port", "0")) as cluster,
        short_folder() as path,
    ):
        nodes = cluster.start_nodes(RANKS)
        try:
            for name, stack in stacks.items():
                jobs.append(TrainedJob(cluster, nodes, name, stack, path))
            for job in jobs:
                job.wait_trained()
            yield jobs
        finally:
            for job in jobs:
                job.end()
                print(job.report())
            print(cluster.report())


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("stack", "beside"), [("fsdp2", "hsdp"), ("tp", "ddp"), ("ddp", "fsdp2")])
def test_of_two_jobs_on_the_same_nodes_one_loses_a_rank_and_no_other_process_ends(
    stack: str, beside: str
) -> None:
    with trained(losing=stack, steady=beside) as (losing, steady):
        others, before = steady.pids(), losing.pids()
        for point in ("backward", "after-optimizer"):
            losing.lose(1, point)
            losing.wait_trained()
            after = losing.pids()
            assert [rank for rank in range(RANKS) if after[rank] != before[rank]] == [1]
            before = after
        steady.wait_trained()
        for job in (losing, steady):
            job.end()
        for job in (losing, steady):
            job.run.check()
        assert steady.pids() == others
        assert {line.epoch for rank in range(RANKS) for line in steady.run.lines(rank)} == {1}
