"""`DistributedDataParallel` in a process that stays when its world changes.

DDP belongs to one process group for good, so each world gets a new one around the same module. Two
things differ between a new DDP and one that has trained, and both are dealt with here:

- Its constructor broadcasts the weights of rank 0. That would be a collective which processes that
  stay do not repeat, and the weights are equal already: they come from the seed, the recovery line
  or a replica.
- It sorts its gradients into buckets once, by the order in which they arrive in its first backward
  pass. Until then it reduces them in one piece, and with three ranks or more the sums are rounded
  in another order. So each world begins with a backward pass that computes nothing. From then on,
  every world has the same buckets, and training the bits of a run that nothing disturbed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast._state.collect import RandomGenerators
from holdfast_core.errors import InvalidJobError

Prepare = Callable[[DistributedDataParallel], None]
FirstPass = Callable[[DistributedDataParallel], torch.Tensor]
CHOSEN = ("process_group", "device_mesh", "init_sync", "module")
"""Arguments of DDP that follow from the world."""
IGNORED = "_ddp_params_and_buffers_to_ignore"
"""Attribute of a module by which torch is told what DDP leaves alone."""


class WorldDDP(nn.Module):
    """A module whose gradients are averaged over the ranks of the present world. `World.ddp` makes
    it; use it as a `DistributedDataParallel`.

    The first forward pass in each world makes the DDP, so all ranks have to run it, as they have to
    run every forward pass of a DDP. It is made again, too, when other parameters of the module
    train than before: layers that are unfrozen late are reduced from then on.

    Attributes:
        module: the wrapped module; its parameters have the names that they have in a DDP.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Callable[[], dist.ProcessGroup],
        prepare: Prepare | None,
        first_pass: FirstPass | None,
        options: dict[str, Any],
    ) -> None:
        super().__init__()
        if chosen := [name for name in CHOSEN if name in options]:
            raise InvalidJobError(
                f"world.ddp({', '.join(f'{name}=…' for name in chosen)}): these follow from the "
                f"world; leave them out, or give group=world.group(…)"
            )
        if "init_sync" not in inspect.signature(DistributedDataParallel).parameters:
            raise InvalidJobError(
                f"world.ddp needs DistributedDataParallel(init_sync=False), which torch "
                f"{torch.__version__} does not have: install torch 2.11 or newer, or leave `world` "
                f"out, so that all processes start again after a failure"
            )
        if options.get("static_graph") and first_pass is None:
            raise InvalidJobError(
                "world.ddp(static_graph=True): DDP learns the graph from its first pass in each "
                "world; give first_pass=, a function that computes a loss from any batch"
            )
        self.module = module
        self._group, self._prepare = group, prepare
        self._first_pass, self._options = first_pass, options
        self._made: _Made | None = None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Compute what the module does.

        Raises:
            UnreachableError: this process has left its groups.
            RuntimeError: a rank was lost.
        """
        made = self._present()
        if not made.ready and torch.is_grad_enabled():
            made.ready = True  # also when it fails: that ends this world
            if self._sorts_buckets():
                self._pass_first(made)
        return made.ddp(*inputs, **named)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add gradients up without reducing them, as `DistributedDataParallel.no_sync`."""
        with self._present().ddp.no_sync():
            yield

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of the present DDP; None if there is none yet. Any thread."""
        made = self._made
        return None if made is None else made.group

    def drop(self) -> None:
        """Forget the DDP of a world that this process leaves."""
        self._made = None

    # --- inside -----------------------------------------------------------------------------------

    def _sorts_buckets(self) -> bool:
        """Whether DDP will sort its buckets. One that looks for unused parameters keeps its first
        order, unless its graph is static."""
        find, static = "find_unused_parameters", "static_graph"
        return bool(self._options.get(static)) or not self._options.get(find)

    def _present(self) -> _Made:
        """The DDP of the present world, for the parameters that train now. Makes no collective."""
        trains = tuple(parameter.requires_grad for parameter in self.module.parameters())
        made = self._made
        if made is None or made.trains != trains:
            self._made = None  # its hooks go before those of the next one come
            made = self._made = self._make(trains)
        return made

    def _make(self, trains: tuple[bool, ...]) -> _Made:
        for name, parameter in self.module.named_parameters():
            if hasattr(parameter, "_in_backward_optimizers") or getattr(
                parameter, "_post_accumulate_grad_hooks", None
            ):
                raise InvalidJobError(
                    f"parameter {name!r} does something as soon as it has a gradient, such as a "
                    f"step of an optimizer: the first pass of a new world would do that, too. "
                    f"Step the optimizer after the backward pass"
                )
        body, group = _Body(self.module), self._group()
        ddp = DistributedDataParallel(body, process_group=group, init_sync=False, **self._options)
        if self._prepare is not None:
            self._prepare(ddp)
        return _Made(ddp=ddp, body=body, group=group, trains=trains)

    def _pass_first(self, made: _Made) -> None:
        """Let the DDP sort its buckets. Parameters, gradients, buffers and random generators are
        afterwards as before."""
        with _without_gradients(made.ddp):
            if self._first_pass is None:
                with made.body.computing_nothing():
                    made.ddp().backward()
            else:
                self._pass_of_script(made.ddp, self._first_pass)

    def _pass_of_script(self, ddp: DistributedDataParallel, first_pass: FirstPass) -> None:
        generators = RandomGenerators.now()
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        # With a static graph, DDP counts uses of parameters in one pass, and sorts by the next one.
        for _ in range(2 if self._options.get("static_graph") else 1):
            first_pass(ddp).backward()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        generators.put_back()


def sort_buckets(ddp: DistributedDataParallel) -> None:
    """Let a DDP that has just been made sort its buckets by a pass that computes nothing, if it
    sorts them at all. Collective."""
    if ddp.find_unused_parameters:
        return
    module = ddp.module
    ddp.module = body = _Body(module)
    try:
        with _without_gradients(ddp), body.computing_nothing():
            ddp().backward()
    finally:
        ddp.module = module


@contextmanager
def _without_gradients(ddp: DistributedDataParallel) -> Iterator[None]:
    """Let passes within the block reduce gradients, which are afterwards as before."""
    tensors = list(ddp.parameters())
    gradients = [parameter.grad for parameter in tensors]
    for parameter in tensors:
        parameter.grad = None
    reduces, ddp.require_backward_grad_sync = ddp.require_backward_grad_sync, True
    try:
        yield
    finally:
        ddp.require_backward_grad_sync = reduces
        for parameter, gradient in zip(tensors, gradients, strict=True):
            parameter.grad = gradient


@dataclass(kw_only=True, slots=True)
class _Made:
    """The DDP of one world."""

    ddp: DistributedDataParallel
    body: _Body
    group: dist.ProcessGroup
    trains: tuple[bool, ...]
    """Whether each parameter of the module trained when it was made."""
    ready: bool = False
    """Whether its first pass was run."""


class _Body(nn.Module):
    """What a DDP wraps: the module, or a pass through its parameters that computes nothing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._idle = False
        if ignored := getattr(module, IGNORED, None):
            setattr(self, IGNORED, [f"module.{name}" for name in ignored])

    @contextmanager
    def computing_nothing(self) -> Iterator[None]:
        self._idle = True
        try:
            yield
        finally:
            self._idle = False

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if not self._idle:
            return self.module(*inputs, **named)
        # Autograd goes backwards through what was computed last: through the last layers first, as
        # in a pass of the model, so that their buckets are reduced while others are computed.
        sparse = _sparse_gradients(self.module)
        zeros = [
            _Nothing.apply(parameter, id(parameter) in sparse)
            for parameter in self.module.parameters()
            if parameter.requires_grad
        ]
        return torch.stack([zero.to(zeros[0].device) for zero in zeros]).sum()


class _Nothing(torch.autograd.Function):
    """Zero, with a gradient of zeros towards the parameter."""

    @staticmethod
    def forward(context: Any, parameter: torch.Tensor, sparse: bool) -> torch.Tensor:
        context.save_for_backward(parameter)
        context.sparse = sparse
        return torch.zeros((), device=parameter.device)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (parameter,) = context.saved_tensors
        if context.sparse:  # as of an embedding of which no row was used
            nowhere = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
            nothing = parameter.new_empty((0, *parameter.shape[1:]))
            shape = parameter.shape
            return torch.sparse_coo_tensor(
                nowhere, nothing, shape, device=parameter.device, check_invariants=False
            ), None
        return torch.zeros_like(parameter), None


def _sparse_gradients(module: nn.Module) -> set[int]:
    """Ids of the parameters that get sparse gradients, by the rule of DDP."""
    return {
        id(layer.weight)
        for layer in module.modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
    }
