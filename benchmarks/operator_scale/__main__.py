"""`make bench NAME=operator`: runs the scenarios, prints the figures, writes operator.json.

Needs root and Go, as the test cluster does. Takes about five minutes; `--members 200 --jobs 20` is
a short run. `--ways` compares what is done by hand with what kopf and the official client offer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster import Cluster
from machine import ROOT, ClusterError
from operator_process import OperatorProcess
from rich.console import Console
from rich.table import Table

from benchmarks.operator_scale import ways
from benchmarks.operator_scale.scenario import Plan, carry_out
from benchmarks.operator_scale.world import NAMESPACE, World, add_nodes

RESOURCE = ROOT / "crds" / "holdfast.dev_moetrainingjobs.yaml"
RECONCILE_P99_S = 1.0
MEMBERS_OF_SMALL_JOBS = 8
RUNS_OF_WAYS = 3
NODE_GRACE_S = 1000
"""Grace period of the nodes, which never fail here: with a short one, renewing their leases would
be most of the API server's work."""

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


def main() -> int:
    """Run the benchmark; return the exit code, 1 when a target is missed."""
    parser = argparse.ArgumentParser(prog="make bench NAME=operator", description=__doc__)
    add = parser.add_argument
    add("--members", type=int, default=2000, help="members of the large job (default: %(default)s)")
    add("--jobs", type=int, default=200, help="jobs of eight members each (default: %(default)s)")
    add("--heartbeat", type=float, default=1.0, help="seconds (default: %(default)s)")
    add("--calm", type=float, default=15.0, help="seconds without failures (default: %(default)s)")
    add("--ways", action="store_true", help="compare other ways with ours, without a cluster")
    add("--output", type=Path, default=ROOT / "build" / "bench" / "operator.json")
    options = parser.parse_args()
    if options.ways:
        compared = ways.measure(options.members, RUNS_OF_WAYS)
        ways.show(Console(), options.members, compared)
        return 0
    try:
        report = asyncio.run(_run(options))
    except (ClusterError, TimeoutError) as error:
        print(error, file=sys.stderr)
        return 1
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    _show(Console(), report)
    print(f"wrote {options.output}")
    return 0 if all(report["targets"].values()) else 1


async def _run(options: argparse.Namespace) -> dict[str, Any]:
    common = {"heartbeat_s": options.heartbeat, "calm_s": options.calm, "fraction": 0.01}
    large = Plan(name="large", jobs=1, members=options.members, **common)
    small = Plan(name="small", jobs=options.jobs, members=MEMBERS_OF_SMALL_JOBS, **common)
    report: dict[str, Any] = {"cores": os.cpu_count(), "load_before": os.getloadavg()}
    began = time.monotonic()
    with Cluster(nodes=1, node_grace_s=NODE_GRACE_S) as cluster:
        cluster.apply(RESOURCE)
        cluster.wait_served()
        cluster.kubectl("create", "namespace", NAMESPACE)
        cluster.simulate_nodes(1)
        await add_nodes(cluster, options.members)
        _say(began, f"{options.members} nodes are there")
        log = ROOT / "build" / "bench" / "operator.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        with OperatorProcess(cluster.kubeconfig, NAMESPACE, log) as operator:
            async with World(cluster, operator, options.members) as world:
                await world.until(
                    "all daemons to connect",
                    lambda: world.metrics().total("daemons_connected") >= options.members,
                )
                _say(began, "all daemons have connected")
                for plan in (large, small):
                    report[plan.name] = await carry_out(world, plan)
                    _say(began, f"{plan.name}: done")
                report["steady_samples"] = [
                    [round(s.at, 1), round(s.cpu_s, 2), s.rss_bytes] for s in world.samples
                ]
    report |= {"load_after": os.getloadavg(), "seconds": time.monotonic() - began}
    report["targets"] = {
        f"{name}_{what}": met
        for name in ("large", "small")
        for what, met in (
            ("reconcile_p99", report[name]["reconcile_p99_s"] < RECONCILE_P99_S),
            ("no_list_polling", report[name]["no_list_polling"]),
        )
    }
    return report


def _say(began: float, text: str) -> None:
    print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)


def _show(console: Console, report: Mapping[str, Any]) -> None:
    """Print the tables of both scenarios and the verdicts."""
    for name in ("large", "small"):
        found = report[name]
        title = f"{found['jobs']} x {found['members']} members, {found['pods_failed']} pods failed"
        table = Table("figure", "value", title=title, title_justify="left")
        for row in _rows(found):
            table.add_row(*row)
        console.print(table)
    before, after = report["load_before"][0], report["load_after"][0]
    console.print(
        f"{report['seconds']:.0f} s on {report['cores']} cores; load {before:.1f} before, "
        f"{after:.1f} after"
    )
    for target, met in report["targets"].items():
        console.print(f"{'met' if met else 'MISSED'}: {target}")


def _rows(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Rows of one scenario's table: (figure, value)."""
    yield "reconcile latency after the start, p50 / p99", _both(found)
    yield "  p99 with the start", _s(found["reconcile_p99_with_start_s"])
    for key, name in _PHASES.items():
        phase = found["phases"][key]
        yield f"  {name}", f"{_both(phase)}, {phase['looks']:.0f} looks"
    for key in ("one_after_another", "burst"):
        phase = found["phases"][key]
        yield f"{_PHASES[key]}: recoveries", f"{phase['recoveries']:.0f}"
        for key_s, name in _TIMES.items():
            if phase[key_s]:
                yield (
                    f"  {name}",
                    f"{_s(phase[key_s]['median'])}, at most {_s(phase[key_s]['max'])}",
                )
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


if __name__ == "__main__":
    sys.exit(main())
