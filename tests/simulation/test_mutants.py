"""That every planted bug still fits the sources: `make mutants` is too long for every day."""

from __future__ import annotations

import ast

import pytest
from mutants import MUTANTS, ROOT, Mutant, planted


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_bug_can_be_planted(mutant: Mutant) -> None:
    for file, text in planted(mutant).items():
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse((ROOT / file).read_text()))


def test_a_mutant_that_no_longer_fits_is_named() -> None:
    stale = Mutant(
        name="stale", edits=(("core/holdfast_core/snapshots/pieces.py", "no such text", ""),)
    )
    with pytest.raises(
        ValueError, match=r"stale: core/holdfast_core/snapshots/pieces.py has changed"
    ):
        planted(stale)
