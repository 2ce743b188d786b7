"""The log of messages between pipeline stages, in the memory of the ranks (MoEvement §3.4).

The sender keeps the whole message, and the receiver keeps its digest. So the neighbours of a lost
stage can give it the messages that they had sent, and can verify that it sends the same messages
again. If logs keep received messages as well, the messages of a rank outlive its process: its
neighbours return them to the process that takes its place. The log never grows beyond its bound: it
drops the oldest steps, and a replay that would need them is not planned.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

import msgspec
import xxhash

from holdfast._elastic.message_copies import Copied
from holdfast_core.errors import CorruptError

ON_WAY_BYTES_MAX = 256 * 1024 * 1024
"""Bytes of messages that devices may be copying for one log. To log more, a rank waits."""

_log = logging.getLogger("holdfast")

EVERYONE = -1
"""Stands for all ranks in the log, in place of one rank."""


class Crossing(StrEnum):
    """The kinds of messages between stages."""

    ACTIVATION = "activation"
    """The output of a stage, sent to the next stage."""
    GRADIENT = "gradient"
    """The gradient of a stage's input, sent to the previous stage."""
    TENSOR = "tensor"
    """Any tensor that a schedule of torch sends."""
    SHARED = "shared"
    """A sum over all ranks."""


class Key(msgspec.Struct, frozen=True, order=True):
    """The name of one message of a rank."""

    step: int
    crossing: Crossing
    number: int
    """Number of the micro-batch, from 0. For a sum, its number in the step; for a schedule's
    tensor, its number among those from one rank to another in the step."""
    turn: int = 0
    """Number of the message among those of this name between the same two ranks."""

    def __str__(self) -> str:
        return f"{self.crossing} {self.number} of step {self.step}"


class Message(msgspec.Struct, frozen=True):
    """A message as its sender has logged it."""

    key: Key
    data: bytes
    digest: int

    def checked_bytes(self) -> bytes:
        """Return the bytes of the message.

        Raises:
            CorruptError: the bytes do not match their digest.
        """
        if xxhash.xxh3_64_intdigest(self.data) != self.digest:
            raise CorruptError(f"the log of {self.key} does not match its checksum")
        return self.data


class LogPart(msgspec.Struct, frozen=True):
    """The part of one rank's log that it gives to another rank: for the replay of that rank, or to
    return to it what its own log had held."""

    sent: tuple[Message, ...] = ()
    """The messages that it had sent to the other rank, and sums."""
    received: tuple[tuple[Key, int], ...] = ()
    """The digests of the messages that it had received from the other rank."""
    copies: tuple[Message, ...] = ()
    """These messages themselves, if it returns them."""
    first: int = 1
    """First step that the part has whole, if it returns messages."""
    last: int = 0
    """Last of these steps."""


_PART = msgspec.msgpack.Decoder(LogPart)


def encode_part(part: LogPart) -> bytes:
    """Encode the part of a log that one rank gives to another."""
    return msgspec.msgpack.encode(part)


def decode_part(data: bytes) -> LogPart:
    """Decode the part of a log that another rank has given.

    Raises:
        CorruptError: `encode_part` cannot have written `data`.
    """
    try:
        return _PART.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"the log of a neighbour cannot be read: {error}") from error


@dataclass(slots=True)
class _Step:
    """The messages of one step, each with the other rank, or `EVERYONE`."""

    sent: dict[tuple[int, Key], Message] = field(default_factory=dict)
    received: dict[tuple[int, Key], int] = field(default_factory=dict)
    copies: dict[tuple[int, Key], Message] = field(default_factory=dict)
    """The received messages, if the log keeps them."""
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class _OnWay:
    """A message that a device is copying."""

    key: Key
    nbytes: int
    copy: Future[Copied]
    keep: Callable[[Message], None]
    """Adds it to the log."""


