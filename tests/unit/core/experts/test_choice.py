from __future__ import annotations

from collections.abc import Collection, Sequence

from expert_worlds import unit, world

from holdfast_core.experts.choice import choose
from holdfast_core.snapshots.units import UnitKey

CROWDED = world([3, 3, 3], shares=3)
"""Expert i of each layer lives on rank i."""

PREFERRED = [(2, 1), (1, 1), (1, 2), (2, 2), (1, 0), (0, 2), (0, 0), (0, 1), (2, 0)]
"""With 2 of each layer, ranks 1 and 2 are full before layer 0 has its second."""


def chosen(quota: int, urgent: Collection[UnitKey] = ()) -> Sequence[tuple[int | None, int | None]]:
    experts = {expert.unit: expert for expert in CROWDED.experts}
    found = choose(
        CROWDED.layers,
        {layer.layer: quota for layer in CROWDED.layers},
        [experts[unit(*at)] for at in PREFERRED],
        urgent=urgent,
    )
    return [(u.layer, u.expert) for u in found]


def test_another_layers_choice_moves_to_make_room_for_what_is_preferred() -> None:
    """Layer 1 takes its expert on rank 0 for the one on rank 2, which layer 0 prefers to rank 1."""
    assert chosen(2) == [(0, 0), (0, 2), (1, 0), (1, 1), (2, 1), (2, 2)]


def test_an_urgent_choice_does_not_move() -> None:
    """Then it is layer 2 that moves from rank 2 to rank 0."""
    assert chosen(2, {unit(1, 2)}) == [(0, 0), (0, 2), (1, 1), (1, 2), (2, 0), (2, 1)]


def test_a_rank_takes_more_when_no_choice_can_move() -> None:
    urgent = {unit(*at) for at in PREFERRED[:4]}
    assert chosen(2, urgent) == [(0, 0), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2)]


def test_layers_without_a_quota_get_nothing() -> None:
    assert chosen(0) == []


def test_layers_that_get_everything_do_not_count_for_capacity() -> None:
    assert len(chosen(3)) == len(CROWDED.experts)
