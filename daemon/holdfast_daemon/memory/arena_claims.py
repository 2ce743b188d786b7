"""Claims on arenas: a file lock that only the trainer process that writes into the arena holds."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from holdfast_core.errors import (
    RankInUseError,
    StorageError,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimRequest:
    """Access to an arena that a token grants."""

    path: Path
    """The arena's file."""
    exclusive: bool
    """True for a claim (read-write, locked), False for a restore (read-only)."""


def open_claim(claim: ClaimRequest) -> int:
    """Open the arena once more and return the new descriptor, locked for a claim.

    Raises:
        RankInUseError: another living process holds the arena.
        StorageError: the arena cannot be opened.
    """
    flags = os.O_RDWR if claim.exclusive else os.O_RDONLY
    try:
        descriptor = os.open(claim.path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"cannot open the arena {claim.path}: {error.strerror}") from error
    if claim.exclusive:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise RankInUseError(
                f"another living process holds the arena {claim.path.parent.name}: end it, or wait "
                f"until it has ended"
            ) from error
    return descriptor


def claim_is_free(path: Path) -> bool:
    """Whether no living process holds a claim on the arena file `path`.

    A restarted daemon asks this, because the trainers of the earlier daemon may still run. Raises
    StorageError when the arena cannot be opened.
    """
    try:
        os.close(open_claim(ClaimRequest(path=path, exclusive=True)))
    except RankInUseError:
        return False
    return True
