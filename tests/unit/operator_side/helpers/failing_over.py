"""A world whose control loop dies at any instant, with an account of what memory still holds.

The next control loop has the stored status, and hears the daemons one after the other, in any
order, some of them late. The account follows from the faults alone, and from what daemons are told:
a daemon that gets a membership without a member on its node frees what it holds.
"""

from __future__ import annotations

import random
from typing import Any

from msgspec import structs
from virtual_world import World, make_job

from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.snapshots.generations import Generation, Line
from holdfast_core.snapshots.membership import Membership
from holdfast_operator.kube.job.status import essence
from holdfast_operator.reconciler.observe.views import AgentState, Decision, JobView, NodeView
from holdfast_operator.reconciler.reconcile import reconcile

STATUS_S = 2.0
"""How long what may wait is not stored (`StatusWriter`)."""
NODES = 5
LAST_DIAL_S = 45.0
"""A daemon connects to a new control loop after this at the latest: far more than it is given when
nothing is remembered, or to be replaced."""


class FailingOver(World):
    """A world of five nodes with one job, whose control loop dies."""

    def __init__(self, job: MoETrainingJob) -> None:
        self.held: dict[str, Generation] = {}
        """Node → the newest generation that its memory holds its member's part of."""
        self.document: dict[str, Any] = {}
        """The status that is stored."""
        self.stored_at = 0.0
        self.spares = NODES - job.spec.nodes
        super().__init__(job, NODES)

    # --- what memory holds --------------------------------------------------------------------

    def train(self, step: int, *, protect: bool = True) -> None:
        super().train(step, protect=protect)
        if protect and self.protected is not None:
            self.held = dict.fromkeys(self.nodes_of_members(), self.protected)

    def trains(self) -> bool:
        """Whether all members are in the newest epoch, and their agents run."""
        known = {self.daemons[member.node].membership for member in self.membership.members}
        agents = [self.agents.get((m.index, m.node)) for m in self.membership.members]
        at_work = all(a is not None and a.state is AgentState.RUNNING for a in agents)
        return at_work and known == {self.membership} == {self.published[-1]}

    def drop(self, name: str) -> None:
        super().drop(name)
        self.held.pop(name, None)

    def deliver(self, name: str, membership: Membership) -> None:
        super().deliver(name, membership)
        if self.daemons[name].membership is membership and membership.member_on(name) is None:
            self.drop(name)

    def rebuild(self) -> None:
        """Let the members of the newest epoch have again what was protected, if that can be."""
        newest = self.published[-1] if self.published else None
        if newest is None or self.protected is None or not self.is_kept(newest):
            return
        if all(self.daemons[m.node].membership == newest for m in newest.members):
            self.held |= dict.fromkeys((m.node for m in newest.members), self.protected)

    def lose_memory(self, name: str) -> None:
        """Let the node's memory go with its power; it comes back at once."""
        self.held.pop(name, None)
        self.revive_daemon(name, new_memory=True)

    def kill_node(self, name: str) -> None:
        super().kill_node(name)
        self.held.pop(name, None)

    def missing(self, membership: Membership) -> int:
        """How many members of the membership lack what is protected, in the worst parity group."""
        lacks = {m.index for m in membership.members if self.held.get(m.node) != self.protected}
        return max(len(lacks.intersection(group)) for group in membership.groups)

    def is_kept(self, membership: Membership) -> bool:
        """Whether what is protected can be restored in the membership, from memory."""
        losses = self.job.spec.redundancy.losses
        return self.protected is None or self.missing(membership) <= losses

    def line_of(self, epoch: int) -> Line:
        found = super().line_of(epoch)
        membership = self.published[-1] if self.published else None
        if membership is None or found.generation is None or self.is_kept(membership):
            return found
        return Line(generation=None, reason="no daemon holds a snapshot")

    def job_view(self, name: str) -> JobView | None:
        view = super().job_view(name)
        if view is None or self.held.get(name) is None:
            return view if view is None else structs.replace(view, protected=None, complete=None)
        whole = structs.replace(view, complete=self.held[name])
        return whole if self.job.spec.redundancy.losses else structs.replace(whole, protected=None)

    def node_view(self, name: str) -> NodeView:
        found = super().node_view(name)
        # As on Kubernetes: an object tells that the node takes pods, and nothing of its memory.
        return structs.replace(found, schedulable=name not in self.cordoned)

    # --- the control loop, and its end --------------------------------------------------------

    def look(self) -> Decision:
        self.beat()
        self.rebuild()
        self.store(self.decide())
        return self.act()

    def decide(self) -> Decision:
        """Decide, and do nothing yet."""
        self.decision = reconcile(self.job, self.observed(), self.state, self.now)
        self.state = self.decision.state
        self.events.extend(self.decision.events)
        self.record_failures(self.decision)
        return self.decision

    def store(self, decision: Decision) -> None:
        """Store the status, as its writer does: at once only if what must not be lost changed."""
        found = self.stored()
        urgent = essence({"counters": found}) != essence({"counters": self.document})
        if urgent or self.now - self.stored_at >= STATUS_S:
            self.document, self.stored_at = found, self.now

    def act(self, count: int | None = None, reached: frozenset[str] | None = None) -> Decision:
        """Carry out the first `count` actions; messages come to the daemons in `reached`."""
        for action in self.decision.actions[:count]:
            self.actions.append(action)
            cut_off = set() if reached is None else set(self.daemons) - reached
            self.unconnected |= cut_off
            self.carry_out(action)
            self.unconnected -= cut_off
        return self.decision

    def fail_over(self, dials_s: dict[str, float]) -> None:
        """Let another control loop begin, which each daemon dials after its seconds."""
        self.dials_at = {name: self.now + after_s for name, after_s in dials_s.items()}
        self.restart(self.document)

    def die_in_a_look(self, rng: random.Random) -> None:
        """Let the control loop decide, store the status, and die among its actions."""
        self.beat()
        self.store(self.decide())
        reached = frozenset(name for name in self.daemons if rng.random() < 0.5)
        self.act(rng.randint(0, len(self.decision.actions)), reached)


def small_job(nodes: int, redundancy: str, **spec: Any) -> MoETrainingJob:
    """A job of a part of the cluster, which waits for lost nodes as long as it takes."""
    rules = [{"when": "NoReplacement", "action": "Fail", "afterSeconds": 3600}]
    return make_job(nodes, spares=0, redundancy=redundancy, rules=rules, spec=spec)


def dial_times(rng: random.Random) -> dict[str, float]:
    """Seconds after which each daemon dials, most of them soon."""
    return {
        f"n{i}": rng.choice((0.0, 0.5, 3.0, rng.uniform(0.0, LAST_DIAL_S))) for i in range(NODES)
    }
