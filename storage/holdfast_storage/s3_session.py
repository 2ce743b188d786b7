"""s3fs file systems for tiers: set up once, and again when their options have changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import fsspec
from fsspec.asyn import get_loop

from holdfast_storage.s3_calls import CONFIG


def file_system(options: Mapping[str, Any], *, shared: bool = True) -> Any:
    """An s3fs file system. If `shared`, equal options give the same one."""
    config = {**CONFIG, **options.get("config_kwargs", {})}
    endpoint = options.get("endpoint_url") or options.get("client_kwargs", {}).get("endpoint_url")
    if not str(endpoint or "https").startswith("http:"):
        # TLS and each part's CRC32 do what a SHA-256 of the body would, and cost less.
        config["s3"] = {"payload_signing_enabled": False, **config.get("s3", {})}
    return fsspec.filesystem(
        "s3", skip_instance_cache=not shared, **{**options, "config_kwargs": config}
    )


class S3Session:
    """A file system for `s3_calls.Calls` whose options may change between requests."""

    def __init__(self, options: Callable[[], Mapping[str, Any]]) -> None:
        """`options` is called before each request; its errors fail the request."""
        self._options = options
        self._used: Mapping[str, Any] | None = None
        self._made: list[Any] = []
        """The newest file system, and the one before it, which may still serve a request."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Event loop on which requests run."""
        loop: asyncio.AbstractEventLoop = get_loop()
        return loop

    async def set_session(self) -> None:
        """Do nothing: `get_s3` does this, so that session and client have the same options."""

    async def get_s3(self, bucket: str) -> Any:
        """A client for the bucket, with the current options."""
        options = self._options()
        if options != self._used:
            self._made = [*self._made[-1:], file_system(options, shared=False)]
            self._used = options
        newest = self._made[-1]
        await newest.set_session()
        return await newest.get_s3(bucket)
