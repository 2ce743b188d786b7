"""Launcher of one node's workers under torchrun. The node's daemon tells it who belongs to the
training world.

It is the first process of a trainer container, and of a member in a local run. It only wires: the
rendezvous is in `_launch.rendezvous`, the agent in `_launch.agent`. It ends when the job has ended
or when the workers are done. The control loop handles failures of workers.

Exit codes: 0 if the workers of this node finished; 2 for a command line or HOLDFAST_PRELOAD with
which no worker can start; 128 + n if signal n ended the agent; 75 if the job ended while this node
waited for its next world; 69 if the daemon did not answer, or is too old; 77 if the daemon denied
the job to this process; 79 if a stranger changed in the world's store what the launchers had agreed
on; 82 if a check of this node failed. `holdfast_core.exit_codes` defines these and the codes of
workers.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
)

from holdfast._environment import (
    read_preload,
    read_secrets,
    read_stack_directory,
    read_token_file,
    set_for_workers,
)
from holdfast._launch.agent import RESTARTS_MAX, EpochEndedError, HoldfastAgent
from holdfast._launch.forking import start_fork_server
from holdfast._launch.kernel_log import KernelLog
from holdfast._launch.memory_kills import MemoryKills
from holdfast._launch.rendezvous import GrpcDaemon, HoldfastRendezvous
from holdfast._launch.script import do_nothing, run_script
from holdfast._launch.stderr import StderrLogs, WorkerStderr
from holdfast._launch.work import WorkWatch
from holdfast.node_checks import DaemonAddress, NodeChecks, RepeatedChecks
from holdfast_core.errors import AccessDeniedError, InvalidJobError, UnreachableError
from holdfast_core.exit_codes import DENIED, FAILED_CHECK, JOB_ENDED, NO_DAEMON, PROCESS_ENDS
from holdfast_core.job.failures import RECHECK_S, REFORM_S
from holdfast_host.results import CheckFailedError

log = logging.getLogger(__name__)

PAUSE_S = 1e-3
"""Torchrun's pause between two looks at workers, which cannot be 0: our agent pauses itself."""
GRACE_S = 5.0
INVALID = 2
"""Exit code for a setting with which no worker can be started, as for a wrong command line."""
PRELOAD = ["torch", "torch._dynamo", "holdfast._launch.agent", "holdfast._launch.script"]
"""Modules that every worker imports. The compiler is one of them, because the first optimizer
imports it."""

_EPILOG = """\
examples:
  python -m holdfast.launch --socket /run/holdfast/daemon.sock --job default/run1 \\
      --nodes 4 --nproc 8 -- python train.py --steps 1000

If the command starts with `python`, or with the interpreter that runs this launcher, workers are
forked from a process that has already imported torch, so restarts need no import. Any other command
starts as a new program each time, and so does every command with --fresh. HOLDFAST_PRELOAD names
further modules to import before the fork, separated by commas.

Workers get torchrun's environment variables, HOLDFAST_SOCKET and HOLDFAST_JOB.
TORCHELASTIC_RESTART_COUNT is the epoch in which they were started; workers that stay when their
world changes keep it. HOLDFAST_TOKEN_FILE names the file with the token that the daemon requires in
Kubernetes.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """Which workers to start on this node, and how."""

    socket: Path
    """The daemon's Unix socket."""
    job: str
    """Key of the job."""
    nproc: int
    """Number of workers on each node."""
    command: tuple[str, ...]
    """The trainer's command line."""
    host: str = ""
    """Address at which the job's other nodes reach this process; the daemon's when empty."""
    fresh: bool = False
    """Whether every worker starts as a new program, rather than as a fork that has imported
    torch."""
    log_dir: Path | None = None
    """Directory for the workers' output, with a folder for each restart; None passes the output
    through."""
    wait_file: Path | None = None
    """File that says why the workers cannot start yet; None to write none."""
    ready_file: Path | None = None
    """File to create once workers could start immediately, before this node asks for a world. Only
    standby agents have one, which start while others train."""
    grace_s: float = GRACE_S
    """Time between SIGTERM and SIGKILL for workers."""
    reform_s: float = REFORM_S
    """Time within which workers that stay must arrive in their new world."""
    check_node: bool = False
    """Take part only if checks of this node do not fail."""
    recheck_s: float = RECHECK_S
    """Time after which they are repeated, while this node waits for its first world."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code of the launcher."""
    args = _parse(argv)
    settings, exit_file = _settings(args), args.exit_file
    signal.signal(signal.SIGTERM, _exit_on_signal)
    # The checks take as long as the fork server, so they run beside it. Those of a standby agent
    # may share devices with training.
    daemon = DaemonAddress(socket=settings.socket, job=settings.job)
    standby = settings.ready_file is not None
    checks = NodeChecks(daemon, beside=standby) if settings.check_node else None
    try:
        script = _set_up_workers(settings)
        _log_to_stderr(args.member_node)
        if checks is not None:
            checks.require()
        code = launch(settings, script)
    except CheckFailedError:
        code = FAILED_CHECK
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    if checks is not None:
        checks.stop()
    gc.unfreeze()  # Otherwise libraries report what the interpreter does not collect as leaks.
    if (stacks := read_stack_directory()) is not None:
        shutil.rmtree(stacks, ignore_errors=True)
    if exit_file is not None:
        _write_line(exit_file, str(code))
    return code


