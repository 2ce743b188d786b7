"""The volumes of a node's pods: their content, their mounts, and the pods that they belong to.

A volume is a small tmpfs at the path that the kubelet names, read-only for its pod:

    sockets/    the daemon's sockets, a mount of their directory: a daemon that starts again makes
                new ones there
    token       proves to the daemon that its bearer is the pod

A record of the pod and of its token's SHA-256 lies in a directory of its own that only the daemon
can read. It goes with the volume, and from then on the token proves nothing.

The volume has a file system of its own because a mount of a shared directory would pass on what is
mounted into it: the daemon's sockets would appear in the directory that it came from.

Must not: keep, log or repeat a token.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

import msgspec

from holdfast_core.errors import InvalidJobError, StorageError
from holdfast_daemon.memory.kernel_mounts import (
    NOTHING_RUNS,
    MountFlag,
    current_mounts,
    mount,
    mount_at,
    unmount,
)

TOKEN_PREFIX = "volume"
"""First part of these tokens: `volume.<volume id>.<random>`."""
TOKEN_BYTES = 32

_ID = re.compile(r"csi-[0-9a-f]{64}")
"""Ids that the kubelet gives to inline volumes."""
_ONLY_READ = NOTHING_RUNS | MountFlag.BIND | MountFlag.REMOUNT | MountFlag.RDONLY


class VolumePod(msgspec.Struct, frozen=True, kw_only=True):
    """The pod that a volume was made for."""

    namespace: str
    name: str
    uid: str


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon's record of a volume."""

    pod: VolumePod
    token_sha256: str


_RECORD = msgspec.json.Decoder(_Record)


def pod_of_token(records: Path, token: str) -> VolumePod | None:
    """The pod whose volume holds `token`; None when no volume does.

    Args:
        records: directory of the records of the node's volumes.
    """
    prefix, _, rest = token.partition(".")
    volume_id = rest.partition(".")[0]
    if prefix != TOKEN_PREFIX or _ID.fullmatch(volume_id) is None:
        return None
    record = _read(records / volume_id)
    if record is None or not hmac.compare_digest(record.token_sha256, _sha256(token)):
        return None
    return record.pod


class Volumes:
    """The volumes of one node. Every call can be repeated, as the kubelet does.

    Args:
        records: directory of the volumes' records; on the node, so that they outlive this process.
        sockets: directory of the daemon's sockets.
        pods: the kubelet's directory of pods; volumes are mounted below it and nowhere else.
        owner: user id of the daemon.
    """

    def __init__(self, records: Path, sockets: Path, pods: Path, owner: int) -> None:
        self._records, self._sockets, self._pods = records, sockets, pods
        records.mkdir(mode=0o700, exist_ok=True)
        records.chmod(0o700)
        os.chown(records, owner, owner)

    def publish(self, volume_id: str, target: Path, pod: VolumePod) -> None:
        """Make the volume at `target`; a complete volume that is already there stays.

        Raises:
            InvalidJobError: the id or the target is not one of the kubelet's.
            StorageError: it cannot be mounted.
        """
        self._check(volume_id, target, pod.uid)
        if self._is_complete(volume_id, target, pod):
            return
        self.unpublish(volume_id, target)
        token = f"{TOKEN_PREFIX}.{volume_id}.{secrets.token_urlsafe(TOKEN_BYTES)}"
        try:
            target.mkdir(mode=0o750)
            mount("holdfast", target, "tmpfs", NOTHING_RUNS, "size=64k,mode=0755")
            _write(target / "token", token.encode())
            (target / "sockets").mkdir()
            mount(self._sockets, target / "sockets", "", MountFlag.BIND, "")
            for path in (target / "sockets", target):
                mount("", path, "", _ONLY_READ, "")
            record = _Record(pod=pod, token_sha256=_sha256(token))
            _write(self._records / volume_id, msgspec.json.encode(record))
        except OSError as error:
            raise StorageError(f"{target} cannot be mounted: {error.strerror or error}") from error

    def unpublish(self, volume_id: str, target: Path) -> None:
        """Unmount the volume and remove it; from then on its token proves nothing.

        Raises:
            InvalidJobError: the id or the target is not one of the kubelet's.
            StorageError: it cannot be unmounted.
        """
        self._check(volume_id, target, "")
        try:
            (self._records / volume_id).unlink(missing_ok=True)
            for path in (target / "sockets", target):
                while mount_at(path, current_mounts()):
                    unmount(path)
            with suppress(FileNotFoundError):
                target.rmdir()
        except OSError as error:
            raise StorageError(
                f"{target} cannot be unmounted: {error.strerror or error}"
            ) from error

    def _is_complete(self, volume_id: str, target: Path, pod: VolumePod) -> bool:
        record, mounts = _read(self._records / volume_id), current_mounts()
        there = all(mount_at(path, mounts) for path in (target, target / "sockets"))
        return record is not None and record.pod == pod and there

    def _check(self, volume_id: str, target: Path, uid: str) -> None:
        """Raise unless the id is one of the kubelet's, and `target` below the directory of the pod
        `uid`, or of any pod when that is empty."""
        if _ID.fullmatch(volume_id) is None:
            raise InvalidJobError(
                f"volume id {volume_id!r} does not belong to an inline volume of a pod; mount the "
                f"driver's volumes by `csi:` in the pod itself"
            )
        within = self._pods / uid if uid else self._pods
        if ".." in target.parts or within not in target.parents:
            raise InvalidJobError(f"target path {target} is not below {within}")


def _read(record: Path) -> _Record | None:
    try:
        return _RECORD.decode(record.read_bytes())
    except (OSError, msgspec.MsgspecError):
        return None


def _write(path: Path, content: bytes) -> None:
    """Write a file that appears with all of its content, for every user to read."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content)
    new.chmod(0o444)
    new.replace(path)


def _sha256(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
