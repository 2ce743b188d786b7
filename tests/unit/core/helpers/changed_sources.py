"""A copy of the project's sources that a test changes as a document says, and programs that run
with it."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[4]


def copy_packages(packages: Iterable[str], folder: Path) -> None:
    """Copy `packages`, paths below the root, side by side into `folder`."""
    for package in packages:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, folder / Path(package).name, ignore=ignored)


def insert_member(path: Path, class_name: str, kind: type[ast.stmt], text: str) -> None:
    """Insert `text` into a class of the module at `path`, after its last statement of `kind`."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    (found,) = (
        node
        for node in ast.parse("".join(lines)).body
        if isinstance(node, ast.ClassDef) and node.name == class_name
    )
    last = max(node.end_lineno or 0 for node in found.body if isinstance(node, kind))
    path.write_text("".join([*lines[:last], text, *lines[last:]]), encoding="utf-8")


def run_with(sources: Path, program: str, *values: object) -> dict[str, Any]:
    """Run a program with the packages in `sources`, and `values` as JSON on its standard input;
    return the JSON that it prints."""
    output = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(values),
        env={**os.environ, "PYTHONPATH": str(sources)},
        cwd=sources,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    printed: dict[str, Any] = json.loads(output)
    return printed
