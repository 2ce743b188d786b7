"""Collecting and loading extras: the state that is not a tensor of a unit.

Extras are the user's stateful objects, the states of the random number generators, and the
hyperparameters and scalar states of optimizers. Each rank has its own. `save` collects them before
it returns, because training then changes them. So they should be small.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import xxhash

from holdfast._state.buffers import ChangedBuffers
from holdfast._state.capture import LiveState
from holdfast._state.extras import encode_extras
from holdfast._state.groups import regroup
from holdfast._state.nested import forget_scaling
from holdfast._state.parts import (
    Form,
    build_state,
    form_of_state,
    has_tensors,
    hold_only_tensors,
    is_plain,
    tensors_in,
    tensors_of_form,
)
from holdfast_core.errors import InvalidJobError, LayoutMismatchError
from holdfast_core.snapshots.names import TensorName


class Stateful(Protocol):
    """An object in `stateful`: a scheduler, a sampler, a gradient scaler, the user's own."""

    def state_dict(self) -> Any:
        """Return the state, in types that `encode_extras` supports."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state that `state_dict` returned."""


@dataclass(frozen=True, slots=True)
class RandomGenerators:
    """The states of this process's random generators, to be restored later."""

    states: Mapping[str, Any]

    @classmethod
    def now(cls) -> RandomGenerators:
        """Take the present states: of the CPU and, if CUDA is in use, of all devices."""
        used = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(_rng_states(range(torch.cuda.device_count() if used else 0)))

    def put_back(self) -> None:
        """Set the generators to these states."""
        _load_rng_states(self.states, range(torch.cuda.device_count()))


class ProgramStates(NamedTuple):
    """States that code of the program has made; that code may change any tensor."""

    stateful: Mapping[str, Any]
    """Name → state of a stateful object."""
    modules: Mapping[str, Any]
    """Path → extra state of a module."""


def states_of(live: LiveState, stateful: Mapping[str, Stateful]) -> ProgramStates:
    """Take the states of stateful objects, and the extra states of modules."""
    states = {name: item.state_dict() for name, item in stateful.items()}
    return ProgramStates(states, _module_states(live))


def collect(live: LiveState, stateful: Mapping[str, Stateful], step: int) -> dict[str, Any]:
    """Collect the extras of this rank after `step`."""
    return collect_with(live, states_of(live, stateful), step)


def collect_with(
    live: LiveState, states: ProgramStates, step: int, of_tensors: Collection[int] = ()
) -> dict[str, Any]:
    """Do the same with states of the program that were taken before.

    Args:
        states: what `states_of` took.
        of_tensors: numbers of the optimizers whose states are known to hold only plain tensors.
    """
    return {
        "step": step,
        "stateful": states.stateful,
        "optimizers": [
            _optimizer_state(live, index, of_tensors=index in of_tensors)
            for index in range(len(live.optimizers))
        ],
        "modules": states.modules,
        "model": live.begun.differences(),
        "buffers": live.changed_buffers,
        "rng": _rng_states(live.cuda_devices),
    }


def put_back(live: LiveState, stateful: Mapping[str, Stateful], extras: Mapping[str, Any]) -> None:
    """Load `extras` into the objects that `collect` reads.

    Raises:
        LayoutMismatchError: the names of stateful objects, the optimizers or their groups differ.
    """
    # Check that the snapshot fits, before anything is loaded.
    saved = extras["stateful"]
    if saved.keys() != stateful.keys():
        raise LayoutMismatchError(
            f"the snapshot holds stateful {sorted(saved)}, this session has {sorted(stateful)}; "
            f"pass the same names to holdfast.init"
        )
    if len(extras["optimizers"]) != len(live.optimizers):
        raise LayoutMismatchError(
            f"the snapshot holds {len(extras['optimizers'])} optimizers, this session has "
            f"{len(live.optimizers)}: pass the same optimizers to holdfast.init"
        )
    # Load in the order in which parts depend on each other; stateful objects may use the rest.
    _put_back_trains(live, extras)
    for index, state in enumerate(extras["optimizers"]):
        _load_optimizer(live, index, state)
    if "model" in extras:
        live.begun.put_back_modes(extras["model"])
    modules = dict(live.model.named_modules())
    modules |= {str(TensorName(path)): module for path, module in modules.items()}
    for name, state in extras["modules"].items():
        default = torch.nn.Module.set_extra_state
        if name not in modules or type(modules[name]).set_extra_state is default:
            raise LayoutMismatchError(
                f"the snapshot has the extra state of a module {name!r}, but the model has no such "
                f"module with set_extra_state: build the model as before"
            )
        modules[name].set_extra_state(state)
    for name, item in stateful.items():
        item.load_state_dict(saved[name])
    _load_rng_states(extras["rng"], live.cuda_devices)


