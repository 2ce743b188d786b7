"""Holdfast around an engine of DeepSpeed.

    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    session = protect(engine)
    session.restore()

ZeRO keeps masters and moments in flat tensors. Which elements of which parameter a rank holds is in
tables of DeepSpeed's own, and so are its groups of ranks. `protect` reads both, so that snapshots
hold every state by parameter, and repeats nothing that DeepSpeed already knows. It patches nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed as dist

from holdfast._init import init
from holdfast._session.interface import Session
from holdfast._state.collect import Stateful
from holdfast._state.flat import FlatRange, FlatTensor
from holdfast.integrations._entries import check_model
from holdfast_core.errors import InvalidJobError
from holdfast_core.packages import PackageGroup, needing
from holdfast_core.topology import Topology

with needing("holdfast.integrations.deepspeed", PackageGroup.DEEPSPEED):
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
_SCALING = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What a loss scaler changes. Its settings come from the configuration."""


def protect(
    engine: DeepSpeedEngine, *, stateful: Mapping[str, Stateful] | None = None, **arguments: Any
) -> Session:
    """Make the session of an engine. Every rank calls it.

    Snapshots hold the module, the optimizer with its masters and moments by parameter, the engine's
    learning rates, loss scale and counters, and the random generators. `session.restore()` sets all
    of them, `engine.global_steps` too. Save after an `engine.step()` that has stepped the
    optimizer: `session.save(engine.global_steps)`.

    Args:
        stateful: further objects to save and restore, such as the position in the data.
        arguments: further arguments of `holdfast.init`: `settings`, `units`, …

    Raises:
        InvalidJobError: the engine shards or optimizes in a way that a snapshot cannot hold; the
            message names the setting to change.
    """
    check_model("DeepSpeed", engine.module, arguments)
    _check(engine)
    return init(
        model=engine.module,
        optimizer=_optimizer_of(engine),
        stateful={"deepspeed": _EngineState(engine), **(stateful or {})},
        topology=topology_of(engine),
        flat=[*_flat_tensors(engine)],
        **arguments,
    )


def topology_of(engine: DeepSpeedEngine) -> Topology:
    """Return the topology of the engine's groups of ranks.

    Raises:
        InvalidJobError: the groups have their ranks in another order than a topology can state.
    """
    dense = dist.get_process_group_ranks(engine.seq_data_parallel_group)
    experts = {
        name: dist.get_process_group_ranks(group)
        for name, group in engine.expert_data_parallel_group.items()
    }
    holders = min(experts.values(), key=len, default=dense)
    world = dist.get_world_size()
    topology = Topology(
        dp=len(dense), tp=world // len(dense), ep=max(len(dense) // len(holders), 1)
    )
    rank = dist.get_rank()
    for name, ranks, expected in (
        ("data-parallel ranks", dense, topology.dense_replicas(rank)),
        *(
            (f"holders of the experts of {name}", ranks, topology.expert_replicas(rank))
            for name, ranks in experts.items()
        ),
    ):
        if tuple(sorted(ranks)) != expected:
            raise InvalidJobError(
                f"the {name} of rank {rank} are {ranks} in DeepSpeed, and {list(expected)} in the "
                f"topology {topology}: use one ep_size for all layers, and leave "
                f"use_data_before_expert_parallelism out"
            )
    return topology


def _check(engine: DeepSpeedEngine) -> None:
    """Raise InvalidJobError for an engine whose state a session would not hold whole."""
    stage = engine.zero_optimization_stage()
    if isinstance(engine, PipelineEngine):
        raise InvalidJobError(
            "DeepSpeed's pipeline engine is not covered: use ZeRO stage 1 or 2 without a "
            "PipelineModule, or pipeline stages of torch with holdfast.elastic"
        )
    if engine.zenflow:
        raise InvalidJobError(
            "ZenFlow keeps a part of the states in an optimizer of its own: remove zenflow from "
            "zero_optimization"
        )
    if stage and type(engine.optimizer) not in (
        DeepSpeedZeroOptimizer,
        DeepSpeedZeroOptimizer_Stage3,
    ):
        raise InvalidJobError(
            f"the optimizer of ZeRO stage {stage} is a {type(engine.optimizer).__qualname__}, "
            f"which may keep state in other places than DeepSpeedZeroOptimizer: use the class that "
            f"DeepSpeed itself chooses for the stage"
        )
    if stage == 3:
        _check_stage_3(engine)
    if engine.random_ltd_enabled():
        raise InvalidJobError(
            "random layer token drop keeps a schedule that a restart would begin anew: remove "
            "random_ltd from data_efficiency"
        )


