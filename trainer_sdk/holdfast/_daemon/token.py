"""Token by which this process proves to the daemon which pod it runs in.

Kubernetes renews the file in place, long before the token in it expires.

This module must not put the token into an error or a log.
"""

from __future__ import annotations

import threading
from pathlib import Path

from holdfast_core.errors import UnauthenticatedError

Metadata = tuple[tuple[str, str], ...]


class Token:
    """Token in the file `path`, read again when the file has changed; without `path`, no token."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._version: tuple[int, int] | None = None
        self._metadata: Metadata = ()

    def metadata(self) -> Metadata:
        """Metadata of a call. Any thread.

        Raises:
            UnauthenticatedError: when the file cannot be read.
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
