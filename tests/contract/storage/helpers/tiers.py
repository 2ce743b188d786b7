"""A place to store sets in, and a way to it past the store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from stored_snapshots import JOB

from holdfast_storage.generic import GenericRoot
from holdfast_storage.opening import open_root
from holdfast_storage.retrying import Retry
from holdfast_storage.roots import TierRoot
from holdfast_storage.sets import SetStore

QUICK = Retry(attempts=6, first_s=0.001, longest_s=0.004)


@dataclass(frozen=True, kw_only=True, slots=True)
class TierUnderTest:
    """A location that no other test uses. Its stores leave nothing alone because it is young."""

    uri: str
    options: dict[str, Any]
    top: Path | None = None
    """Below it no link is followed."""

    def store(self, **options: Any) -> SetStore:
        settings = {"grace_s": -60.0, "root": self.root(), **options}
        return SetStore(self.uri, JOB, **settings)

    def files(self) -> dict[str, int]:
        """Sizes of all that lies below the job's directory, by path in it."""
        fs, root = fsspec.core.url_to_fs(self.uri, **self.options)
        fs.invalidate_cache()
        root = f"{root}/{JOB}/"
        found = fs.find(root, detail=True) if fs.exists(root) else {}
        return {path.partition(f"/{JOB}/")[2]: info["size"] for path, info in found.items()}

    def get(self, path: str) -> bytes:
        fs, root = fsspec.core.url_to_fs(self.uri, **self.options)
        return bytes(fs.cat_file(f"{root}/{JOB}/{path}"))

    def put(self, path: str, data: bytes) -> None:
        fs, root = fsspec.core.url_to_fs(self.uri, **self.options)
        fs.makedirs(f"{root}/{JOB}/{path}".rpartition("/")[0], exist_ok=True)
        fs.pipe_file(f"{root}/{JOB}/{path}", data)

    def remove(self, path: str) -> None:
        fs, root = fsspec.core.url_to_fs(self.uri, **self.options)
        fs.rm_file(f"{root}/{JOB}/{path}")

    def root(self) -> TierRoot:
        if self.uri.startswith("memory://"):  # no kind for tiers, but its files need no server
            return GenericRoot(*fsspec.core.url_to_fs(self.uri))
        return open_root(self.uri, self.options, QUICK, top=self.top)