def _set_up_workers(settings: LaunchSettings) -> tuple[str, ...] | None:
    """Set the environment of workers, and start the fork server if workers are forked.

    Returns:
        The script that forks run (see `script_of`); None if workers start as new programs.
    """
    try:
        stacks = Path(tempfile.mkdtemp(prefix="holdfast-stacks-"))
    except OSError:  # Workers train without it; if they hang, no stack is shown.
        stacks = None
    set_for_workers(
        socket=settings.socket,
        job=settings.job,
        nproc=settings.nproc,
        reform_s=settings.reform_s,
        stacks=stacks,
    )
    script = None if settings.fresh else script_of(settings.command, sys.executable)
    if script is not None:
        try:
            start_fork_server(PRELOAD, read_preload())
        except InvalidJobError as error:
            print(error, file=sys.stderr, flush=True)  # Logging must not be configured yet.
            raise SystemExit(INVALID) from error
    return script


def launch(settings: LaunchSettings, script: tuple[str, ...] | None) -> int:
    """Run the workers until they are done or the job has ended, and return the exit code.

    Args:
        script: the script that forks run; None starts `settings.command` as a new program.

    Raises:
        CheckFailedError: a check of this node has failed while it waited for its first world.
    """
    if script is not None:
        # Wait until the fork server is ready, because an agent that asks for a world must be able
        # to start workers immediately: a new member joins a running world when its agent asks.
        probe = multiprocessing.get_context("forkserver").Process(target=do_nothing)
        probe.start()
        probe.join()
    if settings.ready_file is not None:
        _record_readiness(settings.ready_file)
    return _run_agent(settings, script)


def _record_readiness(file: Path) -> None:
    """Create `file`, to show that workers could start immediately."""
    try:
        file.touch()
    except OSError as error:
        log.warning("%s cannot be written: %s", file, error)


def _run_agent(settings: LaunchSettings, script: tuple[str, ...] | None) -> int:
    """Run one agent in each epoch until the job ends or the workers are done; return the exit
    code. Raises as `launch`."""
    # Describe the workers for torch's agent.
    daemon = GrpcDaemon(settings.socket, settings.job, read_token_file())
    rendezvous = HoldfastRendezvous(daemon, settings.job, settings.host, settings.reform_s)
    if settings.check_node:
        address = DaemonAddress(socket=settings.socket, job=settings.job)
        rendezvous.while_waiting = RepeatedChecks(address, settings.recheck_s)
    entrypoint: Callable[..., None] | str = run_script if script else settings.command[0]
    # With a log directory, its files keep everything that workers write to stderr.
    stderr = None if settings.log_dir else WorkerStderr(settings.nproc, read_secrets())
    paths = () if stderr is None else stderr.paths
    arguments = script or settings.command[1:]
    spec = WorkerSpec(
        role="trainer",
        local_world_size=settings.nproc,
        rdzv_handler=rendezvous,
        entrypoint=entrypoint,
        args=(paths, *arguments) if script else arguments,
        max_restarts=RESTARTS_MAX,
        monitor_interval=PAUSE_S,
    )
    logs = (
        DefaultLogsSpecs(log_dir=str(settings.log_dir), redirects=Std.ALL)
        if stderr is None
        else StderrLogs(stderr, forked=script is not None)
    )
    # Watch whether workers work, and what the kernel has to say about their ends.
    kills, kernel = MemoryKills(), KernelLog()
    watch = WorkWatch(rendezvous, settings.nproc, kills, kernel, read_stack_directory())
    watch.start()
    # Start an agent for each epoch. The exceptions below end the launcher, each with its code.
    try:
        while True:
            agent = HoldfastAgent(
                spec,
                rendezvous,
                logs,
                "forkserver",
                settings.grace_s,
                stderr,
                partial(_record_waiting, settings.wait_file),
                kills.any_recent,
                kernel,
            )
            try:
                result = agent.run()
            except EpochEndedError:
                log.info("the epoch has ended; joining the next one")
                continue
            return 1 if result is None or result.is_failed() else 0
    except RendezvousClosedError as error:
        log.warning("%s", error)
        return JOB_ENDED
    except RendezvousConnectionError as error:
        log.error("%s", error)
        return DENIED if isinstance(error.__cause__, AccessDeniedError) else NO_DAEMON
    except UnreachableError as error:
        log.error("%s", error)
        return PROCESS_ENDS
    except SignalException as error:
        return 128 + int(error.sigval)
    finally:
        watch.close()
        rendezvous.shutdown()
        kernel.close()


