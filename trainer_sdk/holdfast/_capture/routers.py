"""Routers of known frameworks, whose hooks count tokens in place of the script.

A policy that chooses experts by tokens, or that measures what a recovery costs, needs to know how
many tokens went to which expert. Routers of frameworks say so in what they return, and experts of
transformers in what they are given. `FAMILIES` lists where; a new family is one line there.

A hook must not wait for a device, and must count each token once: neither in an evaluation, nor
again when a forward pass is repeated for its gradients. Where a script counts the tokens of a layer
itself, the hooks of that layer go away.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from holdfast._capture.capacity import Capacity
from holdfast._capture.strategy import CaptureStrategy
from holdfast._state.capture import LiveState
from holdfast._state.conventions import plain_name
from holdfast._state.dtensors import local_of

_log = logging.getLogger("holdfast")

_GIVEN = ("top_k_index", "router_indices")
"""Names of the argument by which experts of transformers are given the choices [tokens, K]."""
_ROUTER = re.compile(r"router|gat(e|ing)$", re.IGNORECASE)
"""What modules that choose experts are called, or their classes."""

Counter = Callable[[int, Sequence[float] | torch.Tensor, int | None], None]
"""Takes what `Session.count_tokens` takes."""


@dataclass(frozen=True, slots=True)
class Routed:
    """Where the tokens of one forward pass went; see `Session.count_tokens`."""

    counts: torch.Tensor | Sequence[int]
    assignments: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Modules that know where tokens go: those whose class, or one that it is derived from, has
    this name and is of this package."""

    package: str
    name: str
    routed: Callable[[Any, Any], Routed]
    """(module, what its forward returned) → where the tokens went."""
    capacity: str = ""
    """Attribute with the most tokens that an expert takes, for which the module also takes a tensor
    [experts]; empty if it has none."""


def chosen(index: torch.Tensor, experts: int, assignments: int | None = None) -> Routed:
    """Where tokens went, by the numbers of their experts, in any shape; `experts` stands for
    none, and `assignments` are as in `Routed`."""
    flat = local_of(index).reshape(-1).long()
    # Not torch.bincount, which waits for the device to learn how many numbers there are.
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device)
    return Routed(counts.scatter_add_(0, flat, torch.ones_like(flat))[:experts], assignments)


def admitted(places: torch.Tensor, top_k: int) -> Routed:
    """Where tokens went, by what is not zero in `places` [..., experts], where each token has
    chosen `top_k` experts, and may have been dropped by them."""
    rows = local_of(places)
    rows = rows.reshape(-1, rows.shape[-1])
    return Routed((rows != 0).sum(0), rows.shape[0] * top_k)


def routes_of_deepspeed(module: Any, output: Any) -> Routed:
    """Where tokens went, by what a gate of DeepSpeed returns: numbers of experts [top_k, tokens],
    below 0 for tokens that were dropped, or whether a token has a place [tokens, experts, C]."""
    if len(output) == 4:
        return admitted(output[2].any(-1), module.k)
    experts = output[-1].numel()
    return chosen(torch.where(output[3] < 0, experts, output[3]), experts, output[3].numel())


