from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from holdfast_core.durable.rank_files import (
    FORMAT,
    HEADER_BYTES_MAX,
    decode_header,
    describe_file,
    encode_header,
    file_name,
)
from holdfast_core.errors import CorruptError, HoldfastError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import (
    PAGE_BYTES,
    Entry,
    Layout,
    TensorRole,
    encode_layout,
    encode_manifest,
    layout_id,
    manifest_digest,
    piece_digests,
)
from holdfast_core.snapshots.manifests import Manifest

DTYPES = {"float32": 4, "bfloat16": 2, "int64": 8, "bool": 1, "complex64": 8, "strange": 3}


def _entry(name: str, dtype: str, *, elements: int, start: int, offset: int, rest: int) -> Entry:
    width = DTYPES[dtype]
    return Entry(
        unit="layer0/dense",
        tensor=name,
        role=TensorRole.COMPUTE,
        dtype=dtype,
        shape=(elements + (start + rest) // width,),
        start=start,
        nbytes=elements * width,
        offset=offset,
    )


@st.composite
def states(draw: st.DrawFn) -> tuple[Layout, Manifest]:
    """Layouts as trainers may send them: ranges, odd starts, holes, names that clash."""
    entries, at = [], 0
    for _ in range(draw(st.integers(0, 6))):
        at += draw(st.integers(0, 9))
        entry = _entry(
            draw(st.sampled_from(["a", "b", "a@4", "holdfast.extras", "holdfast.padding.0", "é"])),
            draw(st.sampled_from(sorted(DTYPES))),
            elements=draw(st.integers(0, 5)),
            start=draw(st.sampled_from([0, 0, 4, 5])),
            offset=at,
            rest=draw(st.sampled_from([0, 0, 8])),
        )
        entries.append(entry)
        at += entry.nbytes
    extras_offset, extras = at + draw(st.integers(0, 3)), draw(st.integers(0, 20))
    layout = Layout(
        rank=draw(st.integers(0, 99)),
        world_size=100,
        topology="dp100·ep1·tp1·pp1",
        entries=tuple(entries),
        extras_offset=extras_offset,
        extras_capacity=64,
    )
    payload = bytes(extras_offset + extras)
    manifest = Manifest(
        job="job",
        rank=layout.rank,
        world_size=100,
        generation=Generation(1, 2),
        layout_id=layout_id(encode_layout(layout)),
        payload_bytes=len(payload),
        extras_offset=extras_offset,
        extras_bytes=extras,
        piece_bytes=16,
        digests=piece_digests(payload, 16),
    )
    return layout, manifest


STATE = (
    Layout(
        rank=3,
        world_size=4,
        topology="dp4·ep1·tp1·pp1",
        entries=(_entry("w", "float32", elements=3, start=0, offset=0, rest=0),),
        extras_offset=64,
        extras_capacity=64,
    ),
    5,
)


def _sound() -> tuple[bytes, bytes, Manifest]:
    layout = encode_layout(STATE[0])
    manifest = Manifest(
        job="job",
        rank=3,
        world_size=4,
        generation=Generation(1, 2),
        layout_id=layout_id(layout),
        payload_bytes=69,
        extras_offset=64,
        extras_bytes=STATE[1],
        piece_bytes=32,
        digests=piece_digests(bytes(69), 32),
    )
    return layout, encode_manifest(manifest), manifest


@given(states())
def test_a_header_opens_with_safetensors_and_covers_every_byte(
    state: tuple[Layout, Manifest],
) -> None:
    safetensors = pytest.importorskip("safetensors")
    layout, manifest = encode_layout(state[0]), encode_manifest(state[1])
    header = encode_header(layout, manifest)
    assert len(header) % PAGE_BYTES == 0
    payload = bytes(index % 251 for index in range(state[1].payload_bytes))
    tensors = safetensors.deserialize(header + payload)
    found = b"".join(
        bytes(t["data"])
        for _, t in sorted(
            tensors, key=lambda pair: json.loads(header[8:])[pair[0]]["data_offsets"]
        )
    )
    assert found == payload
    back = decode_header(header)
    assert (back.layout, back.manifest, back.decoded) == (layout, manifest, state[1])
    assert back.topology == state[0].topology


@given(states())
def test_a_whole_tensor_keeps_its_name_type_and_shape(state: tuple[Layout, Manifest]) -> None:
    header = encode_header(encode_layout(state[0]), encode_manifest(state[1]))
    table = json.loads(header[8:])
    assert table["__metadata__"]["format"] == FORMAT
    names = [entry.tensor for entry in state[0].entries]
    for entry in state[0].entries:
        whole = entry.start == 0 and entry.nbytes == DTYPES[entry.dtype] * entry.shape[0]
        if whole and names.count(entry.tensor) == 1 and entry.dtype in ("float32", "int64"):
            at = [entry.offset, entry.offset + entry.nbytes]
            if not entry.tensor.startswith("holdfast.") and entry.tensor != "a@4":
                assert table[entry.tensor]["data_offsets"] == at
                assert table[entry.tensor]["shape"] == list(entry.shape)


def test_ranges_are_flat_and_named_by_their_first_byte() -> None:
    entries = (
        _entry("a", "float32", elements=2, start=8, offset=0, rest=0),
        _entry("b", "float32", elements=2, start=6, offset=8, rest=0),
        _entry("c", "complex64", elements=1, start=0, offset=16, rest=0),
    )
    layout = replace(STATE[0], entries=entries)
    manifest = replace(_sound()[2], layout_id=layout_id(encode_layout(layout)))
    header = encode_header(encode_layout(layout), encode_manifest(manifest))
    table = json.loads(header[8:])
    del table["__metadata__"]
    assert {name: (t["dtype"], t["shape"]) for name, t in table.items()} == {
        "a@8": ("F32", [2]),
        "b@6": ("U8", [8]),
        "c@0": ("U8", [8]),
        "holdfast.padding.0": ("U8", [40]),
        "holdfast.extras": ("U8", [5]),
    }


def test_a_description_identifies_the_file() -> None:
    layout, manifest, _ = _sound()
    header = encode_header(layout, manifest)
    file = describe_file(header, manifest)
    assert (file.rank, file.file) == (3, file_name(3)) == (3, "rank-00003.safetensors")
    assert (file.bytes, file.header_bytes, file.payload_bytes) == (PAGE_BYTES + 69, PAGE_BYTES, 69)
    assert file.manifest_digest == manifest_digest(manifest)
    assert file.layout_id == layout_id(layout)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layout_id": "0" * 32}, "is of layout 0{32}"),
        ({"rank": 2}, "of rank 3"),
        ({"extras_offset": 32}, "has extras at 32 to 37"),
        ({"extras_bytes": 6}, "has extras at 64 to 70 of 69"),
        ({"extras_bytes": -65}, "a number that is not in 0"),
    ],
)
def test_a_manifest_that_is_not_of_the_layout_is_refused(
    change: dict[str, Any], reason: str
) -> None:
    layout, _, manifest = _sound()
    with pytest.raises(CorruptError, match=reason):
        encode_header(layout, encode_manifest(replace(manifest, **change)))


