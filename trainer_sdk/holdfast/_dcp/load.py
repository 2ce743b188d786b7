"""Loader of a persisted set into a live model and its optimizers, in any parallelism: `load_into`.

It is for models whose ranks hold plain tensors: their share of the experts, stacked or listed, and
everything else in full. Live tensors are named as in a save, so experts find their bytes by their
number in the whole model. Distributed tensors know their own placement; for them, use torch's state
dicts and `dcp.load`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load

from holdfast._dcp.reader import HoldfastReader
from holdfast._restoring.assembling import local_name
from holdfast._restoring.fit import Wanted, make_room
from holdfast._state.capture import LiveState
from holdfast._state.conventions import UnitNamer
from holdfast._state.dtensors import is_dtensor
from holdfast_core.durable.set_tensors import Reading, SetTensor
from holdfast_core.errors import InvalidJobError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.names import NameKind, TensorName
from holdfast_core.topology import Topology


def load_into(
    model: nn.Module,
    optimizer: Any,
    uri: str,
    *,
    job: str,
    generation: Generation | str | None = None,
    topology: Topology | None = None,
    units: UnitNamer | None = None,
    reading: Reading | None = None,
    options: Mapping[str, Any] | None = None,
) -> HoldfastReader:
    """Load a persisted set into `model` and `optimizer`, in place, through `dcp.load`.

    Every rank calls it, with or without a process group. Optimizer states are created and dropped
    to match the set, and parameter groups get its hyperparameters.

    Args:
        optimizer: an optimizer of torch, or a list of several.
        uri: see `HoldfastReader`, also for job, generation, reading and options.
        topology: determines the experts of this rank; by default every rank holds all experts.
        units: see `holdfast.init`.

    Returns:
        The reader, for its `generation` and `extras`: the step, schedulers, samplers.

    Raises:
        InvalidJobError: the model has distributed tensors, or the topology does not fit the world.
        LayoutMismatchError: a tensor of the model is not in the set, differs in shape or dtype, or
            has state that belongs to a single rank.
        CheckpointException: torch could not load; its `failures` has the errors by rank.
    """
    if any(map(is_dtensor, model.parameters())):
        raise InvalidJobError(
            "the model holds distributed tensors: load into its get_model_state_dict() and "
            "get_optimizer_state_dict() with dcp.load and HoldfastReader"
        )
    # Name the live tensors of this rank.
    together = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    chosen = topology if topology is not None else Topology(dp=world)
    chosen.check_world(world)
    optimizers: Sequence[Any] = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    live = LiveState(model, optimizers, chosen, rank, units=units)
    live.discover()
    # Find the live tensors that the set has.
    reader = HoldfastReader(
        uri,
        job=job,
        generation=generation,
        reading=replace(reading if reading is not None else Reading(), by_expert=True),
        options=options,
    )
    local: dict[str, SetTensor] = {}
    for tensor in reader.source.tensors.values():
        name = local_name(live, tensor)
        if name is not None:
            local[name] = tensor
    wanted = {
        name: Wanted(
            tensor=name, dtype=tensor.dtype, shape=tensor.shape, ranges=[(0, tensor.nbytes)]
        )
        for name, tensor in local.items()
    }
    with torch.no_grad():
        sources = make_room(live, wanted, reader.extras())
        state: dict[str, Any] = {local[name].name: sources[name].tensor for name in local}
        load(state, storage_reader=reader)
        _put_values(live, reader)
    return reader


def _put_values(live: LiveState, reader: HoldfastReader) -> None:
    """Load hyperparameters, and optimizer states that are not tensors."""
    groups = [group for optimizer in live.optimizers for group in optimizer.param_groups]
    for plain in reader.values.values():
        match plain.path:
            case (_, "param_groups", int(index), str(key)) if key != "params":
                if index < len(groups):
                    groups[index][key] = plain.value
            case (_, "state", str(name), str(key)):
                anchor = live.anchors.get(str(TensorName(name, NameKind.MASTER)))
                anchor = anchor or live.anchors.get(str(TensorName(name)))
                if anchor is not None and live.takes_state(anchor, key):
                    state = live.state_of(anchor, key)
                    assert state is not None
                    state[key] = plain.value