def _record_waiting(file: Path | None, why: str) -> None:
    """Write to `file` why workers wait; with an empty reason, remove the file."""
    if file is None:
        return
    try:
        if why:
            _write_line(file, why)
        else:
            file.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be written: %s", file, error)


def _write_line(file: Path, line: str) -> None:
    """Replace the content of `file` by `line`. A concurrent reader sees the old or the new line."""
    temporary = file.with_name(f"{file.name}.tmp")
    temporary.write_text(f"{line}\n")
    temporary.replace(file)


def script_of(command: Sequence[str], interpreter: str) -> tuple[str, ...] | None:
    """Return the arguments with which `run_script` runs `command`; None if `command` is not a plain
    call of the interpreter.

    A plain call starts `interpreter` with no options except -u and -m. A bare `python` or `python3`
    means `interpreter`, as it does for torchrun.
    """
    first, *rest = command
    if Path(first).name == first:
        ours = first in ("python", "python3", Path(interpreter).name)
    else:
        found = shutil.which(first)
        ours = found is not None and Path(found).absolute() == Path(interpreter).absolute()
    while rest and rest[0] == "-u":
        rest = rest[1:]
    plain = len(rest) >= 1 and (not rest[0].startswith("-") or (rest[0] == "-m" and len(rest) > 1))
    return tuple(rest) if ours and plain else None


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m holdfast.launch",
        description="Start this node's workers of a training job under torchrun. The node's "
        "Holdfast daemon decides which nodes train together.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--socket", type=Path, required=True, help="the daemon's socket (daemon.sock)")
    add("--job", required=True, help="key of the job")
    add("--nodes", type=int, required=True, help="number of members of the job")
    add("--nproc", type=int, required=True, help="number of workers to start on this node")
    add("--host", default="", help="address for the job's other nodes (default: the daemon's)")
    add("--member-node", metavar="NAME", help="name of this node, for messages")
    add("--exit-file", type=Path, metavar="FILE", help="write the exit code here at the end")
    add("--wait-file", type=Path, metavar="FILE", help="write here why workers cannot start yet")
    add("--ready-file", type=Path, metavar="FILE", help="create this once workers could start")
    add(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="write the workers' output here instead of passing it through",
    )
    add("--fresh", action="store_true", help="do not fork workers from a preloaded process")
    add(
        "--grace-s",
        type=float,
        default=GRACE_S,
        metavar="S",
        help="seconds between SIGTERM and SIGKILL for workers (default: %(default)s)",
    )
    add(
        "--reform-s",
        type=float,
        default=REFORM_S,
        metavar="S",
        help="seconds within which workers that stay must arrive in their new world; later ones "
        "are killed and started again (default: %(default)s)",
    )
    add(
        "--check-node",
        action="store_true",
        help="first check this node, as `holdfast preflight` does; exit with 82 if a check fails",
    )
    add(
        "--recheck-s",
        type=float,
        default=RECHECK_S,
        metavar="S",
        help="with --check-node, check again after about so many seconds for as long as this node "
        "waits for its first world (default: %(default)s)",
    )
    add("command", nargs=argparse.REMAINDER, metavar="-- COMMAND …", help="the trainer's command")
    args = parser.parse_args(argv)
    if args.command[:1] == ["--"]:
        args.command = args.command[1:]
    if not args.command:
        parser.error("the trainer's command is missing; give it after `--`")
    if args.nproc < 1 or args.nodes < 1:
        parser.error(f"--nodes {args.nodes} and --nproc {args.nproc} must be at least 1")
    if not args.reform_s > 0:  # not NaN either
        parser.error(f"--reform-s {args.reform_s:g} must be above 0")
    if not args.recheck_s > 0:
        parser.error(f"--recheck-s {args.recheck_s:g} must be above 0")
    return args


def _settings(args: argparse.Namespace) -> LaunchSettings:
    return LaunchSettings(
        socket=args.socket,
        job=args.job,
        nproc=args.nproc,
        host=args.host,
        command=tuple(args.command),
        fresh=args.fresh,
        log_dir=args.log_dir,
        wait_file=args.wait_file,
        ready_file=args.ready_file,
        grace_s=args.grace_s,
        reform_s=args.reform_s,
        check_node=args.check_node,
        recheck_s=args.recheck_s,
    )


def _log_to_stderr(node: str | None) -> None:
    prefix = f"{node} " if node else ""
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {prefix}%(levelname)s %(name)s: %(message)s"
    )
    # torch's own formatter imports its compiler when a worker fails, which costs each node a
    # second.
    agent = logging.getLogger("torch.distributed.elastic")
    agent.handlers, agent.propagate = logging.getLogger().handlers, False


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
