"""The mounts of this process's namespace: the kernel's table of them, and the calls that change it.

Must not: decide what to mount.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path

_MOUNTINFO = Path("/proc/self/mountinfo")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
]
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]


class MountFlag(IntFlag):
    """Flags of mount(2)."""

    RDONLY = 1
    NOSUID = 2
    NODEV = 4
    NOEXEC = 8
    REMOUNT = 32
    BIND = 4096


NOTHING_RUNS = MountFlag.NOSUID | MountFlag.NODEV | MountFlag.NOEXEC
"""Flags of a mount that holds data only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo."""

    point: Path
    file_system: str
    shared: bool
    """Whether mounts below it appear in other mount namespaces too."""


def parse_mounts(mountinfo: str) -> list[Mount]:
    """The mounts of a namespace; a mount that covers another comes after it."""
    mounts = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        mounts.append(
            Mount(
                point=Path(fields[4].encode().decode("unicode_escape")),
                file_system=after.split()[0],
                shared=any(field.startswith("shared:") for field in fields[6:]),
            )
        )
    return mounts


def current_mounts() -> list[Mount]:
    """The mounts of this process's namespace."""
    return parse_mounts(_MOUNTINFO.read_text())


def mount_at(path: Path, mounts: Iterable[Mount]) -> Mount | None:
    """The mount that is visible at `path` itself."""
    return next((mount for mount in reversed(list(mounts)) if mount.point == path), None)


def mount_above(path: Path, mounts: Iterable[Mount]) -> Mount | None:
    """The mount that a directory at `path` lies on, whatever is mounted at `path` itself."""
    above = [mount for mount in mounts if mount.point in path.parents]
    deepest = max((len(mount.point.parts) for mount in above), default=0)
    return next((m for m in reversed(above) if len(m.point.parts) == deepest), None)


def mount(source: str | Path, path: Path, file_system: str, flags: MountFlag, options: str) -> None:
    """Call mount(2).

    Raises:
        OSError: with the kernel's reason.
    """
    _check(
        _libc.mount(
            os.fsencode(source), os.fsencode(path), file_system.encode(), flags, options.encode()
        )
    )


def unmount(path: Path) -> None:
    """Call umount2(2), without waiting for those that still use files below `path`.

    Raises:
        OSError: with the kernel's reason.
    """
    detach = 2
    _check(_libc.umount2(os.fsencode(path), detach))


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
