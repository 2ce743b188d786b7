"""Log of what crosses the boundaries of a pipeline stage, in the memory of the rank that sends it
(MoEvement §3.4).

A message is kept whole by its sender and as a digest by its receiver. So neighbours of a lost stage
can give it what they have sent to it, and tell whether it sends the same again. The log never grows
beyond its bound: the oldest steps make room, and a replay that would need them is not planned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec
import torch
import xxhash

from holdfast_core.errors import CorruptError


class Crossing(StrEnum):
    """What crosses a boundary, or belongs to all stages."""

    ACTIVATION = "activation"
    """Output of a stage, for the stage after it."""
    GRADIENT = "gradient"
    """Gradient of a stage's input, for the stage before it."""
    TENSOR = "tensor"
    """What a schedule of torch sends, whatever it is."""
    SHARED = "shared"
    """Sum over all ranks."""


class Key(msgspec.Struct, frozen=True, order=True):
    """Name of one message of a rank."""

    step: int
    crossing: Crossing
    number: int
    """Number of the micro-batch, from 0; of a sum, or of a schedule's tensor between two ranks in
    one direction, its place in the step."""

    def __str__(self) -> str:
        return f"{self.crossing} {self.number} of step {self.step}"


class Message(msgspec.Struct, frozen=True):
    """One message as its sender has logged it."""

    key: Key
    data: bytes
    digest: int

    def checked_bytes(self) -> bytes:
        """The message's bytes.

        Raises:
            CorruptError: they do not match their digest.
        """
        if xxhash.xxh3_64_intdigest(self.data) != self.digest:
            raise CorruptError(f"the log of {self.key} does not match its checksum")
        return self.data


class LogPart(msgspec.Struct, frozen=True):
    """What one rank gives to another for its replay."""

    sent: tuple[Message, ...] = ()
    """What it has sent to that rank, and sums."""
    received: tuple[tuple[Key, int], ...] = ()
    """Digest of each message that it has received from that rank."""


_PART = msgspec.msgpack.Decoder(LogPart)


def encode_part(part: LogPart) -> bytes:
    """Encode what one rank gives to another."""
    return msgspec.msgpack.encode(part)


def decode_part(data: bytes) -> LogPart:
    """Decode what another rank has given.

    Raises:
        CorruptError: `encode_part` cannot have written it.
    """
    try:
        return _PART.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"the log of a neighbour cannot be read: {error}") from error


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Copy of a tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().tobytes()


@dataclass(slots=True)
class _Step:
    """Messages of one step, with the other rank of each; -1 for all ranks."""

    sent: dict[tuple[int, Key], Message] = field(default_factory=dict)
    received: dict[tuple[int, Key], int] = field(default_factory=dict)
    nbytes: int = 0


class BoundaryLog:
    """Messages of this rank in the newest steps, within a bound.

    Args:
        bytes_max: most bytes of messages that are kept.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._steps: dict[int, _Step] = {}
        self._nbytes = 0
        self._first, self._last = 1, 0

    @property
    def first(self) -> int:
        """First step that is logged whole, or would be."""
        return self._first

    @property
    def last(self) -> int:
        """Last step that is complete."""
        return self._last

    @property
    def nbytes(self) -> int:
        """Bytes of the messages that are kept."""
        return self._nbytes

    def restart(self, step: int) -> None:
        """Begin anew after a completed step."""
        self._steps.clear()
        self._nbytes, self._first, self._last = 0, step + 1, step

    def begin(self, step: int) -> None:
        """Begin a step; what an execution that was cut off has logged of it is dropped."""
        for late in [one for one in self._steps if one >= step]:
            self._nbytes -= self._steps.pop(late).nbytes
        self._steps[step] = _Step()

    def complete(self, step: int) -> None:
        """Note that a step is complete."""
        self._last = step

    def drop_to(self, step: int) -> None:
        """Drop what no replay from a line at `step` needs."""
        for old in [one for one in self._steps if one <= step]:
            self._nbytes -= self._steps.pop(old).nbytes
        self._first = max(self._first, step + 1)

    def add_sent(self, to: int, key: Key, data: bytes) -> int:
        """Log a message to rank `to`; return its digest."""
        message = Message(key, data, xxhash.xxh3_64_intdigest(data))
        step = self._steps.get(key.step)
        if step is not None:
            step.sent[to, key] = message
            step.nbytes += len(data)
            self._nbytes += len(data)
        while self._nbytes > self._bytes_max:
            self.drop_to(min(self._steps))
        return message.digest

    def add_received(self, source: int, key: Key, digest: int) -> None:
        """Log that a message of that digest has come from rank `source`."""
        step = self._steps.get(key.step)
        if step is not None:
            step.received[source, key] = digest

    def part_for(self, ranks: Iterable[int], after: int, to: int) -> LogPart:
        """What is logged of messages with `ranks` in the steps after `after`, to step `to`."""
        wanted = set(ranks)
        steps = [one for number, one in self._steps.items() if after < number <= to]
        return LogPart(
            tuple(m for one in steps for (rank, _), m in one.sent.items() if rank in wanted),
            tuple(
                (k, d) for one in steps for (rank, k), d in one.received.items() if rank in wanted
            ),
        )
