"""Longer layers with the dispatcher of `holdfast.moe`, against plain expert parallelism (EP).

Forward and backward pass of a layer of 16 experts on one rank, two of them for each token: nothing
crosses a network, so what differs is planning, sorting and copying, and what waits for the device.

- `layer_dispatched`: `ratio` is in percent;
- `layer_planned_on_host`: the same as it was before decision 0143, when numpy planned on the host;
- `layer_beside_experts`, `layer_of_plain_ep`: with the dispatcher and with plain EP, against the
  gate and the experts alone, on tokens that are in order already.

    python -m benchmarks.gpu.dispatching --out FILE.json
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.experts.passes import Passes, make_passes
from benchmarks.gpu.results import Goal, Results, in_turn, run
from holdfast import elastic

LIMIT_S = 30.0
EXPERTS, TOP_K = 16, 2
TOKENS, DIM = 8192, 2048
SMALL_TOKENS, SMALL_DIM = 64, 32
LONGER = Goal(limit=5.0)


def measure(results: Results) -> None:
    """Measure all figures."""
    tokens, dim = (SMALL_TOKENS, SMALL_DIM) if results.small else (TOKENS, DIM)
    results.state("experts", EXPERTS)
    results.state("tokens", tokens)
    if not (results.on_gpu or results.small):
        results.skip("layer_dispatched", "needs a CUDA device")
        return
    world = elastic.init("nccl" if results.on_gpu else "gloo", stay=False)
    try:
        passes = make_passes(
            world.group(lambda size: [range(size)]),
            EXPERTS,
            tokens=tokens,
            dim=dim,
            top_k=TOP_K,
            device=results.device,
            dtype=torch.bfloat16 if results.on_gpu else torch.float32,
        )
        compare = partial(_compare, results, passes)
        compare("layer_dispatched", "dispatcher", "plain EP", LONGER)
        compare("layer_planned_on_host", "on host", "plain EP")
        compare("layer_beside_experts", "dispatcher", "alone")
        compare("layer_of_plain_ep", "plain EP", "alone")
    finally:
        world.close()


def _compare(
    results: Results, passes: Passes, name: str, ours: str, floor: str, goal: Goal | None = None
) -> None:
    def compare() -> None:
        pairs = in_turn(passes[ours], passes[floor], results.device, results.repetitions)
        results.longer(name, pairs, f"the layer, {floor}", goal)

    results.attempt(name, compare)


if __name__ == "__main__":
    raise SystemExit(run("benchmarks.gpu.dispatching", str(__doc__), measure, limit_s=LIMIT_S))