FAMILIES = (
    Family(
        package="holdfast",
        name="ExpertLayer",
        routed=lambda module, output: Routed(module.routed_E),
    ),
    Family(
        package="transformers",
        name="SwitchTransformersTop1Router",
        routed=lambda module, output: admitted(output[0], 1),
        capacity="expert_capacity",
    ),
    Family(
        package="transformers",
        name="Llama4Router",
        routed=lambda module, output: admitted(output[0], module.top_k),
    ),
    Family(
        package="transformers",
        name="JetMoeTopKGating",
        routed=lambda module, output: Routed(output[3]),
    ),
    Family(
        package="megatron",
        name="TopKRouter",
        # Where experts are padded to their capacity, the map has the padding, too.
        routed=lambda module, output: admitted(
            output[0] if module.config.moe_pad_expert_input_to_capacity else output[1], module.topk
        ),
    ),
    Family(package="deepspeed", name="TopKGate", routed=routes_of_deepspeed),
    Family(
        package="torchtitan",
        name="TokenChoiceTopKRouter",
        routed=lambda module, output: chosen(output[1], module.num_experts),
    ),
)
"""Routers whose output says where tokens go. All other models of transformers give the choices to
their experts, which are recognised by the name of that argument."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Hooked:
    """A module with a hook."""

    module: nn.Module
    layer: int
    capacity: str
    kept: Any = None
    """Value of the attribute `capacity` during a forward pass with another one."""
    has_trained: bool = False
    """Whether a forward pass outside of a backward pass recorded gradients."""
    handles: list[RemovableHandle] = field(default_factory=list)

    def counts_now(self) -> bool:
        """Whether the present forward pass is the first one of its tokens, and trains.

        Activation checkpointing repeats forward passes within a backward pass. If it is reentrant,
        only that pass records gradients. Compiled code counts nothing; see `Routers._hook`.
        """
        if torch.compiler.is_compiling():
            return False
        if not self.module.training or not torch.is_grad_enabled():
            return False
        if torch._C._current_graph_task_id() != -1:
            return not self.has_trained
        self.has_trained = True
        return True


class Routers:
    """The hooks on the routers of a model.

    Args:
        live: state of the model.
        strategy: captures its snapshots, and needs the tokens.
        count: called with the tokens of each forward pass that trains.
        capacity: gives the capacity of experts that make up for lost tokens.
    """

    def __init__(
        self, live: LiveState, strategy: CaptureStrategy, count: Counter, capacity: Capacity
    ) -> None:
        self._model, self._count, self._capacity = live.model, count, capacity
        self._needed, self._told = strategy.chooses_by_tokens, False
        self._soft = strategy.token_parts > 1
        """Whether sums of probabilities are counted, which no hook sees."""
        self._hooked: list[_Hooked] = []
        self._factors: dict[int, list[float]] = {}
        """Layer → factors of the present step for its experts; empty until they are needed."""
        self._layers_at = _layers_at(live.expert_layers())
        for path, module in live.model.named_modules() if not self._soft else ():
            if (layer := self._layer_of(path)) is not None:
                self._hook(module, layer)

    @property
    def layers(self) -> frozenset[int]:
        """Layers whose tokens are counted here."""
        return frozenset(one.layer for one in self._hooked)

    def give_way(self, layer: int) -> bool:
        """Remove the hooks of a layer, whose tokens the script counts; return whether there were
        any."""
        gone = [one for one in self._hooked if one.layer == layer]
        self._remove(gone)
        return bool(gone)

    def remove(self) -> None:
        """Remove all hooks."""
        self._remove(list(self._hooked))

    def on_save(self, counted: Collection[int]) -> None:
        """Note a save: experts may have another capacity in the next step. Say once whose tokens
        are counted by whom.

        Args:
            counted: layers whose tokens anybody has counted since the last save.
        """
        self._factors.clear()
        if not self._told:
            self._told = True
            self._tell(counted)

    def _tell(self, counted: Collection[int]) -> None:
        kinds = sorted({type(one.module).__qualname__ for one in self._hooked})
        if kinds:
            shown = ", ".join(kinds)
            _log.info("hooks on %s count the tokens of layers %s", shown, sorted(self.layers))
        if uncounted := sorted(self.layers - {*counted}):
            _log.info(
                "hooks have counted no tokens of layers %s yet: they count none in compiled code, "
                "unless the policy chooses experts by tokens",
                uncounted,
            )
        layers = {layer for found in self._layers_at.values() for layer in found}
        missing = sorted(layers - self.layers - {*counted})
        if missing:
            _log.log(
                logging.WARNING if self._needed else logging.INFO,
                "nobody counts the tokens of layers %s, %s: %s; call session.count_tokens(layer, "
                "counts) in each step",
                missing,
                "by which the policy chooses experts"
                if self._needed
                else "so what a recovery costs in tokens is not known",
                self._why_unknown(missing[0]),
            )

    def _why_unknown(self, layer: int) -> str:
        """Why no hook counts the tokens of a layer, with what may be its router."""
        if self._soft:
            return "order SoftCount adds up probabilities, which hooks do not see"
        shown = [
            f"{path} ({type(module).__qualname__})"
            for path, module in self._model.named_modules()
            if _ROUTER.search(path.rpartition(".")[2]) or _ROUTER.search(type(module).__qualname__)
            if self._layer_of(path) == layer
        ]
        return f"{', '.join(shown) or 'its router'} is not of a family that is known"

    def warn_of_capacity(self) -> None:
        """Say which layers cannot give more room to experts that went back in a recovery."""
        fixed = sorted(self.layers - {one.layer for one in self._hooked if one.capacity})
        if fixed:
            _log.warning(
                "experts went back in a recovery, and the routers of layers %s have no capacity "
                "that could differ between experts: they make up for their lost tokens only as far "
                "as tokens choose them",
                fixed,
            )

    def _layer_of(self, path: str) -> int | None:
        """Layer of the experts nearest to a module: its own, or those of the innermost module
        around it that has any. None if these are of several layers, or there are none."""
        at = plain_name(path)
        while at:
            if found := self._layers_at.get(at):
                return min(found) if len(found) == 1 else None
            at = at.rpartition(".")[0]
        return None

    def _hook(self, module: nn.Module, layer: int) -> None:
        family = _family_of(module)
        if family is not None:
            one = _Hooked(module=module, layer=layer, capacity=family.capacity)
            after: Callable[..., None] = partial(self._after_router, one, family)
        elif (at := _place_of_choices(module)) is not None:
            one = _Hooked(module=module, layer=layer, capacity="")
            after = partial(self._after_experts, one, at, _number_of_experts(module))
        else:
            return
        if self._needed:  # otherwise hooks divide no graph, and count nothing in compiled code
            after = _not_compiled(after)
        one.handles.append(module.register_forward_hook(after, with_kwargs=True))
        if one.capacity:
            before = partial(self._widen, one)
            one.handles.append(module.register_forward_pre_hook(before))
            back = partial(_put_back, one)
            one.handles.append(module.register_forward_hook(back, always_call=True))
        self._hooked.append(one)

    def _remove(self, hooked: Sequence[_Hooked]) -> None:
        for one in hooked:
            for handle in one.handles:
                handle.remove()
            self._hooked.remove(one)

    def _after_router(
        self, one: _Hooked, family: Family, module: Any, args: Any, named: Any, output: Any
    ) -> None:
        del args, named
        if one.counts_now():
            with torch.no_grad():
                routed = family.routed(module, output)
            self._count(one.layer, routed.counts, routed.assignments)

    def _widen(self, one: _Hooked, module: nn.Module, inputs: Any) -> None:
        """Give more room to experts of a layer that make up for lost tokens."""
        one.kept, room = getattr(module, one.capacity), self._capacity.room
        if room == 1.0 or one.kept is None or not module.training:
            return
        if not self._factors:  # of all layers, because counts are read once for all
            self._factors = {
                each.layer: self._capacity.factors(each.layer, _number_of_experts(each.module))
                for each in self._hooked
                if each.capacity
            }
        factors = torch.tensor(self._factors[one.layer], dtype=torch.float64, device="cpu")
        rooms = (factors * one.kept).floor().long()
        setattr(module, one.capacity, rooms.to(inputs[0].device, non_blocking=True))

    def _after_experts(
        self, one: _Hooked, at: int, experts: int, module: Any, args: Any, named: Any, output: Any
    ) -> None:
        del module, output
        if one.counts_now():
            index = next((named[name] for name in _GIVEN if name in named), None)
            with torch.no_grad():
                routed = chosen(args[at] if index is None else index, experts)
            self._count(one.layer, routed.counts, routed.assignments)


def _not_compiled(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook that is called as it is, between two graphs, where it is within compiled code."""

    def counts_tokens_for_holdfast(*args: Any) -> None:
        hook(*args)

    made: Callable[..., None] = torch.compiler.disable(counts_tokens_for_holdfast)
    return made


