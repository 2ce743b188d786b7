"""The only module of the checks that reads the environment."""

from __future__ import annotations

import os
from pathlib import Path


def temporary_files() -> Path:
    """The directory of temporary files that is meant, whether or not it can be used: `tempfile`
    would name another one if it is broken."""
    return Path(os.environ.get("TMPDIR") or "/tmp")
