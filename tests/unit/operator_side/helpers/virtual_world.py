"""A world for the reconciler, in virtual time: nodes, daemons and agents as plain values.

It does what an adapter and healthy daemons would do, and nothing else: tests decide what fails.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from types import MappingProxyType
from typing import Any

from holdfast_core.corruption import Divergence
from holdfast_core.elastic_experts.reports import PlanReport
from holdfast_core.experts.loss_reports import LossReport
from holdfast_core.inspections import Frame, InspectedProcess
from holdfast_core.job.locations import Locations
from holdfast_core.job.parsing import MoETrainingJob, parse_job
from holdfast_core.node_failures import (
    CLEAN,
    HALF_LIFE_S,
    Rating,
    Record,
    ratings,
    with_failures,
    with_problem,
)
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.membership import Membership
from holdfast_core.states import EndReason, RankHealth, RestoreSource
from holdfast_core.stragglers import StepTimes
from holdfast_operator.reconciler.observe.counters import from_document, to_document
from holdfast_operator.reconciler.observe.evidence import UNSCHEDULABLE
from holdfast_operator.reconciler.observe.views import (
    Action,
    AgentState,
    AgentView,
    ClusterView,
    ControlState,
    Decision,
    DropJob,
    Event,
    FenceNode,
    Inspect,
    InspectionView,
    JobView,
    NodeView,
    PublishMembership,
    RankView,
    StandbyView,
    StartAgent,
    StartStandby,
    StopAgent,
    StopStandby,
    Suspension,
)
from holdfast_operator.reconciler.reconcile import reconcile
from holdfast_operator.reconciler.report.conditions import phase

STEP_S = 0.25
SHORT_S, LONG_STEP_S = 40.0, 1.0
"""In more than a short time, looks are further apart: nothing comes of most of them."""
WALL = 1.7e9
"""Unix time when the virtual clock showed 0."""


def make_job(
    nodes: int = 4,
    *,
    nproc: int = 1,
    spares: int = 1,
    redundancy: str = "RAIM5",
    suspend: bool = False,
    spec: dict[str, Any] | None = None,
    **failure_policy: Any,
) -> MoETrainingJob:
    """A job with one-second heartbeats; five missed ones make a node lost. `spec` overrides
    fields."""
    return parse_job(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "MoETrainingJob",
            "metadata": {"name": "job"},
            "spec": {
                "suspend": suspend,
                "nodes": nodes,
                "nprocPerNode": nproc,
                "parallelism": {"dp": nodes * nproc},
                "redundancy": {"type": redundancy},
                "failurePolicy": {"spares": spares, **failure_policy},
                "trainer": {
                    "template": {"spec": {"containers": [{"name": "t", "command": ["train"]}]}}
                },
                **(spec or {}),
            },
        }
    )


@dataclass
class Daemon:
    memory_id: str
    alive: bool = True
    port: int = 1
    membership: Membership | None = None
    heartbeat_at: float = 0.0
    lost: set[int] = field(default_factory=set)
    waiting: bool = False
    exits: dict[int, int] = field(default_factory=dict)
    """Rank → exit code that its agent reported."""
    last_lines: dict[int, str] = field(default_factory=dict)
    """Rank → last lines of its output, which its agent reported."""
    kernel_messages: dict[int, str] = field(default_factory=dict)
    """Rank → what the kernel wrote about its end, which its agent reported."""
    inspection: tuple[int, float] | None = None
    """Number of its newest inspection in this epoch, and when it was asked for it."""


class World:
    """Nodes with daemons, agents on them, and a control loop that runs when a test calls it.

    Attributes:
        idler_s: rank → for how much longer than the others it has been idle.
        processes: rank → its process as its launcher sees it, or None without one; others wait in
            one collective.
        mute, old: nodes whose launchers do not answer inspections, and whose daemons know none.
        times: rank → how it divides its steps.
        divergences: rank → what it has concluded of its replicas.
        record: failures of nodes, as an adapter records them.
    """

    times: Mapping[int, StepTimes] = MappingProxyType({})
    divergences: Mapping[int, Divergence] = MappingProxyType({})

    idler_s: Mapping[int, float] = MappingProxyType({})
    processes: Mapping[int, InspectedProcess | None] = MappingProxyType({})
    late_faults: Mapping[int, tuple[int, str]] = MappingProxyType({})
    """Rank → the epoch in which it ended after a fault of hardware, as its agent has told when that
    had ended, and what the kernel wrote."""
    unreported: frozenset[int] = frozenset()
    """Ranks whose launchers have ceased to report whether they work."""
    mute: Collection[str] = ()
    old: Collection[str] = ()
    record: Record = MappingProxyType({})
    _searched: Membership | None = None
    _places: Mapping[str, int] = MappingProxyType({})
    """Node → the member there, in the membership that was searched last."""

    def __init__(self, job: MoETrainingJob, nodes: int | None = None) -> None:
        self.job, self.now = job, 1000.0
        count = nodes if nodes is not None else job.spec.nodes + job.spec.failure_policy.spares
        self.daemons = {f"n{i}": Daemon(f"memory-{i}") for i in range(count)}
        self.gone: set[str] = set()
        self.unconnected: set[str] = set()
        """Nodes whose daemons have not connected to this control loop yet."""
        self.heard_at: dict[str, float] = {}
        """Node → when its daemon first connected to this control loop; others did long ago."""
        self.dials_at: dict[str, float] = {}
        """Node → when its daemon connects to a new control loop; others do at once."""
        self.sent: Membership | None = None
        """Newest membership that this control loop has published."""
        self.dropping = -1.0
        """Newest epoch of what this control loop has daemons drop."""
        self.returning, self.cordoned = set[str](), set[str]()
        self.locations: Locations = None
        self.suspension: Suspension | None = None
        """Why the job's queue keeps it from running."""
        self.notices, self.problems = dict[str, str](), dict[str, str]()
        """Node → reason for which it will be taken away; node → what is wrong with it now."""
        self.full, self.cold = set[str](), set[str]()
        """Nodes without room for new agents; nodes whose agents have started and wait for no
        world yet."""
        self.lingering = False
        """Whether agents that are stopped stay for a while."""
        self.protects = True
        """Whether the protected generation of an earlier epoch is protected again at once in a new
        one."""
        self.agents: dict[tuple[int, str], AgentView] = {}
        self.standbys: dict[str, StandbyView] = {}
        """Node → the standby agent on it."""
        self.standbys_wanted = 0
        self.state = ControlState()
        self.decision = Decision(state=self.state)
        self.step, self.idle_s = 0, 0.0
        self.protected: Generation | None = None
        self.line: Line | None = None
        self.following: set[int] = set()
        """Ranks whose workers stay in their processes when the world changes."""
        self.sessionless: set[int] = set()
        """Ranks that have no session, although their agents run: not yet, or no more."""
        self.worked_at: dict[int, float] = {}
        """Rank → when its launcher last saw its worker work; `inf`: it works all the time."""
        self.unprotected: set[int] = set()
        """Ranks that train without a session."""
        self.oom_epochs: dict[int, int] = {}
        """Rank → newest epoch in which its worker was killed for lack of memory."""
        self.busy: dict[str, str] = {}
        """Node → `rebuilding` or `loading`, which its daemon is."""
        self.live: int | None = None
        """Step after which ranks have gone on live, instead of restoring the line."""
        self.alone: dict[int, RestoreSource] = {}
        """Ranks that have restored that step alone, and the source of their bytes."""
        self.undecided = False
        """Whether no rank knows yet what it begins from."""
        self.losses: dict[str, LossReport] = {}
        """Node → its daemon's report of lost tokens."""
        self.plans: dict[str, PlanReport] = {}
        """Node → its daemon's report of the expert plan."""
        self.figures_of: dict[str, dict[str, Any]] = {}  # of its daemon's view, by node
        self.fetched: dict[str, float] = {}
        """Node → bytes per second that its daemon fetches for parity."""
        self.events: list[Event] = []
        self.actions: list[Action] = []
        self.published: list[Membership] = []
        self.cold_then: list[frozenset[str]] = []
        """Nodes that were cold when each of `published` was."""
        self.fenced, self.dropped = list[str](), False
        self.beat()

    # --- time ---------------------------------------------------------------------------------

    def look(self) -> Decision:
        """Run one round of the control loop, and carry out its actions at once."""
        self.beat()
        decision = reconcile(
            self.job,
            self.observed(),
            self.state,
            self.now,
            self.locations,
            standbys=self.standbys_wanted,
        )
        self.state, self.decision = decision.state, decision
        self.events.extend(decision.events)
        self.record_failures(decision)
        self.actions.extend(decision.actions)
        for action in decision.actions:
            self.carry_out(action)
        return decision

    def record_failures(self, decision: Decision) -> None:
        """Record the failures that count against nodes, as an adapter does."""
        wall = WALL + self.now
        failures = [(each.node, each.failure(self.job.key, wall)) for each in decision.blamed]
        self.record = with_failures(self.record, failures, now=wall, half_life_s=HALF_LIFE_S)

    def settle(self, seconds: float = 0.0, *, step_s: float | None = None) -> None:
        """Run the control loop for `seconds`, and then until there is nothing to do."""
        until = self.now + seconds
        step_s = step_s or (STEP_S if seconds <= SHORT_S else LONG_STEP_S)
        while self.now < until:
            self.look()
            self.now = min(self.now + step_s, until)
        for _ in range(50):
            if not self.look().actions:
                return
            self.now += STEP_S
        raise AssertionError(f"still acting after 50 looks: {self.decision.actions}")

    def beat(self) -> None:
        for name, daemon in self.daemons.items():
            if daemon.alive and self.now >= self.dials_at.get(name, 0.0):
                daemon.heartbeat_at = self.now
                if name in self.unconnected:
                    self.unconnected.discard(name)
                    self.heard_at[name] = self.now
                    self.bring_up_to_date(name)

    # --- observations of the control loop -----------------------------------------------------

    def observed(self) -> ClusterView:
        return ClusterView(
            nodes={name: self.node_view(name) for name in self.daemons},
            agents=tuple(agent for _, agent in sorted(self.agents.items())),
            standbys=tuple(standby for _, standby in sorted(self.standbys.items())),
            suspension=self.suspension,
        )

    def node_view(self, name: str) -> NodeView:
        if name in self.unconnected:
            return NodeView(name=name, gone=name in self.gone)
        daemon = self.daemons[name]
        return NodeView(
            name=name,
            connected=daemon.alive,
            heartbeat_at=daemon.heartbeat_at,
            first_heard_at=self.heard_at.get(name, 0.0),
            gone=name in self.gone,
            returning=name in self.returning,
            memory_id=daemon.memory_id,
            schedulable=name not in self.cordoned,
            disruption=self.notices.get(name, ""),
            rating=self.rating(name),
            peer_address=f"{name}:{daemon.port}",
            bulk_address=f"{name}:{daemon.port + 1}",
            job=self.job_view(name),
            agent_waits=self.agent_waits(name),
        )

    def rating(self, name: str) -> Rating:
        found = ratings(self.record, now=WALL + self.now, half_life_s=HALF_LIFE_S)
        return with_problem(found.get(name, CLEAN), self.problems.get(name, ""))

    def agent_waits(self, name: str) -> bool:
        """Whether an agent waits on the node, which has no part in the world."""
        known = self.daemons[name].membership
        if name in self.cold or (known is not None and self._member_on(known, name) is not None):
            return False
        return any(
            agent.node == name and agent.state is AgentState.RUNNING
            for agent in self.agents.values()
        )

    def _member_on(self, membership: Membership, name: str) -> int | None:
        """The member on a node; the members are gone through once for all of many nodes."""
        if self._searched is not membership:
            self._searched = membership
            self._places = {member.node: member.index for member in membership.members}
        return self._places.get(name)

    def job_view(self, name: str) -> JobView | None:
        daemon = self.daemons[name]
        membership = daemon.membership
        if membership is None:
            return None
        member = self._member_on(membership, name)
        agent = self.agents.get((member if member is not None else -1, name))
        works = agent is not None and agent.state is AgentState.RUNNING
        ranks = membership.ranks_of(member) if member is not None else range(0)
        healthy = RankHealth.HEALTHY
        restored, source = self._restored_in(membership.epoch)
        return JobView(
            epoch=membership.epoch,
            membership=membership,
            verified=True,
            line=self.line_of(membership.epoch),
            protected=self.protected if self._is_protected_in(membership.epoch) else None,
            complete=Generation(membership.epoch, self.step) if self.step else None,
            ranks=tuple(
                RankView(
                    rank=rank,
                    state=(
                        healthy
                        if works and rank not in daemon.lost | self.sessionless
                        else RankHealth.OFFLINE
                    ),
                    step=self.step,
                    idle_s=self.idle_s + self.idler_s.get(rank, 0.0),
                    lost=rank in daemon.lost,
                    exit_code=daemon.exits.get(rank),
                    last_lines=daemon.last_lines.get(rank, ""),
                    restored=restored,
                    restored_from=self.alone.get(rank, source),
                    repeated_after=self.live if rank in self.alone else None,
                    follows=rank in self.following - daemon.lost,
                    since_work_s=(
                        max(0.0, self.now - self.worked_at[rank])
                        if rank in self.worked_at
                        else None
                    ),
                    work_reported=rank in self.worked_at and rank not in self.unreported,
                    unprotected=rank in self.unprotected and works,
                    exit_reason=self._end_reason(rank, daemon, membership.epoch),
                    kernel_messages=daemon.kernel_messages.get(
                        rank, self.late_faults.get(rank, (0, ""))[1]
                    ),
                    hardware_fault_in=(
                        membership.epoch
                        if daemon.kernel_messages.get(rank)
                        else self.late_faults.get(rank, (0, ""))[0]
                    ),
                    oom_killed_in=self.oom_epochs.get(rank, 0),
                    times=self.times.get(rank) if works else None,
                    divergence=self.divergences.get(rank) if works else None,
                )
                for rank in ranks
            ),
            agent_waiting=daemon.waiting,
            loss=self.losses.get(name),
            plan=self.plans.get(name),
            protection_bytes_s=self.fetched.get(name, 0.0),
            **self.figures_of.get(name, {}),
            rebuilding=self.busy.get(name) is not None,
            loading=self.busy.get(name) == "loading",
            inspection=self.inspection_on(name, ranks),
        )

    def inspection_on(self, name: str, ranks: range) -> InspectionView | None:
        """The daemon's report of its newest inspection."""
        asked = self.daemons[name].inspection
        if asked is None:
            return None
        number, asked_at = asked
        found = [self.processes.get(rank, waiting(rank)) for rank in ranks]
        processes = tuple(each for each in found if each is not None)
        return InspectionView(
            number=number,
            age_s=self.now - asked_at,
            processes=None if name in self.mute else processes,
        )

    def _restored_in(self, epoch: int) -> tuple[Generation | None, RestoreSource]:
        """What ranks began from in `epoch`, and its source."""
        if self.undecided:
            return None, RestoreSource.UNKNOWN
        if self.live is not None:
            return Generation(epoch, self.live), RestoreSource.LIVE
        start = self.line_of(epoch).generation
        return start, RestoreSource.NONE if start is None else RestoreSource.LOCAL

    def _is_protected_in(self, epoch: int) -> bool:
        return self.protected is not None and (self.protects or self.protected.epoch == epoch)

    def line_of(self, epoch: int) -> Line:
        if self.line is not None:
            return self.line
        start = self.protected if self.protected and self.protected.epoch < epoch else None
        return Line(generation=start, reason="newest that all hold")

    # --- actions of the control loop ----------------------------------------------------------

    def carry_out(self, action: Action) -> None:
        match action:
            case PublishMembership(membership=membership):
                self.published.append(membership)
                self.cold_then.append(frozenset(self.cold))
                self.sent, self.dropping = membership, -1.0
                for name in self.daemons:
                    self.bring_up_to_date(name)
            case StartAgent(member=member, node=node):
                assert (member, node) not in self.agents, f"{action} although there is one"
                standby = self.standbys.get(node)
                if standby is not None and standby.state is AgentState.RUNNING:
                    del self.standbys[node]
                full = node in self.full
                self.agents[member, node] = AgentView(
                    member=member,
                    node=node,
                    state=AgentState.STARTING if full else AgentState.RUNNING,
                    reason=UNSCHEDULABLE if full else "",
                    message="0/5 nodes are available" if full else "",
                )
            case StopAgent(member=member, node=node):
                assert (member, node) in self.agents, f"{action} although there is none"
                agent = self.agents.pop((member, node))
                if self.lingering:
                    stopping = replace(agent, state=AgentState.STOPPING, exit_code=None)
                    self.agents[member, node] = stopping
            case StartStandby(node=node):
                assert node not in self.standbys, f"{action} although there is one"
                ready = node not in self.cold
                self.standbys[node] = StandbyView(node=node, state=AgentState.RUNNING, ready=ready)
            case StopStandby(node=node):
                assert node in self.standbys, f"{action} although there is none"
                del self.standbys[node]
            case FenceNode(node=node):
                self.fenced.append(node)
            case Inspect(epoch=epoch, number=number):
                for name, daemon in self.daemons.items():
                    there = daemon.membership is not None and daemon.membership.epoch == epoch
                    known = 0 if daemon.inspection is None else daemon.inspection[0]
                    if daemon.alive and there and name not in self.old and known < number:
                        daemon.inspection = (number, self.now)
            case DropJob(up_to_epoch=epoch):
                self.dropped = True
                self.sent, self.dropping = None, inf if epoch is None else epoch
                for name in self.daemons:
                    self.bring_up_to_date(name)

    def bring_up_to_date(self, name: str) -> None:
        """Send the daemon what this control loop has published, or have it drop the job."""
        daemon = self.daemons[name]
        if name in self.unconnected or not daemon.alive:
            return
        if daemon.membership is not None and daemon.membership.epoch <= self.dropping:
            self.drop(name)
        elif self.sent is not None:
            self.deliver(name, self.sent)

    def drop(self, name: str) -> None:
        """Have the daemon free what it holds."""
        self.daemons[name].membership = None

    def deliver(self, name: str, membership: Membership) -> None:
        daemon = self.daemons[name]
        known = daemon.membership
        concerned = known is not None or self._member_on(membership, name) is not None
        newer = known is None or (known.epoch, known.revision) < (
            membership.epoch,
            membership.revision,
        )
        if daemon.alive and concerned and newer:
            if known is None or known.epoch < membership.epoch:
                daemon.lost, daemon.waiting, daemon.exits = set(), False, {}
                daemon.last_lines, daemon.kernel_messages = {}, {}
                daemon.inspection = None
                self.step, self.idle_s = 0, 0.0
            daemon.membership = membership

    # --- faults -------------------------------------------------------------------------------

    @property
    def membership(self) -> Membership:
        assert self.state.membership is not None
        return self.state.membership

    def train(self, step: int, *, protect: bool = True) -> None:
        """Let all ranks complete `step`."""
        self.step, self.idle_s = step, 0.0
        if protect:
            self.protected = Generation(self.membership.epoch, step)

    def _end_reason(self, rank: int, daemon: Daemon, epoch: int) -> EndReason:
        if rank in daemon.exits and self.oom_epochs.get(rank) == epoch:
            return EndReason.OOM_KILLED
        fault = daemon.kernel_messages.get(rank)
        return EndReason.HARDWARE_FAULT if fault else EndReason.UNKNOWN

    def lose_rank(self, rank: int) -> None:
        member = self.membership.member_of(rank)
        self.daemons[self.membership.member(member).node].lost.add(rank)

    def exit_rank(
        self, rank: int, code: int, last_lines: str = "", hardware_fault: str = ""
    ) -> None:
        """Lose the rank, and let its agent report its exit code, its last lines, and what the
        kernel wrote about a fault of hardware before."""
        self.lose_rank(rank)
        member = self.membership.member_of(rank)
        daemon = self.daemons[self.membership.member(member).node]
        daemon.exits[rank], daemon.last_lines[rank] = code, last_lines
        daemon.kernel_messages[rank] = hardware_fault

    def evict(self, member: int, why: str = "EvictionByEvictionAPI") -> None:
        """End the member's agent as the cluster does; its ranks are lost with it."""
        node = self.membership.member(member).node
        agent = self.agents[member, node]
        self.agents[member, node] = replace(agent, state=AgentState.STOPPING, disruption=why)
        self.daemons[node].lost |= set(self.membership.ranks_of(member))

    def vanish(self, member: int) -> None:
        """Delete the agent, as a user may."""
        del self.agents[member, self.membership.member(member).node]

    def reap(self) -> None:
        """Let agents that are stopping end."""
        self.agents = {
            key: agent
            for key, agent in self.agents.items()
            if agent.state is not AgentState.STOPPING
        }

    def kill_daemon(self, name: str) -> None:
        self.daemons[name].alive = False

    def revive_daemon(self, name: str, *, new_memory: bool = False) -> None:
        daemon = self.daemons[name]
        daemon.alive, daemon.port = True, daemon.port + 10
        if new_memory:
            daemon.memory_id += "'"
            daemon.membership = None
        if self.published:
            self.deliver(name, self.published[-1])

    def kill_node(self, name: str) -> None:
        self.kill_daemon(name)
        self.gone.add(name)
        self.agents = {key: agent for key, agent in self.agents.items() if key[1] != name}
        self.standbys.pop(name, None)

    def exit_standby(self, name: str, code: int = 1) -> None:
        ended = replace(self.standbys[name], state=AgentState.EXITED, exit_code=code)
        self.standbys[name] = ended

    def exit_agent(self, member: int, code: int, reason: str = "", message: str = "") -> None:
        key = (member, self.membership.member(member).node)
        self.agents[key] = replace(
            self.agents[key],
            state=AgentState.EXITED,
            exit_code=code,
            reason=reason,
            message=message,
        )

    def finish(self) -> None:
        for member in self.membership.members:
            self.exit_agent(member.index, 0)

    def forget(self) -> None:
        """Restart the control loop without any state."""
        self.state = ControlState()
        self.unconnected = set(self.daemons)
        self.sent, self.dropping = None, -1.0

    def restart(self, document: dict[str, Any] | None = None) -> None:
        """Restart the control loop with its stored state: `document`, or the one that it would
        store now."""
        if document is None:
            document = self.stored()
        self.forget()
        found = from_document(document, now=self.now, wall=WALL + self.now)
        self.state = ControlState.remembering(found)

    def stored(self) -> dict[str, Any]:
        """The document that an adapter stores for the present state."""
        return to_document(self.state, now=self.now, wall=WALL + self.now)

    # --- results for tests --------------------------------------------------------------------

    def nodes_of_members(self) -> list[str]:
        return [member.node for member in self.membership.members]

    def messages(self, reason: str) -> list[str]:
        return [event.message for event in self.events if event.reason == reason]

    def kinds(self) -> Iterator[str]:
        return (type(action).__name__ for action in self.actions)

    def phase(self) -> str:
        return phase(self.decision.conditions)

    def condition(self, kind: str) -> tuple[bool | None, str, str]:
        found = next(c for c in self.decision.conditions if c.type.value == kind)
        return found.status, found.reason, found.message


def waiting(rank: int, line: int = 30) -> InspectedProcess:
    """A process that waits in `all_reduce`, called from `line` of its script."""
    reduce = Frame(
        "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 9, "all_reduce"
    )
    return InspectedProcess(
        rank=rank, state="S", frames=(reduce, Frame("/work/train.py", line, "main"))
    )


def running(job: MoETrainingJob | None = None, *, step: int = 10) -> World:
    """A world whose job trains in epoch 1, and has completed and protected `step`."""
    world = World(job or make_job())
    world.settle(1.0)
    world.train(step)
    world.settle(1.0)
    world.events.clear()
    world.actions.clear()
    return world
