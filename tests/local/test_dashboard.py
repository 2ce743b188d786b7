"""Real daemons, scraped by a real Prometheus: every panel of theirs has data, every alert can be
evaluated, and labels are what they should be."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from harness import RawCluster, RawJob
from prometheus_process import prometheus
from waiting import WAIT_S, wait_for

from holdfast_core.experts.loss_reports import LossReport, RecoveryLoss
from holdfast_core.snapshots.membership import Tier
from holdfast_protos import trainer_pb2
from holdfast_protos.losses import loss_to_proto

pytestmark = pytest.mark.prometheus

NEEDS_TLS = "holdfast_certificate_expires_timestamp_seconds"
"""Daemons without certificates have none that could expire."""

LOSS = RecoveryLoss(
    epoch=2,
    step=1,
    lost_tokens=10,
    plt=0.01,
    mlt=0.01,
    k_before=1,
    k_after=2,
    total_tokens=10,
    total_plt=0.01,
    total_mlt=0.01,
)
REPORT = LossReport(
    ranks=1,
    k=2,
    experts_max=8,
    limit=0.05,
    layers=(0,),
    at_risk=(5,),
    routed=(100,),
    lost=(10,),
    recoveries=(LOSS,),
)


def a_recovered_job(cluster: RawCluster, tier: Tier) -> RawJob:
    """A job that leaves experts out, has a durable tier, has lost a node, and trains again."""
    job = RawJob(cluster, cluster.start_nodes(2), tier=tier, name="team-a.llm")
    job.form()
    job.start_trainers()
    newest = job.train(3)
    job.daemon(1).lose()
    (job.nodes[1],) = cluster.start_nodes(1)
    job.form()
    assert job.check_restored(job.start_trainers(), newest) == newest
    job.train(2)
    for trainer in job.trainers:
        message = trainer_pb2.ProgressReport(session=trainer.session, loss=loss_to_proto(REPORT))
        trainer.daemon.stub().Progress(message, timeout=WAIT_S)
    return job


def test_every_panel_of_the_daemons_has_data_and_every_alert_can_be_evaluated(
    cluster: RawCluster, tmp_path: Path
) -> None:
    tier = Tier(uri=(tmp_path / "tier").as_uri(), every_steps=1)
    job = a_recovered_job(cluster, tier)
    daemons = [cluster.daemons[node] for node in job.nodes]
    ports = [daemon.logged("daemon_started")[-1]["metrics_port"] for daemon in daemons]
    targets = [
        (f"{daemon.host}:{port}", {"node": daemon.node, "namespace": "holdfast-system"})
        for daemon, port in zip(daemons, ports, strict=True)
    ]

    with prometheus(tmp_path, {"daemons": targets}) as server:

        def empty() -> list[str]:
            ours = [each for each in server.without_data() if "holdfast_operator_" not in each]
            return [each for each in ours if NEEDS_TLS not in each]

        def is_full() -> bool:
            job.train(1)
            return not empty()

        with suppress(AssertionError):
            wait_for("every panel to have data", is_full)
        assert empty() == []
        wait_for("every alert to be evaluated", server.has_evaluated)
        assert [rule["lastError"] for rule in server.rules() if "lastError" in rule] == []
        (epoch,) = server.query("max by (namespace, moejob, job) (holdfast_epoch)")
        assert epoch["metric"] == {"namespace": "team-a", "moejob": "llm", "job": "daemons"}
        memory = server.query("holdfast_memory_budget_bytes")
        assert {each["metric"]["namespace"] for each in memory} == {"holdfast-system"}
