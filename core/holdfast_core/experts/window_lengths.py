"""Length of sparse windows that follows from measurement (MoEvement §3.5, algorithm 1).

The paper computes the length once, from the bandwidth of a profile. Here each rank measures its
saves while it trains, and the ranks agree on the length of the window after the next one, once for
each window. They must agree: parts of one unit on several ranks must be of one step, and a window
of which one rank has fewer saves never completes. So the decision follows from a sum of all ranks'
statements, and from nothing else:

- Each rank states the shortest length at which a step hides its own largest save, and at which
  protecting the window takes no longer than the window itself. The longest of these counts.
- It also states the length that a step with a fifth less time would need. The window becomes
  shorter only if even that is shorter, so that measurements that vary do not change it back and
  forth. It becomes longer at once, because training waits for saves that a step does not hide.
- While a rank has not measured anything, and until a window of the newest length has ended, the
  length stays.

Lengths are those of a list that all ranks share, because a window can be cut only between units.
Nothing here communicates or measures; the trainer SDK does both.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast_core.experts.counts import Measures
from holdfast_core.experts.sparse_windows import Schedule
from holdfast_core.snapshots.units import UnitKey

WINDOW_START = 4
"""Steps of the first windows of a session, if there are slots for as many."""
SPARE = 0.2
"""Part of a step that must be left over before a window becomes shorter."""

_KEPT = 4
"""Number of windows to keep for a late saver."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowBytes:
    """Bytes that one rank copies in a window."""

    steps: int
    save_bytes: int
    """Bytes of the largest save."""
    total_bytes: int
    """Bytes of all saves, which are protected together."""

    def fits(self, measures: Measures, spare: float = 0.0) -> bool:
        """Whether steps of the measured duration, less a part `spare`, hide its saves and their
        protection. A network of unknown bandwidth limits nothing."""
        step_s = measures.step_us / 1e6 * (1 - spare)
        return self.save_bytes <= measures.host_bytes_s * step_s and (
            not measures.network_bytes_s
            or self.total_bytes <= measures.network_bytes_s * step_s * self.steps
        )


def first_of(schedules: Sequence[Schedule]) -> Schedule:
    """The schedule, of those that windows may have, with which a session begins.

    Args:
        schedules: at least one, the shortest first.
    """
    short = [one for one in schedules if one.window <= WINDOW_START]
    return short[-1] if short else schedules[0]


def bytes_of_window(
    schedule: Schedule, state_bytes: Mapping[UnitKey, int], frame_bytes: Mapping[UnitKey, int]
) -> WindowBytes:
    """The bytes that a rank copies in a window of `schedule`.

    Args:
        state_bytes: unit → bytes of state that the rank captures.
        frame_bytes: unit → bytes of compute weights, or of gradients, that it captures.
    """
    saves = [0] * schedule.window
    for unit, nbytes in state_bytes.items():
        saves[schedule.slot(unit)] += nbytes
    for unit, nbytes in frame_bytes.items():
        for slot in schedule.frames(unit):
            saves[slot] += nbytes
    return WindowBytes(steps=schedule.window, save_bytes=max(saves), total_bytes=sum(saves))


def statement(count: int, lengths: Sequence[WindowBytes], measures: Measures) -> list[int]:
    """What one rank states, as numbers that are added to those of other ranks, of which each states
    as many: one for the rank, one for having measured, and a 1 at each of two lengths, see
    `agreed_length`.

    Args:
        count: number of lengths that a window may have.
        lengths: these lengths, the shortest first; empty while this rank has no session, and so no
            plan of what it copies.
    """
    numbers = [1, 0] + [0] * (2 * count)
    if lengths and measures.host_bytes_s and measures.step_us:
        numbers[1] = 1
        numbers[2 + _shortest(lengths, measures)] = 1
        numbers[2 + len(lengths) + _shortest(lengths, measures, SPARE)] = 1
    return numbers


def agreed_length(total: Sequence[int], current: int) -> int:
    """Index of the length that follows from the sum of all ranks' statements.

    Args:
        total: sum of `statement` over all ranks.
        current: index of the present length.
    """
    ranks, measured, *stated = total
    if measured < ranks:
        return current
    count = len(stated) // 2
    needed = max(index for index in range(count) if stated[index])
    spared = max(index for index in range(count) if stated[count + index])
    return needed if needed > current else min(spared, current)


def _shortest(lengths: Sequence[WindowBytes], measures: Measures, spare: float = 0.0) -> int:
    """Index of the shortest length that fits; of the longest where none does."""
    fitting = (at for at, one in enumerate(lengths) if one.fits(measures, spare))
    return next(fitting, len(lengths) - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowSpan:
    """The steps of one window."""

    number: int
    """Number of the window in its session, from 0."""
    first: int
    steps: int

    @property
    def last(self) -> int:
        return self.first + self.steps - 1


class WindowGrid:
    """The steps of a session's windows, which follow one another without a gap, as far as their
    lengths are known. Equal on all ranks, as far as they know it.

    Args:
        origin: step of the session's first save, which belongs to no window.
    """

    def __init__(self, origin: int) -> None:
        self.next_first = origin + 1
        """First step of the first window whose length is not known."""
        self.next_number = 0
        """Number of that window."""
        self._spans: deque[WindowSpan] = deque(maxlen=_KEPT)

    def add(self, steps: int) -> WindowSpan:
        """Add the next window."""
        span = WindowSpan(number=self.next_number, first=self.next_first, steps=steps)
        self._spans.append(span)
        self.next_first, self.next_number = span.last + 1, span.number + 1
        return span

    def at(self, step: int) -> WindowSpan | None:
        """The window of the save of `step`; None if it is not known yet, or no longer."""
        index = bisect_right(self._spans, step, key=lambda span: span.first) - 1
        if index < 0 or step > self._spans[index].last:
            return None
        return self._spans[index]

    def ended_before(self, step: int) -> int:
        """Number of windows, from the session's first on, all of whose saves are before the save of
        `step`. Of windows that are not known yet, none has ended."""
        span = self.at(step)
        if span is not None:
            return span.number
        return self.next_number if step >= self.next_first else 0
