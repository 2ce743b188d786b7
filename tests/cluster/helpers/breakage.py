"""Breaks a node's memory and disk for real: a tmpfs that is full, a disk that is slow."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import cgroups
from machine import ClusterError, run
from nodes import Node

MEMORY = "/run/holdfast/memory"
_BALLAST = "ballast"
_GREEDY_S = 0.01
_DISK_BYTES = 1 << 30
_NODE_DISK_BYTES = 4 << 30


@contextmanager
def fill_memory(node: Node, leave_bytes: int, path: str = MEMORY) -> Iterator[Path]:
    """While it lasts, the file system at `path` of a node has no more than `leave_bytes` left: what
    others give back is taken at once. Yields the file that fills it.

    Raises:
        ClusterError: when there is no file system of its own at `path`.
    """
    folder = node.path(path)
    if not folder.exists() or folder.stat().st_dev == folder.parent.stat().st_dev:
        raise ClusterError(f"{node.name} has nothing mounted at {path}")
    ballast = folder / _BALLAST
    over = threading.Event()
    try:
        with ballast.open("wb") as file:
            _take(file.fileno(), leave_bytes)
            greedy = threading.Thread(target=_keep_taking, args=(file.fileno(), leave_bytes, over))
            greedy.start()
            try:
                yield ballast
            finally:
                over.set()
                greedy.join()
    finally:
        with suppress(OSError):  # the node may have lost its power meanwhile
            ballast.unlink(missing_ok=True)


def _keep_taking(descriptor: int, leave_bytes: int, over: threading.Event) -> None:
    while not over.wait(_GREEDY_S):
        _take(descriptor, leave_bytes)


def _take(descriptor: int, leave_bytes: int) -> None:
    """Extend a file until its file system has `leave_bytes` left."""
    space = os.fstatvfs(descriptor)
    more = space.f_bavail * space.f_frsize - leave_bytes
    if more > 0:
        with suppress(OSError):  # another process was quicker
            os.posix_fallocate(descriptor, os.fstat(descriptor).st_size, more)


@contextmanager
def slow_disk(node: Node, path: str, bytes_s: int) -> Iterator[None]:
    """Mount a disk of 1 GiB at `path` of a node, a folder below /run/holdfast; it takes `bytes_s`.

    Processes that have `path` open from before do not see it: mount it before their pods start.
    """
    image = node.home / f"disk-{path.strip('/').replace('/', '-')}.img"
    with _block_device(image, _DISK_BYTES) as device:
        run(*node.command("mkdir", "-p", path))
        run(*node.command("mount", device, path))
        try:
            with throttled(device, bytes_s):
                yield
        finally:
            with suppress(ClusterError):  # the node may have lost its power meanwhile
                run(*node.command("umount", "--lazy", path))


@contextmanager
def disk_of_its_own(node: Node) -> Iterator[str]:
    """Move the disk of a node that is off to a block device, which it yields: for `throttled`.

    The node must be off at the end too. It has its old disk then, as it was.
    """
    before = node.disk.with_name("disk-before")
    with _block_device(node.home / "disk.img", _NODE_DISK_BYTES) as device:
        node.disk.rename(before)
        node.disk.mkdir()
        try:
            run("mount", device, node.disk)
            try:
                run("cp", "--archive", f"{before}/.", node.disk)
                run("sync", "--file-system", node.disk)
                yield device
            finally:
                run("umount", "--lazy", node.disk)
        finally:
            node.disk.rmdir()
            before.rename(node.disk)


@contextmanager
def throttled(device: str, bytes_s: int) -> Iterator[None]:
    """While it lasts, a block device takes and gives at most `bytes_s` each."""
    number = _number_of(device)
    try:
        cgroups.throttle(number, bytes_s)
        yield
    finally:
        cgroups.throttle(number, 0)


def release_disks(home: Path) -> None:
    """Give back the loop devices of images below `home` that were left behind."""
    listed = run("losetup", "--list", "--json").strip()
    for entry in json.loads(listed)["loopdevices"] if listed else []:
        if Path(entry["back-file"]).is_relative_to(home):
            cgroups.throttle(_number_of(entry["name"]), 0)
            with suppress(ClusterError):  # it may be mounted nowhere
                run("umount", "--lazy", entry["name"])
            run("losetup", "--detach", entry["name"])


@contextmanager
def _block_device(image: Path, nbytes: int) -> Iterator[str]:
    """A disk with a file system, in the sparse file `image`; its device."""
    with image.open("wb") as file:
        file.truncate(nbytes)
    run("mkfs.ext4", "-q", "-F", "-E", "root_owner=65532:65532,lazy_itable_init=0", image)
    device = run("losetup", "--find", "--show", image).strip()
    try:
        yield device
    finally:
        run("losetup", "--detach", device)
        image.unlink(missing_ok=True)


def _number_of(device: str) -> str:
    return (Path("/sys/class/block") / Path(device).name / "dev").read_text().strip()
