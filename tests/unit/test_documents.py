"""House rules for the documents: prose fits in 100 columns, so that a change shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COLUMNS_MAX = 100
GENERATED = {"docs/job.md"}
"""Text that comes from the sources."""
UNWRAPPED = {"CHANGELOG.md"}
"""One line an entry, so far."""
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "charts/**/*.md")
    for path in ROOT.glob(pattern)
    if path.relative_to(ROOT).as_posix() not in GENERATED
)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _prose(text: str) -> str:
    """`text` with code blocks, table rows and link targets emptied, line by line."""
    code = re.sub(r"(?ms)^ *```.*?^ *```$", lambda block: "\n" * block[0].count("\n"), text)
    return re.sub(r"(?m)^\|.*$|\]\([^)]*\)", "", code)


@pytest.mark.parametrize(
    "path", [path for path in DOCUMENTS if _name(path) not in UNWRAPPED], ids=_name
)
def test_prose_fits_in_a_hundred_columns(path: Path) -> None:
    lines = enumerate(_prose(path.read_text(encoding="utf-8")).splitlines(), start=1)
    long = [number for number, line in lines if len(line) > COLUMNS_MAX]
    assert not long, f"wrap lines {long} of {_name(path)} at {COLUMNS_MAX} columns"
