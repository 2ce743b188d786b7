"""The protocol of the bulk stream: which bytes a daemon may request from another, and the framing.

Bulk bytes move over plain TCP because `sendfile` from tmpfs into `recv_into` a mapping is five to
ten times as fast as gRPC in Python. On one connection, requests follow one another:

    request  = header (magic, version, kind, length of the job's name, epoch, index, generation,
               offset, nbytes, base, piece_bytes), then the job's name
    reply    = header (magic, version, status, length of the message, epoch, nbytes), then, when
               status is 0, exactly nbytes raw bytes; else the message `<error code> <text>`

All integers are little-endian. A peer that breaks the framing loses the connection, and a length
that a frame claims is never used to allocate memory. A request cannot name a path: it identifies a
snapshot or a parity block, and the daemon's resolver finds the file. Snapshots and parity carry no
checksum here: the receiver verifies them against the manifest (invariant 1).
"""

from __future__ import annotations

import hashlib
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Protocol

from holdfast_core.errors import HoldfastError, ProtocolError, by_code
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.pieces import DIGEST_BYTES

VERSION = 2
NO_GENERATION = Generation(0, 0)
JOB_NAME_BYTES_MAX = 256
MESSAGE_BYTES_MAX = 1024
CHANGE_BYTES_MAX = 1 << 60
"""Largest change: more than any snapshot has, and its reply's length, with the digests of the
pieces, still fits its field."""
PROBE_BYTES_MAX = 2 << 20
"""Largest probe: enough to show the rate of a link, and too few to be in anybody's way."""
STATUS_OK = 0
STATUS_ERROR = 1

_MAGIC = b"HFBK"
_REQUEST = struct.Struct("<4sBBHQIQQQQQQI")
_REPLY = struct.Struct("<4sBBHQQ")
REQUEST_BYTES = _REQUEST.size
REPLY_BYTES = _REPLY.size


class Kind(IntEnum):
    """The kind of bytes that a request is for."""

    SNAPSHOT = 1
    """The payload of a rank's sealed snapshot; `index` is the rank."""
    PARITY = 2
    """A sealed parity block of the daemon; `index` is the lane."""
    CHANGE = 3
    """A rank's snapshot XOR an older snapshot of it, the shorter one extended with zeros; `index`
    is the rank. Every piece is followed by its xxh3-64, 8 bytes little-endian: the receiver has no
    other means to verify it."""
    PROBE = 4
    """The first bytes of `probe_bytes`, which both sides know: they measure the link."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Request for bytes [offset, offset + nbytes) of a snapshot's payload, a parity block, a change
    or a probe."""

    job: str
    epoch: int
    """The requester's epoch; a daemon in a newer epoch refuses the request."""
    kind: Kind
    index: int
    generation: Generation
    offset: int
    nbytes: int
    base: Generation = NO_GENERATION
    """The older snapshot of a change."""
    piece_bytes: int = 0
    """Bytes of a piece of a change; `offset` is a multiple of it."""

    @property
    def reply_bytes(self) -> int:
        """Bytes that follow the reply's header."""
        if self.kind is not Kind.CHANGE:
            return self.nbytes
        return self.nbytes + DIGEST_BYTES * -(-self.nbytes // self.piece_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """The part of a requested range that exists in the file `path`: `parts`, one after another."""

    path: Path
    parts: tuple[tuple[int, int], ...]
    """(offset, number of bytes) of each part."""

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.parts)


class Resolver(Protocol):
    """Finds the bytes of a request. Called from many threads at once. Raises a HoldfastError, which
    is sent to the requester: StaleEpochError, StorageError, CorruptError."""

    def locate(self, request: Request) -> Located:
        """Find the bytes of a snapshot or a parity block."""

    def change(self, request: Request) -> Iterator[bytes]:
        """The reply to a request for a change or a probe, part by part."""


@cache
def probe_bytes() -> bytes:
    """`PROBE_BYTES_MAX` bytes that look random and are the same everywhere."""
    return hashlib.shake_256(b"holdfast link").digest(PROBE_BYTES_MAX)


def encode_request(request: Request) -> bytes:
    """The bytes of a request; ProtocolError when the job's name is too long."""
    job = request.job.encode()
    if len(job) > JOB_NAME_BYTES_MAX:
        raise ProtocolError(
            f"job name of {len(job)} bytes does not fit {JOB_NAME_BYTES_MAX} bytes of a request"
        )
    head = _REQUEST.pack(
        _MAGIC,
        VERSION,
        request.kind,
        len(job),
        request.epoch,
        request.index,
        request.generation.epoch,
        request.generation.step,
        request.offset,
        request.nbytes,
        request.base.epoch,
        request.base.step,
        request.piece_bytes,
    )
    return head + job