def reset_scalers(optimizers: Sequence[Any], stateful: Mapping[str, Stateful]) -> None:
    """Let gradient scalers forget a step that was cut off. Otherwise a scaler takes the repeated
    step for the one that was cut off, and does not unscale its gradients: that is not part of its
    `state_dict`, nor are the values that it sets on a fused optimizer."""
    forget_scaling(optimizers)
    for item in stateful.values():
        if isinstance(item, torch.amp.GradScaler):
            with suppress(AssertionError):  # it has never scaled anything
                item.update(item.get_scale())


def generators_of(live: LiveState) -> bytes:
    """States of the random generators, encoded."""
    return encode_extras(_rng_states(live.cuda_devices))


def seed_generators(*numbers: int) -> None:
    """Seed the random generators of this process from integers, such as a step and a rank. Other
    integers, or another order, give other random numbers."""
    seed = xxhash.xxh3_64_intdigest(" ".join(map(str, numbers)).encode()) % 2**63
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def devices_of(extras: Mapping[str, Any]) -> dict[str, str]:
    """Return the device types of the optimizer states that are not on their parameter's device."""
    return {name: kind for state in extras["optimizers"] for name, kind in state["devices"].items()}


def buffers_of(extras: Mapping[str, Any]) -> ChangedBuffers:
    """Return the buffers whose form had changed since the start of the program that saved them."""
    changed: ChangedBuffers = extras.get("buffers", {})  # Snapshots of earlier versions lack them.
    return changed


def expect_states(live: LiveState, extras: Mapping[str, Any]) -> None:
    """Let states that do not exist yet be created in the (inner) optimizers that held them.

    Raises:
        LayoutMismatchError: optimizers have other inner optimizers than in the snapshot.
    """
    for index, state in enumerate(extras["optimizers"][: len(live.optimizers)]):
        live.expect(index, _each(state))


def put_back_groups(live: LiveState, extras: Mapping[str, Any]) -> None:
    """Give optimizers the parameter groups of the snapshot, if the program had changed them, and
    freeze and unfreeze parameters as in the snapshot. Called before anything else is loaded.

    Raises:
        LayoutMismatchError: a parameter is unknown.
    """
    live.sources()
    _put_back_trains(live, extras)
    for index, (optimizer, state) in enumerate(
        zip(live.optimizers, extras["optimizers"], strict=False)
    ):
        if "members" in state:
            parameters = {name: anchor.parameter for name, anchor in live.anchors.items()}
            regroup(optimizer, state["members"], state["groups"], parameters)
        else:
            live.begun.groups.go_back(index, state["groups"])


def put_back_scalars(live: LiveState, extras: Mapping[str, Any]) -> None:
    """Load the plain values in the states of optimizers. `extras` must fit the live state."""
    for holders, saved in zip(live.holders, extras["optimizers"], strict=True):
        for optimizer, one in zip(holders.optimizers, _each(saved), strict=True):
            for name, values in one["scalars"].items():
                optimizer.state.setdefault(live.anchors[name].parameter, {}).update(values)


def _put_back_trains(live: LiveState, extras: Mapping[str, Any]) -> None:
    if "model" in extras:  # Snapshots of older versions lack it.
        live.begun.put_back_trains(extras["model"])


