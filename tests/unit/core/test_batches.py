from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.batches import BatchPlan, plan_batch
from holdfast_core.errors import InvalidJobError
from holdfast_core.topology import Topology


def plans_of(global_batch: int, ranks: int, micro_batch: int | None) -> list[BatchPlan]:
    """Plan of each rank of a world."""
    return [
        plan_batch(global_batch, rank=rank, size=ranks, micro_batch=micro_batch)
        for rank in range(ranks)
    ]


def check(global_batch: int, ranks: int, micro_batch: int | None) -> None:
    """Check that all ranks together compute each sample once, with the weight of a mean."""
    plans = plans_of(global_batch, ranks, micro_batch)
    parts = [part for plan in plans for part in plan.micro_batches]
    assert {plan.passes for plan in plans} == {len(plans[0].micro_batches)}
    counted = [part for part in parts if part.summed_weight]
    for part in counted:
        samples = part.end - part.start
        assert 1 <= samples <= (micro_batch or global_batch)
        assert part.summed_weight == float(Fraction(samples, global_batch))
        assert part.averaged_weight == float(Fraction(samples * ranks, global_batch))
    places = [0, *(part.end for part in counted)]
    assert places[-1] == global_batch
    assert all(part.start == at for part, at in zip(counted, places, strict=False))
    _check_each(plans, global_batch, micro_batch)


def _check_each(plans: Sequence[BatchPlan], global_batch: int, micro_batch: int | None) -> None:
    shares = [plan.end - plan.start for plan in plans]
    assert max(shares) - min(shares) <= 1
    assert all(before.end == after.start for before, after in pairwise(plans))
    # As few passes as the largest part allows.
    limit = micro_batch or global_batch
    assert (plans[0].passes - 1) * limit < max(shares) <= plans[0].passes * limit
    for plan in plans:
        assert [part.last for part in plan.micro_batches] == [False] * (plan.passes - 1) + [True]
        repeated = [part for part in plan.micro_batches if not part.summed_weight]
        assert not repeated or micro_batch == 1
        for part in repeated:
            assert (part.start, part.end, part.averaged_weight) == (plan.end - 1, plan.end, 0)


@pytest.mark.parametrize("ranks", range(1, 13))
def test_all_ranks_together_have_each_sample_once(ranks: int) -> None:
    for global_batch in range(ranks, 41):
        for micro_batch in (None, *range(1, global_batch + 2)):
            check(global_batch, ranks, micro_batch)


@given(
    st.integers(1, 64).flatmap(lambda ranks: st.tuples(st.just(ranks), st.integers(ranks, 4096))),
    st.none() | st.integers(1, 80),
)
def test_larger_worlds_do_so_too(sizes: tuple[int, int], micro_batch: int | None) -> None:
    ranks, global_batch = sizes
    check(global_batch, ranks, micro_batch)


def test_the_ranks_of_one_replica_have_the_same_part() -> None:
    """tp varies fastest, then dp, then pp; dp follows from the world."""
    topology = Topology(dp=4, tp=2, pp=3)
    plans = [plan_batch(10, rank=rank, size=12, topology=topology) for rank in range(12)]
    assert {plan.ranks for plan in plans} == {2}
    assert [plan.start for plan in plans] == [0, 0, 5, 5] * 3
    assert plans[2].micro_batches[0].averaged_weight == 1


@pytest.mark.parametrize(
    ("given_values", "message"),
    [
        ({"global_batch": 2}, "a batch of 2 samples over 3 ranks leaves some without any"),
        ({"global_batch": 0}, "global_batch=0 is no number of samples"),
        ({"global_batch": 8.0}, "global_batch=8.0 is no number of samples"),
        ({"micro_batch": 0}, "micro_batch=0 is no number of samples"),
        ({"topology": Topology(dp=2, tp=2)}, "does not fit a training world of 3 ranks"),
        ({"rank": 3}, "has no rank 3; its ranks are 0 to 2"),
    ],
)
def test_what_cannot_be_divided_is_refused(given_values: dict[str, object], message: str) -> None:
    values = {"global_batch": 8, "rank": 0, "size": 3, **given_values}
    with pytest.raises(InvalidJobError, match=message):
        plan_batch(**values)  # type: ignore[arg-type]
