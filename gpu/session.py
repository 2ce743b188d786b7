"""Run the GPU tests and figures of a bundle, most important first, within one deadline.

    gpu/run.sh --out DIR

Needs Python with torch and no network. Unpacks the bundle's wheels into a folder of its own and
installs nothing. Each step is a process with a time limit: one that fails, hangs or crashes loses
only itself. Where there is no CUDA device the same steps run, and what needs one is skipped by
name. DIR gets, all of it while the session runs:

    summary.md     what passed, failed and was skipped, and the figures
    results.jsonl  the machine, and a line for each step
    tests.jsonl    a line for each test that began or ended
    output.log     what the steps printed, the end of each

The exit code is 0 if every step passed or was skipped, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu import ROOT, SOURCES, processes, report
from gpu.processes import Ended
from gpu.report import Record, State
from gpu.steps import STEPS, Kind, Step

SHARED_MEMORY = Path("/dev/shm")

DEADLINE_S = 480.0
FACTS_LIMIT_S = 60.0
STEP_S_MIN = 5.0
"""A step that has less time left is not begun."""
ATTEMPTS_MAX = 3
"""How often a file of tests is begun: after a crash again, without the tests that ended it."""
PROCESSES_MAX = 8
"""Number of processes that share the tests of a folder, at most."""
PRINTED_BYTES_MAX = 256 << 10
"""What is kept of the output of one process."""
TAIL_LINES = 80

NO_TESTS = 5
"""Pytest's exit code when it found none."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out the command line; return the exit code."""
    title, _, more = str(__doc__).partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="gpu/run.sh",
        description=f"{title}\n\n{more}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    parser.add_argument("--small", action="store_true", help="figures of small states, to try it")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="STEP",
        choices=[step.path for step in STEPS],
        help="run these steps alone: %(choices)s",
    )
    parser.add_argument(
        "--without",
        nargs="+",
        default=[],
        metavar="STEP",
        choices=[step.path for step in STEPS],
        help="leave these steps out",
    )
    parser.add_argument(
        "--deadline-s", type=float, default=DEADLINE_S, metavar="S", help="default: %(default)s"
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    processes.adopt_orphans()
    asked = [step for step in STEPS if not options.only or step.path in options.only]
    steps = [step for step in asked if step.path not in options.without]
    options.out.mkdir(parents=True, exist_ok=True)
    memory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-gpu-") as scratch,
        tempfile.TemporaryDirectory(prefix="hft-", dir=memory) as shared,
    ):
        session = Session(
            Path(options.out).resolve(),
            Path(scratch),
            Path(shared),
            small=options.small,
            limit_s=options.deadline_s,
        )
        return session.run(steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Attempt:
    ended: Ended
    printed: str


class Session:
    """One run of steps, with its results in a folder.

    Args:
        scratch: folder on disk for what the steps need and leave behind.
        shared: such a folder in shared memory.
    """

    def __init__(
        self, out: Path, scratch: Path, shared: Path, *, small: bool, limit_s: float
    ) -> None:
        self._out = out
        self._scratch, self._shared = scratch, shared
        self._small = small
        self._deadline_s = time.monotonic() + limit_s
        self._records: list[Record] = []
        self._outcomes = out / "tests.jsonl"
        self._output = out / "output.log"
        for name in ("summary.md", "results.jsonl", "tests.jsonl", "output.log"):
            (out / name).write_text("", encoding="utf-8")

    def run(self, steps: Sequence[Step]) -> int:
        """Run `steps`; return the exit code."""
        self._record(self._prepare())
        for step in steps:
            print(f"== {step.path}", flush=True)
            self._record(self._run(step))
        print((self._out / "summary.md").read_text(encoding="utf-8"), flush=True)
        return 0 if all(record.state in report.SOUND for record in self._records) else 1

    def _record(self, record: Record) -> None:
        self._records.append(record)
        with (self._out / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(record.line() + "\n")
        (self._out / "summary.md").write_text(report.summary(self._records), encoding="utf-8")
        print(f"   {record.state} after {record.seconds:.1f} s", flush=True)

    def _prepare(self) -> Record:
        """Unpack the wheels, and find out what this machine is."""
        damaged = unpack(ROOT / "wheels", self._scratch / "site")
        attempt = self._attempt((sys.executable, "-m", "gpu.facts"), FACTS_LIMIT_S)
        facts: dict[str, object] = {"small": self._small}
        for line in attempt.printed.splitlines():
            with contextlib.suppress(ValueError):  # what else was printed
                facts |= json.loads(line)
        return Record(
            step=report.MACHINE,
            state=State.FAILED if damaged else _state(attempt.ended),
            seconds=attempt.ended.seconds,
            facts=facts,
            tail="\n".join([*damaged, _tail(attempt)]),
        )

    def _run(self, step: Step) -> Record:
        if not (ROOT / step.path).exists():
            return Record(step=step.path, state=State.MISSING)
        if self._left_s() < STEP_S_MIN:
            return Record(step=step.path, state=State.NOT_REACHED)
        try:
            return self._figures(step) if step.kind is Kind.FIGURES else self._tests(step)
        except Exception:  # the next steps count for more than the cause
            return Record(step=step.path, state=State.FAILED, tail=traceback.format_exc())

    def _figures(self, step: Step) -> Record:
        file = self._scratch / f"{Path(step.path).stem}.json"
        module = step.path.removesuffix(".py").replace("/", ".")
        command = [sys.executable, "-m", module, "--out", str(file)]
        attempt = self._attempt([*command, "--small"] if self._small else command, step.limit_s)
        state, tail = _state(attempt.ended), _tail(attempt)
        measured: dict[str, Any] = {}
        try:
            measured = json.loads(file.read_text(encoding="utf-8"))
            rows = [
                {"name": str(row["name"]), "value": row["value"], **row}
                for row in measured["figures"]
            ]
        except (OSError, ValueError, TypeError, KeyError) as error:
            state = State.FAILED if state is State.PASSED else state
            rows, tail = [], f"{file.name}: {error!r}\n{tail}"
        if state is State.PASSED and not rows:
            state = State.SKIPPED
        return Record(
            step=step.path,
            state=state,
            seconds=attempt.ended.seconds,
            facts=measured.get("facts", {}),
            figures=rows,
            skipped=measured.get("skipped", []),
            failed=measured.get("failed", []),
            tail="" if state in report.SOUND else tail,
        )

    def _tests(self, step: Step) -> Record:
        """Run the tests of a step; after a crash or a hang, those that had not begun yet."""
        before = self._outcomes.stat().st_size
        deadline_s = time.monotonic() + step.limit_s
        seconds, tails, begun = 0.0, "", 0
        for _ in range(ATTEMPTS_MAX):
            seen = report.outcomes_by_test(self._outcomes, before)
            attempt = self._attempt(self._pytest(step, list(seen)), deadline_s - time.monotonic())
            seconds += attempt.ended.seconds
            state = _state(attempt.ended)
            tests = report.outcomes_by_test(self._outcomes, before)
            if attempt.ended.code == NO_TESTS and tests:
                state = State.PASSED  # the whole file was skipped, or its rest is empty
            if state not in report.SOUND:
                tails += _tail(attempt) + "\n"
            left_s = min(deadline_s - time.monotonic(), self._left_s())
            if report.unfinished(tests) == begun or left_s < STEP_S_MIN:
                break
            begun = report.unfinished(tests)
        return Record(
            step=step.path,
            state=report.state_of_tests(state, tests.values()),
            seconds=seconds,
            tests=list(tests.values()),
            tail=tails,
        )

    def _pytest(self, step: Step, seen: Sequence[str]) -> list[str]:
        """Command of a step's tests without those that were `seen` to begin.

        Warnings do not fail a test here: this machine's packages are not the pinned ones.
        """
        command = [sys.executable, "-m", "pytest", step.path, "-q", "-p", "no:cacheprovider"]
        command += ["-c", "pyproject.toml", "--rootdir", ".", "-o", "filterwarnings=default"]
        command += ["-p", "gpu.outcomes", f"--outcomes={self._outcomes}"]
        command += [f"--basetemp={self._scratch / 'tests'}"]
        if step.parallel:
            processes_max = min(os.cpu_count() or 1, PROCESSES_MAX)
            command += ["-n", str(processes_max), "--dist", "worksteal"]
        else:  # by a thread: it ends tests that wait in a driver, too
            command += ["--timeout", str(step.test_limit_s), "--timeout-method", "thread"]
        for test in seen:
            command += ["--deselect", test]
        return command

    def _attempt(self, command: Sequence[str], limit_s: float) -> _Attempt:
        """Run a command with the bundle's sources and wheels, within what is left of all limits."""
        temporary, shared = self._scratch / "tmp", self._shared / "step"
        for folder in (temporary, shared):
            folder.mkdir(exist_ok=True)
        begin = self._output.stat().st_size
        with self._output.open("a", encoding="utf-8") as file:
            file.write(f"\n$ {' '.join(command)}\n")
        ended = processes.run(
            command,
            cwd=ROOT,
            environment=self._environment(temporary, shared),
            output=self._output,
            limit_s=max(0.0, min(limit_s, self._left_s())),
        )
        for folder in (temporary, shared, self._scratch / "tests"):
            shutil.rmtree(folder, ignore_errors=True)
        return _Attempt(ended=ended, printed=_cut(self._output, begin))

    def _environment(self, temporary: Path, shared: Path) -> dict[str, str]:
        sources = (*SOURCES, "metadata", ".")
        roots = [*(ROOT / source for source in sources), self._scratch / "site"]
        own = os.environ.get("PYTHONPATH", "")
        return os.environ | {
            "PYTHONPATH": os.pathsep.join([*map(str, roots), own]).rstrip(os.pathsep),
            "PYTHONFAULTHANDLER": "1",
            # The bundle stays as it came, and only the first process compiles what it imports.
            "PYTHONPYCACHEPREFIX": str(self._scratch / "pycache"),
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONUNBUFFERED": "1",
            "HOLDFAST_SHARED_MEMORY": str(shared),  # for large files, which a killed step leaves
            "TMPDIR": str(temporary),
        }

    def _left_s(self) -> float:
        return self._deadline_s - time.monotonic()


def unpack(wheels: Path, site: Path) -> list[str]:
    """Install `wheels` into the folder `site`; return those that failed, with the reason."""
    failed = []
    for wheel in sorted(wheels.glob("*.whl")):
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
        except (OSError, zipfile.BadZipFile) as error:
            failed.append(f"{wheel.name}: {error}")
    return failed


def _state(ended: Ended) -> State:
    if not ended.in_time:
        return State.TIMED_OUT
    if ended.code < 0:
        return State.CRASHED
    return State.PASSED if ended.code == 0 else State.FAILED


def _cut(output: Path, begin: int) -> str:
    """What was printed from `begin` on, of which no more than the end is kept."""
    with output.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(begin, end - PRINTED_BYTES_MAX))
        kept = file.read()
        if end - begin > PRINTED_BYTES_MAX:
            file.seek(begin)
            file.write(kept)
            file.truncate()
    return kept.decode(errors="replace")


def _tail(attempt: _Attempt) -> str:
    return "\n".join(attempt.printed.splitlines()[-TAIL_LINES:])


if __name__ == "__main__":
    raise SystemExit(main())
