"""Alerts and dashboard as a real Prometheus reads them: its own tool parses every expression, and
evaluates alerts over series that are written here."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast_core.job.status import Phase

ROOT = Path(__file__).resolve().parents[3]
FILES = ROOT / "charts" / "holdfast" / "files"
RATE_INTERVAL = "1m"
"""What Grafana puts in place of $__rate_interval."""

pytestmark = pytest.mark.prometheus


def promtool(*arguments: str | Path) -> None:
    """Run Prometheus' tool; AssertionError with what it printed when it finds a fault."""
    try:
        done = subprocess.run(
            ["promtool", *map(str, arguments)], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        pytest.fail("this needs promtool: 'make prometheus', or apt-get install prometheus")
    assert done.returncode == 0, done.stdout + done.stderr


def alerts() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((FILES / "alerts.yaml").read_text())["alerts"]
    return found


def shown() -> list[str]:
    """Expressions of the dashboard, with its variables filled in."""
    panels = json.loads((FILES / "dashboard.json").read_text(encoding="utf-8"))["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [
        one.replace("$__rate_interval", RATE_INTERVAL).replace("$__range", "1h") for one in found
    ]


def write_rules(folder: Path, rules: list[dict[str, Any]]) -> Path:
    path = folder / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "holdfast", "rules": rules}]}))
    return path


def test_prometheus_reads_every_alert(tmp_path: Path) -> None:
    promtool("check", "rules", write_rules(tmp_path, alerts()))


def test_prometheus_reads_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    expressions = shown()
    assert len(expressions) > 50
    rules = [{"record": f"panel:{n}", "expr": each} for n, each in enumerate(expressions)]
    promtool("check", "rules", write_rules(tmp_path, rules))


def test_a_rule_that_prometheus_cannot_read_is_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="could not parse expression"):
        promtool("check", "rules", write_rules(tmp_path, [{"record": "a", "expr": "sum by (b"}]))


def fires(tmp_path: Path, name: str, at: str, labels: dict[str, str], **series: str) -> bool:
    """Whether the alert `name` fires, with `labels`, at a time.

    Args:
        tmp_path: an empty folder.
        at: time since the first sample.
        series: values of each series, a sample a minute, as promtool writes them; `__` separates a
            metric from the number of one of several series, whose labels are in LABELS.
    """
    (rule,) = (one for one in alerts() if one["alert"] == name)
    severity = rule["labels"]["severity"]
    # Only whether it fires is asked for, not its text.
    write_rules(tmp_path, [{k: v for k, v in rule.items() if k != "annotations"}])
    expected = [{"exp_labels": {**labels, "severity": severity}, "exp_annotations": {}}]
    test = {
        "interval": "1m",
        "input_series": [
            {"series": LABELS[key].format(key.partition("__")[0]), "values": values}
            for key, values in series.items()
        ],
        "alert_rule_test": [{"eval_time": at, "alertname": name, "exp_alerts": expected}],
    }
    path = tmp_path / "test.yaml"
    path.write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]})
    )
    try:
        promtool("test", "rules", path)
    except AssertionError as error:
        assert "got:[]" in str(error), error
        return False
    return True


@pytest.mark.parametrize(
    ("metric", "of_nodes", "expected"),
    [
        ("holdfast_save_period_seconds", (20, 30), 30),
        ("holdfast_save_staged_seconds", (3, 2), 3),
        ("holdfast_save_interval_steps", (7, 7), 7),
        ("holdfast_persist_age_seconds", (50, 40), 40),
        ("holdfast_protection_age_seconds", (50, 40), 40),
        ("holdfast_epoch", (4, 5), 5),
        ("holdfast_sessions_open", (8, 8), 16),
        ("holdfast_arena_bytes", (100, 50), 150),
    ],
)
def test_a_panel_combines_what_the_nodes_of_a_job_expose(
    tmp_path: Path, metric: str, of_nodes: tuple[int, int], expected: int
) -> None:
    (expression,) = (each for each in shown() if re.search(rf"\b{metric}\b", each))
    test = {
        "interval": "1m",
        "input_series": [
            {
                "series": f'{metric}{{namespace="a",moejob="llm",node="n{n}"}}',
                "values": f"{value}x5",
            }
            for n, value in enumerate(of_nodes)
        ],
        "promql_expr_test": [
            {
                "expr": re.sub(r"\$\w+", ".*", expression),
                "eval_time": "2m",
                "exp_samples": [{"labels": '{namespace="a",moejob="llm"}', "value": expected}],
            }
        ],
    }
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [test]}))
    promtool("test", "rules", path)


