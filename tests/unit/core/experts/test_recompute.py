"""Which experts travel as gradients, what a recipe says, and what of a slot can be recomputed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from recomputed_state import COUNT, PIECE, entry, layout_of

from holdfast_core.experts.recompute import (
    BESIDE_STATE,
    RECIPE_BYTES,
    KnownOptimizer,
    Recipe,
    Transfer,
    decode_recipe,
    encode_recipe,
    gradient_pieces,
    recomputables,
    state_bytes,
    state_entries,
    transfers,
)
from holdfast_core.snapshots.layouts import Layout, TensorRole
from holdfast_core.snapshots.units import UnitKey, UnitKind

EXPERTS = [UnitKey(layer, UnitKind.EXPERT, i) for layer in range(2) for i in range(4)]


def test_an_expert_of_two_snapshots_in_a_row_is_sent_as_a_gradient() -> None:
    """MoEtion algorithm 3, by hand."""
    how = transfers(EXPERTS[:3], EXPERTS[1:5], 1)
    assert how == {
        EXPERTS[1]: Transfer.GRADIENTS,
        EXPERTS[2]: Transfer.GRADIENTS,
        EXPERTS[3]: Transfer.STATE,
        EXPERTS[4]: Transfer.STATE,
    }


@given(st.sets(st.sampled_from(EXPERTS)), st.sets(st.sampled_from(EXPERTS)), st.integers(0, 3))
def test_only_what_both_snapshots_hold_and_one_step_apart(
    previous: set[UnitKey], current: set[UnitKey], steps: int
) -> None:
    how = transfers(previous, current, steps)
    assert how.keys() == current
    gradients = {unit for unit, sent in how.items() if sent is Transfer.GRADIENTS}
    assert gradients == (previous & current if steps == 1 else set())


def recipe(**changed: object) -> Recipe:
    values = {"epoch": 3, "base_step": 9, "rule": KnownOptimizer.ADAMW, "lr": 1 / 3, "step": 10}
    return Recipe(**{**values, **changed})  # type: ignore[arg-type]  # as the test gives them


def test_a_recipe_survives_its_encoding_to_the_bit() -> None:
    one = recipe(beta1=0.9, beta2=1 - 1e-16, eps=1e-300, weight_decay=0.1, weights=False)
    data = encode_recipe(one)
    assert len(data) == RECIPE_BYTES
    assert decode_recipe(data) == one
    longest = recipe(
        epoch=1 << 53, base_step=1 << 53, lr=-1.2345678901234567e-300, step=1 << 53,
        beta1=0.12345678901234567, beta2=0.12345678901234567, eps=1.2345678901234567e-300,
        weight_decay=1.2345678901234567e-300, momentum=1.2345678901234567e-300,
        dampening=1.2345678901234567e-300, nesterov=True, weights=False,
    )  # fmt: skip
    assert len(encode_recipe(longest)) == RECIPE_BYTES


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(RECIPE_BYTES),
        b"{}",
        b"\xff" * 64,
        b"[" * RECIPE_BYTES,
        encode_recipe(recipe()).replace(b"AdamW", b"Shampo"),
        encode_recipe(recipe()).replace(b'"step":10', b'"step":0'),
        encode_recipe(recipe(beta1=0.5)).replace(b"0.5", b"1.5"),
    ],
)
def test_invalid_recipes_read_as_none(data: bytes) -> None:
    assert decode_recipe(data) is None


def test_the_parts_of_a_parameter_are_found_in_a_layout() -> None:
    layout = layout_of(2)
    first, second = recomputables(layout)
    assert (first.weights.tensor, first.rounded and first.rounded.tensor) == ("w0:master", "w0")
    assert [one and one.tensor for one in (second.first, second.second, second.step)] == [
        "w1:exp_avg",
        "w1:exp_avg_sq",
        "w1:step",
    ]
    assert {e.role for e in layout.entries} - {e.role for e in state_entries(layout)} == {
        TensorRole.GRADIENT,
        TensorRole.RECIPE,
    }


def test_state_is_counted_by_experts_and_all_else_without_what_serves_protection() -> None:
    """Weights of 2 bytes, a master and two moments of 4, and a step of 4."""
    assert state_bytes(layout_of(3)) == (3 * (14 * COUNT + 4), 4 * 4000)


@pytest.mark.parametrize("unit", ["foo/bar", "", "layer0/expert" + "9" * 5000])
def test_a_unit_that_no_trainer_of_ours_would_send_counts_as_no_experts(unit: str) -> None:
    layout = small(("w", TensorRole.COMPUTE, "float32", 4))
    strange = replace(
        layout, entries=tuple(structs.replace(each, unit=unit) for each in layout.entries)
    )
    assert state_bytes(strange) == (0, 16)


def small(*entries: tuple[str, TensorRole, str, int]) -> Layout:
    """A layout of one expert with these tensors: name, role, dtype, elements."""
    made, end = [], 0
    for name, role, dtype, count in entries:
        made.append(entry("layer0/expert0", name, role, dtype, count, end))
        end += made[-1].nbytes
    return Layout(
        rank=0,
        world_size=1,
        topology="dp1",
        entries=tuple(made),
        extras_offset=end,
        extras_capacity=0,
        piece_bytes=PIECE,
    )


W = ("w", TensorRole.COMPUTE, "float32", 8)
G = ("w:gradient", TensorRole.GRADIENT, "float32", 8)
R = ("w:recipe", TensorRole.RECIPE, "uint8", RECIPE_BYTES)
MASTER = "w/master"


@pytest.mark.parametrize(
    ("entries", "count"),
    [
        ((W, G, R), 1),
        ((W, G), 0),
        ((W, R), 0),
        ((W, ("w:gradient", TensorRole.GRADIENT, "bfloat16", 8), R), 1),
        ((W, ("w:gradient", TensorRole.GRADIENT, "float32", 7), R), 0),
        ((W, ("w:gradient", TensorRole.GRADIENT, "uint8", 32), R), 0),
        ((("w", TensorRole.COMPUTE, "bfloat16", 16), G, R), 0),
        ((W, G, ("w:recipe", TensorRole.RECIPE, "uint8", 8)), 0),
        ((W, ("w:exp_avg", TensorRole.OPTIMIZER, "float32", 4), G, R), 0),
    ],
)
def test_tensors_that_are_not_alike_are_not_recomputed(
    entries: tuple[tuple[str, TensorRole, str, int], ...], count: int
) -> None:
    assert len(recomputables(small(*entries))) == count


def test_a_master_that_only_the_optimizer_has_is_found_with_its_parameter() -> None:
    (one,) = recomputables(
        small(
            ("w[3]", TensorRole.COMPUTE, "bfloat16", 8),
            (f"{MASTER}[3]", TensorRole.MASTER, "float32", 8),
            (f"{MASTER}:step", TensorRole.OPTIMIZER, "float32", 1),
            (f"{MASTER}[3]:gradient", TensorRole.GRADIENT, "float32", 8),
            (f"{MASTER}[3]:recipe", TensorRole.RECIPE, "uint8", RECIPE_BYTES),
        )
    )
    assert one.weights.tensor == f"{MASTER}[3]"
    assert one.rounded is not None and one.rounded.tensor == "w[3]"
    assert one.step is not None


def test_gradients_have_pieces_of_their_own_and_cost_a_seventh() -> None:
    layout = layout_of(2)
    pieces = gradient_pieces(layout)
    assert {unit.expert for unit in pieces} == {0, 1}
    for found in state_entries(layout):
        last = (found.offset + found.nbytes - 1) // PIECE
        assert all({found.offset // PIECE, last}.isdisjoint(of) for of in pieces.values())
    one = [e for e in layout.entries if e.unit == str(UnitKey(0, UnitKind.EXPERT, 1))]
    assert sum(e.nbytes for e in one if e.role not in BESIDE_STATE) == 14 * COUNT + 4
    assert sum(e.nbytes for e in one if e.role in BESIDE_STATE) == 2 * COUNT + RECIPE_BYTES