def _put_back(one: _Hooked, module: nn.Module, args: Any, output: Any) -> None:
    """Undo `Routers._widen`."""
    del args, output
    setattr(module, one.capacity, one.kept)


def _layers_at(layers: Mapping[str, int]) -> Mapping[str, set[int]]:
    """Path of each module with experts below it, or of its own → their layers."""
    found: dict[str, set[int]] = defaultdict(set)
    for name, layer in layers.items():
        at = plain_name(name)
        while at := at.rpartition(".")[0]:
            found[at].add(layer)
    return found


def _family_of(module: nn.Module) -> Family | None:
    for kind in type(module).__mro__:
        for family in FAMILIES:
            if (family.package, family.name) == (kind.__module__.partition(".")[0], kind.__name__):
                return family
    return None


def _place_of_choices(module: nn.Module) -> int | None:
    """Position of the choices among the arguments of experts; None for other modules."""
    if not _number_of_experts(module):
        return None
    names = [*inspect.signature(type(module).forward).parameters][1:]
    return next((at for at, name in enumerate(names) if name in _GIVEN), None)


def _number_of_experts(module: nn.Module) -> int:
    """Number of experts, over all ranks, of a router or of stacked experts; 0 for other modules."""
    stated = getattr(module, "num_experts", 0)
    stacks = [p.shape[0] for p in module.parameters(recurse=False) if p.ndim > 2]
    return max([stated if isinstance(stated, int) else 0, *stacks])
