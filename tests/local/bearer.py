"""Puts a token into every call of a channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import grpc


class _Details(NamedTuple):
    """`grpc.ClientCallDetails` with other metadata."""

    method: str
    timeout: float | None
    metadata: tuple[tuple[str, str], ...]
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class Bearer(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    """Calls carry what `token` returns when they are made; nothing when that is empty."""

    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(self._with_token(details), request)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(self._with_token(details), request)

    def _with_token(self, details: Any) -> Any:
        token = self._token()
        if not token:
            return details
        return _Details(
            method=details.method,
            timeout=details.timeout,
            metadata=(("authorization", f"Bearer {token}"),),
            credentials=details.credentials,
            wait_for_ready=details.wait_for_ready,
            compression=details.compression,
        )
