"""The status of a local run, as values, and as the file that `holdfast status` reads.

The file is a copy for readers (invariant 6) and may be deleted at any time. The next control loop
reads back counters, events and recoveries from it. Times are seconds since the Unix epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from holdfast_core.elastic_experts.reports import PlanReport
from holdfast_core.errors import StorageError
from holdfast_core.experts.loss_reports import JobLoss
from holdfast_core.job.status import Phase, RecoveryMode
from holdfast_core.states import RestoreSource
from holdfast_operator.reconciler.membership.shrinking import Strength
from holdfast_operator.reconciler.observe.last_failure import TrainerFailure
from holdfast_operator.reconciler.observe.views import Condition
from holdfast_operator.reconciler.report.recoveries import Recovery

FINISHED = "FINISHED"
"""State of a rank that has ended well; all other states are the daemon's (REFT §4.2)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
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
    """Step after which it has repeated steps alone in this epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalMemberStatus:
    """One member, and the reports of its daemon."""

    index: int
    node: str
    agent: str
    """State of its agent: absent, starting, running, exited or stopping."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeStatus:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedEvent:
    """An event of a run."""

    time: float
    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """Everything that is known about a local run."""

    job: str
    time: float
    pid: int
    """Pid of the control loop."""
    directory: str
    security: str = ""
    """`mutual TLS`, or `insecure`: no process proves who it is."""
    phase: Phase
    reason: str
    """Reason why the job ended, or why nothing is being done, or what is waited for."""
    epoch: int
    revision: int
    world_size: int
    step: int
    """Newest step that any rank has reported in this epoch."""
    line: str
    """Generation that this epoch started from; empty for a fresh start or while undecided."""
    line_reason: str
    complete: str
    protected: str
    restarts: int
    """Number of recoveries so far."""
    strength: Strength | None = None
    """Members that the job has, wants and needs."""
    recovery_mode: RecoveryMode | None = None
    """What a recovery does to workers that have not failed; None while it is not known."""
    failure: TrainerFailure | None = None
    """The newest rank or agent that failed by itself, and what it wrote last."""
    token_loss: JobLoss | None = None
    """Cost of recoveries in tokens; None where snapshots hold all experts, or it is not known."""
    experts: PlanReport | None = None
    """Newest expert plan; None without uneven copies."""
    conditions: tuple[Condition, ...] = ()
    members: tuple[LocalMemberStatus, ...] = ()
    nodes: tuple[NodeStatus, ...] = ()
    events: tuple[TimedEvent, ...] = ()
    recoveries: tuple[Recovery, ...] = ()
    counters: dict[str, Any] = field(default_factory=dict)
    """Counters for the next control loop (`holdfast_operator.reconciler.observe.counters`)."""

    def rank(self, rank: int) -> RankStatus | None:
        """The rank, None while no daemon reports it."""
        return next((r for m in self.members for r in m.ranks if r.rank == rank), None)

    def member_of(self, rank: int) -> LocalMemberStatus | None:
        """The member that reports the rank."""
        return next((m for m in self.members if any(r.rank == rank for r in m.ranks)), None)

    def node(self, name: str) -> NodeStatus | None:
        return next((node for node in self.nodes if node.name == name), None)

    @property
    def ended(self) -> bool:
        return self.phase.ended


_STATUS = msgspec.json.Decoder(Status)


def encode(status: Status) -> bytes:
    return msgspec.json.format(msgspec.json.encode(status), indent=1)


def read_status(path: Path) -> Status:
    """The status in a file.

    Raises:
        StorageError: when there is none, or it cannot be decoded.
    """
    try:
        return _STATUS.decode(path.read_bytes())
    except FileNotFoundError:
        raise StorageError(
            f"{path} does not exist: no `holdfast run` has written it yet. Give the run's "
            f"directory with --dir, or the job's name"
        ) from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