def test_a_header_of_another_length_or_format_is_refused() -> None:
    layout, manifest, _ = _sound()
    header = encode_header(layout, manifest)
    for wrong in (b"", header[:7], header[:-1], header + b" ", b"\xff" * 8 + header[8:]):
        with pytest.raises(CorruptError):
            decode_header(wrong)
    with pytest.raises(CorruptError, match="format 'holdfast/3'"):
        decode_header(header.replace(b"holdfast/1", b"holdfast/3"))


@given(st.integers(8, 2 * PAGE_BYTES), st.integers(0, 255))
def test_a_changed_header_is_refused_or_means_the_same(at: int, value: int) -> None:
    layout, manifest, content = _sound()
    header = bytearray(encode_header(layout, manifest))
    assume(at < len(header) and header[at] != value)
    header[at] = value
    try:
        found = decode_header(bytes(header))
    except CorruptError:
        return
    # The list of tensors may lie, which the set's manifest notices: it has the header's checksum.
    assert found.decoded == content


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_with_a_message(data: bytes) -> None:
    for bytes_ in (data, len(data).to_bytes(8, "little") + data):
        with pytest.raises(HoldfastError):
            decode_header(bytes_)


def test_deep_json_is_refused() -> None:
    body = b'{"__metadata__":' + b"[" * 100_000
    with pytest.raises(CorruptError):
        decode_header(len(body).to_bytes(8, "little") + body)


def test_more_tensors_than_a_header_can_name_are_refused() -> None:
    layout = replace(STATE[0], topology="x" * HEADER_BYTES_MAX)
    manifest = replace(_sound()[2], layout_id=layout_id(encode_layout(layout)))
    with pytest.raises(HoldfastError, match="more than the 100000000 that safetensors allows"):
        encode_header(encode_layout(layout), encode_manifest(manifest))
