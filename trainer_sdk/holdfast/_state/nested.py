"""Optimizers within optimizers: SAM, Lookahead, ZeroRedundancyOptimizer, wrappers of frameworks.

A wrapper holds its inner optimizer in an attribute, or several of them in a list. The moments are
in the inner optimizers; the wrapper's own `state` is empty, or has only additions. So the state of
an optimizer is the state of the wrapper and of all inner optimizers. Usually they share their
parameter groups. If an inner optimizer has groups of its own, it may hold only the parameters of
this rank, as in ZeroRedundancyOptimizer. Then no other rank is assumed to hold its states.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from holdfast._state.parts import tensors_in
from holdfast_core.errors import InvalidJobError, LayoutMismatchError
from holdfast_core.job.snapshots import Repeats

_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"


def is_optimizer(value: object) -> bool:
    """Whether `value` has torch's `param_groups` and `state`."""
    if isinstance(value, torch.Tensor | torch.nn.Module | str | bytes | type):
        return False
    groups = getattr(value, "param_groups", None)
    return (
        isinstance(groups, Sequence)
        and all(isinstance(group, Mapping) and "params" in group for group in groups)
        and isinstance(getattr(value, "state", None), Mapping)
    )


def with_nested(optimizer: Any, others: Collection[Any] = ()) -> tuple[Any, ...]:
    """List an optimizer and its inner optimizers, each before its own inner ones.

    Args:
        others: optimizers that do not count as inner ones, although this one may refer to them.
    """
    found: list[Any] = []
    seen = {id(other) for other in others if other is not optimizer}

    def add(one: Any) -> None:
        if id(one) in seen:
            return
        seen.add(id(one))
        found.append(one)
        for name, value in getattr(one, "__dict__", {}).items():
            if name not in ("state", "param_groups", "defaults"):
                for inner in filter(is_optimizer, _items(value)):
                    add(inner)

    add(optimizer)
    return tuple(found)


def _items(value: object) -> Iterable[object]:
    """Return `value`, or the items of a container if one of its first items is an optimizer: long
    containers, such as lists of parameters, are not searched."""
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return (value,)
    assert isinstance(value, Collection)
    return value if any(map(is_optimizer, islice(value, 4))) else ()


