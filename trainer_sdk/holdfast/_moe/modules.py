"""Experts in seats that are modules of any kind.

A module is made once for each expert of this rank, and its parameters are stacked. To compute the
rows of a seat, one module without memory of its own takes the seat's slices of the stacks. So
experts of any class move between ranks as the built-in ones do, without being made again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import xxhash
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast._moe.seats import ExpertSeats
from holdfast._state.dtensors import is_dtensor
from holdfast_core.errors import InvalidJobError

_log = logging.getLogger("holdfast")
MakeExpert = Callable[[int], nn.Module]
"""Makes the expert of a number."""
_TRIAL_ROWS = 2
_COLLECTIVES = frozenset(
    {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem"}
)
"""Namespaces of torch's operators that communicate."""


class SeatedModules(ExpertSeats):
    """The experts in the seats of one rank, which are modules of one kind.

    Persistent buffers of an expert are stacked like its parameters, as parameters without a
    gradient, and move with it. Other buffers must be the same for all experts.

    Args:
        make: makes the expert of a number; it may draw from torch's generators. An expert maps rows
            [M, D] to rows [M, D], each by itself. Names, shapes and dtypes of its tensors are those
            of expert 0.
        experts: the experts in the first seats; the other seats are empty.
        seats: number of seats S.
        dim: width D of tokens.
        seed: determines, with its number, what the generators give an expert, so all copies of it
            are equal.

    Raises:
        InvalidJobError: experts are different from each other in what must be equal, share tensors,
            are sharded, communicate, change their buffers, or return rows of another shape.
    """

    def __init__(
        self, make: MakeExpert, experts: Sequence[int], seats: int, *, dim: int, seed: str
    ) -> None:
        super().__init__()
        self.set_seats(experts, seats)
        # Every rank makes expert 0 and compares with it, so no communication is needed.
        first = _made(make, 0, seed)
        tensors = _tensors_of(first)
        _check_expert(first, dim)
        # Stack the tensors of this rank's experts.
        self._tied = _tied_names(first)
        """Name of each tensor in an expert → the name under which it is stacked."""
        stacks = {
            name: torch.zeros((seats, *one.shape), dtype=one.dtype, device=one.device)
            for name, one in tensors.items()
            if self._tied[name] == name and not _is_constant(first, name)
        }
        for expert, seat in self.seat_of.items():
            module = first if expert == 0 else _made(make, expert, seed)
            own = _tensors_of(module)
            _check_alike(expert, module, own, first, tensors)
            with torch.no_grad():
                for name, stack in stacks.items():
                    stack[seat] = own[name]
        # Register them under the names that they have in an expert.
        self._stacked = tuple(stacks)
        for name, stack in stacks.items():
            trains = tensors[name].requires_grad
            owner, key = _owner(self, name)
            owner.register_parameter(key, nn.Parameter(stack, requires_grad=trains))
        self._constant = tuple(name for name in tensors if _is_constant(first, name))
        for name in self._constant:
            owner, key = _owner(self, name)
            owner.register_buffer(key, tensors[name], persistent=False)
        # Not registered, as its tensors are none.
        self._template = (first.to("meta"),)

    def train(self, mode: bool = True) -> SeatedModules:
        """Set the mode of the experts, too."""
        self._template[0].train(mode)
        return super().train(mode)

    def forward(
        self, x_MD: torch.Tensor, seat_rows: Sequence[int], rows_S: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the answers of the experts, one seat after the other.

        Args:
            x_MD: [M, D], the rows for the first seat, then for the second, and so on.
            seat_rows: number of rows for each seat.
            rows_S: not needed, since modules know nothing of seats; see `SeatedExperts`.
        """
        shared = {name: self.get_buffer(name) for name in self._constant}
        slices = {name: self.get_parameter(name).unbind() for name in self._stacked}
        answers = [self.no_rows(x_MD)]
        for seat, rows_MD in enumerate(x_MD.split(list(seat_rows))):
            if rows_MD.shape[0]:
                own = {
                    name: shared[at] if at in shared else slices[at][seat]
                    for name, at in self._tied.items()
                }
                answer = functional_call(self._template[0], own, (rows_MD,), tie_weights=False)
                answers.append(answer.to(x_MD.dtype))
        return torch.cat(answers)


# --- making experts -------------------------------------------------------------------------------


def _made(make: MakeExpert, expert: int, seed: str) -> nn.Module:
    """Make an expert whose random numbers depend only on `seed` and its number."""
    drawn = xxhash.xxh3_64_intdigest(f"{seed}/{expert}".encode()) >> 1
    cuda = torch.cuda.is_initialized()
    with torch.random.fork_rng([torch.cuda.current_device()] if cuda else []):
        torch.default_generator.manual_seed(drawn)
        if cuda:
            torch.cuda.manual_seed(drawn)
        module = make(expert)
    if not isinstance(module, nn.Module):
        raise InvalidJobError(
            f"expert {expert} is a {type(module).__qualname__}: the function that makes experts "
            f"must return a torch module"
        )
    return module


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers by name; those that are tied have each of their names."""
    named = dict[str, torch.Tensor](module.named_parameters(remove_duplicate=False))
    return named | dict(module.named_buffers(remove_duplicate=False))


def _tied_names(module: nn.Module) -> dict[str, str]:
    """Name of each tensor → the first name of the same tensor."""
    first = dict[int, str]()
    return {name: first.setdefault(id(one), name) for name, one in _tensors_of(module).items()}


def _is_constant(module: nn.Module, name: str) -> bool:
    """Whether `name` is a buffer that is not persistent."""
    path, _, key = name.rpartition(".")
    return key in module.get_submodule(path)._non_persistent_buffers_set


def _owner(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module below `root` that has the tensor `name`, and its name there; make it if
    there is none."""
    *path, key = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    return root, key


# --- what experts must be like --------------------------------------------------------------------


def _check_alike(
    expert: int,
    module: nn.Module,
    own: dict[str, torch.Tensor],
    first: nn.Module,
    of_first: dict[str, torch.Tensor],
) -> None:
    """Refuse an expert whose state is not like that of expert 0, or is shared with it."""
    if expert == 0:
        return
    for name, mine, other in _differing(own, of_first):
        raise InvalidJobError(
            f"expert {expert} has {mine} as {name}, and expert 0 {other}: experts of one layer "
            f"change seats, so all of them need tensors of the same names, shapes and dtypes; give "
            f"experts of another form a layer of their own"
        )
    if _tied_names(module) != _tied_names(first):
        raise InvalidJobError(
            f"expert {expert} uses one tensor in several places, and expert 0 does so in others: "
            f"make all experts of a layer by the same code"
        )
    for name, one in own.items():
        constant = _is_constant(module, name)
        if one is of_first[name] and not constant:
            raise InvalidJobError(
                f"{name} of expert {expert} is the tensor of expert 0: experts lie on different "
                f"ranks and cannot share tensors, so make a new module for each number"
            )
        if constant and not torch.equal(one, of_first[name]):
            raise InvalidJobError(
                f"buffer {name} of expert {expert} is not that of expert 0, and not persistent, so "
                f"it would not move with its expert: register it with persistent=True"
            )


def _differing(
    own: dict[str, torch.Tensor], of_first: dict[str, torch.Tensor]
) -> Iterator[tuple[str, str, str]]:
    """Names of tensors that have another form in the two experts, and what they are in both."""
    for name in sorted(own.keys() | of_first.keys()):
        mine, other = _form(own.get(name)), _form(of_first.get(name))
        if mine != other:
            yield name, mine, other


def _form(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "nothing"
    trained = ", trained" if tensor.requires_grad else ""
    return f"{tensor.dtype} {list(tensor.shape)}{trained}"


class _NoCollectives(TorchDispatchMode):
    """Raises InvalidJobError instead of communicating."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in _COLLECTIVES:
            raise InvalidJobError(
                f"the forward pass of an expert communicates ({func}): ranks hold different "
                f"experts and compute them without each other, so one would wait for ever; build "
                f"experts that lie on one rank as a whole, without tensor parallelism, "
                f"synchronized norms or wrappers such as DDP and FSDP"
            )
        return func(*args, **(kwargs or {}))


def _check_expert(module: nn.Module, dim: int) -> None:
    """Refuse an expert that cannot be seated, by what it is and by a trial with rows of zeros."""
    tensors = _tensors_of(module)
    for name, one in tensors.items():
        if is_dtensor(one):
            raise InvalidJobError(
                f"{name} of an expert is sharded: every seat holds a whole expert, so build "
                f"experts without tensor parallelism and FSDP"
            )
    if not any(one.is_floating_point() for one in tensors.values()):
        raise InvalidJobError("an expert without parameters: there is nothing to seat")
    like = next(one for one in tensors.values() if one.is_floating_point())
    rows = torch.zeros(_TRIAL_ROWS, dim, dtype=like.dtype, device=like.device)
    before = {name: one.clone() for name, one in module.named_buffers()}
    try:
        with torch.no_grad(), torch.random.fork_rng([]), _NoCollectives():  # type: ignore[no-untyped-call]
            answer = module(rows)
    except InvalidJobError:
        raise
    except Exception as error:  # raised by the user's class, which may need a device
        _log.info("an expert was not tried (%s: %s)", type(error).__name__, error)
        return
    if not isinstance(answer, torch.Tensor) or answer.shape != rows.shape:
        shown = (
            list(answer.shape) if isinstance(answer, torch.Tensor) else type(answer).__qualname__
        )
        raise InvalidJobError(
            f"an expert returned {shown} for rows {list(rows.shape)}: it must return one row "
            f"of the same width for each"
        )
    buffers = module.named_buffers()
    if changed := [name for name, one in buffers if not torch.equal(one, before[name])]:
        raise InvalidJobError(
            f"the forward pass of an expert changes its buffers {changed}: copies of the expert "
            f"get different tokens and would become different; use a norm without running "
            f"statistics, and keep buffers as they are"
        )
