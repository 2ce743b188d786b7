"""Flows of tokens to uneven copies: conserved, within capacity, local first, few messages."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.elastic_experts.dispatching import flows


def interval_flows(tokens: list[int], copies: list[int], nproc: int) -> list[list[int]]:
    """Algorithm 1 for one expert, as plain loops: D[i][j], tokens from rank i to rank j."""
    ranks, total, held = range(len(tokens)), sum(tokens), sum(copies)
    cum = [sum(copies[:j]) for j in range(len(copies) + 1)]
    room = [cum[j + 1] * total // held - cum[j] * total // held for j in ranks]
    surplus = list(tokens)
    found = [[0] * len(tokens) for _ in ranks]

    def send(i: int, j: int) -> None:
        sent = min(surplus[i], room[j])
        found[i][j] += sent
        surplus[i] -= sent
        room[j] -= sent

    for i in ranks:
        send(i, i)
    for near in (True, False):
        for i in ranks:
            for j in ranks:
                if not near or i // nproc == j // nproc:
                    send(i, j)
    return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], int]:
    """(tokens [ranks][experts], copies [experts][ranks], nproc)"""
    nproc, nodes = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    ranks, experts = nproc * nodes, draw(st.integers(1, 4))
    few = st.integers(0, 3)
    many = st.integers(0, 40)
    copies = [
        draw(st.lists(few, min_size=ranks, max_size=ranks).filter(any)) for _ in range(experts)
    ]
    tokens = [draw(st.lists(many, min_size=experts, max_size=experts)) for _ in range(ranks)]
    return tokens, copies, nproc


@given(cases())
def test_flows_are_those_of_plain_loops(
    case: tuple[list[list[int]], list[list[int]], int],
) -> None:
    """And so all ranks agree: what one sends is what the other receives."""
    tokens, copies, nproc = case
    ranks = len(tokens)
    every = [flows(np.array(tokens), np.array(copies), rank, nproc) for rank in range(ranks)]
    for expert, held in enumerate(copies):
        routed = [of_rank[expert] for of_rank in tokens]
        expected = interval_flows(routed, held, nproc)
        assert [sent[expert].tolist() for sent, _ in every] == expected
        assert [received[expert].tolist() for _, received in every] == [
            list(column) for column in zip(*expected, strict=True)
        ]


@given(cases())
def test_tokens_are_conserved_shared_alike_and_kept_where_possible(
    case: tuple[list[list[int]], list[list[int]], int],
) -> None:
    tokens, copies, nproc = case
    ranks = len(tokens)
    every = [flows(np.array(tokens), np.array(copies), rank, nproc) for rank in range(ranks)]
    for expert, held in enumerate(copies):
        routed = [of_rank[expert] for of_rank in tokens]
        sent = np.array([of_rank[0][expert] for of_rank in every])
        assert sent.sum(axis=1).tolist() == routed
        taken = sent.sum(axis=0).tolist()
        for rank in range(ranks):
            share = Fraction(sum(routed) * held[rank], sum(held))
            assert abs(taken[rank] - share) < 1
            assert not taken[rank] or held[rank]
            assert sent[rank, rank] == min(routed[rank], taken[rank])
        messages = np.count_nonzero(sent) - np.count_nonzero(sent.diagonal())
        assert messages <= ranks - 1


def test_tokens_go_to_ranks_of_the_same_node_first() -> None:
    tokens, copies = np.array([[8], [0], [8], [0]]), np.array([[0, 1, 0, 1]])
    assert flows(tokens, copies, 0, 2)[0].tolist() == [[0, 8, 0, 0]]
    assert flows(tokens, copies, 2, 2)[0].tolist() == [[0, 0, 0, 8]]
    assert flows(tokens, copies, 3, 2)[1].tolist() == [[0, 0, 8, 0]]


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_one_rank_keeps_everything(tokens: int) -> None:
    sent, received = flows(np.array([[tokens]]), np.array([[3]]), 0, 1)
    assert sent.tolist() == received.tolist() == [[tokens]]
