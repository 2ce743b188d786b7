"""The seeds of simulated schedules."""

from __future__ import annotations

import pytest
from seeds import blocks


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test for each block of the seeds that a test's mark `seeds` gives it."""
    for mark in metafunc.definition.iter_markers("seeds"):
        rows = blocks(metafunc.config.getoption("--schedules"), **mark.kwargs)
        metafunc.parametrize(("first_seed", "seeds"), rows)
