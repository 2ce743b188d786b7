"""Control groups, of version 1 or 2: one for each node; and, version 1 only, slow disks.

A node's kubelet accounts its pods below the node's group, so that real limits hold for them.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from machine import ClusterError

_ROOT = Path("/sys/fs/cgroup")
_V2_CONTROLLERS = "+cpu +cpuset +io +memory +pids"


def create(name: str) -> None:
    """Make the group `name` below the root of every hierarchy."""
    if _is_v2():
        (_ROOT / "cgroup.subtree_control").write_text(_V2_CONTROLLERS)
    for hierarchy in _hierarchies():
        (hierarchy / name).mkdir(exist_ok=True)
        for setting in ("cpuset.cpus", "cpuset.mems"):  # version 1 starts with none
            if not _is_v2() and (hierarchy / setting).exists():
                (hierarchy / name / setting).write_text((hierarchy / setting).read_text())


def remove(name: str) -> None:
    """Remove the group and all below it, as far as no process is left in them."""
    for hierarchy in _hierarchies():
        for folder, _, _ in os.walk(hierarchy / name, topdown=False):
            with suppress(OSError):
                Path(folder).rmdir()


def processes(name: str, within: str) -> list[int]:
    """Pids, as this host sees them, of all processes below the group `within` in group `name`."""
    hierarchy = _ROOT if _is_v2() else _ROOT / "memory"
    found: list[int] = []
    for file in (hierarchy / name).rglob(f"{within}/**/cgroup.procs"):
        with suppress(OSError):  # the group has gone
            found += map(int, file.read_text().split())
    return sorted(found)


def throttle(device: str, bytes_s: int) -> None:
    """Let a block device, given as `major:minor`, take and give at most `bytes_s` each; 0 lifts
    the limit.

    On the root group, so that it holds for what the kernel writes back later as well.
    """
    for direction in ("write", "read"):
        setting = _ROOT / "blkio" / f"blkio.throttle.{direction}_bps_device"
        if not setting.exists():
            raise ClusterError(
                "a slow disk needs control groups of version 1 with blkio throttling"
            )
        setting.write_text(f"{device} {bytes_s}")


def _is_v2() -> bool:
    return (_ROOT / "cgroup.controllers").exists()


def _hierarchies() -> list[Path]:
    if _is_v2():
        return [_ROOT]
    folders = [p for p in _ROOT.iterdir() if p.is_dir() and not p.is_symlink()]
    return sorted(p for p in folders if p.name != "unified" and (p / "cgroup.procs").exists())
