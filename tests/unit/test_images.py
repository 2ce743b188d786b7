"""What the images are built from reaches their builder."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCES = tuple(PROJECT["tool"]["setuptools"]["packages"]["find"]["where"])


@pytest.mark.parametrize("file", sorted(path.name for path in ROOT.glob("Dockerfile.*")))
def test_what_an_image_copies_is_let_through(file: str) -> None:
    let_through = {
        Path(line[1:])
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line[:1] == "!"
    }
    lines = (ROOT / file).read_text().replace("\\\n", " ").splitlines()
    copies = [shlex.split(line)[1:-1] for line in lines if line.startswith("COPY ")]
    sources = {
        Path(word)
        for words in copies
        if not any(word.startswith("--from") for word in words)
        for word in words
        if not word.startswith("--")
    }
    assert set(map(Path, SOURCES)) <= sources, "pip needs all folders that pyproject.toml names"
    for source in sources:
        assert (ROOT / source).exists(), source
        assert {source, *source.parents} & let_through, f"{source} is not in .dockerignore"