JOB = '{}{{namespace="a",moejob="llm",node="n1"}}'
LABELS = {
    "holdfast_protection_age_seconds": JOB,
    "holdfast_sessions_open": JOB,
    "holdfast_saves_skipped_total": JOB,
    "holdfast_snapshots_total": '{}{{namespace="a",moejob="llm",stage="committed",node="n1"}}',
    "holdfast_tokens_lost": JOB,
    "holdfast_tokens_routed": JOB,
    "holdfast_tokens_lost_limit_ratio": JOB,
    "holdfast_memory_used_bytes": '{}{{node="n1"}}',
    "holdfast_memory_budget_bytes": '{}{{node="n1"}}',
    "holdfast_corrupt_total": '{}{{namespace="a",moejob="llm",kind="wire",node="n1"}}',
    "holdfast_operator_job_recoveries__1": '{}{{namespace="a",moejob="llm",pod="one"}}',
    "holdfast_operator_job_recoveries__2": '{}{{namespace="a",moejob="llm",pod="two"}}',
    "holdfast_operator_job_unprotected": '{}{{namespace="a",moejob="llm",pod="one"}}',
    "holdfast_operator_job_stragglers": '{}{{namespace="a",moejob="llm",pod="one"}}',
    "holdfast_operator_job_divergences": '{}{{namespace="a",moejob="llm",pod="one"}}',
    "holdfast_operator_job_members_missing": '{}{{namespace="a",moejob="llm",pod="one"}}',
    "holdfast_operator_daemon_missing": '{}{{node="n1",pod="one"}}',
    "holdfast_operator_oldest_look_seconds__1": '{}{{pod="one"}}',
    "holdfast_operator_oldest_look_seconds__2": '{}{{pod="two"}}',
    **{
        f"holdfast_operator_job_phase__{phase}{pod}": (
            f'{{}}{{{{namespace="a",moejob="llm",phase="{phase}",pod="{pod}"}}}}'
        )
        for phase in Phase
        for pod in ("1", "2")
    },
    "holdfast_operator_leader__1": '{}{{pod="one"}}',
    "holdfast_operator_leader__2": '{}{{pod="two"}}',
    "holdfast_operator_jobs": '{}{{phase="Waiting"}}',
    "holdfast_operator_reconcile_seconds_count": "{}",
}
OF_JOB = {"namespace": "a", "moejob": "llm"}


@pytest.mark.parametrize(("sessions", "expected"), [("1x30", True), ("0x30", False)])
def test_a_job_that_trains_unprotected_for_long_is_reported(
    tmp_path: Path, sessions: str, expected: bool
) -> None:
    age = {"holdfast_protection_age_seconds": "0+60x30", "holdfast_sessions_open": sessions}
    assert fires(tmp_path, "HoldfastUnprotected", "25m", OF_JOB, **age) is expected


@pytest.mark.parametrize(("skipped", "expected"), [("0+9x60", True), ("0+1x60", False)])
def test_saves_that_are_skipped_are_reported_when_they_are_the_most(
    tmp_path: Path, skipped: str, expected: bool
) -> None:
    saves = {"holdfast_saves_skipped_total": skipped, "holdfast_snapshots_total": "0+5x60"}
    assert fires(tmp_path, "HoldfastSavesSkipped", "50m", OF_JOB, **saves) is expected


@pytest.mark.parametrize(("lost", "expected"), [("20x10", True), ("5x10", False)])
def test_tokens_beyond_the_limit_of_the_job_are_reported(
    tmp_path: Path, lost: str, expected: bool
) -> None:
    tokens = {
        "holdfast_tokens_lost": lost,
        "holdfast_tokens_routed": "1000x10",
        "holdfast_tokens_lost_limit_ratio": "0.01x10",
    }
    assert fires(tmp_path, "HoldfastTokenLossBeyondLimit", "5m", OF_JOB, **tokens) is expected


@pytest.mark.parametrize(("used", "expected"), [("95x30", True), ("85x30", False)])
def test_a_budget_that_is_nearly_used_up_is_reported(
    tmp_path: Path, used: str, expected: bool
) -> None:
    memory = {"holdfast_memory_used_bytes": used, "holdfast_memory_budget_bytes": "100x30"}
    node = {"node": "n1"}
    assert fires(tmp_path, "HoldfastMemoryNearBudget", "15m", node, **memory) is expected


