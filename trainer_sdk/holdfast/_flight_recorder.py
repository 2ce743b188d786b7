"""Collectives on request: a process tells its launcher which of its collectives are not complete.

torch records the newest collectives of each process: their groups, their numbers, and whether they
are complete (its flight recorder). With NCCL, where the main threads of all ranks wait in the same
line, and where two groups are used from one line, only this record shows which rank is missing.

A thread waits on a pipe for the question. It needs the interpreter's lock, so a process that holds
it does not answer, and neither does one whose torch has no recorder, or whose recorder is off. A
missing answer proves nothing. Before the first question, the thread only sleeps in the kernel.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from holdfast_core.inspections import GROUPS_MAX, MEMBERS_MAX, GroupCollectives

QUESTION = b"?"

_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Functions of torch that return the record: the first of gloo and further backends, the second of
NCCL. Older versions of torch have only the second, or none."""


def question_file(directory: Path, pid: int) -> Path:
    """Return the pipe that a process waits on for a question."""
    return directory / f"{pid}.ask"


def answer_file(directory: Path, pid: int) -> Path:
    """Return the file that has the answer: JSON of a list of `GroupCollectives`."""
    return directory / f"{pid}.collectives"


def offer_collectives(directory: Path) -> None:
    """Let the launcher that has created `directory` ask for the collectives of this process. Raises
    OSError or RuntimeError if that is not possible."""
    question = question_file(directory, os.getpid())
    question.unlink(missing_ok=True)  # of an earlier process with this number
    os.mkfifo(question, 0o600)
    pipe = os.open(question, os.O_RDWR | os.O_CLOEXEC)
    answer = answer_file(directory, os.getpid())
    threading.Thread(
        target=_answer_questions, args=(pipe, answer), name="holdfast-collectives", daemon=True
    ).start()


def _answer_questions(pipe: int, answer: Path) -> None:
    written = answer.with_suffix(".written")
    while os.read(pipe, 64):
        with suppress(Exception):  # torch may change what it records, at any time.
            written.write_bytes(msgspec.json.encode(recorded_collectives()))
            written.replace(answer)


def recorded_collectives() -> list[GroupCollectives]:
    """Return the collectives of this process by group: first groups in which something is pending,
    then those that were used last. Raises whatever torch does."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    bindings: Any = sys.modules.get("torch._C._distributed_c10d")
    if c10d is None or bindings is None:
        return []
    dumps = [dump for name in _RECORDERS if (dump := getattr(bindings, name, None)) is not None]
    recorded: dict[str, list[Any]] = {}
    whole = {"gloo": False, "nccl": False}
    for entries in map(_entries_of, dumps):
        for entry in entries:
            backend, _, operation = entry["profiling_name"].partition(":")
            name = f"{entry['process_group'][0]} {backend}"
            recorded.setdefault(name, []).append({**entry, "operation": operation})
            whole[backend] = entries[0]["record_id"] == 0
    found: list[tuple[bool, int, GroupCollectives]] = []
    for name, (members, count) in _groups_of(c10d).items():
        entries = recorded.get(name, [])
        if not entries and not whole.get(name.rpartition(" ")[2], False):
            continue  # Its collectives may have been overwritten in the record.
        if (collectives := collectives_of(name, members, count, entries)) is not None:
            newest = max((e["record_id"] for e in entries), default=-1)
            found.append((not collectives.operation, -newest, collectives))
    found.sort(key=lambda each: each[:2])
    return [collectives for _, _, collectives in found[:GROUPS_MAX]]


def collectives_of(
    name: str, members: tuple[int, ...], count: int, entries: Sequence[Mapping[str, Any]]
) -> GroupCollectives | None:
    """Return the collectives of a group; None if the record is not complete, or not understood.

    Groups that are made again, after a change of the world, have their old names, and count from 1
    again. With gloo, the group counts messages between two ranks too, which are not recorded: after
    one, nothing shows any more whose record it is.

    Args:
        members: world ranks of the group.
        count: number of its collectives, as the group has counted them.
        entries: record of all groups of this name, the oldest entry first.
    """
    latest = max((e["pg_id"] for e in entries), default=0)
    own = [e for e in entries if e["pg_id"] == latest]
    entered = max((e["collective_seq_id"] for e in own if not e["is_p2p"]), default=0)
    if count == 0 and entered > 0:
        own, entered = [], 0  # of an earlier group; this one has not been used yet
    if entered != count:
        return None
    # The parts of a coalesced operation share its number, and never complete in the record: its
    # last entry stands for the whole.
    last = {(e["is_p2p"], e["p2p_seq_id" if e["is_p2p"] else "collective_seq_id"]): e for e in own}
    pending = next(
        (e for e in last.values() if not e["retired"] and e["state"] != "completed"), None
    )
    return GroupCollectives(
        group=name,
        entered=entered,
        pending=0 if pending is None or pending["is_p2p"] else pending["collective_seq_id"],
        operation="" if pending is None else pending["operation"],
        size=len(members),
        members=members if pending is not None and len(members) <= MEMBERS_MAX else (),
    )


def _entries_of(dump: Callable[[], bytes]) -> list[Any]:
    """The record of one recorder, the oldest entry first."""
    entries: list[Any] = msgspec.json.decode(dump()).get("entries", [])
    return sorted(entries, key=lambda entry: entry["record_id"])


def _groups_of(c10d: Any) -> dict[str, tuple[tuple[int, ...], int]]:
    """The world ranks of each group that exists now, and the number of its collectives so far, by
    the names of the group and of its backend."""
    world, found = c10d._world, dict[str, tuple[tuple[int, ...], int]]()
    for group in [*world.pg_map]:
        members = tuple(sorted(world.pg_group_ranks.get(group, ())))
        for device in group._device_types:
            with suppress(RuntimeError):  # for a device without a backend of this group
                backend = group._get_backend(device)
                name = f"{group.group_name} {backend.name().lower()}"
                found[name] = members, backend._get_sequence_number_for_group()
    return found
