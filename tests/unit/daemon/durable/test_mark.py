"""Storage without any set is known for the wrong one by the mark that the job left in the right."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from stored_snapshots import JOB, snapshot, store_set

from holdfast_core.durable.choice import MARK_FILE, choose_copy
from holdfast_core.errors import StorageError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Tier
from holdfast_daemon.durable.stored_sets import TierSets
from holdfast_storage.local import LocalRoot
from holdfast_storage.sets import SetStore

GENERATION = Generation(3, 1200)


def store(tier: Path) -> SetStore:
    return SetStore(str(tier), JOB)


def persist(tier: Path) -> None:
    store_set(store(tier), GENERATION, world_size=1)


def choice(tier: Path, persisted: str = "") -> tuple[bool, str]:
    """(whether the job begins afresh, why)."""
    known = Tier(uri=str(tier), persisted=persisted)
    found = TierSets(str(tier), JOB).find()
    chosen = choose_copy(found, known, epoch=9, world_size=lambda _: 1, unusable={})
    return chosen.fresh, chosen.reason


def test_the_mark_comes_with_the_first_set_and_explains_itself(tmp_path: Path) -> None:
    persist(tmp_path)
    mark = tmp_path / JOB / MARK_FILE
    assert json.loads(mark.read_bytes()) == {"format": "holdfast-tier/1", "job": JOB}
    before = mark.stat()
    persist(tmp_path)
    assert mark.stat().st_mtime_ns == before.st_mtime_ns


class MarklessRoot(LocalRoot):
    """Storage that takes everything but the mark."""

    def create(self, path: str, data: bytes) -> bool:
        if path.endswith(MARK_FILE):
            raise StorageError(f"{path} cannot be written")
        return super().create(path, data)


def test_no_set_is_complete_without_the_mark(tmp_path: Path) -> None:
    file = snapshot(0, GENERATION, world_size=1).store(store(tmp_path))
    markless = SetStore(str(tmp_path), JOB, root=MarklessRoot(tmp_path))
    with pytest.raises(StorageError, match=MARK_FILE):
        markless.commit(GENERATION, [file])
    assert TierSets(str(tmp_path), JOB).find().copies == ()
    store(tmp_path).commit(GENERATION, [file])
    assert len(TierSets(str(tmp_path), JOB).find().copies) == 1


def test_a_mark_that_was_half_written_is_cleaned_away_and_a_whole_one_is_not(
    tmp_path: Path,
) -> None:
    persist(tmp_path)
    half = tmp_path / JOB / f".{MARK_FILE}.{'0' * 16}.part"
    half.touch()
    os.utime(half, (0, 0))
    os.utime(tmp_path / JOB / MARK_FILE, (0, 0))
    store(tmp_path).clean(keep=1, keep_every=0)
    assert not half.exists()
    assert (tmp_path / JOB / MARK_FILE).exists()


def test_a_job_that_was_never_persisted_begins_afresh(tmp_path: Path) -> None:
    assert choice(tmp_path)[0]
    assert choice(tmp_path / "not-made-yet")[0]
    assert not any(tmp_path.iterdir())  # looking leaves nothing behind


def test_storage_that_is_not_mounted_is_waited_for(tmp_path: Path) -> None:
    mounted, mount_point = tmp_path / "mounted", tmp_path / "mount-point"
    persist(mounted)
    mount_point.mkdir()
    fresh, why = choice(mount_point, persisted=str(GENERATION))
    assert not fresh
    assert f"generation {GENERATION} was written there: the storage is not mounted" in why
    assert f"put an empty file {MARK_FILE} into the job's directory" in why
    assert choice(mounted, persisted=str(GENERATION)) == (
        False,
        f"generation {GENERATION} from {mounted}",
    )


def test_sets_that_were_removed_on_purpose_are_not_waited_for(tmp_path: Path) -> None:
    persist(tmp_path)
    for path in (tmp_path / JOB).iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    assert choice(tmp_path, persisted=str(GENERATION))[0]
    shutil.rmtree(tmp_path / JOB)
    assert not choice(tmp_path, persisted=str(GENERATION))[0]
    (tmp_path / JOB).mkdir()
    (tmp_path / JOB / MARK_FILE).touch()  # as the reason says
    assert choice(tmp_path, persisted=str(GENERATION))[0]


def test_sets_from_before_there_were_marks_are_as_good(tmp_path: Path) -> None:
    persist(tmp_path)
    (tmp_path / JOB / MARK_FILE).unlink()
    chosen = choice(tmp_path, persisted=str(GENERATION))
    assert chosen == (False, f"generation {GENERATION} from {tmp_path}")


def test_a_chosen_copy_is_asked_for_first(tmp_path: Path) -> None:
    known = Tier(uri=str(tmp_path), persisted="3.1", restore_from="2.1")
    found = TierSets(str(tmp_path), JOB).find()
    chosen = choose_copy(found, known, epoch=9, world_size=lambda _: 1, unusable={})
    assert not chosen.fresh and "restore.from asks for generation 2.1" in chosen.reason
