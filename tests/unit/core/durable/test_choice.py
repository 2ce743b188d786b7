"""Which copy a job goes on from, and when it begins afresh, waits, or needs another epoch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.durable.choice import CopyChoice, Found, StoredCopy, UnreadableCopy, choose_copy
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.membership import Tier

TIER = Tier(uri="s3://bucket/run1")
OLD, NEW = Generation(3, 900), Generation(3, 1200)


def found(*generations: Generation, world_size: int = 4) -> Found:
    return Found(copies=tuple(StoredCopy(generation=g, world_size=world_size) for g in generations))


def choice(there: Found, tier: Tier = TIER, **more: object) -> CopyChoice:
    given_ = {"epoch": 5, "world_size": lambda _: 4, "unusable": {}, **more}
    return choose_copy(there, tier, **given_)  # type: ignore[arg-type]


def test_the_newest_copy_is_taken_whatever_order_they_are_listed_in() -> None:
    chosen = choice(found(OLD, NEW))
    assert chosen == CopyChoice(generation=NEW, reason="generation 3.1200 from s3://bucket/run1")


def test_the_order_is_by_epoch_before_step() -> None:
    assert choice(found(Generation(2, 5000), OLD)).generation == OLD


def test_a_copy_that_a_rank_could_not_load_is_skipped_by_name() -> None:
    chosen = choice(found(NEW, OLD), unusable={NEW: "rank 2: piece 7 is wrong"})
    assert chosen.generation == OLD
    assert "skipped 3.1200 rank 2: piece 7 is wrong" in chosen.reason


def test_an_unreadable_set_is_named_only_when_it_would_have_come_first() -> None:
    there = replace(
        found(OLD),
        unreadable=(
            UnreadableCopy(generation=NEW, reason="is cut off"),
            UnreadableCopy(generation=Generation(2, 1), reason="is old"),
        ),
    )
    assert (
        choice(there).reason == "generation 3.900 from s3://bucket/run1; skipped 3.1200 is cut off"
    )


def test_what_is_being_loaded_stays_while_it_can_be_used() -> None:
    assert choice(found(NEW, OLD), current=OLD).generation == OLD
    assert choice(found(NEW, OLD), current=OLD, unusable={OLD: "bad"}).generation == NEW


def test_a_job_without_any_copy_starts_from_the_beginning() -> None:
    chosen = choice(Found())
    assert chosen.fresh
    assert "holds no complete copy" in chosen.reason


@pytest.mark.parametrize(
    ("there", "more", "word"),
    [
        (found(NEW), {"unusable": {NEW: "rank 1: cut off"}}, "rank 1: cut off"),
        (found(NEW, world_size=8), {}, "load it with torch.distributed.checkpoint"),
        (
            Found(unreadable=(UnreadableCopy(generation=NEW, reason="bad checksum"),)),
            {},
            "3.1200 bad checksum",
        ),
        (found(NEW), {"tier": replace(TIER, restore_from="3.7")}, "holds 3.1200"),
        (Found(), {"tier": replace(TIER, restore_from="3.7")}, "holds nothing"),
    ],
)
def test_a_job_whose_copies_cannot_be_used_waits(
    there: Found, more: dict[str, object], word: str
) -> None:
    chosen = choice(there, **more)  # type: ignore[arg-type]
    assert chosen.generation is None
    assert not chosen.fresh
    assert not chosen.beyond
    assert word in chosen.reason


def test_a_chosen_copy_is_taken_and_nothing_replaces_it() -> None:
    tier = replace(TIER, restore_from="3.900")
    assert choice(found(NEW, OLD), tier).generation == OLD
    assert choice(found(NEW, OLD), tier, unusable={OLD: "bad"}).generation is None


def test_an_epoch_that_is_already_in_storage_has_to_be_passed_first() -> None:
    for epoch in (1, 3):
        chosen = choice(found(NEW, OLD), epoch=epoch)
        assert (chosen.beyond, chosen.generation, chosen.fresh) == (3, None, False)
    assert choice(found(NEW, OLD), epoch=4).generation == NEW


def test_many_refusals_are_listed_in_one_line_of_bounded_length() -> None:
    bad = {Generation(1, step): "x" * 50 for step in range(200)}
    chosen = choice(found(*bad), unusable=bad)
    assert "and 196 more" in chosen.reason
    assert len(chosen.reason) < 600


def test_a_copy_has_the_size_of_the_world_that_captured_it() -> None:
    sizes = {OLD: 4, NEW: 3}
    assert choice(found(OLD, NEW, world_size=3), world_size=sizes.get).generation == NEW
    chosen = choice(found(OLD, NEW), world_size=sizes.get)
    assert chosen.generation == OLD
    assert "skipped 3.1200 has 4 ranks and the job has 3" in chosen.reason
    chosen = choice(found(OLD), world_size=lambda _: None)
    assert chosen.generation is None
    assert "3.900 is of a world that the job no longer knows" in chosen.reason


@given(
    st.lists(st.builds(Generation, st.integers(1, 9), st.integers(0, 5)), max_size=6),
    st.sets(st.integers(0, 5), max_size=6),
    st.integers(1, 10),
    st.sampled_from([2, 4]),
)
def test_fresh_starts_only_without_copies_and_loads_only_older_epochs(
    generations: list[Generation], bad: set[int], epoch: int, world_size: int
) -> None:
    unusable = {g: "bad" for i, g in enumerate(generations) if i in bad}
    chosen = choice(found(*generations, world_size=world_size), epoch=epoch, unusable=unusable)
    assert chosen.fresh == (not generations)
    if chosen.generation is not None:
        assert world_size == 4
        assert chosen.generation.epoch < epoch
        usable = [g for g in generations if g not in unusable]
        assert chosen.generation == max(usable)
