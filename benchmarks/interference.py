"""Cost of protection for training on a shared network, as the time of a step.

Two nodes are network namespaces with a link of a given speed between them. Each has a daemon, and a
rank that computes (it waits, as for an accelerator), exchanges gradients with the other rank over
gloo meanwhile, and saves at every step. So the parity of each snapshot crosses the link beside the
gradients, in both directions. The rows differ in how that traffic is limited, and in the queue
before the link: one that serves packets in order of arrival, as on networks that ignore priorities,
and Linux's default, which sends background traffic last.

Before that, two stages of a pipeline save at every step without parity, with their waits for each
other marked as bubbles and not: copies slow down a computation beside them, but not a wait.

The network needs root, and the commands ip and tc; `--bubbles` measures the pipeline alone.

    make bench NAME=interference ARGS="--rate 1gbit --rounds 3"
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.bubbles_worker import JOB as BUBBLES_JOB
from benchmarks.bubbles_worker import NO_SAVES, STAGES
from benchmarks.cluster import Cluster, Daemon, run_ranks
from benchmarks.measure import Figure, ratio
from holdfast_core.snapshots.membership import Redundancy

JOB = "interference"
BUDGET_BYTES = 1 << 30
WITHIN_S = 600.0
MIB = 1 << 20
ADDRESSES = ("10.98.0.1", "10.98.0.2")
LINKS = ("hfbench0", "hfbench1")
STEPS_LEFT_OUT = 3
BURST, QUEUED = "128k", "4m"
"""Bytes that the link sends in one burst, and that its queue holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to treat protection's traffic."""

    name: str
    saves: bool = True
    limit: float = 0.0
    """Limit as a portion of what a snapshot at every step needs; 0: no limit."""
    held: bool = False
    """Whether fetching parity waits while the node's rank exchanges gradients."""


