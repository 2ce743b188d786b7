"""Which pieces are read for a box of a tensor, and into what."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast_core.durable.set_tensors import SetTensor
from holdfast_core.errors import CorruptError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import (
    PIECE_BYTES,
    Entry,
    Layout,
    TensorRole,
    encode_layout,
    encode_manifest,
    layout_id,
    piece_digests,
)
from holdfast_core.snapshots.manifests import Manifest
from holdfast_core.topology import Topology
from holdfast_storage.whole_sets import GAP_BYTES, READ_BYTES, Want, WholeSet, rounded

RANKS = 2
COLUMNS = 1024
ROWS = 24 * 1024
HALF = ROWS * COLUMNS // RANKS


class Memory:
    """A rank's half of a tensor `w`, uint8 [ROWS, COLUMNS], as a file would hold it."""

    def __init__(self, rank: int, values: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> None:
        self.payload = values.reshape(-1)[rank * HALF : (rank + 1) * HALF].tobytes()
        entry = Entry(
            unit="layer0/dense",
            tensor="w",
            role=TensorRole.COMPUTE,
            dtype="uint8",
            shape=(ROWS, COLUMNS),
            start=rank * HALF,
            nbytes=HALF,
            offset=0,
        )
        self.layout = encode_layout(
            Layout(
                rank=rank,
                world_size=RANKS,
                topology=str(Topology(dp=RANKS)),
                entries=(entry,),
                extras_offset=HALF,
                extras_capacity=0,
            )
        )
        self.manifest = encode_manifest(
            Manifest(
                job="j",
                rank=rank,
                world_size=RANKS,
                generation=Generation(1, 1),
                layout_id=layout_id(self.layout),
                payload_bytes=HALF,
                extras_offset=HALF,
                extras_bytes=0,
                piece_bytes=PIECE_BYTES,
                digests=piece_digests(self.payload, PIECE_BYTES),
            )
        )
        self.reads: list[tuple[int, int]] = []

    def read_into(self, first_piece: int, end: int, buffer: memoryview) -> None:
        self.reads.append((first_piece, end))
        low, high = first_piece * PIECE_BYTES, min(end * PIECE_BYTES, HALF)
        assert len(buffer) == high - low
        buffer[:] = self.payload[low:high]


@pytest.fixture(scope="module")
def values() -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    made = np.arange(ROWS * COLUMNS, dtype=np.uint64) * 2654435761 >> 7
    return made.astype(np.uint8).reshape(ROWS, COLUMNS)


@pytest.fixture
def ranks(values: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> list[Memory]:
    return [Memory(rank, values) for rank in range(RANKS)]


@pytest.fixture
def source(ranks: list[Memory]) -> WholeSet:
    return WholeSet(ranks.__getitem__, RANKS)


@pytest.fixture
def tensor(source: WholeSet) -> SetTensor:
    return source.tensors["w"]


def test_the_whole_is_read_in_large_parts(
    source: WholeSet, ranks: list[Memory], tensor: SetTensor, values: object
) -> None:
    found = source.array(tensor, (0, 0), tensor.shape)
    assert np.array_equal(found.view(np.uint8), values)  # type: ignore[arg-type]  # an array
    for rank in ranks:
        assert len(rank.reads) == -(-HALF // READ_BYTES)
        assert max(end - first for first, end in rank.reads) * PIECE_BYTES <= READ_BYTES


def test_a_box_is_read_from_the_pieces_that_hold_it(
    source: WholeSet, ranks: list[Memory], tensor: SetTensor
) -> None:
    rows = PIECE_BYTES // COLUMNS
    source.array(tensor, (3 * rows, 0), (rows, COLUMNS))
    assert [rank.reads for rank in ranks] == [[(3, 4)], []]
    source.array(tensor, (3 * rows - 1, 0), (rows, COLUMNS))
    assert ranks[0].reads[1:] == [(2, 4)]


def test_a_box_over_the_ranks_boundary_is_read_from_both(
    source: WholeSet, ranks: list[Memory], tensor: SetTensor, values: object
) -> None:
    found = source.array(tensor, (ROWS // 2 - 1, 5), (2, 7))
    expected = values[ROWS // 2 - 1 : ROWS // 2 + 1, 5:12]  # type: ignore[index]  # an array
    assert np.array_equal(found.view(np.uint8), expected)
    assert [len(rank.reads) for rank in ranks] == [1, 1]


def test_small_gaps_are_read_and_large_ones_are_not(
    source: WholeSet, ranks: list[Memory], tensor: SetTensor
) -> None:
    def read(*rows: int) -> list[tuple[int, int]]:
        wants = [
            Want(
                tensor=tensor,
                box=tensor.boxes[0],
                offsets=(row, 0),
                lengths=(1, COLUMNS),
                into=memoryview(bytearray(COLUMNS)),
            )
            for row in rows
        ]
        ranks[0].reads.clear()
        source.read(wants)
        return ranks[0].reads

    far = (GAP_BYTES + 2 * PIECE_BYTES) // COLUMNS
    assert read(0, far // 2) == [(0, far // 2 * COLUMNS // PIECE_BYTES + 1)]
    assert len(read(0, 2 * far)) == 2
    assert read(3, 1, 2) == [(0, 1)]


@pytest.mark.parametrize(("first", "columns"), [(0, 512), (7, 16), (1023, 1)])
def test_columns_are_cut_out_of_whole_rows(
    source: WholeSet,
    ranks: list[Memory],
    tensor: SetTensor,
    values: object,
    first: int,
    columns: int,
) -> None:
    found = source.array(tensor, (5, first), (ROWS - 9, columns))
    expected = values[5 : ROWS - 4, first : first + columns]  # type: ignore[index]  # an array
    assert np.array_equal(found.view(np.uint8), expected)
    assert all(len(rank.reads) == -(-HALF // READ_BYTES) for rank in ranks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    """All upper halves, each with the lower halves around a tie."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0x1000, 0x1001, 0xFFFF], dtype=np.uint32)
    values = (upper[:, None] | lower).reshape(-1).view(np.float32)
    expected = torch.from_numpy(values).to(dtype)
    found = torch.from_numpy(rounded(values, str(dtype).removeprefix("torch.")).view(np.int16))
    numbers = torch.from_numpy(~np.isnan(values))
    assert torch.equal(found[numbers], expected.view(torch.int16)[numbers])
    assert found.view(dtype)[~numbers].isnan().all()


def test_other_types_do_not_follow_from_masters() -> None:
    with pytest.raises(CorruptError, match="derives int16 from float32"):
        rounded(np.zeros(1, np.float32), "int16")
