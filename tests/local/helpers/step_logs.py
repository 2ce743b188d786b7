"""The logs in which the trainers of tests write a line of JSON for each step."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

_LINE_BYTES_MAX = 1000


class Line(Protocol):
    """What a rank has written after a step."""

    @property
    def step(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def hash(self) -> str: ...


def check_steps(histories: Sequence[Sequence[Line]], expected: Callable[[int, int], str]) -> None:
    """Check the bits of each step of each rank, that no step is left out, and that all ranks begin
    each epoch at the same step.

    Args:
        histories: lines of each rank, in their order.
        expected: returns the hash of a rank after a step.
    """
    begins: dict[int, set[int]] = {}
    for rank, lines in enumerate(histories):
        for before, line in zip([None, *lines], lines, strict=False):
            assert line.hash == expected(rank, line.step), (rank, line)
            if before is None or before.epoch != line.epoch:
                begins.setdefault(line.epoch, set()).add(line.step)
            else:
                assert line.step == before.step + 1, (rank, before, line)
    assert all(len(steps) == 1 for steps in begins.values()), begins


def ends_of_logs(directory: Path) -> str:
    """The last characters of each log of a local run in `directory`."""
    logs = sorted((directory / "run" / "logs").glob("*"))
    return "\n".join(f"--- {path.name}\n{path.read_text()[-6000:]}" for path in logs)


def newest_line(log: Path) -> dict[str, Any] | None:
    """The last whole line of a log; None without one. Cheap, however long the log is: a control
    loop of the same process waits meanwhile."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _LINE_BYTES_MAX))
            whole = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return None
    return json.loads(whole[-1]) if whole else None
