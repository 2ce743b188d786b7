"""Tables of a run's figures, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

_PHASES = {
    "start": "start",
    "calm": "calm",
    "one_after_another": "failures, one after another",
    "burst": "failures, at once",
}
_TIMES = {
    "failure_to_decision_s": "… to the decision",
    "failure_to_replacement_s": "… to the replacement pod",
    "failure_to_membership_everywhere_s": "… until every daemon has the new epoch",
    "failure_to_running_s": "… until the status is Running",
}


def show(console: Console, report: Mapping[str, Any]) -> None:
    """Print the tables of both scenarios and the verdicts."""
    for name in ("large", "small"):
        found = report[name]
        title = f"{found['jobs']} x {found['members']} members, {found['pods_failed']} pods failed"
        table = Table("figure", "value", title=title, title_justify="left")
        for row in rows(found):
            table.add_row(*row)
        console.print(table)
    before, after = report["load_before"][0], report["load_after"][0]
    console.print(
        f"{report['seconds']:.0f} s on {report['cores']} cores; load {before:.1f} before, "
        f"{after:.1f} after"
    )
    for target, met in report["targets"].items():
        console.print(f"{'met' if met else 'MISSED'}: {target}")


def rows(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Rows of one scenario's table: (figure, value)."""
    yield "reconcile latency after the start, p50 / p99", _both(found)
    yield "  p99 with the start", _s(found["reconcile_p99_with_start_s"])
    for key, name in _PHASES.items():
        phase = found["phases"][key]
        yield f"  {name}", f"{_both(phase)}, {phase['looks']:.0f} looks"
    for key in ("one_after_another", "burst"):
        phase = found["phases"][key]
        yield f"{_PHASES[key]}: recoveries", f"{phase['recoveries']:.0f}"
        for time, name in _TIMES.items():
            if phase[time]:
                yield f"  {name}", f"{_s(phase[time]['median'])}, at most {_s(phase[time]['max'])}"
    yield "operator, CPU in total", f"{found['cpu_s']:.1f} s of {found['seconds']:.0f} s"
    yield "simulated daemons, CPU in total", f"{found['players_cpu_s']:.1f} s"
    if found["steady"]:
        for unit, what in (("cpu_share", "CPU"), ("rss_bytes", "memory")):
            halves = [found["steady"][f"{unit}_{half}_half"] for half in ("first", "second")]
            texts = [f"{h:.0%}" if unit == "cpu_share" else f"{h / 2**20:.0f} MiB" for h in halves]
            yield f"  {what}, first and second half after the start", " / ".join(texts)
    replaced = max(1.0, found["pods_replaced"])
    yield "API requests for each pod that failed", ""
    for request, count in found["requests_of_failures"].items():
        yield f"  {request}", f"{count / replaced:.2f}"
    yield "lists after the start", f"{found['lists_after_start']:.0f}"


def _both(found: Mapping[str, Any]) -> str:
    return f"{_s(found['reconcile_p50_s'])} / {_s(found['reconcile_p99_s'])}"


def _s(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
