"""Find out who holds up a job that hangs, from the stacks and states of its processes. Pure.

In a hang, nearly all ranks wait for the others in a collective, and the interesting ones do
something else. So ranks are grouped by the place where they are, and the places that explain the
wait are named: a process that is stopped, one that the kernel does not let go, one that is not in
the collective; and if there is none, one whose GPUs have had a fault. Lines of a stack prove where
a process is, and nothing more; a missing stack proves nothing at all, so nobody is blamed for one.

All texts in a stack come from trainers: they are only ever shown, and compared with names of files
and functions of torch and of Holdfast.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum

from holdfast_core.inspections import STOPPED, UNINTERRUPTIBLE, Frame, InspectedProcess
from holdfast_core.kernel_messages import device_at_fault
from holdfast_operator.reconciler.observe.collective_waits import (
    CollectiveWaits,
    Wait,
    collective_waits,
)
from holdfast_operator.reconciler.observe.text import ranks_in_words

TEXT_CHARACTERS_MAX = 600
"""Characters of a diagnosis: an event has 1024 for all that it reports."""
PLACES_NAMED_MAX = 4
"""Places that a diagnosis names."""
CALLERS_MAX = 8
"""Frames of scripts and their libraries, from the innermost, that make up a place."""

_COLLECTIVES = re.compile(
    r"/torch/distributed/(distributed_c10d|_functional_collectives|nn/functional|rendezvous)\.py$"
)
_TORCH_LOADER = re.compile(r"/torch/utils/data/")
_BACKWARD = re.compile(r"/torch/autograd/(__init__|graph|function)\.py$")
_TORCH = re.compile(r"/torch/|/torch$")
_OUR_WAITS = re.compile(r"/holdfast/_(agree|elastic|restoring|daemon|moe|session)/")
_OURS = re.compile(r"/holdfast/(_|integrations/|(elastic|dcp|moe|launch|testing)\.py$)")
"""Modules of the SDK; the folder of a script may have the same name."""
_PACKAGES = re.compile(r"/(site|dist)-packages/")
_STANDARD = re.compile(r"/lib(64)?/python[\d.]+t?/|^<frozen ")


class HangKind(StrEnum):
    """What held up a job that hung, in one word."""

    STOPPED = "Stopped"
    """A process that a signal or a debugger has stopped."""
    KERNEL = "Kernel"
    """A process that the kernel does not let go: for storage or a driver."""
    ENDED = "Ended"
    """A rank whose script has ended while others waited."""
    DATA_LOADER = "DataLoader"
    CODE = "Code"
    """Code of the script, or of a library, while others waited."""
    MISSING = "Missing"
    """A rank that had not entered a collective in which others waited."""
    ELSEWHERE = "Elsewhere"
    """A rank that waited in another place than most."""
    DEADLOCK = "Deadlock"
    """Ranks that waited for each other."""
    HARDWARE = "Hardware"
    """A fault of hardware that the kernel has reported."""
    UNKNOWN = "Unknown"
    """No culprit stood out."""


class _Kind(IntEnum):
    """Kind of the place where a rank is."""

    STOPPED = 0
    UNINTERRUPTIBLE = 1
    ENDED = 2
    LOADER = 3
    CODE = 4
    WAITING = 5
    """In a collective, or in another wait for the other ranks."""
    BACKWARD = 6
    """In the backward pass, which may wait for the other ranks, or for the device."""
    NO_STACK = 7
    ABSENT = 8
    """Not in the collective in which others wait, as torch has recorded."""
    FAULTY = 9
    """On a node whose kernel has reported a fault of the rank's GPUs."""


_WAITS = (_Kind.WAITING, _Kind.BACKWARD)


