"""One layer of experts with several dispatchers, and without any.

With one rank there is no network: what differs is planning, sorting and copying, and what waits for
the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from benchmarks.experts.host_planner import HostDispatcher
from benchmarks.experts.plain import PlainLayer
from holdfast import elastic, moe

Passes = Mapping[str, Callable[[], object]]
"""Way → a forward and backward pass of the layer: with the dispatcher of `holdfast.moe`
(`dispatcher`), with the one that plans on the host (`on host`), with plain expert parallelism
(`plain EP`), and without any, on tokens that are in their seats' order already (`alone`)."""


def make_passes(
    group: elastic.WorldGroup,
    experts: int,
    *,
    tokens: int,
    dim: int,
    top_k: int = 1,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Passes:
    """Make a layer for a world of one rank, and return its passes, all with the same gate, experts
    and tokens."""
    plan = moe.plan_experts([[1] * experts], moe.ExpertRoom(nodes=1, rank_seats=experts))
    torch.manual_seed(1)
    layer = moe.MoELayer(dim, 4 * dim, plan, 0, group, top_k=top_k).to(device, dtype)
    assert isinstance(layer.experts, moe.SeatedExperts)
    plain = PlainLayer(layer.gate, layer.experts, group)
    dispatcher, host = layer.dispatcher, HostDispatcher(plan, 0, group)
    x_ND = torch.randn(tokens, dim, device=device, dtype=dtype, requires_grad=True)
    with torch.no_grad():
        route = layer.dispatcher.route(layer.gate(x_ND)[2])
    sorted_PD = x_ND.detach().repeat_interleave(top_k, 0).requires_grad_()

    def whole(way: moe.Dispatcher) -> None:
        layer.dispatcher = way
        out, balance = layer(x_ND)
        (out.square().sum() + balance).backward()

    def beside() -> None:
        out, balance = plain(x_ND)
        (out.square().sum() + balance).backward()

    def alone() -> None:
        probs, weights, _ = layer.gate(x_ND)
        answers = layer.experts(sorted_PD, route.seat_rows, route.rows_S)
        out = (answers.view(tokens, top_k, dim) * weights.to(dtype).unsqueeze(-1)).sum(1)
        (out.square().sum() + probs.square().sum()).backward()

    return {
        "dispatcher": lambda: whole(dispatcher),
        "on host": lambda: whole(host),
        "plain EP": beside,
        "alone": alone,
    }
