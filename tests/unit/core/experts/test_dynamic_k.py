from __future__ import annotations

import pytest

from holdfast_core.errors import InvalidJobError
from holdfast_core.experts.dynamic_k import next_k

TOTAL = 100_000


def decide(k: int, lost: int, *, first_k: int = 1, experts: int = 8, limit: float = 0.06) -> int:
    """With 8 experts and a limit of 6 %, each of K = 1, 2 and 4 may lose 2 %."""
    return next_k(
        k,
        first_k=first_k,
        experts_max=experts,
        lost_by_k={k: lost},
        total_tokens=TOTAL,
        limit=limit,
    ).k


@pytest.mark.parametrize(
    ("k", "lost", "expected"),
    [(1, 2000, 1), (1, 2001, 2), (2, 2001, 4), (4, 2001, 8), (8, 99_999, 8), (1, 0, 1)],
)
def test_k_doubles_when_what_was_lost_at_it_passes_its_limit(
    k: int, lost: int, expected: int
) -> None:
    assert decide(k, lost) == expected


@pytest.mark.parametrize(
    ("experts", "k", "expected"), [(6, 4, 6), (6, 2, 4), (3, 2, 3), (1, 1, 1), (0, 1, 1), (5, 9, 5)]
)
def test_k_ends_at_all_experts(experts: int, k: int, expected: int) -> None:
    assert decide(k, TOTAL, experts=experts) == expected


def test_losses_at_smaller_ks_do_not_count_for_this_one() -> None:
    decision = next_k(
        2, first_k=1, experts_max=8, lost_by_k={1: 50_000, 2: 100}, total_tokens=TOTAL
    )
    assert decision.k == 2
    assert decision.reason == (
        "K stays 2: recoveries at K=2 lost 0.10% of all tokens, and the limit is 1.67%"
    )


@pytest.mark.parametrize("first_k", [1, 2, 3])
def test_a_job_stays_below_its_limit_save_for_the_recoveries_that_pass_a_share(
    first_k: int,
) -> None:
    """Recovery after recovery loses 0.3 % at K = 1, and in proportion to 1 / K above it."""
    k, lost, largest = first_k, dict[int, int](), 0
    for _ in range(100):
        loss = 0 if k == 8 else TOTAL * 3 // 1000 // k
        largest = max(largest, loss)
        lost[k] = lost.get(k, 0) + loss
        k = next_k(k, first_k=first_k, experts_max=8, lost_by_k=lost, total_tokens=TOTAL).k
    assert k == 8
    assert TOTAL * 0.03 < sum(lost.values()) <= TOTAL * 0.05 + 3 * largest


def test_the_reason_states_why_k_grew() -> None:
    decision = next_k(1, first_k=1, experts_max=4, lost_by_k={1: 3000}, total_tokens=TOTAL)
    assert decision.reason == (
        "K grows from 1 to 2: recoveries at K=1 lost 3.00% of all tokens, and the limit is 2.50%"
    )


def test_a_job_that_processed_nothing_yet_has_lost_nothing() -> None:
    assert next_k(1, first_k=1, experts_max=8, lost_by_k={}, total_tokens=0).k == 1


@pytest.mark.parametrize(
    ("k", "first_k", "limit", "message"),
    [
        (0, 0, 0.05, "K=0 after starting with 0"),
        (1, 2, 0.05, "K=1 after starting with 2"),
        (1, 1, 1.5, "limit=1.5"),
    ],
)
def test_bad_input_is_refused(k: int, first_k: int, limit: float, message: str) -> None:
    with pytest.raises(InvalidJobError, match=message):
        next_k(k, first_k=first_k, experts_max=8, lost_by_k={}, total_tokens=1, limit=limit)
