"""docs/limits.md says what the code does: constants have those values, tests and metrics exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from holdfast_daemon.limits.rates import Rate
from holdfast_daemon.metrics import DEFINITIONS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "limits.md").read_text()
_CONSTANT = re.compile(r"`(holdfast[a-z_.]*)\.([A-Z][A-Z_]+)` = ([0-9.]+)(?:/s, ([0-9]+) at once)?")
CONSTANTS = _CONSTANT.findall(TEXT)
SEARCHED = (
    "limits.rates",
    "trainers.claims",
    "trainers.descriptors",
    "observing.http",
    "transport.server",
    "trainers.request_limits",
    "limits.refusals",
)


@pytest.mark.parametrize(("module", "name", "value", "burst"), CONSTANTS)
def test_a_number_on_the_page_is_that_in_the_code(
    module: str, name: str, value: str, burst: str
) -> None:
    found = getattr(importlib.import_module(module), name)
    if isinstance(found, Rate):
        assert (found.per_s, found.burst) == (float(value), int(burst))
    else:
        assert found == float(value)


def test_the_page_has_numbers() -> None:
    assert len(CONSTANTS) > 50
    assert TEXT.count("` = ") == len(CONSTANTS), "a number that is not compared"


@pytest.mark.parametrize("part", SEARCHED)
def test_every_bound_of_the_daemon_is_on_the_page(part: str) -> None:
    module = importlib.import_module(f"holdfast_daemon.{part}")
    source = Path(str(module.__file__)).read_text()
    bounds = re.findall(r"^([A-Z][A-Z_]*_MAX|[A-Z]+_RATE) = ", source, re.MULTILINE)
    listed = {name for where, name, *_ in CONSTANTS if where == module.__name__}
    assert set(bounds) - listed <= {"HEARTBEAT_AGE_S_MAX", "UNIT_CHARACTERS_MAX"}


def test_every_test_on_the_page_exists() -> None:
    there = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(re.findall(r"`(test_[a-z_]+\.py)`", TEXT)) <= there


def test_every_metric_of_the_daemon_on_the_page_exists() -> None:
    known = {definition.exposed_name for definition in DEFINITIONS}
    named = set(re.findall(r"`(holdfast_(?!operator|daemon|core|host|protos|cli)[a-z_]+)", TEXT))
    assert named - known == set()
