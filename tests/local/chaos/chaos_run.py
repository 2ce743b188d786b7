"""Rounds of faults, each followed by a recovery and by the checks of the invariants.

The faults of a round follow from the seed and the round's number alone, so a round can be repeated
by itself; the exact moment at which a fault strikes depends on the machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import chaos_records
import grpc
from chaos_cluster import Surroundings
from chaos_kinds import KINDS, Kind
from chaos_tier import DIRECTORY, OBJECTS, WRONG
from chaos_world import Ghost, Shape, World
from harness import Restored
from raw_trainer import RawTrainer
from waiting import error_of

from holdfast_core.errors import CorruptError, HoldfastError, StaleEpochError, UnknownSessionError
from holdfast_core.snapshots.generations import Generation

SHAPES = (
    Shape(members=3, group_size=3),
    Shape(members=4, group_size=2),
    Shape(members=4, group_size=4),
)
ROUNDS_PER_WORLD = 25
ATTEMPTS = 5
"""Epochs that a recovery may take: a trainer that cannot restore exits, and the next one begins."""
FENCED_S = 20.0
"""Seconds within which a member that goes on after it was replaced must be fenced."""
VIOLATIONS_MAX = 5
"""Then a run ends."""


NOTHING = "the beginning"


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(slots=True)
class Fault:
    """One fault and its consequences."""

    number: int
    round: int
    kind: str
    lane: str
    target: str
    while_recovering: bool
    time_s: float
    """When it was done, since the run began; one that waits for its moment has met it by then."""
    epoch: int
    step: int
    """Newest step that was saved before it."""
    restored_step: int | None = None
    lost_steps: int | None = None
    seconds: float | None = None
    """From the fault until all ranks had restored."""
    protected_s: float | None = None
    """From the fault until a newer step was protected."""
    source: str = ""
    """Where ranks restored from: `local`, `parity`, `storage`, or several; or the beginning."""
    attempts: int = 0
    """Epochs that the recovery took."""
    violation: str = ""


@dataclass(frozen=True, slots=True)
class Draw:
    """A fault that a round is to cause."""

    kind: Kind
    member: int
    while_recovering: bool


def draw_round(
    seed: int,
    number: int,
    shape: Shape,
    present: frozenset[str],
    kinds: Sequence[Kind] = KINDS,
) -> list[Draw]:
    """One fault, or several in quick succession; at most one member of a group loses memory."""
    rng = random.Random(f"{seed} {number}")
    draws: list[Draw] = []
    lost: dict[int, int] = {}
    for index in range(rng.choice((1, 1, 2, 3, 4, 5))):
        while_recovering = index > 0 and rng.random() < 0.5
        recovering = while_recovering or any(d.while_recovering for d in draws)
        possible = [
            kind
            for kind in kinds
            if (not kind.needs or kind.needs in present)
            and not (kind.needs_trainers and recovering)
        ]
        if not possible:
            continue
        (kind,) = rng.choices(possible, [kind.weight for kind in possible])
        member = rng.randrange(shape.members) if kind.only is None else kind.only
        group = shape.group_of(member)
        if kind.loses_memory and lost.setdefault(group, member) != member:
            continue
        draws.append(Draw(kind, member, while_recovering))
    return draws


@dataclass(slots=True)
class Chaos:
    """A run. `faults` and `wrong_bytes` are its outcome."""

    seed: int
    surroundings: Surroundings = field(default_factory=Surroundings)
    kinds: Sequence[Kind] = KINDS
    say: Callable[[str], None] = print
    records: Path | None = None
    """Directory for the records of violations; None keeps none."""
    faults: list[Fault] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    wrong_bytes: int = 0
    restores: int = 0
    """Ranks whose restored bytes were compared."""
    fenced: int = 0
    """Writes of an older epoch that were refused."""
    sets: int = 0
    """In storage, whose bytes were compared."""
    rounds: int = 0
    began: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    """How long it took."""
    _flipped: bool = False

    def run(self, numbers: Iterable[int], *, until: float) -> None:
        """Run the rounds `numbers`, until the monotonic time `until` or too many violations."""
        world: World | None = None
        try:
            for number in numbers:
                if time.monotonic() > until or len(self.violations) >= VIOLATIONS_MAX:
                    break
                if world is not None and number % ROUNDS_PER_WORLD == 0:
                    self._end(world, number)
                    world = None
                world = world or self._world(number)
                if not self._round(world, number):
                    world.close()
                    world = None
        finally:
            self.ended_s = self._now()
            if world is not None:
                world.close()

    def _world(self, number: int) -> World:
        rng = random.Random(f"{self.seed} world {number // ROUNDS_PER_WORLD}")
        shape, around = rng.choice(SHAPES), self.surroundings
        stores = rng.choice((DIRECTORY, DIRECTORY, OBJECTS))
        kind = stores if around.objects is not None else DIRECTORY
        return World(
            shape,
            around,
            tier_kind=kind,
            guarded=rng.random() < 0.5 and around.certificates is not None,
            operated=rng.random() < 0.5,
        )

    def _end(self, world: World, number: int) -> None:
        """Check that persisting has come back, whatever happened to storage, and end the world."""
        try:
            world.persist()
            self._check_storage(world)
        except (AssertionError, HoldfastError, grpc.RpcError, OSError) as error:
            self._violated(world, number - 1, [], error)
        finally:
            world.close()

    # --- a round ----------------------------------------------------------------------------------

    def _round(self, world: World, number: int) -> bool:
        """Run one round: whether the world can still be used after it."""
        self.rounds += 1
        rng = random.Random(f"{self.seed} {number} details")
        mine: list[Fault] = []
        self._flipped = False
        try:
            world.begin()
            world.floor, old = world.job.generation, rng.choice(world.job.trainers)
            world.job.carry(rng.random() < 0.5)
            present = self.surroundings.present
            for draw in draw_round(self.seed, number, world.shape, present, self.kinds):
                if draw.while_recovering:
                    world.form()
                self._strike(world, draw, number, rng, mine)
            restored = self._recover(world, mine)
            self._check(world, restored, world.floor)
            self._check_storage(world)
            self._check_fenced(world, old)
            world.train()
            now = self._now()
            for fault in mine:
                fault.protected_s = now - fault.time_s
        except (AssertionError, HoldfastError, grpc.RpcError, OSError) as error:
            self._violated(world, number, mine, error)
            return False
        finally:
            for fault in mine:
                self.say(_line(fault))
        return True

    def _strike(
        self, world: World, draw: Draw, number: int, rng: random.Random, mine: list[Fault]
    ) -> None:
        if draw.member in world.gone or not world.job.daemon(draw.member).alive:
            return
        step = world.job.step
        target = draw.kind.strike(world, draw.member, rng)
        if not target:
            return
        self._flipped |= draw.kind.lane == "bytes"
        fault = Fault(
            number=len(self.faults) + 1,
            round=number,
            kind=draw.kind.name,
            lane=draw.kind.lane,
            target=target,
            while_recovering=draw.while_recovering,
            time_s=self._now(),
            epoch=world.job.epoch,
            step=step,
        )
        self.faults.append(fault)
        mine.append(fault)

    def _recover(self, world: World, mine: list[Fault]) -> list[Restored]:
        newest = world.job.step
        for attempt in range(1, ATTEMPTS + 1):
            world.form()
            try:
                restored = world.resume()
            except (AssertionError, HoldfastError, grpc.RpcError) as error:
                corrupt = isinstance(error, CorruptError)
                if attempt == ATTEMPTS or (corrupt and not self._flipped):
                    raise
                continue
            break
        now = self._now()
        sources = "+".join(sorted({source if found else NOTHING for found, _, source in restored}))
        generation = restored[0][0]
        for fault in mine:
            fault.seconds, fault.attempts, fault.source = now - fault.time_s, attempt, sources
            fault.restored_step = None if generation is None else generation.step
            fault.lost_steps = newest - (fault.restored_step or 0)
        return restored

    def _check(self, world: World, restored: list[Restored], floor: Generation | None) -> None:
        """Check that all ranks restored exactly the bytes of one generation, at least `floor`."""
        generations = {generation for generation, _, _ in restored}
        if len(generations) != 1:
            raise Violation(f"torn state: ranks restored {generations}")
        (generation,) = generations
        if generation is None:
            if floor is not None:
                raise Violation(f"no recovery line after {floor} was safe: {restored[0][2]}")
            return
        if floor is not None and generation < floor:
            raise Violation(f"{generation} was restored after {floor} was safe")
        stored = any(source == "storage" for _, _, source in restored)
        if stored and generation not in world.tier.complete():
            raise Violation(f"{generation} was restored from storage, and is not complete there")
        for trainer, (_, payload, _) in zip(world.job.trainers, restored, strict=True):
            self.restores += 1
            if payload != trainer.content_at(generation):
                self.wrong_bytes += 1
                raise Violation(f"rank {trainer.rank} restored other bytes than {generation} has")

    def _check_storage(self, world: World) -> None:
        """Check that complete sets in storage have the bytes that were captured."""
        trainers = world.job.trainers
        problem = world.tier.wrong(lambda rank, found: trainers[rank].content_at(found))
        if problem:
            self.wrong_bytes += problem.startswith(WRONG)
            raise Violation(problem)
        self.sets += world.tier.take_count()

    def _check_fenced(self, world: World, old: RawTrainer) -> None:
        """Check that a rank of the previous epoch cannot write, nor a member that was replaced."""
        if old.daemon.alive and old.daemon is world.job.daemon(old.rank):
            self._must_be_refused(old)
        world.thaw()
        for ghost in list(world.ghosts):
            self._look_at(world, ghost)

    def _look_at(self, world: World, ghost: Ghost) -> None:
        if ghost.has_let_go(world.job.name):
            self._must_be_refused(ghost.trainer)
            world.bury(ghost)
        elif time.monotonic() > ghost.since + FENCED_S:
            raise Violation(f"{ghost.daemon.node} was replaced, goes on, and is not fenced")
        else:
            # All members that it knew may be gone: the control loop informs those that are behind.
            world.job.publish_to(ghost.daemon.node)

    def _must_be_refused(self, trainer: RawTrainer) -> None:
        try:
            trainer.grant(1_000_000)
        except grpc.RpcError as refused:
            error = error_of(refused)
            if isinstance(error, StaleEpochError | UnknownSessionError):
                self.fenced += 1
                return
            raise
        raise Violation(f"rank {trainer.rank} of epoch {trainer.epoch} may still write")

    def _violated(self, world: World, number: int, mine: list[Fault], error: Exception) -> None:
        what = str(error) or repr(error)
        last = mine[-1] if mine else None
        if last is not None:
            last.violation = what
        where = f"round {number}, fault {last.number if last else len(self.faults)}"
        first = number - number % ROUNDS_PER_WORLD
        again = f'make chaos ARGS="--seed {self.seed} --first {number} --rounds 1"'
        whole = f"--seed {self.seed} --first {first} --rounds {number - first + 1}"
        self.violations.append(
            f"{where}: {what} (again: {again}; with all that went before it: {whole})"
        )
        self.say(f"VIOLATION {self.violations[-1]}")
        if self.records is not None:
            schedule = [asdict(fault) for fault in self.faults if fault.round >= first]
            directory = self.records / f"violation-{len(self.violations)}"
            chaos_records.keep(directory, world, self.violations[-1], schedule)

    def _now(self) -> float:
        return time.monotonic() - self.began


def _line(fault: Fault) -> str:
    """A fault as a line of the progress output."""
    when = "while recovering" if fault.while_recovering else ""
    if fault.seconds is None:
        came = "NOT RECOVERED"
    else:
        what = (
            "began anew" if fault.restored_step is None else f"restored step {fault.restored_step}"
        )
        came = (
            f"{what} from {fault.source} after {fault.seconds:.2f} s, {fault.lost_steps} steps lost"
        )
    return (
        f"{fault.time_s:7.1f} s  #{fault.number:<4} {fault.kind:<19} {fault.target} {when} → {came}"
    )
