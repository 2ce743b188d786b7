"""Discovery of the tensors to capture: all tensors of a model and its optimizers, unit by unit.

`LiveState` finds them, and notices cheaply when they change. Stacked expert weights, and optimizer
states of the same shape, appear as one tensor for each expert, which is a view and never a copy.
Tied weights appear once. Sharded tensors (DTensor, FSDP2) appear as their local shards, and no
other rank is assumed to hold the same shard.

The discovery must not copy any bytes. It only allocates staging memory, which each save fills: for
tensors that are not contiguous, and for buffers, which forward passes change.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn

from holdfast._state.buffers import ChangedBuffers
from holdfast._state.conventions import (
    Seats,
    TensorKey,
    UnitNamer,
    key_of_tensor,
    plain_name,
)
from holdfast._state.dtensors import (
    first_of_sharded_stack,
    global_box,
    inner_names,
    is_dtensor,
    is_sharded,
    local_of,
    raw,
)
from holdfast._state.flat import FlatTensor, FlatTensors, Span, gathered_shapes, slices_of
from holdfast._state.groups import Members, check_optimizers
from holdfast._state.in_place import Watched
from holdfast._state.inventory import TensorInventory
from holdfast._state.nested import Holders, with_nested
from holdfast._state.parts import (
    Form,
    are_dictionaries,
    check_form,
    check_value,
    form_of_state,
    has_tensors,
    hold_only_tensors,
    is_plain,
    tensors_in,
)
from holdfast._state.program_start import ProgramStart
from holdfast._state.readable import readable
from holdfast._state.room import room_like
from holdfast_core.errors import InvalidJobError
from holdfast_core.experts.recompute import MASTER_KEYS
from holdfast_core.snapshots.layouts import TensorRole
from holdfast_core.snapshots.names import NameKind, TensorName
from holdfast_core.snapshots.units import UnitKey, UnitKind
from holdfast_core.topology import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """The place of a local tensor in the whole one: see the fields of `Entry` with these names."""

    global_shape: tuple[int, ...] = ()
    global_offsets: tuple[int, ...] = ()
    own: bool = False
    param_group: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TensorSource:
    """A live tensor of a unit."""

    unit: UnitKey
    name: str
    """Text of its `TensorName`: unique in the model."""
    role: TensorRole
    tensor: torch.Tensor
    """The local part: a detached view of the live tensor."""
    private: bool
    """Whether no other rank holds these bytes."""
    eager: bool = False
    """Whether `save` copies it to `staging`, because a forward pass may change it."""
    staging: torch.Tensor | None = None
    """Contiguous copy of a tensor that is not contiguous, or is eager."""
    whole: Whole = field(default=Whole())
    span: Span | None = None
    """The range of a tensor of the model that it is, if it lies in a flat tensor; `tensor` is then
    [elements]. None for whole tensors and for boxes of distributed ones."""
    seats: Seats | None = None
    """Module with seats that holds its expert; other ranks may have copies of the expert. None for
    all other tensors."""
    of_stack: bool = False
    """Whether it is a number that an optimizer keeps once for all experts of a stack."""
    captured: bool = True
    """Whether this rank captures it in snapshots. If not, another rank with a copy does."""
    weights: torch.dtype | None = None
    """dtype of the parameter whose masters it is, if the parameter itself is not captured because
    the program makes it from them."""

    @property
    def nbytes(self) -> int:
        """Bytes of `tensor`."""
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the local tensor, or of the tensor of the model of which it is a range."""
        return tuple(self.tensor.shape) if self.span is None else self.span.shape

    @property
    def start(self) -> int:
        """First byte of the range within the contiguous bytes of a tensor of `shape`."""
        return 0 if self.span is None else self.span.first * self.tensor.element_size()

    def part(self, start: int, nbytes: int) -> torch.Tensor:
        """Return the bytes from `start` on of a tensor of `shape`, as `flat` does. They must lie
        within the range."""
        at = start - self.start
        return self.flat()[at : at + nbytes]

    def flat(self) -> torch.Tensor:
        """Return the bytes to copy: uint8 [nbytes], which shares the memory of the tensor or of its
        staging copy."""
        tensor = self.tensor if self.staging is None else self.staging
        return tensor.reshape(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class Anchor:
    """A parameter, or a slice of one, for which an optimizer keeps states."""

    optimizer: int
    parameter: torch.Tensor
    index: int | None
    """Index of the slice of a stacked parameter; None for the whole."""
    place: TensorKey
    span: Span | None = None
    """The range of a tensor of the model for which `parameter`, a flat tensor, stands."""


class _Tree:
    """The children of modules, with their names, at construction."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = modules
        self._names, self._children = self._listed()

    def is_unchanged(self) -> bool:
        """Whether they are the same modules under the same names."""
        names, children = self._listed()
        return names == self._names and all(map(is_, children, self._children))

    def _listed(self) -> tuple[list[object], list[nn.Module | None]]:
        """The names, behind the number of children of each module, and the children."""
        groups = [module._modules for module in self.modules.values()]
        names = [*map(len, groups), *chain.from_iterable(group.keys() for group in groups)]
        return names, [*chain.from_iterable(group.values() for group in groups)]


class LiveState:
    """The state of a model and its optimizers, divided into units.

    Args:
        optimizers: any objects with torch's `state` and `param_groups`.
        rank: this rank in `topology`, which determines the experts that it holds.
        units: see `holdfast.init`.
        private: names of tensors that no other rank holds: paths in the model, or `path:key` for
            optimizer states.
        flat: see `holdfast.init`.
        masters: see `holdfast.init`.
        begun: state of the program at its start; None takes the present state.

    Raises:
        InvalidJobError: the model has no parameters, an optimizer lacks `state` or
            `param_groups`, a flat tensor has other ranges than it may have, or a named master is
            not one of the model.
    """

    of_tensors: frozenset[int] = frozenset()
    """Numbers of the optimizers whose states hold nothing but plain tensors, as of the last
    `discover`, and as long as nothing has moved since."""

    shared: dict[int, list[tuple[str, str, str, str]]]
    """Number of an optimizer → states that are the same tensor as another one, as of the last
    `discover`: the name of the parameter and the key, and those of the other one."""

    _parted = False
    """Whether a parameter consists of several tensors."""

    _tree: _Tree | None = None
    """The modules as of the last `discover`."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        topology: Topology,
        rank: int,
        *,
        units: UnitNamer | None = None,
        private: frozenset[str] = frozenset(),
        flat: Sequence[FlatTensor] = (),
        masters: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
        begun: ProgramStart | None = None,
    ) -> None:
        self.model, self.optimizers = model, tuple(optimizers)
        check_optimizers(self.optimizers)
        self._saved_keys: dict[int, Sequence[Collection[str]]] = {}
        self.holders = self._holders()
        """Each optimizer with its inner optimizers."""
        self._ep_index = topology.coordinates(rank).ep
        self._units, self._private = units, private
        self._parameter_groups: list[Mapping[str, torch.Tensor | None]] = []
        self._module_groups: list[Mapping[str, nn.Module | None]] = []
        self._wrapped: frozenset[str] = frozenset()
        """Paths in the model in which the names of wrappers are kept."""
        self._empty: list[Mapping[str, object]] = []
        """Dictionaries of modules that were empty at the last `discover`."""
        self._inventory: TensorInventory | None = None
        self._reforms = False
        """Whether this program turns tensors into other views of their memory."""
        self._tensors: dict[str, torch.Tensor] = {}
        self.watched = Watched({})
        """Tensors that must not change in place while they are copied."""
        self._found: tuple[TensorSource, ...] = ()
        self.cuda_devices: tuple[int, ...] = ()
        """Numbers of the CUDA devices that hold tensors, ascending."""
        self.anchors: dict[str, Anchor] = {}
        """Name → anchor, for each parameter and each slice of a stacked one."""
        self._buffer_paths: dict[str, str] = {}
        """Name of each buffer → its path in the model."""
        self.names: dict[int, str] = {}
        """`id` of each parameter → its name."""
        self._groups: dict[int, int] = {}
        """`id` of each optimizer's parameter → number of its parameter group, over all
        optimizers."""
        self.devices: dict[int, dict[str, str]] = {}
        """Number of an optimizer → device types of its states that are not on the device of their
        parameter, by name."""
        self.changed_groups: dict[int, Members] = {}
        """Number of an optimizer → its parameter groups, for those whose groups have changed since
        the program began."""
        self.forms: dict[int, dict[torch.Tensor, dict[Any, Form]]] = {}
        """Number of an optimizer → parameter → key → form of each state that a new program could
        not make from its dtype and shape, except containers, whose forms may change."""
        self.shared = {}
        self.begun = begun or ProgramStart(model, self.optimizers, gathered_shapes(flat))
        self.unrestorable = ""
        """Why this program could not restore the present state of the model; empty if it could."""
        self.changed_buffers: ChangedBuffers = {}
        self._first = {name: weakref.ref(p) for name, p in model.named_parameters()}
        """Name → parameter of the model when the session began."""
        self.flat = FlatTensors(flat, {id(p): name for name, p in model.named_parameters()})
        """Parameters of the optimizers that hold ranges of the model's."""
        self._of_master = {id(master): parameter for parameter, master in masters}
        """`id` of each master that the caller has named → its parameter."""
        _check_masters(masters, model)
        self._ranges: dict[int, tuple[str, ...]] = {}
        """`id` of each flat tensor → names of its ranges."""
        if next(model.parameters(), None) is None:
            raise InvalidJobError("the model has no parameters; pass the module that is trained")

    def _holders(self) -> tuple[Holders, ...]:
        return tuple(
            Holders(one, self.optimizers, self._saved_keys.get(index))
            for index, one in enumerate(self.optimizers)
        )

    def takes_state(self, anchor: Anchor, key: str) -> bool:
        """Whether an optimizer of this rank has, or would create, a state of the anchor's
        parameter."""
        return anchor.optimizer >= 0 and self.holders[anchor.optimizer].takes(anchor.parameter, key)

    def expect(self, index: int, saved: Sequence[Mapping[str, Any]]) -> None:
        """Expect the states of a snapshot's optimizer `index` and of those within it.

        Raises:
            LayoutMismatchError: when this session's optimizer does not hold as many.
        """
        self.holders[index].check_alike(index, saved)
        self._saved_keys[index] = [set(one.get("keys", ())) for one in saved]
        self.holders = self._holders()

    def state_of(self, anchor: Anchor, key: str) -> dict[Any, Any] | None:
        """Return the state of the anchor's parameter; see `Holders.state_of`."""
        return self.holders[anchor.optimizer].state_of(anchor.parameter, key)

    # --- finding ----------------------------------------------------------------------------------

    def has_changed(self) -> bool:
        """Whether any tensor has moved, appeared, vanished or changed its form since `discover`."""
        known = self._inventory
        return known is None or any(self._empty) or known.differs(self._objects())

    def unmoved_versions(self) -> list[int] | None:
        """Read the version counters of `watched.listed`. Return None if any tensor has moved,
        appeared or vanished since `discover`. One that only has another form at its address is
        found by `InPlaceCheck.check_forms`; from then on, by this method as well."""
        known = self._inventory
        if known is None or any(self._empty):
            return None
        if known.reformed:
            self._reforms = True
        if self._reforms and known.has_reformed():
            return None
        return known.unmoved_versions(self._objects())

    def compared_tensors(self, device_bytes_max: int) -> dict[str, torch.Tensor]:
        """Return the local parts of all parameters and optimizer states by name, as of the last
        `discover`, without states on a device that have more than `device_bytes_max` bytes."""
        return {
            name: local_of(tensor)
            for name, tensor in self._tensors.items()
            if name in self.anchors
            or raw(tensor).device.type == "cpu"
            or raw(tensor).nbytes <= device_bytes_max
        }

    def _objects(self) -> list[object]:
        """List everything that `discover` looks at, in a fixed order, from remembered containers
        rather than by walking the modules again. States of `of_tensors` are listed unseen: if one
        no longer holds only tensors, its values are other objects than at the last `discover`."""
        found: list[object] = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                found.append(group)
                found += group["params"]
        gathered = self.flat.gathered
        for held in self._parameter_groups:
            found += (
                [one for one in held.values() if id(one) not in gathered]
                if gathered
                else held.values()
            )
        for modules in self._module_groups:
            found += modules.values()
        for index, optimizer in enumerate(self.optimizers):
            optimizers = with_nested(optimizer, self.optimizers)
            found += optimizers[1:]
            states = list(chain.from_iterable(one.state.values() for one in optimizers))
            if index in self.of_tensors and are_dictionaries(states):
                found += chain.from_iterable(map(dict.values, states))
                continue
            for state in states:
                if not isinstance(state, Mapping):  # a value that belongs to no parameter
                    continue
                for value in state.values():
                    if type(value) is torch.Tensor:
                        found.append(value)
                    elif has_tensors(value):
                        found += [tensor for _, tensor in tensors_in("", value)]
        if not self._parted:
            return found
        return [part for one in found for part in self._parts_of(one)]

    @staticmethod
    def _parts_of(item: object) -> Iterator[object]:
        """Yield `item`, or the tensors in it if it is a parameter that consists of several."""
        if isinstance(item, torch.Tensor) and inner_names(raw(item)):
            yield from (tensor for _, tensor in tensors_in("", item))
        else:
            yield item

    def modules(self) -> Mapping[str, nn.Module]:
        """Return the modules by their paths in the model. A walk through a large model takes
        milliseconds, so they are looked for again only if a module has appeared, vanished or been
        renamed since the last `discover`."""
        if self._tree is None or not self._tree.is_unchanged():
            return dict(self.model.named_modules())
        return self._tree.modules

    def _remember(self) -> None:
        self._tree = _Tree(dict(self.model.named_modules()))
        modules = self._tree.modules.values()
        self._parameter_groups = [g for m in modules for g in (m._parameters, m._buffers) if g]
        self._module_groups = [m._modules for m in modules if m._modules]
        self._empty = [g for m in modules for g in (m._parameters, m._buffers, m._modules) if not g]
        self.of_tensors = frozenset(
            index
            for index, held in enumerate(self.holders)
            if hold_only_tensors([*chain.from_iterable(s.values() for s in held.states())])
        )
        watched = {id(one): one for one in map(raw, self._tensors.values())}
        counted = {number for number, one in watched.items() if not one.is_inference()}
        self._inventory = TensorInventory(self._objects(), counted)

    def sources(self) -> tuple[TensorSource, ...]:
        """Return all tensors. They are discovered again only if something has changed."""
        return self.discover() if self.has_changed() else self._found

    def discover(self) -> tuple[TensorSource, ...]:
        """Find all tensors, in the order of the model.

        Raises:
            InvalidJobError: when two tensors would get one name, or a tensor could not be copied or
                restored; the message names it.
        """
        self.anchors.clear()
        self.names.clear()
        self._ranges.clear()
        self._tensors.clear()
        self._buffer_paths.clear()
        self.devices = {index: {} for index in range(len(self.optimizers))}
        self.forms = {index: {} for index in range(len(self.optimizers))}
        self.shared = {}
        self._parted = False
        self.holders = self._holders()
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        self._groups = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        modules = dict(self.model.named_modules())
        self._wrapped = _meeting(self.model)
        found = [*self._parameters(modules), *self._foreign_parameters()]
        own = {id(p): p for p in self.model.parameters()}
        self.unrestorable = self.begun.look(self.names)
        self.changed_groups = self.begun.groups.changed_groups_of(self.names, own)
        found += [
            *self._states(),
            *self._buffers(modules),
        ]
        seen: set[str] = set()
        for source in found:
            if source.name in seen:
                raise InvalidJobError(
                    f"two tensors are called {source.name!r}: give each parameter to one "
                    f"optimizer, and each expert a number of its own"
                )
            seen.add(source.name)
        self.changed_buffers = self._changed_buffers(modules)
        self._remember()
        self.watched = Watched(self._tensors, self._inventory, check_forms=not self._reforms)
        self._found = tuple(found)
        on_cuda = {source.tensor.get_device() for source in found if source.tensor.is_cuda}
        self.cuda_devices = tuple(sorted(on_cuda))
        return self._found

    def expert_layers(self) -> dict[str, int]:
        """Return the path of each parameter of the model that belongs to experts, with the layer of
        their units."""
        modules = dict(self.model.named_modules())
        layers = {}
        for name, parameter in self.model.named_parameters():
            shape = self.flat.gathered.get(id(parameter))
            whole = parameter if shape is None else torch.empty(shape, device="meta")
            place = self._place(name, whole, raw(whole), modules)
            of_experts = place.unit.kind is UnitKind.EXPERT or place.seats is not None
            if of_experts and place.unit.layer is not None:
                layers[name] = place.unit.layer
        return layers

    def _parameters(self, modules: Mapping[str, nn.Module]) -> Iterator[TensorSource]:
        owner = {id(p): i for i, held in enumerate(self.holders) for p in held.parameters()}
        for name, parameter in self.model.named_parameters():
            if (shape := self.flat.gathered.get(id(parameter))) is not None:
                whole = torch.empty(shape, device="meta")
                place = self._place(name, whole, whole, modules)
                self.names[id(parameter)] = place.name
                self.anchors[place.name] = Anchor(-1, parameter, None, place)
                continue
            local = raw(parameter)
            parted = bool(inner_names(local))
            if not parted:
                local = readable(name, parameter)
            place = self._place(name, parameter, local, modules)
            self.names[id(parameter)] = place.name
            add = self._add_parts if parted else self._add
            yield from add(owner.get(id(parameter), -1), parameter, place)

    def _add_parts(
        self, optimizer: int, parameter: torch.Tensor, place: TensorKey
    ) -> Iterator[TensorSource]:
        """Yield the sources of the tensors in a parameter, and add the anchor for its states."""
        self._parted = True
        group = self._groups.get(id(parameter), -1)
        name = TensorName.parse(place.name)
        for key, tensor in tensors_in("", parameter):
            part = str(replace(name, path=name.path + key))
            local = readable(part, tensor)
            self._tensors[part] = tensor
            self.anchors[part] = Anchor(-1, parameter, None, TensorKey(place.unit, part))
            role = TensorRole.COMPUTE
            found = self._source(place.unit, part, role, local, tensor, parameter, group=group)
            yield _of_one_rank(found, parameter)
        self.anchors[place.name] = Anchor(optimizer, parameter, None, place)

    def _add(
        self,
        optimizer: int,
        parameter: torch.Tensor,
        place: TensorKey,
        role: TensorRole | None = None,
    ) -> Iterator[TensorSource]:
        """Yield the sources of one parameter, and add the anchors for its states."""
        local, kind = readable(place.name, parameter), role or TensorRole.COMPUTE
        group = self._groups.get(id(parameter), -1)
        self.anchors[place.name] = Anchor(optimizer, parameter, None, place)
        self._tensors[place.name] = parameter
        if not place.stacked:
            yield self._source(place.unit, place.name, kind, local, parameter, group=group)
            return
        for i, unit, name in _slices_of(place, local.shape[0]):
            self.anchors[name] = Anchor(optimizer, parameter, i, place)
            found = self._source(unit, name, kind, local[i], parameter, sliced=True, group=group)
            yield _with_seat(found, place)

    def _foreign_parameters(self) -> Iterator[TensorSource]:
        """Yield the parameters that optimizers hold and the model does not: usually float32
        masters.

        They are masters if the caller has said so, or if those of an optimizer match the model's
        parameters one by one in shape; otherwise they are private tensors without a layer.
        """
        match = self.begun.trainable_parameters()
        for index, holders in enumerate(self.holders):
            foreign = [p for p in holders.parameters() if id(p) not in self.names]
            self._refuse_replaced(index, foreign)
            if any(map(self.flat.get, foreign)):
                for i, parameter in enumerate(foreign):
                    yield from self._flat_parameter(index, i, parameter)
                continue
            of = [self._of_master.get(id(parameter)) for parameter in foreign]
            if not any(one is not None for one in of):
                fits = len(match) == len(foreign) and all(
                    a.shape == b.shape for a, b in zip(match, foreign, strict=True)
                )
                of = [*match] if fits else [None] * len(foreign)
            for i, (parameter, own) in enumerate(zip(foreign, of, strict=True)):
                if own is not None:
                    base = self.anchors[self.names[id(own)]].place
                    name = replace(TensorName.parse(base.name), kind=NameKind.MASTER)
                    place = replace(base, name=str(name))
                else:
                    name = TensorName.orphan(index, i)
                    place = TensorKey(UnitKey(None, UnitKind.OTHER), str(name))
                self.names[id(parameter)] = place.name
                yield from self._add(index, parameter, place, TensorRole.MASTER)

    def _flat_parameter(
        self, index: int, number: int, parameter: torch.Tensor
    ) -> Iterator[TensorSource]:
        """Yield the ranges of an optimizer's flat tensor, and add the anchors for their states.

        Raises:
            InvalidJobError: its ranges have no names, while those of another one have.
        """
        name = str(TensorName.orphan(index, number))
        flat = self.flat.get(parameter)
        if flat is None:
            raise InvalidJobError(
                f"optimizer {index} holds {name} {list(parameter.shape)}, which the model does not "
                f"have and flat= does not describe: give the ranges of all parameters of an "
                f"optimizer that has flat ones, or leave flat= out"
            )
        self.names[id(parameter)], self._tensors[name] = name, parameter
        orphan = TensorKey(UnitKey(None, UnitKind.OTHER), name)
        self.anchors[name] = Anchor(index, parameter, None, orphan)
        local, names = readable(name, parameter), list[str]()
        for one in flat.ranges:
            if not one.count:
                continue
            base = self.anchors[self.names[id(one.parameter)]].place
            whole = replace(TensorName.parse(base.name), kind=NameKind.MASTER)
            place = replace(base, name=str(whole))
            # The states that are single numbers have the name of the whole stack.
            self.anchors.setdefault(place.name, Anchor(index, parameter, None, place))
            if base.stacked:
                rows = one.whole[0]
                experts = {i: (unit, part) for i, unit, part in _slices_of(place, rows)}
                found = [(*experts[i], span) for i, span in slices_of(one, rows) if i in experts]
            else:
                span = Span(one.whole, one.first, one.count, one.at)
                found = [(place.unit, place.name, span)]
            for unit, text, span in found:
                self.anchors[text] = Anchor(index, parameter, None, place, span)
                names.append(text)
                master = self._range(unit, text, TensorRole.MASTER, local, span, parameter)
                weights = None if one.shape is None else one.parameter.dtype
                yield replace(master, weights=weights)
        self._ranges[id(parameter)] = tuple(names)

    def _range(
        self,
        unit: UnitKey,
        name: str,
        role: TensorRole,
        local: torch.Tensor,
        span: Span,
        parameter: torch.Tensor,
    ) -> TensorSource:
        """Make the source of a range of the flat tensor `local`, which is `parameter` or a state of
        it."""
        whole = Whole(param_group=self._groups.get(id(parameter), -1))
        return TensorSource(
            unit=unit,
            name=name,
            role=role,
            tensor=span.of(local),
            private=True,
            whole=whole,
            span=span,
        )

    def _flat_state(
        self, flat: torch.Tensor, key: str, value: torch.Tensor
    ) -> Iterator[TensorSource]:
        """Yield the ranges of a state of a flat tensor, or the single number that it is, once for
        each of the parameters.

        Raises:
            InvalidJobError: it is neither.
        """
        own = str(TensorName.parse(self.names[id(flat)]).state(key))
        local = readable(own, value)
        self._tensors[own] = value
        seen: set[str] = set()
        for name in self._ranges[id(flat)]:
            anchor, parts = self.anchors[name], TensorName.parse(name)
            assert anchor.span is not None
            if local.shape == flat.shape:
                role = TensorRole.MASTER if key in MASTER_KEYS else TensorRole.OPTIMIZER
                yield self._range(
                    self._unit_of(name), str(parts.state(key)), role, local, anchor.span, flat
                )
            elif local.numel() != 1:
                raise InvalidJobError(
                    f"an optimizer keeps {key} {list(local.shape)} for a flat tensor of "
                    f"{flat.numel()} elements, so it cannot be divided between the parameters: use "
                    f"an optimizer whose states have the shape of its parameters"
                )
            elif str(parts.whole) not in seen:
                seen.add(str(parts.whole))
                unit, alone = anchor.place.unit, anchor.place.unit.kind is not UnitKind.EXPERT
                # It belongs to all ranges, so it must not be left out with an expert.
                yield TensorSource(
                    unit=unit if alone else UnitKey(unit.layer, UnitKind.DENSE),
                    name=str(parts.whole.state(key)),
                    role=TensorRole.OPTIMIZER,
                    tensor=local,
                    private=True,
                    of_stack=not alone,
                )

    def _unit_of(self, name: str) -> UnitKey:
        """Unit of the parameter, or of the slice of a stack, with an anchor `name`."""
        unit, expert = self.anchors[name].place.unit, TensorName.parse(name).expert
        return unit if expert is None else UnitKey(unit.layer, UnitKind.EXPERT, expert)

    def names_of(self, parameter: torch.Tensor) -> tuple[str, ...]:
        """Names under which an optimizer's state of `parameter` is captured: of each range, if it
        is a flat tensor."""
        return self._ranges.get(id(parameter)) or (self.names[id(parameter)],)

    def range_of(self, name: str) -> Span | None:
        """The range of the tensor `name` that this rank holds, in elements; None if it is not in a
        flat tensor."""
        anchor = self.anchors.get(str(TensorName.parse(name).base))
        return None if anchor is None else anchor.span

    def is_gathered(self, name: str) -> bool:
        """Whether `name` is a parameter, or a slice of one, that the program makes from this rank's
        and other ranks' ranges of its masters. `sources` has noted the parameters before."""
        if not self.flat.gathered:
            return False
        anchor = self.anchors.get(str(TensorName.parse(name).whole))
        return anchor is not None and id(anchor.parameter) in self.flat.gathered

    def _refuse_replaced(self, optimizer: int, foreign: Sequence[torch.Tensor]) -> None:
        """Raise InvalidJobError if one of `foreign` was in the model before. The optimizer would
        train a tensor that the model no longer uses, and that a restore could not fill."""
        before = {id(ref()): name for name, ref in self._first.items() if ref() is not None}
        for parameter in foreign:
            if id(parameter) in before:
                raise InvalidJobError(
                    f"optimizer {optimizer} still trains what was {before[id(parameter)]} when the "
                    f"session began, and the model has another tensor there now; load with "
                    f"load_state_dict(assign=True), and replace modules, before the optimizer is "
                    f"made and holdfast.init is called"
                )

    def _states(self) -> Iterator[TensorSource]:
        for index, holders in enumerate(self.holders):
            states = chain.from_iterable(state.items() for state in holders.states())
            same: dict[int, list[tuple[str, str]]] = {}
            for parameter, state in states:
                name = self.names.get(id(parameter))
                if name is None and isinstance(parameter, str):
                    continue  # see `own_values`
                if name is None and not isinstance(parameter, torch.Tensor):
                    raise InvalidJobError(
                        f"an optimizer holds state under {parameter!r}, which is no parameter: "
                        f"keep what belongs to none in its param_groups, or under a text"
                    )
                if name is None:
                    raise InvalidJobError(
                        "an optimizer holds state for a tensor that is neither in the model nor in "
                        "its parameter groups; restore the groups or clear that state"
                    )
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and isinstance(key, str):
                        same.setdefault(id(value), []).append((name, key))
                if id(parameter) in self._ranges:
                    for key, value in state.items():
                        yield from self._flat_value(index, parameter, key, value)
                    continue
                place = self.anchors[name].place
                for key, value in state.items():
                    for source in self._value(index, parameter, place, key, value):
                        yield replace(source, private=True) if holders.parted else source
            if shared := [pair for group in same.values() for pair in self._shared(group)]:
                self.shared[index] = shared

    def _shared(self, group: list[tuple[str, str]]) -> Iterator[tuple[str, str, str, str]]:
        """Yield the states that are to become another one again, which is no expert's if possible:
        snapshots may leave experts out."""
        if len(group) > 1:
            first = min(group, key=lambda one: self._unit_of(one[0]).kind is UnitKind.EXPERT)
            yield from ((*one, *first) for one in group if one != first)

    def _flat_value(
        self, index: int, flat: torch.Tensor, key: Any, value: Any
    ) -> Iterator[TensorSource]:
        """Yield the sources of a value in the state of a flat tensor, if it is a tensor.

        Raises:
            InvalidJobError: it has tensors inside, which cannot be divided between parameters.
        """
        own = str(TensorName.parse(self.names[id(flat)]).state(str(key)))
        if not has_tensors(value):
            check_value(own, value)
            return
        if not (isinstance(key, str) and is_plain(value)):
            raise InvalidJobError(
                f"{own} has tensors inside, which cannot be divided between the parameters of a "
                f"flat tensor: use an optimizer whose states are plain tensors"
            )
        if value.device.type != flat.device.type:
            for one in self.names_of(flat):
                here = str(TensorName.parse(one).whole.state(key))
                self.devices[index][here] = value.device.type
        yield from self._flat_state(flat, key, value)

    def _value(
        self, index: int, parameter: torch.Tensor, place: TensorKey, key: Any, value: Any
    ) -> Iterator[TensorSource]:
        """Yield the sources of the tensors in a state, and note what a restore must know to build
        it."""
        name = TensorName.parse(place.name)
        if not has_tensors(value):
            check_value(str(name.state(str(key))), value)
            return
        if self.anchors[place.name].optimizer not in (-1, index):
            raise InvalidJobError(
                f"{place.name} belongs to several optimizers, and a restore could not tell which "
                f"of them keeps {key!r} for it: give each parameter to one optimizer"
            )
        if isinstance(key, str) and is_plain(value):
            if value.device.type != parameter.device.type:
                self.devices[index][str(name.state(key))] = value.device.type
            sliced = place.stacked and raw(value).shape[:1] == raw(parameter).shape[:1]
            if not (sliced and value.ndim) and not _is_made_alike(value, parameter):
                form = form_of_state(key, value, parameter)
                self.forms[index].setdefault(parameter, {})[key] = form
            yield from self._state(parameter, place, key, value)
            return
        form = form_of_state(str(key), value, parameter)
        check_form(str(name.state(str(key))), form)
        if isinstance(value, torch.Tensor):
            self.forms[index].setdefault(parameter, {})[key] = form
        for part, tensor in tensors_in(str(key), value):
            for source in self._state(parameter, place, part, tensor, divisible=False):
                yield _of_one_rank(source, parameter)

    def _state(
        self,
        parameter: torch.Tensor,
        place: TensorKey,
        key: str,
        value: torch.Tensor,
        *,
        divisible: bool = True,
    ) -> Iterator[TensorSource]:
        """Yield the sources of one tensor of a state.

        Args:
            divisible: whether each expert of a stack has a slice of it, if the shape says so.
        """
        role = TensorRole.MASTER if key in MASTER_KEYS else TensorRole.OPTIMIZER
        own = str(TensorName.parse(place.name).state(key))
        local = readable(own, value)
        first = local_of(parameter).shape[:1]
        self._tensors[own] = value
        if divisible and place.stacked and local.ndim and local.shape[:1] == first:
            for i, unit, name in _slices_of(place, local.shape[0]):
                part = str(TensorName.parse(name).state(key))
                found = self._source(unit, part, role, local[i], value, parameter, sliced=True)
                yield _with_seat(found, place)
        elif place.stacked and place.seats is None and local.numel() == 1:
            # It belongs to no expert, so it must not be left out with one. Ranks have other stacks.
            unit = UnitKey(place.unit.layer, UnitKind.DENSE)
            found = self._source(unit, own, role, local, value, parameter)
            yield replace(found, private=True, of_stack=True)
        else:
            found = self._source(place.unit, own, role, local, value, parameter)
            yield replace(found, of_stack=place.stacked)  # With seats, all ranks have the stack.

    def _buffers(self, modules: Mapping[str, nn.Module]) -> Iterator[TensorSource]:
        seen: set[int] = set()
        for path, module in modules.items():
            for key, buffer in module._buffers.items():
                if buffer is None or key in module._non_persistent_buffers_set:
                    continue
                if id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                path_of_it = f"{path}.{key}" if path else key
                local = readable(path_of_it, buffer)
                place = self._place(path_of_it, buffer, local, modules)
                name = str(replace(TensorName.parse(place.name), kind=NameKind.BUFFER))
                self._buffer_paths[name] = path_of_it
                yield TensorSource(
                    unit=place.unit,
                    name=name,
                    role=TensorRole.BUFFER,
                    tensor=local,
                    private=True,  # running statistics differ between data-parallel replicas
                    eager=True,
                    staging=room_like(local),
                )

    def path_of_buffer(self, name: str) -> str | None:
        """Path in the model of the buffer `name`, which need not exist yet; None where no module
        could have it."""
        if name in self._buffer_paths:
            return self._buffer_paths[name]
        key = TensorName.parse(name).path.rpartition(".")[2]
        modules = dict(self.model.named_modules())
        paths = (f"{path}.{key}" if path else key for path in modules)
        return next((path for path in paths if self._buffer_name(path, modules) == name), None)

    def _changed_buffers(self, modules: Mapping[str, nn.Module]) -> ChangedBuffers:
        devices = {path: buffer.device.type for path, buffer in self.model.named_buffers()}
        return {
            self._buffer_name(path, modules): (first, now, devices.get(path, ""))
            for path, (first, now) in self.begun.forms.changed_forms().items()
        }

    def _buffer_name(self, path: str, modules: Mapping[str, nn.Module]) -> str:
        place = key_of_tensor(
            path,
            torch.empty(0, device="meta"),
            modules,
            ep_index=self._ep_index,
            wrapped=path in self._wrapped,
        )
        return str(replace(TensorName.parse(place.name), kind=NameKind.BUFFER))

    def _place(
        self,
        name: str,
        tensor: torch.Tensor,
        local: torch.Tensor,
        modules: Mapping[str, nn.Module],
    ) -> TensorKey:
        first = first_of_sharded_stack(tensor)
        place = key_of_tensor(
            name,
            local,
            modules,
            ep_index=self._ep_index,
            first_in_stack=first,
            wrapped=name in self._wrapped,
        )
        unit = self._units(name, tensor) if self._units is not None else None
        return place if unit is None else TensorKey(unit, place.name)

    def is_private(self, name: str, unit: UnitKey) -> bool:
        """Whether no other rank holds the tensor `name`, captured as part of `unit`, which need not
        exist yet. Unknown names count as private: a tensor without a place cannot be shared with
        other ranks."""
        parts = TensorName.parse(name)
        anchor = self.anchors.get(str(parts.base))
        if anchor is not None and anchor.place.unit.kind is UnitKind.EXPERT is not unit.kind:
            return True  # of a stack: see `_state`
        if anchor is not None and self.flat.get(anchor.parameter) is not None:
            return True
        if anchor is None or self._declared_private(parts) or parts.kind is NameKind.ORPHAN:
            return True
        if parts.is_state and anchor.optimizer >= 0 and self.holders[anchor.optimizer].parted:
            return True
        return is_sharded(anchor.parameter)

    def anchor_of(self, source: TensorSource) -> Anchor | None:
        """Parameter, or slice of one, that is `source` or for which an optimizer keeps it."""
        return self.anchors.get(str(TensorName.parse(source.name).base))

    def _declared_private(self, name: TensorName) -> bool:
        """Whether the caller said that no other rank holds the tensor."""
        if not self._private:
            return False
        shown = name.path if name.expert is None else f"{name.path}[{name.expert}]"
        return (
            str(name) in self._private
            or (shown if name.key is None else f"{shown}:{name.key}") in self._private
        )

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
        """Make the source of a tensor. The first of `holders` is the tensor itself or, when
        `sliced`, its stack."""
        staging = None
        if not local.is_contiguous():
            staging = room_like(local)
        parts = TensorName.parse(name)
        declared, orphan = self._declared_private(parts), parts.kind is NameKind.ORPHAN
        private = declared or any(is_sharded(holder) for holder in holders)
        box = global_box(holders[0])
        shape, offsets = box or ((), ())
        whole = Whole(
            global_shape=shape[1:] if sliced else shape,
            global_offsets=offsets[1:] if sliced else offsets,
            own=declared or orphan or box is None,
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


def _check_masters(masters: Sequence[tuple[torch.Tensor, torch.Tensor]], model: nn.Module) -> None:
    """Raise InvalidJobError for a master that has no parameter of the model, or another shape."""
    names = {id(p): name for name, p in model.named_parameters()} if masters else {}
    for parameter, master in masters:
        name = names.get(id(parameter))
        if name is None or master.shape != parameter.shape:
            raise InvalidJobError(
                f"masters= has a master of shape {list(master.shape)} for "
                f"{name or 'a tensor that the model does not have'} {list(parameter.shape)}: give "
                f"pairs of a parameter of model= and a tensor of the same shape"
            )


def _of_one_rank(source: TensorSource, parameter: torch.Tensor) -> TensorSource:
    """Return the source of a tensor that is a part of a larger value. If the parameter is sharded,
    it is not known how the part would be divided over another number of ranks."""
    if not is_sharded(parameter):
        return source
    return replace(source, whole=replace(source.whole, own=True))


def _is_made_alike(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a restore makes such a tensor without its form: see `fit._allocate`."""
    local, of = raw(value), raw(parameter)
    if local.shape != of.shape:
        return local.is_contiguous() and not is_dtensor(value)
    if is_dtensor(value) != is_dtensor(parameter):
        return False
    if is_dtensor(value) and is_dtensor(parameter):
        alike = (value.shape, value.placements, value.device_mesh)
        if alike != (parameter.shape, parameter.placements, parameter.device_mesh):
            return False
    return local.stride() == of.stride() or (local.is_contiguous() and of.is_contiguous())


def _meeting(model: nn.Module) -> frozenset[str]:
    """Paths of parameters, and of buffers, that would have one name without their wrappers."""
    found: set[str] = set()
    for paths in ([n for n, _ in model.named_parameters()], [n for n, _ in model.named_buffers()]):
        counts = Counter(map(plain_name, paths))
        found.update(path for path in paths if counts[plain_name(path)] > 1)
    return frozenset(found)


def _slices_of(place: TensorKey, count: int) -> Iterator[tuple[int, UnitKey, str]]:
    """Number, unit and name of each slice of a stacked tensor that holds an expert."""
    unit = place.unit
    experts: Sequence[int | None]
    if place.seats is not None:
        experts = place.seats.seat_experts
    else:
        assert unit.expert is not None
        experts = range(unit.expert, unit.expert + count)
    for i, expert in enumerate(experts):
        if expert is not None:
            name = str(TensorName.parse(place.name).slice(expert))
            yield i, UnitKey(unit.layer, UnitKind.EXPERT, expert), name


def _with_seat(source: TensorSource, place: TensorKey) -> TensorSource:
    """Complete `source`, a slice of a stacked tensor, with the properties of its seat."""
    if place.seats is None:
        return source
    captured = source.unit.expert in place.seats.captured
    return replace(source, private=True, seats=place.seats, captured=captured)
