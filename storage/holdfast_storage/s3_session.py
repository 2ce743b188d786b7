"""s3fs as tiers use it: set up once for the same options, and again when they have changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import fsspec
from fsspec.asyn import get_loop

from holdfast_storage.s3_calls import CONFIG


def file_system(options: Mapping[str, Any], *, shared: bool = True) -> Any:
    """An s3fs file system, the same one for the same options unless it is not `shared`."""
    config = {**CONFIG, **options.get("config_kwargs", {})}
    endpoint = options.get("endpoint_url") or options.get("client_kwargs", {}).get("endpoint_url")
    if not str(endpoint or "https").startswith("http:"):
        # TLS and each part's CRC32 do what a SHA-256 of the body would, and cost less.
        config["s3"] = {"payload_signing_enabled": False, **config.get("s3", {})}
    return fsspec.filesystem(
        "s3", skip_instance_cache=not shared, **{**options, "config_kwargs": config}
    )


class S3Session:
    """What `s3_calls.Calls` needs of a file system whose options may be others the next time."""

    def __init__(self, options: Callable[[], Mapping[str, Any]]) -> None:
        """`options` are asked for before each request; what they raise, the request does."""
        self._options = options
        self._used: Mapping[str, Any] | None = None
        self._made: list[Any] = []
        """The newest, and the one before it, of which a request may not have ended."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Where requests run."""
        found: asyncio.AbstractEventLoop = get_loop()
        return found

    async def set_session(self) -> None:
        """Done by `get_s3`, so that both are of the same options."""

    async def get_s3(self, bucket: str) -> Any:
        """A client for the bucket, with the options of now."""
        options = self._options()
        if options != self._used:
            self._made = [*self._made[-1:], file_system(options, shared=False)]
            self._used = options
        newest = self._made[-1]
        await newest.set_session()
        return await newest.get_s3(bucket)
