"""A real Prometheus that scrapes what a test runs, with our alerts, and the dashboard's queries."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from ports import reserve_port
from waiting import wait_for

FILES = Path(__file__).resolve().parents[3] / "charts" / "holdfast" / "files"
SCRAPE = "1s"
RATE_INTERVAL = "5m"
"""What Grafana puts in place of $__rate_interval and $__range; here, longer than any test."""
STARTED_S = 30.0


class Prometheus:
    """A server that scrapes every second."""

    def __init__(self, port: int, log: Path) -> None:
        self.url, self._log = f"http://127.0.0.1:{port}", log

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression gives now."""
        found: list[dict[str, Any]] = self._get("query", query=expression)["data"]["result"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        """The alerts, as evaluated."""
        groups = self._get("rules")["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def has_evaluated(self) -> bool:
        """Whether each alert has been evaluated."""
        return all(rule["health"] != "unknown" for rule in self.rules())

    def _get(self, what: str, **query: str) -> dict[str, Any]:
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        return found

    def answers(self) -> bool:
        try:
            self.query("up")
        except (OSError, urllib.error.HTTPError):
            return False
        return True

    def without_data(self) -> list[str]:
        """Expressions of the dashboard that give nothing now, with all variables at All."""
        return [each for each in dashboard_queries() if not self.query(each)]


Scrapes = Mapping[str, Sequence[tuple[str, Mapping[str, str]]]]
"""Name of a scrape → (address, labels) of each target."""


@contextmanager
def prometheus(folder: Path, scrapes: Scrapes) -> Iterator[Prometheus]:
    """Run one in `folder`."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.fail("this needs prometheus: 'make prometheus', or apt-get install prometheus")
    alerts = yaml.safe_load((FILES / "alerts.yaml").read_text())["alerts"]
    rules = {"groups": [{"name": "holdfast", "interval": "1s", "rules": alerts}]}
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
    configs = [
        {
            "job_name": name,
            "honor_labels": True,
            "static_configs": [
                {"targets": [address], "labels": dict(labels)} for address, labels in each
            ],
        }
        for name, each in scrapes.items()
    ]
    config = {
        "global": {"scrape_interval": SCRAPE, "scrape_timeout": SCRAPE},
        "rule_files": ["rules.yaml"],
        "scrape_configs": configs,
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    port, log = reserve_port(), folder / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                binary,
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'series'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            found = Prometheus(port, log)
            wait_for(f"Prometheus to answer ({log})", found.answers, STARTED_S)
            yield found
        finally:
            process.kill()
            process.wait()


def dashboard_queries() -> list[str]:
    """Expressions of the dashboard, with its variables at All."""
    panels = json.loads((FILES / "dashboard.json").read_text(encoding="utf-8"))["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    for variable in ("namespace", "moejob", "node"):
        found = [each.replace(f"${variable}", ".*") for each in found]
    return [
        each.replace("$__rate_interval", RATE_INTERVAL).replace("$__range", RATE_INTERVAL)
        for each in found
    ]
