"""Uneven copies beside expert parallelism, and what follows from the figures of Lazarus."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.elastic.counted import (
    MODELS,
    NODES,
    SEATS,
    SHAPES,
    Model,
    busiest_with_copies,
    busiest_with_groups,
    loads_of,
    nodes_of_groups,
    ratios,
)
from benchmarks.papers.spot_trace import COPIES_MIN, STATE_BYTES
from benchmarks.policies.models import Gpt, Shape

from holdfast_core.elastic_experts.allocation import least_copies

GPT_S, GPT_M, GPT_L = MODELS
MIB = 1 << 20


def parameters(model: Model) -> int:
    shape = Shape(
        layers=model.layers, dim=model.dim, hidden=4 * model.dim, experts=model.experts, tied=True
    )
    with torch.device("meta"):
        return sum(one.numel() for one in Gpt(shape, model.experts).parameters())


@pytest.mark.parametrize(("model", "millions"), [(GPT_S, 521), (GPT_M, 1312), (GPT_L, 1715)])
def test_parameters_are_those_of_table_1(model: Model, millions: int) -> None:
    """521M, 1.3B and 1.7B: all twelve layers have experts, and the head shares its weights."""
    assert round(parameters(model) / 1e6) == millions


@pytest.mark.parametrize(("model", "mib"), [(GPT_S, 63), (GPT_L, 112)])
def test_the_state_of_an_expert_is_that_of_table_2(model: Model, mib: int) -> None:
    assert round(model.expert_parameters * STATE_BYTES / MIB) == mib


def test_moving_160_experts_in_7_6_seconds_takes_2_47_gb_a_second() -> None:
    """Table 2, GPT-L at step 200, over all nodes together; 2.36 if its 112 MB were 10⁶ bytes each,
    which the test above rules out."""
    moved_bytes = 160 * GPT_L.expert_parameters * STATE_BYTES
    assert moved_bytes / 7.6 / 1e9 == pytest.approx(2.47, abs=0.005)


def test_whole_groups_use_the_nodes_of_section_6() -> None:
    assert [nodes_of_groups(nodes, GPT_L.ep) for nodes in NODES] == [8, 8, 8, 4, 4, 4]
    for model in (GPT_S, GPT_M):
        assert [nodes_of_groups(nodes, model.ep) for nodes in NODES] == [10, 8, 8, 6, 6, 4]


def test_ds_begins_with_five_copies_of_gpt_s_and_two_of_gpt_l() -> None:
    assert nodes_of_groups(10, GPT_S.ep) // GPT_S.ep == 5
    assert nodes_of_groups(10, GPT_L.ep) // GPT_L.ep == 2


def test_five_nodes_do_not_have_seats_for_two_copies_of_gpt_l() -> None:
    assert 5 * SEATS == 30 < COPIES_MIN * GPT_L.experts == 32
    assert least_copies(GPT_L.experts, 5, SEATS, COPIES_MIN) == 1
    assert least_copies(GPT_L.experts, 6, SEATS, COPIES_MIN) == 2


def test_busiest_ranks_are_counted_by_hand() -> None:
    small = Model(name="small", dim=8, experts=4, ep=2, layers=2)
    assert [sum(tokens) for tokens in loads_of(small, "1:1")] == [960_000] * 2
    loads = [[3, 1, 1, 1], [1, 1, 1, 3]]
    assert busiest_with_groups(loads, 5, 2) == (4 + 4) / 2
    # Six seats on each of two nodes: six copies of the popular expert, two of the others.
    assert busiest_with_copies(loads, 2) == pytest.approx(3 + 3)
    assert set(ratios(small, "1:1")) == set(NODES)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("shape", SHAPES)
def test_copies_are_no_worse_than_groups_and_better_where_loads_or_nodes_are_uneven(
    model: Model, shape: str
) -> None:
    for nodes, ratio in ratios(model, shape).items():
        assert ratio > 0.98
        if (nodes % model.ep and nodes > 5) or shape != "1:1":
            assert ratio > 1.08


def test_the_table_of_the_documentation_is_what_is_computed() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "elastic.md").read_text()
    for model in (GPT_S, GPT_L):
        for shape in SHAPES:
            found = (f"{ratio:.2f}" for ratio in ratios(model, shape).values())
            assert f"| {shape} | {' | '.join(found)} |\n" in text
