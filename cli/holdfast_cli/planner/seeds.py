"""Generators for simulations, which core takes as arguments."""

from __future__ import annotations

import random

from holdfast_cli.planner.effective_time.incidents import Draw


def generator(seed: int) -> Draw:
    """A generator of its own for each seed."""
    return random.Random(seed).random
