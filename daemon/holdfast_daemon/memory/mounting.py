"""`holdfast-daemon mount`: mounts the tmpfs for arenas, and makes the directory of the sockets.

This is the step before the daemon on a Kubernetes node, and the only one with privileges. The tmpfs
is mounted on the node itself, so it outlives the daemon's container, pod and upgrades; only a
reboot loses it. Running the command again changes only what differs. The files in the tmpfs, which
a daemon uses or will adopt, stay.

`decide` is pure; the rest asks the kernel and carries out the decision.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from errno import EACCES, EINVAL, EPERM
from pathlib import Path

from holdfast_core.errors import HoldfastError, StorageError
from holdfast_daemon.memory.kernel_mounts import (
    NOTHING_RUNS,
    Mount,
    MountFlag,
    current_mounts,
    mount,
    mount_above,
    mount_at,
)

OWNER = 65532
"""User and group of the daemon's image."""
PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class MountedMemory:
    """Capacity and use of a mounted tmpfs."""

    size_bytes: int
    used_bytes: int


class MountAction(StrEnum):
    MOUNT = "mount"
    REMOUNT = "remount"
    KEEP = "keep"


@dataclass(frozen=True, kw_only=True, slots=True)
class MountDecision:
    """The action to take about the tmpfs, and its reason."""

    action: MountAction
    reason: str
    warning: bool = False
    """Whether an operator should look at the reason."""


def decide(
    path: Path, mounts: Iterable[Mount], held: MountedMemory | None, wanted_bytes: int
) -> MountDecision:
    """Decide what must be done so that a tmpfs of `wanted_bytes` is at `path`.

    `held` is the capacity and use of the file system mounted there; None when there is none.

    Raises:
        StorageError: it cannot be done; the message gives the reason.
    """
    mounts = list(mounts)
    there, above = mount_at(path, mounts), mount_above(path, mounts)
    if there is None or held is None:
        if above is None or not above.shared:
            point = above.point if above is not None else path.anchor
            raise StorageError(
                f"a tmpfs mounted at {path} would not reach the node: {point} is not shared; give "
                f"the volume that contains it mountPropagation: Bidirectional, in a privileged "
                f"container"
            )
        return MountDecision(action=MountAction.MOUNT, reason=f"nothing is mounted at {path}")
    if there.file_system != "tmpfs":
        raise StorageError(
            f"{path} is a {there.file_system}, not a tmpfs; unmount it on the node, or choose "
            f"another --path"
        )
    wanted_bytes = -(-wanted_bytes // PAGE_BYTES) * PAGE_BYTES
    if held.size_bytes == wanted_bytes:
        return MountDecision(
            action=MountAction.KEEP, reason=f"{path} has {wanted_bytes} bytes already"
        )
    if held.used_bytes > wanted_bytes:
        return MountDecision(
            action=MountAction.KEEP,
            reason=f"{path} keeps its {held.size_bytes} bytes: {held.used_bytes} are in use, more "
            f"than the {wanted_bytes} of --size; mount it again when jobs have ended, or "
            f"give a larger --size",
            warning=True,
        )
    return MountDecision(
        action=MountAction.REMOUNT,
        reason=f"{path} has {held.size_bytes} bytes instead of {wanted_bytes}",
    )


def mount_memory(path: Path, size_bytes: int, huge: str, owner: int) -> MountDecision:
    """Ensure a tmpfs of `size_bytes` at `path` that belongs to `owner` alone; return the decision.

    Raises:
        StorageError: it cannot be mounted.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        path = path.resolve()
        mounts = current_mounts()
        mounted = _held(path) if mount_at(path, mounts) else None
        decision = decide(path, mounts, mounted, size_bytes)
        if decision.action is not MountAction.KEEP:
            _mount_with(path, size_bytes, huge, again=decision.action is MountAction.REMOUNT)
        _own(path, owner, 0o700)
    except OSError as error:
        raise StorageError(_explained(path, error)) from error
    return decision


def make_socket_directory(path: Path, owner: int) -> None:
    """Make a directory that `owner` writes and every user may enter.

    Raises:
        StorageError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        _own(path, owner, 0o755)
    except OSError as error:
        raise StorageError(_explained(path, error)) from error


def main(arguments: list[str]) -> int:
    """Run the command line; 0 when memory and sockets are ready, 2 when they cannot be."""
    options = _parser().parse_args(arguments)
    try:
        decision = mount_memory(options.path, options.size, options.huge, options.owner)
        if options.sockets is not None:
            make_socket_directory(options.sockets, options.owner)
    except HoldfastError as error:
        print(f"holdfast-daemon mount: {error}", file=sys.stderr)
        return 2
    label = "warning" if decision.warning else decision.action
    print(f"holdfast-daemon mount: {label}: {decision.reason}", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="holdfast-daemon mount",
        description="Mount the tmpfs that the daemon keeps snapshots on, or change its size. Needs "
        "a privileged container, and Bidirectional mount propagation above --path.",
    )
    add = parser.add_argument
    add(
        "--path",
        type=Path,
        required=True,
        help="where to mount it, for example /run/holdfast/memory",
    )
    add(
        "--size",
        type=int,
        required=True,
        metavar="BYTES",
        help="size of the tmpfs: at least the daemon's budget",
    )
    add(
        "--huge",
        default="within_size",
        choices=["never", "always", "within_size", "advise"],
        help="huge pages; not used when the kernel has none (default: %(default)s)",
    )
    add("--sockets", type=Path, metavar="DIR", help="also create this directory for sockets")
    add(
        "--owner",
        type=int,
        default=OWNER,
        metavar="UID",
        help="the daemon's user id, which will own both (default: %(default)s)",
    )
    return parser


def _held(path: Path) -> MountedMemory:
    status = os.statvfs(path)
    return MountedMemory(
        size_bytes=status.f_blocks * status.f_frsize,
        used_bytes=(status.f_blocks - status.f_bfree) * status.f_frsize,
    )


def _mount_with(path: Path, size_bytes: int, huge: str, *, again: bool) -> None:
    try:
        _mount(path, f"size={size_bytes},huge={huge}", again=again)
    except OSError as error:
        if error.errno != EINVAL:
            raise
        # A kernel without huge pages in tmpfs rejects the option.
        _mount(path, f"size={size_bytes}", again=again)


def _mount(path: Path, options: str, *, again: bool) -> None:
    if again:
        mount("holdfast", path, "tmpfs", NOTHING_RUNS | MountFlag.REMOUNT, options)
    else:
        mount("holdfast", path, "tmpfs", NOTHING_RUNS, f"{options},mode=0700")


def _own(path: Path, owner: int, mode: int) -> None:
    """Give `path` to `owner`, with everything below when it belonged to another user, as after a
    change of the daemon's user."""
    if path.stat().st_uid != owner:
        for directory, names, files in os.walk(path):
            for name in (*names, *files):
                os.chown(Path(directory, name), owner, owner, follow_symlinks=False)
        os.chown(path, owner, owner)
    path.chmod(mode)


def _explained(path: Path, error: OSError) -> str:
    if error.errno in (EPERM, EACCES):
        return (
            f"{path} cannot be mounted: {error.strerror}; this step needs CAP_SYS_ADMIN and root: "
            f"run it in a privileged container"
        )
    return f"{path} cannot be mounted: {error.strerror or error}"
