"""What a run wrote down, and the phases of a recovery in it. All times are in seconds since the
Unix epoch.

Sources are the events of the control loop, the logs of the daemons, the messages of the SDK in the
workers, and the example's log of its steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast_cli.local import TimedEvent
from holdfast_operator.reconciler.observe.views import EventReason

T = TypeVar("T")

STARTED = "process started"
"""First message of a worker."""
_FORMED = re.compile(r"epoch (\d+): rank \d+ of \d+, groups formed in ")
_LINE = re.compile(r"recovery line: |nothing is restored: ")
_RESTORED = re.compile(r"epoch (\d+) (?:starts|goes on live) ")


class Phase(StrEnum):
    """What has been reached since a fault. Each is reached by all ranks, or by the last daemon."""

    NOTICED = "noticed"
    """The control loop has decided to recover."""
    AGREED = "agreed"
    """All daemons have entered the new epoch."""
    STARTED = "started"
    """All processes of the new epoch run, with torch imported; `agreed` if none of them is new."""
    FORMED = "formed"
    """Process groups are formed."""
    LINE = "line"
    """All ranks know the recovery line, or that they need none: a new process has built its model
    and data."""
    RESTORED = "restored"
    """State is restored and verified."""
    STEP = "step"
    """The first step of the new epoch is completed."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message of the SDK in a worker."""

    time: float
    pid: int
    rank: int
    text: str


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A completed step, as rank 0 logged it. It needs the gradients of all ranks."""

    step: int
    time: float
    epoch: int
    restored: str = ""
    """Hash of the state of all ranks that the epoch began with; empty unless it was asked for."""
    state: str = ""
    """Hash of the state of all ranks after this step."""


class DaemonLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a daemon's log."""

    time: datetime
    event: str = ""
    epoch: int = 0


class MissingError(Exception):
    """A run has no trace of something that must have happened."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traces:
    """What a run wrote down, each list oldest first."""

    events: Sequence[TimedEvent]
    daemons: Sequence[DaemonLine]
    messages: Sequence[Message]
    steps: Sequence[Step]
    ranks: Sequence[int]
    """Number of ranks in each epoch, from the first on."""

    def check_restored(self, epoch: int) -> None:
        """Check that `epoch` began with the state after the step before its first one.

        Raises:
            MissingError: it did not, or the hash of one of both is missing.
        """
        first = next((step for step in self.steps if step.epoch == epoch), None)
        saved = {step.step: step.state for step in self.steps if step.epoch < epoch}
        if first is None or not first.restored or first.restored != saved.get(first.step - 1):
            raise MissingError(f"epoch {epoch} did not begin with a state that was saved before")

    def processes(self, epoch: int) -> dict[int, int]:
        """Rank → its process in an epoch.

        Raises:
            MissingError: a rank did not begin that epoch.
        """
        return {m.rank: m.pid for m in self._of_all(_RESTORED, epoch)}

    def phases(self, at: float, epoch: int) -> dict[Phase, float]:
        """Seconds from `at` to each phase of the recovery that began `epoch`.

        Raises:
            MissingError: a phase has left no trace.
        """
        processes = set(self.processes(epoch).values())
        formed = self._of_all(_FORMED, epoch, processes, since=at)
        line = self._of_all(_LINE, epoch, processes, since=at)
        restored = self._of_all(_RESTORED, epoch)
        noticed = self._first(
            (e.time for e in self.events if e.time >= at and e.reason == EventReason.RECOVERING),
            f"event {EventReason.RECOVERING}",
        )
        agreed = [
            line.time.timestamp()
            for line in self.daemons
            if line.event == "epoch_began" and line.epoch == epoch
        ]
        if len(agreed) < self.ranks[epoch - 1]:
            raise MissingError(f"only {len(agreed)} daemons logged that epoch {epoch} began")
        started = [m.time for m in self.messages if m.text == STARTED and m.pid in processes]
        step = self._first((s.time for s in self.steps if s.epoch == epoch), "completed step")
        instants = {
            Phase.NOTICED: noticed,
            Phase.AGREED: max(agreed),
            Phase.STARTED: max(*agreed, *started),
            Phase.FORMED: max(m.time for m in formed),
            Phase.LINE: max(m.time for m in line),
            Phase.RESTORED: max(m.time for m in restored),
            Phase.STEP: step,
        }
        return {phase: instant - at for phase, instant in instants.items()}

    def _of_all(
        self,
        pattern: re.Pattern[str],
        epoch: int,
        processes: set[int] | None = None,
        since: float = 0.0,
    ) -> list[Message]:
        """First message of each rank of `epoch` that matches and names no other epoch. Epoch 0
        stands for any: a process that ends with its world knows its epoch only after its groups are
        formed."""
        found: dict[int, Message] = {}
        for message in self.messages:
            match = pattern.match(message.text)
            if match is None or message.time < since or message.rank in found:
                continue
            named = int(match[1]) if match.groups() else epoch
            of_process = processes is None or message.pid in processes
            if of_process and named in (epoch, 0):
                found[message.rank] = message
        if len(found) != self.ranks[epoch - 1]:
            raise MissingError(
                f"only ranks {sorted(found)} logged {pattern.pattern!r} in epoch {epoch}"
            )
        return list(found.values())

    def _first(self, times: Iterable[float], what: str) -> float:
        found = min(times, default=None)
        if found is None:
            raise MissingError(f"no {what} after the fault")
        return found


def read(
    run: Path, workers: Path, steps: Path, events: Sequence[TimedEvent], ranks: Sequence[int]
) -> Traces:
    """Read what a run wrote down.

    Args:
        run: directory of the local run.
        workers: folder with a file of messages for each process.
        steps: the example's log.
        events: events of the control loop.
        ranks: number of ranks in each epoch.
    """
    messages = _decoded(workers.glob("*.jsonl"), _MESSAGE.decode)
    daemons = _decoded((run / "logs").glob("daemon-*.log"), _DAEMON_LINE.decode)
    return Traces(
        events=events,
        daemons=sorted(daemons, key=lambda line: line.time),
        messages=sorted(messages, key=lambda message: (message.time, message.pid)),
        steps=_decoded([steps], _STEP.decode),
        ranks=ranks,
    )


def _decoded(files: Iterable[Path], decode: Callable[[bytes], T]) -> list[T]:
    """Values of the lines of `files` that are JSON objects and that no kill cut off."""
    lines = (line for file in files for line in file.read_bytes().split(b"\n")[:-1])
    return [decode(line) for line in lines if line.startswith(b"{")]


_MESSAGE, _STEP = msgspec.json.Decoder(Message), msgspec.json.Decoder(Step)
_DAEMON_LINE = msgspec.json.Decoder(DaemonLine)
