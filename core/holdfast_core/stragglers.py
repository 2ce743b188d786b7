"""Stragglers: ranks for whose own work the others wait, step after step.

All ranks of a job with synchronous collectives have equally long steps, so the length of a step
never shows which rank is slow. What shows it is how a rank divides its step: a straggler works for
longer than its peers, and waits less than they do. So each rank measures its own work, and the time
in which it waits for others, and reports the medians of a *window* of steps. Medians leave out what
happens in few steps of a window: compilation, evaluation, a checkpoint, garbage collection.

The control loop judges the newest windows of all ranks together, in *rounds*, with one new window
of each rank. A rank is compared with those of its pipeline stage only, because stages may be
uneven, and it is named if it was slow in several rounds in a row. Missing times prove nothing, and
nobody is blamed for them.

Times come from trainers, and are bounded where they are received. Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from holdfast_core.rounds import Findings

WINDOW_STEPS = 10
"""Least number of calls of `save` in a window, each of which ends a step or several."""
ROUNDS = 5
"""Rounds in a row in which a rank must be slow to be named, and then not slow to be no straggler
any more."""
SUSPECT_ROUNDS = 2
"""Rounds in a row after which a slow rank may soon be named."""
SLOWER = 0.15
"""How much longer than its peers' a straggler's own work is at least, as a part of theirs."""
STEP_SHARE = 0.10
"""Part of a step that a straggler costs at least."""
WAITED_SHARE = 0.5
"""Part of a straggler's delay for which its peers are seen to wait at least."""
SURE = 2.0
"""Standard errors of a median that the delay exceeds at least: loads that move about between the
ranks, as those of experts do, make own work vary by more than a slow rank would."""
CAUSE_SHARE = 0.5
"""Part of the delay that has the cause which is named."""
TIME_S_MAX = 1e6
"""Longest time of a step that is believed."""
_TIMES = ("own_s", "step_s", "wait_s", "uncertainty_s", "data_s", "processor_s")
"""Times of a rank that are compared with those of its peers."""
COUNT_MAX = 2**32 - 1
"""Largest number of a window, of its steps and of a stage."""


class StepTimes(Struct, frozen=True, kw_only=True, gc=False):
    """How one rank has divided the steps of one window: medians, in seconds per step."""

    window: int
    """Number of the window in its session, from 1."""
    steps: int
    """Number of its medians' samples: calls of `save`, each of which ended a step or several."""
    stage: int = 0
    """Pipeline stage of the rank."""
    step_s: float
    own_s: float
    """Time in which it did not wait for other ranks, nor for Holdfast."""
    own_spread_s: float = 0.0
    """Median absolute deviation of `own_s`."""
    wait_s: float
    """Time in which it waited for other ranks."""
    data_s: float = 0.0
    """Part of its own time in which it waited for the next batch of a data loader."""
    processor_s: float = 0.0
    """Processor time of the thread that trains, and time in which it had to wait for a
    processor."""

    @property
    def uncertainty_s(self) -> float:
        """Standard error of `own_s`, if its deviations are like those of a normal distribution."""
        return 1.86 * self.own_spread_s / math.sqrt(self.steps)


def bounded_times(times: StepTimes) -> StepTimes | None:
    """`times` if they can be those of a window, else None."""
    seconds = (
        *(times.step_s, times.own_s, times.own_spread_s, times.wait_s),
        *(times.data_s, times.processor_s),
    )
    counts = (times.window, times.steps)
    sane = all(0 <= each <= TIME_S_MAX for each in seconds)  # False for a NaN
    sane = sane and all(1 <= each <= COUNT_MAX for each in counts)
    return times if sane and 0 <= times.stage <= COUNT_MAX else None


class Cause(StrEnum):
    """What a straggler's delay consists of, as far as its times show it."""

    COMPUTE = "Compute"
    """Processor time, or time in which a thread that could run got no processor."""
    DATA = "Data"
    """Waiting for a data loader."""
    NETWORK = "Network"
    """Neither, on a node whose links are slow (`holdfast_core.links`): that may be the cause."""
    UNKNOWN = "Unknown"


IN_WORDS: Mapping[Cause, str] = {
    Cause.COMPUTE: "it computes for longer",
    Cause.DATA: "its data loader is slow",
    Cause.NETWORK: "the cause is not known; the links of its node are slow",
    Cause.UNKNOWN: "the cause is not known",
}


class Straggler(Struct, frozen=True, kw_only=True, gc=False):
    """A slow rank, with the times of one round."""

    rank: int
    own_s: float
    """Its own work per step."""
    peers_s: float
    """Median of the same of its peers."""
    step_s: float
    cause: Cause

    @property
    def delay_s(self) -> float:
        """Time per step for which its peers wait for it."""
        return self.own_s - self.peers_s

    @property
    def slower(self) -> float:
        """Its delay as a part of its peers' own work; at most 99, where they hardly work."""
        return min(self.delay_s / max(self.peers_s, 1e-9), 99.0)

    @property
    def in_words(self) -> str:
        """All of this in one line, without the rank's name."""
        return (
            f"it works {_milliseconds(self.own_s)} in each step, its peers "
            f"{_milliseconds(self.peers_s)}, and they wait for it; {IN_WORDS[self.cause]}"
        )


