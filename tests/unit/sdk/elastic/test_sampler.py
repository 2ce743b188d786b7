from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from holdfast import ElasticSampler
from holdfast_core.errors import InvalidJobError, LayoutMismatchError


@dataclass
class Place:
    """A rank of a world."""

    rank: int = 0
    size: int = 1


def take(sampler: ElasticSampler) -> list[int]:
    """This rank's samples of the next step."""
    return next(iter(sampler))


@given(
    st.integers(1, 40),
    st.integers(5, 17),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=6),
    st.booleans(),
    st.integers(0, 3),
)
def test_each_sample_is_used_once_an_epoch_by_any_history_of_worlds(
    samples: int, batch: int, history: list[tuple[int, int]], shuffle: bool, seed: int
) -> None:
    """`history`: (ranks, steps) of worlds one after the other."""

    def make(place: Place) -> ElasticSampler:
        return ElasticSampler(range(samples), batch, place, shuffle=shuffle, seed=seed)

    alone, stayed = make(Place()), make(place := Place())
    state: dict[str, Any] = alone.state_dict()
    used: list[int] = []
    for size, steps in history:
        ranks = [make(Place(rank, size)) for rank in range(size)]
        place.size = size
        for sampler in (*ranks, stayed):
            sampler.load_state_dict(state)
        for _ in range(steps):
            parts = [take(sampler) for sampler in ranks]
            assert take(stayed) == parts[0]
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
            step = [index for part in parts for index in part]
            assert step == take(alone)
            used += step
            for sampler in (*ranks, stayed, alone):
                sampler.advance()
        state = ranks[-1].state_dict()
        assert state == stayed.state_dict() == alone.state_dict()
    epochs = [used[at : at + samples] for at in range(0, len(used), samples)]
    assert all(sorted(epoch) == list(range(samples)) for epoch in epochs[:-1])
    assert not epochs or len(set(epochs[-1])) == len(epochs[-1])


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=6))
def test_batches_of_each_rank_make_steps_smaller_with_fewer_ranks(
    history: list[tuple[int, int]],
) -> None:
    state: dict[str, Any] | None = None
    used: list[int] = []
    for size, steps in history:
        ranks = [
            ElasticSampler(range(23), 3, Place(rank, size), per_rank=True) for rank in range(size)
        ]
        for sampler in ranks:
            if state is not None:
                sampler.load_state_dict(state)
        for _ in range(steps):
            assert {sampler.global_batch for sampler in ranks} == {3 * size}
            used += [index for sampler in ranks for index in take(sampler)]
            for sampler in ranks:
                sampler.advance()
        state = ranks[0].state_dict()
    assert used == [i for _, i in zip(used, endless(23), strict=False)]


def endless(samples: int) -> Any:
    for batch in ElasticSampler(range(samples), 1, Place()):
        yield from batch


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_where_training_was(workers: int) -> None:
    data = TensorDataset(torch.arange(10))

    def batches(sampler: ElasticSampler, count: int) -> list[list[int]]:
        loader = DataLoader(data, batch_sampler=sampler, num_workers=workers)
        found = []
        for (batch,), _ in zip(loader, range(count), strict=False):
            found.append(batch.tolist())
            sampler.advance()
        return found

    whole = batches(ElasticSampler(data, 4, Place()), 6)
    sampler = ElasticSampler(data, 4, Place())
    assert batches(sampler, 2) == whole[:2]
    again = ElasticSampler(data, 4, Place())
    again.load_state_dict(sampler.state_dict())
    assert again.position == 8
    assert batches(again, 4) == whole[2:]


def test_epochs_are_shuffled_differently() -> None:
    batches = iter(ElasticSampler(range(50), 50, Place(), seed=3))
    first, second = next(batches), next(batches)
    assert sorted(first) == sorted(second)
    assert first != second


def test_wrong_use_is_refused() -> None:
    with pytest.raises(InvalidJobError, match="0 samples out of 4"):
        ElasticSampler(range(4), 0, Place())
    with pytest.raises(InvalidJobError, match="2 samples out of 0"):
        ElasticSampler(range(0), 2, Place())
    with pytest.raises(InvalidJobError, match="2 samples over 3 ranks"):
        take(ElasticSampler(range(9), 2, Place(2, 3)))
    other = ElasticSampler(range(5), 2, Place(), seed=1)
    with pytest.raises(LayoutMismatchError, match="samples is 5, in the snapshot 4; sampler seed"):
        other.load_state_dict(ElasticSampler(range(4), 2, Place()).state_dict())
