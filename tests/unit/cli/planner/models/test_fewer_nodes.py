"""Memory of a job with fewer nodes: two worlds at once, for every number of nodes."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from holdfast_cli.planner.models.fewer_nodes import (
    FewerNodesMemory,
    memory_of_sizes,
    slot_bytes_of_model,
    slot_bytes_of_state,
)
from holdfast_cli.planner.models.model_sizes import ModelSizes
from holdfast_core.job.parsing import MoETrainingJob, parse_job
from holdfast_core.protection.budget import inherited_ranks, predict
from holdfast_core.protection.groups import form_groups

MIB = 1024**2


def job(nodes: int, least: int, *, nproc: int = 2, **spec: Any) -> MoETrainingJob:
    return parse_job(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "MoETrainingJob",
            "metadata": {"name": "j"},
            "spec": {
                "nodes": nodes,
                "minNodes": least,
                "nprocPerNode": nproc,
                "parallelism": {"dp": nodes * nproc, "ep": nproc},
                "trainer": {
                    "template": {
                        "spec": {"containers": [{"name": "t", "image": "i", "command": ["t"]}]}
                    }
                },
                **spec,
            },
        }
    )


def figures(found: FewerNodesMemory) -> list[tuple[int, int, int, int]]:
    """Nodes, slots, and MiB of arenas and parity, of each situation."""
    return [
        (w.nodes, w.slots, w.memory.arena_bytes // MIB, w.memory.parity_bytes // MIB)
        for w in (found.whole, found.least, found.changing)
    ]


def test_a_rank_captures_more_and_a_node_holds_two_worlds_while_they_change() -> None:
    """120 MiB of state: 15 a rank with 4 nodes, 20 with 3, 30 with 2; two ranks a node."""
    small = job(4, 2)
    found = memory_of_sizes(small, slot_bytes_of_state(small, 15 * MIB))
    assert figures(found) == [
        (4, 3, 3 * 2 * 15, 2 * 2 * 5),
        (2, 3, 3 * 2 * 30, 2 * 2 * 30),
        # One rank of the third node is inherited by each of the two that are left.
        (2, 3, 3 * 2 * 20 + 3 * 2 * 30 + 20, 2 * 2 * 30),
    ]


def test_the_slots_of_the_smaller_world_are_those_that_fit_beside_the_old_ones() -> None:
    small = job(4, 3, snapshot={"memoryPerNode": 250 * MIB})
    found = memory_of_sizes(small, slot_bytes_of_state(small, 15 * MIB))
    assert [figure[:2] for figure in figures(found)] == [(4, 3), (3, 3), (3, 2)]
    assert found.changing.memory.total_bytes <= 250 * MIB


REDUNDANCIES = (
    {"type": "RAIM5"},
    {"type": "RAIM5", "raim5": {"groupSize": 2}},
    {"type": "RAIM6"},
    {"type": "Replication", "replication": {"replicas": 2}},
)


@pytest.mark.parametrize("redundancy", REDUNDANCIES, ids=str)
@pytest.mark.parametrize(
    ("nodes", "least", "pp"), [(11, 3, 1), (11, 4, 1), (11, 6, 1), (12, 4, 8), (12, 6, 8)]
)
def test_no_change_of_the_world_takes_more_than_was_computed(
    redundancy: dict[str, Any], nodes: int, least: int, pp: int
) -> None:
    """Every change between two sizes, its memory written out."""
    state = 4 * nodes * 15 * MIB
    parallelism = {"dp": 4 * nodes // pp, "pp": pp}
    this = job(nodes, least, nproc=4, redundancy=redundancy, parallelism=parallelism)
    losses = this.spec.redundancy.losses
    slot_bytes_of = slot_bytes_of_state(this, state // (4 * nodes))
    found = memory_of_sizes(this, slot_bytes_of)

    def groups(n: int) -> tuple[tuple[int, ...], ...]:
        domains = dict.fromkeys(range(n), "")
        return form_groups(domains, min(this.group_size, n), at_least=losses + 1).groups

    def settled(n: int) -> tuple[int, int]:
        memory = predict(
            slot_bytes_of(n),
            groups(n),
            4,
            slots=3,
            redundancy=this.spec.redundancy.type,
            replicas=losses,
        )
        return max(m.arena_bytes for m in memory), max(m.parity_bytes for m in memory)

    for before, after in product(this.spec.node_counts, repeat=2):
        if before == after:
            continue
        lost = min(max(before - after, 0), losses)
        inherited = max(inherited_ranks(len(group), lost, 4) for group in groups(before))
        arenas = settled(before)[0] + settled(after)[0] + inherited * slot_bytes_of(before)[0]
        parity = max(settled(before)[1], settled(after)[1])
        assert arenas <= found.changing.memory.arena_bytes
        assert parity <= found.changing.memory.parity_bytes
        assert arenas + parity <= found.changing.memory.total_bytes


def test_a_model_is_divided_as_trainers_do_it_at_each_size() -> None:
    this = job(4, 2, nproc=4, parallelism={"dp": 16, "ep": 4})
    sizes = ModelSizes.even(layers=2, experts=8, expert_bytes=96 * MIB, other_bytes=512 * MIB)
    slot_bytes_of = slot_bytes_of_model(this, sizes)
    for nodes in (2, 3, 4):
        slots = slot_bytes_of(nodes)
        assert len(slots) == 4 * nodes
        assert sum(slots) == pytest.approx(2048 * MIB, rel=0.02)
        assert max(slots) < 1.1 * 2048 * MIB / len(slots)


def test_slots_of_a_policy_that_leaves_experts_out_hold_whole_experts_and_their_gradients() -> None:
    sizes = ModelSizes.even(layers=1, experts=3, expert_bytes=70 * MIB, other_bytes=4 * MIB)
    policy = {"type": "Selective", "selective": {}}
    more = {"redundancy": {"type": "Replication"}, "parallelism": {"dp": 4}}
    whole = slot_bytes_of_model(job(4, 2, nproc=1, snapshot={"policy": policy}, **more), sizes)
    assert sorted(whole(4)) == [4 * MIB, 70 * MIB, 70 * MIB, 70 * MIB]
    policy = {"type": "Selective", "selective": {"recompute": True}}
    sent = slot_bytes_of_model(job(4, 2, nproc=1, snapshot={"policy": policy}, **more), sizes)
    assert sorted(sent(4)) == [4 * MIB, 80 * MIB, 80 * MIB, 80 * MIB]
