"""`holdfast demo`: a real training job survives five faults.

It loses two trainers, a daemon, a node, and then another node while there is no spare. It continues
with three nodes, grows again when the node is back, and finishes with the bytes of a run without
faults.

The job and its trainer are those of `examples/moe-job.yaml`, on virtual nodes of this machine. Each
node has two ranks, which share the experts: so each node has all experts, and the job can train on
three nodes. The faults are real signals to real processes. The demo uses nothing that a user's
script could not use: it reads the status of the run and of its daemons, and the trainer's log.

A world with fewer ranks trains on other batches and adds in another order, so its final bytes
differ from those of a run that always had all ranks. The demo therefore compares with
`examples/replay_moe.py`, which trains the same numbers of steps with the same numbers of ranks in
plain torch.distributed, and neither saves nor restores. A job whose policy leaves experts out
cannot shrink: then the last fault is left out, and the final loss is compared with that of the same
job without faults.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import msgspec
import yaml
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from holdfast_cli._environment import own_environment
from holdfast_cli.commands.show import event_text
from holdfast_cli.demo.report import (
    DemoReport,
    FaultReport,
    Injected,
    LoggedStep,
    WorldReport,
    account,
    fault_table,
    history,
    loss_difference,
    partial_verdict,
    read_log,
    versions,
    worlds_of,
    write,
)
from holdfast_cli.local import LocalCluster, LocalSettings, TimedEvent
from holdfast_cli.local import faults as injections
from holdfast_cli.local.directory import RunDirectory
from holdfast_core.errors import HoldfastError, InvalidJobError, UnreachableError
from holdfast_core.job.parsing import MoETrainingJob, parse_job
from holdfast_core.job.snapshots import Repeats
from holdfast_core.job.status import Phase
from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_protos import trainer_pb2, trainer_pb2_grpc
from holdfast_protos.connections import channels
from holdfast_protos.connections.identity import is_insecure

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
STEPS, QUICK_STEPS = 150, 60
RANKS_PER_NODE, NODES_MIN = 2, 3
EXPERTS = 8
JOIN_WAIT_S = 1.0
POLL_S = 0.05
CATCH_S = 60.0
"""Seconds to try to stop a rank at the point that the script asks for."""
RECOVERY_S = 120.0
"""Limit for a recovery: a fault that training has not survived by then counts as not survived."""
RUN_S = 600.0
SUCCESS, FAILURE = 0, 1
Play = Callable[[argparse.Namespace, Path, Console], Coroutine[Any, Any, bool]]
"""A demo: plays in a directory, and returns whether all was as promised."""
FULL = "Full"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault of the script."""

    kind: str
    at: float
    """Fraction of all steps that are done when the fault happens."""
    inject: Callable[[DemoRun], Awaitable[tuple[float, str]]]
    """Injects the fault; returns its time (seconds since the Unix epoch) and a description of its
    target."""
    returns: bool = False
    """Whether lost nodes come back once training has continued without them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """Result of a run that has ended."""

    sha256: str
    """Hash of the final state; empty when the run did not reach it."""
    log: list[LoggedStep]
    injected: list[Injected]
    faults: list[FaultReport]


class DemoRun:
    """One run of the job: its cluster, its log, and its line on the screen."""

    def __init__(
        self, name: str, job: MoETrainingJob, folder: Path, screen: Progress, steps: int
    ) -> None:
        self.folder = folder
        self.log_file, self.hash_file = folder / "log.jsonl", folder / "sha256"
        self._screen, self._steps = screen, steps
        self._line = screen.add_task(name, total=steps, note="starting processes")
        self.lost: list[str] = []
        """Nodes that were killed and are not back."""
        settings = LocalSettings(directory=folder, insecure=is_insecure(own_environment()))
        self.cluster = LocalCluster(job, settings, on_event=self._show)

    def _show(self, event: TimedEvent) -> None:
        self._screen.console.print(event_text(event), soft_wrap=True)

    def log(self) -> list[LoggedStep]:
        """Read the steps so far, and bring the screen up to date."""
        return shown_log(self.log_file, self._screen, self._line)

    async def until(
        self, condition: Callable[[list[LoggedStep]], bool], timeout_s: float
    ) -> list[LoggedStep]:
        """Wait until `condition` holds for the log or the job has ended; returns the log.

        Raises:
            TimeoutError: when neither happened in time.
        """
        async with asyncio.timeout(timeout_s):
            while not condition(log := self.log()):
                with suppress(HoldfastError):
                    if self.cluster.status.ended:
                        return self.log()
                await asyncio.sleep(POLL_S)
        return log

    async def carry_out(self, script: tuple[Fault, ...]) -> RunResult:
        """Run the job to its end, with the faults of `script`."""
        injected: list[Injected] = []
        faults: list[FaultReport] = []
        async with self.cluster as cluster:
            for fault in script:
                done = await self._inject(fault)
                injected.append(done)
                faults.append(await self._survive(done))
                while fault.returns and self.lost:
                    await cluster.start_node(self.lost.pop())
            log = await self.until(lambda _: False, RUN_S)
            outcome = await cluster.finished(timeout_s=RUN_S)
            if outcome is Outcome.FAILED:
                self._screen.console.print(f"the job failed: {cluster.status.local.reason}")
        reached = outcome is Outcome.COMPLETE and self.hash_file.exists()
        sha256 = self.hash_file.read_text().strip() if reached else ""
        return RunResult(sha256=sha256, log=log, injected=injected, faults=faults)

    async def _inject(self, fault: Fault) -> Injected:
        step = max(1, int(fault.at * self._steps))
        await self.until(lambda log: bool(log) and log[-1].step >= step, RUN_S)
        await self.cluster.wait_for(
            lambda now: now.ended or (now.phase is Phase.RUNNING and bool(now.protected)),
            timeout_s=RECOVERY_S,
            what="a protected generation",
        )
        at, what = await fault.inject(self)
        last = [line for line in self.log() if line.time <= at][-1]
        return Injected(kind=fault.kind, what=what, step=last.step, epoch=last.epoch, time=at)

    async def _survive(self, done: Injected) -> FaultReport:
        """Wait until training continues and snapshots are protected again."""

        def so_far() -> FaultReport:
            status = self.cluster.status
            return account(done, self.log(), status.local.recoveries, self.cluster.events)

        def over(_: list[LoggedStep]) -> bool:
            figures, status = so_far(), self.cluster.status
            protected = status.protected.rpartition(".")[2]
            back = bool(protected) and int(protected) > done.step
            must_restart = done.kind != "kill-daemon"
            return figures.survived and back and (figures.restarted or not must_restart)

        with suppress(TimeoutError):
            await self.until(over, RECOVERY_S)
        return so_far()


def main(options: argparse.Namespace, play: Play | None = None) -> int:
    """Run the demo, or `play` instead; returns the exit code.

    `options` has `report`, `steps`, `quick`, `policy`, `repeats`, `restart` and `keep`.

    Raises:
        InvalidJobError: when the examples are missing.
    """
    console = Console()
    work = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    try:
        success = asyncio.run((play or _demo)(options, work, console))
    except (HoldfastError, TimeoutError):
        console.print(f"logs: {work}")
        raise
    if success and not options.keep:
        shutil.rmtree(work)
    else:
        console.print(f"logs and run directories: {work}", soft_wrap=True)
    return SUCCESS if success else FAILURE


def steps_of(options: argparse.Namespace) -> int:
    """Number of steps that the options ask for."""
    return int(options.steps or (QUICK_STEPS if options.quick else STEPS))


async def _demo(options: argparse.Namespace, work: Path, console: Console) -> bool:
    began = time.monotonic()
    steps = steps_of(options)
    full = options.policy == FULL
    script = (*SCRIPT, WITHOUT_SPARE) if full else SCRIPT
    with progress(console) as screen:
        console.print(
            f"A run with {len(script)} faults, then the same without; {steps} steps each. "
            + ("All processes start again." if options.restart else "Processes not lost stay.")
        )

        def demo_run(name: str) -> DemoRun:
            folder = work / name.replace(" ", "-")
            repeats, stay = Repeats(options.repeats), not options.restart
            job = demo_job(folder, steps, options.policy, repeats, stay=stay)
            return DemoRun(name, job, folder, screen, steps)

        # The run with faults, then the run that its result must equal.
        run = demo_run("run with faults")
        disturbed = await run.carry_out(script)
        worlds = worlds_of(disturbed.log)
        if full and not disturbed.sha256:
            undisturbed = RunResult(sha256="", log=[], injected=[], faults=[])
        elif full:
            undisturbed = await replay(worlds, work / "replay", screen, steps)
        else:
            undisturbed = await demo_run("undisturbed run").carry_out(())
    # Compare and report.
    spec = run.cluster.job.spec
    report = DemoReport(
        final_state_sha256=disturbed.sha256,
        fault_free_sha256=undisturbed.sha256,
        equal=bool(disturbed.sha256) and disturbed.sha256 == undisturbed.sha256,
        steps=steps,
        nodes=spec.nodes,
        spares=spec.failure_policy.spares,
        duration_seconds=round(time.monotonic() - began, 1),
        faults=tuple(disturbed.faults),
        versions=versions(),
        policy=options.policy,
        loss_difference=loss_difference(undisturbed.log, disturbed.log),
        lost_tokens=disturbed.log[-1].lost if disturbed.log else 0.0,
        worlds=worlds,
    )
    show(console, report)
    if options.report is not None:
        picture = write(
            report,
            options.report,
            undisturbed=undisturbed.log,
            disturbed=disturbed.log,
            injected=disturbed.injected,
        )
        console.print(f"report: {options.report}   plot: {picture}", soft_wrap=True)
    return report.success


def progress(console: Console) -> Progress:
    """A line on the screen for each run."""
    return Progress(
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]:<18}"),
        TimeElapsedColumn(),
        console=console,
    )


def show(console: Console, report: DemoReport) -> None:
    """Print the table of faults, the hashes, and what they mean."""
    console.print(fault_table(report.faults))
    names = ("without faults", report.fault_free_sha256), ("with faults", report.final_state_sha256)
    for name, sha256 in names:
        console.print(f"{name}: {sha256 or 'no final state'}", highlight=False, soft_wrap=True)
    if not report.exact:
        console.print(partial_verdict(report))
        return
    if report.equal:
        console.print("[bold green]The same bytes.[/] Nothing was lost but time.")
    else:
        console.print("[bold red]The bytes differ.[/] This is a defect; please report it.")
    console.print(history(report), highlight=False)


def shown_log(log_file: Path, screen: Progress, line: TaskID) -> list[LoggedStep]:
    """Read the steps logged so far, and update their line on the screen."""
    log = read_log(log_file)
    if log:
        screen.update(line, completed=log[-1].step, note=f"loss {log[-1].loss:.3f}")
    return log


async def replay(
    worlds: tuple[WorldReport, ...], folder: Path, screen: Progress, steps: int
) -> RunResult:
    """Train in `worlds`, one after the other, without Holdfast and without faults. If this fails,
    the result has no hash."""
    folder.mkdir()
    log_file, hash_file = folder / "log.jsonl", folder / "sha256"
    command = [
        *(sys.executable, str(EXAMPLES / "replay_moe.py")),
        *("--worlds", *(f"{world.ranks}x{world.steps}" for world in worlds)),
        *_arguments(folder, steps, FULL),
    ]
    await run_trainer(command, folder, screen, steps)
    sha256 = hash_file.read_text().strip() if hash_file.exists() else ""
    return RunResult(sha256=sha256, log=read_log(log_file), injected=[], faults=[])


async def run_trainer(command: Sequence[str], folder: Path, screen: Progress, steps: int) -> None:
    """Run a trainer without Holdfast and without faults; its log is in `folder`."""
    log_file = folder / "log.jsonl"
    line = screen.add_task("without faults", total=steps, note="starting processes")
    with (folder / "output").open("wb") as output:
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
        ended = asyncio.ensure_future(process.wait())
        try:
            async with asyncio.timeout(RUN_S):
                while not ended.done():
                    shown_log(log_file, screen, line)
                    await asyncio.wait([ended], timeout=POLL_S)
        finally:
            if not ended.done():
                process.kill()
            await ended
    if process.returncode != 0:
        screen.console.print(f"the run without faults failed: {folder / 'output'}")
    shown_log(log_file, screen, line)


def example_job(name: str, script: Path) -> dict[str, Any]:
    """The job document of an example.

    Args:
        script: the example that it trains with.

    Raises:
        InvalidJobError: when one of them is missing.
    """
    document = EXAMPLES / name
    if not (document.exists() and script.exists()):
        raise InvalidJobError(
            f"{EXAMPLES} holds no example job; run the demo from a clone of the repository"
        )
    job: dict[str, Any] = yaml.safe_load(document.read_text(encoding="utf-8"))
    return job


def demo_job(
    folder: Path,
    steps: int,
    policy: str = FULL,
    repeats: Repeats = Repeats.TRAINING,
    *,
    stay: bool = False,
) -> MoETrainingJob:
    """The job of the examples, with its log and hash in `folder`. With full snapshots it can
    continue with three nodes.

    Args:
        repeats: the part of a sparse window that a recovery repeats.
        stay: whether processes stay when others are lost.

    Raises:
        InvalidJobError: when the examples are missing, or the policy has no windows of which the
            optimizer's steps could be repeated.
    """
    script = EXAMPLES / "train_moe.py"
    job = example_job("moe-job.yaml", script)
    spec = job["spec"]
    chosen: dict[str, Any] = {"type": policy}
    if repeats is Repeats.OPTIMIZER:
        chosen["sparse"] = {"repeats": repeats.value}
    spec.setdefault("snapshot", {})["policy"] = chosen
    if policy == FULL:
        spec |= {"minNodes": NODES_MIN, "nprocPerNode": RANKS_PER_NODE}
        spec["parallelism"] = {"dp": spec["nodes"] * RANKS_PER_NODE, "ep": RANKS_PER_NODE}
        spec["model"]["numExperts"] = EXPERTS
        spec["failurePolicy"]["joinWaitSeconds"] = JOIN_WAIT_S
    container = spec["trainer"]["template"]["spec"]["containers"][0]
    container["command"] = ["python", str(script)]
    container["args"] = [*_arguments(folder, steps, policy), *["--stay"][:stay]]
    return parse_job(job)


def _arguments(folder: Path, steps: int, policy: str) -> list[str]:
    """Arguments of the trainer."""
    model = ("--ep", str(RANKS_PER_NODE), "--batch", "1", "--experts", str(EXPERTS))
    return [
        *("--steps", str(steps)),
        *("--log-file", str(folder / "log.jsonl")),
        *("--hash-file", str(folder / "sha256")),
        *(model if policy == FULL else ()),
    ]


# --- the script -----------------------------------------------------------------------------------


async def _kill_in_step(run: DemoRun) -> tuple[float, str]:
    rank = 2
    await _catch(run, rank, writing=False)
    at = time.time()
    await run.cluster.kill_rank(rank)
    return at, f"rank {rank} in the middle of a step"


async def _kill_in_copy(run: DemoRun) -> tuple[float, str]:
    rank = 1
    generation = await _catch(run, rank, writing=True)
    at = time.time()
    await run.cluster.kill_rank(rank)
    return at, f"rank {rank} copying {generation}"


async def _kill_daemon(run: DemoRun) -> tuple[float, str]:
    node, at = run.cluster.status.local.members[1].node, time.time()
    await run.cluster.kill_daemon(node)
    return at, f"daemon of {node}"


async def _kill_node(run: DemoRun) -> tuple[float, str]:
    node, at = run.cluster.status.local.members[3].node, time.time()
    await run.cluster.kill_node(node)
    return at, f"node {node} and its memory"


async def _kill_node_without_spare(run: DemoRun) -> tuple[float, str]:
    status = run.cluster.status
    if any(node.role == "spare" and node.connected for node in status.local.nodes):
        raise UnreachableError("a spare is left, so the job would not shrink; run the demo again")
    node, at = status.local.members[1].node, time.time()
    await run.cluster.kill_node(node)
    run.lost.append(node)
    return at, f"node {node}, no spare left"


SCRIPT = (
    Fault(kind="kill-rank", at=0.12, inject=_kill_in_step),
    Fault(kind="kill-rank-mid-copy", at=0.24, inject=_kill_in_copy),
    Fault(kind="kill-daemon", at=0.36, inject=_kill_daemon),
    Fault(kind="kill-node", at=0.48, inject=_kill_node),
)
WITHOUT_SPARE = Fault(
    kind="kill-node-without-spare", at=0.6, inject=_kill_node_without_spare, returns=True
)
"""The fifth fault, for jobs that can continue with fewer nodes."""


async def _catch(run: DemoRun, rank: int, *, writing: bool) -> str:
    """Stop a rank's process while it is writing a slot, or while it is not; returns the generation.

    The process is stopped first and checked afterwards: what the daemon reports of a stopped
    process stays true until the process is killed.

    Raises:
        UnreachableError: when it could not be caught.
    """
    cluster, until = run.cluster, time.monotonic() + CATCH_S
    member = cluster.status.local.member_of(rank)
    node = None if member is None else cluster.status.local.node(member.node)
    if node is None:
        raise UnreachableError(f"rank {rank} is on no node now; run the demo again")
    directory, options = cluster.directory, channels.channel_options()
    async with grpc.aio.insecure_channel(f"unix:{node.socket}", options=options) as channel:
        daemon = trainer_pb2_grpc.TrainerStub(channel)
        while time.monotonic() < until and not cluster.status.ended:
            if bool(await _written(daemon, directory, rank)) is writing:
                injections.signal_rank(directory, cluster.status, rank, signal.SIGSTOP)
                generation = await _written(daemon, directory, rank)
                if bool(generation) is writing:
                    return generation
                injections.signal_rank(directory, cluster.status, rank, signal.SIGCONT)
            run.log()
    state = "in the middle of a copy" if writing else "between two copies"
    raise UnreachableError(
        f"rank {rank} was not caught {state} within {CATCH_S:g} s; run the demo again"
    )


async def _written(
    daemon: trainer_pb2_grpc.TrainerAsyncStub, directory: RunDirectory, rank: int
) -> str:
    """Generation that a rank is writing into its arena, as its daemon reports; empty for none."""
    request, metadata = trainer_pb2.StatusRequest(), directory.call_metadata()
    try:
        reply = await daemon.Status(request, timeout=5.0, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        raise UnreachableError(
            f"a daemon did not report its snapshots: {error.details()}"
        ) from error
    state = msgspec.json.decode(reply.json)["jobs"].get(directory.job_key, {"slots": ()})
    slots = [s for s in state["slots"] if s["rank"] == rank and s["state"] == "granted"]
    return str(slots[0]["generation"]) if slots else ""
