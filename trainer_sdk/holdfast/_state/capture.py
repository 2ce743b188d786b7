"""What there is to capture: the tensors of a model and its optimizers, unit by unit.

`LiveState` finds them, notices cheaply when they change, and makes room for a snapshot's optimizer
state before a restore. Stacked expert weights, and the optimizer state of the same shape, appear as
one tensor for each expert: views, never copies. Tied weights appear once. Sharded tensors (DTensor,
FSDP2) appear as their local shard, which no other rank is assumed to hold.

It must not copy a byte, save for what `_copy` asks of it: staging for tensors that are not
contiguous, and clones of buffers, which forward passes change.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from holdfast._state.conventions import TensorPlace, UnitNamer, place_tensor
from holdfast._state.dtensors import first_of_sharded_stack, global_box, is_sharded, local_of
from holdfast._state.groups import Members, ParamGroups, check_optimizers
from holdfast._state.in_place import Watched
from holdfast._state.inventory import TensorInventory
from holdfast._state.readable import readable
from holdfast_core.errors import InvalidJobError
from holdfast_core.experts.recompute import MASTER_KEYS
from holdfast_core.snapshots.layouts import TensorRole
from holdfast_core.snapshots.units import UnitKey, UnitKind
from holdfast_core.topology import Topology

_ORPHAN = "optimizer/"
"""Begins the names of parameters that only an optimizer holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """What a local tensor is to the whole one: see the fields of `Entry` with these names."""

    global_shape: tuple[int, ...] = ()
    global_offsets: tuple[int, ...] = ()
    own: bool = False
    param_group: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TensorSource:
    """One tensor of one unit, live."""

    unit: UnitKey
    name: str
    """Unique in the model: `blocks.3.moe.w1[5]` for expert 5 of a stack, `….weight:exp_avg` for an
    optimizer state."""
    role: TensorRole
    tensor: torch.Tensor
    """The local bytes; a view of the live tensor, detached."""
    private: bool
    """No other rank holds these bytes."""
    eager: bool = False
    """Copied to `staging` within `save`, because a forward pass may change it."""
    staging: torch.Tensor | None = None
    """Contiguous copy of a tensor that is not contiguous, or is eager."""
    whole: Whole = field(default=Whole())

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def settle(self) -> None:
        """Give the tensor the bytes that were put into its staging, if it has one."""
        if self.staging is None:
            return
        # What is expanded has one memory for many elements, which torch refuses to write so often.
        once = tuple(slice(0, 1) if step == 0 else slice(None) for step in self.tensor.stride())
        self.tensor[once].copy_(self.staging[once])

    def flat(self) -> torch.Tensor:
        """The bytes to copy: uint8 [nbytes], sharing memory with the tensor or its staging."""
        tensor = self.tensor if self.staging is None else self.staging
        return tensor.reshape(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class Anchor:
    """Where an optimizer state of the given base name belongs."""

    optimizer: int
    parameter: torch.Tensor
    index: int | None
    """Which slice of a stacked parameter; None for the whole."""
    place: TensorPlace


class LiveState:
    """The model and its optimizers, as units.

    Args:
        optimizers: anything with torch's `state` and `param_groups`.
        rank: this rank in `topology`, which says which experts it holds.
        units: see `holdfast.init`.
        private: names (of tensors, optimizer states as `name:key`) that no other rank holds.

    Raises:
        InvalidJobError: when the model has no parameters, or an optimizer no groups of them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        topology: Topology,
        rank: int,
        *,
        units: UnitNamer | None = None,
        private: frozenset[str] = frozenset(),
    ) -> None:
        self.model = model
        self.optimizers = tuple(optimizers)
        check_optimizers(self.optimizers)
        self._ep_index = topology.coordinates(rank).ep
        self._units = units
        self._private = private
        self._parameter_groups: list[Mapping[str, torch.Tensor | None]] = []
        self._module_groups: list[Mapping[str, nn.Module | None]] = []
        self._empty: list[Mapping[str, object]] = []
        """What modules had nothing in."""
        self._inventory: TensorInventory | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self.watched = Watched({})
        """What may not change in place while it is copied."""
        self._found: tuple[TensorSource, ...] = ()
        self.anchors: dict[str, Anchor] = {}
        """By base name: of each parameter, and of each slice of a stacked one."""
        self.names: dict[int, str] = {}
        """id of each parameter → its name."""
        self._groups: dict[int, int] = {}
        """id of each parameter that is in an optimizer → its parameter group, over all of them."""
        self.changed_groups: dict[int, Members] = {}
        """By optimizer, the parameter groups of those that have others than this program began
        with."""
        self._begun = ParamGroups(self.optimizers)
        self._first = {name: weakref.ref(p) for name, p in model.named_parameters()}
        """The model's parameters when the session began."""
        if next(model.parameters(), None) is None:
            raise InvalidJobError("the model has no parameters; pass the module that is trained")

    def begin(self) -> None:
        """This program is where it is when it is started again: its parameter groups are those
        that a restore finds."""
        self._begun = ParamGroups(self.optimizers)

    # --- finding ----------------------------------------------------------------------------------

    def changed(self) -> bool:
        """Whether any tensor moved, appeared, went or is read otherwise since `discover`."""
        known = self._inventory
        return known is None or any(self._empty) or known.differs(self._objects())

    def _objects(self) -> Iterator[object]:
        """Everything that `discover` looks at, in a fixed order, without descending into Python."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield group
                yield from group["params"]
        groups = (*self._parameter_groups, *self._module_groups)
        states = (state for optimizer in self.optimizers for state in optimizer.state.values())
        for values in (*(group.values() for group in groups), *map(_tensors_in, states)):
            yield from values

    def _remember(self) -> None:
        modules = list(self.model.modules())
        self._parameter_groups = [g for m in modules for g in (m._parameters, m._buffers) if g]
        self._module_groups = [m._modules for m in modules if m._modules]
        self._empty = [g for m in modules for g in (m._parameters, m._buffers, m._modules) if not g]
        self._inventory = TensorInventory(self._objects())

    def sources(self) -> tuple[TensorSource, ...]:
        """What `discover` found, which looks again only when something changed since."""
        return self.discover() if self.changed() else self._found

    def discover(self) -> tuple[TensorSource, ...]:
        """All tensors, by name of the model's order.

        Raises:
            InvalidJobError: when two tensors would get one name, or a tensor, which is named, could
                not be copied or restored.
        """
        self.anchors.clear()
        self.names.clear()
        self._tensors.clear()
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        self._groups = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        modules = dict(self.model.named_modules())
        found = [*self._parameters(modules), *self._foreign_parameters()]
        own = {id(p): p for p in self.model.parameters()}
        self.changed_groups = self._begun.changed(self.names, own)
        found += [
            *self._states(),
            *self._buffers(modules),
        ]
        seen: set[str] = set()
        for source in found:
            if source.name in seen:
                raise InvalidJobError(
                    f"two tensors are called {source.name!r}; is a parameter in two optimizers?"
                )
            seen.add(source.name)
        self._remember()
        self.watched = Watched(self._tensors)
        self._found = tuple(found)
        return self._found

    def _parameters(self, modules: Mapping[str, nn.Module]) -> Iterator[TensorSource]:
        owner = {
            id(p): index
            for index, optimizer in enumerate(self.optimizers)
            for group in optimizer.param_groups
            for p in group["params"]
        }
        for name, parameter in self.model.named_parameters():
            local = readable(name, parameter)
            place = self._place(name, parameter, local, modules)
            self.names[id(parameter)] = place.name
            yield from self._add(owner.get(id(parameter), -1), parameter, place)

    def _add(
        self,
        optimizer: int,
        parameter: torch.Tensor,
        place: TensorPlace,
        role: TensorRole | None = None,
    ) -> Iterator[TensorSource]:
        """The sources of one parameter, and the anchors for its states."""
        local, kind = readable(place.name, parameter), role or TensorRole.COMPUTE
        group = self._groups.get(id(parameter), -1)
        self.anchors[place.name] = Anchor(optimizer, parameter, None, place)
        self._tensors[place.name] = parameter
        if not place.stacked:
            yield self._source(place.unit, place.name, kind, local, parameter, group=group)
            return
        for i in range(local.shape[0]):
            unit, name = _slice_of(place, i)
            self.anchors[name] = Anchor(optimizer, parameter, i, place)
            yield self._source(unit, name, kind, local[i], parameter, sliced=True, group=group)

    def _foreign_parameters(self) -> Iterator[TensorSource]:
        """Parameters that optimizers hold and the model does not: usually float32 masters.

        When an optimizer's parameters match the model's one by one in shape, they are its masters;
        otherwise they are private tensors without a layer.
        """
        own = list(self.model.parameters())
        for index, optimizer in enumerate(self.optimizers):
            params = [p for group in optimizer.param_groups for p in group["params"]]
            foreign = [p for p in params if id(p) not in self.names]
            match = [p for p in own if p.requires_grad]
            self._refuse_replaced(index, foreign)
            masters = len(match) == len(foreign) and all(
                a.shape == b.shape for a, b in zip(match, foreign, strict=True)
            )
            for i, parameter in enumerate(foreign):
                if masters:
                    base = self.anchors[self.names[id(match[i])]].place
                    place = TensorPlace(base.unit, f"{base.name}/master", base.stacked)
                else:
                    name = f"{_ORPHAN}{index}/parameter{i}"
                    place = TensorPlace(UnitKey(None, UnitKind.OTHER), name)
                self.names[id(parameter)] = place.name
                yield from self._add(index, parameter, place, TensorRole.MASTER)

    def _refuse_replaced(self, optimizer: int, foreign: Sequence[torch.Tensor]) -> None:
        """Raises InvalidJobError when one of `foreign` was in the model: what trains it trains
        nothing, and this program could not restore it."""
        before = {id(ref()): name for name, ref in self._first.items() if ref() is not None}
        for parameter in foreign:
            if id(parameter) in before:
                raise InvalidJobError(
                    f"optimizer {optimizer} still trains what was {before[id(parameter)]} when the "
                    f"session began, and the model holds another tensor there now; load with "
                    f"load_state_dict(assign=True), and replace modules, before the optimizer is "
                    f"made and holdfast.init is called"
                )

    def _states(self) -> Iterator[TensorSource]:
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                name = self.names.get(id(parameter))
                if name is None:
                    raise InvalidJobError(
                        "an optimizer holds state for a tensor that is neither in the model nor in "
                        "its parameter groups; restore the groups or clear that state"
                    )
                place = self.anchors[name].place
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and isinstance(key, str):
                        yield from self._state(parameter, place, key, value)

    def _state(
        self, parameter: torch.Tensor, place: TensorPlace, key: str, value: torch.Tensor
    ) -> Iterator[TensorSource]:
        role = TensorRole.MASTER if key in MASTER_KEYS else TensorRole.OPTIMIZER
        local = readable(f"{place.name}:{key}", value)
        first = local_of(parameter).shape[:1]
        self._tensors[f"{place.name}:{key}"] = value
        if place.stacked and local.ndim and local.shape[:1] == first:
            for i in range(local.shape[0]):
                unit, name = _slice_of(place, i)
                key_name = f"{name}:{key}"
                yield self._source(unit, key_name, role, local[i], value, parameter, sliced=True)
        else:
            yield self._source(place.unit, f"{place.name}:{key}", role, local, value, parameter)

    def _buffers(self, modules: Mapping[str, nn.Module]) -> Iterator[TensorSource]:
        seen: set[int] = set()
        for path, module in modules.items():
            for key, buffer in module._buffers.items():
                if buffer is None or key in module._non_persistent_buffers_set:
                    continue
                if id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                name = f"{path}.{key}" if path else key
                local = readable(name, buffer)
                place = self._place(name, buffer, local, modules)
                yield TensorSource(
                    unit=place.unit,
                    name=f"{place.name}(buffer)",
                    role=TensorRole.BUFFER,
                    tensor=local,
                    private=True,  # running statistics differ between data-parallel replicas
                    eager=True,
                    staging=torch.empty_like(local, memory_format=torch.contiguous_format),
                )

    def _place(
        self,
        name: str,
        tensor: torch.Tensor,
        local: torch.Tensor,
        modules: Mapping[str, nn.Module],
    ) -> TensorPlace:
        first = first_of_sharded_stack(tensor)
        place = place_tensor(name, local, modules, ep_index=self._ep_index, first_in_stack=first)
        unit = self._units(name, tensor) if self._units is not None else None
        return place if unit is None else TensorPlace(unit, place.name)

    def is_private(self, name: str) -> bool:
        """Whether no other rank holds the tensor `name`, which need not exist yet. Unknown names
        are: nobody can be offered what nobody can place."""
        base = name.partition(":")[0]
        anchor = self.anchors.get(base)
        if anchor is None or name in self._private or base.startswith(_ORPHAN):
            return True
        return is_sharded(anchor.parameter)

    def _source(
        self,
        unit: UnitKey,
        name: str,
        role: TensorRole,
        local: torch.Tensor,
        *holders: torch.Tensor,
        sliced: bool = False,
        group: int = 0,
    ) -> TensorSource:
        """Of the first of `holders`, which is the tensor itself or (`sliced`) its stack."""
        staging = None
        if not local.is_contiguous():
            staging = torch.empty_like(local, memory_format=torch.contiguous_format)
        private = name in self._private or any(is_sharded(holder) for holder in holders)
        orphan = name.startswith(_ORPHAN)
        box = global_box(holders[0])
        shape, offsets = box or ((), ())
        whole = Whole(
            global_shape=shape[1:] if sliced else shape,
            global_offsets=offsets[1:] if sliced else offsets,
            own=name in self._private or orphan or box is None,
            param_group=group,
        )
        return TensorSource(
            unit=unit,
            name=name,
            role=role,
            tensor=local,
            private=private or orphan,
            staging=staging,
            whole=whole,
        )


def _tensors_in(state: Mapping[object, object]) -> Iterator[object]:
    return (value for value in state.values() if isinstance(value, torch.Tensor))


def _slice_of(place: TensorPlace, i: int) -> tuple[UnitKey, str]:
    """Unit and name of slice `i` of a stacked tensor."""
    unit = place.unit
    assert unit.expert is not None
    expert = unit.expert + i
    return UnitKey(unit.layer, unit.kind, expert), f"{place.name}[{expert}]"
