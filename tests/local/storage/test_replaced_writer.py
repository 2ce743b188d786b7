"""A leader is frozen in the middle of a set, replaced, and goes on to finish it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from chaos_tier import ChaosTier
from daemons import wait_until_frozen
from faulty_daemon import Trap
from harness import JOB, RawCluster, RawJob
from waiting import wait_for

LEADER = 0


@pytest.mark.parametrize(
    "trap",
    [
        Trap(at="PersistRank", signal=signal.SIGSTOP),
        Trap(at="CommitSet", signal=signal.SIGSTOP),
        Trap(at="tier", match="link", signal=signal.SIGSTOP),
        Trap(at="tier", match="rename", count=2, signal=signal.SIGSTOP),
    ],
    ids=["its rank", "the manifest", "the manifest's appearance", "the hint"],
)
def test_what_a_replaced_leader_finishes_is_whole_and_hides_nothing_newer(
    cluster: RawCluster, tmp_path: Path, trap: Trap
) -> None:
    tier = ChaosTier.directory(JOB, tmp_path / "tier")
    job = RawJob(cluster, cluster.start_nodes(3), tier=tier.tier)
    job.form()
    job.start_trainers()
    first, frozen = job.train(), job.daemon(LEADER)
    frozen.arm(trap)
    job.save(2)
    wait_until_frozen(frozen)
    ghost = job.trainers.pop(LEADER)
    (job.nodes[LEADER],) = cluster.start_nodes(1)
    job.form()
    job.check_restored(job.start_trainers(), first)
    job.step = 2
    newest = job.train(2)
    wait_for("the newest set and the hint to it", lambda: tier.latest() == newest)

    frozen.send_signal(signal.SIGCONT)
    job.publish_to(frozen.node)
    wait_for("the job to be let go", lambda: frozen.has_let_go(job.name))
    ghost.die()
    trainers = job.trainers
    assert tier.wrong(lambda rank, found: trainers[rank].content_at(found)) == ""
    assert tier.newest_sound() == newest
    # The thread that writes may outlive the job in its daemon by a moment.
    wait_for("the hint to be right", lambda: tier.latest() == newest)
