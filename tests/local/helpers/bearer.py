"""Credentials for every call of a channel: a token, and the session of the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import grpc

from holdfast_protos.connections import channels


class _Details(NamedTuple):
    """`grpc.ClientCallDetails` with other metadata."""

    method: str
    timeout: float | None
    metadata: tuple[tuple[str, str], ...]
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class Bearer(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    """Adds to each call the value that `token` then returns, unless it is empty."""

    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(self._proven(details, request), request)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(self._proven(details, request), request)

    def _proven(self, details: Any, request: Any) -> Any:
        token, session = self._token(), getattr(request, "session", "")
        headers = (
            *((("authorization", f"Bearer {token}"),) if token else ()),
            *(((channels.SESSION_HEADER, session),) if session else ()),
        )
        return _Details(
            method=details.method,
            timeout=details.timeout,
            metadata=headers,
            credentials=details.credentials,
            wait_for_ready=details.wait_for_ready,
            compression=details.compression,
        )