_KINDS = {
    _Kind.STOPPED: HangKind.STOPPED,
    _Kind.UNINTERRUPTIBLE: HangKind.KERNEL,
    _Kind.ENDED: HangKind.ENDED,
    _Kind.LOADER: HangKind.DATA_LOADER,
    _Kind.CODE: HangKind.CODE,
    _Kind.WAITING: HangKind.ELSEWHERE,
    _Kind.BACKWARD: HangKind.ELSEWHERE,
    _Kind.ABSENT: HangKind.MISSING,
    _Kind.FAULTY: HangKind.HARDWARE,
}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a rank is; ranks at equal places do the same."""

    kind: _Kind
    what: str
    callers: tuple[Frame, ...] = ()
    details: str = field(default="", compare=False)
    """What a rank waits for there, such as a file; ranks at one place may wait for different
    ones."""

    @property
    def proves_nothing(self) -> bool:
        return self.kind is _Kind.NO_STACK

    @property
    def text(self) -> str:
        """The place, in words that follow `is` or `are`."""
        return ": ".join(filter(None, (self.what, self.details)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Result of an inspection."""

    text: str
    """Who holds up the others and how, or that nobody does, in words of bounded length."""
    culprits: frozenset[int]
    """Ranks that hold up the others; empty where none stands out."""
    kind: HangKind
    examples: tuple[int, ...] = ()
    """Ranks that show why the job hangs: the culprits, or one rank at each place if none stands
    out."""
    device: str = ""
    """The GPU with a fault that holds them up; empty where none is known."""

    @property
    def hardware_fault(self) -> bool:
        """Whether they do because of a fault of hardware that the kernel has reported."""
        return self.kind is HangKind.HARDWARE


def diagnose(ranks: Collection[int], answers: Mapping[int, InspectedProcess | None]) -> Diagnosis:
    """Find the ranks that hold up the others.

    Args:
        ranks: ranks of the world.
        answers: process of each rank whose launcher has answered; None for a rank that has none any
            more. Ranks of other launchers are missing.
    """
    silent = sorted(set(ranks) - answers.keys())
    waits = collective_waits(ranks, answers)
    groups = _grouped(answers, _place_of)
    told = _told(groups)
    ended = {rank for rank, process in answers.items() if process is None}
    culprits = _held_up(told, waits.on_devices(ended))
    if not culprits and (absent := _absent(waits, answers)):
        groups = _grouped(answers, lambda each: _place_or_absence(each, absent))
        told = _told(groups)
        culprits = {place: found for place, found in told.items() if place.kind is _Kind.ABSENT}
    elif not culprits:
        minority = _minority(told)
        allowed = waits.allow([rank for found in minority.values() for rank in found])
        culprits = minority if allowed else {}
    faults = (each.hardware_fault for each in answers.values() if each is not None)
    if not culprits and any(faults):  # With NCCL, all ranks wait in one place.
        groups = _grouped(answers, _place_or_fault)
        told = _told(groups)
        culprits = {place: found for place, found in told.items() if place.kind is _Kind.FAULTY}
    parts: list[str] = []
    if culprits:
        parts += _named(culprits, told)
        parts += _the_others(told, culprits)
    elif len(told) == 1:
        ((place, found),) = told.items()
        others = "the only rank" if len(found) == 1 else f"all {len(found)} ranks"
        if silent or len(found) < len(answers):
            others = ranks_in_words(found)
        parts.append(f"no culprit stands out: {others} {_verb(found)} {place.text}")
    elif told:
        parts += _named(told, told)
    kind = _KINDS[next(iter(culprits)).kind] if culprits else HangKind.UNKNOWN
    stuck = culprits and all(place.kind not in _WAITS for place in culprits)
    if told and not stuck:
        if in_words := waits.in_words:
            parts.append(in_words)
            kind = HangKind.DEADLOCK if waits.circle and not culprits else kind
        elif not culprits and len(told) > 1 and all(place.kind in _WAITS for place in told):
            parts.append(
                "they wait for each other, as when two groups are used in opposite order or a "
                "branch differs"
            )
            kind = HangKind.DEADLOCK
    for place, found in groups.items():
        if place.proves_nothing:
            parts.append(f"{ranks_in_words(found)} {_verb(found)} {place.text}")
    if silent:
        parts.append(f"not answering: the launcher of {ranks_in_words(silent)}")
    text = "; ".join(parts)
    if len(text) > TEXT_CHARACTERS_MAX:
        text = f"{text[: TEXT_CHARACTERS_MAX - 1]}…"
    blamed = frozenset(rank for found in culprits.values() for rank in found)
    firsts = sorted(blamed) or [found[0] for found in told.values()]
    reports = [
        process.hardware_fault
        for rank, process in sorted(answers.items())
        if process is not None and process.hardware_fault and rank in blamed
    ]
    device = device_at_fault(reports[0]) if kind is HangKind.HARDWARE else ""
    return Diagnosis(text=text, culprits=blamed, kind=kind, examples=tuple(firsts), device=device)