def _check_stage_3(engine: DeepSpeedEngine) -> None:
    """Raise InvalidJobError where ZeRO stage 3 has weights or states that are in no flat tensor in
    memory, or follow from none."""
    zero = engine.optimizer
    for refused, why, change in (
        (
            zero.swap_optimizer or zero.params_in_nvme_and_cpu,
            "keeps states or weights on NVMe",
            "the device of zero_optimization.offload_optimizer and offload_param to cpu",
        ),
        (
            zero.offload_optimizer and zero.partial_offload < 1,
            "steps a part of the states in an optimizer of its own",
            "zero_optimization.offload_optimizer.ratio to 1",
        ),
        (
            engine.zero_hpz_partition_size() > 1,
            "keeps a second partition of the weights",
            "zero_optimization.zero_hpz_partition_size to 1",
        ),
        (
            engine.zero_quantized_weights(),
            "gathers weights that it has rounded to codes",
            "zero_optimization.zero_quantized_weights to false",
        ),
        (
            zero.use_muon,
            "computes one update from the whole of a matrix, of which a rank holds a part",
            "zero_optimization.stage to 2",
        ),
    ):
        if refused:
            raise InvalidJobError(
                f"ZeRO stage 3 {why}, which a session does not follow: set {change}"
            )
    trained = {id(parameter) for group in zero.fp16_groups for parameter in group}
    for name, parameter in engine.module.named_parameters():
        if id(parameter) not in trained:
            raise InvalidJobError(
                f"{name} is not trained, so ZeRO stage 3 keeps no master of it for a snapshot: "
                f"train it, or set zero_optimization.stage to 2"
            )


def _optimizer_of(engine: DeepSpeedEngine) -> Any:
    """Return the optimizer that DeepSpeed steps, without DeepSpeed's own around it."""
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        return _Stage3Optimizer(engine.optimizer)
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
        return engine.optimizer.optimizer  # For Adagrad, ZeRO has made another one.
    return engine.basic_optimizer


