"""Pods of the real JobSet, as `examples/jobset.yaml` describes them, and of the real Kubeflow
Trainer, which makes a JobSet of `examples/trainjob.yaml`: a process is killed and the node of rank
0 is lost, JobSet and Kubernetes start again what is missing, and training goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import jobs
import pytest
from cluster import Cluster
from controllers import JOBSET, TRAINER, Controller
from holdfast_system import Holdfast
from launched import Launched, Standing

KINDS = {"jobset": (JOBSET,), "trainjob": (JOBSET, TRAINER)}
"""Example → the controllers that it takes."""
RANK_0 = {"jobset": "train-workers-0-0", "trainjob": "train-node-0-0"}

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1200)]

Document = dict[str, Any]


@dataclass(kw_only=True, slots=True)
class Seen:
    """The job before and after each loss."""

    standings: list[Standing] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    """Those of rank 0's name, at the end."""
    log: list[Document] = field(default_factory=list)
    jobset: Document = field(default_factory=dict)


@pytest.fixture(scope="module", params=KINDS)
def seen(request: pytest.FixtureRequest, cluster: Cluster, holdfast: Holdfast) -> Iterator[Seen]:
    team: str = request.param
    launched = Launched(cluster, f"{team}.yaml", team)
    jobs.make_folder(launched.folder)
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": team}})
    with ExitStack() as controllers:
        for kind in KINDS[team]:
            controllers.enter_context(Controller(cluster, kind))
        try:
            yield _lose(launched, holdfast)
        finally:
            launched.delete()
            cluster.kubectl("delete", "namespace", team, "--timeout=120s")


def _lose(launched: Launched, holdfast: Holdfast) -> Seen:
    cluster, found = launched.cluster, Seen()
    cluster.apply(*launched.documents)
    found.standings.append(launched.stand("the first steps", 0))
    os.kill(launched.job.rank_process(2), signal.SIGKILL)
    found.standings.append(launched.stand("a process to be back", 1))
    lost = found.standings[-1].on(0)
    cluster.kill_node(lost)
    try:
        found.standings.append(launched.stand("a node to be replaced", 2))
        found.addresses = launched.addresses(RANK_0[launched.namespace])
    finally:
        cluster.boot_node(lost)
        holdfast.wait_daemon(lost)
    found.jobset = cluster.get("jobset", "train", "-n", launched.namespace)
    found.log = launched.log()
    return found


def test_no_protected_step_is_lost(seen: Seen) -> None:
    began = [(old, new) for old, new in pairwise(seen.log) if old["epoch"] != new["epoch"]]
    assert len(began) == 2
    for standing, (old, new) in zip(seen.standings[:-1], began, strict=True):
        assert standing.status["protectedStep"] < new["step"] <= old["step"] + 1


def test_state_comes_from_memory_and_that_of_a_lost_node_from_parity(seen: Seen) -> None:
    sources = [each["source"] for each in seen.standings[-1].status["lastRecoveries"]]
    assert sources == ["local", "parity"]


def test_jobset_replaces_what_was_lost_alone(seen: Seen) -> None:
    before, killed, moved = seen.standings
    assert killed.uids == before.uids
    assert all(killed.restarts[index] > count for index, count in before.restarts.items())
    assert {index for index, uid in killed.uids.items() if moved.uids[index] != uid} == {"0"}
    assert seen.jobset["status"].get("restarts", 0) == 0


def test_the_name_of_rank_0_has_no_address_of_the_lost_node(seen: Seen) -> None:
    assert seen.addresses == [seen.standings[-1].pods["0"]["status"]["podIP"]]
