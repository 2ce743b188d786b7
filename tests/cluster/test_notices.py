"""Nodes that will be taken away, as a real API server shows it: a copy in durable storage is asked
for once, and then everything goes on as it would without storage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cluster import Cluster
from machine import wait_for
from operator_world import DETECTION, NAMESPACE, WAIT_S, World, job, namespace, world

__all__ = ["namespace", "world"]

TIER = {"uri": "s3://bucket/run1", "interval": {"minutes": 30}}
SPOT = "aws-node-termination-handler/spot-itn"


@pytest.fixture
def full(cluster: Cluster) -> Iterator[None]:
    """Four nodes take members, so that four members have no spare."""
    cluster.kubectl("cordon", "node5")
    yield
    cluster.kubectl("uncordon", "node5")


@pytest.fixture
def taints(cluster: Cluster) -> Iterator[list[str]]:
    """`NODE=KEY` of each taint that the test made, which are taken away again."""
    made: list[str] = []
    yield made
    for each in made:
        node, _, key = each.partition("=")
        cluster.kubectl("taint", "node", node, f"{key}-")


def _taint(world: World, taints: list[str], node: str, key: str) -> None:
    world.cluster.kubectl("taint", "node", node, f"{key}=:NoSchedule")
    taints.append(f"{node}={key}")


def _asked(world: World, name: str) -> dict[str, int]:
    """Node → how often its daemon was asked for a copy of the job."""
    key = f"{NAMESPACE}.{name}"
    counts = {n: d.persisted.count(key) for n, d in world.daemons.daemons.items()}
    return {node: count for node, count in counts.items() if count}


def _message(status: dict[str, Any], kind: str) -> str:
    found = (c["message"] for c in status["conditions"] if c["type"] == kind)
    return next(found, "")


def test_a_spot_notice_asks_for_a_copy_and_a_spare_takes_over(
    world: World, taints: list[str]
) -> None:
    world.cluster.apply(job("spot", persistence=TIER))
    leaving = world.runs_in("spot", 1)["members"][2]["node"]
    _taint(world, taints, leaving, SPOT)
    world.wait_event("spot", "CopyRequested", f"node {leaving} will be taken away: taint {SPOT}")
    status = world.runs_in("spot", 2)
    assert leaving not in [member["node"] for member in status["members"]]
    assert status["restarts"] == 0  # a disruption does not count
    wait_for("the daemons to be asked", lambda: _asked(world, "spot"), WAIT_S)
    world.wait_event("spot", "Recovering", "takes over in epoch 2")
    assert set(_asked(world, "spot").values()) == {1}


def test_without_a_spare_the_job_trains_on_or_shrinks_and_its_copy_is_asked_for(
    world: World, taints: list[str], full: None
) -> None:
    alone = {"spares": 0, "detection": DETECTION}
    world.cluster.apply(job("alone", persistence=TIER, failurePolicy=alone))
    sizes = {"minNodes": 3, "parallelism": {"dp": 4, "ep": 1}}
    world.cluster.apply(job("fewer", persistence=TIER, failurePolicy=alone, **sizes))
    world.runs_in("fewer", 1)
    leaving = world.runs_in("alone", 1)["members"][0]["node"]
    _taint(world, taints, leaving, "ToBeDeletedByClusterAutoscaler")
    status = world.until("alone", lambda s: leaving in _message(s, "Persisted"))
    assert f"a copy was requested because notice was given for {leaving}" in _message(
        status, "Persisted"
    )
    assert (status["phase"], status["epoch"]) == ("Running", 1)
    # A job that may shrink goes on without the node.
    world.wait_event("fewer", "CopyRequested", f"node {leaving} will be taken away: taint ToBe")
    status = world.runs_in("fewer", 2)
    assert len(status["members"]) == 3 and status["restarts"] == 0
    assert leaving not in [member["node"] for member in status["members"]]
    world.wait_event("fewer", "Recovering", "3 of 4 members go on")
    wait_for("its daemons to be asked", lambda: _asked(world, "fewer"), WAIT_S)
    assert set(_asked(world, "fewer").values()) == {1}
    wait_for("the members' daemons to be asked", lambda: len(_asked(world, "alone")) == 4, WAIT_S)
    assert set(_asked(world, "alone").values()) == {1}
    # A second word for the same end, as some clouds give it, is not another notice.
    _taint(world, taints, leaving, "karpenter.sh/disrupted")
    world.daemons.lose_rank(f"{NAMESPACE}.alone", 1)
    world.runs_in("alone", 2)
    assert set(_asked(world, "alone").values()) == {1}


def test_a_job_without_durable_storage_only_moves(world: World, taints: list[str]) -> None:
    world.cluster.apply(job("bare"))
    leaving = world.runs_in("bare", 1)["members"][1]["node"]
    _taint(world, taints, leaving, "cloud.google.com/impending-node-termination")
    world.runs_in("bare", 2)
    assert _asked(world, "bare") == {}
    assert not [message for reason, message in world.events("bare") if reason == "CopyRequested"]
