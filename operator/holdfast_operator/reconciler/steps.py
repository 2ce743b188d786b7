"""The look that all rules of the reconciler are given, and the step that they return.

Pure, like the rules themselves. A rule is given the look and the state that the rule before
returned, and returns a `Step`; `fold` applies rules one after the other until one of them ends the
look.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import TypeVarTuple, Unpack

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.locations import Locations
from holdfast_core.job.parsing import MoETrainingJob, check_storage
from holdfast_core.job.persistence import tier_of
from holdfast_core.snapshots.membership import Membership, Tier
from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.observe.evidence import RETURN_S
from holdfast_operator.reconciler.observe.lookups import (
    agent_at,
    detection_s,
    is_reachable,
    node_of,
    silent_s,
)
from holdfast_operator.reconciler.observe.views import (
    Action,
    AgentState,
    AgentView,
    ControlState,
    DropJob,
    Event,
    EventReason,
    Fail,
    FenceNode,
    NodeView,
    Observed,
    PublishMembership,
    StopAgent,
    Succeed,
)
from holdfast_operator.reconciler.placement import following, member_at

INATTENTIVE_HEARTBEATS = 2.0
"""Pause between two looks, in heartbeats, beyond which silence from before proves nothing."""

_Given = TypeVarTuple("_Given")


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """Input of every rule at one look; no rule changes it."""

    job: MoETrainingJob
    observed: Observed
    now: float
    locations: Locations = None
    """Where the job may persist to."""
    standbys: int = 0
    """Number of spares on which an agent shall wait."""

    def begin(self, state: ControlState) -> ControlState:
        """State that the first rule is given."""
        heartbeat_s = self.job.spec.failure_policy.detection.heartbeat_seconds
        attentive = self.now - state.looked_at <= INATTENTIVE_HEARTBEATS * heartbeat_s
        views = (node.job for node in self.observed.nodes.values())
        seen = [view.epoch for view in views if view is not None]
        return replace(
            state,
            looked_at=self.now,
            attentive_since=state.attentive_since if attentive else self.now,
            epoch=max(state.epoch, *seen, 0),
        )

    def candidates(self, state: ControlState) -> list[NodeView]:
        """Nodes that could take a member now."""
        return [
            node
            for node in self.observed.nodes.values()
            if node.schedulable
            and not node.gone
            and node.memory_id
            and is_reachable(self.job, node, state, self.now)
        ]

    def may_return(self, node: NodeView, state: ControlState) -> bool:
        """Whether a node takes agents, and is not silent for so long that it counts as lost."""
        patience_s = detection_s(self.job) + (RETURN_S if node.returning else 0.0)
        silence_s = silent_s(node, state, self.now)
        return node.schedulable and not node.gone and silence_s < patience_s

    def is_lost(self, name: str, state: ControlState) -> bool:
        """Whether nothing on the node can be reached any more."""
        node = self.observed.nodes.get(name)
        if node is None or node.gone:
            return True
        return silent_s(node, state, self.now) >= detection_s(self.job)

    def storage_refusal(self) -> str:
        """Why the job may not persist to the location in its spec; empty when it may."""
        try:
            check_storage(self.job, self.locations)
        except InvalidJobError as error:
            return str(error)
        return ""


@dataclass(frozen=True, slots=True)
class Step:
    """Result of a rule."""

    state: ControlState
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    waiting: str | None = None
    """None leads on to the next rule. A text ends the look: what is waited for, or empty when that
    is nothing."""

    def then(self, following: Step) -> Step:
        """This step followed by `following`, which began from this one's state."""
        return Step(
            state=following.state,
            actions=self.act(*following.actions).actions,
            events=(*self.events, *following.events),
            waiting=following.waiting,
        )

    def act(self, *actions: Action) -> Step:
        """This step with more actions; a node is fenced once."""
        if not actions:  # as most of the steps of a look
            return self
        new = (a for a in actions if not (isinstance(a, FenceNode) and a in self.actions))
        return replace(self, actions=(*self.actions, *new))

    def post(self, reason: EventReason, message: str, *, warning: bool = False) -> Step:
        """This step with one more event."""
        event = Event(reason=reason, message=message, warning=warning)
        return replace(self, events=(*self.events, event))

    def wait(self, text: str = "") -> Step:
        """This step as one that ends the look."""
        return replace(self, waiting=text)