@pytest.mark.parametrize(("found", "expected"), [("0x5 1x30", True), ("1x40", False)])
def test_corruption_is_reported_when_it_is_found_and_not_for_ever(
    tmp_path: Path, found: str, expected: bool
) -> None:
    labels = {"namespace": "a", "moejob": "llm", "kind": "wire", "node": "n1"}
    corrupt = {"holdfast_corrupt_total": found}
    assert fires(tmp_path, "HoldfastCorruption", "20m", labels, **corrupt) is expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("0+1x60", "_x60", True),
        ("0+1x3 3x60", "_x60", False),
        ("100x60", "_x60", False),
        ("0+1x20 stale", "_x20 20+1x40", True),  # another replica leads since
        ("20x20 stale", "_x20 20x40", False),
    ],
)
def test_recoveries_of_a_job_that_follow_each_other_are_reported(
    tmp_path: Path, first: str, second: str, expected: bool
) -> None:
    seen = {
        "holdfast_operator_job_recoveries__1": first,
        "holdfast_operator_job_recoveries__2": second,
    }
    assert fires(tmp_path, "HoldfastRecoveryLoop", "40m", OF_JOB, **seen) is expected


@pytest.mark.parametrize(
    ("name", "phase", "minutes"),
    [
        ("HoldfastJobStarting", Phase.STARTING, 30),
        ("HoldfastJobWaiting", Phase.WAITING, 60),
        ("HoldfastJobRecovering", Phase.RECOVERING, 15),
    ],
)
def test_a_job_that_stays_in_a_phase_is_reported_by_its_name(
    tmp_path: Path, name: str, phase: Phase, minutes: int
) -> None:
    def seen(**series: str) -> bool:
        found = {f"holdfast_operator_job_phase__{key}": values for key, values in series.items()}
        return fires(tmp_path, name, f"{minutes + 2}m", OF_JOB, **found)

    assert seen(**{f"{phase}1": "1x200"})
    # Another replica leads since.
    assert seen(**{f"{phase}1": "1x10 stale", f"{phase}2": "_x10 1x200"})
    # It has left the phase for a while, and come back.
    assert not seen(**{f"{phase}1": "1x9 stale _x2 1x200", "Running1": "_x9 1x3 stale"})
    assert not seen(Running1="1x200")


@pytest.mark.parametrize(("refused", "expected"), [("1x60", True), ("1x6 0x2 1x6", False)])
def test_a_job_whose_saves_are_refused_is_reported_by_its_name(
    tmp_path: Path, refused: str, expected: bool
) -> None:
    series = {"holdfast_operator_job_unprotected": refused}
    assert fires(tmp_path, "HoldfastTrainsUnprotected", "15m", OF_JOB, **series) is expected


@pytest.mark.parametrize(("slow", "expected"), [("1x60", True), ("1x6 0x2 1x6", False)])
def test_a_job_that_waits_for_a_slow_rank_is_reported_by_its_name(
    tmp_path: Path, slow: str, expected: bool
) -> None:
    series = {"holdfast_operator_job_stragglers": slow}
    assert fires(tmp_path, "HoldfastStraggler", "15m", OF_JOB, **series) is expected


@pytest.mark.parametrize(
    ("count", "expected"), [("0x10 1x40", True), ("1x90", False), ("0x10 1x100", False)]
)
def test_a_job_whose_replicas_have_diverged_is_reported_for_an_hour(
    tmp_path: Path, count: str, expected: bool
) -> None:
    series = {"holdfast_operator_job_divergences": count}
    minutes = "40m" if expected else "90m"
    assert fires(tmp_path, "HoldfastReplicasDiverged", minutes, OF_JOB, **series) is expected


@pytest.mark.parametrize(("short", "expected"), [("2x60", True), ("1x20 0x40", False)])
def test_a_job_that_stays_short_is_reported_after_half_an_hour(
    tmp_path: Path, short: str, expected: bool
) -> None:
    series = {"holdfast_operator_job_members_missing": short}
    assert fires(tmp_path, "HoldfastJobShort", "40m", OF_JOB, **series) is expected


