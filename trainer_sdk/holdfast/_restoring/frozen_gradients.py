"""Backward passes that leave out the gradients of frozen units.

In a replay the gradients of frozen units are dropped before the optimizer sees them. A third of the
work of a step is to compute the gradients of weights, so a backward pass that does not compute the
frozen ones is shorter (MoEvement §3.3). `requires_grad_(False)` would change the bits of other
gradients, because kernels depend on it. `backward(inputs=...)` does not: the graph is that of
training, and autograd walks only the paths that lead to the tensors that are asked for.

Which paths are walked differs between ranks, because they hold different experts. A node with a
collective must run on all ranks or on none. So whatever is not an operation of torch's own runs as
in a plain pass, with all of its inputs: autograd functions of the program, which may communicate,
hooks on modules, compiled regions. Some frozen gradient is computed for that, and dropped at once,
so that ranks have gradients of the same parameters.
"""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holdfast._state.capture import Anchor, LiveState
from holdfast._state.dtensors import is_dtensor
from holdfast_core.snapshots.units import UnitKind

_log = logging.getLogger("holdfast")

_OF_TORCH = re.compile(r"\w+Backward\d+|CopyBackwards|CopySlices")
"""Class names of nodes that only compute. Those of autograd functions do not end with a number."""


class FrozenGradients:
    """Backward passes of one replay."""

    def __init__(self, live: LiveState) -> None:
        self._live = live
        self.left_out = False
        """Whether any pass has left out a gradient."""
        self._why_plain: str | None = None
        """Why passes must compute all gradients; empty if they need not; None if not known yet."""

    def backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None,
        retain_graph: bool | None,
        frozen: Collection[torch.Tensor],
    ) -> None:
        """Compute all gradients of `loss` but those of `frozen` parameters, or all of them if that
        is not possible. See `Session.backward`."""
        asked = self._asked(loss, frozen)
        if asked is None:
            torch.autograd.backward(loss, gradient, retain_graph=retain_graph)
            return
        inputs, dropped = asked
        before = [parameter.grad for parameter in dropped]
        torch.autograd.backward(
            loss, gradient, retain_graph=retain_graph, inputs=[*inputs, *dropped]
        )
        for parameter, held in zip(dropped, before, strict=True):
            parameter.grad = held
        self.left_out = True

    def _asked(
        self, loss: torch.Tensor, frozen: Collection[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
        """Return the tensors to ask for, and those of them whose gradients are to be dropped; None
        if nothing is left out."""
        candidates = self._candidates(frozen)
        if loss.grad_fn is None or not candidates:
            return None
        if self._why_plain is None:
            self._note(_why_all_are_awaited(candidates.values()))
        if self._why_plain:
            return None
        nodes = _children_first(loss.grad_fn)
        if any("CheckpointFunction" in type(node).__name__ for node in nodes):
            self._note("checkpoint() is called with use_reentrant=True")
            return None
        return _divide(nodes, candidates.keys())

    def _candidates(self, frozen: Collection[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the parameters of `frozen` whose gradients nobody misses, by `id`. Each optimizer
        keeps a gradient, on all ranks that of the same parameter: a scaler of losses refuses an
        optimizer without any."""
        kept: dict[int, tuple[bool, torch.Tensor]] = {}
        for anchor in self._live.anchors.values():
            if not anchor.parameter.requires_grad:
                continue
            of_all = anchor.place.unit.kind is not UnitKind.EXPERT
            if of_all or not kept.get(anchor.optimizer, (False,))[0]:
                kept[anchor.optimizer] = (of_all, anchor.parameter)
        ids = {id(parameter) for _, parameter in kept.values()}
        return {id(p): p for p in frozen if id(p) not in ids and not is_dtensor(p)}

    def _note(self, why_plain: str) -> None:
        self._why_plain = why_plain
        if why_plain:
            _log.info("gradients of frozen units are computed and dropped: %s", why_plain)


def can_be_left_out(anchor: Anchor) -> bool:
    """Whether a parameter belongs to one unit as a whole."""
    return anchor.index is None and anchor.span is None and not anchor.place.stacked


def _why_all_are_awaited(parameters: Collection[torch.Tensor]) -> str:
    """Return which wrapper waits for the gradients of all `parameters`. Its hooks cannot be seen
    from Python, and the model may not refer to it; so it is looked for among all objects."""
    if not (dist.is_available() and dist.is_initialized()):
        return ""
    kinds, ids = {DistributedDataParallel}, set(map(id, parameters))
    while more := {kind for one in kinds for kind in one.__subclasses__()} - kinds:
        kinds |= more
    wrappers = [one for one in gc.get_objects() if type(one) in kinds]  # a million objects
    if any(id(parameter) in ids for one in wrappers for parameter in one.parameters()):
        return "DistributedDataParallel waits for the gradient of each parameter"
    return ""


def _children_first(root: Any) -> list[Any]:
    """List the nodes of a graph, each after those to which it passes gradients."""
    found, seen = [], {root}
    stack: list[tuple[Any, Iterator[Any]]] = [(root, iter(root.next_functions))]
    while stack:
        node, rest = stack[-1]
        for child, _ in rest:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append((child, iter(child.next_functions)))
                break
        else:
            stack.pop()
            found.append(node)
    return found


def _divide(
    nodes: Sequence[Any], candidates: Collection[int]
) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
    """Divide the leaves of a graph into those to ask for, those to ask for although their gradients
    are dropped, and those to leave out.

    Args:
        nodes: see `_children_first`.
        candidates: `id` of each parameter whose gradient is not needed.

    Returns:
        The first two; None if nothing is left out.
    """
    asked: list[torch.Tensor] = []
    dropped: list[torch.Tensor] = []
    left_out: dict[Any, torch.Tensor] = {}
    way: dict[Any, Any] = {}
    """Node → the next one on a way to a leaf; a leaf → itself."""
    runs: set[Any] = set()

    def let_run(node: Any) -> None:
        while node not in runs:
            runs.add(node)
            if node in left_out:
                dropped.append(left_out.pop(node))
            node = way[node]

    for node in nodes:
        variable = getattr(node, "variable", None)
        if variable is not None:
            way[node] = node
            if id(variable) in candidates and not _has_hooks(node, variable):
                left_out[node] = variable
            else:
                asked.append(variable)
                runs.add(node)
            continue
        children = [child for child, _ in node.next_functions if child in way]
        must_run = _OF_TORCH.fullmatch(type(node).__name__) is None
        if children:
            way[node] = children[0]
        elif must_run:
            return None  # it leads to no leaf that could be asked for
        if must_run:
            for child in children:
                let_run(child)
        if not runs.isdisjoint(children):
            runs.add(node)
    return (asked, dropped) if left_out else None


def _has_hooks(node: Any, variable: torch.Tensor) -> bool:
    """Whether a hook waits for the gradient of a leaf, on the tensor or on its node."""
    if variable._backward_hooks or variable._post_accumulate_grad_hooks:
        return True
    for register in (node.register_hook, node.register_prehook):
        handle = register(_no_hook)
        hooks = handle.hooks_dict_ref()
        others = len(hooks) - 1
        handle.remove()
        if others:
            return True
    return False


def _no_hook(*_: Any) -> None:
    """Do nothing."""
