"""What people are told of ranks that recovered alone."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast_core.snapshots.generations import Generation
from holdfast_core.states import RestoreSource
from holdfast_operator.reconciler.failures.replays import replay_in_words
from holdfast_operator.reconciler.observe.views import RankView


def rank(number: int, **fields: Any) -> RankView:
    live = {"restored": Generation(3, 18), "restored_from": RestoreSource.LIVE}
    return RankView(rank=number, **{**live, **fields})


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([rank(0), rank(1)], ""),
        (
            [rank(0), rank(1), rank(2, repeated_after=10), rank(3, repeated_after=10)],
            "ranks 2, 3 repeated steps 11 to 18 alone; the others kept their state",
        ),
        (
            [rank(0), rank(1, repeated_after=18)],
            "rank 1 restored step 18 alone; the others kept their state",
        ),
        (
            [rank(0), rank(1, no_replay="rank 0: activation 2 of step 12 is not the same")],
            "all ranks restored the line, since the lost ones could not alone: rank 0: activation "
            "2 of step 12 is not the same",
        ),
    ],
)
def test_a_replay_names_ranks_and_steps_or_why_there_is_none(
    ranks: list[RankView], text: str
) -> None:
    assert replay_in_words(ranks) == text
