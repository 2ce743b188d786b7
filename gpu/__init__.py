"""One command for a bare CUDA machine: a bundle to bring along, and a session that runs there.

`bundle` makes the folder where there is a network, `session` runs the steps of `steps` where there
is none, and `report` turns the results into documents. Nothing of Holdfast imports this package.
"""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCES: tuple[str, ...] = tuple(_PROJECT["tool"]["setuptools"]["packages"]["find"]["where"])
"""Folders that hold the packages of the distribution."""
