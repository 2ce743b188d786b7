"""The connection to the node's daemon for calls that belong to a job rather than to a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import grpc

from holdfast._daemon.token import Token
from holdfast_core.errors import HoldfastError, UnreachableError
from holdfast_protos import codec, trainer_pb2_grpc
from holdfast_protos.connections import channels

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")

REPLY_S = 5.0
"""Time that a reply may take, in addition to the time for which the daemon may hold the call."""


class JobCalls:
    """Connection to the daemon at the Unix socket `socket`. Calls carry the token in `token_file`.
    Methods raise nothing but HoldfastError."""

    def __init__(self, socket: Path, token_file: Path | None) -> None:
        self._socket, self._token = socket, Token(token_file)
        options = channels.channel_options(reconnect_ms_max=500)
        self._channel = grpc.insecure_channel(f"unix:{socket}", options=options)
        self.stub = trainer_pb2_grpc.TrainerStub(self._channel)

    def ask(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _Reply],
        request: _Request,
        timeout_s: float = REPLY_S,
    ) -> _Reply:
        """Make a call, and return its reply."""
        try:
            return method(request, timeout=timeout_s, metadata=self._token.metadata())
        except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed
            raise self._holdfast_error_of(error) from error

    def stream(
        self, method: grpc.UnaryStreamMultiCallable[_Request, _Reply], request: _Request
    ) -> Iterator[_Reply]:
        """Make a call that stays open, and yield its messages."""
        try:
            yield from method(request, metadata=self._token.metadata())
        except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed
            raise self._holdfast_error_of(error) from error

    def close(self) -> None:
        """Close the connection, and end all calls that wait on it."""
        self._channel.close()

    def _holdfast_error_of(self, error: Exception) -> HoldfastError:
        """Return the error with which the daemon answered a failed call, or an UnreachableError if
        the daemon did not answer."""
        if isinstance(error, grpc.Call):
            ours = codec.error_from_metadata(error.trailing_metadata(), error.details() or "")
            if ours is not None:
                return ours
        return UnreachableError(f"the daemon at {self._socket} does not answer: {error}")
