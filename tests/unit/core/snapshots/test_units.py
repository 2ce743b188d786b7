from __future__ import annotations

from itertools import pairwise

import pytest

from holdfast_core.errors import InvalidJobError
from holdfast_core.snapshots.layouts import TensorRole
from holdfast_core.snapshots.units import TensorSize, UnitKey, UnitKind

IN_ORDER = (
    "embedding",
    "layer0/dense",
    "layer0/gate",
    "layer0/expert0",
    "layer0/expert2",
    "layer0/expert10",
    "layer2/dense",
    "layer10/gate",
    "head",
    "other",
)


@pytest.mark.parametrize("text", IN_ORDER)
def test_text_leads_back_to_the_unit(text: str) -> None:
    assert str(UnitKey.parse(text)) == text


def test_units_are_ordered_as_the_model_is_and_numbers_as_numbers() -> None:
    units = [UnitKey.parse(text) for text in IN_ORDER]
    backwards = units[::-1]
    assert sorted(backwards) == units
    assert all(a < b and b > a and a <= b and a != b for a, b in pairwise(units))


def test_a_unit_is_not_comparable_with_something_else() -> None:
    with pytest.raises(TypeError):
        UnitKey.parse("head") < "head"  # noqa: B015 - it raises


def test_fields_match_the_text() -> None:
    assert UnitKey.parse("layer3/expert5") == UnitKey(3, UnitKind.EXPERT, 5)
    assert UnitKey.parse("layer3/gate") == UnitKey(3, UnitKind.GATE)
    assert UnitKey.parse("head") == UnitKey(None, UnitKind.HEAD)


@pytest.mark.parametrize(
    "text", ["", "layer3", "layer3/expert", "layer/gate", "layer3/head", "gate", "layer-1/gate"]
)
def test_other_text_is_refused_with_examples(text: str) -> None:
    with pytest.raises(InvalidJobError, match="cannot be read; write it like 'layer3/expert5'"):
        UnitKey.parse(text)


@pytest.mark.parametrize(
    ("layer", "kind", "expert"),
    [
        (None, UnitKind.EXPERT, 1),
        (1, UnitKind.EXPERT, None),
        (1, UnitKind.GATE, 1),
        (None, UnitKind.DENSE, None),
        (1, UnitKind.HEAD, None),
        (None, UnitKind.OTHER, 0),
        (-1, UnitKind.GATE, None),
        (1, UnitKind.EXPERT, -1),
    ],
)
def test_fields_that_do_not_fit_the_kind_are_refused(
    layer: int | None, kind: UnitKind, expert: int | None
) -> None:
    with pytest.raises(InvalidJobError, match=f"unit of kind '{kind.value}'"):
        UnitKey(layer, kind, expert)


def test_only_experts_are_shared_by_expert_replicas() -> None:
    experts = {
        text: TensorSize(
            unit=UnitKey.parse(text),
            tensor="w",
            role=TensorRole.COMPUTE,
            dtype="float32",
            shape=(1,),
            nbytes=4,
        ).is_expert
        for text in IN_ORDER
    }
    assert {text for text, expert in experts.items() if expert} == {
        "layer0/expert0",
        "layer0/expert2",
        "layer0/expert10",
    }
