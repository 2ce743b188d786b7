"""The list of metrics, and the collectors made from it."""

from __future__ import annotations

import pytest
from prometheus_client.exposition import generate_latest

from holdfast_core.errors import InvalidJobError
from holdfast_core.metric_definitions import Definition, MetricType
from holdfast_daemon.metrics import DEFINITIONS, DaemonMetrics


def exposition(metrics: DaemonMetrics) -> str:
    return generate_latest(metrics.registry).decode()


def test_every_definition_is_exposed_with_its_help_under_its_name() -> None:
    text = exposition(DaemonMetrics())
    for definition in DEFINITIONS:
        assert f"# HELP {definition.exposed_name} {definition.help}" in text
        assert f"# TYPE {definition.exposed_name} {definition.type}" in text


def test_names_are_unique_and_helps_are_sentences() -> None:
    names = [definition.name for definition in DEFINITIONS]
    assert sorted(names) == sorted(set(names))
    assert all(d.help.endswith(".") and "\n" not in d.help for d in DEFINITIONS)


def test_counters_gauges_and_histograms_take_values() -> None:
    metrics = DaemonMetrics()
    metrics.add("snapshots", job="team.moe", stage="committed")
    metrics.add("sent_bytes", 4096)
    metrics.set("epoch", 3, job="team.moe")
    metrics.observe("seal_seconds", 0.002, job="team.moe")
    job = {"namespace": "team", "moejob": "moe"}
    read = metrics.registry.get_sample_value
    assert read("holdfast_snapshots_total", {**job, "stage": "committed"}) == 1
    assert read("holdfast_sent_bytes_total", {}) == 4096
    assert read("holdfast_epoch", {**job}) == 3
    assert read("holdfast_seal_seconds_bucket", {**job, "le": "0.005"}) == 1


def test_a_forgotten_job_leaves_no_series_and_others_keep_theirs() -> None:
    metrics = DaemonMetrics()
    for job in ("gone", "kept"):
        metrics.add("snapshots", job=job, stage="committed")
        metrics.add("saves_skipped", job=job, cause="no_free_slot")
        metrics.observe("encode_seconds", 1.0, job=job)
        metrics.set("sessions_open", 2, job=job)
    metrics.set("memory_budget_bytes", 10)

    metrics.forget_job("gone")
    metrics.forget_job("never known")

    text = exposition(metrics)
    assert "gone" not in text
    assert 'holdfast_snapshots_total{moejob="kept",namespace="",stage="committed"} 1.0' in text
    assert "holdfast_memory_budget_bytes 10.0" in text


def test_counters_are_exposed_before_they_count() -> None:
    metrics = DaemonMetrics()
    metrics.begin_job("team.moe")
    metrics.add("corrupt", job="team.moe", kind="wire")
    metrics.begin_job("team.moe")
    labels = {"namespace": "team", "moejob": "moe"}
    read = metrics.registry.get_sample_value
    assert read("holdfast_corrupt_total", {**labels, "kind": "wire"}) == 1
    assert read("holdfast_corrupt_total", {**labels, "kind": "parity"}) == 0
    assert read("holdfast_auth_denials_total", {"cause": "access_denied"}) == 0


def test_a_label_value_outside_its_list_is_a_programming_error() -> None:
    with pytest.raises(AssertionError, match="stage is one of committed"):
        DaemonMetrics().add("snapshots", job="moe", stage="eaten")
    with pytest.raises(AssertionError, match="is a gauge, not a counter"):
        DaemonMetrics().add("epoch", job="moe")


def test_a_definition_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(InvalidJobError, match="must end in its unit"):
        Definition(name="sent", type=MetricType.COUNTER, help="Sent.", unit="bytes")
    with pytest.raises(InvalidJobError, match="buckets"):
        Definition(name="lag", type=MetricType.HISTOGRAM, help="Lag.")
    with pytest.raises(InvalidJobError, match="no label stage"):
        Definition(name="n", type=MetricType.COUNTER, help="N.", values=(("stage", ("staged",)),))
