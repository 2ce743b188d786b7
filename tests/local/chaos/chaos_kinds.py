"""Table of the faults of `chaos`: the name of each, its action, and what it may be mixed with.

A new fault is a function that breaks something of a `World`, and a line in `KINDS`.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import chaos_storage_kinds as storage
from chaos_world import World, fill, wait_dead, wipe
from fault_points import LEADER, POINTS
from faulty_daemon import Trap
from trainer_child import TrainerProcess
from waiting import wait_for

from holdfast_core.errors import HoldfastError

Strike = Callable[[World, int, random.Random], str]
"""Breaks something at a member; what it was, in words; empty when there was nothing to break."""

TRAPS = tuple(p for p in POINTS if p.during == "saves" and len(p.traps) == 1)
BITS = (0x01, 0x10, 0x80)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault."""

    name: str
    lane: str
    """Where the report draws it."""
    strike: Strike
    beyond: bool = False
    """Takes more than redundancy covers: what must be restored is in storage then."""
    loses_memory: bool = False
    """The parity group has lost a member, and is spared until it is protected again."""
    needs_trainers: bool = False
    """Strikes while ranks save, so not while they are being started."""
    only: int | None = None
    """The one member that it can strike."""
    weight: int = 1
    """How often it is chosen, beside others."""
    needs: str = ""
    """What must be there: `mount` (small tmpfs can be mounted), `redis`, `identity`."""


# --- processes ------------------------------------------------------------------------------------


def _kill_rank(world: World, member: int, rng: random.Random) -> str:
    """Kill a trainer in a process of its own between two steps of a save."""
    job, step = world.job, world.job.step + 1
    job.trainers[member].die()
    world.ended.add(member)
    child = TrainerProcess(job.make_trainer(member), job.epoch)
    died_after = rng.choice(("open", "grant", "half", "copy", "commit"))
    try:
        if died_after != "open" and (slot := child.do("grant", step)) is not None:
            if died_after == "half":
                child.do("copy", slot, step, 0.5)
            elif died_after != "grant":
                child.do("copy", slot, step)
            if died_after == "commit":
                child.do("commit", slot, step)
    except HoldfastError:  # a save that fails, on a full tmpfs for one, is no violation
        died_after = f"the failure of {died_after}"
    finally:
        child.kill()
    world.save()
    return f"rank {member} after {died_after}"


def _kill_daemon(world: World, member: int, rng: random.Random) -> str:
    daemon = world.job.daemon(member)
    if rng.random() < 0.5:
        threading.Event().wait(rng.uniform(0.0, 0.05))
    daemon.kill()
    return daemon.node


def _end_daemon(world: World, member: int, rng: random.Random) -> str:
    """End the daemon as Kubernetes does: it may persist what is due, and is killed if that takes
    too long."""
    daemon, grace_s = world.job.daemon(member), rng.uniform(0.5, 3.0)
    daemon.send_signal(signal.SIGTERM)
    if wait_dead(daemon, grace_s):
        return daemon.node
    daemon.kill()
    return f"{daemon.node}, killed after {grace_s:.1f} s"


def _kill_at(world: World, member: int, name: str, trap: Trap) -> str:
    return f"{world.job.nodes[member]} at {name}" if world.kill_at(member, trap) else ""


def _kill_within(world: World, member: int, rng: random.Random) -> str:
    point = rng.choice([p for p in TRAPS if member == LEADER or p.victims != (LEADER,)])
    return _kill_at(world, member, point.name, point.traps[0])


def _kill_owner(world: World, member: int, rng: random.Random) -> str:
    when = rng.choice(("before", "during", "after"))
    return _kill_at(world, member, f"BuildParity, {when}", Trap(at="BuildParity", when=when))


def _kill_node(world: World, member: int, rng: random.Random) -> str:
    if rng.random() < 0.5:
        world.save()
    world.lose(member)
    return f"{world.job.nodes[member]} with its memory"


def _stop_daemon(world: World, member: int, rng: random.Random) -> str:
    daemon, pause_s = world.job.daemon(member), rng.uniform(0.05, 0.6)
    daemon.send_signal(signal.SIGSTOP)
    world.later(pause_s, daemon)
    world.save()
    return f"{daemon.node} for {pause_s:.2f} s"


def _freeze_node(world: World, member: int, _: random.Random) -> str:
    world.freeze(member)
    return f"{world.job.nodes[member]} until after it was replaced"


def _kill_control(world: World, _: int, rng: random.Random) -> str:
    if not world.controlled:
        return ""
    world.cluster.control.stop()
    world.controlled = False
    for _save in range(rng.randrange(3)):
        world.save()
    return "with all it knew"


# --- bytes ----------------------------------------------------------------------------------------


def _flip(path: Path, offset: int, rng: random.Random) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ rng.choice(BITS)]))


def _flip_one(world: World, member: int, rng: random.Random, pattern: str) -> str:
    """Flip a byte of one of the job's files that match `pattern`."""
    files = world.job.daemon(member).root / "jobs" / world.job.name
    found = sorted(path for path in files.glob(pattern) if path.stat().st_size)
    if not found:
        return ""
    path = rng.choice(found)
    offset = rng.randrange(path.stat().st_size)
    _flip(path, offset, rng)
    return f"{world.job.nodes[member]} {path.name} at {offset}"


