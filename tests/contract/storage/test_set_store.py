"""One suite over all kinds of places."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import pytest
from stored_snapshots import JOB, TOPOLOGY, check_set, generations, snapshot, store_set
from tiers import TierUnderTest

from holdfast_core.errors import CorruptError, StorageError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import PIECE_BYTES
from holdfast_storage.failing import WriteStoppedError

OLD, NEW = Generation(1, 90), Generation(2, 10)
DIRECTORY = "00000002.000000000010"


def test_what_was_committed_comes_back_byte_for_byte(tier: TierUnderTest) -> None:
    store = tier.store()
    store_set(store, OLD)
    files = store_set(store, NEW)
    found = tier.store().complete()
    assert [s.generation for s in found] == [NEW, OLD]
    assert found.rejected == ()
    assert (found[0].files, found[0].topology, found[0].job) == (tuple(files), TOPOLOGY, JOB)
    for stored in found:
        check_set(store, stored)
    assert msgspec.json.decode(tier.get("latest.json"))["generation"] == "2.10"


def test_a_large_file_goes_in_parts(tier: TierUnderTest) -> None:
    store = tier.store()
    large = 40 * 1024 * 1024
    one = snapshot(0, NEW, world_size=1, nbytes=large)
    store.commit(NEW, [one.store(store)])
    check_set(store, store.complete()[0], nbytes=large)


def test_an_empty_tier_has_no_sets(tier: TierUnderTest) -> None:
    assert tier.store().complete() == []
    assert tier.store().clean(keep=1, keep_every=0).files == 0


def test_an_uncommitted_set_is_not_listed(tier: TierUnderTest) -> None:
    store = tier.store()
    for rank in range(2):
        snapshot(rank, NEW).store(store)
    assert generations(store) == []
    assert store.complete().rejected == ()


def test_a_file_that_is_there_is_not_sent_again(tier: TierUnderTest) -> None:
    store, one = tier.store(), snapshot(0, NEW)
    first = one.store(store)

    def never(start: int, end: int) -> Iterator[memoryview]:
        raise AssertionError("it was read again")

    again = store.write_rank(NEW, 0, layout=one.layout, manifest=one.manifest, read=never)
    assert again == first


def test_a_commit_again_is_the_same_as_once(tier: TierUnderTest) -> None:
    store = tier.store()
    files = store_set(store, NEW)
    before = tier.get(f"{DIRECTORY}/manifest.json")
    store.commit(NEW, files)
    assert tier.get(f"{DIRECTORY}/manifest.json") == before


def test_a_complete_set_is_not_overwritten_by_another_of_its_name(tier: TierUnderTest) -> None:
    store = tier.store()
    files = store_set(store, NEW)
    other = snapshot(0, NEW, nbytes=500_000)
    with pytest.raises(StorageError, match=r"complete .* with other bytes for rank 0"):
        other.store(store)
    check_set(store, store.complete()[0])
    with pytest.raises(StorageError, match=r"complete .* with other files"):
        store.commit(NEW, [files[0], replace(files[1], manifest_digest=7)])


def test_an_older_commit_does_not_turn_the_hint_back(tier: TierUnderTest) -> None:
    store = tier.store()
    store_set(store, NEW)
    store_set(store, OLD)
    assert msgspec.json.decode(tier.get("latest.json"))["generation"] == "2.10"
    tier.put("latest.json", b"{ damaged")
    store_set(store, Generation(2, 11))
    assert msgspec.json.decode(tier.get("latest.json"))["generation"] == "2.11"


def test_a_hint_that_a_late_writer_turned_back_is_mended_before_its_set_is_removed(
    tier: TierUnderTest,
) -> None:
    store = tier.store()
    store_set(store, OLD)
    late = tier.get("latest.json")
    store_set(store, NEW)
    tier.put("latest.json", late)
    store.clean(keep=1, keep_every=0)
    assert [one.generation for one in store.complete()] == [NEW]
    assert msgspec.json.decode(tier.get("latest.json"))["generation"] == "2.10"


def test_a_wrong_byte_is_not_stored(tier: TierUnderTest) -> None:
    store, one = tier.store(), snapshot(1, NEW)
    wrong = bytearray(one.payload)
    wrong[PIECE_BYTES + 5] ^= 1
    with pytest.raises(CorruptError, match=r"piece 1 of .*rank-00001\.safetensors"):
        store.write_rank(
            NEW,
            1,
            layout=one.layout,
            manifest=one.manifest,
            read=lambda start, end: [memoryview(wrong)[start:end]],
        )
    assert tier.files() == {}


@pytest.mark.parametrize("length", [-1, 1])
def test_too_few_and_too_many_bytes_are_not_stored(tier: TierUnderTest, length: int) -> None:
    store, one = tier.store(), snapshot(0, NEW)
    other = memoryview(one.payload + b"x")[: len(one.payload) + length]
    with pytest.raises(CorruptError, match="fewer" if length < 0 else "more"):
        store.write_rank(
            NEW, 0, layout=one.layout, manifest=one.manifest, read=lambda start, end: [other]
        )
    assert tier.files() == {}


@pytest.mark.parametrize("nbytes", [600_000, 40 * 1024 * 1024])
def test_a_write_that_is_stopped_leaves_nothing(tier: TierUnderTest, nbytes: int) -> None:
    store, one, stop = tier.store(), snapshot(0, NEW, nbytes=nbytes), threading.Event()

    def read(start: int, end: int) -> Iterator[memoryview]:
        yield memoryview(one.payload)[: end - 10]
        stop.set()
        yield memoryview(one.payload)[end - 10 :]

    with pytest.raises(WriteStoppedError):
        store.write_rank(NEW, 0, layout=one.layout, manifest=one.manifest, read=read, stop=stop)
    assert tier.files() == {}
    one.store(store)


def test_a_commit_requires_every_file_as_it_was_reported(tier: TierUnderTest) -> None:
    store = tier.store()
    files = [snapshot(rank, NEW).store(store) for rank in range(2)]
    with pytest.raises(CorruptError, match="captured by 2 ranks"):
        store.commit(NEW, files[:1])
    with pytest.raises(CorruptError, match="each rank once"):
        store.commit(NEW, [files[0], files[0]])
    whole = tier.get(f"{DIRECTORY}/rank-00001.safetensors")
    tier.put(f"{DIRECTORY}/rank-00001.safetensors", whole[:-1])
    with pytest.raises(CorruptError, match=f"is {len(whole) - 1} bytes"):
        store.commit(NEW, files)
    tier.remove(f"{DIRECTORY}/rank-00001.safetensors")
    with pytest.raises(CorruptError, match="is missing"):
        store.commit(NEW, files)
    assert generations(store) == []


def _shorter(tier: TierUnderTest) -> None:
    path = f"{DIRECTORY}/rank-00001.safetensors"
    tier.put(path, tier.get(path)[:-1])


def _missing(tier: TierUnderTest) -> None:
    tier.remove(f"{DIRECTORY}/rank-00000.safetensors")


def _torn(tier: TierUnderTest) -> None:
    path = f"{DIRECTORY}/manifest.json"
    tier.put(path, tier.get(path)[:-30])


def _changed(tier: TierUnderTest) -> None:
    path = f"{DIRECTORY}/manifest.json"
    tier.put(path, tier.get(path).replace(b'"world_size":2', b'"world_size":1'))


def _of_another(tier: TierUnderTest) -> None:
    tier.put(f"{DIRECTORY}/manifest.json", tier.get("00000001.000000000090/manifest.json"))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_shorter, r"rank-00001\.safetensors has \d+ bytes instead of \d+"),
        (_missing, r"rank-00000\.safetensors is missing"),
        (_torn, "cannot be read"),
        (_changed, "does not match its own checksum"),
        (_of_another, r"is of 1\.90"),
    ],
)
def test_a_damaged_set_is_named_and_the_older_one_stays(
    tier: TierUnderTest, spoil: Callable[[TierUnderTest], None], reason: str
) -> None:
    store = tier.store()
    store_set(store, OLD)
    store_set(store, NEW)
    spoil(tier)
    found = store.complete()
    assert [s.generation for s in found] == [OLD]
    assert [r.generation for r in found.rejected] == [NEW]
    assert re.search(reason, found.rejected[0].reason)
    check_set(store, found[0])


def test_a_wrong_byte_in_storage_is_found_and_named(tier: TierUnderTest) -> None:
    store = tier.store()
    files = store_set(store, NEW)
    path = f"{DIRECTORY}/rank-00001.safetensors"
    data = bytearray(tier.get(path))
    data[files[1].header_bytes + PIECE_BYTES + 3] ^= 4
    tier.put(path, bytes(data))
    opened = store.open_rank(store.complete()[0], 1)
    first = bytearray(PIECE_BYTES)
    opened.read_into(0, 1, memoryview(first))
    assert first == snapshot(1, NEW).payload[:PIECE_BYTES]
    with pytest.raises(CorruptError, match=r"piece 1 of .*rank-00001"):
        opened.read_into(1, 2, memoryview(first))
    data[100] ^= 4
    tier.put(path, bytes(data))
    with pytest.raises(CorruptError, match=r"header of .*rank-00001"):
        store.open_rank(store.complete()[0], 1)


def test_pieces_that_are_not_there_are_refused(tier: TierUnderTest) -> None:
    store = tier.store()
    store_set(store, NEW)
    opened = store.open_rank(store.complete()[0], 0)
    for first, end, size in [(0, 1, 5), (2, 1, 0), (0, opened.pieces + 1, 600_000), (-1, 0, 0)]:
        with pytest.raises(ValueError, match="pieces"):
            opened.read_into(first, end, memoryview(bytearray(size)))
    opened.read_into(1, 1, memoryview(b""))
    with pytest.raises(StorageError, match="no rank 2"):
        store.open_rank(store.complete()[0], 2)
