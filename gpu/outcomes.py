"""Pytest plugin that appends each test's outcome to a file as soon as it is known.

A report at the end of the run would be lost with the process; here a crash or a hang leaves the
outcomes before it, and the test that was running as the last line.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

REASON_CHARACTERS_MAX = 3000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, metavar="FILE", help="append outcomes to this file")


def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.getoption("--outcomes")
    if path is not None and not hasattr(config, "workerinput"):  # xdist's workers report to us
        config.pluginmanager.register(_Outcomes(path))


class _Outcomes:
    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._append(nodeid, "started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":  # of set-up and teardown, bad ones
            self._append(report.nodeid, report.outcome, report.duration, _reason(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._append(report.nodeid, report.outcome, 0.0, _reason(report))

    def _append(self, test: str, outcome: str, seconds: float = 0.0, reason: str = "") -> None:
        line = {"test": test, "outcome": outcome, "seconds": round(seconds, 3), "reason": reason}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return report.longreprtext[-REASON_CHARACTERS_MAX:]
