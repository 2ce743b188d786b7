"""Which daemons are replaced by a newer version, when: every small topology, and what jobs say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from virtual_world import World, make_job, running

from holdfast_operator.reconciler.observe.views import ClusterView, NodeView
from holdfast_operator.reconciler.upgrade_plan import (
    AT_ONCE_MAX,
    DaemonState,
    JobRequirements,
    UpgradePlan,
    outdated_condition,
    plan_upgrade,
    requirements_of,
)

OLD = DaemonState(outdated=True, serves=True)
NEW = DaemonState(outdated=False, serves=True)
OLD_ENDING = DaemonState(outdated=True, serves=False, ending=True)
OLD_NEVER_BEGUN = DaemonState(outdated=True, serves=False, begun=False)
OLD_NOT_READY = DaemonState(outdated=True, serves=False)
NEW_STARTS = DaemonState(outdated=False, serves=False, begun=False)
STANDS = (OLD, NEW, OLD_ENDING, OLD_NEVER_BEGUN, OLD_NOT_READY, NEW_STARTS)
NODES = ("a", "b", "c", "d")
GROUPINGS: tuple[tuple[tuple[tuple[str, ...], ...], ...], ...] = (
    (),
    ((("a", "b"), ("c", "d")),),
    ((("a", "b", "c", "d"),),),
    ((("a", "b"), ("c", "d")), (("b", "c"),)),
    ((("a", "b", "c"),), (("d",),)),
)
"""For each topology, the parity groups of each of its jobs."""


def topologies() -> Iterator[tuple[dict[str, DaemonState], list[JobRequirements]]]:
    """Every state of four daemons, every grouping, memory whole or away, held or not."""
    for stands, groupings in product(product(STANDS, repeat=4), GROUPINGS):
        for weak, hold in product((frozenset[str](), frozenset({"b"})), ("", "held")):
            jobs = [
                JobRequirements(key=f"j{number}", groups=groups, weak=weak, hold=hold)
                for number, groups in enumerate(groupings)
            ]
            yield dict(zip(NODES, stands, strict=True)), jobs


def disturbed(daemons: dict[str, DaemonState], found: UpgradePlan) -> set[str]:
    """Nodes whose daemons are taken away although they had started up."""
    return {node for node in found.renew if daemons[node].begun}


def test_at_most_one_of_every_group_is_away_in_every_small_topology() -> None:
    for daemons, jobs in topologies():
        found = plan_upgrade(daemons, jobs)
        assert all(daemons[node].outdated for node in found.renew)
        assert {*found.renew, *found.waiting} == found.outdated
        for job in jobs:
            for group in job.groups:
                taken = disturbed(daemons, found).intersection(group)
                assert not (taken and job.hold), (daemons, jobs, found)
                for node in taken:
                    others = set(group) - {node}
                    assert not others & (job.weak | set(found.renew)), (daemons, jobs, found)
                    assert all(daemons[other].serves for other in others), (daemons, jobs, found)


def test_a_daemon_that_never_started_is_replaced_at_once_in_every_small_topology() -> None:
    for daemons, jobs in topologies():
        never = {n for n, d in daemons.items() if d.outdated and not d.begun and not d.ending}
        assert never <= set(plan_upgrade(daemons, jobs).renew)


def test_the_first_of_a_new_version_is_alone_in_every_small_topology() -> None:
    for daemons, jobs in topologies():
        if not any(stand == NEW for stand in daemons.values()):
            found = plan_upgrade(daemons, jobs)
            begun_before = {OLD_ENDING, NEW_STARTS} & set(daemons.values())
            assert len(disturbed(daemons, found)) <= (0 if begun_before else 1)


@pytest.mark.parametrize("groupings", GROUPINGS)
def test_all_are_renewed_in_the_end(groupings: tuple[tuple[tuple[str, ...], ...], ...]) -> None:
    jobs = [JobRequirements(key=f"j{n}", groups=groups) for n, groups in enumerate(groupings)]
    for stands in product((OLD, NEW, OLD_NOT_READY, OLD_NEVER_BEGUN), repeat=4):
        daemons = dict(zip(NODES, stands, strict=True))
        for _ in range(len(NODES) + 1):
            found = plan_upgrade(daemons, jobs)
            if daemons["a"].serves and all(d.serves or not d.begun for d in daemons.values()):
                assert found.renew or not found.outdated, "one is always possible"
            daemons |= dict.fromkeys(found.renew, NEW)
        stuck = {node for node, stand in daemons.items() if stand.outdated}
        assert not stuck or OLD_NOT_READY in daemons.values()


def test_groups_are_renewed_side_by_side_but_not_without_end() -> None:
    nodes = [f"n{number:03}" for number in range(4 * AT_ONCE_MAX)]
    pairs = tuple(zip(nodes[::2], nodes[1::2], strict=True))
    daemons = {**dict.fromkeys(nodes, OLD), "idle": NEW}
    found = plan_upgrade(daemons, [JobRequirements(key="j", groups=pairs)])
    assert len(found.renew) == AT_ONCE_MAX
    assert all(len(set(pair) & set(found.renew)) <= 1 for pair in pairs)
    assert found.progress == f"1 of {4 * AT_ONCE_MAX + 1} daemons run the new version"


def test_a_daemon_that_waits_has_a_reason() -> None:
    def reason(daemons: dict[str, DaemonState], job: JobRequirements) -> str:
        return plan_upgrade(daemons, [job]).waiting["a"]

    job = JobRequirements(key="team.moe", groups=(("a", "b"),))
    first = {"a": OLD, "b": NEW}
    assert reason({**first, "b": NEW_STARTS}, job) == (
        "the daemon on b, the first of the new version, is not ready yet"
    )
    held = replace(job, hold="it is not protected")
    assert reason(first, held) == "job team.moe: it is not protected"
    assert reason({"a": OLD, "c": NEW}, job) == (
        "job team.moe: the daemon on b, of the same parity group, is away"
    )
    assert reason(first, replace(job, weak=frozenset("b"))) == (
        "job team.moe: the memory of b, of the same parity group, is not back"
    )
    assert reason({"a": OLD_ENDING, "b": NEW}, job) == "its pod is being deleted"


def test_the_condition_of_a_job_names_its_own_nodes() -> None:
    job = JobRequirements(key="team.moe", groups=(("a", "b"),), hold="it is not protected")
    found = plan_upgrade({"a": OLD, "b": OLD, "c": NEW}, [job])
    condition = outdated_condition(found, ("a", "b", "c"))
    assert condition is not None
    assert condition.message == (
        "the daemons on a, b run an older version; the one on a waits: job team.moe: it is not "
        "protected"
    )
    assert outdated_condition(found, ("c",)) is None


# --- what a job says ------------------------------------------------------------------------------


def stand(world: World) -> JobRequirements | None:
    nodes = {member.node: world.node_view(member.node) for member in world.membership.members}
    return requirements_of(world.job, world.state, ClusterView(nodes=nodes), world.now)


def protected_world() -> World:
    world = running()
    world.train(12)
    world.settle(2.0)
    return world


def test_a_job_that_is_protected_has_no_objection() -> None:
    found = stand(protected_world())
    assert found is not None
    assert found.groups == (("n0", "n1", "n2", "n3"),)
    assert (found.hold, found.weak) == ("", frozenset())
    assert found.protected is not None


def test_a_daemon_that_is_away_or_has_other_memory_makes_its_group_wait() -> None:
    world = protected_world()
    world.kill_daemon("n1")
    world.look()
    world.now += 1.5
    world.look()
    world.now += 1.5
    world.look()
    found = stand(world)
    assert found is not None
    assert found.weak == {"n1"}
    world.revive_daemon("n1", new_memory=True)
    world.beat()
    found = stand(world)
    assert found is not None
    assert found.weak == {"n1"}


def test_a_job_in_recovery_or_without_protection_holds_all_its_daemons() -> None:
    world = protected_world()
    world.state = replace(world.state, resumed_epoch=0)
    found = stand(world)
    assert found is not None
    assert found.hold == "training does not run"
    world = protected_world()
    nodes = {name: NodeView(name=name) for name in world.daemons}
    found = requirements_of(world.job, world.state, ClusterView(nodes=nodes), world.now)
    assert found is not None
    assert found.hold == "it is not protected"


def test_a_job_with_nothing_to_lose_holds_nothing() -> None:
    world = World(make_job())
    world.settle()
    assert world.state.saved is None
    found = stand(world)
    assert found is not None
    assert (found.hold, found.weak, found.protected) == ("", frozenset(), None)


def test_a_job_whose_daemons_have_not_all_reported_may_have_something_to_lose() -> None:
    """A new control loop remembers nothing that was saved, and has heard all but one."""
    world = World(make_job())
    world.settle()
    nodes = {member.node: world.node_view(member.node) for member in world.membership.members}
    nodes["n1"] = NodeView(name="n1")
    found = requirements_of(world.job, world.state, ClusterView(nodes=nodes), world.now)
    assert found is not None
    assert found.hold == "the daemon on n1 has not reported yet"


def test_what_a_daemon_reports_as_protected_counts_before_the_control_loop_remembers_it() -> None:
    world = protected_world()
    world.state = replace(world.state, saved=None, resumed_epoch=0)
    found = stand(world)
    assert found is not None
    assert found.hold == "training does not run"


def test_a_job_that_has_ended_has_no_requirements() -> None:
    world = protected_world()
    world.finish()
    world.settle(5.0)
    assert world.state.outcome is not None
    assert stand(world) is None
