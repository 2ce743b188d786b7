"""Which strategy captures the snapshots of which policy.

A policy is captured by the strategy of the nearest class that it is derived from. So a policy that
leaves experts out needs nothing here; one that captures otherwise has a strategy of its own, and a
line in `STRATEGIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast._agree.exchange import Exchange
from holdfast._agree.expert_counts import ExpertCounts
from holdfast._agree.window_order import WindowDecisions
from holdfast._capture.gradients import NO_GRADIENTS, Gradients
from holdfast._capture.partial import PartialCapture
from holdfast._capture.strategy import CaptureStrategy
from holdfast._capture.whole import WholeCapture
from holdfast._capture.windows import WindowCapture
from holdfast._state.capture import LiveState
from holdfast_core.job.policies.full import Full
from holdfast_core.job.policies.policy import LossyPolicy, Policy
from holdfast_core.job.policies.sparse import SparseWindows


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOfWorld:
    """What a strategy is made of, beside its policy."""

    live: LiveState
    rank: int
    world_size: int
    exchange: Callable[[], Exchange]
    """Makes an exchange between all ranks, for one use. Collective."""
    wait_s: float
    """Time that a save waits for what other ranks decide with it."""


def make_strategy(policy: Policy, at: RankOfWorld) -> CaptureStrategy:
    """Make this rank's strategy. Collective."""
    make = next(STRATEGIES[kind] for kind in type(policy).__mro__ if kind in STRATEGIES)
    return make(policy, at)


def _whole(policy: Policy, at: RankOfWorld) -> CaptureStrategy:
    del policy, at
    return WholeCapture()


def _partial(policy: LossyPolicy, at: RankOfWorld) -> CaptureStrategy:
    counts = ExpertCounts(at.exchange(), at.rank, at.world_size)
    gradients = Gradients(at.live) if policy.recompute else NO_GRADIENTS
    return PartialCapture(policy, counts, at.wait_s, gradients)


def _windows(policy: SparseWindows, at: RankOfWorld) -> CaptureStrategy:
    return WindowCapture(policy, WindowDecisions(at.exchange(), policy), at.wait_s)


STRATEGIES: dict[type[Policy], Callable[[Any, RankOfWorld], CaptureStrategy]] = {
    Full: _whole,
    LossyPolicy: _partial,
    SparseWindows: _windows,
}
"""Class of a policy → what makes the strategy for it and for classes derived from it."""
