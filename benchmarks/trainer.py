"""Costs in a training process: `blocked`, `staged`, `save_call_ms`, `committed`, `first_save`,
`looked` and `restore`, through the public SDK and a real daemon.

A few rounds, each with a new daemon: a process opens a session, saves and dies by SIGKILL. After
the last one, new processes restore, each in an epoch of its own.

    python -m benchmarks.trainer --bytes N --out FILE
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TypeVar

import msgspec

from benchmarks.cluster import Cluster, Daemon
from benchmarks.measure import Figure, Outcome, milliseconds, ratio, run_part
from benchmarks.trainer_worker import JOB, Restored, Saves
from holdfast_core.snapshots.layouts import SLOTS_MAX
from holdfast_core.snapshots.membership import Redundancy

ROUNDS = 3
RESTORES = 5
WITHIN_S = 300.0

_T = TypeVar("_T")


def measure(total_bytes: int, directory: Path) -> Outcome:
    """Measure all rows; workers write their results to `directory`."""
    budget_bytes = SLOTS_MAX * total_bytes * 5 // 4
    rounds: list[Saves] = []
    restores: list[Restored] = []
    for turn in range(ROUNDS):
        with Cluster(budget_bytes) as cluster:
            daemon = cluster.start("node-0")
            cluster.control.place(JOB, 1, [daemon.node], redundancy=Redundancy.NONE)
            out = directory / f"save-{turn}.json"
            rounds.append(_work("save", daemon, total_bytes, out, Saves))
            if turn < ROUNDS - 1:
                continue
            for epoch in range(2, RESTORES + 2):
                cluster.control.place(JOB, epoch, [daemon.node], redundancy=Redundancy.NONE)
                out = directory / f"restore-{epoch}.json"
                restores.append(_work("restore", daemon, total_bytes, out, Restored))
    last = rounds[-1]
    for restored in restores:
        if (restored.step, restored.digest) != (last.step, last.digest):
            raise RuntimeError(
                f"step {restored.step} was restored with bytes that differ from the saved ones"
            )
    return Outcome(rows=_rows(rounds, restores), facts={"state_bytes": last.state_bytes})


def _rows(rounds: list[Saves], restores: list[Restored]) -> dict[str, Figure]:
    floors = [floor for saves in rounds for floor in saves.floors]

    def over_floor(name: str) -> Figure:
        return ratio([s for saves in rounds for s in getattr(saves, name)], floors)

    return {
        "blocked": over_floor("blocked"),
        "staged": over_floor("staged"),
        "save_call_ms": milliseconds([s for saves in rounds for s in saves.call]),
        "committed": over_floor("committed"),
        "first_save": ratio(
            [saves.first_committed for saves in rounds],
            [statistics.median(saves.committed) for saves in rounds],
            "× warm save",
            note="the first save of a new session into a new arena, until committed",
        ),
        "looked": ratio(
            [s for saves in rounds for s in saves.looked],
            [statistics.median(saves.committed) for saves in rounds for _ in saves.looked],
            "× warm save",
            note="digests of all units, which a save with replicas computes before it copies",
        ),
        "restore": ratio(
            [restored.seconds for restored in restores],
            [restored.floor for restored in restores],
            note="session.restore() of a new process, after SIGKILL of the one before",
        ),
        "restore_floor": ratio(
            [restored.read_back for restored in restores],
            [restored.floor for restored in restores],
            note="the same bytes by pread from tmpfs into the live tensors, unverified",
        ),
    }


def _work(what: str, daemon: Daemon, total_bytes: int, out: Path, kind: type[_T]) -> _T:
    """Result of a worker process, which writes it to `out`."""
    command = [sys.executable, "-m", "benchmarks.trainer_worker", what]
    command += ["--socket", str(daemon.socket), "--bytes", str(total_bytes), "--out", str(out)]
    done = subprocess.run(command, check=False, timeout=WITHIN_S)
    expected = -signal.SIGKILL if what == "save" else 0
    if done.returncode != expected:
        raise RuntimeError(f"`{what}` ended with {done.returncode}; see its output above")
    return msgspec.json.decode(out.read_bytes(), type=kind)


if __name__ == "__main__":
    run_part(measure, __doc__)
