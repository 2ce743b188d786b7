"""Routing traces: how many tokens each expert receives at each step, skewed and smoothly drifting.

A generator of what MoEtion §3.1 reports of trained models: popularity within a layer follows a
power law (a few experts process most tokens), and the popular experts change over 100 to 500 steps
without jumps. Seeded, so that policies can be compared on the same traffic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast_core.experts.tables import ExpertTable, MoeLayer
from holdfast_core.snapshots.units import UnitKey

DRIFT_STEPS = (100, 500)
"""Range of steps over which popularity is smooth (MoEtion §5.2)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Parameters of the routed tokens."""

    tokens: int = 32 * 1024
    """Tokens times the experts of each token, per layer and step."""
    skew: float = 2.0
    """Exponent of the power law; with 2, the two most popular of 16 experts receive about 70 % of
    the tokens and 80 to 90 % at times (§3.1: up to 80 % and 87 %)."""
    seed: int = 0


def routing_trace(table: ExpertTable, steps: int, traffic: Traffic) -> Iterator[dict[UnitKey, int]]:
    """The tokens of each expert, step by step."""
    rng = np.random.default_rng(traffic.seed)
    shares = [_popularity(layer, steps, traffic.skew, rng) for layer in table.layers]
    for step in range(steps):
        counts: dict[UnitKey, int] = {}
        for layer, popularity in zip(table.layers, shares, strict=True):
            routed = rng.multinomial(traffic.tokens, popularity[step])
            counts.update(
                (expert.unit, int(n)) for expert, n in zip(layer.experts, routed, strict=True)
            )
        yield counts


def _popularity(
    layer: MoeLayer, steps: int, skew: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Shares of shape [steps, experts] that add up to 1 in each step.

    Between knots 100 to 500 steps apart, each with an order of experts of its own, their logarithms
    follow a quarter of a circle from one knot to the next: unlike a straight line, that keeps their
    spread, and so the skew, on the way.
    """
    levels = -skew * np.log(np.arange(1, len(layer.experts) + 1))
    levels -= levels.mean()
    before, after = rng.permutation(levels), rng.permutation(levels)
    logits = np.empty((steps, len(levels)))
    start, length = 0, int(rng.integers(*DRIFT_STEPS, endpoint=True))
    for step in range(steps):
        if step - start == length:
            start, length = step, int(rng.integers(*DRIFT_STEPS, endpoint=True))
            before, after = after, rng.permutation(levels)
        angle = np.pi / 2 * (step - start) / length
        logits[step] = np.cos(angle) * before + np.sin(angle) * after
    weights = np.exp(logits)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))
