"""Each detector in real processes: it names the culprit, and nobody where there is none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import private_network
import pytest
from chaos_culprits import (
    CULPRITS,
    PACE_S,
    RANKS,
    STEP_S_MAX,
    WAIT_S,
    CulpritKind,
    suffer,
    suffer_alone,
)

CULPRIT = 2
STEPS = 1000


def kind_of(name: str) -> CulpritKind:
    return next(kind for kind in CULPRITS if kind.name == name)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_rank_that_is_stopped_is_named(directory: Path) -> None:
    fault = asyncio.run(suffer(kind_of("stopped"), CULPRIT, directory))
    assert fault.outcome == "right", fault
    assert fault.seconds < 30


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(WAIT_S + STEPS * STEP_S_MAX + 60)
@pytest.mark.parametrize("pace_s", [0.0, PACE_S])
def test_nobody_is_named_in_a_thousand_steps(pace_s: float, directory: Path) -> None:
    """All detectors are on: each save compares replicas, links are measured every five seconds, and
    a fifth of the time checks steps."""
    kind = kind_of("nothing")
    fault = asyncio.run(suffer(kind, CULPRIT, directory, trained_steps=STEPS, pace_s=pace_s))
    assert fault.outcome == "right", fault


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(4 * WAIT_S)
@pytest.mark.parametrize("kind", [kind.name for kind in CULPRITS])
@pytest.mark.parametrize("rank", [0, RANKS - 1])
def test_each_culprit_is_named_with_what_was_done_to_it(
    kind: str, rank: int, directory: Path
) -> None:
    if reason := kind_of(kind).why_not():
        pytest.skip(reason)
    if kind_of(kind).narrow:
        fault = private_network.run_in_private_network(suffer_alone, kind, rank, directory)
    else:
        fault = suffer_alone(kind, rank, directory)
    assert fault.outcome == "right", fault
