"""That the parts of the simulation do not import each other in a circle."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import simulation.cluster

FOLDER = Path(simulation.cluster.__file__).parent


def test_only_the_cluster_knows_the_parts_that_it_puts_together() -> None:
    imports = {
        path.stem: {
            node.module.removeprefix("simulation.")
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("simulation.")
            if node.module is not None
        }
        for path in FOLDER.glob("*.py")
    }
    assert len(imports) > 10
    assert {name for name in imports if "cluster" in imports[name]} == {
        "__main__",
        "stored_cluster",
    }
    list(TopologicalSorter(imports).static_order())  # raises CycleError
