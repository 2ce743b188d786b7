"""Metrics of daemons and operators about their own certificate."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from certificate_makers import made
from prometheus_client.exposition import generate_latest

from holdfast_daemon.metrics import DaemonMetrics
from holdfast_operator.control.certificates import Certificates
from holdfast_operator.kube.metrics import OperatorMetrics
from holdfast_protos.connections.identity import ENDS, Identity, Role
from holdfast_protos.connections.identity_gauges import show_identity


@dataclass(frozen=True)
class Process:
    """A process with a certificate, and the prefix of its metrics."""

    role: Role
    metrics: DaemonMetrics | OperatorMetrics
    prefix: str


@pytest.fixture(params=[Role.DAEMON, Role.OPERATOR])
def process(request: pytest.FixtureRequest) -> Process:
    if request.param is Role.DAEMON:
        return Process(Role.DAEMON, DaemonMetrics(), "holdfast")
    return Process(Role.OPERATOR, OperatorMetrics(), "holdfast_operator")


def test_the_expiry_of_the_certificate_is_exposed_and_follows_a_renewal(
    process: Process, tmp_path: Path
) -> None:
    metrics, read = process.metrics, f"{process.prefix}_certificate_expires_timestamp_seconds"
    directory = made(tmp_path / "ca", process.role)
    identity = Identity(directory)
    show_identity(identity, metrics)

    def shown(certificate: str) -> float | None:
        return metrics.registry.get_sample_value(read, {"certificate": certificate})

    assert {name: shown(name) for name in ENDS} == identity.ends_at()
    assert metrics.registry.get_sample_value(f"{process.prefix}_insecure") == 0
    before = shown("own")
    Certificates(tmp_path / "ca", life=timedelta(days=90)).make(time.time())
    after = shown("own")
    assert before is not None and after is not None and after - before > 80 * 86400


def test_without_identity_there_is_no_end_to_tell(process: Process) -> None:
    show_identity(None, process.metrics)
    text = generate_latest(process.metrics.registry).decode()
    assert f"{process.prefix}_insecure 1.0" in text
    assert "expires_timestamp_seconds{" not in text
