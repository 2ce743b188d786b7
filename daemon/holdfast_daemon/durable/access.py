"""Decides which storage this daemon's jobs may reach, and with which credentials.

Every access to storage goes through here. A URI comes from the control loop, from the daemon that
leads the job, or from the memory of an earlier daemon, and none of these is trusted. The URI is
checked against the list of locations that the daemon was started with, by the namespace in the
job's key. Paths are opened so that no link leads out of their location. A location may have its own
credentials, in a directory of files like a mounted Secret. They are read again before requests, so
that they can be replaced, and are kept nowhere else: not in the environment, logs, status or
messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast_core.errors import InvalidJobError, StorageError
from holdfast_core.job.locations import Locations, StorageLocation, location_of, parse_storage_uri
from holdfast_storage.opening import open_root
from holdfast_storage.retrying import Retry
from holdfast_storage.roots import TierRoot

if TYPE_CHECKING:
    from holdfast_storage.s3_session import S3Session

NAMES = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_SESSION_TOKEN": "token",
    "AWS_ENDPOINT_URL": "endpoint_url",
    "AWS_DEFAULT_REGION": "region_name",
}
"""File in a directory of credentials → option of s3fs. The first two are required."""
FILE_BYTES_MAX = 16 * 1024


class TierAccess:
    """Opens storage for the jobs of one daemon. Its methods may be called from any thread."""

    def __init__(self, locations: Locations, memory: Path | None = None) -> None:
        """
        Args:
            locations: locations that jobs may persist to; None: any location.
            memory: the daemon's own directory, to which no job may persist.

        Raises:
            InvalidJobError: a location holds the daemon's memory, or lies in it.
        """
        self._locations, self._memory = locations, memory
        self._sessions: dict[str, S3Session] = {}
        for location in locations or ():
            if location.fixed.scheme == "file":
                self._check_outside_memory(str(location.fixed), "--storage-location")

    def root(self, uri: str, job: str) -> TierRoot:
        """The root that `uri` names, for the files of `job`. Reads and creates nothing yet.

        Raises:
            InvalidJobError: the job may not persist there.
            StorageError: the kind of storage lacks a package.
        """
        if self._locations is None:
            found = parse_storage_uri(uri)
            if found.scheme == "file":
                self._check_outside_memory(str(found), "spec.persistence.uri")
            return open_root(uri, {}, Retry())
        location = location_of(uri, job, self._locations)
        if location.credentials:
            return open_root(uri, {}, Retry(), session=self._session(location))
        fixed = location.fixed
        top = Path(str(fixed)) if fixed.scheme == "file" else None
        return open_root(uri, {}, Retry(), top=top)

    def _session(self, location: StorageLocation) -> S3Session:
        # Needs s3fs, which a daemon without object storage need not load.
        from holdfast_storage.s3_session import S3Session  # noqa: PLC0415

        directory = location.credentials
        made = S3Session(lambda: read_credentials(Path(directory)))
        return self._sessions.setdefault(directory, made)

    def _check_outside_memory(self, path: str, name: str) -> None:
        if self._memory is None:
            return
        memory, target = self._memory.resolve(), Path(path).resolve()
        # A location above the memory would let jobs name files in it.
        if target.is_relative_to(memory) or (
            self._locations is not None and memory.is_relative_to(target)
        ):
            raise InvalidJobError(
                f"{name} {path} is in the daemon's own memory, {self._memory}, or contains it: "
                f"name a file system that outlives the node"
            )


def read_credentials(directory: Path) -> Mapping[str, Any]:
    """Options of s3fs from the files of a directory, each named as in `NAMES`.

    Raises:
        StorageError: files are missing or malformed; the message does not quote their content.
    """
    try:
        there = {path.name for path in directory.iterdir() if not path.name.startswith(".")}
        values = {name: _read(directory / name) for name in NAMES if name in there}
    except (OSError, UnicodeDecodeError) as error:
        wrong = error.strerror if isinstance(error, OSError) else "not text"
        raise StorageError(
            f"the credentials in {directory} cannot be read: {wrong}; create the Secret that the "
            f"chart's persistence.locations names"
        ) from None
    unknown = ", ".join(sorted(there - NAMES.keys()))
    missing = ", ".join(name for name in list(NAMES)[:2] if not values.get(name))
    if unknown or missing:
        has = f"has the unknown keys {unknown}" if unknown else f"lacks {missing}"
        raise StorageError(
            f"the Secret in {directory} {has}: give {', '.join(list(NAMES)[:2])} and, where they "
            f"are needed, {', '.join(list(NAMES)[2:])}"
        )
    options: dict[str, Any] = {NAMES[name]: value for name, value in values.items()}
    options["client_kwargs"] = {
        key: options.pop(key) for key in ("endpoint_url", "region_name") if key in options
    }
    return options


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(FILE_BYTES_MAX).decode().strip()
