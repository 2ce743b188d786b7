"""The engine's memory is its own: the rest of the daemon asks, and gives it inputs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import holdfast_daemon

DAEMON = Path(str(holdfast_daemon.__file__)).parent
OWNERS = ("engine", "simulation")
"""The simulation checks what the memory holds."""

ADAPTERS = sorted(
    path for path in DAEMON.rglob("*.py") if path.relative_to(DAEMON).parts[0] not in OWNERS
)


def _names(node: ast.expr) -> str:
    """The last name of what an attribute is read of."""
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case _:
            return ""


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: str(path.relative_to(DAEMON)))
def test_no_adapter_reaches_into_the_memory_of_an_engine(path: Path) -> None:
    reaching, imported = [], []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(value=value, attr="memory") if _names(value) in ("engine", "writer"):
                reaching.append(node.lineno)
            case ast.ImportFrom(module="holdfast_daemon.engine.state"):
                imported.append(node.lineno)
    assert not reaching and not imported, "ask the engine, or give it an input"
