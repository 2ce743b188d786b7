"""Launchers whose node failed a check: another node takes its place, and this one is remembered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from virtual_world import World, running
from virtual_world import make_job as any_job

from holdfast_core.exit_codes import FAILED_CHECK
from holdfast_core.job.parsing import MoETrainingJob


def make_job(nodes: int = 4, **failure_policy: Any) -> MoETrainingJob:
    return any_job(nodes, **{"checkNodes": True, **failure_policy})


def kinds(world: World) -> dict[str, list[str]]:
    """Node → the kinds of its failures."""
    return {node: [each.kind.value for each in found] for node, found in world.record.items()}


@pytest.mark.parametrize(
    "rules",
    [
        None,
        [{"when": "Any", "action": "RestartInPlace"}],
        [{"when": "NodeLost", "action": "ReplaceNode"}],
    ],
    ids=["default rules", "any restarts", "no rule for it"],
)
def test_its_member_moves_to_another_node_and_the_failure_counts_against_it(
    rules: list[dict[str, str]] | None,
) -> None:
    given: dict[str, Any] = {} if rules is None else {"rules": rules}
    world = World(make_job(**given))
    world.settle(1.0)
    world.exit_agent(2, FAILED_CHECK)
    world.settle(5.0)
    assert world.nodes_of_members() == ["n0", "n1", "n4", "n3"] and world.phase() == "Running"
    assert kinds(world) == {"n2": ["FailedCheck"]}
    [cause] = world.messages("Recovering")
    assert "did not take part, because a check of its node failed (code 82)" in cause


def test_it_does_not_come_back_before_the_job_is_whole() -> None:
    world = World(make_job(), nodes=6)
    world.settle(1.0)
    for expected in ("n4", "n5"):
        world.exit_agent(2, FAILED_CHECK)
        world.settle(1.0)
        assert world.nodes_of_members()[2] == expected
    assert kinds(world) == {"n2": ["FailedCheck"], "n4": ["FailedCheck"]}


def test_where_no_other_node_is_free_it_is_checked_again_and_the_restarts_count() -> None:
    world = World(make_job(spares=0, maxRestarts=2), nodes=4)
    world.settle(1.0)
    for _ in range(3):
        world.exit_agent(2, FAILED_CHECK)
        world.settle(3.0)
    assert world.phase() == "Failed"
    assert world.state.recoveries == 2
    assert kinds(world) == {"n2": ["FailedCheck"] * 3}


def test_a_check_that_most_nodes_of_a_job_fail_counts_against_none() -> None:
    world = World(make_job(spares=4), nodes=8)
    world.settle(1.0)
    for member in range(3):
        world.exit_agent(member, FAILED_CHECK)
    world.settle(5.0)
    assert kinds(world) == {}


def test_checks_that_most_nodes_of_a_job_fail_one_after_the_other_count_against_no_more() -> None:
    """Launchers that wait check again at different times."""
    world = World(make_job(spares=4), nodes=8)
    world.settle(1.0)
    for member in range(4):
        world.exit_agent(member, FAILED_CHECK)
        world.settle(120.0)
    assert kinds(world) == {"n0": ["FailedCheck"], "n1": ["FailedCheck"]}


def test_checks_that_fail_long_after_one_another_count_each() -> None:
    world = World(make_job(spares=4, recheckSeconds=60), nodes=8)
    world.settle(1.0)
    for member in range(4):
        world.exit_agent(member, FAILED_CHECK)
        world.settle(120.0)
    assert kinds(world) == {f"n{number}": ["FailedCheck"] for number in range(4)}


def test_most_spares_that_fail_their_checks_have_something_in_common() -> None:
    world = World(make_job(spares=4), nodes=8)
    world.standbys_wanted = 4
    world.settle(2.0)
    for node in ("n4", "n5", "n6", "n7"):
        world.exit_standby(node, FAILED_CHECK)
        world.settle(2.0)
    assert kinds(world) == {"n4": ["FailedCheck"], "n5": ["FailedCheck"]}


def test_two_of_eight_nodes_count_each() -> None:
    world = World(make_job(8), nodes=10)
    world.settle(1.0)
    failing = [world.membership.member(index).node for index in (1, 6)]
    world.exit_agent(1, FAILED_CHECK)
    world.exit_agent(6, FAILED_CHECK)
    world.settle(5.0)
    assert kinds(world) == {node: ["FailedCheck"] for node in failing}


def test_a_rule_that_names_the_code_decides() -> None:
    rule = {"when": "ExitCode", "values": [FAILED_CHECK], "action": "Fail"}
    world = World(make_job(rules=[rule]))
    world.settle(1.0)
    world.exit_agent(2, FAILED_CHECK)
    world.settle(5.0)
    assert world.phase() == "Failed"


def test_a_script_that_exits_with_this_code_says_nothing_about_its_node() -> None:
    world = running(make_job())
    world.exit_rank(2, FAILED_CHECK)
    world.settle(5.0)
    assert world.nodes_of_members() == ["n0", "n1", "n2", "n3"]
    assert "FailedCheck" not in str(kinds(world))
    assert "check" not in str(world.messages("Recovering"))


FAILS = (
    "INFO check of GPU memory: noticed: memory errors of GPU-11111111-0a1b-2c3d-4e5f-001122334455\n"
    "ERROR this node does not take part: GPUs: cuda:3 ({}) multiplied matrices wrongly"
)
UUID = "GPU-8f0b2c3d-0a1b-2c3d-4e5f-00112233aabb"


@pytest.mark.parametrize(("named", "device"), [(UUID, UUID), ("GPU-3", "")])
def test_the_device_that_a_check_names_is_remembered(named: str, device: str) -> None:
    world = World(make_job())
    world.standbys_wanted = 1
    world.settle(2.0)
    world.exit_standby("n4", FAILED_CHECK)
    world.standbys["n4"] = replace(world.standbys["n4"], last_lines=FAILS.format(named))
    world.look()
    world.exit_agent(2, FAILED_CHECK)
    world.agents[2, "n2"] = replace(world.agents[2, "n2"], last_lines=FAILS.format(named))
    world.settle(5.0)
    assert kinds(world) == {"n2": ["FailedCheck"], "n4": ["FailedCheck"]}
    assert [each.device for found in world.record.values() for each in found] == [device] * 2


def test_in_a_job_that_checks_nothing_this_code_is_the_scripts() -> None:
    world = World(make_job(checkNodes=False))
    world.settle(1.0)
    world.exit_agent(2, FAILED_CHECK)
    world.settle(5.0)
    assert world.nodes_of_members() == ["n0", "n1", "n2", "n3"]
    assert kinds(world) == {"n2": ["LostRank"]}


def test_checks_that_fail_alike_say_nothing_about_the_script() -> None:
    world = World(make_job(spares=0), nodes=4)
    world.settle(1.0)
    for _ in range(5):
        world.exit_agent(2, FAILED_CHECK)
        key = (2, "n2")
        world.agents[key] = replace(world.agents[key], last_lines="disk: broken")
        world.settle(3.0)
    assert world.phase() == "Running" and world.state.recoveries == 5


def test_the_check_of_a_spare_counts_against_it() -> None:
    world = World(make_job())
    world.standbys_wanted = 1
    world.settle(2.0)
    world.exit_standby("n4", FAILED_CHECK)
    world.look()
    assert kinds(world) == {"n4": ["FailedCheck"]}
    [message] = world.messages("StandbyExited")
    assert "a check of its node failed" in message
    assert message.endswith("starting it again in 1800 s")
    world.settle(60.0)
    assert "n4" not in world.standbys
    world.now += 1800.0
    world.settle(1.0)
    assert "n4" in world.standbys
