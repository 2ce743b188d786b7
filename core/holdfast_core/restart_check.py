"""What `holdfast check` records of a training script before and after a restart, and the verdict.

A script is trusted to come back if its second process, after the restore and one more step, has the
state to the bit that the first one had after the same step. State here is all that the session
captures, and also whatever else lives in the process and has a state of its own: an optimizer, a
scheduler or a generator that no session knows is the usual reason for a run that does not come
back. The trainers write records, `holdfast check` reads them, and this module compares them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from holdfast_core.errors import StorageError

ORDER_FILE = "order.json"
"""Name of the file with the order for the processes of a check."""
NAMES_SHOWN = 4
"""Names of tensors that a sentence lists."""


class Phase(StrEnum):
    """One of the two processes of a rank."""

    FIRST = "first"
    SECOND = "second"


class Stage(StrEnum):
    """Progress of a process."""

    STARTED = "started"
    """The script runs."""
    READY = "ready"
    """Its state is that after the saved step: it was saved and protected, or was restored."""
    STEPPED = "stepped"
    """It has made one more step, whose state is recorded."""
    FAILED = "failed"
    """It cannot be checked, or raised an error."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The instruction to the processes of a check that start from now on."""

    phase: Phase
    save: int = 1
    """Number of the save, counted from 1, after which the first process makes one more step."""
    step: int = 0
    """Step of that save; known in the second phase."""


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """An object in the process that has a state of its own, which the session does not capture."""

    kind: str
    """Such as `optimizer`."""
    name: str
    """Where the script holds it, such as `scheduler of main()`."""
    type: str
    digest: str
    """Digest of its state; empty if it has none that could be read."""


