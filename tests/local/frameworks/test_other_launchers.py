"""Processes that another launcher starts, with nothing but ranks in their environment, on real
daemons: the launcher is the test's own, and the reconciler only sees where its pods are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from harness import RawCluster
from msgspec.structs import replace
from operator_control import OperatorControl
from ports import reserve_port
from waiting import wait_for

from holdfast_core.job.parsing import parse_job
from holdfast_operator.reconciler.observe.views import (
    AgentState,
    AgentView,
    ClusterView,
    ControlState,
    NodeView,
    PublishMembership,
)
from holdfast_operator.reconciler.reconcile import reconcile
from holdfast_protos import codec, control_pb2

ROOT = Path(__file__).resolve().parents[3]
RANKS, STEPS, WAIT_S = 2, 100_000, 300.0
SCRIPT = str(ROOT / "examples" / "train_moe.py")
SIZES = ("--dim", "32", "--layers", "1", "--experts", "6")
POLICIES: dict[str, dict[str, Any]] = {
    "Full": {},
    "PartialExperts": {"type": "PartialExperts", "partialExperts": {"lossLimit": 1}},
    "Selective": {"type": "Selective", "selective": {"experts": 1, "lossLimit": 1}},
    "Sparse": {"type": "Sparse", "sparse": {"window": 3, "repeats": "Optimizer"}},
}
"""The policies as a script would give them to `holdfast.Settings`."""
LOSSY = ("PartialExperts", "Selective")
RUN = """
import logging, runpy, sys
logging.basicConfig(level="INFO")
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
JOB = parse_job(
    {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "MoETrainingJob",
        "metadata": {"name": "job", "namespace": "tests"},
        "spec": {
            "nodes": RANKS,
            "parallelism": {"dp": RANKS, "ep": RANKS},
            "failurePolicy": {"detection": {"heartbeatSeconds": 1}},
            "trainer": {"external": True},
        },
    }
)


@dataclass
class Launcher:
    """Starts a process for each rank where it is told to, and again whenever it has ended."""

    cluster: RawCluster
    control: OperatorControl
    directory: Path
    homes: list[str]
    """Node of each rank."""
    policy: str
    """A key of `POLICIES`."""
    port: int = field(default_factory=reserve_port)
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    state: ControlState = field(default_factory=ControlState)

    @property
    def log(self) -> Path:
        """Log of rank 0."""
        return self.directory / "log-0"

    def start(self, rank: int) -> None:
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "OMP_NUM_THREADS": "1",
            "HOLDFAST_JOB": JOB.key,
            "HOLDFAST_SOCKET": str(self.cluster.daemons[self.homes[rank]].root / "daemon.sock"),
        }
        if policy := POLICIES[self.policy]:
            environment["HOLDFAST_POLICY"] = json.dumps(policy)
        command = [sys.executable, "-c", RUN, SCRIPT, *SIZES, "--hash-steps"]
        command += ["--log-file", str(self.log)]
        with (self.directory / f"rank{rank}.txt").open("ab") as output:
            self.processes[rank] = subprocess.Popen(
                [*command, "--steps", str(STEPS)],
                env=environment,
                stdout=output,
                stderr=output,
            )

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            self.processes[rank].kill()

    def look(self) -> None:
        """Start what has ended, and have the reconciler look once."""
        for rank in range(RANKS):
            alive = rank in self.processes and self.processes[rank].poll() is None
            if not alive and self.cluster.daemons[self.homes[rank]].alive:
                self.start(rank)
        known = self.state.membership
        on = {} if known is None else {m.node: m.index for m in known.members}
        nodes = dict[str, NodeView]()
        for name, daemon in self.cluster.daemons.items():
            if not daemon.alive:
                nodes[name] = NodeView(name=name, gone=True)
            elif (view := self.control.get(name)) is not None:
                nodes[name] = replace(view, job=self.control.state(name, JOB.key))
        agents = tuple(
            AgentView(member=on.get(node, -1), node=node, state=AgentState.RUNNING, number=number)
            for number, node in enumerate(self.homes)
        )
        observed = ClusterView(nodes=nodes, agents=agents)
        decision = reconcile(JOB, observed, self.state, time.monotonic())
        self.state = decision.state
        for action in decision.actions:
            assert isinstance(action, PublishMembership), action
            message = control_pb2.ControlMessage(
                membership=codec.membership_to_proto(action.membership)
            )
            self.control.send("", message)

    def steps(self) -> list[dict[str, Any]]:
        """Lines of the trainer's log."""
        with suppress(FileNotFoundError):
            whole = self.log.read_text().split("\n")[:-1]  # it is being written
            return [json.loads(line) for line in whole]
        return []

    def train(self, epoch: int) -> None:
        """Return when some steps of an epoch are protected."""

        def there() -> bool:
            self.look()
            saved = self.state.saved
            newest = self.state.membership.epoch if self.state.membership is not None else 0
            return newest >= epoch and saved is not None and saved.epoch == newest

        wait_for(f"protected steps of epoch {epoch}", there, WAIT_S)


@pytest.fixture
def launcher(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Launcher]:
    control: Any = OperatorControl()
    with RawCluster(arguments=("--metrics-port", "0"), control=control) as cluster:
        homes = cluster.start_nodes(RANKS + 1)[:RANKS]
        made = Launcher(
            cluster=cluster, control=control, directory=tmp_path, homes=homes, policy=request.param
        )
        yield made
        made.kill(*made.processes)
        for process in made.processes.values():
            process.wait()
        print(cluster.report())
        for rank in range(RANKS):
            print(f"--- rank {rank}", (tmp_path / f"rank{rank}.txt").read_text()[-1500:])


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", POLICIES, indirect=True)
def test_training_resumes_with_its_bytes_whatever_happens_to_its_pods(launcher: Launcher) -> None:
    n0, n1 = launcher.homes
    launcher.train(1)
    launcher.kill(1)
    launcher.train(2)
    epoch = launcher.state.epoch
    launcher.homes = [n1, n0]  # and no memory goes with them
    launcher.kill(0, 1)
    launcher.train(epoch + 1)
    membership = launcher.state.membership
    assert membership is not None and membership.order == (1, 0)
    epoch = launcher.state.epoch
    launcher.cluster.daemons[n0].kill()
    launcher.homes = ["n2", n1]
    launcher.kill(0, 1)
    launcher.train(epoch + 1)

    log, states = launcher.steps(), dict[int, str]()
    began = {
        after["epoch"]: after
        for before, after in pairwise(log)
        if before["epoch"] != after["epoch"]
    }
    assert len(began) >= 3
    assert all(line["step"] > 1 for line in began.values())
    if launcher.policy in LOSSY:
        assert log[-1]["lost"] > 0
        return
    for line in log:
        assert states.setdefault(line["step"], line["state"]) == line["state"], line
    for line in began.values():
        assert line["restored"] == states[line["step"] - 1], line
