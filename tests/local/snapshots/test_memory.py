"""Memory that is too small, or fills up: refused beforehand, or skipped and counted."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest
from combinations import Combination
from daemons import DaemonProcess
from harness import RawCluster, RawJob
from small_tmpfs import TMPFS_BYTES
from waiting import WAIT_S, error_of, wait_for

from holdfast_core.errors import MemoryBudgetError, SnapshotSkippedError


def _fill(where: Path) -> Path:
    """Take all that is left of the file system."""
    hog = where / "hog"
    with hog.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
        try:
            while True:
                file.write(bytes(512))
        except OSError:
            return hog


def test_a_budget_beyond_the_tmpfs_is_refused_at_the_start_with_both_numbers(
    tmpfs: Path, cluster: RawCluster
) -> None:
    daemon = cluster.make_node("--budget", str(64 << 20), root=tmpfs / "node")
    daemon.start()
    assert daemon.process is not None
    assert daemon.process.wait(WAIT_S) == 2
    text = daemon.log.read_text()
    assert str(64 << 20) in text
    numbers = [int(number) for number in re.findall(r"\d{7,}", text)]
    assert any(TMPFS_BYTES - (1 << 20) <= number <= TMPFS_BYTES for number in numbers), text


def test_a_tmpfs_that_fills_up_costs_snapshots_and_not_training(
    tmpfs: Path, cluster: RawCluster, combination: Combination
) -> None:
    full = cluster.make_node("--budget", str(8 << 20), root=tmpfs / "node")
    full.start()
    cluster.wait_beat(full.node)
    job = combination.job(cluster, [*cluster.start_nodes(2), full.node])
    job.form()
    job.start_trainers()
    newest = job.train(2)
    wait_for("the memory of older parity", lambda: _has_given_back(full, job))  # not meanwhile
    hog = _fill(tmpfs)
    for _ in range(3):
        job.step += 1
        for trainer in job.trainers:
            try:
                trainer.save(job.step)
            except grpc.RpcError as failed:
                assert isinstance(error_of(failed), SnapshotSkippedError)
    assert job.protected() == newest
    namespace, name = job.name.split(".")
    labels = f'cause="storage",moejob="{name}",namespace="{namespace}"'
    sample = f"holdfast_saves_failed_total{{{labels}}}"
    assert full.metric(sample) >= 1
    hog.unlink()
    wait_for("protection to recover", lambda: job.try_save() == _protected_later(job))
    newest = job.generation
    job.form()
    assert job.check_restored(job.start_trainers(), newest) == newest
    job.train(2)


def _has_given_back(daemon: DaemonProcess, job: RawJob) -> bool:
    """Whether parity blocks that hold nothing take no memory, as after a second or two."""
    files = daemon.root / "jobs" / job.name / "parity"
    free = [each for each in daemon.job(job.name)["parity"] if each["state"] == "free"]
    blocks = [files / f"{each['lane']}-{each['slot']}.block" for each in free]
    return not any(block.exists() and block.stat().st_blocks for block in blocks)


def _protected_later(job: RawJob) -> object:
    """The newest generation that is protected, once this step had its chance."""
    wait_for(
        "every daemon to settle the step",
        lambda: all(
            not any(s["state"] in ("granted", "sealing") for s in held.get("slots", ()))
            for held in (job.daemon(m).job(job.name) for m in range(job.size))
        ),
    )
    try:
        job.wait_protected(job.step, timeout_s=2.0)
    except AssertionError:
        return None
    return job.generation


def test_a_session_that_does_not_fit_the_budget_is_refused_and_leaves_nothing(
    cluster: RawCluster,
) -> None:
    job = RawJob(cluster, cluster.start_nodes(2, "--budget", "1000000"), nbytes=500_000)
    job.form()
    trainer = job.make_trainer(0)
    trainer.join(job.epoch)
    with pytest.raises(grpc.RpcError) as refused:
        trainer.open()
    error = error_of(refused.value)
    assert isinstance(error, MemoryBudgetError)
    assert error.needed_bytes > 1_000_000 == error.available_bytes
    assert "1000000" in str(error)
    _check_nothing_is_left(job.daemon(0), job)
    problem = job.daemon(0).job(job.name)["problem"]
    assert problem == f"rank 0 trains unprotected, without memory for snapshots: {error}"

    small = RawJob(cluster, job.nodes, name="small", nbytes=50_000)
    small.form()
    small.start_trainers()
    small.train(2)


def _check_nothing_is_left(daemon: DaemonProcess, job: RawJob) -> None:
    assert daemon.status()["memory_used_bytes"] == 0
    kept = [p for p in (daemon.root / "jobs" / job.name).rglob("*") if p.is_file()]
    assert [p.name for p in kept] == ["epoch.json"]
