"""What the status of a local run says of ranks that have ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from virtual_world import World, make_job, running

from holdfast_cli.local.directory import RunDirectory, RunRecord
from holdfast_cli.local.reporting import status_of
from holdfast_cli.local.status import Status
from holdfast_operator.kube.client.times import ClockPair
from holdfast_operator.reconciler.observe.views import Decision, Observed


def shown(observed: Observed, decision: Decision) -> Status:
    return status_of(
        observed,
        decision,
        make_job(),
        RunRecord(job="default.job", control_host="h"),
        directory=RunDirectory(Path("/run"), "default.job"),
        clocks=ClockPair(now=0.0, wall=0.0),
        now=0.0,
        pid=1,
        events=(),
        recoveries=(),
        previous={},
    )


def test_a_local_run_needs_no_package_of_clusters() -> None:
    program = (
        "import sys; "
        "sys.modules |= dict.fromkeys(['aiohttp', 'kopf', 'kubernetes', 'yarl']); "
        "import holdfast_cli.commands.run"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def states(world: World, observed: Observed) -> set[str]:
    status = shown(observed, world.decision)
    return {rank.state for rank in status.local.ranks}


def test_ranks_of_a_complete_job_have_finished_and_are_not_unwell() -> None:
    world = running()
    world.finish()
    before = world.observed()
    world.look()
    assert world.phase() == "Complete"
    assert states(world, before) == {"FINISHED"}
    assert states(world, world.observed()) <= {"FINISHED"}  # their agents are forgotten by now


def test_a_member_that_is_done_before_the_others_has_finished() -> None:
    world = running()
    world.exit_agent(1, 0)
    world.look()
    assert states(world, world.observed()) == {"FINISHED", "HEALTHY"}


def test_a_rank_that_failed_has_not_finished() -> None:
    world = running()
    world.exit_agent(1, 1)
    assert states(world, world.observed()) == {"OFFLINE", "HEALTHY"}
