"""`holdfast run`, `status` and `inject`. Imported when one of these commands is called."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner

from holdfast_cli import exit_codes
from holdfast_cli._environment import kubeconfig, own_environment
from holdfast_cli.commands import cluster_commands, cluster_status
from holdfast_cli.commands.show import event_line, event_text, progress_line, run_view
from holdfast_cli.job_files import load_job
from holdfast_cli.local import LocalCluster, LocalSettings, Status, TimedEvent
from holdfast_cli.local import faults as injections
from holdfast_cli.local.directory import RunDirectory, default_directory
from holdfast_cli.local.processes import identify
from holdfast_cli.local.status import encode, read_status
from holdfast_core.errors import InvalidJobError, StorageError
from holdfast_core.job.parsing import MoETrainingJob, ignored_locally
from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_protos.connections.identity import is_insecure

LINE_S = 0.2
PLAIN_LINE_S = 5.0
"""Least seconds between lines of progress, where lines cannot be overwritten."""
WATCH_S = 0.5
_FILES = (".yaml", ".yml", ".json")
"""Suffixes that distinguish a job's file from its name."""
_SIGNALS = {
    "kill-rank": signal.SIGKILL,
    "stop-rank": signal.SIGSTOP,
    "cont-rank": signal.SIGCONT,
}


# --- run ------------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Carry out `holdfast run`; returns the exit code."""
    job = load_job(options.job)
    settings = LocalSettings(
        directory=options.dir,
        redis_url=options.redis,
        insecure=options.insecure or is_insecure(own_environment()),
        standbys=options.standby,
    )
    return asyncio.run(_run(job, settings))


async def _run(job: MoETrainingJob, settings: LocalSettings) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    with _printer() as printer:
        cluster = LocalCluster(job, settings, on_event=printer.event)
        async with cluster:
            printer.print(f"run directory {cluster.directory.path}")
            for note in ignored_locally(job):
                printer.print(note)
            outcome = await _attend(cluster, printer, stop)
            printer.print("stopping daemons and freeing memory")
    if outcome is None:
        return exit_codes.INTERRUPTED
    if outcome is Outcome.FAILED:
        logs = cluster.directory.path / "logs"
        print(
            f"holdfast: job {job.key} failed: {cluster.status.local.reason}\nlogs: {logs}",
            file=sys.stderr,
        )
        return exit_codes.FAILED
    return 0


async def _attend(cluster: LocalCluster, printer: Printer, stop: asyncio.Event) -> Outcome | None:
    """Show progress until the job ends; returns its outcome, or None after a signal."""
    ended = asyncio.ensure_future(cluster.finished())
    stopped = asyncio.ensure_future(stop.wait())
    try:
        while True:
            done, _ = await asyncio.wait(
                {ended, stopped}, timeout=LINE_S, return_when=asyncio.FIRST_COMPLETED
            )
            with suppress(StorageError):
                printer.progress(cluster.status)
            if ended in done:
                return ended.result()
            if stopped in done:
                return None
    finally:
        for task in (ended, stopped):
            task.cancel()
        await asyncio.gather(ended, stopped, return_exceptions=True)


class Printer:
    """Prints events as they happen, and one line of progress. A terminal overwrites that line; in a
    log it is repeated at intervals."""

    def __init__(self, console: Console, live: Live | None) -> None:
        self._console, self._live = console, live
        self._spinner = Spinner("dots", text="starting")
        self._line, self._written_at = "", float("-inf")
        if live is not None:
            live.update(self._spinner)

    def print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def event(self, event: TimedEvent) -> None:
        if self._live is not None:
            self._console.print(event_text(event), soft_wrap=True)
        else:
            self.print(event_line(event))

    def progress(self, status: Status) -> None:
        line = progress_line(status)
        if self._live is not None:
            self._spinner.update(text=line)
        elif line != self._line and time.monotonic() - self._written_at >= PLAIN_LINE_S:
            self._line, self._written_at = line, time.monotonic()
            self.print(line)


@contextmanager
def _printer() -> Iterator[Printer]:
    console = Console()
    if not console.is_terminal:
        yield Printer(console, None)
        return
    with Live(console=console, refresh_per_second=8, transient=True) as live:
        yield Printer(console, live)


# --- status and inject ----------------------------------------------------------------------------


def status(options: argparse.Namespace) -> int:
    """Carry out `holdfast status`; returns the exit code."""
    if (cluster := chosen_cluster(options)) is not None:
        return cluster_status.status(cluster)
    path = find_run(options.dir, options.job) / "status.json"
    console = Console()
    if options.json:
        print(encode(read_status(path)).decode())
        return 0
    if options.once or not (options.watch or console.is_terminal):
        newest = read_status(path)
        console.print(run_view(newest, stale=_staleness(newest)))
        return 0
    with Live(console=console, refresh_per_second=4) as live:
        while True:
            newest = read_status(path)
            live.update(run_view(newest, stale=_staleness(newest)))
            if newest.ended:
                return 0
            time.sleep(WATCH_S)


