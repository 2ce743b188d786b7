"""Seeded schedules in which pipeline stages are lost, in sparse windows and in their replays, or
shards that no other rank has.

`make test` runs the first of them, and `make test-schedules` ten times as many as `make test-all`.
"""

from __future__ import annotations

import pytest
import staging

from holdfast_core.topology import Topology


@pytest.mark.timeout(300)
@pytest.mark.seeds(first=0, of_1000=8, short=4, size=4)
def test_every_rank_has_the_bytes_of_a_run_without_losses(first_seed: int, seeds: int) -> None:
    counts = staging.run(first_seed, seeds)
    # Schedules in which no stage repeats steps alone, or no unit is frozen, prove nothing.
    assert counts["step alone"] > 0
    assert counts["goes on"] > seeds
    assert counts["frozen step"] > 0


@pytest.mark.timeout(300)
@pytest.mark.seeds(first=0, of_1000=8, short=4, size=4)
def test_lost_shards_are_restored_alone_where_the_line_is_of_the_others_step(
    first_seed: int, seeds: int
) -> None:
    counts = staging.run(first_seed, seeds, shards=True)
    assert counts["alone"] + counts["global"] > 0
    assert counts["step"] > 20 * seeds


@pytest.mark.parametrize(("every", "event"), [(1, "alone"), (3, "global")])
def test_ranks_that_have_their_shards_go_back_only_to_a_line_that_is_older(
    every: int, event: str
) -> None:
    with staging.surroundings():
        cluster = staging.play(
            staging.Schedule(
                seed=-1,
                topology=Topology(dp=staging.RANKS),
                window=1,
                steps=12,
                every=every,
                losses=tuple(
                    staging.Loss(step=step, point="reduce", victims=victims)
                    for step, victims in ((5, (1,)), (9, (0, 3)))
                ),
            )
        )
    assert cluster.counts[event] == 2 * staging.RANKS - 3
    assert cluster.counts["goes back" if every == 1 else "goes on"] == 0


def test_a_stage_that_repeats_a_window_alone_leaves_all_others_where_they_are() -> None:
    with staging.surroundings():
        cluster = staging.play(
            staging.Schedule(
                seed=-1,
                topology=Topology(dp=1, pp=4),
                window=3,
                steps=12,
                losses=tuple(
                    staging.Loss(step=step, point="sum", victims=(rank,))
                    for step, rank in ((6, 1), (8, 2), (10, 3))
                ),
            )
        )
    assert cluster.counts["alone"] == 3 * (staging.RANKS - 1)
    assert not cluster.counts["goes back"]
    assert cluster.counts["frozen step"] >= 2


@pytest.mark.parametrize("lies", ["messages", "digests"])
def test_all_ranks_go_back_where_logs_lack_what_they_state(lies: str) -> None:
    loss = staging.Loss(step=6, point="sum", victims=(1,), lies=lies)
    with staging.surroundings():
        cluster = staging.play(
            staging.Schedule(
                seed=-1, topology=Topology(dp=1, pp=4), window=3, steps=12, losses=(loss,)
            )
        )
    assert cluster.counts["step alone"] > 0  # the replay runs to its end
    assert cluster.counts["goes back"] == staging.RANKS - 1