def _told(groups: Mapping[_Place, list[int]]) -> dict[_Place, list[int]]:
    """The groups whose place is known."""
    return {place: found for place, found in groups.items() if not place.proves_nothing}


def _grouped(
    answers: Mapping[int, InspectedProcess | None],
    place_of: Callable[[InspectedProcess | None], _Place],
) -> dict[_Place, list[int]]:
    """The ranks at each place: first the places that explain most, then by their lowest ranks."""
    found: dict[_Place, dict[str, list[int]]] = {}
    for rank, process in sorted(answers.items()):
        place = place_of(process)
        found.setdefault(place, {}).setdefault(place.details, []).append(rank)
    groups: dict[_Place, list[int]] = {}
    for place, by_details in found.items():
        ranks = sorted(rank for each in by_details.values() for rank in each)
        groups[replace(place, details=_rarest(by_details))] = ranks
    return dict(sorted(groups.items(), key=lambda each: (each[0].kind, each[1][0])))


def _rarest(by_details: Mapping[str, Sequence[int]]) -> str:
    """The details that the fewest ranks of a place have, with these ranks where others have
    different ones."""
    details, ranks = min(
        ((each, ranks) for each, ranks in by_details.items() if each),
        key=lambda each: len(each[1]),
        default=("", ()),
    )
    return details if len(by_details) == 1 else f"{details} ({ranks_in_words(ranks)})"


def _held_up(
    groups: Mapping[_Place, Sequence[int]], on_devices: Set[int]
) -> dict[_Place, Sequence[int]]:
    """The places that explain the hang by themselves: processes that cannot get on, or else those
    that are not where the others wait. Where nobody waits for ranks that have ended, the job waits
    for the other ranks.

    Args:
        on_devices: ranks that wait for others, although their main threads do not. Others in the
            same place may wait in the same way.
    """

    def of(*kinds: _Kind) -> dict[_Place, Sequence[int]]:
        return {place: found for place, found in groups.items() if place.kind in kinds}

    if stuck := of(_Kind.STOPPED, _Kind.UNINTERRUPTIBLE):
        return stuck
    ended, away, waiting = of(_Kind.ENDED), of(_Kind.LOADER, _Kind.CODE), of(*_WAITS)
    devices = {place for place, found in away.items() if not on_devices.isdisjoint(found)}
    away = {place: found for place, found in away.items() if place not in devices}
    if ended and (waiting or devices or away):
        return ended if waiting or devices else away
    return away if waiting else {}


def _minority(groups: Mapping[_Place, Sequence[int]]) -> dict[_Place, Sequence[int]]:
    """The places that are not where most are; none if most are nowhere."""
    largest = max(map(len, groups.values()), default=0)
    if len(groups) > 1 and 2 * largest > sum(map(len, groups.values())):
        return {place: found for place, found in groups.items() if len(found) < largest}
    return {}


def _absent(
    waits: CollectiveWaits, answers: Mapping[int, InspectedProcess | None]
) -> dict[int, Wait]:
    """The few ranks that others wait for in a collective, and that wait for nobody, as far as their
    stacks show: a message between two ranks, or a vote, may not have been recorded."""
    found = {
        rank: wait
        for rank, wait in waits.absent.items()
        if _place_of(answers[rank]).kind is not _Kind.WAITING
    }
    return found if 2 * len(found) <= len(answers) else {}


def _named(
    groups: Mapping[_Place, Sequence[int]], told: Mapping[_Place, Sequence[int]]
) -> list[str]:
    """What the ranks at each of the first places do, and how many more places there are.

    Args:
        told: all places, from which these are distinguished.
    """
    texts = [
        f"{ranks_in_words(found)} {_verb(found)} {place.text}{_called_from(place, told)}"
        for place, found in groups.items()
    ]
    more = len(texts) - PLACES_NAMED_MAX
    return texts if more <= 0 else [*texts[:PLACES_NAMED_MAX], f"and {more} more places"]


def _called_from(place: _Place, places: Iterable[_Place]) -> str:
    """The call that distinguishes a place from others of the same words; empty if there are
    none."""
    alike = [other for other in places if other != place and other.what == place.what]
    for index, frame in enumerate(place.callers):
        if any(frame not in other.callers[index : index + 1] for other in alike):
            return f", called from `{frame.function}` ({_shortened(frame)})"
    return ""


