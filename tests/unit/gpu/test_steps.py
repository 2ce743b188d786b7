from __future__ import annotations

from pathlib import Path

from gpu.steps import STEPS

ROOT = Path(__file__).resolve().parents[3]


def test_every_file_of_gpu_tests_and_figures_is_a_step() -> None:
    tests = (ROOT / "tests" / "gpu").glob("test_*.py")
    modules = (ROOT / "benchmarks" / "gpu").glob("*.py")
    figures = (path for path in modules if "__main__" in path.read_text(encoding="utf-8"))
    found = {path.relative_to(ROOT).as_posix() for path in (*tests, *figures)}
    assert found <= {step.path for step in STEPS}


def test_no_step_is_there_twice() -> None:
    assert len({step.path for step in STEPS}) == len(STEPS)
