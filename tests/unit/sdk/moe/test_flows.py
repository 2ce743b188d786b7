"""Flows of tokens to uneven copies: conserved, within capacity, local first, few messages; and the
same numbers on a device as on the host."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from benchmarks.experts import host_planner
from hypothesis import given
from hypothesis import strategies as st

from holdfast._moe.flows import copies_before, flows, rows_of, starts_of

Case = tuple[list[list[int]], list[list[int]], int]
"""(tokens [ranks][experts], copies [experts][ranks], nproc)"""


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
def cases(draw: st.DrawFn) -> Case:
    nproc, nodes = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    ranks, experts = nproc * nodes, draw(st.integers(1, 4))
    few = st.integers(0, 3)
    many = st.integers(0, 40)
    copies = [
        draw(st.lists(few, min_size=ranks, max_size=ranks).filter(any)) for _ in range(experts)
    ]
    tokens = [draw(st.lists(many, min_size=experts, max_size=experts)) for _ in range(ranks)]
    return tokens, copies, nproc


def flows_of(case: Case) -> list[torch.Tensor]:
    """The flows of each rank."""
    tokens, copies, nproc = case
    ends = copies_before(torch.tensor(copies))
    return [flows(torch.tensor(tokens), ends, rank, nproc) for rank in range(len(tokens))]


@given(cases())
def test_flows_are_those_of_plain_loops(case: Case) -> None:
    """And so all ranks agree: what one sends is what the other receives."""
    tokens, copies, nproc = case
    every = flows_of(case)
    for expert, held in enumerate(copies):
        routed = [of_rank[expert] for of_rank in tokens]
        expected = interval_flows(routed, held, nproc)
        assert [sent[expert].tolist() for sent, _ in every] == expected
        assert [received[expert].tolist() for _, received in every] == [
            list(column) for column in zip(*expected, strict=True)
        ]


@given(cases())
def test_tokens_are_conserved_shared_alike_and_kept_where_possible(case: Case) -> None:
    tokens, copies, _ = case
    ranks = len(tokens)
    every = flows_of(case)
    for expert, held in enumerate(copies):
        routed = [of_rank[expert] for of_rank in tokens]
        sent = np.array([of_rank[0][expert].tolist() for of_rank in every])
        assert sent.sum(axis=1).tolist() == routed
        taken = sent.sum(axis=0).tolist()
        for rank in range(ranks):
            share = Fraction(sum(routed) * held[rank], sum(held))
            assert abs(taken[rank] - share) < 1
            assert not taken[rank] or held[rank]
            assert sent[rank, rank] == min(routed[rank], taken[rank])
        messages = np.count_nonzero(sent) - np.count_nonzero(sent.diagonal())
        assert messages <= ranks - 1


@pytest.mark.parametrize("seed", range(8))
def test_flows_of_many_ranks_and_tokens_are_those_of_the_planner_on_the_host(seed: int) -> None:
    draw = np.random.default_rng(seed)
    for _ in range(40):
        nproc, nodes, experts = draw.integers(1, 9), draw.integers(1, 9), draw.integers(1, 65)
        ranks = nproc * nodes
        copies = draw.integers(0, 4, (experts, ranks)) * (draw.random((experts, ranks)) < 0.4)
        copies[np.arange(experts), draw.integers(0, ranks, experts)] += 1
        tokens = draw.integers(0, 10 ** draw.integers(1, 8), (ranks, experts))
        tokens *= draw.random((ranks, experts)) < draw.random()
        rank = int(draw.integers(ranks))
        sent, received = host_planner.flows(tokens, copies, rank, int(nproc))
        ends = copies_before(torch.from_numpy(copies))
        found = flows(torch.from_numpy(tokens), ends, rank, int(nproc))
        assert torch.equal(found, torch.from_numpy(np.stack([sent, received])))


def test_tokens_go_to_ranks_of_the_same_node_first() -> None:
    every = flows_of(([[8], [0], [8], [0]], [[0, 1, 0, 1]], 2))
    assert every[0][0].tolist() == [[0, 8, 0, 0]]
    assert every[2][0].tolist() == [[0, 0, 0, 8]]
    assert every[3][1].tolist() == [[0, 0, 8, 0]]


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_one_rank_keeps_everything(tokens: int) -> None:
    [(sent, received)] = flows_of(([[tokens]], [[3]], 1))
    assert sent.tolist() == received.tolist() == [[tokens]]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.randoms())
def test_rows_of_blocks_are_listed_in_any_order_of_the_blocks(
    lengths: list[int], rng: object
) -> None:
    starts = starts_of(torch.tensor(lengths))
    shuffled = list(range(len(lengths)))
    rng.shuffle(shuffled)  # type: ignore[attr-defined]  # random.Random
    listed = torch.tensor(shuffled)
    found = rows_of(starts[listed], torch.tensor(lengths)[listed], sum(lengths))
    first = [sum(lengths[:at]) for at in range(len(lengths))]
    assert found.tolist() == [
        first[block] + row for block in shuffled for row in range(lengths[block])
    ]
