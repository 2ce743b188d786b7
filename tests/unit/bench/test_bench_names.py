"""`make bench NAME=...` runs what its list names, and documents name nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.__main__ import BENCHMARKS, main

ROOT = Path(__file__).parents[3]
NAMED = re.compile(r"make bench NAME=([a-z0-9]+)")
FILES = ("*.md", "*.py", "Makefile", ".ci", ":!tests/unit/bench/test_bench_names.py")


def test_the_list_has_a_line_for_each_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(BENCHMARKS)
    assert all(len(line) <= 80 for line in lines)


def test_an_unknown_name_is_refused_with_those_that_exist(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["recoverys"]) == 2
    message = capsys.readouterr().err
    assert "'recoverys'" in message
    assert all(name in message for name in BENCHMARKS)


def test_a_name_runs_its_module_with_the_other_arguments() -> None:
    command = [sys.executable, "-m", "benchmarks", "parity", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "parity_kernels.py" in done.stdout


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_name_stands_for_a_module_that_can_be_run(name: str) -> None:
    module = ROOT / "benchmarks" / BENCHMARKS[name][0]
    path = module / "__main__.py" if module.is_dir() else module.with_suffix(".py")
    assert 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")


def test_documents_and_sources_name_benchmarks_that_exist() -> None:
    found = subprocess.run(
        ["git", "grep", "-h", "make bench", "--", *FILES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "make bench-" not in found
    names = set(NAMED.findall(found))
    assert len(names) > 10
    assert names <= {*BENCHMARKS, "list"}