def job_name_bytes(head: bytes) -> int:
    """Bytes of the job's name that follow the header `head`; ProtocolError if it is malformed."""
    magic, version, kind, job_bytes, *_ = _REQUEST.unpack(head)
    if magic != _MAGIC or version != VERSION or kind not in tuple(Kind):
        raise ProtocolError(f"not a bulk request of version {VERSION}: {head[:6].hex()}")
    if not 0 < job_bytes <= JOB_NAME_BYTES_MAX:
        raise ProtocolError(f"a bulk request with a job name of {job_bytes} bytes")
    return int(job_bytes)


def decode_request(head: bytes, job: bytes) -> Request:
    """The request in a header that `job_name_bytes` accepted and the name that followed it."""
    _, _, kind, _, epoch, index, generation_epoch, step, offset, nbytes, *of_change = (
        _REQUEST.unpack(head)
    )
    base_epoch, base_step, piece_bytes = of_change
    if kind == Kind.CHANGE and (piece_bytes == 0 or offset % piece_bytes):
        raise ProtocolError(
            f"a change at byte {offset}, which is not a multiple of its pieces' {piece_bytes} bytes"
        )
    if kind == Kind.PROBE and (offset or nbytes > PROBE_BYTES_MAX):
        raise ProtocolError(
            f"a probe of {nbytes} bytes at {offset}, not of at most {PROBE_BYTES_MAX} at 0"
        )
    if kind == Kind.CHANGE and nbytes > CHANGE_BYTES_MAX:
        raise ProtocolError(f"a change of {nbytes} bytes, more than any snapshot has")
    try:
        name = job.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError("a bulk request whose job name is not UTF-8") from error
    return Request(
        job=name,
        epoch=epoch,
        kind=Kind(kind),
        index=index,
        generation=Generation(generation_epoch, step),
        offset=offset,
        nbytes=nbytes,
        base=Generation(base_epoch, base_step),
        piece_bytes=piece_bytes,
    )


def encode_ok(request: Request) -> bytes:
    return _REPLY.pack(_MAGIC, VERSION, STATUS_OK, 0, request.epoch, request.reply_bytes)


def encode_error(epoch: int, error: HoldfastError) -> bytes:
    message = f"{error.code} {error}".encode()[:MESSAGE_BYTES_MAX]
    return _REPLY.pack(_MAGIC, VERSION, STATUS_ERROR, len(message), epoch, 0) + message


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyHead:
    """The header of a reply, decoded."""

    ok: bool
    message_bytes: int
    epoch: int
    nbytes: int


def decode_reply(head: bytes) -> ReplyHead:
    """The header of a reply; ProtocolError when `head` is not one."""
    magic, version, status, message_bytes, epoch, nbytes = _REPLY.unpack(head)
    is_reply = magic == _MAGIC and version == VERSION and status in (STATUS_OK, STATUS_ERROR)
    if not is_reply or message_bytes > MESSAGE_BYTES_MAX:
        raise ProtocolError(f"not a bulk reply of version {VERSION}: {head[:6].hex()}")
    return ReplyHead(
        ok=status == STATUS_OK, message_bytes=message_bytes, epoch=epoch, nbytes=nbytes
    )


def decode_error(message: bytes) -> HoldfastError:
    """The error that the peer raised."""
    code, _, text = message.decode(errors="replace").partition(" ")
    return by_code(code, text)


def set_timeouts(connection: socket.socket, timeout_s: float) -> None:
    """Let every blocking call on `connection` end after `timeout_s` without progress.

    The kernel measures the time, not Python: a socket with Python's own timeout is non-blocking
    underneath, which costs a poll for each read and makes MSG_WAITALL and sendfile useless.
    """
    connection.setblocking(True)
    seconds = int(timeout_s)
    value = struct.pack("ll", seconds, max(int((timeout_s - seconds) * 1e6), 1))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def receive(connection: socket.socket, view: memoryview) -> None:
    """Fill `view`; raises ConnectionError when the stream ends, TimeoutError without progress."""
    while len(view):
        try:
            count = connection.recv_into(view, 0, socket.MSG_WAITALL)
        except BlockingIOError as error:
            raise TimeoutError("no bytes arrived in time") from error
        if count == 0:
            raise ConnectionResetError("the connection ended")
        view = view[count:]
