"""Exit codes of processes that end by an error of Holdfast."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast._exits import exit_code_of
from holdfast_core.errors import (
    BeginsAnewError,
    CorruptError,
    HoldfastError,
    InvalidJobError,
    LayoutMismatchError,
    NoRecoveryLineError,
    ProtectionRequiredError,
    RankInUseError,
    StaleEpochError,
    UnreachableError,
)
from holdfast_core.exit_codes import (
    BEGINS_ANEW,
    HOLDFAST_DECIDED,
    PROCESS_ENDS,
    PROTECTION_REQUIRED,
)

CODES = {
    BeginsAnewError: BEGINS_ANEW,
    NoRecoveryLineError: PROCESS_ENDS,
    RankInUseError: PROCESS_ENDS,
    StaleEpochError: PROCESS_ENDS,
    UnreachableError: PROCESS_ENDS,
    ProtectionRequiredError: PROTECTION_REQUIRED,
    CorruptError: None,
    InvalidJobError: None,
    LayoutMismatchError: None,
    HoldfastError: None,
    ValueError: None,
}
PLAIN = """
import sys
from holdfast._exits import set_exit_codes
import holdfast_core.errors as errors
set_exit_codes()
set_exit_codes()
raise {error}("the reason")
"""
FORKED = """
from holdfast._launch.script import run_script
run_script((), {path!r})
"""


def python(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )


@pytest.mark.parametrize("kind", CODES, ids=lambda kind: kind.__name__)
def test_errors_about_the_world_have_a_code_and_those_of_the_script_have_pythons(
    kind: type[Exception],
) -> None:
    assert exit_code_of(kind("why")) == CODES[kind]


def test_the_codes_collide_with_no_others() -> None:
    taken = {0, 1, 2, *range(64, 79), *range(126, 256)}
    assert not HOLDFAST_DECIDED & taken


@pytest.mark.parametrize(
    ("error", "code"),
    [("errors.BeginsAnewError", 80), ("errors.StaleEpochError", 79), ("ValueError", 1)],
)
def test_a_process_that_was_started_by_anyone_ends_with_the_code_and_the_reason(
    error: str, code: int
) -> None:
    done = python(PLAIN.format(error=error))
    assert done.returncode == code
    assert done.stderr.splitlines()[-1].endswith("the reason")
    assert done.stderr.count("the reason") == 1, "it is printed once"


@pytest.mark.parametrize(
    ("error", "code"), [("holdfast_core.errors.BeginsAnewError", 80), ("ValueError", 1)]
)
def test_a_script_in_a_fork_of_the_launcher_ends_with_the_code(
    error: str, code: int, tmp_path: Path
) -> None:
    path = tmp_path / "script.py"
    path.write_text(f"import holdfast_core.errors\nraise {error}('the reason')\n")
    done = python(FORKED.format(path=str(path)))
    assert done.returncode == code
    assert done.stderr.splitlines()[-1].endswith("the reason")
