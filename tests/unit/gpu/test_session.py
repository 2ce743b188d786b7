"""The script of a bundle, as it is, over steps that pass, fail, crash, hang, or are not there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from gpu.report import Record, State, read

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 600
"""For a session: each of its steps imports pytest anew, and other tests run beside it."""

pytestmark = pytest.mark.timeout(LIMIT_S + 60)

STEPS = """
import contextlib, pathlib, subprocess

from gpu import processes
from {steps} import *


class Process(subprocess.Popen):
    '''The time limit of the step that is stuck begins once it is, however long its imports take;
    describing the machine, which imports torch, has none while there is time left.'''

    def wait(self, timeout=None):
        child = pathlib.Path(__file__).parents[1] / "child"
        while "tests/gpu/test_stuck.py" in self.args and not child.exists():
            with contextlib.suppress(subprocess.TimeoutExpired):
                return super().wait(0.05)
        return super().wait(None if timeout and "gpu.facts" in self.args else timeout)


processes.subprocess.Popen = Process
STEPS = (
    Step(path="tests/gpu/test_sound.py", limit_s=200),
    Step(path="tests/gpu/test_failing.py", limit_s=200),
    Step(path="tests/gpu/test_crashing.py", limit_s=200),
    Step(path="tests/gpu/test_hanging.py", limit_s=200, test_limit_s=5),
    Step(path="tests/gpu/test_stuck.py", limit_s=3),
    Step(path="tests/gpu/test_without_tests.py", limit_s=200),
    Step(path="tests/gpu/test_absent.py", limit_s=200),
    Step(path="benchmarks/gpu/measuring.py", limit_s=200),
    Step(path="benchmarks/gpu/breaking.py", limit_s=200),
    Step(path="benchmarks/gpu/malformed.py", limit_s=200),
    Step(path="benchmarks/gpu/partly.py", limit_s=200),
    Step(path="tests/gpu/test_skipping.py", limit_s=200),
)
"""

FILES = {
    "tests/gpu/test_sound.py": """
import pytest, warnings

def test_one():
    warnings.warn("of another version")

@pytest.mark.skip(reason="needs a CUDA device")
def test_two(): ...
""",
    "tests/gpu/test_failing.py": "def test_one(): assert 1 == 2\n\ndef test_two(): ...\n",
    "tests/gpu/test_crashing.py": """
import os

def test_before(): ...

def test_crash():
    os.abort()

def test_after(): ...
""",
    "tests/gpu/test_hanging.py": """
import threading

def test_hang():
    threading.Event().wait()

def test_after(): ...
""",
    "tests/gpu/test_stuck.py": """
import os, pathlib, subprocess, threading

shared = pathlib.Path(os.environ["HOLDFAST_SHARED_MEMORY"])
(shared / "arena").write_bytes(bytes(1 << 20))
with open("shared", "w") as file:
    file.write(str(shared))
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
pathlib.Path("child.new").write_text(str(child.pid))
pathlib.Path("child.new").rename("child")
threading.Event().wait()
""",
    "tests/gpu/test_without_tests.py": "",
    "tests/gpu/test_skipping.py": """
import pytest

pytest.skip("needs two devices", allow_module_level=True)
""",
    "benchmarks/gpu/malformed.py": """
import sys

with open(sys.argv[sys.argv.index("--out") + 1], "w") as file:
    file.write('{"figures": [{"unit": "s"}]}')
""",
    "benchmarks/gpu/partly.py": """
import json, sys

found = {"figures": [{"name": "copy", "value": 1.0}], "failed": ["blocked_peer: KeyError: 'w'"]}
with open(sys.argv[sys.argv.index("--out") + 1], "w") as file:
    json.dump(found, file)
print("the stack")
raise SystemExit(1)
""",
    "benchmarks/__init__.py": "",
    "benchmarks/gpu/__init__.py": "",
    "benchmarks/gpu/measuring.py": """
import json, sys

figure = {"name": "copy", "value": 0.5, "unit": "s", "floor": 0.25, "goal": "<= 1 s", "met": True}
skipped = [f"peers: {sys.argv[-1]}"]
with open(sys.argv[sys.argv.index("--out") + 1], "w") as file:
    json.dump({"facts": {"device": "this"}, "figures": [figure], "skipped": skipped}, file)
