"""Files of a local run, with the record of the processes that it started.

```
<run>/lock              held by the control loop
<run>/nodes.json        the nodes' processes: a control loop that starts again adopts them
<run>/status.json       what `holdfast status` shows; may be deleted at any time
<run>/node-failures.json  failures of the nodes; may be deleted at any time
<run>/dead/<node>       the node was lost, and its processes are not started again
<run>/notices/<node>    the node will be lost soon; holds the reason
<run>/exits/<agent>     exit code, written by the agent's launcher
<run>/exits/<agent>.waits  why the launcher cannot start its workers yet
<run>/exits/<agent>.ready  the launcher can start its workers at once
<run>/catalogue         URL of the Redis with the run's history; remains when the run has ended
<run>/logs/             one file for each daemon, member and standby agent
<run>/tls/              a CA for this run, and its certificates for daemons and the control loop
<run>/tokens/<job>      token that trainers of the job show to daemons
<memory>/<node>/        the node's "tmpfs": its daemon's directory
```
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import msgspec

from holdfast_cli.local.processes import ProcessId
from holdfast_core.errors import InvalidJobError, StorageError, UnauthenticatedError
from holdfast_core.job.names import job_file_name
from holdfast_core.job.parsing import MoETrainingJob

SOCKET_PATH_BYTES_MAX = 107
"""Longest path of a Unix socket, without its final NUL."""

SHARED_MEMORY = Path("/dev/shm")
NODES_MAX = 250
"""Most nodes of a run: they share the 254 addresses of a loopback network with the control loop."""


class DaemonRecord(msgspec.Struct, kw_only=True):
    """The process of a node's daemon."""

    process: ProcessId
    attempt: int


class AgentRecord(msgspec.Struct, kw_only=True):
    """The process of an agent of a member, or of a standby agent."""

    process: ProcessId
    attempt: int
    stopping: bool = False


class NodeRecord(msgspec.Struct, kw_only=True):
    """One virtual node."""

    name: str
    host: str
    root: str
    daemon: DaemonRecord | None = None
    agents: dict[int, AgentRecord] = {}
    standby: AgentRecord | None = None
    attempts: int = 0

    @property
    def all_agents(self) -> list[AgentRecord]:
        """The agents of members, then the standby agent."""
        standby = [] if self.standby is None else [self.standby]
        return [*self.agents.values(), *standby]


class RunRecord(msgspec.Struct, kw_only=True):
    """Everything that a control loop needs to continue a run."""

    job: str
    control_host: str
    control_port: int = 0
    working_directory: str = ""
    insecure: bool = False
    """Whether the run's daemons were started without identity."""
    nodes: dict[str, NodeRecord] = {}


_RUN_RECORD = msgspec.json.Decoder(RunRecord)


def default_directory(job_key: str) -> Path:
    """The run directory of a job if none is given."""
    return Path(tempfile.gettempdir()) / f"holdfast-{os.getuid()}" / job_key


def node_names(job: MoETrainingJob) -> list[str]:
    """Names of the virtual nodes, members first, then spares."""
    count = job.spec.nodes + job.spec.failure_policy.spares
    width = len(str(count - 1))
    return [f"n{index:0{width}d}" for index in range(count)]