def _each(saved: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """List the saved values of an optimizer and of its inner optimizers."""
    return [saved, *saved.get("within", ())]


def _optimizer_state(live: LiveState, index: int, *, of_tensors: bool) -> dict[str, Any]:
    holders, values = live.holders[index], live.begun.values
    state = _values_of(live, index, holders.optimizers[0], of_tensors=of_tensors)
    state |= {"devices": live.devices[index], **values.changed_values(index, 0, live.names)}
    if index in live.changed_groups:
        state["members"] = live.changed_groups[index]
    if index in live.shared:
        state["shared"] = live.shared[index]
    if len(holders.optimizers) > 1:
        state["keys"], *keys = holders.tensor_keys()
        state["within"] = [
            {
                **_values_of(live, index, one, of_tensors=of_tensors),
                "keys": own,
                **values.changed_values(index, at, live.names),
            }
            for at, (one, own) in enumerate(zip(holders.optimizers[1:], keys, strict=True), 1)
        ]
    return state


def _values_of(live: LiveState, index: int, optimizer: Any, *, of_tensors: bool) -> dict[str, Any]:
    """Collect the state of an optimizer that is not a tensor of a unit: plain values, and the forms
    of values with tensors inside."""
    scalars: dict[str, dict[Any, Any]] = {}
    forms: dict[str, dict[Any, Form]] = {}
    known = live.forms[index]
    nothing = not known and (of_tensors or hold_only_tensors(optimizer.state.values()))
    for parameter, state in () if nothing else optimizer.state.items():
        if isinstance(parameter, str):
            continue  # see `own_values`
        noted = known.get(parameter, {})
        kept = {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                if key in noted:
                    forms.setdefault(live.names[id(parameter)], {})[key] = noted[key]
            elif has_tensors(value):
                form = form_of_state(str(key), value, parameter)
                forms.setdefault(live.names[id(parameter)], {})[key] = form
            else:
                kept[key] = value
        if kept:
            scalars |= dict.fromkeys(live.names_of(parameter), kept)
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return {"groups": groups, "scalars": scalars, **({"forms": forms} if forms else {})}


def put_forms(
    live: LiveState, shapes: Mapping[str, Sequence[int]], extras: Mapping[str, Any]
) -> None:
    """Give optimizers the states of the snapshot that have tensors inside, or are tensors of a form
    of their own, and drop those that the snapshot lacks. Tensors that have the right form stay.

    Args:
        shapes: shape of each tensor to restore, by name.

    Raises:
        LayoutMismatchError: a state would have other shapes here; the message names it.
    """
    for holders, saved in zip(live.holders, extras["optimizers"], strict=False):
        for at, (optimizer, one) in enumerate(zip(holders.optimizers, _each(saved), strict=False)):
            forms = one.get("forms", {})
            for parameter, state in optimizer.state.items():
                if isinstance(parameter, str):
                    continue
                kept = forms.get(live.names.get(id(parameter), ""), {})
                gone = [k for k, v in state.items() if has_tensors(v) and not is_plain(v)]
                for key in (key for key in gone if key not in kept):
                    del state[key]
            for name, values in forms.items():
                anchor = live.anchors.get(name)
                if anchor is None or (at and not holders.holds(at, anchor.parameter)):
                    continue
                for key, form in values.items():
                    if _fits(TensorName.parse(name), form, shapes):
                        _put_form(optimizer, anchor.parameter, key, form)


def _put_form(optimizer: Any, parameter: torch.Tensor, key: Any, form: Form) -> None:
    state = optimizer.state.setdefault(parameter, {})
    present = dict(tensors_in(str(key), state.get(key)))
    state[key] = build_state(form, parameter, present)


def _fits(name: TensorName, form: Form, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether all tensors of a form are to be restored in its shapes. If not, a state that is one
    tensor gets another shape, or belongs to another rank."""
    names = {str(name.state(key)): shape for key, shape in tensors_of_form(form)}
    if all(
        tuple(shapes.get(text, ())) == shape and text in shapes for text, shape in names.items()
    ):
        return True
    if form[0] == "tensor" or not any(text in shapes for text in names):
        return False
    raise LayoutMismatchError(
        f"{', '.join(names)} are parts of one state, of the shapes {[*names.values()]} in the "
        f"snapshot, and would have others here: restore with the parallelism of the snapshot"
    )


def _load_optimizer(live: LiveState, index: int, saved: Mapping[str, Any]) -> None:
    holders = live.holders[index]
    holders.check_alike(index, _each(saved))
    parameters = {name: anchor.parameter for name, anchor in live.anchors.items()}
    for at, one in enumerate(_each(saved)):
        _load_values(live, index, at, one)
    _share(live, saved.get("shared", ()))
    for at, one in enumerate(_each(saved)):
        live.begun.values.put_back(index, at, one, parameters)


def _share(live: LiveState, shared: Sequence[tuple[str, str, str, str]]) -> None:
    """Let states be one tensor again that were one in the snapshot; see `LiveState.shared`."""
    for name, key, other, other_key in shared:
        state, first = _state_with(live, name, key), _state_with(live, other, other_key)
        if state and first and state[key].shape == first[other_key].shape:
            state[key] = first[other_key]


def _state_with(live: LiveState, name: str, key: str) -> dict[Any, Any]:
    """The state of a parameter that has `key`; empty if this rank has none."""
    anchor = live.anchors.get(name)
    if anchor is not None and anchor.optimizer >= 0:
        for one in live.holders[anchor.optimizer].optimizers:
            state: dict[Any, Any] = one.state.get(anchor.parameter, {})
            if key in state:
                return state
    return {}


def _load_values(live: LiveState, index: int, at: int, saved: Mapping[str, Any]) -> None:
    holders = live.holders[index]
    optimizer = holders.optimizers[at]
    if len(saved["groups"]) != len(optimizer.param_groups):
        raise LayoutMismatchError(
            f"optimizer {index} has {len(optimizer.param_groups)} parameter groups, in the "
            f"snapshot it has {len(saved['groups'])}: build it with the same groups"
        )
    for group, values in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in values.items():
            if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                group[key].detach().copy_(value)  # it may be learned
            else:
                group[key] = value
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, str):
            continue
        named = (saved["scalars"].get(name, {}) for name in live.names_of(parameter))
        kept: Mapping[Any, Any] = next((values for values in named if values), {})
        gone = [k for k, v in state.items() if not has_tensors(v) and k not in kept]
        for key in gone:
            del state[key]
    for name, values in saved["scalars"].items():
        anchor = live.anchors.get(name)
        if anchor is None:
            raise LayoutMismatchError(
                f"the snapshot has optimizer state for {name!r}, which this session does not have: "
                f"build the model and its optimizers as before"
            )
        if at and not holders.holds(at, anchor.parameter):
            continue  # another rank's
        optimizer.state.setdefault(anchor.parameter, {}).update(values)


def _module_states(live: LiveState) -> dict[str, Any]:
    found: dict[str, Any] = {}
    modules = live.modules()
    kinds: set[type[torch.nn.Module]] = {*map(type, modules.values())}
    default = torch.nn.Module.get_extra_state
    with_state = {kind for kind in kinds if kind.get_extra_state is not default}
    for path, module in modules.items() if with_state else ():
        kind = type(module)
        if kind not in with_state:
            continue
        if kind.set_extra_state is torch.nn.Module.set_extra_state:
            raise InvalidJobError(
                f"{path or 'the model'} is a {kind.__qualname__} with get_extra_state and without "
                f"set_extra_state, so its state could not be restored: define both"
            )
        found[str(TensorName(path))] = module.get_extra_state()
    return found


def _rng_states(cuda_devices: Sequence[int]) -> dict[str, Any]:
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # the global generator is what training scripts seed
        "torch": torch.get_rng_state(),
    }
    if cuda_devices:
        states["cuda"] = [torch.cuda.get_rng_state(index) for index in cuda_devices]
    elif torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = [torch.cuda.get_rng_state()]
    return states


def _load_rng_states(states: Mapping[str, Any], cuda_devices: Sequence[int]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        devices = cuda_devices or (torch.cuda.current_device(),)
        for index, state in zip(devices, states["cuda"], strict=False):
            torch.cuda.set_rng_state(state, index)
