"""Optimizers that keep more than plain tensors in their state, in the forms that published ones
have, and the tensor subclasses that quantized ones use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from round_trips import Make
from torch.utils._python_dispatch import return_and_correct_aliasing


class Codes(torch.Tensor):
    """A tensor in 8-bit codes with a factor for each block, in the form of torchao's
    `OptimState8bit`."""

    codes: torch.Tensor
    factors: torch.Tensor
    block: int

    @staticmethod
    def __new__(cls, codes: torch.Tensor, factors: torch.Tensor, block: int) -> Codes:
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=torch.float32, device=codes.device
        )

    def __init__(self, codes: torch.Tensor, factors: torch.Tensor, block: int) -> None:
        self.codes, self.factors, self.block = codes, factors, block

    @classmethod
    def of(cls, values: torch.Tensor, block: int) -> Codes:
        blocks = values.detach().reshape(-1, block)
        factors = blocks.abs().amax(1).clamp_min(1e-12) / 127
        codes = (blocks / factors[:, None]).round().to(torch.int8).view(values.shape)
        return cls(codes, factors, block)

    def values(self) -> torch.Tensor:
        blocks = self.codes.reshape(-1, self.block).float() * self.factors[:, None]
        return blocks.view(self.codes.shape)

    def __tensor_flatten__(self) -> tuple[list[str], list[int]]:
        return ["codes", "factors"], [self.block]

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, shape: Any, stride: Any) -> Codes:
        return cls(inner["codes"], inner["factors"], *context)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch passes the operator first
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            made = cls(args[0].codes, args[0].factors, args[0].block)
            return return_and_correct_aliasing(func, args, kwargs or {}, made)
        plain = [one.values() if isinstance(one, cls) else one for one in args]
        return func(*plain, **(kwargs or {}))


class Labelled(torch.Tensor):
    """A tensor around a single one of its own form, as the FP8 weights of FSDP2 are."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Labelled:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.held = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, shape: Any, stride: Any) -> Labelled:
        return cls(inner["held"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch passes the operator first
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def plain(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [plain(one) for one in value]
            return value.held if isinstance(value, cls) else value

        found = func(*map(plain, args), **(kwargs or {}))
        if func is torch.ops.aten.detach.default:
            return return_and_correct_aliasing(func, args, kwargs or {}, cls(found))
        return args[0] if func._schema.name.endswith("_") else found


class Stepping(torch.optim.Optimizer):
    """An optimizer that keeps a state made by `start`, and steps by `update`, which returns the
    step of a parameter.

    Args:
        start: makes the state of a parameter.
        update: changes the state of a parameter by its gradient.
    """

    def __init__(
        self,
        params: Any,
        start: Callable[[Any], dict[Any, Any]],
        update: Callable[[Any, torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__(params, {"lr": 0.05})
        self._start, self._update = start, update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is None:
                continue
            if not self.state[p]:
                self.state[p].update(self._start(p))
            p.sub_(self._update(self.state[p], p.grad), alpha=0.05)


def _rotated_start(p: torch.Tensor) -> dict[Any, Any]:
    """Bases as SOAP has them: column-major, as `torch.linalg` returns them."""
    sides = [torch.linalg.qr(torch.rand(n, n))[0].T for n in p.shape]
    return {"step": 0, "Q": sides, "GG": {"all": [torch.zeros(n, n) for n in p.shape]}}


def _rotated(state: Any, gradient: torch.Tensor) -> torch.Tensor:
    state["step"] += 1
    moved: torch.Tensor = gradient
    for dim, (basis, whole) in enumerate(zip(state["Q"], state["GG"]["all"], strict=True)):
        flat = gradient.movedim(dim, 0).reshape(gradient.shape[dim], -1)
        whole.lerp_(flat @ flat.T, 0.3)
        moved = torch.tensordot(moved, basis, dims=([0], [0]))
    if state["step"] % 2:
        state["Q"] = [
            torch.linalg.qr(whole @ basis + torch.eye(len(whole)))[0].T
            for whole, basis in zip(state["GG"]["all"], state["Q"], strict=True)
        ]
    return moved


def _queue(state: Any, gradient: torch.Tensor) -> torch.Tensor:
    """AdaShift's queue of gradients, which grows at first."""
    state["queue"].append(gradient.clone())
    return torch.stack(list(state["queue"])).mean(0)


def _tuples(state: Any, gradient: torch.Tensor) -> torch.Tensor:
    count: int = state["pair"][0]
    average: torch.Tensor = state["pair"][1][0]
    moved = average.mul(0.5).add(gradient)
    state["pair"] = (count + 1, (moved, None))
    state[0] = moved.square()
    return moved / count


def _coded(state: Any, gradient: torch.Tensor) -> torch.Tensor:
    momentum: torch.Tensor = state["exp_avg"].values() * 0.9 + gradient
    state["exp_avg"] = Codes.of(momentum, state["exp_avg"].block)
    state["list"][0] = Codes.of(momentum * 2, 2)
    return momentum


def _of_dtype(dtype: torch.dtype) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def update(state: Any, gradient: torch.Tensor) -> torch.Tensor:
        bits: torch.Tensor = state["kept"].view(torch.uint8)
        bits += 3
        state["kept"] = bits.view(dtype)
        return gradient * bits.flatten()[0]

    return update


def _kept(dtype: torch.dtype) -> Callable[[Any], dict[Any, Any]]:
    return lambda p: {"kept": torch.zeros(p.numel() * 4, dtype=torch.uint8).view(dtype)}


class CountsUnderText(torch.optim.SGD):
    """Counts in `state`, under a text, as MADGRAD does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        state: Any = self.state
        if "k" not in state:
            state["k"] = torch.tensor([0])
            state["ema"] = {}
        state["k"] += 1
        state["ema"] = {"short": float(state["k"])}
        self.param_groups[0]["lr"] = 0.05 / float(state["k"])
        super().step()


class ConstantColumns(torch.optim.Optimizer):
    """A moment that is stored transposed, so that its strides are not its parameter's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            if not state:
                state["moment"] = torch.zeros(p.shape[::-1]).permute(*reversed(range(p.ndim)))
                state["mean"] = torch.zeros(3, 2).T
            state["moment"].mul_(0.9).add_(p.grad)
            state["mean"] += p.grad.mean()
            p.sub_(state["moment"] * state["mean"].sum(), alpha=0.05)


ODD: dict[str, Make] = {
    "bases in lists": lambda p: Stepping(p, _rotated_start, _rotated),
    "a queue": lambda p: Stepping(p, lambda p: {"queue": deque(maxlen=3)}, _queue),
    "tuples, and a number as key": lambda p: Stepping(
        p, lambda p: {"pair": (1, (torch.zeros_like(p), None))}, _tuples
    ),
    "codes in tensor subclasses": lambda p: Stepping(
        p, lambda p: {"exp_avg": Codes.of(p * 0, 2), "list": [Codes.of(p * 0, 2), 1]}, _coded
    ),
    "complex numbers of 16 bits": lambda p: Stepping(
        p, _kept(torch.complex32), _of_dtype(torch.complex32)
    ),
    "values under texts": CountsUnderText,
    "transposed": ConstantColumns,
}
if hasattr(torch, "float4_e2m1fn_x2"):
    ODD["floats of 4 bits"] = lambda p: Stepping(
        p, _kept(torch.float4_e2m1fn_x2), _of_dtype(torch.float4_e2m1fn_x2)
    )
