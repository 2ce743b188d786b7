"""What the operator tells of its own certificate."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

from certificate_makers import made
from prometheus_client.exposition import generate_latest

from holdfast_operator.certificates import Certificates
from holdfast_operator.kube.metrics import Metrics
from holdfast_protos.identity import ENDS, Identity, Role
from holdfast_protos.identity_gauges import show_identity


def test_it_says_when_its_certificate_ends_and_follows_one_that_is_renewed(tmp_path: Path) -> None:
    metrics, read = Metrics(), "holdfast_operator_certificate_expires_timestamp_seconds"
    directory = made(tmp_path / "ca", Role.OPERATOR)
    identity = Identity(directory)
    show_identity(identity, metrics)

    def shown(certificate: str) -> float | None:
        return metrics.registry.get_sample_value(read, {"certificate": certificate})

    assert {name: shown(name) for name in ENDS} == identity.ends_at()
    assert metrics.registry.get_sample_value("holdfast_operator_insecure") == 0
    before = shown("own")
    Certificates(tmp_path / "ca", life=timedelta(days=90)).make(time.time())
    after = shown("own")
    assert before is not None and after is not None and after - before > 80 * 86400


def test_without_identity_there_is_no_end_to_tell() -> None:
    metrics = Metrics()
    show_identity(None, metrics)
    text = generate_latest(metrics.registry).decode()
    assert "holdfast_operator_insecure 1.0" in text
    assert "expires_timestamp_seconds{" not in text
