"""Figures of `make bench NAME=operator` from what the operator exposes."""

from __future__ import annotations

import pytest
from benchmarks.operator_scale.figures import Exposition, Sample, halves, spread
from prometheus_client import generate_latest

from holdfast_operator.kube.metrics import OperatorMetrics


def exposed(metrics: OperatorMetrics) -> Exposition:
    return Exposition.parse(generate_latest(metrics.registry).decode())


def test_counters_are_added_up_by_label() -> None:
    metrics = OperatorMetrics()
    metrics.request("create", "pods", "201")
    before = exposed(metrics)
    metrics.request("create", "pods", "201")
    metrics.request("create", "pods", "409")
    metrics.request("list", "pods", "200")
    added = exposed(metrics).since(before)
    assert added.by("api_requests_total", "verb", "resource") == {"create pods": 2, "list pods": 1}
    assert added.total("api_requests_total", verb="create") == 2
    assert added.total("api_requests_total", verb="create", code="409") == 1


def test_a_quantile_lies_evenly_within_its_bucket() -> None:
    metrics = OperatorMetrics()
    before = exposed(metrics)
    for _ in range(4):
        metrics.observe("reconcile_seconds", 0.07)  # between 0.05 and 0.1
    added = exposed(metrics).since(before)
    assert added.quantile("reconcile_seconds", 0.5) == pytest.approx(0.075)
    assert added.quantile("reconcile_seconds", 1.0) == pytest.approx(0.1)


def test_a_quantile_skips_empty_buckets() -> None:
    metrics = OperatorMetrics()
    for seconds in (0.0005, 0.0005, 0.0005, 0.7):
        metrics.observe("reconcile_seconds", seconds)
    found = exposed(metrics)
    assert found.quantile("reconcile_seconds", 0.75) == pytest.approx(0.001)
    assert found.quantile("reconcile_seconds", 0.99) == pytest.approx(0.5 + 0.5 * 0.96)


def test_beyond_the_last_bound_the_quantile_is_that_bound() -> None:
    metrics = OperatorMetrics()
    metrics.observe("reconcile_seconds", 99.0)
    assert exposed(metrics).quantile("reconcile_seconds", 0.5) == 10.0


def test_nothing_observed_has_no_quantile() -> None:
    assert exposed(OperatorMetrics()).quantile("reconcile_seconds", 0.5) is None


def test_halves_compare_processor_and_memory() -> None:
    samples = [
        Sample(at=t, cpu_s=c, rss_bytes=m)
        for t, c, m in [
            (0.0, 0.0, 10),
            (1.0, 0.1, 10),
            (2.0, 0.2, 20),
            (3.0, 0.7, 30),
            (4.0, 1.2, 30),
        ]
    ]
    found = halves(samples)
    assert found["cpu_share_first_half"] == pytest.approx(0.1)
    assert found["cpu_share_second_half"] == pytest.approx(0.5)
    assert found["rss_bytes_first_half"] < found["rss_bytes_second_half"]
    assert halves(samples[:3]) == {}


def test_the_spread_of_nothing_is_empty() -> None:
    assert spread([]) == {}
    assert spread([3.0, 1.0, 2.0]) == {"count": 3, "median": 2.0, "max": 3.0}
