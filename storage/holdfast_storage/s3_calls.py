"""Requests to an S3-compatible server: retried while that can help, with errors translated.

Built on the client that s3fs sets up (credentials, endpoint, event loop), not on its file
operations: those decide by themselves when to retry, and then send a whole file again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

import aiohttp
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
)
from botocore.exceptions import ConnectionError as RefusedConnectionError

from holdfast_core.errors import HoldfastError, StorageError
from holdfast_storage.failing import WriteStoppedError
from holdfast_storage.retrying import Retry

Result = TypeVar("Result")

CONFIG: Mapping[str, Any] = {
    "retries": {"total_max_attempts": 1},  # `Calls` retries: it can stop, and repeat one part
    "request_checksum_calculation": "when_required",  # computed here while the bytes are in cache
    "response_checksum_validation": "when_required",  # every piece has a digest
    "max_pool_connections": 64,
    "connect_timeout": 10,
    "read_timeout": 60,
}
"""Defaults for botocore's Config; the tier's options override them."""

_LOST = (
    *(HTTPClientError, RefusedConnectionError, IncompleteReadError, aiohttp.ClientError),
    *(TimeoutError, ConnectionError, EOFError),
)
_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_PASSING_CODES = frozenset(
    {"RequestTimeout", "RequestTimeTooSkewed", "SlowDown", "InternalError", "ServiceUnavailable"}
    | {"Throttling", "ThrottlingException", "IncompleteBody", "BadDigest"}
)
_ADVICE = {
    403: "check the daemon's credentials, and what they may do in this bucket",
    404: "it is not there, or no longer: check the tier's URI, and create the bucket if need be",
    507: "the store is full: free space there, or keep fewer copies",
}
_LOOK_S = 0.1
_CHUNK_BYTES = 1024 * 1024
SENT_BYTES = 256 * 1024
"""Largest view that is given to aiohttp at once. asyncio copies what the socket does not take
immediately, so larger ones cost memory, and CPU time over TLS."""


class PartBody:
    """The body of a request, sent from views without a copy.

    botocore reads it like a file, once, to sign it over plain HTTP; aiohttp iterates over it, as
    often as the request is sent.
    """

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._length = sum(len(view) for view in views)
        self._at = 0

    def __len__(self) -> int:
        return self._length

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes from the current position; a copy, as files return."""
        end = self._length if size < 0 else min(self._at + size, self._length)
        parts, begin = [], 0
        for view in self._views:
            parts.append(view[max(self._at - begin, 0) : max(end - begin, 0)])
            begin += len(view)
        self._at = end
        return b"".join(parts)

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        for view in self._views:
            for at in range(0, len(view), SENT_BYTES):
                yield view[at : at + SENT_BYTES]


def code_of(error: Exception) -> tuple[int, str]:
    """HTTP status and S3's code of an error; (0, "") when the server did not answer."""
    if not isinstance(error, ClientError):
        return 0, ""
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return int(status), str(error.response.get("Error", {}).get("Code", ""))


def may_pass(error: Exception) -> bool:
    """Whether the same request may succeed a little later."""
    if isinstance(error, ClientError):
        status, code = code_of(error)
        return status in _PASSING or code in _PASSING_CODES
    return isinstance(error, _LOST)


class Calls:
    """Requests to one bucket, from any thread."""

    def __init__(self, fs: Any, bucket: str, retry: Retry) -> None:
        self._fs = fs
        self.bucket = bucket
        self._retry = retry

    def start(self, doing: Awaitable[Result]) -> Future[Result]:
        """Run `doing` on the storage's event loop."""

        async def run() -> Result:
            return await doing

        return asyncio.run_coroutine_threadsafe(run(), self._fs.loop)

    def run(self, doing: Awaitable[Result]) -> Result:
        """The result of `doing`."""
        return self.start(doing).result()

    async def send(
        self, method: str, accept: Callable[[Exception], bool] | None = None, **arguments: Any
    ) -> Any:
        """Send a request to this bucket and return the answer.

        Raises:
            ClientError: the server answered with an error that `accept` accepts.
            StorageError: it answered with another error, or not in time.
        """

        async def once() -> Any:
            client = await self._client()
            return await getattr(client, method)(Bucket=self.bucket, **arguments)

        return await self.again(f"{method} {arguments.get('Key', '')}", once, accept)

    async def again(
        self,
        doing: str,
        once: Callable[[], Awaitable[Result]],
        accept: Callable[[Exception], bool] | None = None,
    ) -> Result:
        """Result of `once`, which is called again while its error is transient."""
        waits = self._retry.waits_s()
        while True:
            try:
                return await once()
            except HoldfastError:
                raise
            except (ClientError, BotoCoreError, aiohttp.ClientError, OSError, EOFError) as error:
                if accept is not None and accept(error):
                    raise
                wait_s = next(waits, None) if may_pass(error) else None
                if wait_s is None:
                    raise self._translated(doing, error) from error
                await asyncio.sleep(wait_s)

    async def read(self, key: str, start: int, buffer: memoryview) -> int:
        """Fill `buffer` from byte `start` of the object on; return the number of bytes, fewer when
        the object ends."""
        done = 0

        async def once() -> int:
            nonlocal done  # bytes that arrived before a connection was lost are kept
            client = await self._client()
            span = f"bytes={start + done}-{start + len(buffer) - 1}"
            answer = await client.get_object(Bucket=self.bucket, Key=key, Range=span)
            async with answer["Body"] as body:
                async for chunk in body.iter_chunks(_CHUNK_BYTES):
                    if done + len(chunk) > len(buffer):
                        raise StorageError(f"the server sent more of {key} than {span}")
                    buffer[done : done + len(chunk)] = chunk
                    done += len(chunk)
            return done

        try:
            return await self.again(f"reading {key}", once, lambda error: code_of(error)[0] == 416)
        except ClientError:
            return done

    async def _client(self) -> Any:
        await self._fs.set_session()
        return await self._fs.get_s3(self.bucket)

    def _translated(self, doing: str, error: Exception) -> StorageError:
        status, code = code_of(error)
        last = f"after {self._retry.attempts} attempts; " if may_pass(error) else ""
        advice = _ADVICE.get(status, "check the tier's URI, the server and the network")
        text = f"{status} {code}" if status else str(error) or type(error).__name__
        return StorageError(f"{doing} in bucket {self.bucket}: {text}; {last}{advice}")


def wait_for(future: Future[Result], stop: threading.Event) -> Result:
    """Wait for the result of `future`.

    Raises:
        WriteStoppedError: `stop` was set first; `future` is cancelled.
    """
    while True:
        try:
            return future.result(timeout=_LOOK_S)
        except TimeoutError:
            if future.done():
                raise
            if stop.is_set():
                future.cancel()
                raise WriteStoppedError("the write was stopped; nothing of it is visible") from None
        except CancelledError:
            raise StorageError("the write was cancelled; nothing of it is visible") from None
