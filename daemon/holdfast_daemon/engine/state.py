"""The engine's memory of one job on this node: arenas, parity blocks, sessions, reports.

Plain mutable records, like those of `slots`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from holdfast_core.catalogue.events import JobEvent
from holdfast_core.corruption import Divergence
from holdfast_core.durable.choice import Found
from holdfast_core.elastic_experts.reports import PlanReport
from holdfast_core.errors import HoldfastError
from holdfast_core.experts.loss_reports import LossReport
from holdfast_core.inspections import InspectedProcess
from holdfast_core.protection.budget import PARITY_SLOTS
from holdfast_core.protection.recovery import Holdings
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.manifests import Inventory, SnapshotEntry
from holdfast_core.snapshots.membership import Membership
from holdfast_core.snapshots.reports import Directive, MemberReport
from holdfast_core.states import EndReason, RestoreSource
from holdfast_core.stragglers import StepTimes
from holdfast_daemon.engine.effects import Effect, Note
from holdfast_daemon.engine.epoch import Epoch
from holdfast_daemon.engine.persist_memory import PersistMemory
from holdfast_daemon.engine.slots import (
    ArenaView,
    ParitySlot,
    ParityState,
    RebuildJob,
    Slot,
    SlotState,
)


@dataclass(slots=True)
class TrainerSession:
    """One trainer process's claim on a rank."""

    id: str
    rank: int
    epoch: int
    layout_id: str
    pid: int
    claimed: bool = False
    """Whether the trainer has received the arena's descriptor, and with it the lock."""
    allocated: bool = False
    error: HoldfastError | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SavePace:
    """Times of a rank's saves, as its trainer measured them."""

    period_s: float = 0.0
    """Seconds between the newest two saves; 0 before the second."""
    staged_s: float = 0.0
    """Seconds from the newest save until its tensors could change again."""
    interval_steps: int = 0
    """Steps from snapshot to snapshot where measurement decides; else 0."""
    window_steps: int = 0
    """Steps of the newest sparse window; 0 where snapshots are of one step."""
    bubble_s: float = 0.0
    """Seconds for which the rank's pipeline stage has waited for others, in its session."""
    bubble_bytes: int = 0
    """Bytes of snapshots that were copied meanwhile."""


@dataclass(frozen=True, slots=True)
class Follower:
    """A worker that stays in its process when its world changes, for as long as its stream of
    worlds is open."""

    number: int
    """Number of the stream on this daemon: a newer one replaces it."""
    pid: int
    size: int = 0
    """Number of ranks of the only worlds that it can stay for; 0: it can in any."""
    since: int = 0
    """Epoch in which the stream began on this daemon."""

    def fits(self, size: int) -> bool:
        """Whether the worker can stay for a world of `size` ranks."""
        return self.size in (0, size)


