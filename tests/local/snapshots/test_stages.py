"""A pipeline stage loses all its ranks, and repeats steps alone while the others keep their
processes and their state. Whatever happens, every step has the bits of an undisturbed run."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pipeline_trainer
import pytest
import wrapped_stages
from local_jobs import PATIENT, make_job, short_folder
from step_logs import ends_of_logs

from holdfast_cli.local import LocalCluster, LocalSettings, Status
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.states import RestoreSource
from holdfast_operator.reconciler.observe.counters import Outcome

WAIT_S = 300.0
STEPS, EVERY, WINDOW = 70, 20, 8


@dataclass(frozen=True)
class Shape:
    """Stages of a pipeline, and ranks of each."""

    pp: int
    dp: int
    schedule: str = ""
    """Of torch; empty for that of the script."""
    shares_experts: bool = False
    """Whether each rank of a stage has experts that no other rank has."""
    seeded: bool = False
    """Whether the random numbers of a step do not depend on the steps before."""
    log_received: bool = False
    """Whether ranks log what they receive, too."""
    wrapped: str = ""
    """What wraps the module of a stage; empty for the example's, which nothing does."""

    @property
    def options(self) -> list[str]:
        """Arguments of the script."""
        if self.wrapped:
            return ["--stages", str(self.pp), "--wrap", self.wrapped]
        stages = ["--stages", str(self.pp), *["--expert-parallel"] * self.shares_experts]
        stages += ["--seed", "7"] * self.seeded + ["--log-received"] * self.log_received
        micro_batches = ["--microbatches", str(self.pp)]
        return [*stages, *micro_batches, "--schedule", self.schedule] if self.schedule else stages

    @property
    def script(self) -> str:
        return wrapped_stages.__file__ if self.wrapped else pipeline_trainer.__file__

    @property
    def ranks(self) -> range:
        return range(self.pp * self.dp)

    def ranks_of(self, stages: Sequence[int]) -> list[int]:
        return [rank for rank in self.ranks if rank // self.dp in stages]


TWO_BY_TWO, THREE = Shape(2, 2), Shape(3, 1)
EXPERTS = Shape(2, 2, shares_experts=True)
SEEDED = Shape(3, 2, seeded=True)


def job_of(directory: Path, shape: Shape, log_mib: float, how: str, window: int) -> MoETrainingJob:
    every = 1 if window else EVERY
    script = [sys.executable, shape.script, str(every), how, str(directory)]
    sparse = {"policy": {"type": "Sparse", "sparse": {"window": window}}} if window else {}
    return make_job(
        "stages",
        [*script, "--steps", str(STEPS), *shape.options, "--log-mib", str(log_mib)],
        nodes=len(shape.ranks),
        parallelism={
            "dp": 1 if shape.wrapped == "tp" else shape.dp,
            "tp": shape.dp if shape.wrapped == "tp" else 1,
            "pp": shape.pp,
            "ep": shape.dp if shape.shares_experts else 1,
        },
        snapshot={"memoryPerNode": "64Mi", **sparse},
        redundancy={"type": "RAIM5"},
        failurePolicy={
            "maxRestarts": 10,
            "reformSeconds": 20,
            "detection": PATIENT | {"missedHeartbeats": 20},
        },
    )


@dataclass(frozen=True)
class Line:
    """One execution of a step by a rank."""

    step: int
    loss: float
    epoch: int
    time: float
    pid: int
    logged: int
    state: str


def lines_of(directory: Path, rank: int) -> list[Line]:
    """What a rank has logged, in its processes one after the other."""
    try:
        text = (directory / f"log-{rank}").read_text()
    except FileNotFoundError:
        return []
    return [Line(**json.loads(line)) for line in text.split("\n")[:-1]]


@dataclass(frozen=True)
class Fault:
    """What happens while steps are repeated."""

    at: int
    """Rank that comes to its second repeated step."""
    rank: int
    """Rank that is hit."""
    daemon: bool = False
    """Whether its daemon ends, as it does when it is upgraded; otherwise its process is killed."""

    def __str__(self) -> str:
        return f"{'daemon-of-' * self.daemon}rank-{self.rank}-at-{self.at}"


@functools.cache
def undisturbed(shape: Shape) -> list[list[Line]]:
    """The steps of each rank in a run that nothing disturbs, without a daemon."""
    with tempfile.TemporaryDirectory() as path:
        count = str(len(shape.ranks))
        script = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", count]
        trainer = [shape.script, str(EVERY), "same", path, *shape.options]
        options = ["--steps", str(STEPS)]
        subprocess.run([*script, *trainer, *options], check=True, timeout=WAIT_S)
        return [lines_of(Path(path), rank) for rank in shape.ranks]


class Run:
    """A run in which stages lose all their ranks at one time, or one after the other."""

    def __init__(
        self, directory: Path, shape: Shape, log_mib: float, how: str, window: int
    ) -> None:
        self.directory, self.shape, self.window = directory, shape, window
        self.whole = 0
        """Step of the newest protected generation at the newest loss."""
        self.incarnation = 0
        """That of the daemon that a fault has hit, before it."""
        self.cluster = LocalCluster(
            job_of(directory, shape, log_mib, how, window),
            LocalSettings(directory=directory / "run"),
        )

    @property
    def line(self) -> int:
        """Step that a restore of that generation brings back."""
        return self.whole - self.window + 1 if self.window else self.whole

    def lines(self) -> list[list[Line]]:
        return [lines_of(self.directory, rank) for rank in self.shape.ranks]

    async def lose(
        self,
        *losses: Sequence[int],
        then: Sequence[Fault] = (),
        spared: Sequence[int] = (),
        beside: Sequence[int] = (),
    ) -> None:
        """Train to the end, and lose these stages on the way, each time after some steps that are
        in no snapshot, but for the ranks `spared`; with the first ones, or before them all, the
        ranks `beside`. `then` happens while they repeat steps."""
        async with self.cluster as cluster:
            step = 0
            for stages in losses:
                found = await self._stop_in_time(step)
                step = max(lines[-1].step for lines in found)
                for fault in then:
                    self._prepare(fault, found)
                lost = {*self.shape.ranks_of(stages), *beside} - set(spared)
                beside = ()
                for rank, lines in enumerate(found):
                    os.kill(lines[-1].pid, signal.SIGKILL if rank in lost else signal.SIGCONT)
            assert await cluster.finished(timeout_s=WAIT_S) is Outcome.COMPLETE

    async def _stop_in_time(self, after: int) -> list[list[Line]]:
        """Stop all ranks when some steps, and step `after` as well, have followed a protected
        generation; return what they have run. While they go on, the time is over in a moment."""
        is_time = functools.partial(self._is_time, after)
        while True:
            await self.cluster.wait_for(is_time, timeout_s=WAIT_S, what="steps after a snapshot")
            pids = [lines[-1].pid for lines in self.lines()]
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            if self._is_time(after, self.cluster.status):
                return self.lines()
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def _prepare(self, fault: Fault, found: Sequence[Sequence[Line]]) -> None:
        """Have `fault` happen, once."""
        node = self.cluster.status.local.node(self.cluster.status.local.members[fault.rank].node)
        assert node is not None
        pid = found[fault.rank][-1].pid
        signal_and_pid = f"SIGTERM {node.daemon_pid}" if fault.daemon else f"SIGKILL {pid}"
        if not fault.daemon and fault.at == fault.rank:
            signal_and_pid = "SIGKILL"  # of the process that comes there
        (self.directory / f"fault-{fault.at}").write_text(f"repeat-2 {signal_and_pid}")
        self.incarnation = node.incarnation

    def _is_time(self, after: int, status: Status) -> bool:
        """Whether some steps have followed a protected generation, and step `after` as well."""
        _, _, step = status.protected.partition(".")
        found = self.lines()
        if not step or not all(found):
            return False
        self.whole = int(step)
        last = min(lines[-1].step for lines in found)
        if self.window:
            return self.line > 0 and self.whole < last < self.whole + self.window - 3
        return max(self.whole, after) + 3 <= last < min(self.whole + EVERY, STEPS) - 5

    def check_end(self, live: Sequence[int] = ()) -> list[list[Line]]:
        """Check that each rank's final execution of each step is that of the undisturbed run, but
        for a step that one of the ranks `live` may have lost with its process; return all
        executions."""
        found = self.lines()
        for rank, (lines, whole) in enumerate(zip(found, undisturbed(self.shape), strict=True)):
            final = {line.step: (line.loss, line.state) for line in self.with_whole_states(lines)}
            expected = {line.step: (line.loss, line.state) for line in whole}
            missing = expected.keys() - final.keys() if rank in live else set()
            assert len(missing) <= 1
            assert final == {step: one for step, one in expected.items() if step not in missing}
        return found

    def with_whole_states(self, lines: Sequence[Line]) -> list[Line]:
        """Executions without those in which units of a window were frozen."""
        first, frozen = lines[0].epoch, range(self.line + 1, self.whole + 1)
        return [line for line in lines if line.epoch == first or line.step not in frozen]

    def report(self) -> str:
        return ends_of_logs(self.directory)


@contextmanager
def running(
    shape: Shape, *, log_mib: float = 64, how: str = "same", window: int = 0
) -> Iterator[Run]:
    with short_folder() as path:
        run = Run(path, shape, log_mib, how, window)
        try:
            yield run
        finally:
            print(run.report())


def check_replay(
    run: Run, lost: Sequence[int], spared: Sequence[int] = (), live: Sequence[int] = ()
) -> None:
    """Check that the ranks of the lost stages, and no others, have repeated the steps after the
    line, with the bits of their first execution: those that were `spared` in their processes. The
    ranks `live` have had two processes and have repeated none."""
    for rank, lines in enumerate(run.check_end(live)):
        pids = list(dict.fromkeys(line.pid for line in lines))
        steps = [line.step for line in lines]
        if rank in live:
            assert len(pids) == 2
            assert steps == sorted(set(steps))
            continue
        if rank not in run.shape.ranks_of(lost):
            assert len(pids) == 1
            assert steps == list(range(1, STEPS + 1))  # none repeated
            continue
        assert len(pids) == 1 + (rank not in spared)
        [back] = [at for at in range(1, len(steps)) if steps[at] <= steps[at - 1]]
        assert steps[back:] == list(range(run.line + 1, STEPS + 1))
        states = {line.step: line.state for line in undisturbed(run.shape)[rank]}
        whole = run.with_whole_states(lines)  # the first ones as well
        assert all(line.state == states[line.step] for line in whole)
    recovery, scope = run.cluster.status.local.recoveries[-1], run.shape.ranks_of(lost)
    assert recovery.source is RestoreSource.LOCAL
    kept = next(rank for rank in run.shape.ranks if rank not in scope)
    last = max(line.epoch for line in run.lines()[kept])
    target = max(line.step for line in run.lines()[kept] if line.epoch < last)
    ranks = f"ranks {', '.join(map(str, scope))}" if len(scope) > 1 else f"rank {scope[0]}"
    assert recovery.replay.startswith(f"{ranks} repeated steps {run.line + 1} to {target}")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("stage", "window"),
    [
        pytest.param(0, 0, id="first", marks=pytest.mark.exhaustive),
        pytest.param(1, 0, id="last", marks=pytest.mark.exhaustive),
        pytest.param(0, WINDOW, id="first-within-a-window", marks=pytest.mark.exhaustive),
        pytest.param(1, WINDOW, id="last-within-a-window"),
    ],
)
def test_a_lost_stage_repeats_steps_while_the_others_keep_their_state(
    stage: int, window: int
) -> None:
    with running(TWO_BY_TWO, window=window) as run:
        asyncio.run(run.lose([stage]))
        check_replay(run, [stage])
        waited = r"stage (\d) waited [\d.]+ s for other stages; snapshots copied ([\d.]+) MiB"
        copied = sorted(re.findall(waited, run.report()))
        assert [number for number, _ in copied] == ["0", "1"]
        assert any(float(mib) > 0 for _, mib in copied)  # times decide which one copies in waits


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", wrapped_stages.WAYS)
def test_a_lost_stage_that_torch_wraps_repeats_steps_alone(way: str) -> None:
    with running(Shape(2, 2, wrapped=way)) as run:
        asyncio.run(run.lose([1]))
        check_replay(run, [1])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("rank", "window"),
    [
        pytest.param(0, 0, marks=pytest.mark.exhaustive),
        (3, 0),
        pytest.param(1, WINDOW, marks=pytest.mark.exhaustive),
        pytest.param(2, WINDOW, marks=pytest.mark.exhaustive),
    ],
)
def test_a_lost_rank_with_experts_of_its_own_takes_back_only_its_stage(
    rank: int, window: int
) -> None:
    stage, beside = rank // 2, rank ^ 1
    with running(EXPERTS, window=window) as run:
        asyncio.run(run.lose([stage], spared=[beside]))
        check_replay(run, [stage], spared=[beside])


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("window", [0, WINDOW])
def test_a_rank_that_is_lost_beside_a_stage_gets_its_state_from_its_replica(window: int) -> None:
    """It is not of a neighbour, so no log of it is needed."""
    with running(SEEDED, window=window) as run:
        asyncio.run(run.lose([0], beside=[4]))
        check_replay(run, [0], live=[4])


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_a_rank_that_a_replica_has_replaced_gives_a_later_lost_stage_its_log() -> None:
    """Its neighbours have returned it. Without that, rank 3 and it would repeat steps as well."""
    with running(replace(SEEDED, log_received=True)) as run:
        asyncio.run(run.lose([], [0], beside=[2]))
        check_replay(run, [0], live=[2])


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("shape", "lost", "window"),
    [
        (Shape(2, 2, "GPipe"), 0, 0),
        (Shape(2, 2, "GPipe"), 1, WINDOW),
        (Shape(2, 2, "1F1B"), 0, WINDOW),
        (Shape(2, 2, "1F1B"), 1, 0),
        (Shape(3, 1, "1F1B"), 1, WINDOW),
        (Shape(3, 1, "Interleaved1F1B"), 0, WINDOW),  # it sends to the last rank, and from there
        (Shape(2, 2, "InterleavedZeroBubble"), 1, WINDOW),
        (Shape(2, 2, "ZBVZeroBubble"), 0, WINDOW),
    ],
    ids=str,
)
def test_a_lost_stage_repeats_the_schedules_of_torch(shape: Shape, lost: int, window: int) -> None:
    with running(shape, window=window) as run:
        asyncio.run(run.lose([lost]))
        check_replay(run, [lost])


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("window", [0, WINDOW])
@pytest.mark.parametrize("stages", [(1,), (0, 1), (0, 2)], ids=str)
def test_lost_stages_repeat_steps_together_or_side_by_side(
    stages: tuple[int, ...], window: int
) -> None:
    with running(THREE, window=window) as run:
        asyncio.run(run.lose(stages))
        check_replay(run, stages)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_a_stage_that_has_repeated_steps_helps_the_next_one() -> None:
    with running(TWO_BY_TWO) as run:
        asyncio.run(run.lose([0], [1]))
        for lines in run.check_end():
            by_process: dict[int, list[int]] = {}
            for line in lines:
                by_process.setdefault(line.pid, []).append(line.step)
            assert len(by_process) == 2
            for steps in by_process.values():
                assert steps == list(range(steps[0], steps[-1] + 1))  # none repeated in a process
        assert run.cluster.status.local.recoveries[-1].source is RestoreSource.LOCAL