class BoundaryLog:
    """The messages of this rank in the newest steps, within a bound.

    Messages from devices arrive in it later than they are added. Who reads the log waits for them.

    Args:
        bytes_max: largest number of bytes of messages to keep.
        keeps_received: whether it also keeps the messages that this rank receives.
    """

    def __init__(self, bytes_max: int, *, keeps_received: bool = False) -> None:
        self._bytes_max, self.keeps_received = bytes_max, keeps_received
        self._steps: dict[int, _Step] = {}
        self._nbytes = 0
        self._first, self._last = 1, 0
        self._on_way: deque[_OnWay] = deque()
        self._on_way_bytes = 0
        self._lacking = False
        """Whether a message of the step in progress could not be logged."""

    @property
    def first(self) -> int:
        """First step whose messages are all logged; one more than `last` if there is none."""
        self._settle()
        return self._first

    @property
    def last(self) -> int:
        """Last completed step."""
        return self._last

    @property
    def nbytes(self) -> int:
        """Number of bytes of the messages in the log."""
        self._settle()
        return self._nbytes

    def restart(self, step: int) -> None:
        """Start an empty log after completed step `step`."""
        self._drop_on_way(0)
        self._lacking = False
        self._steps.clear()
        self._nbytes, self._first, self._last = 0, step + 1, step

    def begin(self, step: int) -> None:
        """Begin the log of `step`. Drop the messages of an earlier execution that was cut off."""
        self._drop_on_way(step)
        self._lacking = False
        for late in [one for one in self._steps if one >= step]:
            self._nbytes -= self._steps.pop(late).nbytes
        self._steps[step] = _Step()

    def complete(self, step: int) -> None:
        """Note that `step` is complete."""
        self._last = step
        if self._lacking:
            self.drop_to(step)

    def drop_to(self, step: int) -> None:
        """Drop the steps that a replay from a line at `step` does not need."""
        for old in [one for one in self._steps if one <= step]:
            self._nbytes -= self._steps.pop(old).nbytes
        self._first = max(self._first, step + 1)

    def add_sent(self, to: int, key: Key, data: bytes) -> int:
        """Log a message to rank `to`; return its digest."""
        message = Message(key, data, xxhash.xxh3_64_intdigest(data))
        self._keep_sent(to, message)
        return message.digest

    def add_received(self, source: int, key: Key, data: bytes) -> None:
        """Log a message from rank `source`."""
        self._keep_received(source, Message(key, data, xxhash.xxh3_64_intdigest(data)))

    def add_sent_later(self, to: int, key: Key, nbytes: int, copy: Future[Copied]) -> None:
        """Log a message to rank `to` once it is copied."""
        self._add_later(_OnWay(key, nbytes, copy, partial(self._keep_sent, to)))

    def add_received_later(self, source: int, key: Key, nbytes: int, copy: Future[Copied]) -> None:
        """Log a message from rank `source` once it is copied."""
        self._add_later(_OnWay(key, nbytes, copy, partial(self._keep_received, source)))

    def _add_later(self, message: _OnWay) -> None:
        self._on_way.append(message)
        self._on_way_bytes += message.nbytes
        while self._on_way and (
            self._on_way[0].copy.done() or self._on_way_bytes > ON_WAY_BYTES_MAX
        ):
            self._arrive()

    def _drop_on_way(self, first: int) -> None:
        """Drop the messages of step `first` and later ones that are being copied."""
        self._on_way = deque(one for one in self._on_way if one.key.step < first)
        self._on_way_bytes = sum(one.nbytes for one in self._on_way)

    def _settle(self) -> None:
        """Wait for all messages that are being copied."""
        while self._on_way:
            self._arrive()

    def _arrive(self) -> None:
        """Add the oldest message that is being copied. If its copy has failed, the log no longer
        has its step."""
        message = self._on_way.popleft()
        self._on_way_bytes -= message.nbytes
        try:
            data, digest = message.copy.result()
        except Exception as error:
            _log.warning("%s cannot be logged: %r", message.key, error)
            if message.key.step > self._last:  # Its step may be cut off, and run again.
                self._lacking = True
            else:
                self.drop_to(message.key.step)
            return
        message.keep(Message(message.key, data, digest))

    def _keep_sent(self, to: int, message: Message) -> None:
        step = self._steps.get(message.key.step)
        if step is not None:
            step.sent[to, message.key] = message
            self._count(step, message)

    def _keep_received(self, source: int, message: Message) -> None:
        step = self._steps.get(message.key.step)
        if step is not None:
            step.received[source, message.key] = message.digest
            if self.keeps_received:
                step.copies[source, message.key] = message
                self._count(step, message)

    def _count(self, step: _Step, message: Message) -> None:
        """Count the bytes of a message that was added to `step`, and make room for them."""
        step.nbytes += len(message.data)
        self._nbytes += len(message.data)
        while self._nbytes > self._bytes_max:
            self.drop_to(min(self._steps))

    def part_to_return(self, rank: int) -> LogPart:
        """Return all that this log has of what the log of `rank` had held: the messages from and to
        it, and sums."""
        self._settle()
        part = self.part_for([rank, EVERYONE], self._first - 1, self._last)
        copies = tuple(
            message
            for number, step in self._steps.items()
            for (source, _), message in step.copies.items()
            if source == rank and self._first <= number <= self._last
        )
        return LogPart(part.sent, part.received, copies, self._first, self._last)

    def refill(self, parts: Mapping[int, LogPart]) -> None:
        """Fill this log, which begins after its last completed step, with what neighbours return.

        Args:
            parts: each rank with which this one exchanges messages → the part of its log.

        Raises:
            CorruptError: a message does not match its checksum. The log is then empty.
        """
        self._settle()
        first = max(part.first for part in parts.values())
        last = min(part.last for part in parts.values())
        if last != self._last or first > last:
            return
        self._first = first
        try:
            for rank, part in parts.items():
                for message in (*part.copies, *part.sent):
                    message.checked_bytes()
                    if self._first <= message.key.step <= last:
                        self._steps.setdefault(message.key.step, _Step())
                for message in part.copies:
                    self._keep_sent(rank, message)
                for message in part.sent:
                    if message.key.crossing is not Crossing.SHARED:
                        self._keep_received(rank, message)
                    elif rank == min(parts):
                        self._keep_sent(EVERYONE, message)
        except CorruptError:
            self.restart(last)
            raise

    def part_for(self, ranks: Iterable[int], after: int, to: int) -> LogPart:
        """Return the logged messages from and to `ranks` in the steps after `after`, up to step
        `to`."""
        self._settle()
        wanted = set(ranks)
        steps = [one for number, one in self._steps.items() if after < number <= to]
        return LogPart(
            tuple(m for one in steps for (rank, _), m in one.sent.items() if rank in wanted),
            tuple(
                (k, d) for one in steps for (rank, k), d in one.received.items() if rank in wanted
            ),
        )
