"""More is lost than parity covers, whenever it strikes, with and without storage at hand."""

from __future__ import annotations

from collections import Counter

import pytest
from simulation.options import FAULTS, Options
from simulation.stored_cluster import STORAGE_FAULTS, StoredCluster

from holdfast_core.snapshots.generations import Generation


def run(first_seed: int, count: int, kinds: tuple[str, ...], **more: Generation) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + count):
        cluster = StoredCluster(
            Options(seed=seed, steps=20, faults=6, kinds=kinds, time_limit_s=600.0), **more
        )
        try:
            cluster.run()
        except Exception as error:
            raise AssertionError(f"seed {seed} failed: {error!r}\n{cluster.describe()}") from error
        counts.update(cluster.counts)
    print(f"seeds {first_seed}..{first_seed + count - 1} of {kinds}: {dict(counts)}")
    return counts


@pytest.mark.parametrize("kind", ["lose_two", "lose_all"])
def test_all_ranks_go_on_from_the_newest_set_when_too_much_is_lost(kind: str) -> None:
    counts = run(0, 10, (kind,))
    assert counts["resumed_from_storage"] > 5
    assert counts["loaded"] > 15


def test_no_rank_begins_afresh_while_storage_does_not_answer() -> None:
    counts = run(100, 12, ("lose_all", "storage_away"))
    assert counts["storage_unreachable"] > 5
    assert counts["resumed_from_storage"] > 2


@pytest.mark.seeds(first=200, of_1000=36, short=9, size=27)
def test_a_damaged_set_gives_way_to_the_next_older_one_on_every_rank(
    first_seed: int, seeds: int
) -> None:
    counts = run(first_seed, seeds, ("lose_all", "damage_set"))
    assert counts["load_failed"] > seeds / 12
    assert counts["resumed_from_storage"] > seeds / 18


@pytest.mark.seeds(first=400, of_1000=25, short=8, size=17)
def test_any_fault_may_strike_while_ranks_load(first_seed: int, seeds: int) -> None:
    counts = run(first_seed, seeds, (*FAULTS, *STORAGE_FAULTS, *("lose_all",) * 6))
    assert counts["resumed_from_storage"] > seeds / 10
    assert counts["kill_daemon"] > seeds / 5


def test_a_job_of_a_known_name_goes_on_in_an_epoch_after_that_of_the_copies() -> None:
    counts = run(400, 6, ("kill_rank",), earlier_run=Generation(7, 3))
    assert counts["resumed_from_storage"] >= 4
