"""Which jobs may go on with fewer nodes: those of which every size from `minNodes` on is a job."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.parsing import MoETrainingJob, parse_job
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


@pytest.mark.parametrize("nproc", [1, 2, 3, 4, 6])
def test_a_job_may_shrink_exactly_if_every_size_fits(nproc: int) -> None:
    answers = set()
    for nodes, tp, pp, ep in product(range(3, 7), (1, 2, 3), (1, 2), (1, 2, 3, 4)):
        degrees = (tp, pp, ep)
        if nodes * nproc % (tp * pp) or nodes * nproc // (tp * pp) % ep:
            continue
        for least in range(2, nodes):
            parallelism = {"dp": nodes * nproc // (tp * pp), "tp": tp, "pp": pp, "ep": ep}
            expected = all(fits(size, nproc, degrees) for size in range(least, nodes + 1))
            answers.add(expected)
            try:
                job(nodes, least, nprocPerNode=nproc, parallelism=parallelism)
            except InvalidJobError as error:
                first = next(n for n in range(nodes, 0, -1) if not fits(n, nproc, degrees))
                assert not expected
                assert f"the {first * nproc} ranks of {first} nodes" in str(error)
            else:
                assert expected
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
