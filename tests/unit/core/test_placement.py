from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from holdfast_core.errors import InvalidJobError
from holdfast_core.placement import StatePart, parts_to_transfer, place_replicas
from holdfast_core.topology import Topology

W, G, O = StatePart.WEIGHTS, StatePart.GRADIENTS, StatePart.OPTIMIZER  # noqa: E741
WORLDS = [
    Topology(dp=dp, pp=pp, tp=tp)
    for dp, pp, tp in product(range(1, 6), range(1, 5), (1, 2))
    if 2 <= dp * pp * tp <= 16
]


@pytest.mark.parametrize("topology", WORLDS, ids=str)
def test_every_worker_has_r_replicas_and_keeps_as_many(topology: Topology) -> None:
    for r in range(topology.world_size):
        placement = place_replicas(topology, r)
        for worker, peers in placement.replicas.items():
            group = set(topology.dense_replicas(worker)) - {worker}
            assert len(set(peers)) == len(peers) == r
            assert worker not in peers
            assert len(group.intersection(peers)) == min(r, topology.dp - 1)
            assert set(peers[: topology.dp - 1]) <= group
        kept = Counter(peer for peers in placement.replicas.values() for peer in peers)
        assert {w: kept[w] for w in placement.loads} == placement.loads
        assert set(placement.loads.values()) == {r}


@pytest.mark.parametrize("topology", WORLDS, ids=str)
def test_replicas_are_never_on_the_workers_own_node(topology: Topology) -> None:
    for per_node in (2, 3):
        nodes = [worker // per_node for worker in range(topology.world_size)]
        possible = topology.world_size - max(Counter(nodes).values())
        for r in range(possible + 1):
            placement = place_replicas(topology, r, node_of=nodes)
            for worker, peers in placement.replicas.items():
                assert len(set(peers)) == r
                assert all(nodes[peer] != nodes[worker] for peer in peers)


def test_the_group_of_a_worker_is_its_data_parallel_peers_and_not_its_pipeline() -> None:
    placement = place_replicas(Topology(dp=3, pp=2), 2)
    assert placement.replicas == {
        **{0: (1, 2), 1: (2, 0), 2: (0, 1)},
        **{3: (4, 5), 4: (5, 3), 5: (3, 4)},
    }
    assert placement.reason == (
        "2 replicas of each of 6 workers over dp3·ep1·tp1·pp2, 12 of 12 kept by data-parallel "
        "peers, at most 2 by one worker"
    )


def test_the_next_stage_keeps_what_data_parallel_peers_cannot() -> None:
    placement = place_replicas(Topology(dp=2, pp=3), 3)
    assert placement.replicas[0] == (1, 2, 4)
    assert placement.replicas[3] == (2, 5, 1)
    assert "6 of 18 kept by data-parallel peers" in placement.reason


def test_with_nodes_the_load_is_spread_over_the_other_nodes() -> None:
    placement = place_replicas(Topology(dp=4), 1, node_of=[0, 0, 1, 1])
    assert placement.replicas == {0: (2,), 1: (3,), 2: (0,), 3: (1,)}


@pytest.mark.parametrize(
    ("r", "nodes", "message"),
    [
        (4, None, r"4 replicas of worker 0 are not possible: 3 other workers"),
        (-1, None, r"-1 replicas of each worker"),
        (2, [0, 0, 0, 1], r"2 replicas of worker 0 are not possible: 1 other"),
        (1, [0, 1], r"node_of names 2 workers, dp4·ep1·tp1·pp1 has 4"),
    ],
)
def test_impossible_replicas_are_refused(r: int, nodes: list[int] | None, message: str) -> None:
    with pytest.raises(InvalidJobError, match=message):
        place_replicas(Topology(dp=4), r, node_of=nodes)


@pytest.mark.parametrize(("stage", "parts"), [(0, set()), (1, {O}), (2, {O, G}), (3, {O, G, W})])
def test_only_what_zero_shards_is_transferred(stage: int, parts: set[StatePart]) -> None:
    assert parts_to_transfer(stage, copies=2) == parts
    assert parts_to_transfer(stage, copies=1) == {O, G, W}


@pytest.mark.parametrize(("stage", "copies"), [(4, 1), (-1, 1), (0, 0)])
def test_unknown_stages_are_refused(stage: int, copies: int) -> None:
    with pytest.raises(InvalidJobError, match="give a stage from 0 to 3"):
        parts_to_transfer(stage, copies)
