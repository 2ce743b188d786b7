"""Frozen values that the reconciler observes, remembers and decides.

One vocabulary for every adapter: in a local run an agent is a process and a node is a directory, in
Kubernetes they are a pod and a node. Nothing here depends on which. All times are seconds of one
monotonic clock, the same whose time `reconcile` receives as `now`.

Values that every heartbeat and every turn create for each of thousands of nodes are
msgspec.Structs. These are made and copied many times faster than dataclasses, and the garbage
collector ignores them: they are never part of a cycle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum

from msgspec import Struct

from holdfast_core.corruption import Divergence
from holdfast_core.elastic_experts.reports import PlanReport
from holdfast_core.experts.loss_reports import LossReport
from holdfast_core.hang_limits import StepPauses
from holdfast_core.idle_checks import FailedCheck
from holdfast_core.inspections import InspectedProcess
from holdfast_core.job.status import ConditionStatus, HangStatus
from holdfast_core.links import LinkWatch, MeasuredLinks
from holdfast_core.node_failures import CLEAN, FailureKind, NodeFailure, Rating, mark_of
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.membership import Membership
from holdfast_core.states import EndReason, RankHealth, RestoreSource
from holdfast_core.stragglers import StepTimes, StragglerWatch
from holdfast_operator.reconciler.observe.counters import Counters

NEVER = float("-inf")


class RankView(Struct, frozen=True, kw_only=True, gc=False):
    """A rank as its daemon reports it."""

    rank: int
    state: RankHealth = RankHealth.OFFLINE
    step: int = 0
    """Newest step that the SDK reported."""
    idle_s: float = 0.0
    """Seconds since the last sign of progress."""
    pid: int = 0
    lost: bool = False
    """Whether its session ended without being closed, in the epoch of the `JobView`."""
    restored: Generation | None = None
    restored_from: RestoreSource = RestoreSource.UNKNOWN
    exit_code: int | None = None
    """Code with which its worker failed in the epoch of the `JobView`, as the agent saw it; 128 + n
    for signal n. Arrives a moment after `lost`, and not at all when the agent is lost too."""
    last_lines: str = ""
    """Last lines that the worker wrote to stderr; empty when there are none or they were not
    kept."""
    follows: bool = False
    """Whether its worker stays in its process when its world changes."""
    repeated_after: int | None = None
    """Step that it restored alone, and after which it repeated steps up to that of `restored`."""
    no_replay: str = ""
    """Why lost ranks did not recover alone; empty where none were to."""
    since_work_s: float | None = None
    """Seconds since its launcher last saw its worker work in this epoch: use the processor, read or
    write. None when it has not, or the launcher is not Holdfast's."""
    work_reported: bool = False
    """Whether its launcher has just reported if it works: otherwise it may work unseen."""
    unprotected: bool = False
    """Whether it trains without a session, because its saves are refused or it makes none."""
    exit_reason: EndReason = EndReason.UNKNOWN
    """Why its worker failed, where that is known."""
    kernel_messages: str = ""
    """Lines that the kernel of its node wrote about that failure; empty where it could not be
    asked."""
    oom_killed_in: int = 0
    """Newest epoch in which its worker was killed for lack of memory; 0 when in none."""
    hardware_fault_in: int = 0
    """Newest epoch in which its worker ended after a fault of hardware; 0 when in none. If that has
    ended, and the worker has not failed since, `kernel_messages` are about that."""
    times: StepTimes | None = None
    """How its newest steps in this epoch were divided; None before the first window of steps."""
    divergence: Divergence | None = None
    """Newest divergence of replicas in which it took part in this epoch, in world ranks; None while
    they are equal."""

    @property
    def at_work(self) -> bool:
        """Whether it trains as far as its SDK reports, with a session or without."""
        return self.state.at_work or self.unprotected


class InspectionView(Struct, frozen=True, kw_only=True, gc=False):
    """One daemon's report of the newest inspection in the epoch of the `JobView`."""

    number: int
    age_s: float
    """Seconds since the daemon was asked for it."""
    processes: tuple[InspectedProcess, ...] | None = None
    """The processes of its ranks; None while their launcher has not answered."""


