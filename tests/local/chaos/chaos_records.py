"""Records of a violation: enough to understand it without repeating the run."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
from chaos_world import World
from daemons import DaemonProcess
from waiting import wait_for

LOG_BYTES_MAX = 8 << 20
"""Of one daemon; the newest are kept."""
STACKS_S = 2.0
"""A daemon that has not written its stacks by then is left as it is."""


def clear(reports: Path) -> None:
    """Remove what earlier runs kept below `reports`."""
    for path in reports.glob("violation-*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def keep(directory: Path, world: World, what: str, schedule: Sequence[dict[str, Any]]) -> None:
    """Write into `directory`: `violation.txt` (what did not hold, how to repeat it, what daemons
    held), `schedule.json` (all faults of this world), each daemon's status and its log, which ends
    with the stacks of its threads, and a list of the files in storage."""
    directory.mkdir(parents=True)
    shape = world.shape
    about = (
        f"{shape.members} members in groups of {shape.group_size}, tier in {world.tier.kind}, "
        f"{'with' if world.guarded else 'without'} certificates, "
        f"control server: {'the operator' if world.operated else 'that of the tests'}"
    )
    (directory / "violation.txt").write_text(f"{what}\n\n{about}\n\n{world.cluster.report()}\n")
    (directory / "schedule.json").write_text(json.dumps(schedule, indent=1) + "\n")
    for daemon in world.cluster.daemons.values():
        if daemon.alive:
            _ask(daemon, directory / f"{daemon.node}.json")
        if daemon.log.exists():
            with daemon.log.open("rb") as log:
                log.seek(max(0, daemon.log.stat().st_size - LOG_BYTES_MAX))
                (directory / daemon.log.name).write_bytes(log.read())
    held = sorted(path for path in world.tier.real.rglob("*") if path.is_file())
    lines = (f"{path.stat().st_size:>10} {path.relative_to(world.tier.real)}" for path in held)
    (directory / "storage.txt").write_text("\n".join(lines) + "\n")


def _ask(daemon: DaemonProcess, path: Path) -> None:
    """Get the daemon's status into `path`, and its stacks into its log, as far as it still
    answers."""
    try:
        path.write_text(json.dumps(daemon.status(), indent=1) + "\n")
    except grpc.RpcError as error:
        path.write_text(f"{error}\n")
    daemon.send_signal(signal.SIGCONT)
    daemon.send_signal(signal.SIGUSR1)
    with suppress(AssertionError):
        wait_for("stacks", lambda: "Current thread" in daemon.log.read_text(), STACKS_S)
