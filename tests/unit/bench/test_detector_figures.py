"""The figures of `make bench NAME=detectors`: what is certain, and what may be noise."""

from __future__ import annotations

import random

import pytest
from benchmarks.detectors import OFF, ON, Block, figures_of


def blocks(longer: float, noise: float, *, rounds: int = 100, seed: int = 0) -> list[Block]:
    """Rounds of a job whose steps of 0.1 s are `longer` by such a part."""
    numbers = random.Random(seed)
    found = []
    for number in range(rounds):
        step_s = 0.1 * (1 + longer) * numbers.gauss(1.0, noise)
        if number % 25 == 0:
            step_s *= 3  # other work on the machine
        used_s = {"daemons": 0.002, "trainers": 0.004 * (1 + longer)}
        found.append(Block(step_s=step_s, used_s=used_s))
    return found


@pytest.mark.parametrize("longer", [0.0, 0.002, 0.02])
def test_the_interval_contains_how_much_longer_a_step_is(longer: float) -> None:
    rows = figures_of({OFF.name: blocks(0.0, 0.004), ON.name: blocks(longer, 0.004, seed=1)})
    figure = rows["detectors"]
    assert figure.low < 100 * longer < figure.high and figure.low < figure.value < figure.high
    assert figure.high - figure.low < 0.3, "enough to tell the goal from noise"
    assert rows["detectors_daemons"].value == pytest.approx(0.0)
    assert rows["detectors_trainers"].value == pytest.approx(4 * longer)
    assert "detectors_repeating" not in rows


def test_what_is_lost_in_noise_has_a_wide_interval() -> None:
    rows = figures_of({OFF.name: blocks(0.0, 0.1), ON.name: blocks(0.0, 0.1, seed=1)})
    assert rows["detectors"].high > 0.3
