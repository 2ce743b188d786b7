"""From a tier's URI to its place. The one module that asks fsspec which kind of storage that is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec.core

from holdfast_core.errors import InvalidJobError, StorageError
from holdfast_storage.generic import GenericPlace
from holdfast_storage.local import LocalPlace
from holdfast_storage.places import Place
from holdfast_storage.retrying import Retry

_S3 = ("s3", "s3a")


def open_place(uri: str, options: Mapping[str, Any], retry: Retry) -> Place:
    """The place that `uri` names: an absolute path, `file:///…`, `s3://bucket/prefix`, or any other
    that fsspec knows, with `options` for its file system. Nothing is read or made yet.

    Raises:
        InvalidJobError: the URI names no one place.
        StorageError: fsspec does not know the kind, or lacks a package for it.
    """
    protocol, _, rest = uri.rpartition("://")
    parts = rest.split("/")
    if "::" in uri or ".." in parts or not rest or (not protocol and not rest.startswith("/")):
        raise InvalidJobError(
            f"{uri!r} cannot be a tier: give an absolute path or a URI like s3://bucket/prefix, "
            f"without '..' or '::'"
        )
    if protocol in ("", "file", "local"):
        if not rest.startswith("/"):
            raise InvalidJobError(f"{uri!r} cannot be a tier: a file URI has three slashes")
        return LocalPlace(Path(rest))
    try:
        if protocol in _S3:
            # Needs s3fs, which not everybody who opens a tier has or wants to load.
            from holdfast_storage.s3 import open_s3  # noqa: PLC0415

            return open_s3(uri, options, retry)
        fs, root = fsspec.core.url_to_fs(uri, **options)
    except (ImportError, ValueError) as error:
        raise StorageError(
            f"{uri!r} cannot be opened: {error}; install what fsspec names, or use another storage"
        ) from error
    return GenericPlace(fs, root)
