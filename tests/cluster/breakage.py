"""Breaks a node's memory and disk for real: a tmpfs that is full, a disk that is slow."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import cgroups
from machine import ClusterError, run
from nodes import Node

MEMORY = "/run/holdfast/memory"
_BALLAST = "ballast"
_DISK_BYTES = 1 << 30


@contextmanager
def fill_memory(node: Node, leave_bytes: int, path: str = MEMORY) -> Iterator[Path]:
    """Fill the file system at `path` of a node but for `leave_bytes`; yields what fills it.

    Raises:
        ClusterError: when there is no file system of its own at `path`.
    """
    folder = node.path(path)
    if not folder.exists() or folder.stat().st_dev == folder.parent.stat().st_dev:
        raise ClusterError(f"{node.name} has nothing mounted at {path}")
    space = os.statvfs(folder)
    size = max(space.f_bavail * space.f_frsize - leave_bytes, 0)
    ballast = folder / _BALLAST
    try:
        with ballast.open("wb") as file:
            if size:
                os.posix_fallocate(file.fileno(), 0, size)
        yield ballast
    finally:
        with suppress(OSError):  # the node may have lost its power meanwhile
            ballast.unlink(missing_ok=True)


@contextmanager
def slow_disk(node: Node, path: str, bytes_s: int) -> Iterator[None]:
    """Mount a disk of 1 GiB at `path` of a node, a folder below /run/holdfast; it takes `bytes_s`.

    Processes that have `path` open from before do not see it: mount it before their pods start.
    """
    image = node.home / f"disk-{path.strip('/').replace('/', '-')}.img"
    with image.open("wb") as file:
        file.truncate(_DISK_BYTES)
    run("mkfs.ext4", "-q", "-F", "-E", "root_owner=65532:65532,lazy_itable_init=0", image)
    device = run("losetup", "--find", "--show", image).strip()
    try:
        run(*node.command("mkdir", "-p", path))
        run(*node.command("mount", device, path))
        cgroups.throttle_writes(_number_of(device), bytes_s)
        yield
    finally:
        cgroups.throttle_writes(_number_of(device), 0)
        with suppress(ClusterError):  # the node may have lost its power meanwhile
            run(*node.command("umount", "--lazy", path))
        run("losetup", "--detach", device)
        image.unlink(missing_ok=True)


def release_disks(home: Path) -> None:
    """Give back the loop devices of images below `home` that somebody left."""
    listed = run("losetup", "--list", "--json").strip()
    for entry in json.loads(listed)["loopdevices"] if listed else []:
        if Path(entry["back-file"]).is_relative_to(home):
            cgroups.throttle_writes(_number_of(entry["name"]), 0)
            run("losetup", "--detach", entry["name"])


def _number_of(device: str) -> str:
    return (Path("/sys/class/block") / Path(device).name / "dev").read_text().strip()
