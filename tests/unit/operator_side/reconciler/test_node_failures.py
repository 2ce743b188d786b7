"""Nodes that have failed: which failures count against them, and who avoids them afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest
from failing_over import FailingOver
from msgspec import structs
from virtual_world import WALL, Daemon, World, make_job, running

from holdfast_core.idle_checks import FailedCheck, IdleCheck, in_words
from holdfast_core.inspections import InspectedProcess
from holdfast_core.job.parsing import MoETrainingJob
from holdfast_core.node_failures import CLEAN, FailureKind, NodeFailure
from holdfast_operator.reconciler.observe.views import AgentState, JobView, NodeView

DAY_S = 86400.0
RULES = [{"when": "Any", "action": "ReplaceNode"}]


def kinds(world: World) -> dict[str, list[str]]:
    """Node → the kinds of its failures."""
    return {node: [each.kind.value for each in found] for node, found in world.record.items()}


def failed(world: World, node: str, *, times: int = 1, days_ago: float = 0.0) -> None:
    """Record failures of a node by other jobs."""
    world.record = {
        **world.record,
        node: tuple(
            NodeFailure(
                kind=FailureKind.LOST_RANK,
                job="team.other",
                epoch=epoch,
                at=WALL + world.now - days_ago * DAY_S,
            )
            for epoch in range(1, times + 1)
        ),
    }


# --- what counts ----------------------------------------------------------------------------------


def test_a_lost_rank_counts_against_its_node_once_however_often_it_is_looked_at() -> None:
    world = running(make_job(nproc=2))
    world.lose_rank(6)
    world.lose_rank(7)
    world.settle(30.0)
    assert kinds(world) == {"n3": ["LostRank"]}
    (found,) = world.record["n3"]
    assert (found.job, found.epoch, found.alike) == ("default.job", 1, "")


def test_a_lost_node_counts_against_it_and_ranks_that_die_with_it_against_nobody() -> None:
    world = running()
    world.kill_node("n2")
    world.exit_rank(0, 1, "ConnectionError: broken pipe")
    world.settle(30.0)
    assert kinds(world) == {"n2": ["LostNode"]}


def test_a_node_whose_end_was_announced_has_not_failed() -> None:
    world = running(make_job(spares=1))
    world.cordoned.add("n4")  # so that the member does not leave before
    world.notices["n2"] = "taint spot"
    world.settle(1.0)
    world.kill_node("n2")
    world.notices.clear()
    world.cordoned.clear()
    world.settle(30.0)
    assert world.membership.epoch == 2
    assert kinds(world) == {}


def test_most_nodes_of_a_job_that_are_lost_at_once_have_something_else_in_common() -> None:
    world = World(make_job(4, spares=4, redundancy="None"), nodes=8)
    world.settle(1.0)
    world.train(10)
    for name in ("n0", "n1", "n2"):
        world.kill_node(name)
    world.settle(30.0)
    assert world.membership.epoch == 2
    assert kinds(world) == {}


def test_ranks_that_end_on_several_nodes_at_once_count_against_none() -> None:
    world = running()
    world.exit_rank(0, 9, "AssertionError: the loss is NaN")
    world.exit_rank(2, 9, "AssertionError: the loss is NaN")
    world.settle(5.0)
    assert world.membership.epoch == 2
    assert kinds(world) == {}


@pytest.mark.parametrize("code", [42, 69, 75, 79])
def test_codes_that_ask_for_a_restart_count_against_no_node(code: int) -> None:
    world = running()
    world.exit_rank(2, code)
    world.settle(5.0)
    assert world.membership.epoch == 2
    assert kinds(world) == {}


def test_an_exit_code_that_a_rule_names_is_expected() -> None:
    rules = [
        {"when": "ExitCode", "values": [7], "action": "RestartInPlace"},
        {"when": "Any", "action": "RestartInPlace"},
    ]
    world = running(make_job(rules=rules))
    world.exit_rank(2, 7)
    world.settle(5.0)
    assert world.membership.epoch == 2 and kinds(world) == {}
    world.exit_rank(2, 8)
    world.settle(5.0)
    assert kinds(world) == {"n2": ["LostRank"]}


def test_a_lack_of_memory_is_the_jobs() -> None:
    world = running()
    world.oom_epochs[2] = 1
    world.exit_rank(2, 137)
    world.settle(5.0)
    assert world.membership.epoch == 2 and kinds(world) == {}


def test_a_drained_node_has_not_failed() -> None:
    world = running()
    world.evict(2)
    world.settle(1.0)
    world.reap()
    world.settle(5.0)
    assert kinds(world) == {}


class OneBehind(World):
    """A world in which ranks have not come as far as the others."""

    behind: frozenset[int] = frozenset()

    def job_view(self, name: str) -> JobView | None:
        view = super().job_view(name)
        if view is None:
            return None
        ranks = tuple(
            structs.replace(rank, step=rank.step - 1) if rank.rank in self.behind else rank
            for rank in view.ranks
        )
        return structs.replace(view, ranks=ranks)


def trained(behind: set[int]) -> OneBehind:
    """A world of two ranks a node that has trained, but for ranks that are a step `behind`."""
    world = OneBehind(make_job(nproc=2, detection={"hangSeconds": 30}))
    world.settle(1.0)
    world.train(10)
    world.settle(1.0)
    world.behind = frozenset(behind)
    return world


@pytest.mark.parametrize(
    ("behind", "blamed"),
    [({2}, {"n1": ["Hang"]}), ({2, 3}, {"n1": ["Hang"]}), ({2, 4}, {}), (set(), {})],
)
def test_a_hang_counts_against_the_node_whose_ranks_alone_are_behind(
    behind: set[int], blamed: dict[str, list[str]]
) -> None:
    world = trained(behind)
    world.idle_s = 31.0
    world.settle(1.0)
    assert world.membership.epoch == 2
    assert kinds(world) == blamed


@pytest.mark.parametrize(
    ("stopped", "blamed"), [({5}, {"n2": ["Hang"]}), ({4, 5}, {"n2": ["Hang"]}), ({1, 5}, {})]
)
def test_a_hang_counts_against_the_node_whose_ranks_an_inspection_names(
    stopped: set[int], blamed: dict[str, list[str]]
) -> None:
    world = trained({0})  # it has reported its step late
    world.processes = {rank: InspectedProcess(rank=rank, state="T") for rank in stopped}
    world.idle_s = 31.0
    world.settle(1.0)
    assert world.membership.epoch == 2
    assert kinds(world) == blamed


def test_a_script_that_fails_alike_on_one_node_after_the_other_counts_against_none() -> None:
    world = World(make_job(maxRestarts=9))
    world.sessionless = set(range(4))
    world.settle(1.0)
    for rank in (1, 2):
        world.exit_rank(rank, 1, f"ValueError: rank {rank} has no data")
        world.settle(10.0)
    assert kinds(world) == {"n1": ["FailedStart"], "n2": ["FailedStart"]}
    assert world.rating("n1") == world.rating("n2") == CLEAN


def test_a_start_that_fails_on_one_node_only_counts_against_it() -> None:
    world = World(make_job(maxRestarts=9))
    world.sessionless = set(range(4))
    world.settle(1.0)
    for _ in range(2):
        world.exit_rank(1, 1, "RuntimeError: CUDA error: device unavailable")
        world.settle(10.0)
    assert kinds(world) == {"n1": ["FailedStart", "FailedStart"]}
    assert world.rating("n1").text == "2 failures in 1 minute"


def test_the_script_of_a_job_of_one_node_is_compared_with_no_other() -> None:
    world = World(make_job(1, redundancy="None", maxRestarts=9))
    world.sessionless = {0}
    world.settle(1.0)
    world.exit_rank(0, 1, "ModuleNotFoundError: No module named 'apex'")
    world.settle(10.0)
    assert world.membership.epoch == 2 and kinds(world) == {}


def test_standby_agents_that_end_count_against_their_node() -> None:
    world = World(make_job())
    world.standbys_wanted = 1
    world.settle(2.0)
    world.exit_standby("n4")
    world.look()
    assert kinds(world) == {"n4": ["FailedStart"]}


def test_a_control_loop_that_dies_before_it_acts_leaves_a_failure_that_counts_once() -> None:
    world = FailingOver(make_job())
    world.settle(1.0)
    world.train(10)
    world.settle(1.0)
    world.lose_rank(3)
    world.beat()
    world.store(world.decide())
    assert kinds(world) == {"n3": ["LostRank"]}
    world.now += 1.0
    world.fail_over({})
    world.settle(10.0)
    assert world.state.recoveries == 1 and world.trains()
    assert kinds(world) == {"n3": ["LostRank"]}


# --- what follows ---------------------------------------------------------------------------------


def test_nodes_that_fail_three_times_are_avoided_once_there_is_another() -> None:
    world = World(make_job(spares=2, maxRestarts=99))
    world.cordoned.add("n5")
    world.settle(1.0)
    for number in range(1, 7):  # member 2 moves from n2 to n4, and back, for there is no other
        world.train(10 * number)
        world.settle(1.0)
        lost = world.nodes_of_members()[2]
        world.kill_node(lost)
        world.settle(10.0)
        world.gone.discard(lost)
        world.revive_daemon(lost, new_memory=True)
        world.settle(1.0)
    assert kinds(world) == {"n2": ["LostNode"] * 3, "n4": ["LostNode"] * 3}
    assert world.messages("NodeAvoided") == []
    world.cordoned.clear()
    world.train(100)
    world.settle(1.0)
    world.kill_node("n1")
    world.settle(10.0)
    assert world.nodes_of_members() == ["n0", "n5", "n2", "n3"]
    assert world.messages("NodeAvoided") == [
        "took n5, which is clean, instead of n4 (3 failures in 1 minute)"
    ]


def placed(job: MoETrainingJob, nodes: int, **failures: int) -> World:
    world = World(job, nodes=nodes)
    for node, times in failures.items():
        failed(world, node, times=times)
    world.look()
    return world


def test_the_first_placement_prefers_clean_nodes_and_says_so() -> None:
    world = placed(make_job(), 6, n1=3, n3=1)
    assert world.nodes_of_members() == ["n0", "n2", "n4", "n5"]
    assert world.messages("NodeAvoided") == [
        "took n4, n5, which are clean, instead of n1 (3 failures in 1 minute), "
        "n3 (1 failure in 1 minute)"
    ]


def test_of_nodes_that_all_have_failed_those_that_failed_least_are_taken() -> None:
    world = placed(make_job(), 5, n0=2, n1=4, n2=1, n3=1, n4=1)
    assert world.nodes_of_members() == ["n0", "n2", "n3", "n4"]
    assert world.messages("NodeAvoided") == [
        "took n4, which has failed less, instead of n1 (4 failures in 1 minute)"
    ]


def test_a_job_whose_nodes_are_all_bad_starts_on_them() -> None:
    world = placed(make_job(spares=0), 4, n0=8, n1=8, n2=8, n3=8)
    assert world.nodes_of_members() == ["n0", "n1", "n2", "n3"]
    assert world.messages("NodeAvoided") == []


def test_a_failure_long_ago_is_forgiven() -> None:
    world = World(make_job())
    failed(world, "n1", days_ago=5.0)
    world.look()
    assert world.nodes_of_members() == ["n0", "n1", "n2", "n3"]


@pytest.mark.parametrize("others_fail", [False, True])
def test_a_spare_that_fails_its_checks_is_taken_if_there_is_no_better_one(
    others_fail: bool,
) -> None:
    broken = FailedCheck(check=IdleCheck.DISK, text="/tmp: Input/output error", failing_s=9.0)
    world = running(make_job(spares=2))
    world.problems = dict.fromkeys(["n4", *(["n5"] if others_fail else [])], in_words([broken]))
    world.kill_node("n1")
    world.settle(10.0)
    assert world.nodes_of_members() == ["n0", "n4" if others_fail else "n5", "n2", "n3"]
    avoided = (
        "took n5, which is clean, instead of n4 (failed check of disk: /tmp: Input/output error)"
    )
    assert world.messages("NodeAvoided") == ([] if others_fail else [avoided])
    assert kinds(world) == {"n1": ["LostNode"]}, "no job has found out about the disk"


def test_the_only_spare_is_taken_although_it_has_failed() -> None:
    world = running()
    failed(world, "n4", times=5)
    world.kill_node("n1")
    world.settle(10.0)
    assert world.nodes_of_members() == ["n0", "n4", "n2", "n3"]
    assert world.messages("NodeAvoided") == []


def test_another_failure_domain_counts_more_than_a_clean_record() -> None:
    world = Domains(make_job(2, spares=2), nodes=4)
    world.settle(1.0)
    assert world.nodes_of_members() == ["n0", "n1"]
    failed(world, "n3", times=5)
    world.kill_node("n1")
    world.settle(10.0)
    assert world.nodes_of_members() == ["n0", "n3"]


class Domains(World):
    """Nodes 0 and 2 are in one rack, 1 and 3 in another."""

    def node_view(self, name: str) -> NodeView:
        return structs.replace(super().node_view(name), domain=f"rack-{int(name[1:]) % 2}")


def test_a_member_that_was_placed_stays_where_its_memory_is_whatever_its_record() -> None:
    world = running()
    failed(world, "n2", times=5)
    world.restart()
    world.settle(5.0)
    assert world.nodes_of_members() == ["n0", "n1", "n2", "n3"]
    assert world.membership.epoch == 1


def test_standby_agents_wait_on_the_spare_that_would_be_taken() -> None:
    world = World(make_job(spares=2), nodes=6)
    world.standbys_wanted = 1
    failed(world, "n4", times=2)
    world.settle(3.0)
    assert list(world.standbys) == ["n5"]


def test_members_that_join_prefer_clean_nodes() -> None:
    rules = [{"when": "NodeLost", "action": "Shrink"}]
    job = make_job(4, spares=0, rules=rules, spec={"minNodes": 3})
    world = running(job)
    world.kill_node("n2")
    world.settle(10.0)
    assert world.nodes_of_members() == ["n0", "n1", "n3"]
    world.daemons |= {"n7": Daemon("memory-7"), "n8": Daemon("memory-8")}
    failed(world, "n7", times=2)
    world.settle(2.0)
    assert dict(world.state.joining) == {2: "n8"}
    assert world.messages("NodeAvoided") == [
        "took n8, which is clean, instead of n7 (2 failures in 1 minute)"
    ]
    # An agent that ends there before it joins counts against its node.
    agent = world.agents[2, "n8"]
    world.agents[2, "n8"] = replace(agent, state=AgentState.EXITED, exit_code=1)
    world.look()
    assert kinds(world)["n8"] == ["FailedStart"]
