"""The arithmetic of optimizers, exact to the bit, without torch.

MoEtion §5.2 lets a peer compute the state of an expert from its gradient instead of receiving it.
The result must equal the trainer's state, so each function here does what torch's kernels for
processors with a fused multiply-add do, in their order and with their roundings. The following was
found by comparison and is tested against the installed torch:

- `lerp`, `addcmul` and `add(alpha=)` end in one fused multiply-add; `addcdiv` has none.
- The square root of `torch.optim.AdamW(fused=True)` is rounded correctly, as numpy's is. That of
  the other variants may come from MKL, whose result is off by one in the last place for one value
  in six: their moments can be computed here, and their weights cannot.
- The last elements of a tensor whose length is no multiple of the vector's may be computed by
  other instructions, and so may everything on other processors and on GPUs. Results are always
  verified (see `holdfast_daemon.parity.recomputing`).

Everything is float32 and done in place, in chunks that fit the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from holdfast_core.experts.recompute import KnownOptimizer, Recipe

CHUNK = 1 << 15
"""Elements computed at a time, so that the temporaries stay in the L2 cache."""

Floats = npt.NDArray[np.float32]

_BELOW_MIDDLE = np.int64((1 << 29) - 1)
_MIDDLE = np.int64(1 << 28)
_SMALL = 2.0**-125


def fused_multiply_add(a: Floats, b: Floats | np.float32, c: Floats) -> Floats:
    """a · b + c, rounded once.

    The product of two float32 is exact in float64, and rounding the sum twice is rounding it once,
    unless float64's rounding put it exactly in the middle of two float32. Such sums, and those that
    become subnormal, are rounded to odd first (Boldo and Melquiond 2008).
    """
    with np.errstate(all="ignore"):
        product = np.multiply(a, b, dtype=np.float64)
        total: npt.NDArray[np.float64] = np.add(product, c, dtype=np.float64)
        doubtful = (total.view(np.int64) & _BELOW_MIDDLE) == _MIDDLE
        doubtful |= (np.abs(total) < _SMALL) & (total != 0)
        if doubtful.any():
            where = np.flatnonzero(doubtful)
            total[where] = _odd(product[where], c[where].astype(np.float64), total[where])
        return total.astype(np.float32)


def _odd(
    product: npt.NDArray[np.float64], c: npt.NDArray[np.float64], total: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """product + c rounded to odd, given the sum rounded to nearest."""
    part = total - product
    error = (product - (total - part)) + (c - part)
    even = (total.view(np.int64) & 1) == 0
    towards = np.where(error > 0, np.inf, -np.inf)
    return np.where((error != 0) & even, np.nextafter(total, towards), total)


def widen(bfloat16: npt.NDArray[np.uint16]) -> Floats:
    """The float32 values of bfloat16 bits."""
    return (bfloat16.astype(np.uint32) << 16).view(np.float32)


def narrow(values: Floats) -> npt.NDArray[np.uint16]:
    """The bits of the bfloat16 nearest to each value, ties to even. A NaN becomes the one that
    torch's vector instructions give; its scalar instructions give another."""
    bits = values.view(np.uint32)
    rounded = ((bits + ((bits >> 16) & 1) + np.uint32(0x7FFF)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0xFFFF), rounded)


def apply(recipe: Recipe, gradient: Floats, weights: Floats, first: Floats, second: Floats) -> None:
    """Apply one optimizer step to a chunk of a parameter.

    Args:
        gradient: the gradient as the optimizer used it.
        weights: the float32 parameter or master; left alone when the recipe cannot give the weights
            to the bit.
        first: the first moment, or SGD's momentum; empty without momentum.
        second: the second moment; empty for SGD.
    """
    match recipe.rule:
        case KnownOptimizer.ADAMW:
            adamw(recipe, gradient, weights, first, second)
        case KnownOptimizer.SGD:
            sgd(recipe, gradient, weights, first)


def chunks(count: int) -> Iterator[slice]:
    """Slices of at most `CHUNK` elements that cover `count` elements."""
    for start in range(0, count, CHUNK):
        yield slice(start, min(start + CHUNK, count))


def adamw(recipe: Recipe, gradient: Floats, weights: Floats, first: Floats, second: Floats) -> None:
    """One step of `torch.optim.AdamW` (torch/optim/adam.py, `_single_tensor_adam`; without
    amsgrad and maximize)."""
    beta1, beta2, step = recipe.beta1, recipe.beta2, recipe.step
    share = np.float32(1 - beta1)
    with np.errstate(all="ignore"):
        away = gradient - first
        if abs(share) < 0.5:
            first[:] = fused_multiply_add(away, share, first)
        else:
            first[:] = fused_multiply_add(away, share - np.float32(1), gradient)
        second *= np.float32(beta2)
        second[:] = fused_multiply_add(np.float32(1 - beta2) * gradient, gradient, second)
        if not recipe.weights:
            return
        if recipe.weight_decay:
            weights *= np.float32(1 - recipe.lr * recipe.weight_decay)
        spread = np.sqrt(second)
        spread /= np.float32((1 - beta2**step) ** 0.5)
        spread += np.float32(recipe.eps)
        moved = np.float32(-(recipe.lr / (1 - beta1**step))) * first
        weights += moved / spread


def sgd(recipe: Recipe, gradient: Floats, weights: Floats, momentum: Floats) -> None:
    """One step of `torch.optim.SGD` (torch/optim/sgd.py, `_single_tensor_sgd`; without maximize).
    It cannot do the first step with momentum, which has no older momentum to build on."""
    with np.errstate(all="ignore"):
        if recipe.weight_decay:
            gradient = fused_multiply_add(weights, np.float32(recipe.weight_decay), gradient)
        if recipe.momentum:
            momentum *= np.float32(recipe.momentum)
            share = np.float32(1 - recipe.dampening)
            momentum[:] = fused_multiply_add(gradient, share, momentum)
            gradient = (
                fused_multiply_add(momentum, np.float32(recipe.momentum), gradient)
                if recipe.nesterov
                else momentum
            )
        if recipe.weights:
            weights[:] = fused_multiply_add(gradient, np.float32(-recipe.lr), weights)