class JobView(Struct, frozen=True, kw_only=True, gc=False):
    """One daemon's report of the job."""

    uid: str = ""
    """Identity of the job that it holds something of: an earlier one may have had the same name."""
    epoch: int = 0
    membership: Membership | None = None
    revision: int | None = None
    """Revision of its membership; None when its daemon sends it only with the membership itself."""
    verified: bool = False
    line: Line | None = None
    protected: Generation | None = None
    complete: Generation | None = None
    """Newest generation that all ranks of this daemon have committed."""
    ranks: tuple[RankView, ...] = ()
    agent_waiting: bool = False
    """Whether the node's agent waits for an epoch newer than `epoch`."""
    rebuilding: bool = False
    loading: bool = False
    """Whether some rank's snapshot is being loaded from storage."""
    storage_problem: str = ""
    """Why nothing can be loaded from storage, in words; empty when all is well."""
    stored_epoch: int = 0
    """An epoch of an earlier run in storage, which the job's epoch has to pass; 0: none."""
    persisted: Generation | None = None
    """The newest whole copy in storage that the daemon has learned of."""
    persist_failure: str = ""
    """Why the newest copy was given up; empty after a success."""
    problem: str = ""
    """Why nothing is protected, in words; empty when all is well."""
    problem_code: str = ""
    """`HoldfastError.code` of its cause; empty when no known error is."""
    skipped: int = 0
    failed: int = 0
    arena_bytes: int = 0
    parity_bytes: int = 0
    protection_bytes_s: float = 0.0
    """Bytes a second recently fetched from other nodes for parity."""
    slots: int = 0
    """Fewest slots of an arena of its ranks; 0 while none is allocated."""
    interval_steps: int = 0
    """Steps from snapshot to snapshot, as its ranks have measured; 0 where none reports it."""
    window_steps: int = 0
    """Steps of its ranks' newest sparse window; 0 where none reports one."""
    loss: LossReport | None = None
    """Losses of its ranks that have a session in this epoch; None when snapshots hold all experts,
    or no rank has reported yet."""
    plan: PlanReport | None = None
    """Expert plan of its ranks that have a session in this epoch; None without uneven copies."""
    inspection: InspectionView | None = None
    """None when its processes were not inspected in this epoch."""
    links: MeasuredLinks = MeasuredLinks()
    """Its newest measurements of links to other members. They name no member of their own."""


class NodeView(Struct, frozen=True, kw_only=True, gc=False):
    """A node that could host a member, known from its daemon or from the adapter."""

    name: str
    connected: bool = False
    """Whether the daemon's Control stream is open."""
    heartbeat_at: float = NEVER
    """Time when the daemon's newest heartbeat arrived."""
    first_heard_at: float = NEVER
    """Time when the daemon's first heartbeat to this control loop arrived."""
    gone: bool = False
    """Whether the adapter has found that the node is not coming back."""
    returning: bool = False
    """Whether the adapter sees the node alive, and its daemon being ended on purpose, or started
    since its last heartbeat."""
    memory_id: str = ""
    incarnation: int = 0
    peer_address: str = ""
    bulk_address: str = ""
    trainer_socket: str = ""
    memory_budget_bytes: int = 0
    memory_used_bytes: int = 0
    domain: str = ""
    schedulable: bool = True
    """Whether it takes new agents: false for a node that is cordoned, or whose daemon has reported
    that it has no memory left. What runs there stays."""
    agent_waits: bool = False
    """Whether an agent of the job waits here for a world, while the node has no part in any."""
    disruption: str = ""
    """Why the node will be taken away soon, in words, such as a spot node's termination notice;
    empty without any notice."""
    rating: Rating = CLEAN
    """How the node has done lately, in all jobs. A preference and nothing else: a node that may
    take a member may do so with any rating."""
    failed_checks: tuple[FailedCheck, ...] | None = None
    """Checks that have failed since no job has been on the node; None while its daemon reports
    none, whatever the reason."""
    job: JobView | None = None
    """None when the daemon holds nothing of the job."""


INIT_FAILED = "InitContainerFailed"
"""Reason of an agent that was not started, because a container that runs before it has failed."""


class AgentState(StrEnum):
    """State of an agent. An agent that is not in the observation is absent."""

    STARTING = "starting"
    RUNNING = "running"
    EXITED = "exited"
    STOPPING = "stopping"


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentView:
    """Process (pod) that runs a member's ranks. While a member moves there may be two."""

    member: int
    node: str
    state: AgentState
    exit_code: int | None = None
    reason: str = ""
    """Why it waits or ended, in one word in CamelCase; `message` is the same in a sentence."""
    message: str = ""
    disruption: str = ""
    """Why the cluster took it away, as the reason of a pod's DisruptionTarget condition; empty when
    it did not."""
    last_lines: str = ""
    """Last lines that the agent wrote, if it failed itself."""
    number: int | None = None
    """Number that another controller has given to its pod: the position of its member."""

    @property
    def why(self) -> str:
        """Why it waits or ended, for people."""
        return ": ".join(part for part in (self.reason, self.message) if part)


