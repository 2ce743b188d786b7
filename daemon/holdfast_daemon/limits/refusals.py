"""Refuses a call so that the caller's side raises the same error again."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
import grpc.aio

from holdfast_core.errors import (
    AccessDeniedError,
    HoldfastError,
    MemoryBudgetError,
    RateLimitedError,
    SnapshotSkippedError,
    StaleEpochError,
    StepOrderError,
    StorageError,
    UnauthenticatedError,
    UnknownSessionError,
    UnreachableError,
)
from holdfast_protos import codec

Context = grpc.aio.ServicerContext[Any, Any]

DETAIL_CHARACTERS_MAX = 4000
"""Characters kept of a refusal's message, parts of which the caller chose: a longer message does
not fit the headers."""

_STATUS = {
    AccessDeniedError.code: grpc.StatusCode.PERMISSION_DENIED,
    UnauthenticatedError.code: grpc.StatusCode.UNAUTHENTICATED,
    RateLimitedError.code: grpc.StatusCode.RESOURCE_EXHAUSTED,
    MemoryBudgetError.code: grpc.StatusCode.RESOURCE_EXHAUSTED,
    SnapshotSkippedError.code: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StorageError.code: grpc.StatusCode.INTERNAL,
    UnreachableError.code: grpc.StatusCode.UNAVAILABLE,
    UnknownSessionError.code: grpc.StatusCode.NOT_FOUND,
    StaleEpochError.code: grpc.StatusCode.FAILED_PRECONDITION,
    StepOrderError.code: grpc.StatusCode.FAILED_PRECONDITION,
}


async def refuse(context: Context, error: HoldfastError) -> NoReturn:
    """End the call with `error`."""
    await context.abort(
        _STATUS.get(error.code, grpc.StatusCode.INVALID_ARGUMENT),
        str(error)[:DETAIL_CHARACTERS_MAX],
        trailing_metadata=codec.error_to_metadata(error),
    )
    raise AssertionError("abort() raises")
