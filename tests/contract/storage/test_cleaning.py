"""What is removed, what never is, and that a crash in the middle changes neither."""

from __future__ import annotations

import pytest
from stored_snapshots import check_set, generations, snapshot, store_set
from tiers import TierUnderTest

from holdfast_core.durable.choice import MARK_FILE
from holdfast_core.errors import InvalidJobError, StorageError
from holdfast_core.snapshots.generations import Generation
from holdfast_storage.roots import TierRoot
from holdfast_storage.sets import SetStore


def _generation(step: int) -> Generation:
    return Generation(1, step)


def _name(step: int) -> str:
    return f"00000001.{step:012d}"


def test_the_newest_and_those_of_every_so_many_steps_stay(tier: TierUnderTest) -> None:
    store = tier.store()
    for step in range(1, 8):
        store_set(store, _generation(step))
    cleaned = store.clean(keep=2, keep_every=3)
    assert [r.generation.step for r in cleaned.sets] == [1, 2, 4, 5]
    assert cleaned.files == 12
    assert [g.step for g in generations(store)] == [7, 6, 3]
    for stored in store.complete():
        check_set(store, stored)
    assert {path.partition("/")[0] for path in tier.files()} == {
        *(_name(step) for step in (3, 6, 7)),
        "latest.json",
        MARK_FILE,
    }
    again = store.clean(keep=2, keep_every=3)
    assert (again.sets, again.files, again.bytes) == ((), 0, 0)


def test_what_was_never_completed_goes_once_a_newer_set_is(tier: TierUnderTest) -> None:
    store = tier.store()
    snapshot(0, _generation(1)).store(store)
    snapshot(0, _generation(3)).store(store)
    assert store.clean(keep=1, keep_every=0).files == 0
    store_set(store, _generation(2))
    assert [r.generation.step for r in store.clean(keep=1, keep_every=1).sets] == [1]
    assert sorted(tier.files()) == [
        f"{_name(2)}/manifest.json",
        f"{_name(2)}/rank-00000.safetensors",
        f"{_name(2)}/rank-00001.safetensors",
        f"{_name(3)}/rank-00000.safetensors",
        "latest.json",
        MARK_FILE,
    ]


def test_what_is_young_may_still_be_written(tier: TierUnderTest) -> None:
    store = tier.store(grace_s=3600.0)
    snapshot(0, _generation(1)).store(store)
    store_set(store, _generation(2))
    assert store.clean(keep=1, keep_every=0).files == 0


def test_a_damaged_set_goes_when_enough_newer_ones_are_complete(tier: TierUnderTest) -> None:
    store = tier.store()
    for step in (1, 2, 3):
        store_set(store, _generation(step))
    tier.remove(f"{_name(1)}/rank-00001.safetensors")
    tier.put(f"{_name(3)}/manifest.json", b"{}")
    assert store.clean(keep=1, keep_every=0).sets[0].generation.step == 1
    assert [r.generation.step for r in store.complete().rejected] == [3]
    assert [g.step for g in generations(store)] == [2]


def test_a_file_that_the_manifest_does_not_name_goes(tier: TierUnderTest) -> None:
    store = tier.store()
    store_set(store, _generation(1))
    tier.put(f"{_name(1)}/rank-00002.safetensors", b"of a larger world that was given up")
    assert store.clean(keep=1, keep_every=0).files == 1
    check_set(store, store.complete()[0])


def test_files_of_others_are_left_alone(tier: TierUnderTest) -> None:
    store = tier.store()
    strange = ["notes.txt", f"{_name(1)}/README", f"{_name(2)}/x/rank-00000.safetensors"]
    strange += ["1.2/rank-00000.safetensors", "latest.json.bak", "..00000001.000000000001/x"]
    for path in strange:
        tier.put(path, b"mine")
    store_set(store, _generation(3))
    store.clean(keep=1, keep_every=0)
    assert set(strange) <= set(tier.files())
    assert [g.step for g in generations(store)] == [3]


def test_a_tier_keeps_at_least_one(tier: TierUnderTest) -> None:
    with pytest.raises(InvalidJobError, match="keep must be at least 1"):
        tier.store().clean(keep=0, keep_every=0)


class _Failing:
    """A place whose deletions fail from a call on."""

    def __init__(self, root: TierRoot, allowed: int) -> None:
        self._root = root
        self._left = allowed

    def __getattr__(self, name: str) -> object:
        return getattr(self._root, name)

    def delete(self, paths: list[str]) -> None:
        if self._left == 0:
            raise StorageError("the storage went away")
        self._left -= 1
        self._root.delete(paths)


@pytest.mark.parametrize("allowed", range(4))
def test_a_removal_that_breaks_off_leaves_no_half_of_a_set(
    tier: TierUnderTest, allowed: int
) -> None:
    store = tier.store()
    for step in (1, 2, 3):
        store_set(store, _generation(step))
    failing = SetStore(
        tier.uri,
        store.job,
        root=_Failing(tier.root(), allowed),  # type: ignore[arg-type]
        grace_s=-60.0,
    )
    with pytest.raises(StorageError, match="went away"):
        failing.clean(keep=1, keep_every=0)
    found = store.complete()
    assert found.rejected == ()
    assert [s.generation.step for s in found] == [3, 2, 1][: 3 - (allowed + 1) // 2]
    store.clean(keep=1, keep_every=0)
    assert {path.partition("/")[0] for path in tier.files()} == {_name(3), "latest.json", MARK_FILE}
