"""Parameter groups that a program changes while it runs, for example when it unfreezes layers.

A program that starts again has its initial groups, which do not fit snapshots with later groups. So
a snapshot names the parameters of the groups that have changed, and a restore recreates these
groups before it looks for their state. Parameters are found by their names in the model. A
parameter that is created late, and that only an optimizer has, has no name by which a restore could
find it.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast._state.nested import is_optimizer, with_nested
from holdfast_core.errors import InvalidJobError, LayoutMismatchError

Members = list[list[str]]
"""Names of the parameters in each group of an optimizer."""


def check_optimizers(optimizers: Sequence[Any]) -> None:
    """Raise InvalidJobError for an optimizer without torch's `param_groups` and `state`."""
    for index, optimizer in enumerate(optimizers):
        if not is_optimizer(optimizer):
            raise InvalidJobError(
                f"optimizer {index} is a {type(optimizer).__qualname__} without torch's "
                f"param_groups and state; pass the optimizer that has them, or a list of such"
            )


class ParamGroups:
    """The parameter groups of `optimizers`, compared with those when the program started. A process
    that stays uses the same object in all of its worlds."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        self.begin()

    def begin(self) -> None:
        """Take the present groups as those of the program's start."""
        self._begun = [_members(optimizer) for optimizer in self._optimizers]
        self._within = [
            [(one, _members(one)) for one in _with_own_groups(optimizer, self._optimizers)]
            for optimizer in self._optimizers
        ]

    def follow(self, replaced: Mapping[int, torch.Tensor]) -> None:
        """Note that other parameters have replaced those with these ids, which still exist."""

        def new(groups: list[list[weakref.ref[torch.Tensor]]]) -> Any:
            return [
                [weakref.ref(replaced.get(id(p), p)) for ref in group if (p := ref()) is not None]
                for group in groups
            ]

        self._begun = [new(groups) for groups in self._begun]
        self._within = [[(one, new(groups)) for one, groups in each] for each in self._within]

    def go_back(self, index: int, saved: Sequence[Mapping[str, Any]]) -> None:
        """Give optimizer `index` the groups that it had when the program started, if they have
        changed, with the hyperparameters of a snapshot."""
        optimizer = self._optimizers[index]
        found = [[ref() for ref in refs] for refs in self._begun[index]]
        begun = [[p for p in group if p is not None] for group in found]
        whole = list(map(len, begun)) == list(map(len, found))
        if whole and len(begun) == len(saved) and not _has(optimizer, found):
            _give(optimizer, begun, saved)

    def changed_groups_of(
        self, names: Mapping[int, str], own: Mapping[int, torch.Tensor]
    ) -> dict[int, Members]:
        """Map the number of each optimizer whose groups have changed to its current groups.

        Args:
            names: `id` of each parameter → its name.
            own: the model's parameters, by `id`.

        Raises:
            InvalidJobError: a restore could not recreate these groups.
        """
        found: dict[int, Members] = {}
        for index, (optimizer, begun) in enumerate(zip(self._optimizers, self._begun, strict=True)):
            now = [list(group["params"]) for group in optimizer.param_groups]
            before = [[ref() for ref in refs] for refs in begun]
            for one, present in self._within[index]:
                if not _has(one, [[ref() for ref in refs] for refs in present]):
                    raise InvalidJobError(
                        f"parameter groups changed after the restore in the "
                        f"{type(one).__qualname__} that optimizer {index}, a "
                        f"{type(optimizer).__qualname__}, holds: a restore could not change them "
                        f"there; give it all parameters before session.restore()"
                    )
            if _has(optimizer, before):
                continue
            known = {id(p) for group in before for p in group} | own.keys()
            for p in (p for group in now for p in group):
                if id(p) not in known:
                    raise InvalidJobError(
                        f"optimizer {index} received {names[id(p)]} {list(p.shape)} after "
                        f"holdfast.init, and the model does not contain it: this program could not "
                        f"restore it; give it to the optimizer before holdfast.init"
                    )
            members = {id(p) for group in now for p in group}
            states = [one.state for one in with_nested(optimizer, self._optimizers)]
            for p in (p for state in states for p in state):
                if id(p) not in members:
                    raise InvalidJobError(
                        f"optimizer {index} holds state for {names.get(id(p), 'a tensor')}, which "
                        f"was taken out of its parameter groups; clear that state"
                    )
            found[index] = [[names[id(p)] for p in group] for group in now]
        return found


def _members(optimizer: Any) -> list[list[weakref.ref[torch.Tensor]]]:
    return [[weakref.ref(p) for p in group["params"]] for group in optimizer.param_groups]


def _with_own_groups(optimizer: Any, others: Sequence[Any]) -> list[Any]:
    """Return the inner optimizers of `optimizer` that do not share its list of groups."""
    shared = optimizer.param_groups
    return [one for one in with_nested(optimizer, others)[1:] if one.param_groups is not shared]


def _has(optimizer: Any, groups: Sequence[Sequence[torch.Tensor | None]]) -> bool:
    """Whether the optimizer's groups have exactly these parameters."""
    now = [list(map(id, group["params"])) for group in optimizer.param_groups]
    return now == [list(map(id, group)) for group in groups]


def regroup(
    optimizer: Any,
    members: Members,
    saved: Sequence[Mapping[str, Any]],
    parameters: Mapping[str, torch.Tensor],
) -> None:
    """Give `optimizer` the groups of a snapshot.

    Args:
        members: names of the parameters in each group.
        saved: hyperparameters of each group.
        parameters: parameters of the live model and its optimizers, by name.

    Raises:
        LayoutMismatchError: a parameter is unknown; the message names it.
    """
    for name in (name for names in members for name in names):
        if name not in parameters:
            raise LayoutMismatchError(
                f"in the snapshot an optimizer has the parameter {name!r}, which this session does "
                f"not have: build the model and its optimizers as before"
            )
    _give(optimizer, [[parameters[name] for name in names] for names in members], saved)


def _give(
    optimizer: Any,
    given: Sequence[Sequence[torch.Tensor]],
    saved: Sequence[Mapping[str, Any]],
) -> None:
    """Give `optimizer` groups with these parameters, and drop the states of all others."""
    groups = optimizer.param_groups
    del groups[len(given) :]
    groups += [dict(values) for values in saved[len(groups) :]]
    for group, parameters in zip(groups, given, strict=True):
        group["params"] = list(parameters)
    kept = {id(p) for parameters in given for p in parameters}
    for state in (one.state for one in with_nested(optimizer)):
        for parameter in [p for p in state if id(p) not in kept]:
            del state[parameter]


def copy_with(
    optimizer: Any, group: Mapping[str, Any], parameter: torch.Tensor, state: dict[Any, Any]
) -> Any:
    """Copy a torch optimizer, whose copy has `parameter` alone, with its `state` and the
    hyperparameters of `group`."""
    one = object.__new__(type(optimizer))
    one.__dict__.update(optimizer.__dict__)  # a copy of an optimizer has no other attributes
    one.state = defaultdict(dict, {parameter: state})
    one.param_groups = [{**group, "params": [parameter]}]
    return one


def step_alone(optimizer: Any) -> None:
    """Run the step of a torch optimizer, without its hooks."""
    step = type(optimizer).step
    (step.__wrapped__ if hasattr(step, "hooked") else step)(optimizer)
