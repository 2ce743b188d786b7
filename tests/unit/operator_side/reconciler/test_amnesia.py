"""A control loop that starts again, pauses, or meets daemons that know something else."""

from __future__ import annotations

from virtual_world import running


def test_a_control_loop_that_forgot_everything_changes_nothing() -> None:
    world = running()
    before = world.membership
    world.forget()
    world.settle(30.0)
    assert world.membership == before
    assert world.actions == []


def test_a_control_loop_that_forgot_everything_still_finds_a_node_that_was_lost_meanwhile() -> None:
    world = running()
    world.kill_node("n2")
    world.now += 3600.0
    world.forget()
    world.look()
    assert world.actions == []  # it has only just begun to listen
    world.settle(6.0)
    assert world.membership.epoch == 2
    assert world.nodes_of_members() == ["n0", "n1", "n4", "n3"]


def test_an_old_membership_from_a_fenced_daemon_harms_no_agent() -> None:
    world = running()
    world.kill_daemon("n2")
    world.settle(6.0)
    agents = dict(world.agents)
    world.forget()
    for name in ("n0", "n1", "n3", "n4"):
        world.daemons[name].alive = False
    world.daemons["n2"].alive = True  # still in epoch 1
    world.settle(2.0)
    assert world.membership.epoch == 1 and world.agents == agents
    for name in ("n0", "n1", "n3", "n4"):
        world.daemons[name].alive = True
    world.settle(2.0)
    assert world.membership.epoch == 2 and world.agents == agents


def test_a_pause_of_the_control_loop_is_not_taken_for_silence() -> None:
    world = running()
    world.now += 3600.0
    for daemon in world.daemons.values():
        daemon.alive = False
    world.look()
    for daemon in world.daemons.values():
        daemon.alive = True
    world.settle(1.0)
    assert world.membership.epoch == 1


def test_two_memberships_of_one_epoch_are_replaced_by_a_third() -> None:
    world = running()
    other = world.membership
    world.lose_rank(0)
    world.look()
    world.daemons["n1"].membership = type(other)(
        job=other.job,
        epoch=2,
        members=(
            *other.members[:3],
            world.membership.member(3).__class__(
                index=3, node="n4", memory_id="memory-4", peer_address="", bulk_address=""
            ),
        ),
        nproc_per_node=1,
        groups=other.groups,
    )
    world.settle(1.0)
    assert world.membership.epoch == 3
