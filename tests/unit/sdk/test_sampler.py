from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from holdfast import RecoverableSampler
from holdfast_core.errors import InvalidJobError, LayoutMismatchError


@given(st.integers(4, 40), st.integers(1, 4), st.integers(0, 3), st.booleans(), st.booleans())
def test_an_epoch_is_divided_over_the_ranks(
    samples: int, replicas: int, seed: int, shuffle: bool, drop_last: bool
) -> None:
    ranks = [
        list(
            RecoverableSampler(
                range(samples),
                rank=rank,
                replicas=replicas,
                seed=seed,
                shuffle=shuffle,
                drop_last=drop_last,
            )
        )
        for rank in range(replicas)
    ]
    assert len({len(one) for one in ranks}) == 1
    together = [index for one in ranks for index in one]
    if drop_last:
        assert len(together) == len(set(together)) == samples // replicas * replicas
    else:
        assert set(together) == set(range(samples))
        assert len(together) < samples + replicas


@given(st.integers(1, 60), st.integers(1, 7))
def test_a_restored_sampler_goes_on_exactly_where_training_was(stop: int, batch: int) -> None:
    def consume(sampler: RecoverableSampler, batches: int) -> list[list[int]]:
        seen: list[list[int]] = []
        while len(seen) < batches:
            indices = list(sampler)
            for at in range(0, len(indices), batch):
                if len(seen) == batches:
                    break
                seen.append(indices[at : at + batch])
                sampler.advance(len(seen[-1]))
        return seen

    undisturbed = consume(RecoverableSampler(range(23), seed=1), stop + 9)
    before = RecoverableSampler(range(23), seed=1)
    assert consume(before, stop) == undisturbed[:stop]
    after = RecoverableSampler(range(23), seed=1)
    after.load_state_dict(before.state_dict())
    assert consume(after, 9) == undisturbed[stop:]


@given(
    st.integers(6, 60),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=2, max_size=6),
    st.booleans(),
)
def test_a_world_of_another_size_goes_on_with_what_is_left_of_the_epoch(
    samples: int, worlds: list[tuple[int, int]], drop_last: bool
) -> None:
    def make(rank: int, replicas: int) -> RecoverableSampler:
        data = range(samples)
        return RecoverableSampler(data, rank=rank, replicas=replicas, drop_last=drop_last)

    order = list(RecoverableSampler(range(samples)))
    seen: list[int] = []
    stayed, saved = make(0, worlds[0][0]), make(0, worlds[0][0]).state_dict()
    for replicas, steps in worlds:
        ranks = [make(rank, replicas) for rank in range(replicas)]
        stayed.split(rank=0, replicas=replicas)
        for sampler in (*ranks, stayed):
            sampler.load_state_dict(saved)
        for _ in range(steps):
            drawn = [next(iter(sampler)) for sampler in ranks]
            assert next(iter(stayed)) == drawn[0]
            seen += drawn if not ranks[0].epoch else []
            for sampler in (*ranks, stayed):
                sampler.advance(1)
        assert len({(one.epoch, len(one)) for one in (*ranks, stayed)}) == 1
        saved = ranks[-1].state_dict()
    assert seen[:samples] == order[: len(seen)]
    assert len(seen) < samples + 5


def test_epochs_are_shuffled_differently() -> None:
    sampler = RecoverableSampler(range(50), seed=3, counting=True)
    first, second = list(sampler), list(sampler)
    assert sorted(first) == sorted(second)
    assert first != second
    assert sampler.epoch == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_resumes_with_and_without_workers(workers: int) -> None:
    data = TensorDataset(torch.arange(20))

    def batches(sampler: RecoverableSampler, count: int) -> list[list[int]]:
        found = []
        for (batch,) in DataLoader(data, 4, sampler=sampler, num_workers=workers):
            found.append(batch.tolist())
            sampler.advance(len(batch))
            if len(found) == count:
                break
        return found

    whole = batches(RecoverableSampler(data, seed=2), 5)
    sampler = RecoverableSampler(data, seed=2)
    assert batches(sampler, 2) == whole[:2]
    again = RecoverableSampler(data, seed=2)
    again.load_state_dict(sampler.state_dict())
    assert len(again) == 12
    assert batches(again, 3) == whole[2:]


def test_wrong_use_is_refused() -> None:
    with pytest.raises(InvalidJobError, match="rank=2"):
        RecoverableSampler(range(4), rank=2, replicas=2)
    with pytest.raises(InvalidJobError, match="without any"):
        RecoverableSampler(range(1), replicas=2, drop_last=True)
    sampler = RecoverableSampler(range(4))
    with pytest.raises(InvalidJobError, match=r"advance\(5\)"):
        sampler.advance(5)
    other = RecoverableSampler(range(5), seed=1)
    with pytest.raises(LayoutMismatchError, match="samples is 5, in the snapshot 4; sampler seed"):
        other.load_state_dict(sampler.state_dict())


@given(
    st.integers(8, 60),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 12)), min_size=1, max_size=6),
    st.integers(1, 6),
    st.booleans(),
)
def test_each_sample_of_an_epoch_is_consumed_once_by_any_history_of_worlds(
    samples: int, history: list[tuple[int, int]], last: int, drop_last: bool
) -> None:
    """`history`: (ranks, samples that each consumes) of worlds one after the other."""
    epochs: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    state: dict[str, Any] = {}

    def run(ranks: int, count: int | None) -> None:
        """Consume `count` samples on each rank, or all that is left of the epoch."""
        nonlocal state
        world = [
            RecoverableSampler(range(samples), rank=r, replicas=ranks, seed=5, drop_last=drop_last)
            for r in range(ranks)
        ]
        for rank, sampler in enumerate(world):
            if state:
                sampler.load_state_dict({**state, "other": rank})
        while count is None or count:
            batch = min(len(world[0]), 3 if count is None else count)
            epoch, indices = world[0].epoch, [list(sampler)[:batch] for sampler in world]
            sizes[epoch] = ranks
            epochs.setdefault(epoch, []).extend(
                i for each in zip(*indices, strict=True) for i in each
            )
            for sampler in world:
                sampler.advance(batch)
            count = None if count is None else count - batch
            if count is None and world[0].epoch > epoch:
                break
        assert len({(s.epoch, s.position, len(s)) for s in world}) == 1
        state = world[-1].state_dict()

    for ranks, count in history:
        run(ranks, count)
    run(last, None)
    for epoch, ranks in sizes.items():
        seen = epochs[epoch]
        if drop_last:  # also by a world that finds fewer samples left than it has ranks
            assert len(seen) == len(set(seen))
            assert len(seen) > samples - max(each for each, _ in [*history, (last, 0)])
        else:
            assert sorted(seen[:samples]) == list(range(samples))
            assert len(seen) < samples + ranks


def test_a_state_from_before_ranks_could_change_is_loaded() -> None:
    old = {
        "epoch": 2,
        "position": 3,
        "order": {
            "samples": 20,
            "rank": 1,
            "replicas": 2,
            "seed": 0,
            "shuffle": True,
            "drop_last": False,
        },
    }
    same, more = (RecoverableSampler(range(20), rank=1, replicas=n) for n in (2, 4))
    same.load_state_dict(old)
    more.load_state_dict(old)
    assert (same.epoch, same.position, len(same)) == (2, 3, 7)
    assert (len(more), more.epoch, more.position) == (4, 2, 0)
    again = RecoverableSampler(range(20), rank=1, replicas=4)
    again.load_state_dict(more.state_dict())
    assert list(again) == list(more)
