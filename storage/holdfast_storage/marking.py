"""A job's mark in its tier: whether this is the storage that copies of the job were put into.

A directory whose file system is not mounted can be read, and holds nothing; so does a bucket of
the same name at another endpoint. Whoever knows that there were copies tells both from the right
storage by the mark, which is written before the first set and never removed, also when all sets
are.
"""

from __future__ import annotations

import json

from holdfast_core.stored_line import MARK_FILE
from holdfast_storage.places import Place

MARK_FORMAT = "holdfast-tier/1"


def is_marked(place: Place, job: str) -> bool:
    """Whether the mark is there, whatever is in it: a person may have put it there.

    Raises:
        StorageError: the storage cannot be read.
    """
    return place.size(_path(job)) is not None


def mark(place: Place, job: str) -> None:
    """Put the mark there; one that is there stays.

    Raises:
        StorageError: the storage failed.
    """
    text = json.dumps({"format": MARK_FORMAT, "job": job}, sort_keys=True, separators=(",", ":"))
    place.create(_path(job), text.encode("ascii") + b"\n")


def _path(job: str) -> str:
    return f"{job}/{MARK_FILE}"