@dataclass(slots=True)
class RankRecord:
    """Record of one of this node's ranks."""

    session: TrainerSession | None = None
    follower: Follower | None = None
    """Living process, so it outlasts epochs."""
    began_alone: bool = False
    """Whether its process started training from the beginning, nobody else holds its member's
    state, and nothing was protected in an earlier epoch."""
    held_beside: bool = False
    """Whether another rank, perhaps of the same member, has the state of this one. It matters only
    with `began_alone`."""
    arrived_in: int = 0
    """Epoch whose world its worker has joined most recently."""
    passed: Generation | None = None
    lost_in: int = 0
    """Epoch in which its session ended without Close."""
    exited: tuple[int, int] = (0, 0)
    """(epoch, exit code) of its worker's newest failure, as reported by the agent."""
    last_lines: str = ""
    """Last lines that the failed worker wrote to stderr, for operators."""
    exit_reason: EndReason = EndReason.UNKNOWN
    """Why that worker failed, where its agent knew it."""
    kernel_messages: str = ""
    """Lines that the kernel wrote about that failure, for operators."""
    oom_killed_in: int = 0
    """Newest epoch in which the kernel killed it for lack of memory. The agent's report may come
    when the next epoch has begun."""
    hardware_fault_in: int = 0
    """Newest epoch in which it ended after a fault of hardware; the report may be as late."""
    worked: tuple[int, float] = (0, 0.0)
    """(epoch, monotonic time in seconds) of the newest report of the agent that it had worked."""
    unprotected_in: int = 0
    """Newest epoch in which it has reported progress without a session."""
    last_step: int = 0
    last_sign: float = 0.0
    seal_error: str = ""
    refused: tuple[int, str] = (0, "")
    """(epoch, why) of the newest arena that could not be allocated; empty once one could be."""
    skipped: int = 0
    failed: int = 0
    failure: str = ""
    """Newest cause of a failed save, in the SDK's words."""
    failure_code: str = ""
    """`HoldfastError.code` of that cause; empty where this daemon does not know it."""
    pace: SavePace = SavePace()
    loss: LossReport | None = None
    """Cost of leaving experts out of snapshots; None where they hold everything."""
    plan: PlanReport | None = None
    """Expert plan of its world; None without uneven copies."""
    times: tuple[int, StepTimes | None] = (0, None)
    """(epoch, how the newest steps of its session in that epoch were divided)."""
    divergence: tuple[int, Divergence | None] = (0, None)
    """(epoch, the newest divergence of replicas that it has reported in that epoch)."""
    restored: tuple[Generation | None, RestoreSource] | None = None
    """Generation that the rank was given to restore in this epoch, and its source. Of a rank that
    goes on live: the epoch, the step whose state it has, and LIVE, or the source of what it has
    restored alone."""
    repeated_after: int | None = None
    """Step that the rank restored alone in this epoch, and after which it repeated steps."""
    no_replay: str = ""
    """Why lost ranks did not recover alone in this epoch, in the SDK's words."""

    @property
    def is_live(self) -> bool:
        """Whether the rank went live in this epoch."""
        kept = self.restored is not None and self.restored[1] is RestoreSource.LIVE
        return kept or self.repeated_after is not None

    def can_stay(self, size: int, *, protected: bool, members_changed: bool) -> bool:
        """Whether its process can stay for a world of `size` ranks.

        Args:
            protected: whether the job could go back to a generation known to be protected.
            members_changed: see `Epoch.members_changed`.
        """
        follows = self.follower is not None and self.follower.fits(size)
        held = not self.began_alone or (self.held_beside and not members_changed)
        return follows and (protected or held)

    def stayed(self, session: TrainerSession) -> bool:
        """Whether the process of `session` followed its worlds before the session's epoch."""
        follower = self.follower
        return (
            follower is not None and follower.pid == session.pid and follower.since < session.epoch
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """The newest inspection of the node's processes in one epoch, while the job hangs."""

    number: int
    asked_at: float
    """Monotonic time in seconds at which the control loop asked for it."""
    processes: tuple[InspectedProcess, ...] | None = None
    """The launcher's answer; None before it."""


@dataclass(slots=True)
class Loading:
    """State of storage in one epoch: the leader's search, and the loads of this daemon."""

    looking: bool = False
    found: Found | None = None
    """Result of the leader's latest search of storage; None before the first."""
    why: str = ""
    """Why memory has no line, quoted from the leader's decision."""
    logged_reason: str = ""
    """Reason of the leader's newest logged choice, in words."""
    problem: str = ""
    """Why there is no line yet, in words for operators; empty when all is well."""
    beyond: int = 0
    """Epoch of an earlier run in storage, which this epoch must pass first; 0: none."""
    tries: dict[str, int] = field(default_factory=dict)
    """Consecutive failures of each task."""
    failed: dict[tuple[int, Generation], str] = field(default_factory=dict)
    """Snapshots found damaged in storage, by (rank, generation), and what is wrong."""


@dataclass(slots=True)
class JobMemory:
    """Everything that the engine remembers of one job."""

    job: str
    node: str
    memory_id: str
    incarnation: int
    current: Epoch | None = None
    """The epoch that this node takes part in; None before there is a membership, and when the
    newest one has no member on this node."""
    left: Membership | None = None
    """The newest membership, when it has no member on this node."""
    epoch_seen: int = 0
    """Newest epoch seen, here or at a peer; larger than the membership's when this daemon is
    fenced."""
    reports: dict[int, MemberReport] = field(default_factory=dict)
    sequence: int = 0
    arenas: dict[tuple[int, str], ArenaView] = field(default_factory=dict)
    parities: dict[tuple[int, int], ParitySlot] = field(default_factory=dict)
    ranks: dict[int, RankRecord] = field(default_factory=dict)
    sessions: dict[str, TrainerSession] = field(default_factory=dict)
    rebuilds: dict[int, RebuildJob] = field(default_factory=dict)
    wrong_rebuilds: dict[int, int] = field(default_factory=dict)
    """Number of rebuilds from parity in this epoch, by rank, whose bytes did not match the
    manifest."""
    parity_failure: str = ""
    """Why the newest parity block could not be made; empty once one could be, or in a new epoch."""
    retry_at: dict[str, float] = field(default_factory=dict)
    agent_waiting: bool = False
    inspection: Inspection | None = None
    work_reported_at: float = -math.inf
    """Monotonic time in seconds of the newest report of this epoch on which workers work."""
    peers_kept: frozenset[Generation] = frozenset()
    persist: PersistMemory = field(default_factory=PersistMemory)
    loading: Loading = field(default_factory=Loading)
    out: list[Effect] = field(default_factory=list)

    @property
    def membership(self) -> Membership | None:
        """The newest membership, whether it has a member on this node or not."""
        return self.current.membership if self.current is not None else self.left

    @property
    def me(self) -> int | None:
        return self.current.me if self.current is not None else None

    @property
    def directive(self) -> Directive | None:
        return self.current.directive if self.current is not None else None

    @property
    def epoch(self) -> int:
        """Number of the newest membership; 0 before there is one."""
        if self.current is not None:
            return self.current.membership.epoch
        return self.left.epoch if self.left is not None else 0

    @property
    def fenced(self) -> bool:
        return self.epoch_seen > self.epoch

    @property
    def protects(self) -> bool:
        """Whether this epoch is known to have a generation that is kept."""
        return self.current is not None and self.current.retained is not None

    @property
    def leads(self) -> bool:
        return self.current is not None and self.current.leads

    def note(
        self,
        event: JobEvent,
        *,
        rank: int | None = None,
        generation: Generation | None = None,
        detail: str = "",
        stayed: bool = False,
    ) -> None:
        self.out.append(
            Note(event=event, rank=rank, generation=generation, detail=detail, stayed=stayed)
        )

    def my_ranks(self) -> range:
        return self.current.ranks if self.current is not None else range(0)

    def begin_epoch(self, membership: Membership) -> None:
        """Enter the epoch of `membership`: nothing is verified, reported or decided in it yet."""
        if self.protects:
            for record in self.ranks.values():
                record.began_alone = False
        me = membership.member_on(self.node)
        if me is None:
            self.current, self.left = None, membership
        else:
            directive = Directive(job=self.job, epoch=membership.epoch)
            self.current, self.left = Epoch(membership=membership, me=me, directive=directive), None
        self.epoch_seen = max(self.epoch_seen, membership.epoch)
        self.reports = {}
        self.retry_at = {}
        self.loading = Loading()
        self.wrong_rebuilds, self.parity_failure = {}, ""
        self.agent_waiting, self.inspection = False, None
        self.work_reported_at = -math.inf
        for _, slot in self.slots():
            slot.verified = slot.verifying = False
        for parity in self.parities.values():
            parity.verified = parity.verifying = False
        for record in self.ranks.values():
            record.last_step, record.restored = 0, None
            record.repeated_after, record.no_replay = None, ""

    def revise(self, membership: Membership) -> Epoch | None:
        """Take a membership with new addresses of the same members; return the current epoch with
        it."""
        if self.current is None:
            self.left = membership
        else:
            self.current = replace(self.current, membership=membership)
        return self.current

    def direct(self, directive: Directive) -> Epoch:
        """Replace the directive of the current epoch."""
        assert self.current is not None
        self.current = replace(self.current, directive=directive)
        return self.current

    def rank(self, rank: int) -> RankRecord:
        return self.ranks.setdefault(rank, RankRecord())

    def lane_slots(self, lane: int) -> list[ParitySlot]:
        if (lane, 0) not in self.parities:
            for index in range(PARITY_SLOTS):
                self.parities.setdefault((lane, index), ParitySlot(lane, index))
        return [self.parities[lane, index] for index in range(PARITY_SLOTS)]

    def slots(self) -> Iterator[tuple[ArenaView, Slot]]:
        for arena in self.arenas.values():
            for slot in arena.slots:
                yield arena, slot

    def sealed(self, rank: int, generation: Generation) -> tuple[ArenaView, Slot] | None:
        """Arena and slot of the sealed snapshot, verified or not; None when it is not held."""
        return next(
            (
                (arena, slot)
                for arena, slot in self.slots()
                if arena.rank == rank
                and slot.state is SlotState.SEALED
                and slot.generation == generation
            ),
            None,
        )

    @property
    def verified(self) -> bool:
        """Whether every sealed snapshot and parity block was verified in this epoch."""
        for _, slot in self.slots():
            if slot.state is SlotState.SEALED and not slot.verified:
                return False
        return all(p.verified for p in self.parities.values() if p.state is ParityState.READY)

    def holdings(self, membership: Membership) -> Holdings:
        """What the members hold, according to their reports to this daemon."""
        inventories = {member: report.inventory for member, report in self.reports.items()}
        return Holdings.of(membership, inventories)

    def inventory(self) -> Inventory:
        """What this daemon holds and has verified, in a fixed order."""
        snapshots, writing = [], []
        for arena, slot in self.slots():
            if slot.generation is None:
                continue
            if slot.state is SlotState.SEALED and slot.verified and slot.manifest is not None:
                snapshots.append(
                    SnapshotEntry(
                        rank=arena.rank,
                        generation=slot.generation,
                        manifest_digest=slot.digest,
                        payload_bytes=slot.manifest.payload_bytes,
                        window=bool(slot.manifest.first_step),
                    )
                )
            elif slot.state in (SlotState.GRANTED, SlotState.SEALING):
                writing.append((arena.rank, slot.generation))
        return Inventory(
            snapshots=tuple(
                sorted(snapshots, key=lambda e: (e.rank, e.generation.epoch, e.generation.step))
            ),
            parities=tuple(
                sorted(
                    (p.entry for p in self.parities.values() if p.verified and p.entry),
                    key=lambda e: (e.lane, e.generation.epoch, e.generation.step),
                )
            ),
            writing=tuple(sorted(writing)),
            passed=tuple(
                sorted((rank, r.passed) for rank, r in self.ranks.items() if r.passed is not None)
            ),
        )
