"""A short run of `make bench NAME=loss`: the example, really killed, with a real daemon."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.cluster import Cluster
from benchmarks.loss.runs import Plan, carry_out

from holdfast_core.job.snapshots import PartialExperts, PolicySpec, PolicyType

STEPS, KILL_AT = 150, 20
MODEL = ("--dim", "32", "--layers", "2", "--experts", "8", "--batch", "2", "--seq", "32")


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_experts_that_a_kill_sent_back_get_more_capacity(tmp_path: Path) -> None:
    plan = Plan(
        job="short",
        seed=1,
        arguments=(*MODEL, "--steps", str(STEPS), "--held-out", "16"),
        policy=PolicySpec(
            type=PolicyType.PARTIAL_EXPERTS, partial_experts=PartialExperts(experts_per_layer=1)
        ),
        kills=(KILL_AT,),
    )
    with Cluster(256 << 20) as cluster:
        run = carry_out(plan, cluster, cluster.start("node-0"), tmp_path)
    assert [line.step for line in run.lines] == list(range(1, STEPS + 1))
    (restored,) = run.restored
    assert 8 < restored < STEPS  # by then each expert was captured
    before, after = run.lines[:restored], run.lines[restored:]
    assert {(line.epoch, line.boosted, line.lost) for line in before} == {(1, 0, 0.0)}
    assert {line.epoch for line in after} == {2}
    # One expert of each layer was captured in the restored step itself; the others went back.
    assert 8 <= after[0].boosted <= 14
    assert run.lost > 0
    assert 0 < run.held_out < 6
