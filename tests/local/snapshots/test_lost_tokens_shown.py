"""The example trains under PartialExperts with real processes; what a recovery costs is shown."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from local_jobs import short_folder

from holdfast_cli.demo.demo import EXAMPLES
from holdfast_cli.local import LocalCluster, LocalSettings, Status
from holdfast_core.experts.loss_reports import JobLoss
from holdfast_core.job.parsing import MoETrainingJob, parse_job
from holdfast_core.job.status import JobCondition
from holdfast_operator.reconciler.observe.counters import from_document
from holdfast_operator.reconciler.observe.views import ConditionType

WAIT_S = 250.0
"""Until trainers have loaded torch, on a machine that has much else to do."""

SMALL = ("--steps", "100000", "--dim", "64", "--layers", "2", "--experts", "4", "--seq", "32")
"""More steps than will be done, of a model that two processes can train beside much else."""


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_folder() as path:
        yield path / "run"


def small_job() -> MoETrainingJob:
    """The example's, with two ranks and snapshots of one expert of each layer."""
    document = yaml.safe_load((EXAMPLES / "moe-job.yaml").read_text(encoding="utf-8"))
    spec = document["spec"]
    spec |= {"nodes": 2, "parallelism": {"dp": 2, "ep": 2}, "redundancy": {"type": "RAIM5"}}
    spec["failurePolicy"]["spares"] = 0
    spec["model"] = {"numExperts": 4, "numMoELayers": 2}
    partial = {"lossLimit": 0.001}  # which any recovery of the first thousand steps passes
    spec["snapshot"]["policy"] = {"type": "PartialExperts", "partialExperts": partial}
    container = spec["trainer"]["template"]["spec"]["containers"][0]
    container["command"] = ["python", str(EXAMPLES / "train_moe.py")]
    container["args"] = list(SMALL)
    return parse_job(document)


def token_loss(status: Status) -> JobCondition | None:
    return next((c for c in status.conditions if c.type == ConditionType.TOKEN_LOSS), None)


def losses(status: Status) -> JobLoss | None:
    """The job's figures as the control loop remembers them, in full."""
    return from_document(status.counters, now=0.0, wall=0.0).losses


def has_lost(status: Status) -> bool:
    """Whether the cost of a recovery is known."""
    found = losses(status)
    return found is not None and found.newest is not None


def judged(status: Status) -> bool:
    """Whether snapshots that leave experts out were taken, and all ranks have reported them."""
    found = losses(status)
    return found is not None and found.at_risk > 0


async def _lose_a_rank(cluster: LocalCluster) -> None:
    status = await cluster.wait_for(judged, timeout_s=WAIT_S)
    before = token_loss(status)
    assert before is not None and (before.status, before.reason) == ("True", "WithinLimit")
    risk = losses(status)
    assert risk is not None and risk.at_risk_mlt > risk.at_risk  # of two layers

    await cluster.kill_rank(1)
    status = await cluster.wait_for(has_lost, timeout_s=WAIT_S)
    lost = losses(status)
    assert lost is not None and lost.newest is not None
    assert (lost.newest.epoch, lost.newest.k_before, lost.newest.k_after) == (2, 1, 2)
    assert lost.newest.lost_tokens == lost.newest.total_tokens == lost.lost_tokens > 0
    after = token_loss(status)
    assert after is not None and (after.status, after.reason) == ("False", "LimitPassed")
    assert "snapshots hold 2 of 4 experts" in after.message
    assert [e.reason for e in cluster.events].count("TokenLossLimitPassed") == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_lost_rank_costs_tokens_that_status_shows_and_the_next_control_loop_knows(
    directory: Path,
) -> None:
    job, settings = small_job(), LocalSettings(directory=directory)

    async def scenario() -> None:
        first = LocalCluster(job, settings)
        await first.start()
        try:
            await _lose_a_rank(first)
        except BaseException:
            await first.stop()
            raise
        await first.detach()
        async with LocalCluster(job, settings) as second:
            status = await second.wait_for(
                lambda s: any(rank.step > 0 for rank in s.local.ranks), timeout_s=WAIT_S
            )
            known = token_loss(status)
            assert known is not None and (known.status, known.reason) == ("False", "LimitPassed")
            posted = [e for e in second.events if e.reason == "TokenLossLimitPassed"]
            assert len(posted) == 1  # by the first

    asyncio.run(scenario())
