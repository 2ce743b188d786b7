"""Worlds of a local run, after a recovery or with another number of members."""

from __future__ import annotations

from pathlib import Path

from holdfast_cli.local import LocalCluster, LocalSettings, Status
from holdfast_core.job.parsing import MoETrainingJob

WAIT_S = 150.0


def is_protected(status: Status, size: int, after_epoch: int) -> bool:
    """Whether `size` members are in an epoch newer than `after_epoch`, and a generation of it is
    protected; what its recovery has cost is known then."""
    return (
        len(status.local.members) == size
        and status.epoch > after_epoch
        and status.protected.startswith(f"{status.epoch}.")
        and is_recovered(status)
    )


def is_recovered(status: Status) -> bool:
    """Whether all daemons have reported that their ranks are at work after the recovery that has
    led to the present epoch, if one has. That of a member reports for itself what is protected."""
    newest = status.local.recoveries[-1] if status.local.recoveries else None
    return newest is None or newest.epoch != status.epoch or newest.resumed_at is not None


async def lose_a_node_and_return(job: MoETrainingJob, directory: Path, fewer: int) -> None:
    """Run `job` in `directory` until all members are protected, without the node of member 1 until
    `fewer` members are, and with it again until all are."""
    nodes, settings = job.spec.nodes, LocalSettings(directory=directory / "run", standbys=0)
    async with LocalCluster(job, settings) as cluster:
        first = await cluster.wait_for(
            lambda status: is_protected(status, nodes, 0), timeout_s=WAIT_S, what="first steps"
        )
        lost = first.local.members[1].node
        await cluster.kill_node(lost)
        smaller = await cluster.wait_for(
            lambda status: is_protected(status, fewer, first.epoch),
            timeout_s=WAIT_S,
            what=f"{fewer} members",
        )
        await cluster.start_node(lost)
        await cluster.wait_for(
            lambda status: is_protected(status, nodes, smaller.epoch),
            timeout_s=WAIT_S,
            what="all again",
        )
