"""The input and the result of every rule of the reconciler. Pure, like the rules.

Each rule receives the `Observation` of this turn and the state that the previous rule returned, and
returns a `RuleResult`. `run_rules` runs rules in order until one of them ends the turn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import TypeVarTuple, Unpack

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.locations import Locations
from holdfast_core.job.parsing import FailureRule, MoETrainingJob, check_storage
from holdfast_core.job.persistence import tier_of
from holdfast_core.snapshots.membership import Membership, Tier
from holdfast_operator.reconciler.observe.counters import Outcome
from holdfast_operator.reconciler.observe.evidence import RETURN_S, Cause
from holdfast_operator.reconciler.observe.lookups import (
    agent_at,
    detection_s,
    is_reachable,
    node_of,
    silent_s,
)
from holdfast_operator.reconciler.observe.protection import ParityGroups
from holdfast_operator.reconciler.observe.views import (
    Action,
    AgentState,
    AgentView,
    BlamedNode,
    ClusterView,
    ControlState,
    DropJob,
    Event,
    EventReason,
    Fail,
    FenceNode,
    NodeView,
    PublishMembership,
    StopAgent,
    Succeed,
)
from holdfast_operator.reconciler.placement import (
    Moves,
    avoided_in_words,
    following,
    member_at,
    unrated,
)

INATTENTIVE_HEARTBEATS = 2.0
"""Pause between two turns, in heartbeats. After a longer one, earlier silence proves nothing."""

_Given = TypeVarTuple("_Given")


class PodStrategy(ABC):
    """How the pods of a job come into being, with all that follows for the rules.

    `reconcile` chooses one for each turn. Rules call it through `Observation.pods`, and never ask
    which one it is.
    """

    @abstractmethod
    def choose_nodes(
        self, observation: Observation, state: ControlState
    ) -> tuple[list[NodeView], str]:
        """Choose the nodes of the first membership, in the order of its members. The text says what
        the placement waits for; it is empty when there is a node for every member."""

    @abstractmethod
    def choose_moves(
        self,
        observation: Observation,
        state: ControlState,
        membership: Membership,
        causes: tuple[Cause, ...],
        groups: ParityGroups,
    ) -> tuple[tuple[Cause, ...], list[FailureRule], Moves]:
        """Choose which of `causes` call for a new epoch, and the moves of members in that epoch.
        Returns those causes, the failure rule of each, and the moves."""

    @abstractmethod
    def missing_pods(self, observation: Observation, state: ControlState) -> str:
        """Say which pods are missing for the next epoch to begin; empty when none is."""

    @abstractmethod
    def select_actions(self, actions: tuple[Action, ...]) -> tuple[Action, ...]:
        """Select the actions that Holdfast may carry out."""

    @abstractmethod
    def needs_placeholders(self, job: MoETrainingJob) -> bool:
        """Whether autoscalers learn only from placeholders which nodes the job lacks."""

    @property
    @abstractmethod
    def stops_with_job(self) -> bool:
        """Whether the pods of a job are stopped when it fails, so that resuming it starts new
        ones."""

    @property
    @abstractmethod
    def restart_in_words(self) -> str:
        """Text on how the processes of members restart that stay on their nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """Input of every rule in one turn; no rule changes it."""

    job: MoETrainingJob
    cluster: ClusterView
    now: float
    locations: Locations = None
    """Where the job may persist to."""
    standbys: int = 0
    """Number of spares on which an agent shall wait."""
    pods: PodStrategy
    """How the job's pods come into being."""

    def begin(self, state: ControlState) -> ControlState:
        """Return the state for the first rule."""
        heartbeat_s = self.job.spec.failure_policy.detection.heartbeat_seconds
        attentive = self.now - state.looked_at <= INATTENTIVE_HEARTBEATS * heartbeat_s
        views = (node.job for node in self.cluster.nodes.values())
        seen = [view.epoch for view in views if view is not None]
        announced = (
            node.name
            for node in self.cluster.nodes.values()
            if node.disruption
            or (node.name in state.announced and (node.gone or not node.connected))
        )
        return replace(
            state,
            announced=frozenset(announced),
            looked_at=self.now,
            attentive_since=state.attentive_since if attentive else self.now,
            epoch=max(state.epoch, *seen, 0),
        )

    def unrated(self) -> Observation:
        """The same, as if no node had ever failed."""
        nodes = {node.name: node for node in unrated(self.cluster.nodes.values())}
        return replace(self, cluster=replace(self.cluster, nodes=nodes))

    def candidates(self, state: ControlState) -> list[NodeView]:
        """Nodes that could take a member now."""
        return [
            node
            for node in self.cluster.nodes.values()
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
        node = self.cluster.nodes.get(name)
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
class RuleResult:
    """Result of a rule."""

    state: ControlState
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    blamed: tuple[BlamedNode, ...] = ()
    """Failures that count against nodes."""
    waiting: str | None = None
    """Why the turn ends here: what the job waits for, or an empty text if it waits for nothing.
    None lets the next rule run."""

    def then(self, following: RuleResult) -> RuleResult:
        """Append `following`, the result of a rule that began with this result's state."""
        return RuleResult(
            state=following.state,
            actions=self.act(*following.actions).actions,
            events=(*self.events, *following.events),
            blamed=(*self.blamed, *following.blamed),
            waiting=following.waiting,
        )

    def act(self, *actions: Action) -> RuleResult:
        """Add actions; a node is fenced only once."""
        if not actions:  # as in most results
            return self
        new = (a for a in actions if not (isinstance(a, FenceNode) and a in self.actions))
        return replace(self, actions=(*self.actions, *new))

    def post(self, reason: EventReason, message: str, *, warning: bool = False) -> RuleResult:
        """Add an event."""
        event = Event(reason=reason, message=message, warning=warning)
        return replace(self, events=(*self.events, event))

    def blame(self, *failures: BlamedNode) -> RuleResult:
        """Add failures that count against nodes."""
        return replace(self, blamed=(*self.blamed, *failures)) if failures else self

    def wait(self, text: str = "") -> RuleResult:
        """End the turn with this result."""
        return replace(self, waiting=text)


def run_rules(
    rules: Iterable[Callable[[Observation, ControlState, Unpack[_Given]], RuleResult]],
    observation: Observation,
    state: ControlState,
    *given: *_Given,
) -> RuleResult:
    """Run `rules` in order, each with the state that the previous one returned, until one of them
    ends the turn; return their combined result. `given` is passed to every rule."""
    result = RuleResult(state)
    for rule in rules:
        result = result.then(rule(observation, result.state, *given))
        if result.waiting is not None:
            break
    return result


def end(
    observation: Observation, state: ControlState, outcome: Outcome, reason: str, word: str = ""
) -> RuleResult:
    """End the job because of `reason`; `word` is the same in one word. What daemons hold of a job
    that has failed stays there for a while (`keeping`)."""
    well = outcome is Outcome.COMPLETE
    keeps = not well and observation.job.spec.failure_policy.keep_failed_seconds > 0
    kept = keeps and state.membership is not None
    ended = replace(
        state,
        outcome=outcome,
        outcome_reason=reason,
        outcome_word=word or f"Job{outcome.value}",
        ended_at=observation.now,
        kept=kept,
        recovering=False,
        no_replacement_since=None,
        joining=(),
        replaced=frozenset(),
    )
    return (
        stop(observation, ended, observation.cluster.agents)
        .act(
            Succeed(reason=reason) if well else Fail(reason=reason), *(() if kept else (DropJob(),))
        )
        .post(EventReason(outcome), reason, warning=not well)
        .wait()
    )


def note_avoided(
    observation: Observation,
    state: ControlState,
    chosen: Iterable[NodeView],
    otherwise: Iterable[NodeView],
) -> RuleResult:
    """Emit an event when nodes were chosen because others have failed.

    Args:
        otherwise: nodes that would have been chosen if no node had ever failed.
    """
    rated = observation.cluster.nodes
    names = {node.name for node in chosen}
    before = {node.name for node in otherwise}
    avoided = [rated[name] for name in sorted(before - names)]
    if not avoided:
        return RuleResult(state)
    instead = [rated[name] for name in sorted(names - before)]
    text = avoided_in_words(instead, avoided)
    return RuleResult(state).post(EventReason.NODE_AVOIDED, text)


def stop(observation: Observation, state: ControlState, agents: Iterable[AgentView]) -> RuleResult:
    """Stop agents. Nothing can end those on a lost node, so it is fenced until they are gone."""
    stopped = list(agents)
    names = sorted({agent.node for agent in stopped})
    return RuleResult(
        state,
        (
            *(FenceNode(node=name) for name in names if observation.is_lost(name, state)),
            *(
                StopAgent(member=agent.member, node=agent.node)
                for agent in stopped
                if agent.state is not AgentState.STOPPING
            ),
        ),
    )


def publish(observation: Observation, state: ControlState, membership: Membership) -> RuleResult:
    """Make `membership` known to its daemons; a newer epoch than the state's begins now."""
    if membership.epoch == state.epoch:
        current = replace(state, membership=membership)
        return RuleResult(current, (PublishMembership(membership=membership),))
    membership = replace(membership, uid=observation.job.metadata.uid)
    if membership.tier is not None:
        tier = replace(membership.tier, persisted=_put_into(state, membership.tier.uri))
        membership = replace(membership, tier=tier)
    begun = replace(
        state,
        membership=membership,
        epoch=membership.epoch,
        started_from=None,
        confirmed_epoch=membership.epoch,
        began_at=observation.now,
        codes_awaited_since=None,
        carried=frozenset(
            member.index
            for member in membership.members
            if (agent := agent_at(observation.cluster, member)) is not None
            and agent.state is AgentState.RUNNING
        ),
    )
    return RuleResult(begun, (PublishMembership(membership=membership),))


def _put_into(state: ControlState, uri: str) -> str:
    return str(state.stored) if state.stored is not None and state.stored_in == uri else ""


def publish_next(
    observation: Observation,
    state: ControlState,
    membership: Membership,
    moved: dict[int, NodeView],
    failed: Collection[int],
    leaving: Collection[int] = (),
    order: tuple[int, ...] = (),
    *,
    failed_ranks: Collection[int] = (),
) -> RuleResult:
    """Publish the next epoch: without the members that are `leaving`, with `moved` members on new
    nodes, those that join among them, and all others where their daemons report that they are now.
    Workers of `moved` and `failed` members are not kept, and neither are `failed_ranks`."""
    # The members of the epoch, and those among them whose memory is new.
    nodes = moved | {
        member.index: moved.get(member.index) or node_of(observation.cluster, member)
        for member in membership.members
        if member.index not in leaving
    }
    memory = {member.index: member.memory_id for member in membership.members}
    renewed = {index for index, node in nodes.items() if node.memory_id != memory.get(index)}
    members = tuple(member_at(index, node) for index, node in sorted(nodes.items()))
    # Its membership: another world, with parity groups of its own, if members changed.
    epoch = state.epoch + 1
    after = following(
        observation.job, membership, members, epoch=epoch, saved=state.saved, order=order
    )
    restarting = frozenset(moved).union(failed).difference(leaving)
    after = replace(
        after,
        tier=_tier(observation, state, membership),
        restarting=restarting,
        restarting_ranks=frozenset(
            rank
            for rank in failed_ranks
            if membership.member_of(rank) not in restarting.union(leaving)
        ),
    )
    resized = after.since != membership.since
    begun = replace(
        state,
        renewed=(state.renewed | renewed) & nodes.keys(),
        resized_at=observation.now if resized else state.resized_at,
    )
    return publish(observation, begun, after)


def _tier(observation: Observation, state: ControlState, membership: Membership) -> Tier | None:
    """Durable tier that the job asks for now, if that is allowed, or else the present one. The copy
    to restore from is kept until the job has begun from it."""
    tier, known = (
        tier_of(observation.job.spec.persistence, observation.job.spec.restore),
        membership.tier,
    )
    if observation.storage_refusal():
        return known
    if tier is None or (state.started_from is None and known and known.restore_from):
        return tier
    return replace(tier, restore_from="")
