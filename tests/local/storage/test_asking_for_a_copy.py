"""`holdfast persist` against daemons that ask for the job's token, as those of a local run do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import JOB, RawCluster, RawJob

from holdfast_cli.commands.persist import persist
from holdfast_cli.local.directory import RunDirectory
from holdfast_cli.local.status import LocalStatus, NodeStatus, Status, encode
from holdfast_cli.main import build_parser
from holdfast_core.errors import HoldfastError
from holdfast_core.job.status import Phase
from holdfast_core.snapshots.membership import Redundancy, Tier
from holdfast_storage.sets import SetStore

TOKEN = "a-token-of-this-job"


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run", JOB, tmp_path / "memory")
    made.make()
    made.token_file.write_text(TOKEN + "\n")
    return made


@pytest.fixture
def job(directory: RunDirectory, tmp_path: Path) -> Iterator[RawJob]:
    """One that trains on two nodes, whose daemons write nothing until they are asked to."""
    arguments = ("--auth", "token-files", "--tokens", str(directory.tokens))
    with RawCluster(arguments=arguments) as cluster:
        nodes = cluster.start_nodes(2)
        for daemon in cluster.daemons.values():
            daemon.token = TOKEN
        tier = Tier(uri=(tmp_path / "tier").as_uri(), every_s=3600.0)
        job = RawJob(cluster, nodes, redundancy=Redundancy.REPLICATION, tier=tier)
        job.form()
        job.start_trainers()
        job.train(2)
        directory.status_file.write_bytes(encode(_status(directory, job)))
        yield job


def _status(directory: RunDirectory, job: RawJob) -> Status:
    local = LocalStatus(
        job=JOB,
        time=time.time(),
        pid=0,
        directory=str(directory.path),
        reason="",
        revision=0,
        world_size=job.size,
        line="",
        line_reason="",
        complete="",
        nodes=tuple(_node(job, index) for index in range(job.size)),
    )
    return Status(
        phase=Phase.RUNNING,
        epoch=job.epoch,
        step=job.step,
        protected=str(job.generation),
        local=local,
    )


def _node(job: RawJob, index: int) -> NodeStatus:
    daemon = job.daemon(index)
    return NodeStatus(
        name=daemon.node,
        role=f"member {index}",
        member=index,
        connected=True,
        host=daemon.host,
        root=str(daemon.root),
        socket=str(daemon.root / "daemon.sock"),
        daemon_pid=0,
        incarnation=1,
        memory_used_bytes=0,
        memory_budget_bytes=0,
    )


def _persist(directory: RunDirectory) -> int:
    return persist(build_parser().parse_args(["persist", "--dir", str(directory.path)]))


def test_the_command_sends_the_token_of_the_run_and_waits_for_the_set(
    job: RawJob, directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job.tier is not None
    assert _persist(directory) == 0
    assert f"generation {job.generation} of {JOB} is in durable storage" in capsys.readouterr().out
    assert [one.generation for one in SetStore(job.tier.uri, JOB).complete()] == [job.generation]


def test_without_the_jobs_token_nothing_is_asked_for(job: RawJob, directory: RunDirectory) -> None:
    directory.token_file.unlink()
    with pytest.raises(HoldfastError, match="the job's token"):
        _persist(directory)
