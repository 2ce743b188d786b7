"""Checks of what uneven copies rely on: optimizers that treat experts apart, and equal copies."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from holdfast._agree.replicas import differing_copies
from holdfast._capture.apart import why_not_apart
from holdfast._digests import digest_of
from holdfast._elastic.world import WorldGroup
from holdfast._moe.gradients import HeldExpert, held_experts, moe_layers
from holdfast_core.errors import InvalidJobError, ReplicaMismatchError
from holdfast_core.snapshots.names import TensorName
from holdfast_core.snapshots.units import UnitKey, UnitKind

_log = logging.getLogger("holdfast")
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
_STEPS = 2
_TOLERANCE = 1e-3


def check_optimizer(make: MakeOptimizer) -> None:
    """Refuse optimizers whose update of one expert depends on others in its stack, as norms of
    whole tensors do: copies of an expert lie in stacks of different ranks, and would part. Also
    refuse those whose state has no part for each expert, which could not change ranks with it.

    Two experts are stepped in one stack, and each by itself.

    Args:
        make: makes the optimizer for some parameters.

    Raises:
        InvalidJobError: when the results differ, or a state has no such part.
    """
    draw = torch.Generator()
    draw.manual_seed(1)
    scales = torch.tensor([1.0, 100.0], device="cpu").view(2, 1, 1)
    start = torch.empty(2, 8, 8, device="cpu").normal_(generator=draw) * scales
    together = nn.Parameter(start.clone())
    apart = [nn.Parameter(one.clone().unsqueeze(0)) for one in start]
    optimizers = [make([together]), *(make([one]) for one in apart)]
    for _ in range(_STEPS):
        grad = torch.empty(2, 8, 8, device="cpu").normal_(generator=draw) * scales.flip(0)
        together.grad = grad.clone()
        for one, part in zip(apart, grad, strict=True):
            one.grad = part.clone().unsqueeze(0)
        for optimizer in optimizers:
            optimizer.step()
    kept = getattr(optimizers[0], "state", {}).get(together, {})
    wrong = why_not_apart(TensorName("experts.w"), together, kept, stacked=True)
    if wrong:
        raise InvalidJobError(
            f"{type(optimizers[0]).__qualname__} cannot train experts that change ranks: {wrong}; "
            f"use an optimizer that keeps its state for each element, like AdamW or SGD without "
            f"quantized states"
        )
    moved = together.detach() - start
    expected = torch.cat([one.detach() for one in apart]) - start
    allowed = _TOLERANCE * expected.abs().amax(dim=(1, 2), keepdim=True)
    if bool(((moved - expected).abs() > allowed).any()):
        raise InvalidJobError(
            f"{type(optimizers[0]).__qualname__} updates an expert by what other experts in its "
            f"stack are like, so the copies of one expert would become different: use an optimizer "
            f"that treats elements apart, like AdamW or SGD"
        )


def check_same_optimizer(optimizer: object) -> None:
    """Refuse an optimizer that mixes experts, by a trial of another one of its class with its
    settings; if none can be made or does not run in host memory, `check_optimizer` is left to the
    script.

    Raises:
        InvalidJobError: see `check_optimizer`.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    known = inspect.signature(type(optimizer)).parameters
    settings = {key: value for key, value in optimizer.defaults.items() if key in known}
    try:
        check_optimizer(lambda parameters: type(optimizer)(parameters, **settings))
    except InvalidJobError:
        raise
    except Exception as error:  # raised by the user's class
        _log.info(
            "%s was not tried on two experts (%s: %s): call holdfast.moe.check_optimizer with a "
            "function that makes it",
            type(optimizer).__qualname__,
            type(error).__name__,
            error,
        )


@torch.no_grad()
def check_copies(model: nn.Module, optimizer: torch.optim.Optimizer, group: WorldGroup) -> None:
    """Compare all copies of each expert, with their optimizer states. Collective.

    Raises:
        ReplicaMismatchError: on every rank, when copies have different bytes.
        InvalidJobError: when the model has no `MoELayer`.
    """
    layers = moe_layers(model)
    experts = max(len(layer.plan.layers[layer.layer].copies) for layer in layers)
    rank = dist.get_rank(group.now)
    own = torch.zeros(len(layers), experts, dtype=torch.int64, device="cpu")
    for one in held_experts(layers):
        own[one.layer, one.expert] = digest_of(_state_of(one, optimizer)) >> 1
    device = next(layers[0].experts.parameters()).device
    every = [torch.empty_like(own, device=device) for _ in range(dist.get_world_size(group.now))]
    group.wait(dist.all_gather(every, own.to(device), group=group.now, async_op=True))
    every = [one.cpu() for one in every]
    seated: dict[int, dict[str, int]] = {holder: {} for holder in range(len(every))}
    for at, layer in enumerate(layers):
        for expert, held in enumerate(layer.plan.layers[layer.layer].copies):
            name = str(UnitKey(layer.layer, UnitKind.EXPERT, expert))
            for holder, _ in held:
                seated[holder][name] = int(every[holder][at, expert])
    for unit, (first, *differ) in sorted(differing_copies(seated)):
        raise ReplicaMismatchError(
            f"expert {unit.expert} of layer {unit.layer}: rank {first} holds different bytes from "
            f"ranks {differ} (seen by rank {rank}); copies become different when their gradients "
            f"are not summed by holdfast.moe.SummedGradients, or when a snapshot left some of them "
            f"out: use the policy Full"
        )


def _state_of(one: HeldExpert, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for parameter in one.parameters:
        yield parameter[one.seat]
        state = optimizer.state.get(parameter, {})
        for _, value in sorted(state.items()):
            if isinstance(value, torch.Tensor) and value.shape[:1] == parameter.shape[:1]:
                yield value[one.seat]
