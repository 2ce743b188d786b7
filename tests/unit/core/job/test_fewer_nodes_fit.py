"""Which jobs may go on with fewer nodes: those of which every size from `minNodes` on is a job."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.parsing import MoETrainingJob, parse_job
from holdfast_core.protection.groups import form_groups
from holdfast_core.topology import Topology

Degrees = tuple[int, int, int]
"""tp, pp and ep."""


def job(nodes: int, least: int, **spec: Any) -> MoETrainingJob:
    return parse_job(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "MoETrainingJob",
            "metadata": {"name": "tiny"},
            "spec": {
                "nodes": nodes,
                "minNodes": least,
                "parallelism": {"dp": nodes},
                "trainer": {
                    "template": {"spec": {"containers": [{"name": "t", "command": ["train"]}]}}
                },
                **spec,
            },
        }
    )


def fits(nodes: int, nproc: int, degrees: Degrees) -> bool:
    """Whether these degrees have a whole number of data-parallel ranks on so many nodes."""
    tp, pp, ep = degrees
    try:
        Topology(dp=ep, ep=ep, tp=tp, pp=pp).fitted(nodes * nproc, experts=12)
    except InvalidJobError:
        return False
    return True


def may_lose_a_node(nodes: int, least: int, nproc: int, degrees: Degrees, group_size: int) -> bool:
    """Whether whole copies of the model are left of a job that loses a node at any size, and parity
    groups can rebuild what all the nodes that leave have held."""
    sizes = [size for size in range(least, nodes + 1) if fits(size, nproc, degrees)]
    return sizes[0] == least and all(
        larger - smaller <= len(form_groups(dict.fromkeys(range(larger), ""), group_size).groups)
        for smaller, larger in pairwise(sizes)
    )


@pytest.mark.parametrize("nproc", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("group_size", [2, 3])
def test_a_job_may_shrink_exactly_if_whole_copies_are_left(nproc: int, group_size: int) -> None:
    answers = set()
    for nodes, tp, pp, ep in product(range(3, 9), (1, 2, 3), (1, 2), (1, 2, 3)):
        degrees, copy = (tp, pp, ep), tp * pp
        if nodes * nproc % copy or nodes * nproc // copy % ep:
            continue
        for least in range(2, nodes):
            in_nodes = nproc % copy == 0 or copy % nproc == 0
            expected = in_nodes and may_lose_a_node(nodes, least, nproc, degrees, group_size)
            answers.add(expected)
            parallelism = {"dp": nodes * nproc // copy, "tp": tp, "pp": pp, "ep": ep}
            parity = {"type": "RAIM5", "raim5": {"groupSize": group_size}}
            try:
                asked = job(
                    nodes, least, nprocPerNode=nproc, parallelism=parallelism, redundancy=parity
                )
            except InvalidJobError as error:
                assert not expected and "1 problem" in str(error)
            else:
                assert expected
                assert all(
                    fits(size, nproc, degrees) == (size % asked.spec.copy_nodes == 0)
                    for size in range(1, nodes + 1)
                )
    assert answers == {True, False}


def test_a_job_of_a_fixed_size_may_say_so_and_be_anything() -> None:
    fixed = job(4, 4, redundancy={"type": "None"}, parallelism={"dp": 4, "ep": 4})
    assert not fixed.spec.may_shrink
    job(4, 4, snapshot={"policy": {"type": "PartialExperts"}}, scheduling={"gang": "Volcano"})


@pytest.mark.parametrize("policy", ["PartialExperts", "Selective"])
def test_a_job_of_any_policy_may_shrink(policy: str) -> None:
    assert job(4, 3, snapshot={"policy": {"type": policy}}).spec.may_shrink


def test_the_number_of_nodes_that_redundancy_needs_is_enough() -> None:
    for redundancy, least in (
        ({"type": "RAIM5"}, 2),
        ({"type": "RAIM6"}, 3),
        ({"type": "Replication", "replication": {"replicas": 3}}, 4),
    ):
        assert job(5, least, redundancy=redundancy).spec.may_shrink
        with pytest.raises(InvalidJobError, match=f"use a number from {least} to 5"):
            job(5, least - 1, redundancy=redundancy)


def test_a_problem_with_all_nodes_is_not_named_again_for_fewer() -> None:
    with pytest.raises(InvalidJobError, match="1 problem") as caught:
        job(4, 3, parallelism={"dp": 3})
    assert "spec.parallelism" in str(caught.value)
    with pytest.raises(InvalidJobError, match="1 problem") as caught:
        job(2, 1, redundancy={"type": "RAIM6"})
    assert "2 losses need more than the job's 2 nodes" in str(caught.value)
