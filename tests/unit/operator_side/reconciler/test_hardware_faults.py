"""Ranks that end after the kernel has reported a fault of hardware: the node is at fault."""

from __future__ import annotations

from typing import Any

import pytest
from virtual_world import World, make_job, running

from holdfast_core.inspections import InspectedProcess

XID = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus"
ANY = [{"when": "Any", "action": "RestartInPlace"}]


def kinds(world: World) -> dict[str, list[str]]:
    """Node → the kinds of its failures."""
    return {node: [each.kind.value for each in found] for node, found in world.record.items()}


@pytest.mark.parametrize("code", [1, 134, 137])
@pytest.mark.parametrize("rules", [None, ANY, []], ids=["default", "any", "none"])
def test_the_member_moves_to_another_node_and_the_fault_counts_against_its_own(
    code: int, rules: list[dict[str, str]] | None
) -> None:
    given: dict[str, Any] = {} if rules is None else {"rules": rules}
    world = running(make_job(spares=1, **given))
    world.exit_rank(2, code, "RuntimeError: CUDA error", hardware_fault=XID)
    world.settle(10.0)
    assert world.nodes_of_members() == ["n0", "n1", "n4", "n3"] and world.phase() == "Running"
    assert kinds(world) == {"n2": ["HardwareFault"]}
    assert world.record["n2"][0].device == "0000:3b:00"
    [cause] = world.messages("Recovering")
    assert "after its kernel reported a fault of hardware" in cause
    [lines] = world.messages("LastLines")
    assert f"the kernel wrote:\n{XID}\nIt wrote last:\nRuntimeError: CUDA error" in lines
    assert len(lines) <= 1024


def test_a_rule_that_names_the_code_decides() -> None:
    rules = [{"when": "ExitCode", "values": [134], "action": "RestartInPlace"}]
    world = running(make_job(spares=1, rules=rules))
    world.exit_rank(2, 134, hardware_fault=XID)
    world.settle(10.0)
    assert world.nodes_of_members() == ["n0", "n1", "n2", "n3"]
    assert kinds(world) == {"n2": ["HardwareFault"]}


@pytest.mark.parametrize("code", [1, 134])
def test_ranks_that_end_with_it_on_other_nodes_blame_nobody(code: int) -> None:
    world = running(make_job(spares=1))
    for rank in (0, 1, 3):
        world.exit_rank(rank, 134, "NCCL watchdog")
    world.exit_rank(2, code, hardware_fault=XID)
    world.settle(10.0)
    assert kinds(world) == {"n2": ["HardwareFault"]}
    assert world.nodes_of_members() == ["n0", "n1", "n4", "n3"]


def test_a_fault_does_not_hide_the_error_of_a_script() -> None:
    """Before its first step, the script fails on one node, and ends with that on another, whose
    GPU has a fault each time."""
    world = World(make_job(spares=1))
    for _ in range(3):
        assert world.state.outcome is None
        world.settle(6.0)
        world.exit_rank(0, 1, "ValueError: bad config")
        world.exit_rank(2, 1, "Connection reset by peer", hardware_fault=XID)
        world.settle(6.0)
    assert world.condition("Failed")[:2] == (True, "FailsBeforeFirstStep")
    assert world.state.outcome_reason.endswith("ValueError: bad config")


@pytest.mark.parametrize("rules", [None, []], ids=["default", "none"])
def test_ranks_that_end_with_a_traceback_beside_a_fault_fail_no_job(
    rules: list[dict[str, str]] | None,
) -> None:
    given: dict[str, Any] = {} if rules is None else {"rules": rules}
    world = running(make_job(spares=1, **given))
    world.exit_rank(0, 1, "Connection reset by peer")
    world.exit_rank(2, 1, "CUDA error", hardware_fault=XID)
    world.settle(10.0)
    assert world.nodes_of_members() == ["n0", "n1", "n4", "n3"] and world.phase() == "Running"
    assert kinds(world) == {"n2": ["HardwareFault"]}
    assert XID in world.messages("LastLines")[0]


def test_a_fault_that_is_reported_when_the_next_epoch_has_begun_blames_the_node_once() -> None:
    """The launcher reports it a moment after the daemon has seen the connection break, and no
    recovery waits for that."""
    world = running(make_job(spares=1))
    world.lose_rank(2)
    world.look()
    assert world.membership.epoch == 2
    world.settle(2.0)
    assert kinds(world) == {"n2": ["LostRank"]}
    world.late_faults = {2: (1, XID)}
    world.settle(8.0)
    told = f"rank 2 ended after its kernel reported a fault of hardware:\n{XID}"
    assert world.messages("AgentEnded") == [told] and world.phase() == "Running"
    assert kinds(world) == {"n2": ["HardwareFault"]}
    world.settle(8.0)
    assert world.messages("AgentEnded") == [told]


def test_a_fault_that_was_known_in_time_is_not_told_again() -> None:
    world = World(make_job(spares=0), nodes=4)
    world.settle(1.0)
    world.exit_rank(2, 1, "CUDA error", hardware_fault=XID)
    world.settle(1.0)
    world.late_faults = {2: (world.membership.epoch - 1, XID)}  # It is on the same node still.
    world.settle(8.0)
    assert world.messages("AgentEnded") == []
    assert kinds(world) == {"n2": ["HardwareFault"]}


def test_without_another_node_it_restarts_where_it_is_and_that_counts() -> None:
    world = World(make_job(spares=0, maxRestarts=2), nodes=4)
    world.settle(1.0)
    for _ in range(3):
        world.exit_rank(2, 1, "CUDA error", hardware_fault=XID)
        world.settle(6.0)
    assert world.phase() == "Failed" and world.state.recoveries == 2
    assert "are as many as failurePolicy.maxRestarts" in world.state.outcome_reason
    assert XID in world.state.outcome_reason


def test_a_hang_behind_a_fault_of_hardware_counts_as_that_against_its_node() -> None:
    rules = [{"when": "Any", "action": "RestartInPlace"}]
    world = running(make_job(nproc=2, spares=1, rules=rules, detection={"hangSeconds": 30}))
    world.train(10)
    world.settle(1.0)
    world.processes = {
        rank: InspectedProcess(rank=rank, state="R", hardware_fault=XID if rank in (4, 5) else "")
        for rank in range(8)
    }
    world.idle_s = 31.0
    world.settle(10.0)
    assert kinds(world) == {"n2": ["HardwareFault"]}
    assert world.nodes_of_members() == ["n0", "n1", "n4", "n3"]
    assert f"ranks 4, 5 are on a node whose kernel wrote: {XID}" in world.messages("Recovering")[0]
