"""The dispatcher's share of a layer's processor time, beside plain expert parallelism (EP), on one
process. The ways of `make_passes` take turns."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import torch

from benchmarks.elastic.counted import Model
from benchmarks.experts.passes import make_passes
from benchmarks.measure import WARM_UPS
from holdfast import elastic

TOKENS = 1024
DIM = 256
"""Width of tokens: a quarter of the papers', since experts' work grows with its square."""


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of a layer's processor time, in percent, from the shortest pass of each way: other
    programs only make them longer."""

    dispatcher: float
    planned_on_host: float
    plain_ep: float
    longer_than_plain_ep: float
    """How much longer than the layer with plain EP the layer with the dispatcher takes."""
    before_over_now: float
    """Time that the dispatcher took when it planned on the host, over what it takes now."""
    repetitions: int


def dispatcher_shares(model: Model, repetitions: int) -> Shares:
    """Measure the layer of a model with even loads."""
    torch.set_num_threads(1)
    world = elastic.init("gloo", stay=False)
    try:
        group = world.group(lambda size: [range(size)])
        passes = make_passes(group, model.experts, tokens=TOKENS, dim=DIM)
        turns = [
            {name: _processor_s(action) for name, action in passes.items()}
            for _ in range(WARM_UPS + repetitions)
        ][WARM_UPS:]
    finally:
        world.close()
    return shares_of(turns)


def shares_of(turns: list[dict[str, float]]) -> Shares:
    """Compute the shares from the seconds that each way took in each turn."""
    best = {name: min(turn[name] for turn in turns) for name in turns[0]}

    def share(name: str) -> float:
        return 100 * (1 - best["alone"] / best[name])

    return Shares(
        dispatcher=share("dispatcher"),
        planned_on_host=share("on host"),
        plain_ep=share("plain EP"),
        longer_than_plain_ep=100 * (best["dispatcher"] / best["plain EP"] - 1),
        before_over_now=(best["on host"] - best["alone"]) / (best["dispatcher"] - best["alone"]),
        repetitions=len(turns),
    )


def _processor_s(action: Callable[[], object]) -> float:
    """Processor time of `action`, which other programs disturb less than its duration."""
    began = time.process_time()
    action()
    return time.process_time() - began
