"""A job's mark in its tier: evidence that the job's copies were written to this storage.

A directory whose file system is not mounted can be read, and is empty; so is a bucket of the same
name at another endpoint. Where copies are known to exist, the mark distinguishes the right storage
from both. It is written before the first set and never removed, even when all sets are.
"""

from __future__ import annotations

import json

from holdfast_core.durable.choice import MARK_FILE
from holdfast_storage.roots import TierRoot

MARK_FORMAT = "holdfast-tier/1"


def is_marked(root: TierRoot, job: str) -> bool:
    """Whether the mark exists, whatever it contains: a person may have written it.

    Raises:
        StorageError: the storage cannot be read.
    """
    return root.size(_path(job)) is not None


def mark(root: TierRoot, job: str) -> None:
    """Write the mark; an existing one stays.

    Raises:
        StorageError: the storage failed.
    """
    text = json.dumps({"format": MARK_FORMAT, "job": job}, sort_keys=True, separators=(",", ":"))
    root.create(_path(job), text.encode("ascii") + b"\n")


def _path(job: str) -> str:
    return f"{job}/{MARK_FILE}"
