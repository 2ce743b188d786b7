"""The processes of this machine, and which of them descend from which, as /proc shows them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

_STATE, _PARENT = 0, 1
"""Fields of /proc/PID/stat, as `stat_fields` counts them."""


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name of the program; empty if there is no such
    process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def state_of(pid: int) -> str:
    """State of a process, a letter such as `S`; empty if there is none."""
    fields = stat_fields(pid)
    return fields[_STATE] if fields else ""


def all_children() -> dict[int, list[int]]:
    """Process → its children, ascending."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (fields := stat_fields(int(folder.name))):
            children.setdefault(int(fields[_PARENT]), []).append(int(folder.name))
    return {parent: sorted(found) for parent, found in children.items()}


def family_of(root: int, children: Mapping[int, Collection[int]]) -> list[int]:
    """A process and its descendants, nearer ones first. `children` is as of `all_children`."""
    family = [root]
    for pid in family:
        family += children.get(pid, ())
    return family
