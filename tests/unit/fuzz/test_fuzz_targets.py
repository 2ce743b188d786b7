"""Every parser of bytes from outside, given damaged bytes: see `tests/fuzz`."""

from __future__ import annotations

import random

import pytest
from fuzzing_mutations import damaged
from fuzzing_targets import TARGETS, Target, attempt
from hypothesis import given, settings
from hypothesis import strategies as st

EXAMPLES = 400
EXAMPLES_OF = {"http": 30, "job-file": 100, "arena-socket": 60, "kept-manifest": 100}
"""Of those that take a connection, or long."""
LONG = {"job-file"}


def _named(target: Target) -> str:
    return target.name


@pytest.mark.parametrize("target", TARGETS, ids=_named)
def test_what_is_valid_is_read(target: Target) -> None:
    for seed in target.seeds():
        attempt(target, seed)


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(target, marks=pytest.mark.slow if target.name in LONG else [])
        for target in TARGETS
    ],
    ids=_named,
)
def test_damaged_bytes_are_read_or_refused(target: Target) -> None:
    seeds = target.seeds()

    @settings(max_examples=EXAMPLES_OF.get(target.name, EXAMPLES))
    @given(st.randoms(use_true_random=True))
    def damage(rng: random.Random) -> None:
        attempt(target, damaged(seeds, rng))

    damage()


def test_each_target_has_one_name() -> None:
    assert len({target.name for target in TARGETS}) == len(TARGETS)
