"""Daemons on empty memory restore from sets in a directory, byte for byte, or wait for it."""

from __future__ import annotations

from concurrent import futures
from pathlib import Path

import pytest
from harness import RawCluster, RawJob
from stored_sets import flip, store_set
from waiting import wait_for

from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Tier

OLD, NEW = Generation(2, 900), Generation(3, 1200)


@pytest.fixture
def job(cluster: RawCluster, tmp_path: Path) -> RawJob:
    """A job of three members on fresh memory, whose earlier run left two sets behind."""
    made = RawJob(cluster, cluster.start_nodes(3), tier=Tier(uri=f"file://{tmp_path}"))
    for generation in (OLD, NEW):
        store_set(tmp_path, made, generation)
    made.epoch = NEW.epoch
    return made


def test_a_job_without_memory_goes_on_from_the_newest_set_and_is_protected_again(
    job: RawJob,
) -> None:
    job.form()
    restored = job.start_trainers()
    assert job.check_restored(restored, NEW) == NEW
    assert {source for _, _, source in restored} == {"storage"}
    job.step = NEW.step
    newest = job.train(2)
    assert newest > NEW
    job.daemon(1).lose()
    job.nodes[1] = job.cluster.start_nodes(1)[0]
    job.form()
    restored = job.start_trainers()
    assert job.check_restored(restored, newest) == newest
    assert [source for _, _, source in restored] == ["local", "parity", "local"]


def test_a_flipped_bit_on_one_rank_sends_all_ranks_to_the_older_set(
    job: RawJob, tmp_path: Path
) -> None:
    flip(tmp_path, job, NEW, rank=2)
    job.form()
    assert job.check_restored(job.start_trainers(), OLD) == OLD
    reason = job.daemon(0).job(job.name)["line_reason"]
    assert f"{OLD} from file://{tmp_path}" in reason
    job.step = OLD.step
    job.train(1)


def test_more_losses_than_parity_covers_end_in_storage_and_not_at_the_beginning(
    job: RawJob,
) -> None:
    assert job.tier is not None
    job.tier = Tier(uri=job.tier.uri, every_s=3600.0)  # no copy of what is lost
    job.form()
    job.start_trainers()
    job.step = NEW.step
    job.train(1)
    for member in (0, 1):
        job.daemon(member).lose()
    job.nodes[:2] = job.cluster.start_nodes(2)
    job.form()
    assert job.check_restored(job.start_trainers(), NEW) == NEW


def test_a_chosen_set_is_restored_although_a_newer_one_is_there(job: RawJob) -> None:
    assert job.tier is not None
    job.tier = Tier(uri=job.tier.uri, restore_from=str(OLD))
    job.form()
    assert job.check_restored(job.start_trainers(), OLD) == OLD


def test_a_mount_point_without_its_file_system_is_waited_for_until_it_is_mounted(
    job: RawJob, tmp_path: Path
) -> None:
    assert job.tier is not None
    held = tmp_path.parent / "not-mounted"
    (tmp_path / job.name).rename(held)
    job.tier = Tier(uri=job.tier.uri, persisted=str(NEW))
    job.form()
    with futures.ThreadPoolExecutor(1) as pool:
        restored = pool.submit(job.start_trainers)
        wait_for(
            "the daemon to say that it waits",
            lambda: "is not mounted" in job.daemon(0).job(job.name).get("problem", ""),
        )
        assert not restored.done()
        held.rename(tmp_path / job.name)
        assert job.check_restored(restored.result(), NEW) == NEW


def test_storage_out_of_reach_is_waited_for_and_reported(job: RawJob, tmp_path: Path) -> None:
    held = tmp_path.parent / "elsewhere"
    (tmp_path / job.name).rename(held)
    (tmp_path / job.name).write_text("not a directory")
    job.form()
    with futures.ThreadPoolExecutor(1) as pool:
        restored = pool.submit(job.start_trainers)
        wait_for(
            "the daemon to say that it waits",
            lambda: "a fresh start would lose" in job.daemon(0).job(job.name).get("problem", ""),
        )
        assert not restored.done()
        (tmp_path / job.name).unlink()
        held.rename(tmp_path / job.name)
        assert job.check_restored(restored.result(), NEW) == NEW


def test_a_set_of_another_number_of_ranks_is_refused_and_the_job_waits(
    job: RawJob, cluster: RawCluster, tmp_path: Path
) -> None:
    other = RawJob(cluster, job.nodes, name="other", tier=job.tier)
    store_set(tmp_path, other, NEW, world_size=2)
    other.epoch = NEW.epoch
    other.form()
    wait_for(
        "the daemon to refuse it",
        lambda: (
            "load it with torch.distributed.checkpoint"
            in other.daemon(0).job(other.name).get("problem", "")
        ),
    )
    assert other.daemon(0).job(other.name)["line_reason"] is None


def test_a_job_without_any_set_begins_from_the_beginning(
    cluster: RawCluster, tmp_path: Path
) -> None:
    job = RawJob(cluster, cluster.start_nodes(2), tier=Tier(uri=f"file://{tmp_path}"))
    job.form()
    restored = job.start_trainers()
    assert [generation for generation, _, _ in restored] == [None, None]
    assert "holds no complete copy" in restored[0][2]
    job.train(1)
