"""The arithmetic of optimizers gives the bits that the installed torch gives."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_core.experts.optimizer_updates import (
    CHUNK,
    apply,
    chunks,
    fused_multiply_add,
    narrow,
    widen,
)
from holdfast_core.experts.recompute import KnownOptimizer, Recipe

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
HARD = np.array(
    [0.0, -0.0, 1e-45, -1e-45, 1.1e-38, 1.2e-38, 3e38, -3e38, 1.0, -1.0, 1e-20, 1e19],
    dtype=np.float32,
)


FUSED = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="torch uses no fused multiply-add on this processor",
)


def values(rng: np.random.Generator, count: int, low: int = -20, high: int = 3) -> np.ndarray:
    """Values of many magnitudes, and some that are hard."""
    found = rng.standard_normal(count) * 10.0 ** rng.integers(low, high, count)
    found = found.astype(np.float32)
    hard = rng.random(count) < 0.02
    found[hard] = rng.choice(HARD, int(hard.sum()))
    return found


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    return found.tobytes() == wanted.tobytes()


def exact(value: Fraction) -> np.float32:
    """`value` as the nearest float32, from what is exact on both sides of it."""
    near = np.float32(float(value))
    with np.errstate(over="ignore"):
        around = [
            np.nextafter(near, np.float32(-np.inf)),
            near,
            np.nextafter(near, np.float32(np.inf)),
        ]
    finite = [x for x in around if np.isfinite(x)]
    return min(finite, key=lambda x: (abs(Fraction(float(x)) - value), int(x.view(np.int32)) & 1))


@settings(deadline=None, max_examples=400)
@given(floats, floats, floats)
def test_a_fused_multiply_add_rounds_once(a: float, b: float, c: float) -> None:
    wanted = Fraction(a) * Fraction(b) + Fraction(c)
    found = fused_multiply_add(*(np.array([x], dtype=np.float32) for x in (a, b, c)))[0]
    if abs(wanted) < Fraction(3 * 10**38):
        assert float(found) == float(exact(wanted))
    else:
        assert abs(float(found)) >= 2.9e38


@pytest.mark.parametrize("exponent", [0, -30, -120, -149])
def test_a_sum_that_is_just_off_the_middle_of_two_values_goes_to_the_nearer_one(
    exponent: int,
) -> None:
    """Rounded to float64 first, these sums lie exactly in the middle, and would go to even."""
    scale = Fraction(2) ** exponent
    a = np.float32(1 + 2**-12)
    for sign in (1, -1):
        # c + a·b = scale · (1 + 2^-24 ± 2^-70 …): needs more bits than float64 has.
        c = np.float32(float(scale))
        b = np.float32(float(scale * Fraction(2) ** -24 * (1 + sign * Fraction(2) ** -23)))
        wanted = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        found = fused_multiply_add(np.array([a]), np.array([b]), np.array([c]))[0]
        assert found == exact(wanted)


def test_doubtful_sums_are_rounded_as_in_exact_arithmetic() -> None:
    rng = np.random.default_rng(3)
    c = rng.integers(1 << 23, 1 << 24, 4000).astype(np.float32)
    a = np.full(4000, 1 + 2.0**-23, dtype=np.float32)
    b = np.where(rng.random(4000) < 0.5, 0.5, -0.5).astype(np.float32) * (1 - 2.0**-23)
    b = b.astype(np.float32)  # a·b = ±(0.5 - 2^-47): float64 rounds the sum to the middle
    found = fused_multiply_add(a, b, c)
    twice = (a.astype(np.float64) * b + c).astype(np.float32)
    assert (found != twice).any(), "this test shows nothing"
    for index in range(0, 4000, 37):
        wanted = Fraction(float(a[index])) * Fraction(float(b[index])) + Fraction(float(c[index]))
        assert found[index] == exact(wanted)


def test_bfloat16_is_rounded_as_torch_does() -> None:
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32)
    many = np.concatenate(
        [bits.view(np.float32), HARD, np.array([np.inf, -np.inf, np.nan], dtype=np.float32)]
    )
    wanted = torch.from_numpy(many).bfloat16()
    numbers = ~np.isnan(many)
    assert same(narrow(many)[numbers], wanted.view(torch.uint16).numpy()[numbers])
    assert np.isnan(widen(narrow(many)[~numbers])).all()
    assert same(widen(narrow(many))[numbers], wanted.float().numpy()[numbers])


def test_chunks_cover_everything_once() -> None:
    for count in (0, 1, CHUNK, CHUNK + 1):
        assert [i for part in chunks(count) for i in range(part.start, part.stop)] == [
            *range(count)
        ]


def recompute(
    recipe: Recipe, gradient: np.ndarray, weights: np.ndarray, *moments: np.ndarray
) -> None:
    none = np.zeros(0, dtype=np.float32)
    first, second = (*moments, none, none)[:2]
    apply(recipe, gradient, weights, first, second)


def compare_adamw(seed: int, count: int, *, fused: bool, steps: int = 12) -> tuple[bool, bool]:
    """Whether weights and moments stay those of torch, each step from torch's own state."""
    rng = np.random.default_rng(seed)
    lr, decay = float(10.0 ** rng.uniform(-6, 0)), float(rng.choice([0.0, 0.01, 0.3]))
    betas = (float(rng.choice([0.0, 0.4, 0.9, 0.99])), float(rng.choice([0.5, 0.95, 0.999])))
    parameter = torch.nn.Parameter(torch.from_numpy(values(rng, count)))
    optimizer = torch.optim.AdamW(
        [parameter], lr=lr, betas=betas, eps=1e-8, weight_decay=decay, fused=fused
    )
    right_weights = right_moments = True
    for step in range(1, steps + 1):
        gradient = values(rng, count) * (rng.random(count) < 0.9)
        gradient = widen(narrow(gradient.astype(np.float32)))
        state = optimizer.state[parameter]
        before = [parameter.detach().numpy().copy()]
        for key in ("exp_avg", "exp_avg_sq"):
            old = state.get(key)
            before.append(np.zeros(count, np.float32) if old is None else old.numpy().copy())
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        recipe = Recipe(
            epoch=1,
            base_step=step - 1,
            rule=KnownOptimizer.ADAMW,
            lr=lr,
            step=step,
            beta1=betas[0],
            beta2=betas[1],
            eps=1e-8,
            weight_decay=decay,
        )
        recompute(recipe, gradient, *before)
        state = optimizer.state[parameter]
        right_weights &= same(before[0], parameter.detach().numpy())
        right_moments &= same(before[1], state["exp_avg"].numpy())
        right_moments &= same(before[2], state["exp_avg_sq"].numpy())
    return right_weights, right_moments


