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
from pathlib import Path
from typing import Any

from cluster import Cluster
from machine import ROOT, ClusterError
from operator_process import OperatorProcess
from rich.console import Console

from benchmarks.operator_scale import ways
from benchmarks.operator_scale.scenario import Plan, carry_out
from benchmarks.operator_scale.tables import show
from benchmarks.operator_scale.world import NAMESPACE, World, add_nodes

RESOURCE = ROOT / "crds" / "holdfast.dev_moetrainingjobs.yaml"
RECONCILE_P99_S = 1.0
MEMBERS_OF_SMALL_JOBS = 8
RUNS_OF_WAYS = 3
NODE_GRACE_S = 1000
"""Grace period of the nodes, which never fail here: with a short one, renewing their leases would
be most of the API server's work."""


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
    show(Console(), report)
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


if __name__ == "__main__":
    sys.exit(main())
