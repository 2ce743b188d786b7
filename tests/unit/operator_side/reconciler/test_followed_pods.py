"""Jobs whose pods another controller makes: they are followed, and never touched."""

from __future__ import annotations

import pytest
from virtual_world import World, make_job

from holdfast_core.snapshots.generations import Generation
from holdfast_operator.reconciler.observe.views import (
    AgentState,
    AgentView,
    EventReason,
    PublishMembership,
)

NODES = ["n3", "n1", "n0", "n2"]
"""Node of each pod, by its number."""


class Pods(World):
    """A job of four pods, which tests place; none belongs to Holdfast."""

    def __init__(self) -> None:
        super().__init__(make_job(spares=0, spec={"trainer": {"external": True}}), nodes=6)

    def put(self, nodes: list[str], state: AgentState = AgentState.RUNNING) -> None:
        """Place the pods: number → node, empty where there is none."""
        known = self.state.membership
        on = {} if known is None else {m.node: m.index for m in known.members}
        self.agents = {
            (on.get(node, -1), node): AgentView(
                member=on.get(node, -1), node=node, state=state, exit_code=None, number=number
            )
            for number, node in enumerate(nodes)
            if node
        }

    def begin(self) -> None:
        """Train, with a protected step."""
        self.put(NODES)
        self.settle(2)
        self.put(NODES)
        self.train(7)
        self.settle(1)
        assert self.state.resumed_epoch == 1

    def follow(self, nodes: list[str]) -> None:
        """Place the pods, and look until all is done."""
        self.put(nodes)
        self.settle(8)
        self.put(nodes)
        self.settle(1)

    @property
    def order(self) -> list[str]:
        """Nodes of the membership, in torch's order."""
        members = self.membership.order or self.membership.world.members
        return [self.membership.member(member).node for member in members]

    @property
    def touched(self) -> list[object]:
        return [a for a in self.actions if not isinstance(a, PublishMembership)]


@pytest.fixture
def world() -> Pods:
    return Pods()


@pytest.fixture
def training() -> Pods:
    made = Pods()
    made.begin()
    return made


def test_members_are_where_the_pods_are_in_the_order_of_their_numbers(training: Pods) -> None:
    assert [member.node for member in training.membership.members] == NODES
    assert training.membership.external and not training.touched


@pytest.mark.parametrize(
    ("nodes", "waiting"),
    [
        (["n3", "", "n0", ""], "2 of 4 pods are on a node with a daemon; waiting for pods 1, 3"),
        (["n3", "n1", "n0", "gone"], "waiting for pods 3, which another controller makes"),
    ],
)
def test_nothing_begins_before_each_pod_has_a_node(
    world: Pods, nodes: list[str], waiting: str
) -> None:
    world.put(nodes)
    world.settle(2)
    assert not world.published and waiting in world.decision.reason


def test_pods_that_share_a_node_or_lack_a_number_are_named(world: Pods) -> None:
    world.agents = {
        (-1 - number, node): AgentView(
            member=-1, node=node, state=AgentState.RUNNING, number=number, message="pod a"
        )
        for number, node in enumerate(["n1", "n1", "n0"])
    }
    nameless = AgentView(
        member=-1, node="n2", state=AgentState.RUNNING, number=-1, message="pod train-x"
    )
    world.agents[-9, "n2"] = nameless
    world.settle(1)
    assert "pods 0, 1 are all on node n1: give them a podAntiAffinity" in world.decision.reason
    assert "pod train-x has no number, and a label must give" in world.decision.reason


def test_a_lost_rank_begins_the_next_epoch_and_no_pod_is_touched(training: Pods) -> None:
    training.lose_rank(2)
    training.settle(2)
    assert training.membership.epoch == 2 and not training.touched
    assert training.membership.since == 0 and training.state.counted == 1


def test_a_world_that_waits_outside_begins_the_next_epoch(training: Pods) -> None:
    training.daemons["n0"].waiting = True
    training.settle(2)
    assert training.membership.epoch == 2 and not training.touched


def test_a_pod_that_is_away_is_waited_for_however_long(training: Pods) -> None:
    training.lose_rank(1)
    training.put(["n3", "", "n0", "n2"])
    training.settle(3600, step_s=30)
    assert training.membership.epoch == 1 and training.state.outcome is None
    assert "waiting for pods 1, which another controller makes" in training.decision.reason
    training.follow(NODES)
    assert training.membership.epoch == 2 and training.order == NODES


def test_a_pod_on_another_node_takes_its_member_there(training: Pods) -> None:
    training.kill_node("n1")
    training.put(["n3", "", "n0", "n2"])
    training.settle(10)
    assert training.membership.epoch == 1
    training.follow(["n3", "n5", "n0", "n2"])
    assert training.order == ["n3", "n5", "n0", "n2"]
    assert training.membership.epoch == 2 and training.membership.since == 0
    assert training.membership.member(1).node == "n5" and not training.touched


def test_pods_that_change_places_change_the_order_and_no_member_moves(training: Pods) -> None:
    before = training.membership
    training.lose_rank(0)
    training.follow(["n1", "n3", "n0", "n2"])
    after = training.membership
    assert training.order == ["n1", "n3", "n0", "n2"]
    assert [member.node for member in after.members] == NODES
    assert after.since == after.epoch == 2 and after.past == (before.world,)
    assert after.world_of(Generation(1, 7)) == before.world


def test_places_change_and_a_node_is_lost_at_once(training: Pods) -> None:
    training.kill_node("n0")
    training.follow(["n2", "n4", "n1", "n3"])
    assert training.order == ["n2", "n4", "n1", "n3"]
    assert training.membership.member(2).node == "n4"
    assert [training.membership.member(m).node for m in (0, 1, 3)] == ["n3", "n1", "n2"]


def test_a_daemon_that_is_silent_for_a_while_changes_nothing(training: Pods) -> None:
    training.kill_daemon("n1")
    training.settle(30)
    training.revive_daemon("n1")
    training.settle(2)
    assert training.membership.epoch == 1 and not training.touched


def test_a_hang_is_left_to_who_started_the_processes(training: Pods) -> None:
    training.idle_s = 1e6
    training.settle(5)
    assert training.membership.epoch == 1


def test_the_job_is_complete_when_all_pods_have_succeeded(training: Pods) -> None:
    training.finish()
    training.settle(1)
    assert [e.reason for e in training.events][-1] == EventReason.COMPLETE
    assert training.dropped
    assert {type(action).__name__ for action in training.touched} <= {"DropJob", "Succeed"}


def test_a_pod_that_its_controller_does_not_make_again_is_waited_for(training: Pods) -> None:
    training.lose_rank(1)
    training.put(["n3", "", "n0", "n2"])
    training.settle(120.0)
    assert training.phase() == "Waiting" and training.membership.epoch == 1
    assert "waiting for pods 1, which another controller makes" in training.decision.reason
    assert training.messages("NoReplacement") == []
    training.follow(NODES)
    assert (training.phase(), training.membership.epoch) == ("Running", 2)


def test_pods_that_have_moved_do_not_have_silent_memory_given_up() -> None:
    """Two nodes of a group are silent: their controller starts the pods elsewhere, and what is
    protected is where they were."""
    world = Pods()
    world.begin()
    for name in ("n0", "n1"):
        world.kill_daemon(name)
    world.follow(["n3", "n4", "n5", "n2"])
    world.settle(200)
    assert world.membership.epoch == 1 and world.state.outcome is None
    assert "nothing else holds what their memory may hold" in world.decision.reason
