from __future__ import annotations

from itertools import product

import pytest

from holdfast_core.errors import InvalidJobError
from holdfast_core.topology import Topology

SMALL = [
    Topology(dp=dp, ep=ep, tp=tp, pp=pp)
    for dp, tp, pp in product(range(1, 9), range(1, 4), range(1, 4))
    for ep in range(1, dp + 1)
    if dp % ep == 0
]


@pytest.mark.parametrize("topology", SMALL, ids=str)
def test_every_rank_has_its_own_coordinates_and_they_lead_back_to_it(topology: Topology) -> None:
    seen = set()
    for rank in range(topology.world_size):
        at = topology.coordinates(rank)
        assert (at.pp * topology.dp + at.dp) * topology.tp + at.tp == rank
        assert topology.rank_at(dp=at.dp, tp=at.tp, pp=at.pp) == rank
        assert at.ep == at.dp % topology.ep
        seen.add((at.dp, at.tp, at.pp))
    assert len(seen) == topology.world_size


@pytest.mark.parametrize("topology", SMALL, ids=str)
def test_replica_groups_partition_the_world_and_experts_refine_dense(topology: Topology) -> None:
    for replicas, size in (
        (topology.dense_replicas, topology.dp),
        (topology.expert_replicas, topology.dp // topology.ep),
    ):
        for rank in range(topology.world_size):
            group = replicas(rank)
            assert rank in group
            assert len(group) == size
            assert list(group) == sorted(set(group))
            assert all(replicas(other) == group for other in group)
            assert set(group) <= set(topology.dense_replicas(rank))


@pytest.mark.parametrize("topology", SMALL, ids=str)
def test_consecutive_dp_indices_hold_all_experts_between_them(topology: Topology) -> None:
    for first in range(0, topology.dp, topology.ep):
        ranks = [topology.rank_at(dp=first + i) for i in range(topology.ep)]
        assert {topology.coordinates(r).ep for r in ranks} == set(range(topology.ep))


def test_tp_varies_fastest_then_dp_then_pp() -> None:
    topology = Topology(dp=4, ep=2, tp=2, pp=2)
    assert topology.world_size == 16
    assert topology.dense_replicas(0) == (0, 2, 4, 6)
    assert topology.expert_replicas(0) == (0, 4)
    assert topology.expert_replicas(11) == (11, 15)


@pytest.mark.parametrize("topology", SMALL, ids=str)
def test_text_leads_back_to_the_topology(topology: Topology) -> None:
    assert Topology.parse(str(topology)) == topology


def test_canonical_text_names_all_degrees() -> None:
    assert str(Topology(dp=4, ep=4)) == "dp4·ep4·tp1·pp1"


@pytest.mark.parametrize("text", ["", "dp4", "dp4·ep4·tp1·pp1·x", "dp4.ep4.tp1.pp1"])
def test_other_text_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidJobError, match=r"cannot be read; write it like 'dp4·ep4·tp1·pp1'"):
        Topology.parse(text)


@pytest.mark.parametrize("degree", ["dp", "ep", "tp", "pp"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None])
def test_a_degree_that_is_not_a_positive_integer_is_refused(degree: str, value: object) -> None:
    degrees = {"dp": 2, degree: value}
    with pytest.raises(InvalidJobError, match=rf"{degree}={value!r} .*at least 1"):
        Topology(**degrees)  # type: ignore[arg-type]


@pytest.mark.parametrize("topology", SMALL, ids=str)
@pytest.mark.parametrize("experts", [1, 4, 6, 12])
def test_experts_are_shared_by_as_many_ranks_as_fit(topology: Topology, experts: int) -> None:
    for dp in range(1, topology.dp + 3):
        fitted = topology.fitted(dp * topology.tp * topology.pp, experts=experts)
        assert (fitted.dp, fitted.tp, fitted.pp) == (dp, topology.tp, topology.pp)
        fit = [ep for ep in range(1, topology.ep + 1) if dp % ep == 0 == experts % ep]
        assert fitted.ep == max(fit)


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(InvalidJobError, match="does not fit a training world of 3 ranks"):
        Topology(dp=2, ep=2, tp=2).fitted(3, experts=4)
    with pytest.raises(InvalidJobError, match="0 is no number of experts"):
        Topology(dp=2).fitted(2, experts=0)


def test_ep_that_does_not_divide_dp_is_refused_with_the_choices() -> None:
    with pytest.raises(InvalidJobError, match=r"ep=4 does not divide dp=6; .*\[1, 2, 3, 6\]"):
        Topology(dp=6, ep=4)


def test_a_world_of_another_size_is_refused_with_both_sizes() -> None:
    topology = Topology(dp=2, tp=2)
    topology.check_world(4)
    with pytest.raises(InvalidJobError, match=r"= 4 ranks, but the training world has 6"):
        topology.check_world(6)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(InvalidJobError, match=rf"no rank {rank}; its ranks are 0 to 3"):
        Topology(dp=4).coordinates(rank)
