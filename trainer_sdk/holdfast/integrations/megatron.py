"""Holdfast around a model and an optimizer of Megatron-Core.

    session = protect(model, optimizer, opt_param_scheduler)
    iteration = session.restore() or 0

Megatron's distributed optimizer keeps masters and moments of ranges of parameters. Which elements a
rank holds is in a table of its own, and which ranks hold the same state follows from its groups.
`protect` reads both, so that snapshots hold every state by parameter, and repeats nothing that
Megatron already knows. It patches nothing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holdfast._init import init
from holdfast._session.interface import Session
from holdfast._state.collect import Stateful
from holdfast._state.flat import FlatRange, FlatTensor
from holdfast.integrations._entries import check_model
from holdfast_core.errors import InvalidJobError
from holdfast_core.packages import PackageGroup, needing
from holdfast_core.topology import Topology

with needing("holdfast.integrations.megatron", PackageGroup.MEGATRON):
    from megatron.core import parallel_state
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import (
        ChainedOptimizer,
        Float16OptimizerWithFloat16Params,
        FP32Optimizer,
        MegatronOptimizer,
    )
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer
    from megatron.core.utils import unwrap_model

_EXPERTS = (SequentialMLP, TEGroupedMLP)
_OPTIMIZERS = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)


def protect(
    model: nn.Module | Sequence[nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: Stateful | None = None,
    *,
    stateful: Mapping[str, Stateful] | None = None,
    **arguments: Any,
) -> Session:
    """Make the session of a model and its optimizer. Every rank calls it, before the first step.

    Snapshots hold the parameters, their masters and moments by parameter, the loss scale, the
    scheduler, and the random generators, including Megatron's. Layers and experts have their
    numbers in the whole model. Save after `optimizer.step()` and `scheduler.step()`:
    `session.save(iteration)`. `session.restore()` returns the iteration.

    Args:
        model: the model, or its chunks, as `get_model` of Megatron-LM returns them.
        optimizer: from `get_megatron_optimizer`.
        scheduler: the `OptimizerParamScheduler`.
        stateful: further objects to save and restore, such as the position in the data.
        arguments: further arguments of `holdfast.init`: `settings`, `units`, …

    Raises:
        InvalidJobError: the model or the optimizer keeps state in a way that a snapshot cannot
            hold; the message names the setting to change.
    """
    chunks = [model] if isinstance(model, nn.Module) else [*model]
    optimizers = [*_each(optimizer)]
    check_model("Megatron-Core", nn.ModuleList(chunks), arguments)
    _check(chunks, optimizers)
    whole = whole_model(chunks)
    names = {id(p): name for name, p in whole.named_parameters()}
    ours: dict[str, Stateful] = {"megatron": _OwnState(optimizers)}
    if scheduler is not None:
        ours["scheduler"] = scheduler
    return init(
        model=whole,
        optimizer=[one.optimizer for one in optimizers],
        stateful={**ours, **(stateful or {})},
        topology=topology_of_groups(),
        flat=[flat for one in optimizers for flat in _flat_tensors(one, names)],
        masters=[pair for one in optimizers for pair in _masters(one)],
        **arguments,
    )


def topology_of_groups() -> Topology:
    """Return the topology of the groups of ranks that `initialize_model_parallel` has made.

    Raises:
        InvalidJobError: the groups have their ranks in another order than a topology can state.
    """
    dense = _ranks(parallel_state.get_data_parallel_group(with_context_parallel=True))
    experts = _ranks(parallel_state.get_expert_data_parallel_group())
    topology = Topology(
        dp=len(dense),
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        ep=parallel_state.get_expert_model_parallel_world_size(),
    )
    topology.check_world(dist.get_world_size())
    rank = dist.get_rank()
    if dense != topology.dense_replicas(rank):
        raise InvalidJobError(
            f"the data-parallel ranks of rank {rank} are {list(dense)} in Megatron, and "
            f"{list(topology.dense_replicas(rank))} in the topology {topology}: call "
            f"initialize_model_parallel with the default order"
        )
    share = parallel_state.get_expert_model_parallel_rank()
    replicas = topology.expert_replicas(rank)
    if experts != replicas or share != topology.coordinates(rank).ep:
        raise InvalidJobError(
            f"rank {rank} has share {share} of the experts in Megatron, as have {list(experts)}; "
            f"in the topology {topology} it has share {topology.coordinates(rank).ep}, as have "
            f"{list(replicas)}: leave expert_tensor_parallel_size out, and call "
            f"initialize_model_parallel with the default order"
        )
    return topology


def whole_model(chunks: Sequence[nn.Module]) -> nn.Module:
    """Return a module with the parameters and buffers of `chunks`, in which each layer has its
    number in the whole model, whichever pipeline stage and chunk it is in. Its parts are the
    modules of the chunks themselves; it cannot be called."""
    whole, *others = [_renamed(unwrap_model(chunk)) for chunk in chunks]
    for other in others:
        whole = _merged(whole, other)
    return whole


class _Twin(nn.Module):
    """A module with the parameters, buffers and mode of another, and with other children."""

    _of: nn.Module

    def __init__(self, of: nn.Module, children: Mapping[str, nn.Module]) -> None:
        object.__setattr__(self, "_of", of)  # not as a child
        mode = of.training
        super().__init__()
        of.training = mode
        self._parameters, self._buffers = of._parameters, of._buffers
        self._non_persistent_buffers_set = of._non_persistent_buffers_set
        self._modules = {**children}

    @property
    def training(self) -> bool:
        return self._of.training

    @training.setter
    def training(self, mode: bool) -> None:
        self._of.training = mode


def _renamed(module: nn.Module) -> nn.Module:
    """Return `module`, or a twin in which layers are called by their `layer_number`, and grouped
    experts are listed."""
    numbers: list[Any] = [getattr(one, "layer_number", None) for one in module.children()]
    if isinstance(module, nn.ModuleList) and all(numbers) and len({*numbers}) == len(numbers) > 0:
        layers = zip(numbers, module, strict=True)
        return _Twin(module, {str(number - 1): _renamed(one) for number, one in layers})
    children = {name: _renamed(child) for name, child in module.named_children()}
    if isinstance(module, TEGroupedMLP):
        # First, so that these are the names of the tensors.
        return _Twin(module, {"local_experts": _listed(module), **children})
    same = all(child is module._modules[name] for name, child in children.items())
    return module if same else _Twin(module, children)


def _listed(grouped: nn.Module) -> nn.ModuleList:
    """Return the experts of a grouped layer as `SequentialMLP` has them: `linear_fc1.weight3` is
    `3.linear_fc1.weight`."""
    experts: dict[int, nn.Module] = defaultdict(nn.Module)
    for path, parameter in grouped.named_parameters():
        layer, _, name = path.partition(".")
        match = re.fullmatch(r"([a-z_]+)([0-9]+)", name)
        if match is None:
            raise InvalidJobError(
                f"a {type(grouped).__qualname__} has {path} {list(parameter.shape)}, which is not "
                f"of a single expert: set moe_grouped_gemm to False"
            )
        expert = experts[int(match[2])]
        if layer not in expert._modules:
            expert.add_module(layer, nn.Module())
        expert.get_submodule(layer).register_parameter(match[1], parameter)
    return nn.ModuleList(experts[number] for number in range(len(experts)))


def _merged(one: nn.Module, other: nn.Module) -> nn.Module:
    """Return the parts of two chunks as one module.

    Raises:
        InvalidJobError: both have a part of this name with tensors of its own.
    """
    if (one._parameters or one._buffers) and (other._parameters or other._buffers):
        raise InvalidJobError(
            f"two chunks have the same {type(one).__qualname__}: give the chunks of one pipeline "
            f"stage, whose layers have different values of layer_number"
        )
    children = dict(one.named_children())
    for name, child in other.named_children():
        children[name] = _merged(children[name], child) if name in children else child
    return _Twin(other if other._parameters or other._buffers else one, children)


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))


def _each(optimizer: Any) -> Iterator[MegatronOptimizer]:
    """Yield the optimizers in chains of optimizers. A chain has empty ones for frozen parts."""
    if isinstance(optimizer, ChainedOptimizer):
        for one in optimizer.chained_optimizers:
            yield from _each(one)
    elif getattr(optimizer, "optimizer", None) is not None or type(optimizer) not in _OPTIMIZERS:
        yield optimizer


def _check(chunks: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
    """Raise InvalidJobError for what a session would not hold whole."""
    for one in optimizers:
        if type(one) not in _OPTIMIZERS:
            raise InvalidJobError(
                f"a {type(one).__qualname__} keeps its state in a way that a session does not "
                f"know: give what get_megatron_optimizer returns for optimizer 'adam' or 'sgd'"
            )
        for setting in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
            if getattr(one.config, setting, False):
                raise InvalidJobError(
                    f"OptimizerConfig.{setting} keeps masters and moments in other places than "
                    f"Megatron's table says: set it to False"
                )
    for chunk in chunks:
        ddp = getattr(chunk, "ddp_config", None)
        if getattr(ddp, "use_megatron_fsdp", False):
            raise InvalidJobError(
                "Megatron-FSDP takes the weights themselves out of the model's parameters, where a "
                "session does not find them: set use_megatron_fsdp to False, or use FSDP2"
            )
        if getattr(ddp, "overlap_param_gather", False):
            raise InvalidJobError(
                "with overlap_param_gather, weights arrive only in the next forward pass, and "
                "change while a snapshot copies them: set it to False in "
                "DistributedDataParallelConfig and OptimizerConfig"
            )
        if getattr(ddp, "num_distributed_optimizer_instances", 1) > 1:
            raise InvalidJobError(
                "with several instances of the distributed optimizer, other ranks hold the same "
                "ranges: set num_distributed_optimizer_instances to 1"
            )
        if getattr(ddp, "fp8_param_gather", False):
            raise InvalidJobError("weights in FP8 are not covered: set fp8_param_gather to False")
        for path, module in chunk.named_modules():
            if isinstance(module, BaseMoELayer) and not isinstance(module.experts, _EXPERTS):
                raise InvalidJobError(
                    f"{path} has its experts in a {type(module.experts).__qualname__}, whose "
                    f"tensors have no names of single experts: set moe_grouped_gemm to False"
                )


def _flat_tensors(optimizer: MegatronOptimizer, names: Mapping[int, str]) -> Iterator[FlatTensor]:
    """Yield the shards of a distributed optimizer, each a range of a parameter.

    Raises:
        InvalidJobError: Megatron's table names other elements than there are.
    """
    if not isinstance(optimizer, DistributedOptimizer):
        return
    held = (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    )
    for groups in held:
        for parameters, shards in zip(*groups, strict=True):
            for parameter, shard in zip(parameters, shards, strict=True):
                place = optimizer._get_model_param_range_map(parameter)["param"]
                one = FlatRange(parameter=parameter, first=place.start, count=place.size, at=0)
                if not one.rounds_to_weights(shard):
                    raise InvalidJobError(
                        f"Megatron's table says that a shard has the masters of elements "
                        f"{place.start} to {place.end - 1} of {names[id(parameter)]}, but other "
                        f"values are there: call protect before the first step, and after "
                        f"optimizer.reload_model_params() if weights were loaded"
                    )
                yield FlatTensor(tensor=shard, ranges=[one])


def _masters(optimizer: MegatronOptimizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the 16-bit parameters of an optimizer that is not distributed, with their masters."""
    if isinstance(optimizer, Float16OptimizerWithFloat16Params):
        for held in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            yield from zip(*held, strict=True)


class _OwnState:
    """Megatron's random generators and loss scales."""

    def __init__(self, optimizers: Sequence[MegatronOptimizer]) -> None:
        found = (getattr(one, "grad_scaler", None) for one in optimizers)
        self._scalers = [one for one in found if one is not None]

    def state_dict(self) -> dict[str, Any]:
        """Return the states.

        Raises:
            InvalidJobError: a generator is captured in CUDA graphs.
        """
        generators = get_cuda_rng_tracker().get_states()
        for name, state in generators.items():
            if not isinstance(state, torch.Tensor):
                raise InvalidJobError(
                    f"Megatron's generator {name!r} is a {type(state).__qualname__}: call "
                    f"initialize_rng_tracker without use_cudagraphable_rng"
                )
        return {
            "generators": dict(generators),
            "scalers": [one.state_dict() for one in self._scalers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set what `state_dict` returned."""
        get_cuda_rng_tracker().set_states(dict(state["generators"]))
        for one, held in zip(self._scalers, state["scalers"], strict=True):
            one.load_state_dict(held)