def check_all_went_back(run: Run, lost: Sequence[int]) -> None:
    """Check that all ranks have repeated steps, those of other stages in their processes."""
    for rank, lines in enumerate(run.check_end()):
        assert len({line.pid for line in lines}) == 1 + (rank in run.shape.ranks_of(lost))
        assert [line.step for line in lines].count(run.line + 1) > 1
    assert run.cluster.status.local.recoveries[-1].source is RestoreSource.LOCAL


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("window", [0, WINDOW])
def test_all_stages_go_back_where_a_log_is_missing(window: int) -> None:
    with running(TWO_BY_TWO, log_mib=0.01, window=window) as run:
        asyncio.run(run.lose([0]))
        check_all_went_back(run, [0])
        assert "rank 2 has logged steps" in run.cluster.status.local.recoveries[-1].replay


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("window", [0, pytest.param(WINDOW, marks=pytest.mark.exhaustive)])
def test_all_stages_go_back_where_a_replay_differs(window: int) -> None:
    with running(TWO_BY_TWO, how="diverge", window=window) as run:
        asyncio.run(run.lose([0]))
        check_all_went_back(run, [0])
        assert (
            "is not the message that rank 2 had received"
            in run.cluster.status.local.recoveries[-1].replay
        )


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("window", [0, WINDOW])
@pytest.mark.parametrize(
    ("shape", "spared", "faults", "stay"),
    [
        (TWO_BY_TWO, (), [Fault(0, 0)], (2, 3)),
        (EXPERTS, (1,), [Fault(0, 1)], (2, 3)),  # the one that went back with the lost rank
        (THREE, (), [Fault(0, 2)], (1,)),  # another stage, beside which nobody is lost
        (TWO_BY_TWO, (), [Fault(0, 2)], ()),  # the neighbour, and with it the only other log
        (TWO_BY_TWO, (), [Fault(0, 0), Fault(1, 3)], ()),
    ],
    ids=["of-the-stage", "spared-in-the-stage", "of-another", "of-its-neighbour", "of-both"],
)
def test_a_rank_that_dies_while_a_stage_repeats_steps_takes_back_only_its_stage_as_well(
    shape: Shape, spared: tuple[int, ...], faults: list[Fault], stay: tuple[int, ...], window: int
) -> None:
    with running(shape, window=window) as run:
        asyncio.run(run.lose([0], then=faults, spared=spared))
        assert not list(run.directory.glob("fault-*"))
        killed = [fault.rank for fault in faults]
        lost = set(run.shape.ranks_of([0])) - set(spared)
        for rank, lines in enumerate(run.check_end()):
            assert len({line.pid for line in lines}) == 1 + (rank in lost) + (rank in killed)
            repeats = [line.step for line in lines].count(run.line + 1) > 1
            assert repeats == (rank not in stay)
            states = {line.step: line.state for line in undisturbed(run.shape)[rank]}
            whole = run.with_whole_states(lines)  # what was repeated in between as well
            assert all(line.state == states[line.step] for line in whole)
        assert run.cluster.status.local.recoveries[-1].source is RestoreSource.LOCAL


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("fault", "window"), [(Fault(0, 0, True), WINDOW), (Fault(0, 3, True), 0)], ids=str
)
def test_a_daemon_is_renewed_while_a_stage_repeats_steps(fault: Fault, window: int) -> None:
    """It ends as Kubernetes ends it when the operator renews daemons, and another one starts on its
    memory: that of a rank which repeats steps, and that of one which waits."""
    with running(TWO_BY_TWO, window=window) as run:
        asyncio.run(run.lose([0], then=[fault]))
        assert not list(run.directory.glob("fault-*"))
        check_replay(run, [0])
        renewed = run.cluster.status.local.node(run.cluster.status.local.members[fault.rank].node)
        assert renewed is not None and renewed.incarnation > run.incarnation
