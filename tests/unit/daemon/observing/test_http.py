"""The HTTP endpoints, asked over a real socket."""

import urllib.error
import urllib.request
from dataclasses import dataclass

import pytest

from holdfast_daemon.metrics import DaemonMetrics
from holdfast_daemon.observing.http import HEARTBEAT_AGE_S_MAX, HttpServer


@dataclass
class Daemon:
    age_s: float = 0.0
    reason: str = ""


def server(daemon: Daemon, metrics: DaemonMetrics) -> HttpServer:
    return HttpServer(
        metrics.registry,
        heartbeat_age_s=lambda: daemon.age_s,
        not_ready=lambda: daemon.reason,
    )


def get(port: int, path: str) -> tuple[int, str, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as reply:
            return reply.status, reply.headers["Content-Type"], reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def test_metrics_are_exposed_in_the_text_format() -> None:
    metrics = DaemonMetrics()
    metrics.set("epoch", 4, job="moe")
    with server(Daemon(), metrics) as http:
        status, kind, body = get(http.port, "/metrics")
    assert (status, kind.startswith("text/plain")) == (200, True)
    assert 'holdfast_epoch{moejob="moe",namespace=""} 4.0' in body


def test_health_follows_the_heartbeat_of_the_event_loop() -> None:
    daemon = Daemon()
    with server(daemon, DaemonMetrics()) as http:
        assert get(http.port, "/healthz")[0] == 200
        daemon.age_s = HEARTBEAT_AGE_S_MAX + 1
        status, _, body = get(http.port, "/healthz")
    assert status == 503
    assert "has not run for 11.0 s" in body


def test_readiness_gives_the_reason_when_it_is_false() -> None:
    daemon = Daemon(reason="verifying what the memory holds")
    with server(daemon, DaemonMetrics()) as http:
        assert get(http.port, "/readyz")[::2] == (503, "verifying what the memory holds\n")
        daemon.reason = ""
        assert get(http.port, "/readyz")[0] == 200


def test_an_unknown_path_is_not_found() -> None:
    with server(Daemon(), DaemonMetrics()) as http:
        assert get(http.port, "/secret")[0] == 404


def test_the_port_is_free_again_after_a_close() -> None:
    metrics = DaemonMetrics()
    with server(Daemon(), metrics) as http:
        port = http.port
    with pytest.raises(urllib.error.URLError):
        get(port, "/healthz")
    again = HttpServer(
        metrics.registry, heartbeat_age_s=lambda: 0.0, not_ready=lambda: "", port=port
    )
    again.close()
