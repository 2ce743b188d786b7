"""`make cluster-demo`: a real job in real pods loses a rank, a pod, a daemon, a node and the
operator, and finishes with the bytes of an undisturbed run. Jobs of one and two nodes train beside
it.

    python tests/cluster/helpers/cluster_demo.py --report build/cluster-demo/report.json

Starts a Kubernetes of five nodes on this machine, installs the chart by helm, applies
`examples/moe-job.yaml`, and ends with the table, the plot and the report of `make demo`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import images
from beside import Beside
from cluster import Cluster
from holdfast_system import Holdfast
from machine import ClusterError
from rich.console import Console
from survival import DEMO, Run

from holdfast_cli.demo.report import DemoReport, fault_table, versions, write

STEPS = 250


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--report", type=Path, default=Path("build/cluster-demo/report.json"))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--running-cluster", action="store_true", help="use the cluster of `make cluster`"
    )
    options = parser.parse_args()
    console = Console(soft_wrap=True)
    try:
        if options.running_cluster:
            return _demo(Cluster.running(), options, console)
        console.print("building the images (minutes the first time), starting five nodes ...")
        archive = images.build()
        with Cluster(nodes=5) as cluster:
            cluster.load_image(archive)
            return _demo(cluster, options, console)
    except ClusterError as error:
        console.print(f"[red]{error}[/]")
        return 1


def _demo(cluster: Cluster, options: argparse.Namespace, console: Console) -> int:
    began = time.monotonic()
    console.print(f"kubectl --kubeconfig {cluster.kubeconfig} get moejob --watch")
    console.print("helm install holdfast charts/holdfast")
    Holdfast(cluster).install()
    console.print(f"kubectl apply -f moe-job.yaml: a run of {options.steps} steps without faults")
    undisturbed = Run(cluster, "undisturbed", options.steps, console.print)
    fault_free = undisturbed.carry_out()
    undisturbed.job.delete()
    console.print(f"the same with {len(DEMO)} faults, beside jobs of one and two nodes")
    beside = (Beside(cluster, 1), Beside(cluster, 2))
    disturbed = Run(cluster, "moe", options.steps, console.print, beside=beside)
    final = disturbed.carry_out(DEMO)
    console.print(cluster.kubectl("get", "moejob", "moe"), end="")
    spec = disturbed.job.document["spec"]
    report = DemoReport(
        final_state_sha256=final,
        fault_free_sha256=fault_free,
        equal=final == fault_free,
        steps=options.steps,
        nodes=spec["nodes"],
        spares=spec["failurePolicy"]["spares"],
        duration_seconds=round(time.monotonic() - began, 1),
        faults=tuple(disturbed.faults),
        versions=versions(),
    )
    console.print(fault_table(report.faults))
    console.print(f"undisturbed: {fault_free}\nwith faults: {final}", highlight=False)
    console.print("[bold green]The same bytes.[/]" if report.equal else "[bold red]They differ.[/]")
    picture = write(
        report,
        options.report,
        undisturbed=undisturbed.log(),
        disturbed=disturbed.log(),
        injected=disturbed.injected,
    )
    console.print(f"report: {options.report}   plot: {picture}")
    return 0 if report.success else 1


if __name__ == "__main__":
    sys.exit(main())
