"""What bytes pass through on their way: verification, retries, and parts of uploads."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.errors import CorruptError, InvalidJobError, StorageError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import piece_digests
from holdfast_core.snapshots.manifests import Manifest
from holdfast_storage.generic import GenericRoot
from holdfast_storage.opening import open_root
from holdfast_storage.retrying import Retry
from holdfast_storage.s3 import _batches
from holdfast_storage.s3_calls import PartBody
from holdfast_storage.verified import verified

PIECE = 16


def _manifest(payload: bytes) -> Manifest:
    return Manifest(
        job="job",
        rank=0,
        world_size=1,
        generation=Generation(1, 2),
        layout_id="0" * 32,
        payload_bytes=len(payload),
        extras_offset=0,
        extras_bytes=len(payload),
        piece_bytes=PIECE,
        digests=piece_digests(payload, PIECE),
    )


def _cut(data: bytes, cuts: list[int]) -> list[memoryview]:
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [memoryview(data)[a:b] for a, b in itertools.pairwise(bounds)]


cuts = st.lists(st.integers(0, 1000), max_size=8)


@given(st.binary(max_size=100), cuts)
def test_sound_bytes_pass_however_they_are_cut(data: bytes, cuts: list[int]) -> None:
    assert b"".join(verified(_cut(data, cuts), _manifest(data), "file")) == data


@given(st.binary(min_size=1, max_size=100), cuts, st.integers(0, 99))
def test_no_byte_of_a_wrong_piece_passes(data: bytes, cuts: list[int], at: int) -> None:
    wrong = bytearray(data)
    wrong[at % len(data)] ^= 1
    passed = bytearray()
    with pytest.raises(CorruptError, match=f"piece {at % len(data) // PIECE} of file"):
        for part in verified(_cut(bytes(wrong), cuts), _manifest(data), "file"):
            passed += part
    assert passed == data[: at % len(data) // PIECE * PIECE]


@given(st.binary(max_size=100), cuts, st.sampled_from([-1, 1]))
def test_another_number_of_bytes_is_refused(data: bytes, cuts: list[int], more: int) -> None:
    other = (data + b"x")[: len(data) + more] if len(data) + more >= 0 else b""
    if len(other) != len(data):
        with pytest.raises(CorruptError, match="bytes than the"):
            list(verified(_cut(other, cuts), _manifest(data), "file"))


def test_waits_grow_to_a_limit_and_are_spread() -> None:
    longest = Retry(attempts=6, first_s=1.0, longest_s=5.0, chance=lambda: 1.0)
    assert list(longest.waits_s()) == [1.0, 2.0, 4.0, 5.0, 5.0]
    shortest = Retry(attempts=6, first_s=1.0, longest_s=5.0, chance=lambda: 0.0)
    assert list(shortest.waits_s()) == [0.5, 1.0, 2.0, 2.5, 2.5]
    assert list(Retry(attempts=1).waits_s()) == []


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"first_s": -1.0}, {"longest_s": 0.1}])
def test_retries_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidJobError):
        Retry(**wrong)  # type: ignore[arg-type]


@given(st.binary(max_size=100), cuts, st.integers(1, 40))
def test_parts_of_an_upload_are_full_but_the_last(data: bytes, cuts: list[int], size: int) -> None:
    batches = [b"".join(batch) for batch in _batches(_cut(data, cuts), size)]
    assert b"".join(batches) == data
    assert all(len(batch) == size for batch in batches[:-1])
    assert not batches or 0 < len(batches[-1]) <= size


@given(st.binary(max_size=60), cuts, st.integers(1, 20))
def test_a_body_reads_as_a_file_and_goes_as_it_lies(data: bytes, cuts: list[int], n: int) -> None:
    views = _cut(data, cuts)
    body = PartBody(views)
    assert (len(body), body.seek(0, 2), body.seek(0)) == (len(data), len(data), 0)
    assert b"".join(iter(lambda: body.read(n), b"")) == data
    assert body.tell() == len(data)
    body.seek(n % (len(data) + 1))
    assert body.read() == data[n % (len(data) + 1) :]

    async def sent() -> list[memoryview]:
        return [view async for view in body]

    for _ in range(2):
        assert [view.obj for view in asyncio.run(sent())] == [data for view in views if view.nbytes]


@pytest.mark.parametrize(
    "uri",
    [
        *("", "tier", "./tier", "../tier", "/a/../b", "file://tier", "file:///a/../b", "s3://"),
        *("simplecache::s3://bucket/x", "s3://bucket/../other", "memory://tier", "ftp://host/x"),
        *("zip://x.zip", "http://169.254.169.254/latest", "S3://bucket", "file://host/tier"),
    ],
)
def test_uris_that_name_no_one_place_are_refused(uri: str) -> None:
    with pytest.raises(InvalidJobError, match="not a valid path or URI for copies"):
        open_root(uri, {}, Retry())


def test_a_kind_of_storage_that_is_not_known_is_named() -> None:
    with pytest.raises(InvalidJobError, match="nowhere://x"):
        open_root("nowhere://x/y", {}, Retry())


def test_a_kind_of_storage_without_its_package_is_an_error_that_names_it() -> None:
    with pytest.raises(StorageError, match=r"opening gs://bucket/x: .*install what it names"):
        open_root("gs://bucket/x", {}, Retry())


def test_errors_of_a_file_system_that_are_all_its_own_are_translated() -> None:
    class Failing(MemoryFileSystem):  # type: ignore[misc]
        protocol = "failing"

        def info(self, path: str, **more: Any) -> Any:
            raise LookupError(f"no account for {path}")

    root = GenericRoot(Failing(), "/tier")
    with pytest.raises(StorageError, match=r"looking at /tier/x: LookupError: .*credentials"):
        root.size("x")
