"""Launcher of one node's workers under torchrun, with membership from the node's daemon.

It is the first process of a trainer container, and of a member in a local run. It only wires: the
rendezvous is in `_launch.rendezvous`, the agent in `_launch.agent`. It ends when the job has ended
or the workers are done; the control loop handles failures of workers.

Exit codes: 0 when this node's workers finished; 128 + n when signal n ended the agent; 75 when the
job ended while this node was waiting for its next world; 69 when the daemon stayed away, or is too
old; 77 when it denied the job to this process; 79 when somebody else wrote into the world's store
what the launchers had agreed on there. They and those of workers are in `holdfast_core.exit_codes`.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import shutil
import signal
import sys
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

from holdfast._environment import read_secrets, read_token_file, set_for_workers
from holdfast._launch.agent import RESTARTS_MAX, EpochEndedError, HoldfastAgent
from holdfast._launch.forking import start_fork_server
from holdfast._launch.memory_kills import MemoryKills
from holdfast._launch.rendezvous import GrpcDaemon, HoldfastRendezvous
from holdfast._launch.script import do_nothing, run_script
from holdfast._launch.stderr import StderrLogs, WorkerStderr
from holdfast._launch.work import WorkWatch
from holdfast_core.errors import AccessDeniedError, UnreachableError
from holdfast_core.exit_codes import DENIED, JOB_ENDED, NO_DAEMON, PROCESS_ENDS
from holdfast_core.job.failures import REFORM_S

log = logging.getLogger(__name__)

MONITOR_S = 0.1
GRACE_S = 5.0
PRELOAD = ["torch", "torch._dynamo", "holdfast._launch.agent", "holdfast._launch.script"]
"""Modules that every worker imports. The compiler is one of them because creating the first
optimizer imports it."""

_EPILOG = """\
examples:
  python -m holdfast.launch --socket /run/holdfast/daemon.sock --job default/run1 \\
      --nodes 4 --nproc 8 -- python train.py --steps 1000

A command that starts with `python`, or with the interpreter that runs this launcher, is forked from
a process that has imported torch already; restarts then cost no import. Any other command is
started afresh each time, and so is every command with --fresh.

Workers see what torchrun gives them, HOLDFAST_SOCKET and HOLDFAST_JOB. TORCHELASTIC_RESTART_COUNT
is the epoch in which they were started; workers that stay when their world changes keep it.
HOLDFAST_TOKEN_FILE names the file with the token that the daemon requires
in Kubernetes.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """Workers to start on this node, and how."""

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
    """Start every worker as a new program instead of a fork that has imported torch."""
    log_dir: Path | None = None
    """Directory for the workers' output, with a folder for each restart; None passes the output
    through."""
    wait_file: Path | None = None
    """File that gives the reason while the workers cannot be started."""
    ready_file: Path | None = None
    """File that is made once workers could be started at once, before the world is asked for."""
    grace_s: float = GRACE_S
    """Time that workers get between SIGTERM and SIGKILL."""
    reform_s: float = REFORM_S
    """Time that workers that stay when their world changes have to arrive in the new one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    args = _parse(argv)
    settings, exit_file = _settings(args), args.exit_file
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        script = _set_up_workers(settings)
        _log_to_stderr(args.member_node)
        code = launch(settings, script)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    if exit_file is not None:
        _write_line(exit_file, str(code))
    return code


def _set_up_workers(settings: LaunchSettings) -> tuple[str, ...] | None:
    """Set what workers inherit, and start the fork server if they are forked; return what its forks
    run, see `script_of`, or None where workers are started afresh."""
    set_for_workers(
        socket=settings.socket,
        job=settings.job,
        nproc=settings.nproc,
        reform_s=settings.reform_s,
    )
    script = None if settings.fresh else script_of(settings.command, sys.executable)
    if script is not None:
        start_fork_server(PRELOAD)
    return script


def launch(settings: LaunchSettings, script: tuple[str, ...] | None) -> int:
    """Run the workers until they are done or the job has ended; return the exit code.

    Args:
        script: what forks of the fork server run; None starts `settings.command`.
    """
    if script is not None:
        # An agent that asks for a world is one that can start workers at once: a member that is to
        # join a world that trains joins when its agent asks.
        probe = multiprocessing.get_context("forkserver").Process(target=do_nothing)
        probe.start()
        probe.join()
    if settings.ready_file is not None:
        _record_readiness(settings.ready_file)
    return _run_agent(settings, script)


def _record_readiness(file: Path) -> None:
    """Make `file`, to show that workers could be started at once."""
    try:
        file.touch()
    except OSError as error:
        log.warning("%s cannot be written: %s", file, error)


def _run_agent(settings: LaunchSettings, script: tuple[str, ...] | None) -> int:
    daemon = GrpcDaemon(settings.socket, settings.job, read_token_file())
    rendezvous = HoldfastRendezvous(daemon, settings.job, settings.host, settings.reform_s)
    entrypoint: Callable[..., None] | str = run_script if script else settings.command[0]
    # With a log directory, files already keep everything that workers write.
    stderr = None if settings.log_dir else WorkerStderr(settings.nproc, read_secrets())
    paths = () if stderr is None else stderr.paths
    arguments = _escape_macros(script or settings.command[1:])
    spec = WorkerSpec(
        role="trainer",
        local_world_size=settings.nproc,
        rdzv_handler=rendezvous,
        entrypoint=entrypoint,
        args=(paths, *arguments) if script else arguments,
        max_restarts=RESTARTS_MAX,
        monitor_interval=MONITOR_S,
    )
    logs = (
        DefaultLogsSpecs(log_dir=str(settings.log_dir), redirects=Std.ALL)
        if stderr is None
        else StderrLogs(stderr, forked=script is not None)
    )
    last_lines = stderr.last_lines if stderr is not None else lambda local_rank: ""
    kills = MemoryKills()
    watch = WorkWatch(rendezvous, settings.nproc, kills)
    watch.start()
    try:
        while True:
            agent = HoldfastAgent(
                spec,
                rendezvous,
                logs,
                "forkserver",
                settings.grace_s,
                last_lines,
                partial(_record_waiting, settings.wait_file),
                kills.any_recent,
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


def _escape_macros(arguments: Sequence[str]) -> tuple[str, ...]:
    """`arguments` such that workers get them as they are: torch resolves macros in them, like
    `${local_rank}`, and halves `$$`."""
    return tuple(argument.replace("$", "$$") for argument in arguments)


def _record_waiting(file: Path | None, why: str) -> None:
    """Write to `file` why workers wait; remove it once they no longer do."""
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
    """Make `line` all that is in `file`. Whoever reads it meanwhile finds the one before."""
    written = file.with_name(f"{file.name}.tmp")
    written.write_text(f"{line}\n")
    written.replace(file)


def script_of(command: Sequence[str], interpreter: str) -> tuple[str, ...] | None:
    """Arguments for `run_script` that run `command`; None unless it is a plain interpreter call.

    A plain call starts `interpreter`, with no interpreter options but -u and -m. A bare `python` or
    `python3` means `interpreter`, as it does for torchrun.
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
        description="Start this node's workers of a training job under torchrun; who trains with "
        "whom comes from the node's Holdfast daemon.",
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
    add("--ready-file", type=Path, metavar="FILE", help="make this when workers could start")
    add(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="write the workers' output here instead of passing it on",
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
        help="seconds that workers which stay when their world changes have to arrive in the new "
        "one before they are killed and started anew (default: %(default)s)",
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
