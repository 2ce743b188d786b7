"""Optimizers within optimizers: SAM, Lookahead, ZeroRedundancyOptimizer, wrappers of frameworks.

A wrapper holds the optimizer that it wraps in an attribute, or several in a list. Its own `state`
is empty, or has what it adds; the moments are in those within. So the state of an optimizer is
that of all of them. Usually they share their parameter groups. Where one within has groups of its
own, it may hold the parameters of this rank alone, as ZeroRedundancyOptimizer does: then no other
rank is assumed to hold its states.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

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
    """List an optimizer and those within it: itself first, each before those within it.

    Args:
        others: optimizers that are not within this one, though it may have references to them.
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
    """`value`, or what a container holds. Long ones, as of parameters, are not looked through."""
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return (value,)
    assert isinstance(value, Collection)
    return value if any(map(is_optimizer, islice(value, 4))) else ()


class Holders:
    """An optimizer of the session and those within it, which together hold its state.

    Args:
        others: see `with_nested`.
        keys: of a snapshot that is restored, the keys of the states that each of them holds.
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
        """Whether one within has parameter groups of its own."""
        self._keys = keys
        self._members = [
            {id(p) for group in one.param_groups for p in group["params"]}
            for one in self.optimizers
        ]

    def states(self) -> Iterator[Mapping[Any, Any]]:
        """Yield each state mapping once: a wrapper may show that of the optimizer within."""
        seen = set()
        for one in self.optimizers:
            if id(one.state) not in seen:
                seen.add(id(one.state))
                yield one.state

    def state_of(self, parameter: torch.Tensor, key: str) -> dict[Any, Any] | None:
        """State of a parameter that holds `key`, or is to hold it. None when no optimizer holds the
        parameter here, but one on another rank does."""
        present = [one.state[parameter] for one in self.optimizers if one.state.get(parameter)]
        for state in present:
            if key in state:
                return state  # type: ignore[no-any-return]
        at = self._place_of(parameter, key)
        return None if at is None else self.optimizers[at].state.setdefault(parameter, {})

    def takes(self, parameter: torch.Tensor, key: str) -> bool:
        """Whether an optimizer holds this state here, or is to hold it."""
        return self._place_of(parameter, key) is not None

    def _place_of(self, parameter: torch.Tensor, key: str) -> int | None:
        """Number of the optimizer that is to hold a state: the innermost that has the parameter, if
        the snapshot does not know better."""
        holding = [at for at, ids in enumerate(self._members) if id(parameter) in ids] or [0]
        if self.parted:
            return None if holding == [0] else holding[-1]
        named = [at for at in holding if key in self._keys[at]] if self._keys else []
        return (named or holding)[-1]

    def holds(self, at: int, parameter: torch.Tensor) -> bool:
        """Whether optimizer number `at`, the outer one being 0, has a parameter in its groups."""
        return id(parameter) in self._members[at]

    def parameters(self) -> list[torch.Tensor]:
        """Parameters in the groups of the optimizer and those within it, each once."""
        groups = (group for one in self.optimizers for group in one.param_groups)
        return [*{id(p): p for group in groups for p in group["params"]}.values()]

    def tensor_keys(self) -> list[list[str]]:
        """Keys of the tensors that each optimizer holds."""
        return [
            sorted(
                {
                    key
                    for state in one.state.values()
                    for key, value in state.items()
                    if isinstance(value, torch.Tensor) and isinstance(key, str)
                }
            )
            for one in self.optimizers
        ]

    def check_alike(self, index: int, saved: Sequence[object]) -> None:
        """Raise LayoutMismatchError unless a snapshot has `saved` values of as many optimizers."""
        if len(saved) != len(self.optimizers):
            raise LayoutMismatchError(
                f"optimizer {index} holds {len(self.optimizers) - 1} others "
                f"({type(self.optimizers[0]).__qualname__}), in the snapshot it holds "
                f"{len(saved) - 1}: make it as it was"
            )


def check_nested(optimizers: Sequence[Any], repeats: Repeats | None, *, stays: bool) -> None:
    """Refuse optimizers within optimizers where a session could not deal with them.

    Args:
        repeats: what a recovery repeats of sparse windows; None where there are none.
        stays: whether this process is to train in later worlds, too.

    Raises:
        InvalidJobError: the message names the optimizer.
    """
    for optimizer in optimizers:
        name, held = type(optimizer).__qualname__, with_nested(optimizer)
        if getattr(optimizer, "_overlap_with_ddp", False):
            raise InvalidJobError(
                f"{name} with overlap_with_ddp steps within the backward pass, where nothing can "
                f"hold it back while a save is copied: leave overlap_with_ddp out"
            )
        if stays and any(map(_has_group, held)):
            raise InvalidJobError(
                f"{name} keeps the process group that it was made with, which does not change with "
                f"a world: leave `world` out, so that all processes start again after a failure"
            )
        if repeats is None or len(held) == 1:
            continue
        inner = type(held[1]).__qualname__
        if not divides_parameters(optimizer):
            raise InvalidJobError(
                f"{name} holds another optimizer ({inner}) and does more than that one's step, "
                f"which sparse windows could not repeat: use snapshot.policy.type Full"
            )
        if repeats is Repeats.OPTIMIZER:
            raise InvalidJobError(
                f"{name} gives each rank the steps of other parameters, and ranks repeat those of "
                f"their own: use snapshot.policy.sparse.repeats Training"
            )


def divides_parameters(optimizer: Any) -> bool:
    """Whether it is torch's ZeroRedundancyOptimizer, which does nothing else than to let the one
    within step the parameters of this rank, and to send them to the others."""
    return any(kind.__module__ == _ZERO for kind in type(optimizer).__mro__)


def _has_group(optimizer: Any) -> bool:
    """Whether an optimizer, or what it averages with, keeps a process group."""
    if not torch.distributed.is_available():
        return False
    values = list(getattr(optimizer, "__dict__", {}).values())
    values += [inner for value in values for inner in getattr(value, "__dict__", {}).values()]
    return any(isinstance(value, torch.distributed.ProcessGroup) for value in values)


class StepHooks:
    """Hooks around the steps of optimizers: `before` and `after` are called once for a step of each
    of `optimizers`, whichever of those within it steps first.

    Args:
        before: called with the optimizer before it changes anything.
        after: called with it afterwards.
    """

    def __init__(
        self,
        optimizers: Sequence[Any],
        before: Callable[[Any], None] | None,
        after: Callable[[Any], None] | None = None,
    ) -> None:
        self._before, self._after = before, after
        self._within: dict[int, Any] = {}
        """Number of an optimizer that steps → the one that began the step."""
        self._handles: list[RemovableHandle] = []
        for index, optimizer in enumerate(optimizers):
            for one in notices_steps(optimizer, optimizers):
                self._hold(index, optimizer, one)

    def _hold(self, index: int, optimizer: Any, one: Any) -> None:
        def begin(*_: Any) -> None:
            if self._within.get(index, one) is one:
                self._within[index] = one
                if self._before is not None:
                    self._before(optimizer)

        def end(*_: Any) -> None:
            if self._within.get(index) is one:
                del self._within[index]
                if self._after is not None:
                    self._after(optimizer)

        self._handles.append(one.register_step_pre_hook(begin))
        self._handles.append(one.register_step_post_hook(end))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def notices_steps(optimizer: Any, others: Collection[Any] = ()) -> list[Any]:
    """List the optimizers in which a hook notices that `optimizer` steps. A wrapper that is made
    without torch's constructor calls no hooks, but the one within it does."""
    return [
        one
        for one in with_nested(optimizer, others)
        if isinstance(one, torch.optim.Optimizer) and "_optimizer_step_pre_hooks" in vars(one)
    ]


def forget_scaling(optimizers: Sequence[Any]) -> None:
    """Let optimizers forget what a gradient scaler tells them about one step."""
    for one in (one for optimizer in optimizers for one in with_nested(optimizer)):
        for name in ("grad_scale", "found_inf"):
            getattr(one, "__dict__", {}).pop(name, None)
