"""Who asks too much of a daemon slows himself down: the saves of other jobs go on."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import RawCluster, RawJob
from waiting import wait_for

SAVES = 12
SLOWER_MAX = 20.0
"""How much longer a save may take beside a hostile process, which takes a core as well."""
SAVE_S_ALWAYS = 0.25
"""A save that is as fast as this is fast enough, whatever it took before."""


@contextmanager
def hostile(*arguments: str, inherited: tuple[int, ...] = ()) -> Iterator[None]:
    """A process of `hostile.py` at full speed, with these descriptors."""
    script = Path(__file__).with_name("hostile.py")
    with subprocess.Popen(
        [sys.executable, str(script), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=inherited,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.kill()


def save_s(job: RawJob) -> float:
    """The median time of a save of one rank; every step becomes protected."""
    took = []
    for _ in range(SAVES):
        job.step += 1
        began = time.monotonic()
        job.save(job.step)
        took.append((time.monotonic() - began) / job.size)
        job.wait_protected(job.step)
    return statistics.median(took)


@pytest.mark.parametrize(
    "way",
    [
        "arena",
        *(
            pytest.param(way, marks=pytest.mark.slow)
            for way in ("saves", "reports", "bulk", "http")
        ),
    ],
)
def test_a_well_behaved_job_goes_on_beside(cluster: RawCluster, way: str) -> None:
    nodes = cluster.start_nodes(2)
    good, bad = (RawJob(cluster, nodes, name=f"team.{name}") for name in ("good", "bad"))
    for job in (good, bad):
        job.form()
        job.start_trainers()
        job.train()
    daemon = good.daemon(0)
    before_s = save_s(good)
    started = daemon.logged("daemon_started")[-1]
    arguments, counted = {
        "saves": (
            ("saves", f"{daemon.root}/daemon.sock", bad.trainers[0].session, str(bad.epoch)),
            'holdfast_rate_limited_total{service="trainers"}',
        ),
        "reports": (
            ("reports", started["peer"], bad.name, str(bad.epoch)),
            'holdfast_rate_limited_total{service="peers"}',
        ),
        "bulk": (
            ("silent", "tcp", started["bulk"], ""),
            'holdfast_connections_shed_total{service="bulk"}',
        ),
        "arena": (
            ("silent", "unix", f"{daemon.root}/arena.sock", "0123"),
            'holdfast_connections_shed_total{service="arena"}',
        ),
        "http": (
            ("silent", "tcp", f"{daemon.host}:{started['metrics_port']}", "GET /metrics HT"),
            'holdfast_connections_shed_total{service="http"}',
        ),
    }[way]
    with hostile(*arguments):
        beside_s = save_s(good)
        if way == "arena":
            good.trainers[0].reopen()
        # The calls of those who call too fast only wait, until there are too many of them.
        if way not in ("saves", "reports"):
            wait_for("a connection to give way", lambda: daemon.metric(counted) > 0)
    print(f"{way}: a save took {1e3 * before_s:.1f} ms before and {1e3 * beside_s:.1f} ms beside")
    assert beside_s <= max(SLOWER_MAX * before_s, SAVE_S_ALWAYS)
    assert good.protected() == good.generation