@pytest.mark.parametrize(
    ("first", "second", "at", "expected"),
    [
        ("_x20 1x200", "_x220", "22m", True),
        ("_x20 1x200", "_x220", "70m", False),
        ("1x60 stale", "_x60 1x140", "65m", False),  # another replica leads since
    ],
)
def test_a_job_that_fails_is_reported_by_its_name_and_not_for_ever(
    tmp_path: Path, first: str, second: str, at: str, expected: bool
) -> None:
    series = {
        "holdfast_operator_job_phase__Failed1": first,
        "holdfast_operator_job_phase__Failed2": second,
    }
    assert fires(tmp_path, "HoldfastJobFailed", at, OF_JOB, **series) is expected


@pytest.mark.parametrize(
    ("failed", "running", "reported", "over"),
    [
        ("1x40 stale _x29 1x100", "", [], ["71m", "75m", "95m", "105m"]),
        ("1x40 _x600 1x100", "", [], ["642m", "660m"]),
        ("1x40 stale _x9 1x100", "_x41 1x9 stale", ["52m", "75m"], ["85m"]),  # resumed meanwhile
        ("_x61 1x100", "1x20 stale", ["62m", "85m"], ["95m"]),  # it failed while nothing was seen
    ],
    ids=["gap", "hours", "again", "unseen"],
)
def test_a_job_that_has_failed_is_reported_once_whatever_gap_its_series_have(
    tmp_path: Path, failed: str, running: str, reported: list[str], over: list[str]
) -> None:
    series = {"holdfast_operator_job_phase__Failed1": failed}
    if running:
        series["holdfast_operator_job_phase__Running1"] = running
    for at in (*reported, *over):
        found = fires(tmp_path, "HoldfastJobFailed", at, OF_JOB, **series)
        assert found is (at in reported), at


@pytest.mark.parametrize(("missing", "expected"), [("1x60", True), ("1x8 stale _x2 1x9", False)])
def test_a_node_without_a_daemon_is_reported_by_its_name(
    tmp_path: Path, missing: str, expected: bool
) -> None:
    series = {"holdfast_operator_daemon_missing": missing}
    node = {"node": "n1"}
    assert fires(tmp_path, "HoldfastNodeWithoutDaemon", "15m", node, **series) is expected


@pytest.mark.parametrize(("second", "expected"), [("0x30", True), ("0x8 1x22", False)])
def test_an_operator_is_reported_as_absent_only_if_no_replica_leads(
    tmp_path: Path, second: str, expected: bool
) -> None:
    leaders = {"holdfast_operator_leader__1": "0x30", "holdfast_operator_leader__2": second}
    assert fires(tmp_path, "HoldfastOperatorAbsent", "20m", {}, **leaders) is expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [("0+60x60", "0x60", True), ("5x60", "0x60", False), ("0+60x7 2x52", "0x60", False)],
)
def test_an_operator_that_looks_at_no_job_is_reported(
    tmp_path: Path, first: str, second: str, expected: bool
) -> None:
    series = {
        "holdfast_operator_oldest_look_seconds__1": first,
        "holdfast_operator_oldest_look_seconds__2": second,
    }
    assert fires(tmp_path, "HoldfastReconcileStale", "40m", {}, **series) is expected


def test_an_operator_whose_jobs_wait_and_wake_it_never_is_not_reported(tmp_path: Path) -> None:
    series = {
        "holdfast_operator_jobs": "2x60",
        "holdfast_operator_leader__1": "1x60",
        "holdfast_operator_reconcile_seconds_count": "2592x60",
        "holdfast_operator_oldest_look_seconds__1": "2x60",
    }
    assert not fires(tmp_path, "HoldfastReconcileStale", "30m", {}, **series)


OF_NO_JOB = {
    *("HoldfastMemoryNearBudget", "HoldfastTrainersDenied", "HoldfastDaemonCertificateEnds"),
    *("HoldfastOperatorCertificateEnds", "HoldfastTokenReviewsFail", "HoldfastOperatorAbsent"),
    *("HoldfastReconcileStale", "HoldfastReconcileSlow", "HoldfastNodeWithoutDaemon"),
}
"""Alerts that are not about a job."""


def test_every_alert_about_a_job_names_its_namespace_and_the_job() -> None:
    for alert in alerts():
        summary = alert["annotations"]["summary"]
        named = "{{ $labels.namespace }}/{{ $labels.moejob }}" in summary
        assert named is (alert["alert"] not in OF_NO_JOB), alert["alert"]
        assert not named or "by (namespace, moejob" in alert["expr"], alert["alert"]