class Holders:
    """An optimizer of the session and its inner optimizers, which together hold its state.

    Args:
        others: see `with_nested`.
        keys: keys of the states that each optimizer holds in the snapshot to restore.
    """

    def __init__(
        self,
        optimizer: Any,
        others: Collection[Any] = (),
        keys: Sequence[Collection[str]] | None = None,
    ) -> None:
        self.optimizers = with_nested(optimizer, others)
        shared = {id(group) for group in optimizer.param_groups}
        inner = self.optimizers[1:]
        self.parted = any(id(g) not in shared for one in inner for g in one.param_groups)
        """Whether an inner optimizer has parameter groups of its own."""
        self._keys = keys
        self._members = [
            {id(p) for group in one.param_groups for p in group["params"]}
            for one in self.optimizers
        ]

    def states(self) -> Iterator[Mapping[Any, Any]]:
        """Yield each state mapping once, since a wrapper may share that of its inner optimizer."""
        seen = set()
        for one in self.optimizers:
            if id(one.state) not in seen:
                seen.add(id(one.state))
                yield one.state

    def state_of(self, parameter: torch.Tensor, key: str) -> dict[Any, Any] | None:
        """Return the state of a parameter that has `key`, or in which `key` belongs. Return None if
        only an optimizer of another rank holds the parameter."""
        present = [one.state[parameter] for one in self.optimizers if one.state.get(parameter)]
        for state in present:
            if key in state:
                return state  # type: ignore[no-any-return]
        at = self._place_of(parameter, key)
        return None if at is None else self.optimizers[at].state.setdefault(parameter, {})

    def takes(self, parameter: torch.Tensor, key: str) -> bool:
        """Whether an optimizer of this rank has this state, or it belongs to one."""
        return self._place_of(parameter, key) is not None

    def _place_of(self, parameter: torch.Tensor, key: str) -> int | None:
        """Return the number of the optimizer to which a state belongs: the one in the snapshot or,
        if that does not say, the innermost one with the parameter."""
        holding = [at for at, ids in enumerate(self._members) if id(parameter) in ids] or [0]
        if self.parted:
            return None if holding == [0] else holding[-1]
        named = [at for at in holding if key in self._keys[at]] if self._keys else []
        return (named or holding)[-1]

    def holds(self, at: int, parameter: torch.Tensor) -> bool:
        """Whether optimizer number `at` has a parameter in its groups; the outer one is number
        0."""
        return id(parameter) in self._members[at]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters in the groups of all these optimizers, each once."""
        groups = (group for one in self.optimizers for group in one.param_groups)
        return [*{id(p): p for group in groups for p in group["params"]}.values()]

    def tensor_keys(self) -> list[list[str]]:
        """Return the keys of the tensors in the state of each optimizer."""
        return [
            sorted(
                {
                    part
                    for state in one.state.values()
                    if isinstance(state, Mapping)
                    for key, value in state.items()
                    for part, _ in tensors_in(str(key), value)
                }
            )
            for one in self.optimizers
        ]

    def check_alike(self, index: int, saved: Sequence[object]) -> None:
        """Raise LayoutMismatchError unless the snapshot has values of equally many optimizers."""
        if len(saved) != len(self.optimizers):
            raise LayoutMismatchError(
                f"optimizer {index} holds {len(self.optimizers) - 1} others "
                f"({type(self.optimizers[0]).__qualname__}), in the snapshot it holds "
                f"{len(saved) - 1}: build it in the same way as before"
            )


def check_nested(optimizers: Sequence[Any], repeats: Repeats | None, *, stays: bool) -> None:
    """Refuse nested optimizers that a session cannot handle.

    Args:
        repeats: whose steps a recovery repeats in sparse windows; None without windows.
        stays: whether this process will also train in later worlds.

    Raises:
        InvalidJobError: the message names the optimizer.
    """
    for optimizer in optimizers:
        name, held = type(optimizer).__qualname__, with_nested(optimizer)
        if getattr(optimizer, "_overlap_with_ddp", False):
            raise InvalidJobError(
                f"{name} with overlap_with_ddp steps within the backward pass, where it cannot be "
                f"delayed while a save is copied: leave overlap_with_ddp out"
            )
        if stays and any(map(_has_group, held)):
            raise InvalidJobError(
                f"{name} keeps its first process group, which does not change with the world: "
                f"leave `world` out, so that all processes start again after a failure"
            )
        if repeats is None or len(held) == 1:
            continue
        inner = type(held[1]).__qualname__
        if not divides_parameters(optimizer):
            raise InvalidJobError(
                f"{name} holds another optimizer ({inner}) and does more than the step of that "
                f"one, which sparse windows cannot repeat: use snapshot.policy.type Full"
            )
        if repeats is Repeats.OPTIMIZER:
            raise InvalidJobError(
                f"{name} divides the parameters over ranks, but each rank can only repeat the "
                f"steps of its own: use snapshot.policy.sparse.repeats Training"
            )


def divides_parameters(optimizer: Any) -> bool:
    """Whether it is torch's ZeroRedundancyOptimizer, which only lets its inner optimizer step the
    parameters of this rank, and sends them to the other ranks."""
    return any(kind.__module__ == _ZERO for kind in type(optimizer).__mro__)


def _has_group(optimizer: Any) -> bool:
    """Whether an optimizer, or an object in its attributes, keeps a process group."""
    if not torch.distributed.is_available():
        return False
    values = list(getattr(optimizer, "__dict__", {}).values())
    values += [inner for value in values for inner in getattr(value, "__dict__", {}).values()]
    return any(isinstance(value, torch.distributed.ProcessGroup) for value in values)


class StepHooks:
    """Hooks around the steps of optimizers. `before` and `after` are called once for each step of
    one of `optimizers`, whichever of its inner optimizers steps first.

    Args:
        before: called with the optimizer before it changes anything.
        after: called with the optimizer after its step.
        watch_closures: whether to look for closures that compute or change gradients.
    """

    def __init__(
        self,
        optimizers: Sequence[Any],
        before: Callable[[Any], None] | None,
        after: Callable[[Any], None] | None = None,
        *,
        watch_closures: bool = False,
    ) -> None:
        self._before, self._after = before, after
        self._watches_closures = watch_closures
        self.makes_gradients = ""
        """Class of an optimizer whose closure makes gradients within its step; empty if none is
        known."""
        self._gradients: list[tuple[int, int]] | None = None
        """Gradients when a step with a closure began; None without one."""
        self._within: dict[int, Any] = {}
        """Number of an optimizer that is stepping → the (inner) optimizer that began the step."""
        self._handles: list[RemovableHandle] = []
        for index, optimizer in enumerate(optimizers):
            for one in notices_steps(optimizer, optimizers):
                self._hold(index, optimizer, one)

    def _hold(self, index: int, optimizer: Any, one: Any) -> None:
        def begin(_: Any, args: Sequence[Any], named: Mapping[str, Any]) -> None:
            if self._within.get(index, one) is one:
                self._within[index] = one
                if self._before is not None:
                    self._before(optimizer)
                if self._watches_closures and any(map(callable, (*args, *named.values()))):
                    self._gradients = _gradients_of(one)

        def end(*_: Any) -> None:
            before, self._gradients = self._gradients, None
            if before is not None and before != _gradients_of(one):
                self.makes_gradients = type(optimizer).__qualname__
            if self._within.get(index) is one:
                del self._within[index]
                if self._after is not None:
                    self._after(optimizer)

        # Within a compiled step, torch would compile what the hooks do, up to what they wait for.
        self._handles.append(one.register_step_pre_hook(torch.compiler.disable(begin)))
        self._handles.append(one.register_step_post_hook(torch.compiler.disable(end)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _gradients_of(optimizer: Any) -> list[tuple[int, int]]:
    """For each parameter of an optimizer, which gradient it has, and how often that has changed."""
    held = (p.grad for group in optimizer.param_groups for p in group["params"])
    return [(id(grad), 0 if grad is None else grad._version) for grad in held]


def notices_steps(optimizer: Any, others: Collection[Any] = ()) -> list[Any]:
    """List the optimizers whose hooks notice that `optimizer` steps. A wrapper that was made
    without torch's constructor calls no hooks, but its inner optimizer does."""
    return [
        one
        for one in with_nested(optimizer, others)
        if isinstance(one, torch.optim.Optimizer) and "_optimizer_step_pre_hooks" in vars(one)
    ]


def forget_scaling(optimizers: Sequence[Any]) -> None:
    """Let optimizers forget the values that a gradient scaler sets on them for one step."""
    for one in (one for optimizer in optimizers for one in with_nested(optimizer)):
        for name in ("grad_scale", "found_inf"):
            getattr(one, "__dict__", {}).pop(name, None)