""",
    "benchmarks/gpu/breaking.py": "print('no such device')\nraise SystemExit(3)\n",
}


@dataclass(frozen=True)
class Run:
    """A session that has ended."""

    code: int
    out: Path
    bundle: Path

    def records(self) -> dict[str, Record]:
        return {Path(record.step).stem: record for record in read(self.out / "results.jsonl")}

    def outcomes(self, step: str) -> dict[str, str]:
        tests = self.records()[step].tests
        return {test["test"].rpartition("::")[2]: test["outcome"] for test in tests}


def _run(bundle: Path, *options: str) -> Run:
    out = bundle.with_name(f"{bundle.name}-out")
    done = subprocess.run(
        [bundle / "gpu" / "run.sh", "--out", out.name, *options],
        cwd=out.parent,
        env=os.environ | {"PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (out / "summary.md").read_text(encoding="utf-8") in done.stdout
    return Run(done.returncode, out, bundle)


def _bundle(folder: Path) -> Path:
    """A bundle of its own steps, with everything else that a session consists of."""
    shutil.copytree(ROOT / "gpu", folder / "gpu", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "gpu" / "steps.py").rename(folder / "gpu" / "real_steps.py")
    (folder / "gpu" / "steps.py").write_text(STEPS.format(steps="gpu.real_steps"))
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


# Slow: nothing of torch is compiled in the folder that a session keeps for what it compiles.
@pytest.fixture(scope="module", params=[pytest.param("--small", marks=pytest.mark.slow)])
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    bundle = _bundle(tmp_path_factory.mktemp("bundle"))
    return _run(bundle, "--deadline-s", str(LIMIT_S), request.param)


def test_what_passed_and_what_was_skipped_is_listed_by_name(ended: Run) -> None:
    assert ended.outcomes("test_sound") == {"test_one": "passed", "test_two": "skipped"}
    assert ended.records()["test_sound"].state is State.PASSED
    summary = (ended.out / "summary.md").read_text(encoding="utf-8")
    assert "`tests/gpu/test_sound.py::test_two`: needs a CUDA device" in summary


def test_a_failure_is_shown_with_its_reason(ended: Run) -> None:
    assert ended.records()["test_failing"].state is State.FAILED
    assert ended.outcomes("test_failing") == {"test_one": "failed", "test_two": "passed"}
    summary = (ended.out / "summary.md").read_text(encoding="utf-8")
    assert summary.index("assert 1 == 2") > summary.index("Machine:")
    assert ended.code == 1


def test_a_crash_loses_only_the_test_that_crashed(ended: Run) -> None:
    assert ended.records()["test_crashing"].state is State.CRASHED
    assert ended.outcomes("test_crashing") == {
        "test_before": "passed",
        "test_crash": "started",
        "test_after": "passed",
    }


def test_a_hang_loses_only_the_test_that_hangs(ended: Run) -> None:
    assert ended.records()["test_hanging"].state is State.CRASHED
    assert ended.outcomes("test_hanging") == {"test_hang": "started", "test_after": "passed"}
    assert "in test_hang" in ended.records()["test_hanging"].tail, "the stack of what hung"


def test_a_step_that_is_stuck_is_ended_with_all_its_processes(ended: Run) -> None:
    stuck = ended.records()["test_stuck"]
    assert stuck.state is State.TIMED_OUT
    assert "most recent call first" in stuck.tail, "the stack of what was stuck"
    child = int((ended.bundle / "child").read_text())
    assert not Path(f"/proc/{child}").exists()


def test_a_step_that_is_killed_leaves_nothing_in_shared_memory(ended: Run) -> None:
    shared = Path((ended.bundle / "shared").read_text())
    assert shared.is_relative_to("/dev/shm")
    assert not shared.exists()
    assert not shared.parent.exists(), "nor does the session"


def test_a_file_that_is_not_there_or_has_no_tests_is_reported(ended: Run) -> None:
    assert ended.records()["test_absent"].state is State.MISSING
    assert ended.records()["test_without_tests"].state is State.FAILED


def test_figures_are_recorded_as_they_were_measured(ended: Run) -> None:
    measured = ended.records()["measuring"]
    assert measured.state is State.PASSED
    assert [figure["value"] for figure in measured.figures] == [0.5]
    assert measured.skipped == ["peers: --small"]
    summary = (ended.out / "summary.md").read_text(encoding="utf-8")
    assert "| copy | 0.5 s | 0.25 s |  | <= 1 s | yes |" in summary


def test_figures_that_are_not_there_fail_with_what_was_printed(ended: Run) -> None:
    broken = ended.records()["breaking"]
    assert broken.state is State.FAILED
    assert "no such device" in broken.tail
    assert ended.records()["malformed"].state is State.FAILED
    assert "name" in ended.records()["malformed"].tail


def test_a_figure_that_could_not_be_measured_fails_with_its_error(ended: Run) -> None:
    partly = ended.records()["partly"]
    assert partly.state is State.FAILED
    assert partly.failed == ["blocked_peer: KeyError: 'w'"]
    assert [figure["name"] for figure in partly.figures] == ["copy"]
    summary = (ended.out / "summary.md").read_text(encoding="utf-8")
    assert "| `benchmarks/gpu/partly.py` | **FAILED** | 1 | 1 | 0 |" in summary
    assert "`blocked_peer: KeyError: 'w'`" in summary


def test_a_file_that_skips_itself_is_skipped_with_its_reason(ended: Run) -> None:
    skipping = ended.records()["test_skipping"]
    assert skipping.state is State.SKIPPED
    assert [test["reason"] for test in skipping.tests] == ["needs two devices"]


def test_the_machine_is_described(ended: Run) -> None:
    machine = ended.records()["machine"].facts
    assert machine["python"] == sys.version.partition(" ")[0]
    assert "cuda_devices" in machine
    assert machine["small"] is True


def test_the_results_fit_into_what_comes_back(ended: Run) -> None:
    assert {path.name for path in ended.out.iterdir()} == {
        "summary.md",
        "results.jsonl",
        "tests.jsonl",
        "output.log",
    }


def test_after_the_deadline_the_rest_is_listed_as_not_reached(tmp_path: Path) -> None:
    late = _run(_bundle(tmp_path), "--deadline-s", "0", "--only", "tests/gpu/test_sound.py")
    assert late.records()["test_sound"].state is State.NOT_REACHED
    assert late.code == 1


def test_a_step_can_be_left_out(tmp_path: Path) -> None:
    steps = ("tests/gpu/test_sound.py", "benchmarks/gpu/measuring.py")
    run = _run(_bundle(tmp_path), "--deadline-s", "0", "--only", *steps, "--without", steps[1])
    assert "test_sound" in run.records() and "measuring" not in run.records()
