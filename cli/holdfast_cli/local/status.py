"""The status of a local run, as values, and as the file that `holdfast status` reads.

The file holds the fields that the operator writes into a job's `.status`, and beside them the field
`local` with facts that only a local run has. It is a copy for readers (invariant 6) and may be
deleted at any time. The next control loop reads back counters, events and recoveries from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from holdfast_core.errors import StorageError
from holdfast_core.job.status import JobCondition, JobStatus, MemberStatus, Phase
from holdfast_core.states import RestoreSource
from holdfast_operator.reconciler.report.recoveries import Recovery

FINISHED = "FINISHED"
"""State of a rank that has ended well; all other states are the daemon's (REFT §4.2)."""


class RankStatus(Struct, frozen=True, kw_only=True, rename="camel"):
    """One rank of the training world."""

    rank: int
    state: str
    """A `RankHealth`, or `FINISHED`."""
    step: int
    idle_s: float
    pid: int
    lost: bool
    restored: str
    """Generation that the rank restored in this epoch; empty for none."""
    restored_from: RestoreSource
    repeated_after: int | None = None
    """Step that it restored alone in this epoch, and after which it repeated steps."""


class LocalMemberStatus(Struct, frozen=True, kw_only=True, rename="camel"):
    """Report of the daemon of one member, and the exit code of its agent."""

    index: int
    node: str
    exit_code: int | None
    epoch: int
    """Epoch of the daemon; 0 when the daemon is silent or does not have the job."""
    ranks: tuple[RankStatus, ...]
    complete: str
    """Newest generation that all its ranks have committed; empty for none."""
    arena_bytes: int
    parity_bytes: int
    protection_bytes_s: float = 0.0
    """Bytes per second that were lately fetched from other nodes for parity."""
    slots: int = 0
    """Fewest slots of an arena of its ranks; 0 while none is allocated."""
    skipped: int
    failed: int
    rebuilding: bool
    problem: str


class NodeStatus(Struct, frozen=True, kw_only=True, rename="camel"):
    """One virtual node."""

    name: str
    role: str
    """Role in words: `member N`, `joining as member N: …`, `spare` or `lost`."""
    member: int | None = None
    """Index of the member that lives here; None for a spare, and until a member has joined."""
    connected: bool
    host: str
    root: str
    socket: str
    daemon_pid: int
    incarnation: int
    memory_used_bytes: int
    memory_budget_bytes: int
    standby: str = ""
    """`ready` if an agent waits here that could start workers at once, `starting` if it is on its
    way; empty without one."""


class TimedEvent(Struct, frozen=True, kw_only=True):
    """An event of a run."""

    time: float
    """Seconds since the Unix epoch."""
    reason: str
    message: str
    warning: bool = False


class LocalStatus(Struct, frozen=True, kw_only=True, rename="camel"):
    """Facts that only a local run has."""

    job: str
    time: float
    """When this status was made, in seconds since the Unix epoch."""
    pid: int
    """Pid of the control loop."""
    directory: str
    security: str = ""
    """`mutual TLS`, or `insecure`: no process proves who it is."""
    reason: str
    """Why the job ended, why nothing is being done, or what the job waits for."""
    revision: int
    world_size: int
    line: str
    """Generation that this epoch started from; empty for a fresh start or while undecided."""
    line_reason: str
    complete: str
    """Newest generation that all ranks have committed; empty for none."""
    members: tuple[LocalMemberStatus, ...] = ()
    nodes: tuple[NodeStatus, ...] = ()
    events: tuple[TimedEvent, ...] = ()
    recoveries: tuple[Recovery, ...] = ()
    """All recoveries that are remembered, oldest first, each with the source of every rank."""

    @property
    def ranks(self) -> tuple[RankStatus, ...]:
        """All ranks that daemons report, by member."""
        return tuple(rank for member in self.members for rank in member.ranks)

    def rank(self, rank: int) -> RankStatus | None:
        """The rank; None while no daemon reports it."""
        return next((each for each in self.ranks if each.rank == rank), None)

    def member_of(self, rank: int) -> LocalMemberStatus | None:
        """The member that reports the rank."""
        return next((m for m in self.members if any(r.rank == rank for r in m.ranks)), None)

    def node(self, name: str) -> NodeStatus | None:
        """The node of this name; None when the run has none."""
        return next((node for node in self.nodes if node.name == name), None)


class Status(JobStatus, frozen=True, kw_only=True):
    """The status of a local run: that of its job, and what only a local run has.

    Fields that a local run always knows are narrowed to types without None.
    """

    phase: Phase
    epoch: int = 0
    step: int = 0
    protected: str = ""
    recoveries: int = 0
    conditions: tuple[JobCondition, ...] = ()
    members: tuple[MemberStatus, ...] = ()
    local: LocalStatus

    @property
    def ended(self) -> bool:
        """Whether the job has ended, well or not."""
        return self.phase.ended

    @property
    def job_document(self) -> dict[str, Any]:
        """The job's part, as an API server would give `.status`."""
        fields = {name: getattr(self, name) for name in JobStatus.__struct_fields__}
        document: dict[str, Any] = msgspec.to_builtins(JobStatus(**fields))
        return document


_STATUS = msgspec.json.Decoder(Status)


def encode(status: Status) -> bytes:
    return msgspec.json.format(msgspec.json.encode(status), indent=1)


def read_status(path: Path) -> Status:
    """The status in a file.

    Raises:
        StorageError: when there is none, it cannot be decoded, or another version of Holdfast wrote
            it in another form.
    """
    try:
        return _STATUS.decode(path.read_bytes())
    except FileNotFoundError:
        raise StorageError(
            f"{path} does not exist: no `holdfast run` has written it yet. Give the run's "
            f"directory with --dir, or the job's name"
        ) from None
    except msgspec.ValidationError as error:
        raise StorageError(
            f"{path} cannot be read: {error}. If another version of Holdfast wrote it, use that "
            f"version, or call `holdfast run` of this one on the same job and directory: it takes "
            f"over the run and writes a new file"
        ) from error
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