def chosen_cluster(options: argparse.Namespace) -> argparse.Namespace | None:
    """The options for a cluster, with the job's namespace and name in it; None for a local run. The
    options choose a cluster, or else there is no such run on this machine and a kubeconfig
    exists."""
    known = options.kubeconfig or kubeconfig()
    if not (options.namespace or options.kubeconfig or options.context):
        if options.dir is not None or _has_run(options.job) or not known:
            return None
        print(f"no such run on this machine; looking at the cluster of {known}", file=sys.stderr)
    return _in_cluster(argparse.Namespace(**{**vars(options), "kubeconfig": known}))


def is_file(job: str) -> bool:
    """Whether a job is given by its file, and not by its name."""
    return Path(job).suffix in _FILES


def key_of(job: str) -> str:
    """Key of a job that is given by its name, by its key or by its file."""
    if is_file(job):
        return load_job(Path(job)).key
    return job if "." in job else f"default.{job}"


def _has_run(job: str | None) -> bool:
    """Whether this machine has a run of the job, or any run when none is named."""
    if job is None:
        return any(default_directory("any").parent.glob("*/status.json"))
    return (find_run(None, job) / "status.json").exists()


def _in_cluster(options: argparse.Namespace) -> argparse.Namespace:
    """The options, with the job's namespace and name in the cluster. A job may be given by its
    file, or as `team-a.llm`."""
    name, namespace = options.job, ""
    if name is not None and is_file(name):
        metadata = load_job(Path(name)).metadata
        namespace, name = metadata.namespace, metadata.name
    elif name is not None and "." in name:
        namespace, _, name = name.partition(".")
    chosen = options.namespace or namespace or "default"
    return argparse.Namespace(**{**vars(options), "job": name, "namespace": chosen})


def in_cluster_only(options: argparse.Namespace) -> argparse.Namespace:
    """The options for a cluster, for commands that do not exist for local runs.

    Raises:
        InvalidJobError: when there is no cluster.
    """
    cluster = chosen_cluster(options)
    if cluster is None:
        raise InvalidJobError(
            f"`holdfast {options.command}` needs a job in a cluster, and no cluster is chosen: "
            f"set KUBECONFIG, or give --kubeconfig FILE. A local run ends with Ctrl-C, and its "
            f"logs are in the directory that `holdfast run` prints"
        )
    return cluster


def inject(options: argparse.Namespace) -> int:
    """Carry out `holdfast inject`; returns the exit code."""
    if (cluster := chosen_cluster(options)) is not None:
        return cluster_commands.inject(cluster)
    if options.fault == "delete-pod":
        raise InvalidJobError("a local run has no pods; kill-node loses one of its virtual nodes")
    path = find_run(options.dir, options.job)
    newest = read_status(path / "status.json")
    if newest.ended or not (path / "nodes.json").exists():
        raise InvalidJobError(
            f"the run in {path} is not running ({newest.phase}); start it before injecting a fault"
        )
    directory = RunDirectory(path, newest.local.job)
    match options.fault:
        case "kill-daemon":
            text = injections.kill_daemon(directory, options.node)
        case "kill-node":
            text = injections.kill_node(directory, options.node)
        case "start-node":
            text = injections.start_node(directory, options.node)
        case "notice":
            text = injections.notice(directory, options.node)
        case "corrupt":
            text = injections.corrupt(directory, newest, options.rank, parity=options.parity)
        case name:
            text = injections.signal_rank(directory, newest, options.rank, _SIGNALS[name])
    print(text)
    return 0


def find_run(directory: Path | None, job: str | None) -> Path:
    """Find the run directory: the given one, the one of the job, or the only one.

    Raises:
        StorageError: when there is none, or there are several.
    """
    if directory is not None:
        return directory
    if job is not None:
        return default_directory(key_of(job))
    home = default_directory("any").parent
    runs = sorted(path.parent for path in home.glob("*/status.json"))
    living = [path for path in runs if (path / "nodes.json").exists()]
    for choice in (living, runs):
        if len(choice) == 1:
            return choice[0]
    if not runs:
        raise StorageError(
            f"no run in {home}; start one with `holdfast run JOB.yaml`, or give --dir"
        )
    names = ", ".join(path.name for path in living or runs)
    raise StorageError(f"several runs in {home}: {names}; choose one with the job's name or --dir")


def _staleness(status: Status) -> str:
    if status.ended or identify(status.local.pid) is not None:
        return ""
    if not (Path(status.local.directory) / "nodes.json").exists():
        return "the run was stopped"
    age_s = time.time() - status.local.time
    return (
        f"`holdfast run` is not running (last seen {age_s:.0f} s ago); training continues "
        f"without it, and the same command takes over"
    )
