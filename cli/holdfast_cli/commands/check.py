"""`holdfast check`: a dry run that tells whether a training script comes back after a failure.

The script runs unchanged under a local run of Holdfast (`holdfast_cli.local`), once until a save is
protected and one more step is made. Then its processes are killed, the next ones restore and make
the same step, and `holdfast_core.restart_check` compares what both have recorded. This module runs
the two phases; it decides nothing about states.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from holdfast_cli import exit_codes
from holdfast_cli.commands.check_view import CheckReport, json_report, text_report
from holdfast_cli.local import LocalCluster, LocalSettings
from holdfast_cli.local.directory import RunDirectory
from holdfast_cli.local.guard import guarded
from holdfast_cli.local.processes import kill_marked
from holdfast_core.errors import HoldfastError, InvalidJobError, UnreachableError
from holdfast_core.job.parsing import MoETrainingJob, parse_job
from holdfast_core.restart_check import (
    ORDER_FILE,
    Comparison,
    Order,
    Phase,
    Record,
    Stage,
    compare,
    decode_record,
    record_file,
)

LOOK_S = 0.1
"""Seconds between looks at the records."""
RESTARTS_MAX = 5
"""Enough for the processes of one kill, which may be noticed one by one."""


def check(options: argparse.Namespace) -> int:
    """Carry out `holdfast check`; returns the exit code.

    Raises:
        HoldfastError: the script could not be checked; the message states what to do.
    """
    words = ["-m", *options.module] if options.module else list(options.script)
    if not words:
        raise InvalidJobError("give the script to check: holdfast check train.py [ARGUMENT ...]")
    if not options.module and not Path(words[0]).is_file():
        raise InvalidJobError(
            f"{words[0]} is no file: give the script first and then its arguments, or -m and a "
            f"module, after the options of holdfast check"
        )
    directory = Path(tempfile.mkdtemp(prefix="holdfast-check-"))
    plan = _Plan(
        script=words[1] if options.module else words[0],
        job=check_job(words, options.processes, options.timeout, directory),
        save=options.save,
        until_s=time.monotonic() + options.timeout,
        timeout_s=options.timeout,
        directory=directory,
    )
    keep = True
    try:
        with guarded(RunDirectory(plan.run, plan.job.key), directory):
            report = asyncio.run(_check(plan))
        keep = False
    except HoldfastError as error:
        raise type(error)(f"{error}\noutput of the script: {plan.run / 'logs'}") from error
    except KeyboardInterrupt:
        keep = False
        raise
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)
    print(json_report(report) if options.json else text_report(report))
    return 0 if report.comparison.comes_back else exit_codes.FAILED


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """One check."""

    script: str
    """Name of the script, for messages."""
    job: MoETrainingJob
    save: int
    """Number of the save after which the first processes are killed."""
    until_s: float
    """When to give up, in monotonic seconds."""
    timeout_s: float
    directory: Path
    """Where orders and records are."""
    _decoded: dict[Path, tuple[bytes, Record]] = field(default_factory=dict, init=False)
    """Path of a record → its bytes and the record, when it was decoded last."""

    @property
    def processes(self) -> int:
        return self.job.world_size

    @property
    def run(self) -> Path:
        """Directory of the local run."""
        return self.directory / "run"

    def order(self, order: Order) -> None:
        """Give an order to processes that start from now on."""
        (self.directory / ORDER_FILE).write_bytes(msgspec.json.encode(order))

    def records(self, phase: Phase) -> list[Record | None]:
        """The records of all ranks; None for a rank that has none yet."""
        paths = [self.directory / record_file(phase, rank) for rank in range(self.processes)]
        return [self._record(path) for path in paths]

    def _record(self, path: Path) -> Record | None:
        """Read a record, and decode it if it has changed: that takes far longer."""
        if not path.exists():
            return None
        data = path.read_bytes()
        known = self._decoded.get(path)
        if known is None or known[0] != data:
            known = self._decoded[path] = data, decode_record(data)
        return known[1]


def check_job(
    words: Sequence[str], processes: int, timeout_s: float, directory: Path
) -> MoETrainingJob:
    """The job that runs the script on one virtual node, whose processes are numbered as by
    torchrun."""
    command = [sys.executable, *words]
    document = {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "MoETrainingJob",
        "metadata": {"name": "check"},
        "spec": {
            "nodes": 1,
            "nprocPerNode": processes,
            "parallelism": {"dp": processes},
            "redundancy": {"type": "None"},
            "failurePolicy": {
                "maxRestarts": RESTARTS_MAX,
                "rules": [],  # a script that raises fails the job at once
                "detection": {"hangSeconds": 2 * timeout_s, "exitSeconds": 2 * timeout_s},
            },
            "trainer": {
                "template": {
                    "spec": {
                        "containers": [
                            {
                                "name": "trainer",
                                "image": "none",
                                # As they are: a job would resolve references to variables.
                                "command": [word.replace("$", "$$") for word in command],
                                "env": [{"name": "HOLDFAST_CHECK", "value": str(directory)}],
                            }
                        ]
                    }
                }
            },
        },
    }
    return parse_job(document)


async def _check(plan: _Plan) -> CheckReport:
    """Run both phases and compare their records."""
    progress = _Progress()
    plan.order(Order(phase=Phase.FIRST, save=plan.save))
    settings = LocalSettings(directory=plan.run, standbys=0)
    progress(f"starting {_processes(plan.processes)} of {plan.script}")
    async with LocalCluster(plan.job, settings) as cluster:
        first = await _first_phase(plan, cluster, progress)
        step = first[0].step
        assert step is not None
        (member,) = cluster.status.local.members
        report = CheckReport(
            script=plan.script,
            step=step,
            first=tuple(first),
            comparison=compare(first, first),
            slot_bytes=member.arena_bytes // member.slots // plan.processes,
            traceback="",
        )
        progress(f"one more step is made and recorded; killing {_processes(plan.processes)}")
        plan.order(Order(phase=Phase.SECOND, step=step))
        for rank in range(plan.processes):
            await cluster.kill_rank(rank)
        second = await _second_phase(plan, cluster, progress)
        progress("comparing, and stopping what was started")
        # They would be asked to end first, and wait for nothing but that.
        await asyncio.to_thread(kill_marked, cluster.directory.mark())
    if isinstance(second, Comparison):
        failed = next(
            (each for each in plan.records(Phase.SECOND) if each and each.traceback), None
        )
        traceback = failed.traceback if failed else ""
        return replace(report, comparison=second, traceback=traceback)
    return replace(report, comparison=compare(first, second))


async def _first_phase(
    plan: _Plan, cluster: LocalCluster, progress: Callable[[str], None]
) -> list[Record]:
    """Wait until all ranks have made one step after the save; returns their records.

    Raises:
        HoldfastError: they cannot; the message states why, and what to do.
    """
    while True:
        records = plan.records(Phase.FIRST)
        present = [record for record in records if record is not None]
        _raise_failure(plan, present)
        ready = [record for record in present if record.stage in (Stage.READY, Stage.STEPPED)]
        if ready and len(ready) == plan.processes:
            progress(f"save of step {ready[0].step} is protected")
        done = [record for record in ready if record.stage is Stage.STEPPED]
        if len(done) == plan.processes:
            return done
        why = next((record.why for record in present if record.why), "")
        steps = max((record.steps for record in present), default=0)
        if steps > 1 and not ready:
            progress(f"{steps} steps of the optimizer, and no save yet")
        status = _status(cluster)
        if status is not None and (status.ended or status.recoveries):
            raise InvalidJobError(_why_ended(plan, ready, status.local.reason, why))
        if time.monotonic() > plan.until_s:
            raise UnreachableError(_why_late(plan, present, ready, why, steps))
        await asyncio.sleep(LOOK_S)


async def _second_phase(
    plan: _Plan, cluster: LocalCluster, progress: Callable[[str], None]
) -> list[Record] | Comparison:
    """Wait until all ranks have restored and made one more step; returns their records, or why they
    did not come so far.

    Raises:
        UnreachableError: they took too long.
    """
    while True:
        present = [record for record in plan.records(Phase.SECOND) if record is not None]
        for record in present:
            if record.stage is Stage.FAILED:
                return _not_back(f"after the restart {_lower(record.why)}")
        ready = [record for record in present if record.step is not None]
        if ready and len(ready) == plan.processes:
            progress(f"step {ready[0].step} is restored")
        done = [record for record in present if record.stage is Stage.STEPPED]
        if len(done) == plan.processes:
            return done
        status = _status(cluster)
        if status is not None and status.ended:
            return _not_back(
                f"after the restart the script ended before it had made a step: "
                f"{status.local.reason}"
            )
        if time.monotonic() > plan.until_s:
            raise UnreachableError(
                f"the second process did not restore and make one step within --timeout "
                f"{plan.timeout_s:g} s of the whole check; give it more time, or a smaller model"
            )
        await asyncio.sleep(LOOK_S)


def _not_back(why: str) -> Comparison:
    return Comparison(changes=(why,))


def _status(cluster: LocalCluster) -> Any:
    try:
        return cluster.status
    except HoldfastError:
        return None


def _raise_failure(plan: _Plan, records: Sequence[Record]) -> None:
    """Raise InvalidJobError if a process of the first phase has failed."""
    for record in records:
        if record.stage is Stage.FAILED:
            if record.traceback:
                print(record.traceback, file=sys.stderr, end="")
                raise InvalidJobError(
                    f"{record.why}; {plan.script} has to train on this machine before it can be "
                    f"checked: see the traceback above"
                )
            raise InvalidJobError(record.why)


def _why_ended(plan: _Plan, ready: Sequence[Record], reason: str, why: str) -> str:
    if ready:
        return (
            f"{plan.script} ended after the save of step {ready[0].step}, before it had made one "
            f"more step: let it train longer, or choose an earlier save with --save ({reason})"
        )
    return (
        f"{plan.script} ended before its save number {plan.save} was protected: "
        f"{why or 'let it train longer, or choose an earlier save with --save'} ({reason})"
    )


def _why_late(
    plan: _Plan, present: Sequence[Record], ready: Sequence[Record], why: str, steps: int
) -> str:
    took = f"within --timeout {plan.timeout_s:g} s"
    if ready:
        return (
            f"{plan.script} made no further step {took} after the save of step {ready[0].step}; "
            f"give it more time"
        )
    if not present:
        return f"{plan.script} did not start {took}; give it more time, and see its output"
    if not steps:
        return (
            f"no optimizer of torch made a step {took}, and nothing was saved; give it more time, "
            f"or a smaller model, and see its output"
        )
    return (
        f"{plan.script} made {steps} steps and no save {took}: {why}; or give it more time if it "
        f"saves later"
    )


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


class _Progress:
    """Prints each new line of progress to stderr, with the seconds since the start."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._printed: set[str] = set()

    def __call__(self, text: str) -> None:
        if text not in self._printed:
            self._printed.add(text)
            passed_s = time.monotonic() - self._began_s
            print(f"{passed_s:6.1f} s  {text}", file=sys.stderr, flush=True)