@dataclass(frozen=True, kw_only=True, slots=True)
class StandbyView:
    """Agent that waits on a spare and belongs to no member, until one moves there."""

    node: str
    state: AgentState
    ready: bool = False
    """Whether it could start workers at once."""
    exit_code: int | None = None
    last_lines: str = ""
    """Last lines that it wrote, if it has ended by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspension:
    """Why a job shall have no agents now."""

    reason: str
    """One word in CamelCase."""
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why members are not placed: what the job asks for is refused as it is."""

    reason: str
    """One word in CamelCase."""
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterView:
    """Everything that is known now. A missing node was not seen yet. All agents are there: an
    adapter that has not listed them yet must not call the reconciler."""

    nodes: Mapping[str, NodeView]
    agents: tuple[AgentView, ...] = ()
    standbys: tuple[StandbyView, ...] = ()
    suspension: Suspension | None = None
    """Why the job's queue keeps it from running; None when the job may run."""
    refusals: tuple[tuple[str, int], ...] = ()
    """Reasons why nodes cannot take a member, each with the number of nodes, while the job has
    none; empty where an adapter does not count them."""
    refusal: Refusal | None = None
    """Why the cluster would accept no agent of the job; None when it would, or was not asked."""
    _by_home: dict[tuple[int, str], AgentView] = field(init=False, repr=False, compare=False)
    _views: dict[int, tuple[Membership, tuple[JobView | None, ...]]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        by_home: dict[tuple[int, str], AgentView] = {}
        for agent in self.agents:
            by_home.setdefault((agent.member, agent.node), agent)
        object.__setattr__(self, "_by_home", by_home)

    def agent(self, member: int, node: str) -> AgentView | None:
        """The member's agent on the node; the first when there are two."""
        return self._by_home.get((member, node))

    def views(self, membership: Membership) -> tuple[JobView | None, ...]:
        """Report of each member's daemon on the job; None while the daemon is in another epoch.
        Computed once: there may be thousands, and the rules of a turn ask for them many times."""
        key = id(membership)
        if key not in self._views:
            epoch, jobs = membership.epoch, (self._job_on(p.node) for p in membership.members)
            views = tuple(job if job is not None and job.epoch == epoch else None for job in jobs)
            self._views[key] = (membership, views)  # keeps it alive, so that its id is not reused
        return self._views[key][1]

    def _job_on(self, node: str) -> JobView | None:
        view = self.nodes.get(node)
        return None if view is None else view.job


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishMembership:
    """Send the membership to every daemon in it, and to every daemon that has an older one."""

    membership: Membership


@dataclass(frozen=True, kw_only=True, slots=True)
class StartAgent:
    """Start the member's agent on the node; there is none there. A standby agent that waits on the
    node becomes the member's instead. A member that is missing from the world gets its agent before
    it joins: the agent waits there."""

    member: int
    node: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StopAgent:
    """Stop the member's agent on the node and forget it. From now on it is observed as stopping,
    or not at all."""

    member: int
    node: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StartStandby:
    """Start a standby agent on the node; there is none there."""

    node: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StopStandby:
    """Stop the standby agent on the node and forget it, unless it has become a member's."""

    node: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FenceNode:
    """Make sure that nothing of the job runs on the node any more, as far as the node can be
    reached."""

    node: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DropJob:
    """Have all daemons free what they hold of the job."""

    up_to_epoch: int | None = None
    """Newest epoch of what is freed; None to free everything. A daemon that has not spoken yet may
    hold what is newer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspect:
    """Have all daemons of the epoch ask their launchers to inspect the processes of the ranks."""

    epoch: int
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PersistNow:
    """Have the newest protected generation copied to durable storage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Succeed:
    """Mark the job as complete."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Fail:
    """Mark the job as failed, for a reason that it cannot recover from."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteJob:
    """Delete the job: it ended at least `ttlSecondsAfterFinished` ago."""


Action = (
    PublishMembership
    | StartAgent
    | StopAgent
    | StartStandby
    | StopStandby
    | FenceNode
    | DropJob
    | PersistNow
    | Inspect
    | Succeed
    | Fail
    | DeleteJob
)


# --- the decision ---------------------------------------------------------------------------------


class ConditionType(StrEnum):
    SUSPENDED = "Suspended"
    SCHEDULED = "Scheduled"
    RUNNING = "Running"
    RECOVERING = "Recovering"
    PROTECTED = "Protected"
    DEGRADED = "Degraded"
    TOKEN_LOSS = "TokenLossWithinLimit"
    EXPERTS_REPLICATED = "ExpertsReplicated"
    COMPLETE = "Complete"
    FAILED = "Failed"
    FULL_STRENGTH = "FullStrength"
    STORAGE_REACHABLE = "StorageReachable"
    PERSISTED = "Persisted"
    INSECURE = "Insecure"
    DAEMONS_OUTDATED = "DaemonsOutdated"
    PODS_REFUSED = "PodsRefused"


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """One aspect of the job's state, as Kubernetes shows it."""

    type: ConditionType
    status: bool | None
    """None while it is not known."""
    reason: str
    """One word in CamelCase."""
    message: str = ""

    @property
    def status_word(self) -> ConditionStatus:
        """The status as Kubernetes writes it."""
        return ConditionStatus("Unknown" if self.status is None else str(self.status))


class EventReason(StrEnum):
    """Reasons of the control loop's events, in one word; adapters add more."""

    ADOPTED = "Adopted"
    SCHEDULED = "Scheduled"
    RUNNING = "Running"
    DAEMON_EXITED = "DaemonExited"
    STANDBY_EXITED = "StandbyExited"
    DAEMON_SILENT = "DaemonSilent"
    DAEMON_BACK = "DaemonBack"
    READDRESSED = "Readdressed"
    RECOVERING = "Recovering"
    RECOVERED = "Recovered"
    HANG_INSPECTED = "HangInspected"
    HANG_PASSED = "HangPassed"
    STRAGGLER = "Straggler"
    STRAGGLER_PASSED = "StragglerPassed"
    SLOW_LINKS = "SlowLinks"
    SLOW_LINKS_PASSED = "SlowLinksPassed"
    CORRUPTION = "Corruption"
    STEPS_NOT_REPEATED = "StepsNotRepeated"
    NO_REPLACEMENT = "NoReplacement"
    JOINED = "Joined"
    JOINER_EXITED = "JoinerExited"
    SLOW_START = "SlowStart"
    WORKS_UNPROTECTED = "WorksUnprotected"
    SLOW_END = "SlowEnd"
    NODE_AVOIDED = "NodeAvoided"
    LAST_LINES = "LastLines"
    AGENT_ENDED = "AgentEnded"
    OUT_OF_MEMORY = "OutOfMemory"
    TOKEN_LOSS_LIMIT_PASSED = "TokenLossLimitPassed"
    EXPERTS_SEATED = "ExpertsSeated"
    COPY_REQUESTED = "CopyRequested"
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    NOT_RESUMED = "NotResumed"
    SNAPSHOTS_FREED = "SnapshotsFreed"
    RESHAPED = "Reshaped"
    EARLIER_RUN = "EarlierRun"
    REPLICAS_DIVERGED = "ReplicasDiverged"
    SNAPSHOTS_REFUSED = "SnapshotsRefused"
    NOTHING_SAVED = "NothingSaved"
    COMPLETE = "Complete"
    FAILED = "Failed"


EVENT_BYTES_MAX = 1024
"""Bytes of a message that Kubernetes accepts in an event."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened, in one line for people."""

    reason: str
    """One word in CamelCase."""
    message: str
    warning: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedInspection:
    """An inspection of the processes of a job that hangs."""

    epoch: int
    number: int
    asked_at: float
    """When the daemons were asked for it, as far as they report it to a new control loop."""
    over: bool = False
    """Whether the control loop waits for it no more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlState(Counters):
    """State of the control loop between two turns.

    Membership and epoch come back from the daemons' heartbeats. What else matters to a restarted
    control loop are the counters; without them too the job goes on, but counts and deadlines begin
    anew, and a job that ended may begin again.
    """

    attentive_since: float = NEVER
    """When the loop began to take turns without long pauses: earlier silence proves nothing."""
    looked_at: float = NEVER
    membership: Membership | None = None
    confirmed_epoch: int = 0
    """Newest epoch that was published from here, or that all its members have reported. Until an
    epoch is confirmed, its membership may be an old one from a heartbeat, and no agent is
    touched."""
    began_at: float = NEVER
    """When the current epoch was published from here, or agents left over from an earlier one were
    last stopped."""
    fruitless: int = 0
    """Epochs in a row that ended before training was seen running in them."""
    saved_at: float = NEVER
    """When a newer generation was last seen to be safe, in this epoch."""
    joinable_since: float | None = None
    """When a node on which a missing member could join was first seen; None while there is none."""
    ready_since: float | None = None
    """When the agent of a missing member was first seen to wait; None while none does."""
    unscheduled_since: tuple[tuple[int, float], ...] = ()
    """Missing members for whose agents there is no room, and since when."""
    inspection: AskedInspection | None = None
    """Newest inspection; None since training was last seen to get on."""
    hang: HangStatus | None = None
    """Newest hang that was inspected; the job's status keeps it for a new control loop."""
    hung_at: float = NEVER
    """When that inspection was over."""
    straggling: StragglerWatch = field(default_factory=StragglerWatch)
    """What is known of slow ranks in this epoch. Evidence: a new control loop begins anew."""
    links: LinkWatch = field(default_factory=LinkWatch)
    """What is known of slow links in this epoch. Evidence, likewise."""
    pauses: StepPauses = field(default_factory=StepPauses)
    """Pauses between steps. Evidence: a new control loop begins anew."""
    codes_awaited_since: float | None = None
    """When a rank was first seen lost whose exit code the failure rules depend on."""
    unfit: frozenset[str] = frozenset()
    """Nodes on which an agent could not be scheduled since all members last trained."""
    failed_checks: Mapping[str, float] = field(default_factory=dict)
    """Node → when its newest check failed, for about as long as others take to check again.
    Evidence: a new control loop begins anew."""
    announced: frozenset[str] = frozenset()
    """Nodes whose end was announced, also when it has come."""
    silent: frozenset[str] = frozenset()
    """Members' nodes whose silence was reported by an event."""
    carried: frozenset[int] = frozenset()
    """Members whose agents were at work before the current epoch was published, and are still the
    same: until training runs, the end of one of them is part of what ended the last epoch."""
    resumed_epoch: int = 0
    """Newest epoch in which training was seen running."""
    started_from: int | None = None
    """Step that the current epoch started from, once known."""
    signs: tuple[int, ...] = ()
    """Last observed signs of a start, or of the end of training; empty while nothing that would
    give a sign is awaited."""
    quiet_since: float = NEVER
    """When `signs` last changed."""
    slow: str = ""
    """Start or end of an epoch that an event has reported as slow."""
    works: str = ""
    """Start or end of an epoch for which an event has reported that ranks work unprotected."""
    unprotected: frozenset[str] = frozenset()
    """Refusals about which `unprotected` has emitted events, with masked numbers."""
    late_ends: frozenset[tuple[int, str]] = frozenset()
    """(epoch, who) of agents and ranks whose reason to end an event has reported an epoch later, or
    whose fault of hardware was known in time."""
    reached: tuple[tuple[int, int], ...] = ()
    """(epoch, newest step) of this epoch and of the previous one."""
    standby_exits: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """Node → how often its standby agent has ended recently, and when it last did."""

    @classmethod
    def remembering(cls, counters: Counters) -> ControlState:
        """State of a restarted control loop."""
        return cls(**{each.name: getattr(counters, each.name) for each in fields(Counters)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """Nodes that a job lacks."""

    count: int = 0
    beside: tuple[str, ...] = ()
    """Nodes that it has, or could have: others are missing beside them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlamedNode:
    """A failure that counts against a node. The adapter records it, with the time."""

    node: str
    kind: FailureKind
    epoch: int
    essence: str = ""
    """What its last lines have in common with those of a failure like it, if it may be the
    script's; else empty."""
    device: str = ""
    """The GPU that failed; empty where none is known."""

    def failure(self, job: str, at: float) -> NodeFailure:
        """The failure as it is recorded, of the job with this key, `at` seconds of Unix time."""
        mark = mark_of(self.essence)
        return NodeFailure(
            kind=self.kind, job=job, epoch=self.epoch, at=at, alike=mark, device=self.device
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Actions to carry out, in order, and why."""

    state: ControlState
    actions: tuple[Action, ...] = ()
    blamed: tuple[BlamedNode, ...] = ()
    conditions: tuple[Condition, ...] = ()
    events: tuple[Event, ...] = ()
    shortage: Shortage = Shortage()
    reason: str = field(default="", compare=False)
