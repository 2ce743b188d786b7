"""The dispatcher's share of a layer's processor time, on one process.

Forward and backward pass of a whole layer, and of its gate and experts alone, on tokens that are
already in their seats' order, take turns; the difference is the dispatcher's. With one rank there
is no network: what is measured is planning, sorting and copying.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.elastic.counted import Model
from benchmarks.measure import WARM_UPS, Figure
from holdfast import elastic, moe

TOKENS = 1024
DIM = 256
"""Width of tokens: a quarter of the papers', since experts' work grows with its square."""


def dispatcher_share(model: Model, repetitions: int) -> Figure:
    """Percentage of a layer's time with even loads, from the shortest of the repetitions of each:
    other programs only make them longer."""
    torch.set_num_threads(1)
    world = elastic.init("gloo", stay=False)
    try:
        group = world.group(lambda size: [range(size)])
        room = moe.ExpertRoom(nodes=1, rank_seats=model.experts)
        plan = moe.plan_experts([[1] * model.experts], room)
        torch.manual_seed(1)
        layer = moe.MoELayer(DIM, 4 * DIM, plan, 0, group, top_k=1)
        x = torch.randn(TOKENS, DIM, requires_grad=True)
        with torch.no_grad():
            rows = layer.dispatcher.route(layer.gate(x)[2]).seat_rows

        def whole() -> None:
            out, balance = layer(x)
            (out.square().sum() + balance).backward()

        def alone() -> None:
            probs, weights, _ = layer.gate(x)
            out = layer.experts(x, rows) * weights
            (out.square().sum() + probs.square().sum()).backward()

        for _ in range(WARM_UPS):
            whole()
            alone()
        taken = [(_processor_s(whole), _processor_s(alone)) for _ in range(repetitions)]
    finally:
        world.close()
    whole_s, alone_s = (min(seconds) for seconds in zip(*taken, strict=True))
    share = 100 * (1 - alone_s / whole_s)
    return Figure(
        value=share, unit="%", low=share, high=share, repetitions=repetitions, seconds=whole_s
    )


def _processor_s(action: Callable[[], object]) -> float:
    """Processor time of `action`, which other programs disturb less than its duration."""
    began = time.process_time()
    action()
    return time.process_time() - began
