"""Random generators for simulations, which themselves take the generator as an argument."""

from __future__ import annotations

import random

from holdfast_cli.planner.effective_time.incidents import Draw


def generator(seed: int) -> Draw:
    """A separate generator for each seed."""
    return random.Random(seed).random
