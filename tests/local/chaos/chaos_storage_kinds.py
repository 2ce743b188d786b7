"""The faults of `chaos` that concern the durable tier: it fails, a daemon that writes to it dies,
bytes in it change, and more is lost than memory can restore.
"""

from __future__ import annotations

import random
import signal

from chaos_tier import DIRECTORY
from chaos_world import DEATH_S, World, fill, wait_dead
from fault_points import LEADER
from faulty_daemon import Trap
from waiting import wait_for

TROUBLE_S = (0.3, 2.5)
"""How long storage fails or stalls: it may do so until after the recovery began."""
SPOILED = 0.5
"""Of the losses of a group: how many find a stored set spoiled."""
SET_S = 1.5
"""How long a fault that strikes stored sets waits for one, after each of a few saves."""


def fail(world: World, _: int, rng: random.Random) -> str:
    return _trouble(world, rng, rng.choice((0.1, 0.3, 0.6)))


def go_away(world: World, _: int, rng: random.Random) -> str:
    return _trouble(world, rng, 1.0)


def _trouble(world: World, rng: random.Random, portion: float) -> str:
    how, last_s = world.tier.fail(rng, portion), rng.uniform(*TROUBLE_S)
    return _meanwhile(world, rng, how, last_s)


def slow_down(world: World, _: int, rng: random.Random) -> str:
    pause_s, last_s = rng.uniform(0.02, 0.3), rng.uniform(*TROUBLE_S)
    world.tier.slow_down(pause_s)
    return _meanwhile(world, rng, f"{pause_s:.2f} s for each call", last_s)


def _meanwhile(world: World, rng: random.Random, how: str, last_s: float) -> str:
    world.calm_later(last_s)
    for _ in range(1 + rng.randrange(3)):
        world.save()
    return f"{world.tier.kind}, {how}, for {last_s:.1f} s"


def fill_up(world: World, _: int, rng: random.Random) -> str:
    if world.tier.kind != DIRECTORY:
        return ""
    world.hogs.append(fill(world.tier.real))
    for _save in range(1 + rng.randrange(3)):
        world.save()
    return world.tier.kind


def kill_writer(world: World, member: int, rng: random.Random) -> str:
    """Kill the daemon in the middle of a set: at a step of the file system, during a request, or
    before or after it writes its rank's file or, as the leader, the set's manifest."""
    daemon = world.job.daemon(member)
    where = rng.choice(("PersistRank", "CommitSet", "tier", "tier"))
    if where == "CommitSet" and member != LEADER:
        where = "PersistRank"
    if where != "tier":
        when = rng.choice(("before", "after"))
        met = world.kill_at(member, Trap(at=where, when=when))
        return f"{daemon.node} at {where}, {when}" if met else ""
    if world.tier.kind == DIRECTORY:
        count = rng.randint(1, 16)
        met = world.kill_at(member, Trap(at="tier", count=count))
        return f"{daemon.node} at step {count} of writing" if met else ""
    world.tier.strike_request(
        lambda request: request.method == "PUT" and f"rank-{member:05d}" in request.target,
        lambda: daemon.send_signal(signal.SIGKILL),
    )
    for _ in range(4):
        world.save()
        if wait_dead(daemon, DEATH_S):
            return f"{daemon.node} before the answer to its PUT"
    world.tier.calm()
    return ""


def flip(world: World, _: int, rng: random.Random) -> str:
    """Change a byte of a stored set; the next restore of it must detect that. Where memory has lost
    a group, an older set is then the one that must be restored."""
    struck = world.tier.flip(rng)
    if struck and world.floor in world.tier.spoiled:
        world.floor = world.tier.newest_sound()
    return struck


def lose_group(world: World, member: int, rng: random.Random) -> str:
    """Lose more nodes of a group than its redundancy covers, with their memory; often just after a
    stored byte changed, so that an older set must be found."""
    _wait_set(world)
    flipped = world.tier.flip(rng) if rng.random() < SPOILED else ""
    group = world.shape.group_of(member)
    alive = [
        each
        for each in range(world.job.size)
        if world.shape.group_of(each) == group and each not in world.gone
    ]
    lost = [member, *(each for each in alive if each != member)][:2]
    world.floor = world.tier.newest_sound()
    for each in lost:
        world.lose(each)
    names = " and ".join(world.job.nodes[each] for each in lost)
    return f"{names} of a group{', after ' if flipped else ''}{flipped}"


def _wait_set(world: World) -> None:
    """Wait until storage holds a set, but not for long: without one the job starts from the
    beginning."""
    for _ in range(3):
        if world.tier.newest_sound() is not None:
            return
        world.save()
        try:
            wait_for("a set", lambda: world.tier.newest_sound() is not None, SET_S)
        except AssertionError:
            continue