class RunDirectory:
    """The files of one run. `memory` is the directory on a tmpfs below which virtual nodes live."""

    def __init__(self, path: Path, job_key: str, memory: Path | None = None) -> None:
        self.path = path.absolute()
        self.job_key = job_key
        self.memory = memory or self._default_memory()
        self._lock = -1

    def _default_memory(self) -> Path:
        """Memory of this run. Two runs of one job in different directories do not share it."""
        name = self.job_key
        if self.path != default_directory(self.job_key):
            name += "-" + blake2b(os.fsencode(self.path), digest_size=4).hexdigest()
        return SHARED_MEMORY / f"holdfast-{os.getuid()}" / name

    @property
    def status_file(self) -> Path:
        return self.path / "status.json"

    @property
    def nodes_file(self) -> Path:
        return self.path / "nodes.json"

    @property
    def node_failures_file(self) -> Path:
        return self.path / "node-failures.json"

    @property
    def catalogue_file(self) -> Path:
        return self.path / "catalogue"

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def exit_file(self, node: str, attempt: int) -> Path:
        return self.path / "exits" / f"{node}-{attempt}"

    def wait_file(self, node: str, attempt: int) -> Path:
        return self.path / "exits" / f"{node}-{attempt}.waits"

    def ready_file(self, node: str, attempt: int) -> Path:
        return self.path / "exits" / f"{node}-{attempt}.ready"

    @property
    def tls(self) -> Path:
        return self.path / "tls"

    @property
    def tokens(self) -> Path:
        return self.path / "tokens"

    @property
    def token_file(self) -> Path:
        """File with the token that trainers of the job show to daemons."""
        return self.tokens / job_file_name(self.job_key)

    def call_metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata that every call to a daemon of this run must carry: the token of the job.

        Raises:
            UnauthenticatedError: when there is no token to show: the run has ended, or belongs to
                another user.
        """
        try:
            token = self.token_file.read_text(encoding="ascii").strip()
        except OSError as error:
            raise UnauthenticatedError(
                f"{self.token_file} cannot be read ({error.strerror}), and daemons answer only "
                f"calls with the job's token; call this while the job runs, as the user who runs it"
            ) from error
        return (("authorization", f"Bearer {token}"),)

    def root(self, node: str) -> Path:
        return self.memory / node

    def socket(self, node: str) -> Path:
        return self.root(node) / "daemon.sock"

    def mark(self, *parts: str | int) -> str:
        """Mark of the processes of this run, of one of its nodes, or of an agent."""
        return ":".join([str(self.path), *map(str, parts)])

    # --- ownership ----------------------------------------------------------------------------

    def open(self) -> None:
        """Make the directories and lock out other control loops.

        Raises:
            InvalidJobError: when paths would be too long for sockets.
            StorageError: when a directory cannot be made, belongs to another user, or is in use.
        """
        longest = len(os.fsencode(self.memory / f"n{NODES_MAX}" / "daemon.sock"))
        if longest > SOCKET_PATH_BYTES_MAX:
            raise InvalidJobError(
                f"{self.memory} is too long for the nodes' sockets: {longest} bytes, and a Unix "
                f"socket's path has at most {SOCKET_PATH_BYTES_MAX}; use a shorter job name"
            )
        self.make()
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise StorageError(
                f"{self.path} is in use by another `holdfast run`; stop it, or give this one "
                f"another directory with --dir"
            ) from error

    def make(self) -> None:
        """Make all directories that are missing."""
        for path in (self.path.parent, self.path, self.memory.parent, self.memory):
            _make_private(path)
        for name in ("logs", "exits", "dead", "notices", "tokens"):
            _make_private(self.path / name)

    def note_catalogue(self, url: str) -> None:
        """Record where the run's history is; `url` is empty if it keeps none."""
        if url:
            replace_file(self.catalogue_file, url.encode())
            self.catalogue_file.chmod(0o600)
        else:
            self.catalogue_file.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the directory for another control loop."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def clear(self) -> None:
        """Remove everything but logs and the last status, because the run has ended."""
        remove_memory(self.memory)
        for name in ("exits", "dead", "notices", "tokens", "tls"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        self.nodes_file.unlink(missing_ok=True)

    # --- lost nodes ---------------------------------------------------------------------------

    def mark_dead(self, node: str) -> None:
        (self.path / "dead" / node).touch()

    def mark_back(self, node: str) -> None:
        """Undo `mark_dead`, and remove any notice, which applied to the lost machine."""
        for name in ("notices", "dead"):
            (self.path / name / node).unlink(missing_ok=True)

    def is_dead(self, node: str) -> bool:
        return (self.path / "dead" / node).exists()

    def give_notice(self, node: str, why: str) -> None:
        replace_file(self.path / "notices" / node, why.encode())

    def notice(self, node: str) -> str:
        """Reason why the node will be lost soon; empty when none was announced."""
        try:
            return (self.path / "notices" / node).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    # --- the record ---------------------------------------------------------------------------

    def read_record(self) -> RunRecord | None:
        """Read the record of an earlier control loop; None if there is none.

        Raises:
            StorageError: when the file cannot be decoded.
        """
        try:
            record = _RUN_RECORD.decode(self.nodes_file.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StorageError(f"{self.nodes_file} cannot be read: {error}") from error
        return record

    def write_record(self, record: RunRecord) -> None:
        replace_file(self.nodes_file, msgspec.json.encode(record))


def remove_memory(memory: Path) -> None:
    """Remove the memory of a run that has ended."""
    shutil.rmtree(memory, ignore_errors=True)
    with suppress(OSError):  # other runs have theirs there
        memory.parent.rmdir()


def new_record(directory: RunDirectory, names: list[str]) -> RunRecord:
    """Record of a new run: addresses and directories for its nodes.

    Raises:
        InvalidJobError: when there are more than `NODES_MAX`.
    """
    if len(names) > NODES_MAX:
        raise InvalidJobError(f"{len(names)} virtual nodes; a local run has at most {NODES_MAX}")
    network = 1 + blake2b(os.fsencode(directory.path), digest_size=1).digest()[0] % 254
    return RunRecord(
        job=directory.job_key,
        control_host=f"127.77.{network}.254",
        working_directory=str(Path.cwd()),
        nodes={
            name: NodeRecord(
                name=name, host=f"127.77.{network}.{index + 1}", root=str(directory.root(name))
            )
            for index, name in enumerate(names)
        },
    )


def replace_file(path: Path, data: bytes) -> None:
    """Replace the content of `path` by `data`. A reader sees either the old or the new content."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


def _make_private(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise StorageError(f"cannot make {path}: {error.strerror}") from error
    shared = path in (Path(tempfile.gettempdir()), SHARED_MEMORY)
    if not stat.S_ISDIR(status.st_mode) or (status.st_uid != os.getuid() and not shared):
        raise StorageError(f"{path} was not made by Holdfast; remove it, or use another --dir")