def slow_ranks(times: Mapping[int, StepTimes]) -> tuple[Straggler, ...]:
    """The ranks that were slow in one round, the slowest first.

    Args:
        times: rank → its newest window. Ranks that have none are left out.
    """
    stages: dict[int, dict[int, StepTimes]] = defaultdict(dict)
    for rank, each in times.items():
        stages[each.stage][rank] = each
    found = [slow for stage in stages.values() if len(stage) > 1 for slow in _slow_of_stage(stage)]
    return tuple(sorted(found, key=lambda slow: (-slow.delay_s, slow.rank)))


class _Medians:
    """Medians of one time of the ranks of a stage, without one of them. There are thousands of
    ranks, so each time is sorted once.

    Args:
        values: that time of each rank, two at least.
    """

    def __init__(self, values: Iterable[float]) -> None:
        self._ordered = sorted(values)

    def without(self, value: float) -> float:
        """The median of all but one that has this `value`."""
        left_out, rest = bisect_left(self._ordered, value), len(self._ordered) - 1
        low, high = (self._ordered[at + (at >= left_out)] for at in ((rest - 1) // 2, rest // 2))
        return low if rest % 2 else (low + high) / 2


def _slow_of_stage(stage: Mapping[int, StepTimes]) -> Iterator[Straggler]:
    """The ranks of one stage that are slow beside the others."""
    medians = {name: _Medians(getattr(each, name) for each in stage.values()) for name in _TIMES}
    for rank, own in stage.items():
        if (slow := _judged(rank, own, medians)) is not None:
            yield slow


def _judged(rank: int, own: StepTimes, medians: Mapping[str, _Medians]) -> Straggler | None:
    """The rank, if it is slow beside its peers."""

    def of_peers(name: str) -> float:
        return medians[name].without(getattr(own, name))

    peers_s = of_peers("own_s")
    delay_s = own.own_s - peers_s
    if delay_s <= 0:  # most ranks
        return None
    step_s = max(own.step_s, of_peers("step_s"))
    waited_s = of_peers("wait_s") - own.wait_s
    noise_s = math.hypot(own.uncertainty_s, of_peers("uncertainty_s"))
    slow = (
        delay_s >= SLOWER * peers_s
        and delay_s >= STEP_SHARE * step_s
        and delay_s >= SURE * noise_s
        and waited_s >= WAITED_SHARE * delay_s
    )
    if not slow:
        return None
    cause = Cause.UNKNOWN
    if own.data_s - of_peers("data_s") >= CAUSE_SHARE * delay_s:
        cause = Cause.DATA
    elif own.processor_s - of_peers("processor_s") >= CAUSE_SHARE * delay_s:
        cause = Cause.COMPUTE
    return Straggler(rank=rank, own_s=own.own_s, peers_s=peers_s, step_s=step_s, cause=cause)


class StragglerWatch(Struct, frozen=True, kw_only=True):
    """What the rounds so far have shown of the ranks of one epoch. Times of an epoch before it
    prove nothing: a rank may be on another node."""

    epoch: int = 0
    windows: Mapping[int, int] = {}
    """Rank → number of its window in the newest round."""
    records: Mapping[int, Findings[Straggler]] = {}
    """Ranks that were slow lately. One without times stays as it was."""
    blamed: frozenset[int] = frozenset()
    """Members whose nodes were blamed for a slow rank."""

    @property
    def stragglers(self) -> tuple[Straggler, ...]:
        """The ranks that are named, the slowest first."""
        named = (each.named for each in self.records.values() if each.named is not None)
        return tuple(sorted(named, key=lambda slow: (-slow.delay_s, slow.rank)))

    @property
    def suspects(self) -> frozenset[int]:
        """The ranks that are named, and those that may soon be."""
        return frozenset(
            rank
            for rank, each in self.records.items()
            if each.named is not None or each.rounds >= SUSPECT_ROUNDS
        )

    def is_slow_now(self, rank: int) -> bool:
        """Whether `rank` is named, and was slow in the newest round as well."""
        record = self.records.get(rank, Findings[Straggler]())
        return record.named is not None and record.rounds == ROUNDS and rank in self.windows

    def see(self, epoch: int, times: Mapping[int, StepTimes]) -> StragglerWatch:
        """Judge a round, if each rank in `times` has a window that was in none yet.

        Args:
            times: rank → newest window, of the ranks that are at work.
        """
        if epoch != self.epoch:
            return StragglerWatch(epoch=epoch, windows=_numbers(times))
        if len(times) < 2:
            return self
        if any(each.window == self.windows.get(rank) for rank, each in times.items()):
            return self
        slow = {each.rank: each for each in slow_ranks(times)}
        records = {rank: each for rank, each in self.records.items() if rank not in times}
        for rank in {*slow, *self.records} & times.keys():
            after = self.records.get(rank, Findings[Straggler]()).after(slow.get(rank), ROUNDS)
            if after.rounds:
                records[rank] = after
        return replace(self, windows=_numbers(times), records=records)


def _numbers(times: Mapping[int, StepTimes]) -> dict[int, int]:
    return {rank: each.window for rank, each in times.items()}


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