def _flip_arena(world: World, member: int, rng: random.Random) -> str:
    slots = [s for s in _held(world, member, "slots") if s["state"] == "sealed"]
    files = world.job.daemon(member).root / "jobs" / world.job.name
    arenas = sorted(files.glob("arenas/*/arena"))
    if not slots or len(arenas) != 1:
        return ""
    slot = int(str(rng.choice(slots)["slot"]))
    offset = slot * (arenas[0].stat().st_size // 3) + rng.randrange(world.job.rank_bytes(member))
    _flip(arenas[0], offset, rng)
    return f"{world.job.nodes[member]} slot {slot} at {offset}"


def _held(world: World, member: int, what: str) -> list[dict[str, object]]:
    return list(world.job.daemon(member).job(world.job.name).get(what, ()))


def _flip_parity(world: World, member: int, rng: random.Random) -> str:
    return _flip_one(world, member, rng, "parity/*.block")


def _flip_manifest(world: World, member: int, rng: random.Random) -> str:
    """Flip a byte of a manifest. In half of the cases the next daemon finds it, otherwise the next
    verification."""
    if rng.random() < 0.5:
        world.job.daemon(member).kill()
    return _flip_one(world, member, rng, "arenas/*/slot-*.manifest")


def _flip_entry(world: World, member: int, rng: random.Random) -> str:
    world.job.daemon(member).kill()
    return _flip_one(world, member, rng, "parity/*.entry")


def _fill_tmpfs(world: World, member: int, rng: random.Random) -> str:
    world.hogs.append(fill(world.job.daemon(member).root))
    for _ in range(1 + rng.randrange(3)):
        world.save()
    return world.job.nodes[member]


def _lie_about_identity(world: World, member: int, rng: random.Random) -> str:
    """Restart the daemon with a certificate that must be refused; the recovery puts the right one
    back."""
    if not world.guarded:
        return ""
    why, daemon = rng.choice(sorted(world.surroundings.wrong)), world.job.daemon(member)
    right, daemon.tls = daemon.tls, world.surroundings.wrong[why]
    refused = len(daemon.logged("control_unreachable"))
    daemon.kill()
    world.cluster.control.forget(daemon.node)
    try:
        daemon.start()
        wait_for(
            f"{daemon.node} to be refused",
            lambda: not daemon.alive or len(daemon.logged("control_unreachable")) > refused,
        )
        world.save()
        assert daemon.node not in world.cluster.control.beats, f"{daemon.node} got through: {why}"
    finally:
        daemon.kill()
        daemon.tls = right
    return f"{daemon.node} with {why}"


# --- Redis ----------------------------------------------------------------------------------------


def _break_redis(world: World, _: int, rng: random.Random) -> str:
    how = rng.choice(("killed", "hangs", "wiped"))
    if world.redis is None or world.redis_hangs:
        return ""
    match how:
        case "killed" | "wiped":
            wipe(world.redis)
        case "hangs":
            world.redis.stop()
            world.redis_hangs = True
    world.save()
    return how


KINDS = (
    Kind("kill_rank", "ranks", _kill_rank, needs_trainers=True, weight=2),
    Kind("kill_daemon", "daemons", _kill_daemon),
    Kind("end_daemon", "daemons", _end_daemon),
    Kind("kill_daemon_within", "daemons", _kill_within, needs_trainers=True),
    Kind("kill_leader", "daemons", _kill_daemon, only=LEADER),
    Kind("kill_parity_owner", "daemons", _kill_owner, needs_trainers=True),
    Kind("stop_daemon", "daemons", _stop_daemon, needs_trainers=True),
    Kind("kill_node", "nodes", _kill_node, loses_memory=True),
    Kind("freeze_node", "nodes", _freeze_node, loses_memory=True, needs_trainers=True),
    Kind("kill_control", "control loop", _kill_control, needs_trainers=True),
    Kind("flip_arena", "bytes", _flip_arena, loses_memory=True),
    Kind("flip_parity", "bytes", _flip_parity, loses_memory=True),
    Kind("flip_manifest", "bytes", _flip_manifest, loses_memory=True),
    Kind("flip_parity_entry", "bytes", _flip_entry, loses_memory=True),
    Kind("fill_tmpfs", "tmpfs", _fill_tmpfs, needs_trainers=True, needs="mount"),
    Kind("break_redis", "Redis", _break_redis, needs_trainers=True, needs="redis"),
    Kind("storage_fails", "storage", storage.fail),
    Kind("storage_is_away", "storage", storage.go_away),
    Kind("storage_is_slow", "storage", storage.slow_down),
    Kind("fill_storage", "storage", storage.fill_up, needs_trainers=True, needs="mount"),
    Kind("kill_persisting", "storage", storage.kill_writer, needs_trainers=True, weight=4),
    Kind("flip_stored", "storage", storage.flip, needs_trainers=True, weight=2),
    Kind("lose_group", "nodes", storage.lose_group, beyond=True),
    Kind(
        "wrong_identity",
        "identity",
        _lie_about_identity,
        needs_trainers=True,
        weight=2,
        needs="identity",
    ),
)
"""All of them."""