def fold(
    rules: Iterable[Callable[[Look, ControlState, Unpack[_Given]], Step]],
    look: Look,
    state: ControlState,
    *given: *_Given,
) -> Step:
    """Combine the steps of `rules`: each begins with the state that the one before returned, until
    one ends the look."""
    step = Step(state)
    for rule in rules:
        step = step.then(rule(look, step.state, *given))
        if step.waiting is not None:
            break
    return step


def end(look: Look, state: ControlState, outcome: Outcome, reason: str, word: str = "") -> Step:
    """End the job because of `reason`; `word` is the same in one word. What daemons hold of a job
    that has failed stays there for a while (`keeping`)."""
    well = outcome is Outcome.COMPLETE
    keeps = not well and look.job.spec.failure_policy.keep_failed_seconds > 0
    kept = keeps and state.membership is not None
    ended = replace(
        state,
        outcome=outcome,
        outcome_reason=reason,
        outcome_word=word or f"Job{outcome.value}",
        ended_at=look.now,
        kept=kept,
        recovering=False,
        no_replacement_since=None,
        joining=(),
        replaced=frozenset(),
    )
    return (
        stop(look, ended, look.observed.agents)
        .act(
            Succeed(reason=reason) if well else Fail(reason=reason), *(() if kept else (DropJob(),))
        )
        .post(EventReason(outcome), reason, warning=not well)
        .wait()
    )


def stop(look: Look, state: ControlState, agents: Iterable[AgentView]) -> Step:
    """Stop agents. Nothing can end those on a lost node, so it is fenced until they are gone."""
    stopped = list(agents)
    names = sorted({agent.node for agent in stopped})
    return Step(
        state,
        (
            *(FenceNode(node=name) for name in names if look.is_lost(name, state)),
            *(
                StopAgent(member=agent.member, node=agent.node)
                for agent in stopped
                if agent.state is not AgentState.STOPPING
            ),
        ),
    )


def publish(look: Look, state: ControlState, membership: Membership) -> Step:
    """Make `membership` known to its daemons; a newer epoch than the state's begins now."""
    if membership.epoch == state.epoch:
        current = replace(state, membership=membership)
        return Step(current, (PublishMembership(membership=membership),))
    if membership.tier is not None:
        tier = replace(membership.tier, persisted=_put_into(state, membership.tier.uri))
        membership = replace(membership, tier=tier)
    begun = replace(
        state,
        membership=membership,
        epoch=membership.epoch,
        started_from=None,
        confirmed_epoch=membership.epoch,
        began_at=look.now,
        codes_awaited_since=None,
        carried=frozenset(
            member.index
            for member in membership.members
            if (agent := agent_at(look.observed, member)) is not None
            and agent.state is AgentState.RUNNING
        ),
    )
    return Step(begun, (PublishMembership(membership=membership),))


def _put_into(state: ControlState, uri: str) -> str:
    return str(state.stored) if state.stored is not None and state.stored_in == uri else ""


def publish_next(
    look: Look,
    state: ControlState,
    membership: Membership,
    moved: dict[int, NodeView],
    failed: Collection[int],
    leaving: Collection[int] = (),
    order: tuple[int, ...] = (),
) -> Step:
    """Publish the next epoch: without the members that are `leaving`, with `moved` members on new
    nodes, those that join among them, and all others where their daemons report that they are now.
    Workers of `moved` and `failed` members are not kept."""
    nodes = moved | {
        member.index: moved.get(member.index) or node_of(look.observed, member)
        for member in membership.members
        if member.index not in leaving
    }
    memory = {member.index: member.memory_id for member in membership.members}
    renewed = {index for index, node in nodes.items() if node.memory_id != memory.get(index)}
    members = tuple(member_at(index, node) for index, node in sorted(nodes.items()))
    epoch = state.epoch + 1
    after = following(look.job, membership, members, epoch=epoch, saved=state.saved, order=order)
    after = replace(
        after,
        tier=_tier(look, state, membership),
        restarting=frozenset(moved).union(failed).difference(leaving),
    )
    resized = after.since != membership.since
    begun = replace(
        state,
        renewed=(state.renewed | renewed) & nodes.keys(),
        resized_at=look.now if resized else state.resized_at,
    )
    return publish(look, begun, after)


def _tier(look: Look, state: ControlState, membership: Membership) -> Tier | None:
    """Durable tier that the job asks for now, if that is allowed, or else the present one. The copy
    to restore from is kept until the job has begun from it."""
    tier, known = tier_of(look.job.spec.persistence, look.job.spec.restore), membership.tier
    if look.storage_refusal():
        return known
    if tier is None or (state.started_from is None and known and known.restore_from):
        return tier
    return replace(tier, restore_from="")
