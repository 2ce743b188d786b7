"""Each kind of fault alone, many times, so that a rare one is not lost among the frequent ones."""

from __future__ import annotations

from collections import Counter

import pytest
from simulation.cluster import Cluster
from simulation.options import FAULTS, Options

from holdfast_core.job.snapshots import PolicyType

POLICIES = tuple(PolicyType)


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        pytest.param(kind, policy, marks=[] if number % len(POLICIES) == of else pytest.mark.slow)
        for number, kind in enumerate(FAULTS)
        for of, policy in enumerate(POLICIES)
    ],
)
def test_a_job_survives_this_fault_whenever_it_strikes(kind: str, policy: PolicyType) -> None:
    """Each kind has one short row, and all policies occur among them. Blocks whose sources have
    changed nearly everywhere, such as those of rank 0, are made from whole chunks."""
    counts: Counter[str] = Counter()
    for seed in range(15):
        cluster = Cluster(Options(seed=seed, steps=16, faults=3, kinds=(kind,), policy=policy))
        cluster.run()
        counts.update(cluster.counts)
    print(f"seeds 0..14, only {kind}, {policy}: {dict(counts)}")
    assert counts[kind] > 4
    assert counts["parity_updated"] > counts["parity_built"] / 4
    assert sum(counts[other] for other in FAULTS if other != kind) == 0


def test_a_schedule_is_the_same_every_time() -> None:
    logs = []
    for _ in range(2):
        cluster = Cluster(Options(seed=7, steps=8, faults=4))
        cluster.run()
        logs.append(cluster.log)
    assert logs[0] == logs[1]


def test_what_strikes_while_a_daemon_adopts_strikes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the one before it, which is dead."""
    cluster = Cluster(Options(seed=0, steps=4, faults=0))
    cluster.run()
    struck = []
    monkeypatch.setattr(cluster, "strike", lambda node, where: struck.append(cluster.daemons[node]))
    before = cluster.daemons["n0"]
    before.alive = False
    cluster.start_daemon("n0")
    assert struck and before not in struck