class Tensor(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A captured tensor, or a rank's part of one."""

    unit: str
    role: str
    nbytes: int
    digest: str


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a rank at one moment."""

    tensors: dict[str, Tensor] = {}
    """Captured tensors of the rank, by name."""
    extras: dict[str, str] = {}
    """Digest of everything else that is captured, by what it is."""
    beside: tuple[Beside, ...] = ()
    batches: tuple[str, ...] = ()
    """Digest of the inputs of each call of the model since the saved step."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one process."""

    rank: int
    phase: Phase
    stage: Stage
    steps: int = 0
    """Steps of the optimizer that has made most."""
    step: int | None = None
    """Step that was saved or restored; None before, or if nothing was restored."""
    ready: State = State()
    """Tensors after that step."""
    stepped: State = State()
    """All state after one more step."""
    why: str = ""
    """Why nothing is saved yet, or why the process cannot be checked, and what to do."""
    traceback: str = ""
    """Traceback of an error that the script raised."""


def record_file(phase: Phase, rank: int) -> str:
    """Name of the file with the record of a process, beside the order."""
    return f"{phase}-{rank}.json"


_RECORD = msgspec.json.Decoder(Record)
_ORDER = msgspec.json.Decoder(Order)


def decode_record(data: bytes) -> Record:
    """Decode a record.

    Raises:
        StorageError: it is none.
    """
    return _decoded(data, _RECORD, "record")


def decode_order(data: bytes) -> Order:
    """Decode an order.

    Raises:
        StorageError: it is none.
    """
    return _decoded(data, _ORDER, "order")


_T = TypeVar("_T")


def _decoded(data: bytes, decoder: msgspec.json.Decoder[_T], what: str) -> _T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StorageError(
            f"this is no {what} of a check: {error}; remove the files of the check and run it again"
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The differences between the first and the second processes."""

    changes: tuple[str, ...]
    """What a restart changes, a sentence each; empty if training comes back to the bit."""
    lost: tuple[str, ...] = ()
    """Objects that the session does not capture and whose state a restart changes."""
    same: tuple[str, ...] = ()
    """Objects that the session does not capture and whose state is the same after a restart."""
    loaders: tuple[str, ...] = ()
    """Objects that the session does not capture and whose state shows in the data only."""
    same_data: bool | None = None
    """Whether the batches of the step are the same; None if the model was not called."""

    @property
    def comes_back(self) -> bool:
        """Whether training comes back to the bit."""
        return not self.changes


def compare(first: Sequence[Record], second: Sequence[Record]) -> Comparison:
    """Compare the records of the first processes with those of the second, rank by rank."""
    changes: dict[str, list[int]] = {}
    beside: dict[str, set[bool | None]] = {}
    for one, other in zip(first, second, strict=True):
        for change in _changes_of(one, other):
            changes.setdefault(change, []).append(one.rank)
        for thing, same in _beside(one.stepped, other.stepped):
            beside.setdefault(f"{thing.kind} {thing.name} ({thing.type})", set()).add(same)
    called = [one.stepped.batches for one in first]
    return Comparison(
        changes=tuple(
            change if len(ranks) == len(first) else f"{change} (rank {', '.join(map(str, ranks))})"
            for change, ranks in changes.items()
        ),
        lost=tuple(name for name, found in beside.items() if False in found),
        same=tuple(name for name, found in beside.items() if found == {True}),
        loaders=tuple(name for name, found in beside.items() if found == {None}),
        same_data=(called == [other.stepped.batches for other in second] if all(called) else None),
    )


def _changes_of(one: Record, other: Record) -> list[str]:
    """What the restart has changed on a rank: first what explains most."""
    if one.step != other.step:
        restored = "nothing" if other.step is None else f"step {other.step}"
        return [f"step {one.step} was saved, but the second process restored {restored}"]
    changes = []
    wrong = _differing(one.ready.tensors, other.ready.tensors)
    if wrong:
        changes.append(f"the restored state is not the saved one: {_named(wrong, one.ready)}")
    if one.stepped.batches != other.stepped.batches:
        changes.append(
            "the data order changes at a restart: the step after it had other inputs; give the "
            "sampler or a loader with state_dict in stateful=, or choose the batch by the step"
        )
    for thing, same in _beside(one.stepped, other.stepped):
        if same is False:
            changes.append(
                f"{thing.kind} {thing.name} is not captured, and a restart changes its state: "
                f"{_REMEDY.get(thing.kind, _STATEFUL)}"
            )
    for name in _differing(one.stepped.extras, other.stepped.extras):
        changes.append(f"{name} differs after one more step")
    wrong = _differing(one.stepped.tensors, other.stepped.tensors)
    if wrong:
        changes.append(
            f"{len(wrong)} of {len(one.stepped.tensors)} tensors differ after one more step: "
            f"{_named(wrong, one.stepped)}"
        )
    return changes


_STATEFUL = "give it in stateful= of holdfast.init"
_REMEDY = {
    "optimizer": "give it in optimizer= of holdfast.init, which takes a list",
    "module": "make it a part of model=, or give it in stateful= of holdfast.init",
    "buffer": "register it with persistent=True, or compute it from what is captured",
    "generator": "draw from torch's own generator, or give an object with state_dict and "
    "load_state_dict around it in stateful= of holdfast.init",
}


def _beside(one: State, other: State) -> list[tuple[Beside, bool | None]]:
    """The objects in both processes that are not captured, each with whether its state is the
    same; None if it has none to compare. What only one process has comes and goes."""
    others = {(thing.kind, thing.name): thing.digest for thing in other.beside}
    return [
        (thing, thing.digest == others[thing.kind, thing.name] if thing.digest else None)
        for thing in one.beside
        if (thing.kind, thing.name) in others
    ]


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def _named(wrong: Sequence[str], state: State) -> str:
    """The first names, with their units and the number of the others."""
    shown = [
        f"{name} ({state.tensors[name].unit})" if name in state.tensors else name
        for name in wrong[:NAMES_SHOWN]
    ]
    more = len(wrong) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """A kind of tensors that a session captures, over all ranks."""

    role: str
    tensors: int
    nbytes: int


def captured_by(records: Sequence[Record]) -> tuple[Captured, ...]:
    """The tensors that the sessions capture, by role, as all ranks hold them."""
    numbers, sizes = Counter[str](), Counter[str]()
    for record in records:
        for tensor in record.stepped.tensors.values():
            numbers[tensor.role] += 1
            sizes[tensor.role] += tensor.nbytes
    return tuple(
        Captured(role=role, tensors=numbers[role], nbytes=sizes[role]) for role in sorted(numbers)
    )
