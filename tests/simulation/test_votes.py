"""After every death of a rank in a step, the others go on live, with the right bytes; a lost shard
comes from the line, for its rank alone where the line is of the others' step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import voting

SHORT = voting.Crash(1, "in-vote", frozenset({0}))
"""Its reform has everything: a rank that finishes the step, and one that is given all."""


def every_crash(marks: Callable[[voting.Crash], Any]) -> pytest.MarkDecorator:
    """Run a test for each crash, with the marks that `marks` gives it."""
    return pytest.mark.parametrize(
        "crash",
        [pytest.param(crash, marks=marks(crash)) for crash in voting.crashes()],
        ids=lambda crash: f"{crash.rank} {crash.point} {sorted(crash.unseen)}",
    )


first_loss = every_crash(lambda crash: [] if crash.rank == 1 else pytest.mark.exhaustive)
second_loss = every_crash(
    lambda crash: pytest.mark.slow if crash == SHORT else pytest.mark.exhaustive
)


@first_loss
def test_training_goes_on_live(crash: voting.Crash, monkeypatch: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(voting.RANKS))
    voting.run(crash)


@second_loss
def test_training_goes_on_live_after_a_second_death_in_the_reform(
    crash: voting.Crash, monkeypatch: Any
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(voting.RANKS))
    for second in voting.second_crashes():
        voting.run(crash, second=second)


@pytest.mark.parametrize("script", voting.SCRIPTS)
def test_what_a_script_does_otherwise_never_leads_to_wrong_bytes(
    script: str, monkeypatch: Any
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(voting.RANKS))
    voting.run(voting.crash_of(script), script)


@first_loss
def test_a_lost_shard_comes_from_the_line(crash: voting.Crash, monkeypatch: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(voting.RANKS))
    voting.run_sharded(crash)


@second_loss
def test_lost_shards_come_from_the_line_after_a_second_death_in_the_reform(
    crash: voting.Crash, monkeypatch: Any
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(voting.RANKS))
    for second in voting.second_crashes():
        voting.run_sharded(crash, second=second)


@pytest.mark.parametrize("script", voting.SHARDED_SCRIPTS)
def test_a_shard_is_restored_alone_only_where_the_others_are_what_they_saved(
    script: str, monkeypatch: Any
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(voting.RANKS))
    voting.run_sharded(voting.crash_of(script), script)
