from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.durable.rank_files import file_name
from holdfast_core.durable.sets import (
    StoredSet,
    checked_files,
    checked_job,
    decode_latest,
    decode_set,
    encode_latest,
    encode_set,
    parse_set_name,
    set_name,
)
from holdfast_core.errors import CorruptError, InvalidJobError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.stored import RankFile

GENERATION = Generation(3, 400)


def _file(rank: int, payload_bytes: int = 100) -> RankFile:
    return RankFile(
        rank=rank,
        file=file_name(rank),
        bytes=4096 + payload_bytes,
        header_bytes=4096,
        header_xxh3=(1 << 64) - 1 - rank,
        payload_bytes=payload_bytes,
        layout_id=f"{rank:032x}",
        manifest_digest=rank,
    )


def _set(*files: RankFile) -> StoredSet:
    return StoredSet(
        job="job", generation=GENERATION, topology="dp2·ep1·tp1·pp1", created=1.5, files=files
    )


def _decode(data: bytes) -> StoredSet:
    return decode_set(data, job="job", generation=GENERATION)


def _resigned(**changes: object) -> bytes:
    """A manifest that proves itself and says something else."""
    document = {**json.loads(encode_set(_set(_file(0), _file(1)))), **changes}
    document.pop("xxh3")
    body = msgspec.json.encode(document, order="sorted")
    document["xxh3"] = xxhash.xxh3_64_hexdigest(body)
    return msgspec.json.encode(document, order="sorted")


@given(st.integers(1, 20), st.integers(0, 1 << 40))
def test_a_set_comes_back_as_it_was_written(ranks: int, payload_bytes: int) -> None:
    stored = _set(*(_file(rank, payload_bytes) for rank in range(ranks)))
    assert _decode(encode_set(stored)) == stored
    assert (stored.world_size, stored.bytes) == (ranks, ranks * (4096 + payload_bytes))


def test_any_reader_can_verify_a_manifest() -> None:
    """As docs/persisted-format.md says, with nothing but JSON and xxhash."""
    data = encode_set(_set(_file(0), _file(1)))
    document = json.loads(data)
    digest = document.pop("xxh3")
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert xxhash.xxh3_64_hexdigest(canonical.encode()) == digest
    assert document["ranks"][0]["header_xxh3"] == "ffffffffffffffff"
    assert document["generation"] == "3.400"


@given(st.integers(0, 700), st.integers(0, 255))
def test_a_changed_byte_is_found(at: int, value: int) -> None:
    sound = encode_set(_set(_file(0), _file(1)))
    data = bytearray(sound)
    data[at % len(data)] = value
    try:
        found = _decode(bytes(data))
    except CorruptError:
        return
    assert found == _decode(sound)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptError):
        _decode(data)
    assert decode_latest(data) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": "holdfast-set/3"}, "of format 'holdfast-set/3'"),
        ({"job": "other"}, "is of 3.400 of other"),
        ({"generation": "3.401"}, r"is of 3\.401 of job"),
        ({"world_size": 3}, "each of 3 ranks once"),
        ({"world_size": -1}, "each of -1 ranks"),
        ({"world_size": 1 << 62}, "each of 4611686018427387904 ranks"),
        ({"ranks": [], "world_size": 0}, "each of 0 ranks"),
        ({"ranks": "[" * 10}, "cannot be read"),
        ({"more": 1}, "cannot be read"),
    ],
)
def test_a_manifest_with_impossible_values_is_refused(
    changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(CorruptError, match=reason):
        _decode(_resigned(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"file": "../../etc/passwd"},
        {"file": "/etc/passwd"},
        {"file": "rank-00001.safetensors"},
        {"bytes": 1},
        {"payload_bytes": -1, "bytes": 4095},
        {"payload_bytes": 1 << 60, "bytes": 4096 + (1 << 60)},
        {"header_bytes": 1 << 40, "bytes": (1 << 40) + 100},
        {"header_bytes": 0, "bytes": 100},
        {"header_xxh3": "FFFFFFFFFFFFFFFF"},
        {"manifest_digest": "1"},
        {"layout_id": "x" * 32},
    ],
    ids=",".join,
)
def test_a_file_with_impossible_values_is_refused(changes: dict[str, object]) -> None:
    ranks = json.loads(encode_set(_set(_file(0))))["ranks"]
    data = _resigned(ranks=[{**ranks[0], **changes}], world_size=1)
    with pytest.raises(CorruptError, match="impossible values"):
        _decode(data)


def test_a_set_has_one_file_of_each_rank() -> None:
    files = [_file(2), _file(0), _file(1)]
    assert [file.rank for file in checked_files(files, GENERATION)] == [0, 1, 2]
    for wrong in ([], files[:2], [*files, _file(0)], [_file(1)]):
        with pytest.raises(CorruptError, match="each rank once"):
            checked_files(wrong, GENERATION)
    with pytest.raises(CorruptError, match="impossible values"):
        checked_files([replace(_file(0), file="../x")], GENERATION)


@given(st.integers(0, 99_999_999), st.integers(0, 999_999_999_999))
def test_names_of_sets_sort_as_generations_do(epoch: int, step: int) -> None:
    generation, other = Generation(epoch, step), Generation(7, 1234)
    assert parse_set_name(set_name(generation)) == generation
    assert (set_name(generation) < set_name(other)) == (generation < other)


@pytest.mark.parametrize("generation", [Generation(10**8, 0), Generation(0, 10**12)])
def test_a_generation_without_room_in_its_name_is_refused(generation: Generation) -> None:
    with pytest.raises(InvalidJobError):
        set_name(generation)


@pytest.mark.parametrize(
    "name",
    ["", "..", "1.2", "00000001.00000000002", "00000001.000000000002x", "٠" * 8 + "." + "0" * 12],
)
def test_other_names_are_not_sets(name: str) -> None:
    assert parse_set_name(name) is None


@pytest.mark.parametrize("name", ["a", "Job-1", "team-a.train_2", "x" * 253])
def test_plain_names_are_jobs(name: str) -> None:
    assert checked_job(name) == name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "a\\b", "/a", ".a", "a.", "-a", "a\n", "a\0b", "é", "x" * 254],
)
def test_names_that_lead_elsewhere_are_not_jobs(name: str) -> None:
    with pytest.raises(InvalidJobError, match="directory in storage"):
        checked_job(name)


def test_the_hint_comes_back() -> None:
    assert decode_latest(encode_latest(GENERATION)) == GENERATION
    assert decode_latest(b'{"format":"other/1","generation":"1.2"}') is None
    assert decode_latest(b'{"format":"holdfast-latest/1","generation":"x"}') is None
