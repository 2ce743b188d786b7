"""A sharded model in a process that stays, although its world gets another size.

FSDP2 and DTensors divide a model over the ranks of one mesh for good. So in a world of another size
the script's own function builds the model again, over a mesh of the present ranks, and everything
else stays: the process with what it has imported, its data, and the optimizers, which get the new
parameters in place of the old ones.

The new parameters take over the values of the old ones, with the states of the optimizers, if this
rank has the same part of every tensor as before. That is so for HSDP, if replicas leave. Otherwise
the recovery line fills them (`holdfast._restoring.other_world`).

A world of the same size builds nothing: its meshes have new connections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holdfast._elastic import groups
from holdfast._state.collect import RandomGenerators
from holdfast._state.conventions import plain_name
from holdfast._state.dtensors import global_box, is_dtensor, raw, with_placement_of
from holdfast._state.nested import with_nested
from holdfast_core.errors import HoldfastError, InvalidJobError

Replaced = Mapping[int, torch.Tensor]
"""`id` of each parameter of the old model → parameter of the new one."""
_GROUPS_AND_STATE = ("param_groups", "state", "defaults")


class WorldSharded(nn.Module):
    """A model that is built again in each world of another size. `World.sharded` makes it; use it
    as the model.

    Attributes:
        module: the model of the present world, which `build` has returned.
    """

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self._build = build
        self.module = build()
        if next(self.module.parameters(), None) is None:
            raise InvalidJobError(
                "world.sharded(build): the model that build returns has no parameters"
            )
        self.stale = False
        """Whether the process groups of `module` are gone."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Compute what the model does."""
        return self.module(*inputs, **named)

    def check(self, optimizers: Sequence[Any]) -> None:
        """Check that `optimizers` can get the parameters of another world.

        Raises:
            InvalidJobError: one keeps parameters outside of its groups, or has others than those of
                the model.
        """
        own = {id(parameter) for parameter in self.module.parameters()}
        for one in _with_all_nested(optimizers):
            name = type(one).__qualname__
            if any(id(p) not in own for group in one.param_groups for p in group["params"]):
                raise InvalidJobError(
                    f"{name} holds parameters that the model of world.sharded does not have, so it "
                    f"cannot get those of a world of another size: give it the parameters of what "
                    f"world.sharded returns"
                )
            for attribute, value in vars(one).items():
                held = value if isinstance(value, list | tuple) else [value]
                if attribute not in _GROUPS_AND_STATE and any(id(each) in own for each in held):
                    raise InvalidJobError(
                        f"{name} keeps parameters in {attribute} besides its groups, so it cannot "
                        f"get those of a world of another size: use another optimizer, or leave "
                        f"any_size out, so that all processes restart when the size changes"
                    )

    def build_again(
        self, optimizers: Sequence[Any], on_replaced: Callable[[Replaced], None]
    ) -> str:
        """Build the model over the present ranks, and give its parameters to the optimizers. Random
        generators are afterwards as before. Collective.

        Args:
            on_replaced: called with the new parameters while the old ones still exist.

        Returns:
            Why the new parameters do not have the values of the old ones: this rank has another
            part of the model now. Empty if they have.

        Raises:
            InvalidJobError: the model cannot be built for this world, or has other parameters.
            HoldfastError, RuntimeError: this world has ended meanwhile.
        """
        generators, old = RandomGenerators.now(), self.module
        try:
            new = self._build()
        except Exception as error:
            if isinstance(error, HoldfastError) or groups.is_of_group(error):
                raise
            raise InvalidJobError(
                f"world.sharded(build): the model cannot be built over {dist.get_world_size()} "
                f"ranks: {type(error).__name__}: {error}. Let build divide it over any number of "
                f"ranks from minNodes to nodes, or raise minNodes"
            ) from error
        finally:
            generators.put_back()
        pairs = _pairs(old, new)
        replaced = {id(before): after for before, after in pairs}
        other = next(
            (
                name
                for name, pair in zip(_names(old), pairs, strict=True)
                if not _is_same_part(*pair)
            ),
            "",
        )
        for one in _with_all_nested(optimizers):
            _give(one, replaced, keeps=not other)
        if not other:
            _take_over(old, new, pairs)
        self.module, self.stale = new, False
        on_replaced(replaced)
        return f"this rank has another part of {other} than before" if other else ""


def _with_all_nested(optimizers: Sequence[Any]) -> list[Any]:
    found = chain.from_iterable(with_nested(each, optimizers) for each in optimizers)
    return [*{id(one): one for one in found}.values()]


def _names(model: nn.Module) -> list[str]:
    return [plain_name(name) for name, _ in model.named_parameters()]


def _pairs(old: nn.Module, new: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """The parameters of both models. Raises InvalidJobError if they are not alike."""
    before, after = _forms(old), _forms(new)
    for name in before.keys() | after.keys():
        if before.get(name) != after.get(name):
            raise InvalidJobError(
                f"world.sharded(build): in a world of another size {name} of the model is "
                f"{after.get(name, 'missing')}, and was {before.get(name, 'missing')} before: let "
                f"build return the same model in each world, and only divide it differently"
            )
    if list(before) != list(after):
        raise InvalidJobError(
            "world.sharded(build): in a world of another size the model has its parameters in "
            "another order: let build return the same model in each world"
        )
    return [*zip(old.parameters(), new.parameters(), strict=True)]


def _forms(model: nn.Module) -> dict[str, str]:
    return {
        plain_name(name): f"{one.dtype}{list(one.shape)}" for name, one in model.named_parameters()
    }


def _is_same_part(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether this rank has the same part of two tensors of equal shape."""
    box = global_box(before)
    return (
        is_dtensor(before) == is_dtensor(after)
        and box is not None
        and box == global_box(after)
        and raw(before).shape == raw(after).shape
    )


def _give(optimizer: Any, replaced: Replaced, *, keeps: bool) -> None:
    """Give an optimizer the new parameters, and with `keeps` their states, on the new mesh."""
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(id(each), each) for each in group["params"]]
    states = [*optimizer.state.items()]
    optimizer.state.clear()
    for parameter, state in states if keeps else ():
        after = replaced.get(id(parameter), parameter)
        optimizer.state[after] = {
            key: with_placement_of(after, raw(value)) if is_dtensor(value) else value
            for key, value in state.items()
        }


@torch.no_grad()
def _take_over(
    old: nn.Module, new: nn.Module, pairs: Sequence[tuple[nn.Parameter, nn.Parameter]]
) -> None:
    """Give the new model the values of the old one, which has the same parts."""
    for before, after in pairs:
        raw(after).copy_(raw(before))
        after.requires_grad_(before.requires_grad)
    buffers = dict(old.named_buffers())
    for name, buffer in new.named_buffers():
        if name in buffers:
            raw(buffer).copy_(raw(buffers[name]))
    modes = {name: module.training for name, module in old.named_modules()}
    for name, module in new.named_modules():
        module.training = modes.get(name, module.training)
