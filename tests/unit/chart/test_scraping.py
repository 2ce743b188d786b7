"""What daemons and operator expose before anything has happened, scraped by a real Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from dashboard_picture import Span, draw
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_process import Scrapes, prometheus
from waiting import wait_for

from holdfast_core.job.status import Phase
from holdfast_daemon.metrics import DaemonMetrics
from holdfast_operator.kube.metrics import OperatorMetrics

pytestmark = pytest.mark.prometheus

APPEAR_LATER = {
    "holdfast_operator_daemon_missing",
    "holdfast_operator_idle_node_failed",
    "holdfast_operator_action_failures_total",
    "holdfast_operator_api_requests_total",
    "holdfast_operator_watch_restarts_total",
    "holdfast_operator_recoveries_total",
    "holdfast_operator_recoveries_finished_total",
    "holdfast_operator_node_failures_total",
    "holdfast_operator_hangs_total",
}
"""Series whose labels cannot be listed beforehand, and those of tables, which list what has
occurred."""


@contextmanager
def exposed(registry: CollectorRegistry) -> Iterator[str]:
    """Address at which the registry can be scraped."""
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.slow
def test_panels_have_data_from_the_start_and_first_events_raise_their_alerts(
    tmp_path: Path,
) -> None:
    operator, daemon = OperatorMetrics(), DaemonMetrics()
    for phase in Phase:
        operator.set("jobs", 0, phase=phase)
    operator.set("certificate_expires_timestamp_seconds", 2e9, certificate="own")
    operator.replace_all("job_phase", {("team-a", "llm", "Running"): 1})
    names = ("recoveries", "members_missing", "unprotected", "stragglers", "divergences")
    for name in (*names, "slow_links"):
        operator.replace_all(f"job_{name}", {("team-a", "llm"): 0})
    daemon.begin_job("team-a.llm")
    with exposed(operator.registry) as first, exposed(daemon.registry) as second:
        scrapes: Scrapes = {"operator": [(first, {})], "daemons": [(second, {"node": "n1"})]}
        with prometheus(tmp_path, scrapes) as server:

            def empty() -> set[str]:
                found = [each for each in server.without_data() if "holdfast_operator_" in each]
                return {name for name in APPEAR_LATER if any(name in each for each in found)} | {
                    each for each in found if not any(name in each for name in APPEAR_LATER)
                }

            wait_for("the operator's panels to have data", lambda: empty() <= APPEAR_LATER)
            assert empty() == APPEAR_LATER
            operator.replace_all("job_phase", {("team-a", "llm", "Failed"): 1})
            daemon.add("corrupt", job="team-a.llm", kind="wire")

            def fires(name: str) -> bool:
                return bool(server.query(f'ALERTS{{alertname="{name}", alertstate="firing"}}'))

            for name in ("HoldfastJobFailed", "HoldfastCorruption"):
                wait_for(f"{name} to fire", partial(fires, name))
            (alert,) = server.query('ALERTS{alertname="HoldfastCorruption"}')
            labels = {key: alert["metric"][key] for key in ("namespace", "moejob", "node", "kind")}
            assert labels == {
                "namespace": "team-a",
                "moejob": "llm",
                "node": "n1",
                "kind": "wire",
            }
            assert [rule["lastError"] for rule in server.rules() if "lastError" in rule] == []


@pytest.mark.slow
def test_the_dashboard_is_drawn_from_what_a_prometheus_holds(tmp_path: Path) -> None:
    daemon = DaemonMetrics()
    for step in (3, 4):
        daemon.set("epoch", step, job=f"team-a.llm{step}")
    with (
        exposed(daemon.registry) as address,
        prometheus(tmp_path, {"daemons": [(address, {"node": "n1"})]}) as server,
    ):
        seen = "count_over_time(holdfast_epoch[1m]) > 2"
        wait_for("enough scrapes for rates", lambda: len(server.query(seen)) == 2)
        span = Span(start=time.time() - 60, end=time.time(), rate_interval_s=10)
        empty = draw(server.url, span, tmp_path / "picture.png")
    assert "Newest membership epoch" not in empty
    assert "Ranks at work" in empty  # the operator's
    assert "Delay of the daemon's event loop" in empty  # quantiles of no observation
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