class _Group(MutableMapping[str, Any]):
    """A parameter group with the parameters that it has during a step."""

    def __init__(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        self._group, self._parameters = group, parameters

    def __getitem__(self, key: str) -> Any:
        return self._parameters if key == "params" else self._group[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._group[key] = value

    def __delitem__(self, key: str) -> None:
        del self._group[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)


class _Stage3Optimizer:
    """The optimizer within that of ZeRO stage 3, which has its parameters only during a step."""

    __slots__ = ("_zero", "param_groups")  # Nothing else that could be taken for state.

    def __init__(self, zero: DeepSpeedZeroOptimizer_Stage3) -> None:
        self._zero = zero
        self.param_groups = [
            _Group(
                group,
                [
                    flat
                    for number, flat in enumerate(zero.fp32_partitioned_groups_flat)
                    if zero.sub_group_to_group_id[number] == index
                ],
            )
            for index, group in enumerate(zero.optimizer.param_groups)
        ]

    @property
    def state(self) -> MutableMapping[Any, Any]:
        """The states of masters."""
        state: MutableMapping[Any, Any] = self._zero.optimizer.state
        return state


def _flat_tensors(engine: DeepSpeedEngine) -> Iterator[FlatTensor]:
    """Yield the flat tensors of ZeRO, with the ranges of parameters in them.

    Raises:
        InvalidJobError: DeepSpeed's table names other elements than there are.
    """
    zero = engine.optimizer
    names = {id(p): name for name, p in engine.module.named_parameters()}
    if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
        for held, flat in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True):
            yield FlatTensor(tensor=flat, ranges=[*_partitions(zero, held, flat, names)])
        return
    if not isinstance(zero, DeepSpeedZeroOptimizer):
        return
    for group, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
        ranges = []
        for parameter in group:
            held = parameter._hp_mapping
            if held is None:
                continue  # it is other ranks'
            one = FlatRange(
                parameter=parameter,
                first=held.lp_fragment_address.start,
                count=held.lp_fragment_address.numel,
                at=held.hp_fragment_address.start,
            )
            _check_range(one, flat, names[id(parameter)])
            ranges.append(one)
        yield FlatTensor(tensor=flat, ranges=ranges)


def _partitions(
    zero: DeepSpeedZeroOptimizer_Stage3,
    parameters: list[Any],
    flat: torch.Tensor,
    names: Mapping[int, str],
) -> Iterator[FlatRange]:
    """Yield this rank's partition of each parameter of a group of ZeRO stage 3, which lie one
    behind the other."""
    at = 0
    for parameter in parameters:
        size, rank = parameter.partition_numel(), zero._get_param_partition_rank(parameter)
        first = min(rank * size, parameter.ds_numel)  # The last ranks may have only padding.
        one = FlatRange(
            parameter=parameter,
            first=first,
            count=min(size, parameter.ds_numel - first),
            at=at,
            shape=tuple(parameter.ds_shape),
        )
        _check_range(one, flat, names[id(parameter)], parameter.ds_tensor)
        yield one
        at += size


def _check_range(
    one: FlatRange, flat: torch.Tensor, name: str, held: torch.Tensor | None = None
) -> None:
    """Raise InvalidJobError unless the masters of a range are the parameter's elements.

    Args:
        held: this rank's elements of a parameter that has none itself.
    """
    if not one.rounds_to_weights(flat, held):
        raise InvalidJobError(
            f"DeepSpeed's table says that elements {one.first} to {one.first + one.count - 1} of "
            f"{name} have their masters at {one.at}, but other values are there: set "
            f"zero_optimization.round_robin_gradients to false, and call protect before the "
            f"first step"
        )


class _EngineState:
    """The state of an engine and its loss scaler that is in no tensor."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, the loss scale, and the state of the scheduler.

        Raises:
            InvalidJobError: the engine is in the middle of an accumulation.
        """
        engine, scheduler = self._engine, self._engine.lr_scheduler
        each = engine.gradient_accumulation_steps()
        if engine.micro_steps % each:
            raise InvalidJobError(
                f"a save after {engine.micro_steps % each} of {each} micro-batches would lose "
                f"their gradients: save after the engine.step() that completes the accumulation"
            )
        return {
            "counters": {name: getattr(engine, name) for name in _COUNTERS},
            "scaling": [
                {name: getattr(one, name) for name in _SCALING if hasattr(one, name)}
                for one in self._scaled()
            ],
            "scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set what `state_dict` returned."""
        scaled = zip(self._scaled(), state["scaling"], strict=True)
        for one, values in [(self._engine, state["counters"]), *scaled]:
            for name, value in values.items():
                setattr(one, name, value)
        if state["scheduler"] is not None:
            self._engine.lr_scheduler.load_state_dict(state["scheduler"])
        if isinstance(self._engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
            _make_weights(self._engine.optimizer)

    def _scaled(self) -> list[Any]:
        """List the objects in which DeepSpeed's optimizer keeps a loss scale."""
        optimizer = self._engine.optimizer
        held = [getattr(optimizer, name, None) for name in ("loss_scaler", "loss_scale_config")]
        return [one for one in held if "cur_scale" in getattr(one, "__dict__", {})]


@torch.no_grad()
def _make_weights(zero: DeepSpeedZeroOptimizer_Stage3) -> None:
    """Make the weights of ZeRO stage 3 from restored masters, as its step does. What it had
    gathered is dropped: it gathers that again when it is needed."""
    held = [parameter for group in zero.fp16_groups for parameter in group]
    held[0].partition(held)
    for number in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(number)
    zero.invalidate_secondary_tensor()