@FUSED
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [16, 4096, 33_280])
def test_fused_adamw_gives_the_bits_of_torch(seed: int, count: int) -> None:
    assert compare_adamw(seed, count, fused=True) == (True, True)


@FUSED
@pytest.mark.parametrize("seed", range(6))
def test_the_moments_of_other_variants_of_adamw_are_those_of_torch(seed: int) -> None:
    assert compare_adamw(seed, 4096, fused=False)[1]


@FUSED
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("foreach", [False, True])
def test_sgd_gives_the_bits_of_torch(seed: int, foreach: bool) -> None:
    rng = np.random.default_rng(seed)
    momentum = float(rng.choice([0.0, 0.9]))
    nesterov = bool(momentum and rng.random() < 0.5)
    dampening = 0.0 if nesterov else float(rng.choice([0.0, 0.1]))
    lr, decay = float(10.0 ** rng.uniform(-4, 0)), float(rng.choice([0.0, 0.01]))
    count = int(rng.integers(1, 5000))
    parameter = torch.nn.Parameter(torch.from_numpy(values(rng, count)))
    optimizer = torch.optim.SGD(
        [parameter],
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        nesterov=nesterov,
        weight_decay=decay,
        foreach=foreach,
    )
    for step in range(12):
        gradient = values(rng, count)
        weights = parameter.detach().numpy().copy()
        buffer = optimizer.state[parameter].get("momentum_buffer")
        older = [] if buffer is None else [buffer.numpy().copy()]
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        if momentum and not older:
            continue
        recipe = Recipe(
            epoch=1,
            base_step=step,
            rule=KnownOptimizer.SGD,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            nesterov=nesterov,
            weight_decay=decay,
        )
        recompute(recipe, gradient, weights, *older)
        assert same(weights, parameter.detach().numpy())
        if momentum:
            assert same(older[0], optimizer.state[parameter]["momentum_buffer"].numpy())


def test_weights_that_are_not_exact_are_left_alone() -> None:
    recipe = Recipe(
        epoch=1, base_step=1, rule=KnownOptimizer.ADAMW, lr=0.1, weights=False, beta2=0.5
    )
    ones = [np.ones(8, dtype=np.float32) for _ in range(4)]
    recompute(recipe, *ones)
    assert (ones[1] == 1).all() and (ones[3] == 1).all()
