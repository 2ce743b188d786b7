"""Errors of storage, each with advice on what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from holdfast_core.errors import HoldfastError, StorageError

_ADVICE = {
    errno.ENOSPC: "it is full: free space there, or keep fewer copies",
    errno.EDQUOT: "its quota is used up: raise it, or keep fewer copies",
    errno.EROFS: "it is mounted read-only: mount it writable",
    errno.EACCES: "permission denied: let the daemon's user read and write there",
    errno.EPERM: "not permitted: let the daemon's user read and write there",
    errno.ENOENT: "it is not there: check the tier's URI, and that the volume is mounted",
    errno.ENOTDIR: "a file or a link is where a directory belongs: check the tier's URI, and put "
    "no links into a storage location",
    errno.ELOOP: "it is a link, which is not followed: put the file itself there",
    errno.EIO: "the device failed: check it; what was complete is kept",
    errno.ESTALE: "the file server lost it: check the mount; the next copy tries again",
}


class WriteStoppedError(StorageError):
    """A write was stopped; nothing of it is visible."""

    code: ClassVar[str] = "write_stopped"


def storage_error(doing: str, error: OSError) -> StorageError:
    """The error to raise for the operating system's `error` while `doing`."""
    advice = _ADVICE.get(error.errno or 0, "check the tier's URI and the storage behind it")
    return StorageError(f"{doing}: {error.strerror or error}; {advice}")


@contextmanager
def storage_errors(doing: str) -> Iterator[None]:
    """Translate errors of the operating system."""
    try:
        yield
    except OSError as error:
        raise storage_error(doing, error) from error


@contextmanager
def foreign_errors(doing: str) -> Iterator[None]:
    """Translate errors of a library, of any type."""
    try:
        with storage_errors(doing):
            yield
    except HoldfastError:
        raise
    except ImportError as error:
        raise StorageError(f"{doing}: {error}; install what it names, or use s3 or a path") from (
            error
        )
    except Exception as error:
        raise StorageError(
            f"{doing}: {type(error).__name__}: {error}; check the tier's URI, the daemon's "
            f"credentials and the storage behind it"
        ) from error
