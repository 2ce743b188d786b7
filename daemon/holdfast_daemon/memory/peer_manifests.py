"""Manifests and layouts of a parity group's snapshots, kept for the other members.

A member that lost its memory gets the manifests of the snapshots that it must rebuild from here.
Every file is checked when it is read: a damaged file counts as missing, because every other member
of the group keeps a copy. This module takes no lock: `memory.job_storage` does.
"""

from __future__ import annotations

import re
from collections.abc import Set
from pathlib import Path

from holdfast_core.errors import CorruptError, HoldfastError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import decode_manifest, layout_id
from holdfast_daemon.memory.files import TEMPORARY, Files, replace

_MANIFEST_NAME = re.compile(r"([0-9]+)-([0-9]+\.[0-9]+)\.manifest")
_LAYOUT_ID = re.compile(r"[0-9a-f]{32}")


class PeerManifests:
    """The manifests and layouts of other members, below `<job>/peers`."""

    def __init__(self, directory: Path, files: Files) -> None:
        self._directory = directory
        self._files = files

    def keep(self, rank: int, manifest: bytes, layout: bytes) -> None:
        """Keep the encoded manifest and layout of a snapshot of `rank`.

        Raises:
            CorruptError: the manifest does not match its own checksum, or is not of this layout:
                its content names the file.
        """
        decoded = decode_manifest(manifest)
        if layout_id(layout) != decoded.layout_id:
            raise CorruptError(
                f"a manifest of layout {decoded.layout_id[:80]!r} came with layout "
                f"{layout_id(layout)}"
            )
        self._files.mkdir(self._directory)
        layout_path = self._layout_path(decoded.layout_id)
        if not layout_path.exists():
            replace(self._files, layout_path, layout)
        replace(self._files, self._manifest_path(rank, decoded.generation), manifest)

    def get(self, rank: int, generation: Generation) -> tuple[bytes, bytes] | None:
        """(manifest, layout) as given to `keep`, or None when they are not here or not whole."""
        try:
            manifest = self._manifest_path(rank, generation).read_bytes()
            decoded = decode_manifest(manifest)
            if not _LAYOUT_ID.fullmatch(decoded.layout_id):
                return None
            layout = self._layout_path(decoded.layout_id).read_bytes()
        except (HoldfastError, OSError):
            return None
        whole = layout_id(layout) == decoded.layout_id
        return (manifest, layout) if whole else None

    def forget(self, keep: Set[Generation]) -> None:
        """Delete the manifests of generations that are not in `keep`, then layouts without one."""
        if not self._directory.is_dir():
            return
        wanted = set()
        for path in sorted(self._directory.iterdir()):
            match = _MANIFEST_NAME.fullmatch(path.name)
            if match is None:
                continue
            pairs = (
                self.get(int(match[1]), Generation.parse(match[2]))
                if Generation.parse(match[2]) in keep
                else None
            )
            if pairs is None:
                self._files.unlink(path)
            else:
                wanted.add(layout_id(pairs[1]))
        for path in sorted(self._directory.glob("*.layout")):
            if path.stem not in wanted:
                self._files.unlink(path)

    def adopt(self) -> None:
        """Remove the files that an interrupted `keep` left behind."""
        for path in sorted(self._directory.glob(f"*{TEMPORARY}")):
            self._files.unlink(path)

    def _manifest_path(self, rank: int, generation: Generation) -> Path:
        return self._directory / f"{rank}-{generation}.manifest"

    def _layout_path(self, identity: str) -> Path:
        return self._directory / f"{identity}.layout"
