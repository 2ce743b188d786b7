"""What a chaos run checks of stored sets finds each thing that can be wrong with them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_tier import WRONG, ChaosTier
from harness import JOB, RawCluster, RawJob
from raw_trainer import content_of
from stored_sets import flip, store_set, write_set
from versitygw import S3Server

from holdfast_core.snapshots.generations import Generation
from holdfast_storage.sets import SetStore

SETS = [Generation(1, step) for step in (2, 4, 6)]


@pytest.fixture
def job(cluster: RawCluster, tmp_path: Path) -> Iterator[RawJob]:
    """A job of two ranks that do not run, and three sets of it."""
    made = RawJob(cluster, ["a", "b"], nbytes=50_000)
    for generation in SETS:
        store_set(tmp_path / "tier", made, generation)
    yield made
    cluster.jobs.clear()


@pytest.fixture
def tier(tmp_path: Path) -> ChaosTier:
    return ChaosTier.directory(JOB, tmp_path / "tier")


def _wrong(tier: ChaosTier, job: RawJob) -> str:
    return tier.wrong(lambda rank, found: content_of(rank, found, job.rank_bytes(rank)))


def test_sets_with_all_their_bytes_are_right_and_counted_once(tier: ChaosTier, job: RawJob) -> None:
    assert _wrong(tier, job) == ""
    assert (tier.newest_sound(), tier.take_count()) == (SETS[-1], 3)
    assert _wrong(tier, job) == ""
    assert tier.take_count() == 0


def test_a_set_that_is_whole_and_has_other_bytes_than_were_captured_is_found(
    tier: ChaosTier, job: RawJob
) -> None:
    other = tier.wrong(lambda rank, _: content_of(rank, Generation(9, 9), job.rank_bytes(rank)))
    assert other.startswith(WRONG)


def test_a_flipped_byte_and_a_missing_file_are_found(tier: ChaosTier, job: RawJob) -> None:
    flip(tier.real, job, SETS[1], rank=1)
    assert "cannot be read" in _wrong(tier, job)
    (tier.real / JOB / "00000001.000000000004" / "rank-00001.safetensors").unlink()
    assert "not whole" in _wrong(tier, job)


def test_what_was_spoiled_on_purpose_is_not_a_violation(tier: ChaosTier, job: RawJob) -> None:
    assert tier.flip(random.Random(3))
    (spoiled,) = tier.spoiled
    assert _wrong(tier, job) == ""
    assert tier.sound() == [one for one in reversed(SETS) if one != spoiled]
    assert tier.flip(random.Random(3)) == "", "two sound sets must be left"


@pytest.fixture
def objects(tmp_path: Path) -> Iterator[ChaosTier]:
    server = S3Server(tmp_path / "server")
    tier = ChaosTier.objects(JOB, server, "world")
    yield tier
    tier.close()
    server.stop()


@pytest.mark.s3
def test_sets_in_object_storage_are_seen(objects: ChaosTier, job: RawJob) -> None:
    assert (_wrong(objects, job), objects.complete()) == ("", [])
    write_set(SetStore(objects.tier.uri, JOB, options=objects.access.options), job, SETS[0])
    assert (_wrong(objects, job), objects.complete()) == ("", [SETS[0]])
    assert objects.take_count() == 1
