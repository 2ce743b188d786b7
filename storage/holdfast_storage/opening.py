"""Opening of a tier's root. The only module that asks fsspec for a kind of storage.

The kinds are a closed list: the errors of each are translated, and none keeps its files in the
memory of the process or connects to a host that the URI names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec.core

from holdfast_core.job.locations import StorageUri, parse_storage_uri
from holdfast_core.packages import PackageGroup, needing
from holdfast_storage.confined import ConfinedFiles
from holdfast_storage.failing import foreign_errors
from holdfast_storage.generic import GenericRoot
from holdfast_storage.local import LocalRoot
from holdfast_storage.retrying import Retry
from holdfast_storage.roots import TierRoot

if TYPE_CHECKING:
    from holdfast_storage.s3_session import S3Session


def open_root(
    uri: str,
    options: Mapping[str, Any],
    retry: Retry,
    *,
    top: Path | None = None,
    session: S3Session | None = None,
) -> TierRoot:
    """The root that `uri` names: an absolute path, `file:///…`, `s3://bucket/prefix`, or one of
    the other kinds of `holdfast_core.job.locations.SCHEMES`, with `options` for its file system.
    Nothing is read or created yet.

    Args:
        top: for a path, the directory, equal to it or above it, below which links are not followed;
            None: links in the path are followed.
        session: for S3, a session with other options, such as a location's own credentials.

    Raises:
        InvalidJobError: the URI names no single place, or one of an unknown kind.
        MissingPackageError: the packages for S3 are not installed.
        StorageError: fsspec lacks a package for another kind, or cannot prepare it.
    """
    parsed = parse_storage_uri(uri)
    if parsed.scheme == "file":
        return LocalRoot(Path(str(parsed)), ConfinedFiles(top) if top else None)
    with foreign_errors(f"opening {uri}"):
        return _open_bucket(parsed, options, retry, session)


def _open_bucket(
    bucket: StorageUri,
    options: Mapping[str, Any],
    retry: Retry,
    session: S3Session | None,
) -> TierRoot:
    if bucket.scheme == "s3":
        # Needs s3fs, which not every user of a tier has installed or wants to load.
        with needing(f"opening {bucket}", PackageGroup.DAEMON):
            from holdfast_storage.s3 import open_s3  # noqa: PLC0415

        return open_s3(str(bucket), options, retry, session=session)
    fs, root = fsspec.core.url_to_fs(str(bucket), **options)
    return GenericRoot(fs, root)