def _the_others(
    groups: Mapping[_Place, Sequence[int]], culprits: Mapping[_Place, Sequence[int]]
) -> list[str]:
    """What most of the ranks do that are not to blame."""
    rest = [(place, found) for place, found in groups.items() if place not in culprits]
    if not rest:
        return []
    place, found = max(rest, key=lambda each: len(each[1]))
    who = "the other rank" if len(found) == 1 else f"{len(found)} others"
    return [f"{who} {_verb(found)} {place.text}"]


def _verb(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _place_of(process: InspectedProcess | None) -> _Place:
    if process is None:
        return _Place(_Kind.ENDED, "without a process: the script has ended there")
    if process.state in STOPPED:
        return _Place(_Kind.STOPPED, "stopped (by SIGSTOP or a debugger)")
    if process.state == UNINTERRUPTIBLE and not process.frames:
        where = process.call or (process.kernel and f"{process.kernel} of the kernel")
        where = f" in {where}" if where else ""
        text = f"waiting{where} and cannot be interrupted (state D): for storage or a driver"
        return _Place(_Kind.UNINTERRUPTIBLE, text)
    if not process.frames:
        why = process.no_stack or "none was found"
        return _Place(_Kind.NO_STACK, f"without a stack ({why})")
    place = _place_in(process.frames)
    session = process.session.in_words if process.session is not None else ""
    seen = (process.call, process.helper) if place.kind not in _WAITS else ()
    return replace(place, details=", ".join(filter(None, (*seen, session))))


def _place_or_absence(process: InspectedProcess | None, absent: Mapping[int, Wait]) -> _Place:
    place = _place_of(process)
    if process is None or process.rank not in absent:
        return place
    where = "" if place.proves_nothing else f", but {place.text}"
    return _Place(_Kind.ABSENT, f"missing from {absent[process.rank].name}{where}", place.callers)


def _place_or_fault(process: InspectedProcess | None) -> _Place:
    if process is None or not process.hardware_fault:
        return _place_of(process)
    return _Place(_Kind.FAULTY, f"on a node whose kernel wrote: {process.hardware_fault}")


def _place_in(frames: Sequence[Frame]) -> _Place:
    """The place that a stack shows."""
    callers = tuple([frame for frame in frames if _is_script(frame)][:CALLERS_MAX])
    at = f" ({_shortened(callers[0])})" if callers else ""
    if (call := _last_of(frames, _COLLECTIVES)) is not None:
        return _Place(_Kind.WAITING, f"waiting in {call.function}{at}", callers)
    # From here on, the innermost frame that means something decides.
    loads = _last_of(frames, _TORCH_LOADER) is not None
    for frame in frames:
        if _is_script(frame):
            break
        if _OUR_WAITS.search(frame.file):
            what = f"waiting in {frame.function} of Holdfast{at}"
            return _Place(_Kind.WAITING, what, callers)
        if _BACKWARD.search(frame.file):
            return _Place(_Kind.BACKWARD, f"waiting in the backward pass{at}", callers)
        if _TORCH_LOADER.search(frame.file):
            break
    inner = callers[0] if callers else frames[0]
    if loads:
        return _Place(_Kind.LOADER, f"in its data loader, in `{inner.function}`{at}", callers)
    what = "code of the script" if not _PACKAGES.search(inner.file) else "code of a library"
    return _Place(_Kind.CODE, f"in {what}, in `{inner.function}`{at}", callers)


def _last_of(frames: Iterable[Frame], pattern: re.Pattern[str]) -> Frame | None:
    """The outermost of the innermost frames in a row that match: the function that was called."""
    found: Frame | None = None
    for frame in frames:
        if pattern.search(frame.file):
            found = frame
        elif found is not None and not _TORCH.search(frame.file):
            break  # Decorators of torch may stand between the functions of a collective.
    return found


def _is_script(frame: Frame) -> bool:
    """Whether a frame belongs to the script, or to a library that is neither Python's, torch nor
    Holdfast."""
    packaged = _PACKAGES.search(frame.file) is not None
    if _STANDARD.search(frame.file) and not packaged:
        return False
    return not _OURS.search(frame.file) and not (packaged and _TORCH.search(frame.file))


def _shortened(frame: Frame) -> str:
    return f"{'/'.join(frame.file.split('/')[-2:])}:{frame.line}"
