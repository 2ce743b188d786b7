"""A decision in the making: what all rules of the reconciler share.

Pure, like the rules in `reconcile` and `recovering` that use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from holdfast_core.errors import InvalidJobError
from holdfast_core.job_persistence import tier_of
from holdfast_core.jobs import MoETrainingJob, check_storage
from holdfast_core.storage_locations import Locations
from holdfast_core.values import Membership, Tier
from holdfast_operator.lookups import agent_at, detection_s, is_reachable, node_of, silent_s
from holdfast_operator.placement import place_on
from holdfast_operator.views import (
    Action,
    AgentState,
    AgentView,
    ControlState,
    DropJob,
    Event,
    Fail,
    FenceNode,
    NodeView,
    Observed,
    Outcome,
    PublishMembership,
    StopAgent,
    Succeed,
)

INATTENTIVE_HEARTBEATS = 2.0
"""A longer pause between two looks makes silence from before it prove nothing."""


class Draft:
    """A decision in the making. Rules read `job`, `observed`, `now` and `state`, and change it by
    these methods; `state` is replaced, never modified."""

    def __init__(
        self,
        job: MoETrainingJob,
        observed: Observed,
        state: ControlState,
        now: float,
        locations: Locations = None,
    ) -> None:
        self.job, self.observed, self.now, self.locations = job, observed, now, locations
        pause_s = INATTENTIVE_HEARTBEATS * job.spec.failure_policy.detection.heartbeat_seconds
        attentive = now - state.looked_at <= pause_s
        self.state = replace(
            state,
            looked_at=now,
            attentive_since=state.attentive_since if attentive else now,
            epoch=max(state.epoch, *self.epochs_seen(), 0),
        )
        self.actions: list[Action] = []
        self.events: list[Event] = []

    def tell(self, reason: str, message: str, *, warning: bool = False) -> None:
        self.events.append(Event(reason=reason, message=message, warning=warning))

    def epochs_seen(self) -> list[int]:
        views = (node.job for node in self.observed.nodes.values())
        return [view.epoch for view in views if view is not None]

    def candidates(self) -> list[NodeView]:
        """Nodes that could take a member now."""
        return [
            node
            for node in self.observed.nodes.values()
            if node.schedulable
            and not node.gone
            and node.memory_id
            and is_reachable(self.job, node, self.state, self.now)
        ]

    def end(self, outcome: Outcome, reason: str, word: str = "") -> None:
        """The job has ended because of `reason`; `word` is the same in one word."""
        well = outcome is Outcome.COMPLETE
        self.state = replace(
            self.state,
            outcome=outcome,
            outcome_reason=reason,
            outcome_word=word or f"Job{outcome.value}",
            ended_at=self.now,
        )
        self.tell(outcome.value, reason, warning=not well)
        self.stop(self.observed.agents)
        self.actions.append(Succeed(reason=reason) if well else Fail(reason=reason))
        self.actions.append(DropJob())

    def stop(self, agents: Iterable[AgentView]) -> None:
        """Stop agents; nobody ends those on a lost node, so it is fenced until they are gone."""
        stopped = list(agents)
        for name in sorted({agent.node for agent in stopped}):
            if self._is_lost(name):
                self.fence(name)
        self.actions.extend(
            StopAgent(member=agent.member, node=agent.node)
            for agent in stopped
            if agent.state is not AgentState.STOPPING
        )

    def fence(self, node: str) -> None:
        action = FenceNode(node=node)
        if action not in self.actions:
            self.actions.append(action)

    def _is_lost(self, name: str) -> bool:
        node = self.observed.nodes.get(name)
        if node is None or node.gone:
            return True
        return silent_s(node, self.state, self.now) >= detection_s(self.job)

    def publish(self, membership: Membership) -> None:
        changed = membership.epoch != self.state.epoch
        if changed and membership.tier is not None:
            tier = replace(membership.tier, persisted=self._put_into(membership.tier.uri))
            membership = replace(membership, tier=tier)
        self.state = replace(self.state, membership=membership, epoch=membership.epoch)
        if changed:
            self.state = replace(
                self.state,
                started_from=None,
                confirmed_epoch=membership.epoch,
                began_at=self.now,
                codes_awaited_since=None,
                carried=frozenset(
                    place.index
                    for place in membership.members
                    if (agent := agent_at(self.observed, place)) is not None
                    and agent.state is AgentState.RUNNING
                ),
            )
        self.actions.append(PublishMembership(membership=membership))

    def _put_into(self, uri: str) -> str:
        stored = self.state.stored
        return str(stored) if stored is not None and self.state.stored_in == uri else ""

    def _tier(self, membership: Membership) -> Tier | None:
        """As the job says now, where it may. The copy that it was to begin from counts until it has
        begun."""
        tier, known = tier_of(self.job.spec.persistence, self.job.spec.restore), membership.tier
        if self.storage_refusal():
            return known
        if tier is None or (self.state.started_from is None and known and known.restore_from):
            return tier
        return replace(tier, restore_from="")

    def storage_refusal(self) -> str:
        """Why the job may not persist to where it says now; empty when it may."""
        try:
            check_storage(self.job, self.locations)
        except InvalidJobError as error:
            return str(error)
        return ""

    def publish_next(self, membership: Membership, moved: dict[int, NodeView]) -> Membership:
        """Publish the next epoch, with `moved` members on new nodes and all others where their
        daemons say that they are now."""
        places = {
            place.index: moved.get(place.index) or node_of(self.observed, place)
            for place in membership.members
        }
        renewed = {
            place.index
            for place in membership.members
            if places[place.index].memory_id != place.memory_id
        }
        self.state = replace(self.state, renewed=self.state.renewed | renewed)
        following = replace(
            membership,
            epoch=self.state.epoch + 1,
            revision=0,
            members=tuple(place_on(index, node) for index, node in sorted(places.items())),
            tier=self._tier(membership),
        )
        self.publish(following)
        return following
