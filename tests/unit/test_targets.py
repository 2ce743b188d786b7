"""Every test is run by some target of make, whatever marks it has and whatever packages it needs.

`make test-all` runs the folders of `testpaths`, without rows marked `exhaustive` and without those
whose package is not in the shared environment. What it leaves out has to be in another target.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

from pairs import ELSEWHERE, REFUSALS

ROOT = Path(__file__).resolve().parents[2]
TESTPATHS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"][
    "ini_options"
]["testpaths"]
TESTING = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
EVERY = "--every-combination"
COMPLETE = (
    ("test-faults", ""),
    ("test-schedules", ""),
    ("test-stores", ""),
    ("test-cluster", EVERY),
    ("test-torchtitan", EVERY),
    ("test-deepspeed", EVERY),
    ("test-megatron", EVERY),
    ("test-optimizers", EVERY),
    ("test-all", f"{EVERY} tests/unit/bench"),
)
"""(target, arguments) that run rows marked `exhaustive`, as `docs/testing.md` has them."""
OWN_ENVIRONMENTS = ("test-torchtitan", "test-deepspeed", "test-megatron", "test-optimizers")
BUNDLE = "tests/gpu"
"""Also run on machines that have more packages than the shared environment."""


@cache
def run_by(target: str, arguments: str = "") -> list[str]:
    """Arguments that a target of make gives pytest, in all its calls."""
    command = ["make", "--dry-run", target, f"ARGS={arguments}"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=ROOT, env=environment
    )
    called = re.findall(r"-m pytest ((?:.*\\\n)*.*)", done.stdout)
    assert called
    return shlex.split(" ".join(called).replace("\\\n", " "))


def is_run_by(path: str, target: str, arguments: str = "") -> bool:
    """Whether a target's paths hold a file or folder of tests; its `-k` may leave out tests."""
    given = [each for each in run_by(target, arguments) if each.startswith("tests/")]
    return any(Path(path).is_relative_to(each) for each in given or TESTPATHS)


def missing_packages(text: str) -> list[str]:
    """Packages that a file of tests needs, and that the shared environment lacks."""
    needed = re.compile(r'(?:find_spec\(|importorskip\(|^PACKAGES = \()"(\w+)', re.MULTILINE)
    return [name for name in needed.findall(text) if importlib.util.find_spec(name) is None]


def is_completed(path: str, text: str) -> bool:
    """Whether some target runs all rows of a file of tests, where their packages are."""
    alone = bool(missing_packages(text)) and not path.startswith((BUNDLE, "tests/cluster"))
    ways = [way for way in COMPLETE if way[0] in OWN_ENVIRONMENTS or not alone]
    # With -k, a target runs only the rows that the folder's own conftest marks.
    return any(
        is_run_by(path, *way) and ("-k" not in run_by(*way) or path in run_by(*way)) for way in ways
    )


def texts(pattern: str) -> dict[str, str]:
    """Files of tests and what they share, with what is in them, by path."""
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in sorted(ROOT.glob(f"tests/**/{pattern}"))
        if path != Path(__file__)
    }


def test_every_folder_of_tests_is_run() -> None:
    files = texts("test_*.py")
    assert len(files) > 400
    ways = ("test-all", "test-cluster")
    assert not [path for path in files if not any(is_run_by(path, way) for way in ways)]
    assert len(run_by("test-cluster")) == 1, "it leaves out some"


def test_rows_that_ci_leaves_out_are_run_by_a_target_that_the_document_names() -> None:
    marked = {
        path if Path(path).name != "conftest.py" else str(Path(path).parent): text
        for path, text in texts("*.py").items()
        if "mark.exhaustive" in text
    }
    assert len(marked) > 20
    left = {path for path, text in marked.items() if not is_completed(path, text)}
    assert not left, "name them in FAULTS of the Makefile"
    for target, arguments in COMPLETE:
        assert EVERY in run_by(target, arguments)
        quoted = f'"{arguments}"' if " " in arguments else arguments
        assert f"`make {target}{f' ARGS={quoted}' if arguments else ''}`" in TESTING


def test_parts_of_slow_tests_have_each_of_them_once_and_whole_files(tmp_path: Path) -> None:
    """Three commits in a row let `.ci/run` run everything."""
    names = [f"test_{letter}.py" for letter in "abcdefghijkl"]
    for name in names:
        (tmp_path / name).write_text(
            "import pytest\n"
            "@pytest.mark.parametrize('n', [1, pytest.param(2, marks=pytest.mark.slow), "
            "pytest.param(3, marks=pytest.mark.slow)])\n"
            "def test(n): pass\n"
        )

    def collected(*options: str) -> set[str]:
        command = [sys.executable, "-m", "pytest", "-p", "conftest", "-c", os.devnull]
        command += [f"--rootdir={tmp_path}", "--collect-only", "-q", *options, str(tmp_path)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return {line for line in done.stdout.splitlines() if "::" in line}

    every, fast = collected(), collected("--without-slow")
    assert len(every) == 3 * len(fast) == 3 * len(names)
    parts = [collected("--slow-part", f"{part}/3") for part in range(3)]
    assert set.union(*parts) == every
    for part in parts:
        assert part >= fast
        assert 0 < len(part - fast) < len(every - fast)
    assert sum(len(part - fast) for part in parts) == len(every - fast)
    homes = [{test.partition("::")[0] for test in part - fast} for part in parts]
    assert sum(map(len, homes)) == len(names)


def test_what_needs_a_package_of_its_own_environment_is_run_there() -> None:
    files = {
        path: missing_packages(text)
        for path, text in texts("test_*.py").items()
        if not path.startswith((BUNDLE, "tests/cluster"))
    }
    left = {
        path: names
        for path, names in files.items()
        if names and not any(is_run_by(path, target) for target in OWN_ENVIRONMENTS)
    }
    assert not left


def test_pairs_that_are_trained_elsewhere_are_trained_by_a_target() -> None:
    trained = {name.partition("::")[0] for name in set(ELSEWHERE.values()) - REFUSALS}
    assert trained
    assert not [path for path in trained if not any(is_run_by(path, *way) for way in COMPLETE)]
