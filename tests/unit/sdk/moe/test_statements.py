"""Statements of ranks about their experts: what cannot be true stops before anything moves."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast._moe.statements import (
    Stack,
    Statement,
    check_all_held,
    encode_statement,
    read_statements,
)
from holdfast_core.errors import ProtocolError

LAYERS, EXPERTS, SEATS = 2, 4, 3
STACK = Stack(0, "w_in:exp_avg", "float32", (4, 8), "cpu")
HONEST = Statement(
    loads=((9, 4, 2, 2), (1, 1, 8, 3)),
    step_s=0.5,
    held=((0, 1, 2), (1, 2, 3)),
    stacks=(STACK,),
)
NEW = Statement(loads=((1,) * EXPERTS,) * LAYERS)


def read(*said: Statement | bytes) -> list[Statement]:
    encoded = [one if isinstance(one, bytes) else encode_statement(one) for one in said]
    return read_statements(encoded, layers=LAYERS, experts=EXPERTS, seats=SEATS)


def test_statements_of_one_model_are_read() -> None:
    said = [HONEST, NEW, replace(HONEST, held=((3,), (0,)))]
    assert read(*said) == said
    check_all_held(said, EXPERTS)
    with pytest.raises(ProtocolError, match=r"holds experts \[3\] of layer 0"):
        check_all_held([HONEST, NEW], EXPERTS)


@pytest.mark.parametrize(
    "lie",
    [
        {"loads": ()},
        {"loads": ((9, 4, 2, 2),)},
        {"loads": ((9, 4, 2, 2), (1, 1, 8))},
        {"loads": ((9, 4, 2, -2), (1, 1, 8, 3))},
        {"loads": ((9, 4, 2, 2), (1, 1, 8, 2**60))},
        {"step_s": -1.0},
        {"step_s": float("nan")},
        {"held": ((0, 1, 2),)},
        {"held": ((0, 1, 2), (4,))},
        {"held": ((0, 1, 2), (-1,))},
        {"held": ((0, 1, 2), (1, 1))},
        {"held": ((0, 1, 2, 3), (1,))},
        {"stacks": (replace(STACK, layer=2),)},
        {"stacks": (replace(STACK, dtype="float31"),)},
        {"stacks": (replace(STACK, shape=(4, -8)),)},
        {"stacks": (replace(STACK, shape=(2**40, 2**40)),)},
        {"stacks": (replace(STACK, shape=(8, 4)),)},
        {"stacks": (replace(STACK, dtype="int32"),)},
    ],
    ids=str,
)
def test_what_cannot_be_true_is_refused_with_the_rank(lie: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="rank 1's statement of its experts"):
        read(HONEST, replace(HONEST, **lie))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", encode_statement(HONEST)[:-3]])
def test_what_cannot_be_read_is_refused_with_the_rank(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="rank 1's statement of its experts cannot be read"):
        read(HONEST, data)
