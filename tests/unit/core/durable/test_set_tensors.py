from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.durable.set_tensors import (
    REPLICATED,
    Box,
    Reading,
    SetTensor,
    TensorPart,
    item_bytes,
    parts_of,
    runs_of,
    set_tensors,
)
from holdfast_core.errors import InvalidJobError, LayoutMismatchError
from holdfast_core.snapshots.layouts import Entry, Layout, TensorRole
from holdfast_core.topology import Topology


def entry(tensor: str, shape: tuple[int, ...], **more: Any) -> Entry:
    fields: dict[str, Any] = {
        "unit": "layer0/dense",
        "role": TensorRole.OPTIMIZER if ":" in tensor else TensorRole.COMPUTE,
        "dtype": "float32",
        "start": 0,
        "nbytes": 4 * math.prod(shape),
        "offset": 0,
    }
    return Entry(tensor=tensor, shape=shape, **{**fields, **more})


def layouts(topology: Topology, *of_ranks: list[Entry]) -> dict[int, Layout]:
    return {
        rank: Layout(
            rank=rank,
            world_size=topology.world_size,
            topology=str(topology),
            entries=tuple(entries),
            extras_offset=1 << 20,
            extras_capacity=0,
        )
        for rank, entries in enumerate(of_ranks)
    }


def only(found: dict[str, SetTensor]) -> SetTensor:
    (tensor,) = found.values()
    return tensor


def test_ranges_that_replicas_captured_make_up_the_tensor() -> None:
    found = only(
        set_tensors(
            layouts(
                Topology(dp=2),
                [entry("w", (4, 2), nbytes=20, offset=64)],
                [entry("w", (4, 2), start=20, nbytes=12, offset=128)],
            )
        )
    )
    assert (found.name, found.shape, found.dtype) == ("w", (4, 2), "float32")
    assert found.boxes == (
        Box((0, 0), (4, 2), (TensorPart(0, 20, 0, 64), TensorPart(20, 12, 1, 128))),
    )


def test_of_copies_on_several_ranks_that_of_the_lowest_is_used() -> None:
    copies = [[entry("w:step", ())], [entry("w:step", ())]]
    found = only(set_tensors(layouts(Topology(dp=2), *copies)))
    assert found.name == "optim.state.w.step"
    assert found.boxes == (Box((), (), (TensorPart(0, 4, 0, 0),)),)


def test_a_range_that_no_rank_captured_is_refused() -> None:
    ranks = layouts(
        Topology(dp=2),
        [entry("w", (4,), nbytes=8)],
        [entry("w", (4,), start=12, nbytes=4)],
    )
    with pytest.raises(LayoutMismatchError, match="w: no rank captured its bytes from 8 to 16"):
        set_tensors(ranks)


def test_ranks_that_disagree_about_a_tensor_are_refused() -> None:
    ranks = layouts(Topology(dp=2), [entry("w", (4,))], [entry("w", (5,))])
    with pytest.raises(LayoutMismatchError, match=r"rank 0 captured float32\[4\], rank 1 float32"):
        set_tensors(ranks)


def experts(first: int, name: str = "w[{}]:exp_avg") -> list[Entry]:
    return [
        entry(name.format(first + i), (3,), unit=f"layer0/expert{first + i}", offset=64 * i)
        for i in range(2)
    ]


def test_stacked_experts_are_slices_by_their_number_in_the_model() -> None:
    ranks = layouts(Topology(dp=2, ep=2), experts(0), experts(2))
    found = only(set_tensors(ranks))
    assert (found.name, found.shape) == ("optim.state.w.exp_avg", (4, 3))
    assert [(box.offsets, box.parts[0].rank) for box in found.boxes] == [
        ((0, 0), 0),
        ((1, 0), 0),
        ((2, 0), 1),
        ((3, 0), 1),
    ]
    one_by_one = set_tensors(ranks, Reading(by_expert=True))
    assert list(one_by_one) == [f"optim.state.w[{i}].exp_avg" for i in range(4)]
    assert {found.shape for found in one_by_one.values()} == {(3,)}


def test_an_expert_that_no_rank_has_is_reported_as_missing() -> None:
    ranks = layouts(Topology(dp=2, ep=2), experts(0), experts(3))
    with pytest.raises(LayoutMismatchError, match=r"shape \[5, 3\]: .* hold 12 of its 15 elements"):
        set_tensors(ranks)


def test_masters_have_one_name_wherever_the_optimizer_keeps_them() -> None:
    names = {
        "w:master": "optim.state.w.master",
        "w/master": "optim.state.w.master",
        "w/master:exp_avg": "optim.state.w.exp_avg",
        "w/master[0]": "optim.state.w.master",
        "norm.mean(buffer)": "norm.mean",
    }
    for name, expected in names.items():
        assert only(set_tensors(layouts(Topology(dp=1), [entry(name, (3,))]))).name == expected