NOTHING = Way(name="no protection", saves=False)
WAYS = {
    "first come, first served": (
        NOTHING,
        Way(name="no limit"),
        Way(name="limited to what it needs", limit=1.0),
        Way(name="limited to a quarter of it", limit=0.25),
        Way(name="held while gradients move", held=True),
    ),
    "priorities": (
        NOTHING,
        Way(name="no limit"),
        Way(name="limited to a quarter of it", limit=0.25),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Result of one way over all rounds."""

    queue: str
    way: str
    step_s: float
    ratio: float
    """Time of a step as a ratio to that without protection behind the same queue."""
    protected: float
    """Portion of the steps whose snapshot became protected."""
    node_bytes_s: float
    """Bytes a second that each node fetched for parity."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bubble:
    """Result of saves in a pipeline."""

    way: str
    step_s: float
    ratio: Figure
    """Time of a step as a ratio to that without saves."""


def measure(options: argparse.Namespace) -> list[Row]:
    """All rows."""
    found: dict[tuple[str, Way], list[tuple[float, float, float]]] = {}
    for _ in range(options.rounds):
        for queue, ways in WAYS.items():
            with link(options.rate, priorities=queue == "priorities") as namespaces:
                for way in ways:
                    ran = run(way, options, namespaces)
                    found.setdefault((queue, way), []).append(ran)
    rows = []
    for (queue, way), runs in found.items():
        step_s, protected, node_bytes_s = map(statistics.median, zip(*runs, strict=True))
        floor_s = statistics.median(run[0] for run in found[queue, NOTHING])
        rows.append(
            Row(
                queue=queue,
                way=way.name,
                step_s=step_s,
                ratio=step_s / floor_s,
                protected=protected,
                node_bytes_s=node_bytes_s,
            )
        )
    return rows


def run(
    way: Way, options: argparse.Namespace, namespaces: Sequence[str]
) -> tuple[float, float, float]:
    """(mean seconds of a step, portion of them protected, bytes a second into each node)."""
    given = {**vars(options), **asdict(way), "other": namespaces[1]}
    command = ["ip", "netns", "exec", namespaces[0], sys.executable]
    command += ["-m", "benchmarks.interference", "--inside", json.dumps(given)]
    done = subprocess.run(command, check=True, timeout=WITHIN_S, stdout=subprocess.PIPE)
    step_s, protected, node_bytes_s = json.loads(done.stdout)
    print(f"{way.name:26} {1e3 * step_s:6.0f} ms a step", file=sys.stderr, flush=True)
    return step_s, protected, node_bytes_s


def inside(given: dict[str, object]) -> tuple[float, float, float]:
    """Do the work of `run` in the namespace of the first node."""
    payload, compute_s = int(str(given["payload"])) * MIB, float(str(given["compute"]))
    prefixes: tuple[list[str], ...] = ([], ["ip", "netns", "exec", str(given["other"])])
    module = "benchmarks.held_daemon" if given["held"] else "holdfast_daemon"
    with Cluster(BUDGET_BYTES, ADDRESSES[0]) as cluster:
        daemons = [
            cluster.start(f"node-{i}", host=ADDRESSES[i], within=prefixes[i], module=module)
            for i in range(2)
        ]
        nodes = [daemon.node for daemon in daemons]
        # A step takes a little longer than its computation, so this limit suffices.
        limit = int(float(str(given["limit"])) * payload / compute_s)
        if given["saves"]:
            cluster.control.place(JOB, 1, nodes, protection_bytes_s=limit)
        outs = [daemon.root.parent / f"rank-{i}.json" for i, daemon in enumerate(daemons)]
        ranks = []
        for rank, daemon in enumerate(daemons):
            command = [*prefixes[rank], *_worker(daemon, rank, outs[rank], payload, given)]
            ranks.append(subprocess.Popen(command, env=os.environ | _environment(rank)))
        codes = [rank.wait(WITHIN_S) for rank in ranks]
        if any(codes):
            raise RuntimeError("a rank failed; see its output above\n" + cluster.log(nodes[0]))
        times: list[float] = json.loads(outs[0].read_bytes())["times"]
        protected: int = json.loads(outs[0].read_bytes())["protected"]
        # The daemon counts once a second, so the first steps are included here.
        fetched = daemons[0].metric("holdfast_protection_bytes_total") if given["saves"] else 0.0
    step_s = statistics.fmean(times[STEPS_LEFT_OUT:])
    return step_s, protected / len(times), fetched / sum(times)


def measure_bubbles(options: argparse.Namespace) -> list[Bubble]:
    """Time of a step of a pipeline of two stages, whose waits are marked as bubbles or not, in one
    run. Their snapshots have no parity: only the copies interfere."""
    with Cluster(BUDGET_BYTES) as cluster:
        daemons = [cluster.start(f"stage-{rank}") for rank in range(STAGES)]
        nodes = [daemon.node for daemon in daemons]
        cluster.control.place(BUBBLES_JOB, 1, nodes, redundancy=Redundancy.NONE)
        arguments = ["--bytes", str(STAGES * options.payload * MIB)]
        arguments += ["--rounds", str(options.rounds), "--products", str(options.products)]
        directory = daemons[0].root.parent
        module = "benchmarks.bubbles_worker"
        outs = run_ranks(module, daemons, directory, arguments, WITHIN_S)
        times: dict[str, list[float]] = json.loads(outs[0])
    floors = times[NO_SAVES]
    return [
        Bubble(way=way, step_s=statistics.median(taken), ratio=ratio(taken, floors, "× no saves"))
        for way, taken in times.items()
    ]


def _worker(
    daemon: Daemon, rank: int, out: Path, payload: int, given: dict[str, object]
) -> list[str]:
    words = {
        "rank": rank,
        "root": daemon.root,
        "out": out,
        "payload": payload,
        "gradients": int(str(given["gradients"])) * MIB,
        "steps": given["steps"],
        "compute": given["compute"],
    }
    command = [sys.executable, "-m", "benchmarks.interference_worker"]
    command += [word for name, value in words.items() for word in (f"--{name}", str(value))]
    return [*command, *(["--saves"] if given["saves"] else [])]


def _environment(rank: int) -> dict[str, str]:
    return {
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": LINKS[rank],
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def link(rate: str, *, priorities: bool) -> Iterator[tuple[str, str]]:
    """The names of two network namespaces with a link of `rate` between them."""
    names = (f"hfbench-{os.getpid()}-a", f"hfbench-{os.getpid()}-b")
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        ends = ("name", LINKS[1], "netns", names[1])
        _ip("-n", names[0], "link", "add", LINKS[0], "type", "veth", "peer", *ends)
        for name, device, address in zip(names, LINKS, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            _ip("-n", name, "link", "set", device, "up")
            shape = ("tbf", "rate", rate, "burst", BURST, "limit", QUEUED)
            _tc(name, device, "root", "handle", "1:", *shape)
            if priorities:
                _tc(name, device, "parent", "1:1", "handle", "10:", "pfifo_fast")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _tc(namespace: str, device: str, *words: str) -> None:
    subprocess.run(["tc", "-n", namespace, "qdisc", "add", "dev", device, *words], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rate", default="1gbit", help="rate of the link, in tc's notation")
    parser.add_argument("--payload", type=int, default=32, metavar="MIB", help="size of a snapshot")
    parser.add_argument(
        "--gradients", type=int, default=32, metavar="MIB", help="gradients of a step"
    )
    parser.add_argument(
        "--compute", type=float, default=0.4, metavar="S", help="computation of a step"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--report", default="build/bench/interference.json", metavar="FILE")
    parser.add_argument(
        "--products", type=int, default=4, help="products of matrices in a pass of a microbatch"
    )
    parser.add_argument("--bubbles", action="store_true", help="measure only the pipeline")
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(inside(json.loads(options.inside))))
        return
    bubbles = measure_bubbles(options)
    print(f"a pipeline of {STAGES} stages, {options.payload} MiB each saved at every step:")
    for each in bubbles:
        figure = each.ratio
        print(
            f"{each.way:26}{1e3 * each.step_s:5.0f} ms{figure.value:8.2f} {figure.unit} "
            f"({figure.low:.2f} to {figure.high:.2f})"
        )
    if options.bubbles:
        return
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        raise SystemExit("This needs root, and the commands ip and tc (iproute2)")
    rows = measure(options)
    print(
        f"{'queue':26}{'protection':28}{'step':>8}{'ratio':>8}{'protected':>11}{'into a node':>14}"
    )
    for row in rows:
        print(
            f"{row.queue:26}{row.way:28}{1e3 * row.step_s:5.0f} ms{row.ratio:8.2f}"
            f"{row.protected:11.0%}{row.node_bytes_s / 1e6:9.1f} MB/s"
        )
    report = Path(options.report)
    report.parent.mkdir(parents=True, exist_ok=True)
    found = {"rows": [*map(asdict, rows)], "bubbles": [*map(asdict, bubbles)]}
    report.write_text(json.dumps({"given": vars(options), **found}, indent=1))


if __name__ == "__main__":
    main()
