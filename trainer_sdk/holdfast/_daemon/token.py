"""The token with which this process proves to the daemon in which pod it runs.

Kubernetes replaces the token in its file long before it expires. This module must never write the
token into an error or a log.
"""

from __future__ import annotations

import threading
from pathlib import Path

from holdfast_core.errors import UnauthenticatedError

Metadata = tuple[tuple[str, str], ...]


class Token:
    """The token in the file `path`, which is read again when the file has changed. Without a path,
    calls carry no token."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._version: tuple[int, int] | None = None
        self._metadata: Metadata = ()

    def metadata(self) -> Metadata:
        """Return the metadata of a call. Any thread may call it.

        Raises:
            UnauthenticatedError: the file cannot be read.
        """
        if self._path is None:
            return ()
        with self._lock:
            try:
                status = self._path.stat()
                version = (status.st_ino, status.st_mtime_ns)
                if version != self._version:
                    text = self._path.read_text(encoding="ascii").strip()
                    self._metadata = (("authorization", f"Bearer {text}"),)
                    self._version = version
            except (OSError, UnicodeDecodeError) as error:
                why = error.strerror if isinstance(error, OSError) else "it is not text"
                raise UnauthenticatedError(
                    f"HOLDFAST_TOKEN_FILE={self._path} cannot be read: {why}; mount a projected "
                    f"service-account token of audience holdfast.dev/daemon there"
                ) from error
            return self._metadata
