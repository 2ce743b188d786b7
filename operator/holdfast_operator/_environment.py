"""The only module of the operator that reads the environment."""

from __future__ import annotations

import os


def given() -> dict[str, str]:
    """Environment as it is, for options that have a variable."""
    return dict(os.environ)
