"""Each detector in a job of real processes: silent for a thousand steps, and then it names the
culprit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import private_network
import pytest
from chaos_culprits import CULPRITS, RANKS, WAIT_S, suffer, suffer_alone

CULPRIT = 2
STEPS = 1000


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_nobody_is_named_in_a_thousand_steps_and_then_the_rank_that_is_stopped(
    directory: Path,
) -> None:
    """All detectors are on; each save compares replicas, and a fifth of the time checks steps."""
    (stopped,) = (kind for kind in CULPRITS if kind.name == "stopped")
    fault = asyncio.run(suffer(stopped, CULPRIT, directory, trained_steps=STEPS, pace_s=0.0))
    assert fault.outcome == "right", fault
    assert fault.seconds < 30


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(4 * WAIT_S)
@pytest.mark.parametrize("kind", [kind.name for kind in CULPRITS])
@pytest.mark.parametrize("rank", [0, RANKS - 1])
def test_each_culprit_is_named_with_what_was_done_to_it(
    kind: str, rank: int, directory: Path
) -> None:
    (narrow,) = (each.name for each in CULPRITS if each.narrow)
    if kind == narrow:
        if reason := private_network.why_not():
            pytest.skip(reason)
        fault = private_network.run_in_private_network(suffer_alone, kind, rank, directory)
    else:
        fault = suffer_alone(kind, rank, directory)
    assert fault.outcome == "right", fault