def test_a_stack_of_buffers_is_put_together_by_expert() -> None:
    ranks = layouts(
        Topology(dp=2, ep=2),
        *([entry("moe.bias(buffer)", (2,), unit=f"layer0/expert{2 * r}")] for r in range(2)),
    )
    found = only(set_tensors(ranks))
    assert (found.name, found.shape) == ("moe.bias", (4,))
    assert [box.offsets for box in found.boxes] == [(0,), (2,)]


def test_what_only_one_rank_has_is_named_after_it() -> None:
    ranks = layouts(Topology(dp=2), *([entry("w:exp_avg", (5,), own=True)] for _ in range(2)))
    assert list(set_tensors(ranks)) == ["rank-00000/w:exp_avg", "rank-00001/w:exp_avg"]


def test_local_boxes_of_distributed_tensors_lie_at_their_offsets() -> None:
    ranks = layouts(
        Topology(dp=2),
        [entry("w", (2, 3), global_shape=(3, 3), global_offsets=(0, 0))],
        [entry("w", (1, 3), global_shape=(3, 3), global_offsets=(2, 0))],
    )
    found = only(set_tensors(ranks))
    assert found.shape == (3, 3)
    assert [(box.offsets, box.shape) for box in found.boxes] == [((0, 0), (2, 3)), ((2, 0), (1, 3))]


def test_the_cut_of_plain_tensor_parallel_tensors_must_be_given() -> None:
    ranks = layouts(
        Topology(dp=1, tp=2),
        *([entry("q.weight", (2, 3)), entry("norm", (3,), offset=64)] for _ in range(2)),
    )
    with pytest.raises(InvalidJobError, match=r"cut of q\.weight of shape"):
        set_tensors(ranks)
    reading = Reading(tensor_parallel={r"q\..*": 1, ".*": REPLICATED})
    found = set_tensors(ranks, reading)
    assert found["q.weight"].shape == (2, 6)
    assert [box.offsets for box in found["q.weight"].boxes] == [(0, 0), (0, 3)]
    assert [part.rank for part in found["norm"].boxes[0].parts] == [0]


def test_stages_that_share_a_name_need_to_be_renamed() -> None:
    ranks = layouts(Topology(dp=1, pp=2), *([entry("layers.0.w", (3,))] for _ in range(2)))
    with pytest.raises(InvalidJobError, match=r"pipeline stages \[0, 1\] hold layers.0.w"):
        set_tensors(ranks)
    moved = Reading(rename=lambda name, at: name.replace("0", str(at.pp)))
    assert list(set_tensors(ranks, moved)) == ["layers.0.w", "layers.1.w"]
    tied = Reading(rename=lambda name, at: name if at.pp == 0 else None)
    assert list(set_tensors(ranks, tied)) == ["layers.0.w"]


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("bool", 1), ("float8_e4m3fn", 1), ("bfloat16", 2), ("complex64", 8), ("complex128", 16)],
)
def test_elements_have_the_size_of_their_dtype(dtype: str, size: int) -> None:
    assert item_bytes(dtype) == size


def test_a_dtype_of_unknown_size_is_refused() -> None:
    with pytest.raises(LayoutMismatchError, match="elements of bits4"):
        item_bytes("bits4")


@given(st.data())
def test_runs_of_a_box_are_the_bytes_that_slicing_gives(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    total = 2 * math.prod(shape)
    cuts = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=4))})
    parts = tuple(
        TensorPart(low, high - low, rank, 1000 * rank)
        for rank, (low, high) in enumerate(pairwise(cuts))
    )
    box = Box((0,) * len(shape), shape, parts)
    lows = [data.draw(st.integers(0, n - 1)) for n in shape]
    lengths = [data.draw(st.integers(1, n - low)) for n, low in zip(shape, lows, strict=True)]
    values = np.arange(math.prod(shape), dtype=np.uint16).reshape(shape)
    flat = values.tobytes()
    found = b"".join(
        flat[part.start : part.start + part.nbytes]
        for start, nbytes in runs_of(box, lows, lengths, 2)
        for part in parts_of(box, start, nbytes)
    )
    chosen = tuple(slice(low, low + n) for low, n in zip(lows, lengths, strict=True))
    assert found == values[chosen].tobytes()


def test_what_is_contiguous_is_one_run() -> None:
    box = Box((0, 0, 0), (4, 5, 6), (TensorPart(0, 480, 0, 0),))
    assert list(runs_of(box, (1, 0, 0), (2, 5, 6), 4)) == [(120, 240)]
    assert list(runs_of(box, (1, 2, 0), (1, 3, 6), 4)) == [(168, 72)]
    assert len(list(runs_of(box, (0, 2, 0), (4, 3, 6), 4))) == 4
