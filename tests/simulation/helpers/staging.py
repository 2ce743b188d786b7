"""Model of a pipeline whose stages are lost: the SDK's loop, windows, logs and replays, in threads.

Four to eight ranks train in two to six stages, each in a thread of its own with a real session,
real boundaries and real snapshots; what is played is the world: messages, deaths, and when a window
is protected. One seed decides who dies when, single ranks or nodes of two, together or one after
another, in a step, a replay or a restore or before ranks have agreed on one, who hears of it late,
and what a replay does wrong. Some stages have experts that only some of their ranks hold, and some
pipelines are rings, in which each rank has two parts of the model. After every completed step each
rank must have the bytes of an undisturbed run; a stage whose neighbours have logged enough must
repeat steps alone.

Threads may be slow, and a schedule is to have the same course all the same. How far a rank still
comes that has yet to hear of a loss depends on its thread, so no further loss strikes it there.
What else depends on threads is how far the others have come when a rank dies, within their step or
in a replay, and the model expects nothing that follows from it.

In some schedules a step that is executed again, in place of one that was cut off or given up, gets
other data, as from a loader that draws anew. Then each rank must have the bytes of a run in which
all steps had the data of their last executions, and only a replay has the data of the first one.

Some schedules have a snapshot of all at every n-th step in place of windows. Others have shards in
place of stages, too: each rank holds a layer that nobody else has. Then lost ranks must restore
alone exactly where the line is of the others' step.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

import holdfast
from holdfast._agree.exchange import Broadcast
from holdfast._daemon.handles import SaveHandle
from holdfast._elastic.pipeline import Pipeline
from holdfast._elastic.session import ElasticSession
from holdfast._session.interface import WorldSession
from holdfast._session.protected import ProtectedSession
from holdfast.testing import FakeDaemon
from holdfast_core.errors import UnreachableError
from holdfast_core.job.snapshots import Full, Repeats, SparseWindows
from holdfast_core.protection.replaying import ReplayPlan, pipeline_neighbours
from holdfast_core.protection.standing import (
    RankStanding,
    StandingAction,
    StandingVerdict,
    standing,
)
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.units import UnitKey, UnitKind
from holdfast_core.topology import Topology

RANKS, MICROBATCHES, WIDTH = 4, 2, 3
"""Ranks of most schedules; some have more."""
STEPS_MAX = 36
"""Most steps of a schedule."""
ROOM = 1 << 20
"""Bytes for logs that never make room."""
WAIT_S = 100.0
FRUITLESS_MAX = 3
"""Replays of a step that lead no further, after which all ranks go back."""
PARTS = Topology(dp=1, tp=2, pp=2)
"""Stages whose ranks hold different parts, so that one that is lost takes the other back."""
WIDE = Topology(dp=2, pp=3)
"""Three stages of replicas, so that one can be lost while another one has a live replica left."""
LONG = Topology(dp=1, pp=6)
"""So many stages that a scope can widen again and again."""
EXPERTS = Topology(dp=2, ep=2, pp=3)
"""Stages in which each rank has experts that nobody else has."""
SPREAD = Topology(dp=4, ep=2, pp=2)
"""Stages in which two ranks have the same experts, on different nodes if these have two ranks."""
POINTS = ("forward", "backward", "reduce", "sum", "vote", "optimizer", "settle", "restore")
"""Where a rank may die: before the call of that name. After another loss it may also die before
`stand`, in which ranks state what they have."""
ENDED = "the training world has ended"


class Killed(BaseException):
    """The process dies here."""


class Stopped(BaseException):
    """Another process has failed, and the schedule ends here."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Processes that die at the same instant."""

    step: int
    """First step in which it strikes, or in a later one, when `victims[0]` comes to `point`."""
    point: str
    victims: tuple[int, ...]
    unseen: frozenset[int] = frozenset()
    """Ranks that do not see the result of the vote in which the others die."""
    late: frozenset[int] = frozenset()
    """Ranks that come to `point` of the same step only afterwards, and have yet to hear of it."""
    corrupts: bool = False
    """Whether a bit of a survivor's log flips at that instant."""
    diverges: bool = False
    """Whether the next replay computes something else."""
    lies: str = ""
    """What survivors' logs no longer hold from that instant, although they state it: `messages` of
    the newest step, or `digests` of what they had received."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What one seed decides."""

    seed: int
    topology: Topology
    window: int
    steps: int
    losses: tuple[Loss, ...] = ()
    log_bytes: int = ROOM
    log_received: bool = False
    """Whether logs keep what ranks receive, too."""
    repeats: Repeats = Repeats.TRAINING
    """What a restore of a window repeats."""
    every: int = 0
    """Steps from one snapshot of all to the next; 0 for windows."""
    ring: bool = False
    """Whether each rank has two parts of the model, and the last stage sends to the first one."""
    per_node: int = 1
    """Ranks of a node; those of one are often lost together."""
    redraws: bool = False
    """Whether a step gets other data each time that it is executed, but in a replay."""
    draws: tuple[int, ...] = ()
    """Numbers of the data of all steps, where nothing is lost; empty where all are 0."""

    @property
    def shards(self) -> bool:
        """Whether ranks have shards, and not stages."""
        return self.topology.pp == 1

    @classmethod
    def of_two_timelines(cls, seed: int) -> Schedule:
        """All ranks go back, in their processes, and train on with other data. Then a stage is
        lost, before anything newer is protected."""
        first, second = random.Random(seed).sample(range(RANKS), 2)
        return cls(
            seed=seed,
            topology=Topology(dp=1, pp=RANKS),
            window=3,
            steps=10,
            every=4,
            losses=(
                Loss(step=7, point="reduce", victims=(first,), diverges=True),
                Loss(step=8, point="reduce", victims=(second,)),
            ),
            redraws=True,
        )

    @classmethod
    def of_widening(cls, seed: int) -> Schedule:
        """A stage is lost, and while it repeats steps, others again and again: one that repeats
        steps as well, and one more."""
        rng = random.Random(seed)
        stages = rng.sample(range(LONG.pp), LONG.pp - 1)
        points = [rng.choice(("forward", "sum")) for _ in stages[1:]]
        return cls(
            seed=seed,
            topology=LONG,
            window=3,
            steps=12,
            every=rng.choice((0, 6)),
            losses=(
                Loss(step=8, point="reduce", victims=(stages[0],)),
                *(
                    Loss(step=2, point=point, victims=(rng.choice(stages[:lost]), stages[lost]))
                    for lost, point in enumerate(points, start=1)
                ),
            ),
            log_received=rng.random() < 0.5,
            ring=rng.random() < 0.25,
            redraws=rng.random() < 0.3,
        )

    @classmethod
    def of(cls, seed: int) -> Schedule:
        rng = random.Random(seed)
        if seed % 16 == 5:
            return cls.of_two_timelines(seed)
        if seed % 32 == 9:
            return cls.of_widening(seed)
        small = (*[Topology(dp=1, pp=4)] * 4, Topology(dp=2, pp=2), PARTS)
        topology = rng.choice((*small, *small, WIDE, WIDE, EXPERTS, SPREAD, LONG))
        window, count = rng.choice((2, 3, 4)), rng.choice((1, 2, 2, 3))
        widens = topology == LONG and rng.random() < 0.7
        count = rng.choice((4, 5)) if widens else count
        per_node = rng.choice((1, 2))
        losses: list[Loss] = []
        every = rng.choice((0, 0, 0, 4))
        step = rng.choice((2, window + 2, window + 3))
        if every or widens:  # something is protected
            step = max(step, every + 2 if every else window + 2)
        for _ in range(count):
            at = step + rng.choice((0, 0, 1, 2, window))
            loss = _loss(rng, at, topology, per_node)
            kind = rng.random()
            everyone = losses and len(losses[-1].victims) == topology.world_size
            if widens:
                loss = _loss_beside(rng, loss, losses, topology)
            elif losses and (kind < 0.3 or everyone):  # within the replay
                loss = replace(loss, step=2)
                if not everyone and kind < 0.2:  # by one of those that repeat steps
                    loss = _loss_again(rng, loss, losses[-1])
            elif losses and kind < 0.6:  # before anything newer is protected
                loss = replace(loss, step=step + 1, point="settle", unseen=frozenset())
            losses.append(loss)
            step = max(step, loss.step)
        if not widens:
            losses = _vary(seed, losses, topology.world_size)
        return cls(
            seed=seed,
            topology=topology,
            window=window,
            steps=step + 2 * window + 2,
            losses=tuple(losses),
            log_bytes=ROOM if rng.random() < 0.8 or widens else rng.choice((200, 1000)),
            repeats=rng.choice(tuple(Repeats)),
            log_received=rng.random() < 0.5,
            every=every,
            ring=rng.random() < 0.25,
            per_node=per_node,
            redraws=rng.random() < 0.3,
        )

    @classmethod
    def of_shards(cls, seed: int) -> Schedule:
        rng = random.Random(f"shards {seed}")
        losses: list[Loss] = []
        every = rng.choice((1, 1, 1, 3))
        step = every + rng.choice((2, 3, 4))  # something is protected
        for _ in range(rng.choice((1, 2, 3))):
            loss = _loss(rng, step, Topology(dp=RANKS), lies=False)
            if losses and rng.random() < 0.3:  # while ranks restore
                loss = replace(loss, step=2, point="restore", unseen=frozenset())
            losses.append(loss)
            step = max(step, loss.step) + rng.choice((1, 2, 5))
        return cls(
            seed=seed,
            topology=Topology(dp=RANKS),
            window=1,
            steps=step + 4,
            losses=tuple(_vary(seed, losses, RANKS)),
            every=every,
        )


def _loss(
    rng: random.Random, step: int, topology: Topology, per_node: int = 1, *, lies: bool = True
) -> Loss:
    ranks = range(topology.world_size)
    victims = tuple(rng.sample(ranks, rng.choice((1, 1, 1, 1, 2, 2, len(ranks)))))
    if per_node > 1 and rng.random() < 0.5:  # nodes
        nodes = rng.sample(range(len(ranks) // per_node), rng.choice((1, 1, 2)))
        victims = tuple(node * per_node + lane for node in nodes for lane in range(per_node))
    elif (
        topology in (WIDE, EXPERTS, SPREAD) and rng.random() < 0.6
    ):  # a stage, and perhaps a rank of another one
        stage = rng.randrange(topology.pp) * topology.dp
        lost = range(stage, stage + topology.dp)
        more = rng.sample([rank for rank in ranks if rank not in lost], rng.choice((0, 1, 1)))
        victims = tuple(rng.sample([*lost, *more], len(lost) + len(more)))
    point = rng.choice(POINTS)
    others = [rank for rank in ranks if rank not in victims]
    unseen = rng.sample(others, rng.randint(0, len(others))) if point == "vote" else ()
    kind = rng.random() if lies else 1.0
    return Loss(
        step=step,
        point=point,
        victims=victims,
        unseen=frozenset(unseen),
        corrupts=kind < 0.1,
        diverges=0.1 <= kind < 0.25,
        lies="messages" if 0.25 <= kind < 0.33 else "digests" if 0.33 <= kind < 0.4 else "",
    )


def _loss_again(rng: random.Random, loss: Loss, before: Loss) -> Loss:
    """A loss that begins when one of the victims of the loss `before` repeats a step."""
    first = rng.choice(before.victims)
    return replace(
        loss,
        victims=(first, *(rank for rank in loss.victims if rank != first)),
        point=rng.choice(("forward", "backward", "reduce", "sum")),
        unseen=frozenset(),
    )


def _loss_beside(
    rng: random.Random, loss: Loss, before: Sequence[Loss], topology: Topology
) -> Loss:
    """A loss of one more stage than all those `before`, when a rank of these repeats steps."""
    lost = {rank for one in before for rank in one.victims}
    more = rng.choice([rank for rank in range(topology.world_size) if rank not in lost])
    plain = replace(loss, corrupts=False, diverges=False, lies="", unseen=frozenset())
    if not lost:
        return replace(plain, victims=(more,), point="reduce")
    first = rng.choice(sorted(lost))
    return replace(plain, step=2, victims=(first, more), point=rng.choice(("forward", "sum")))


def _vary(seed: int, losses: Sequence[Loss], ranks: int) -> list[Loss]:
    """Let some ranks hear late of some losses, and some losses follow at once, before ranks have
    agreed on how to go on after the one before."""
    rng, varied = random.Random(f"vary {seed}"), list[Loss]()
    for loss in losses:
        others = [rank for rank in range(ranks) if rank not in loss.victims]
        if varied and rng.random() < 0.15:
            varied.append(replace(loss, step=1, point="stand", unseen=frozenset()))
        elif loss.point not in ("settle", "restore") and not loss.unseen and rng.random() < 0.3:
            late = rng.sample(others, rng.randint(0, len(others)))
            varied.append(replace(loss, late=frozenset(late)))
        else:
            varied.append(loss)
    return varied


@dataclass(eq=False)
class Process:
    """One trainer."""

    rank: int
    alive: bool = True
    world: PipelineWorld | None = None
    session: ElasticSession | None = None
    pipeline: Pipeline | None = None
    newest: SaveHandle | None = None
    """Handle of the newest save."""
    daemon: FakeDaemon | None = None
    completed: int | None = None
    """Step that it has completed; that of the others while it repeats steps alone."""
    repeats_in: int = 0
    """Newest epoch in which it repeats steps alone."""
    repeated: int = 0
    """Newest step that it has repeated alone, since all have completed one."""
    draw: int = 0
    """Number of the data of the step that it executes."""
    first_in: dict[int, int] = field(default_factory=dict)
    """Epoch → the first step that it began there."""


@dataclass(frozen=True, kw_only=True)
class Completed:
    """A step that a rank has completed where data are drawn anew."""

    rank: int
    step: int
    draws: tuple[int, ...]
    """Numbers of the data of all steps up to this one."""
    digest: int
    epoch: int


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What a loss is to lead to."""

    loss: Loss
    expected: str
    """`live`, `alone` or `global`; empty where several are right."""
    scope: frozenset[int]
    """Stages that lack state, and are to go back."""
    survivors: tuple[Process, ...]
    completed: dict[int, int]
    """Rank of a survivor → the newest step that it had completed."""


class Cluster:
    """What all processes share.

    Args:
        directory: folder of all daemons.
    """

    def __init__(self, schedule: Schedule, directory: Path) -> None:
        self.schedule, self.directory = schedule, directory
        self.topology = schedule.topology
        self.epoch = 1
        self.changed = threading.Condition()
        self.processes: dict[int, Process] = {}
        self.threads: list[threading.Thread] = []
        self.failures: list[BaseException] = []
        self.passed = 0
        """Points that ranks have passed; no time is too long for a run in which these grow."""
        self.states: dict[tuple[int, int], int] = {}
        """(Rank, step) → digest of the state after it."""
        self.completed: list[Completed] = []
        """All completed steps, where data are drawn anew."""
        self._drawn: dict[int, int] = {}
        """Step → number of the data of its newest execution that was no replay."""
        self.recoveries: dict[int, Recovery] = {}
        """Epoch → the loss that led to it."""
        self.diverging: set[int] = set()
        """Epochs whose replays compute something else."""
        self.lied = False
        """Whether a log has begun to lie."""
        self.corrupted = False
        """Whether a bit of a log has flipped."""
        self.counts: Counter[str] = Counter()
        self.replays: dict[int, ReplayPlan] = {}
        """Epoch → the replay in which ranks have begun to repeat steps there."""
        self._left = list(schedule.losses)
        self._gathered: dict[tuple[Any, ...], dict[int, Any]] = {}
        self._messages: dict[tuple[Any, ...], list[bytes]] = {}
        self._lines: dict[int, Generation | None] = {}
        self._settled = 0
        """Newest step that all ranks have completed since the last loss."""
        self._settled_in = self._first_settled = 0
        """Newest epoch in which all ranks have completed a step, and the first such step."""
        self._repeating = frozenset[int]()
        """Stages that repeat steps alone since the last loss; empty when all ranks have completed a
        step since then."""
        self._fruitless = 0
        """Most replays since then that may count as fruitless."""
        self._reached = 0
        """Newest step since then that a replay has begun."""
        self._reached_before = 0
        """The same at the loss before."""
        self._returns_logs = False
        """Whether some ranks may not yet have got their logs back."""
        self._has_late_logs = False
        """Whether the logs of some ranks may begin after the line: replicas have given them their
        state since the newest generation was protected."""

    # --- processes --------------------------------------------------------------------------------

    def start(self, rank: int) -> None:
        """Start a process."""
        process = self.processes[rank] = Process(rank)
        thread = threading.Thread(target=self._run, args=(process,), daemon=True)
        self.threads.append(thread)
        thread.start()

    def _run(self, process: Process) -> None:
        try:
            try:
                train(self, process)
            finally:
                if process.session is not None:
                    process.session.close()  # the kernel closes the claim of its arena
        except Killed:
            self.start(process.rank)
        except Stopped:
            pass
        except BaseException as error:
            with self.changed:
                self.failures.append(error)
                self.epoch += 1  # wakes all others
                self.changed.notify_all()

    def at(self, point: str, process: Process, step: int) -> None:
        """Die here, if that is what comes next."""
        world, session = process.world, process.session
        assert world is not None
        with self.changed:
            self._live_or_die(process)
            self.passed += 1
            loss = self._next_at(point, step)
            if loss and process.rank in loss.late and session and session._replaying is None:
                self.changed.wait_for(lambda: self.epoch > world.met, WAIT_S)
                self._live_or_die(process)
                loss = self._next_at(point, step)
            # A rank that has yet to hear of a loss survives. How far it still comes is a matter of
            # threads, and a schedule is to have the same course each time.
            if loss and process.rank == loss.victims[0] and world.met == self.epoch:
                self._strike(loss)
                raise Killed

    def _next_at(self, point: str, step: int) -> Loss | None:
        """The next loss, if it strikes when a victim comes to `point` of `step`."""
        loss = self._left[0] if self._left else None
        if loss is None or loss.point != point or step < loss.step:
            return None
        return None if point == "vote" and loss.unseen else loss

    def _live_or_die(self, process: Process) -> None:
        if self.failures:
            raise Stopped
        if not process.alive:
            raise Killed

    def _strike(self, loss: Loss) -> None:
        """Let the victims of `loss` die, and begin the next epoch. With the lock held."""
        self._left.pop(0)
        dead = [self.processes[rank] for rank in loss.victims]
        living = tuple(one for one in self.processes.values() if one not in dead)
        expected, scope = self._expected(loss, living)
        for one in dead:
            one.alive = False
        self.epoch += 1
        self._settled = 0
        self.recoveries[self.epoch] = Recovery(
            loss=loss,
            expected=expected,
            scope=scope,
            survivors=living,
            completed={one.rank: one.completed or 0 for one in living},
        )
        if loss.corrupts:
            self.corrupted = True
            for one in living:
                _flip(one)
        if loss.lies:
            self.lied = True
            for one in living:
                _lie(one, loss.lies)
        if loss.diverges:
            self.diverging.add(self.epoch)
        self.changed.notify_all()

    def _expected(self, loss: Loss, living: Sequence[Process]) -> tuple[str, frozenset[int]]:
        """Where `loss` is to lead, if that is plain; see `Recovery`."""
        stages = [self.topology.coordinates(rank).pp for rank in loss.victims]
        gone = set(loss.victims)
        lacking = frozenset(
            self.topology.coordinates(rank).pp
            for rank in gone
            if gone.issuperset(self.topology.expert_replicas(rank))
        )
        # Those of a replay that is cut off lack their state as well.
        repeating, self._repeating = self._repeating, frozenset()
        lacking |= repeating
        if not living:
            return "global", lacking
        if self.schedule.shards:
            return self._expected_of_shards(loss), frozenset()
        # A rank that is lost elsewhere has lost its log, which a neighbour would need.
        given, scope = set(stages) - lacking, set(lacking)
        while joining := {one for one in given - scope if scope & self._stages_beside(one)}:
            scope |= joining
        lacking = frozenset(scope)
        # A replay that is cut off counts unless it certainly leads further than those before.
        further = max(one.repeated for one in living) > self._reached_before
        self._reached_before = self._reached
        self._fruitless += bool(repeating) and lacking == repeating and not further
        late = self._has_late_logs or (not self._settled and self._returns_logs)
        self._has_late_logs = late or self._loses_logs(loss, scope)
        self._returns_logs = bool(given - scope)
        doubtful = loss.corrupts or loss.diverges or loss.lies or self.lied or (late and lacking)
        known = self._settled or (repeating and self._fruitless < FRUITLESS_MAX)
        if not known or self.schedule.log_bytes < ROOM or doubtful:
            return "", lacking
        if not lacking:
            return "live", lacking
        if len(lacking) < self.topology.pp:
            self._repeating = lacking
            return "alone", lacking
        # The line may be of the step that the others have: unless training is repeated, and after
        # the first save of an epoch, which captures everything. Besides, a replay may just have
        # ended.
        repeats = self.schedule.repeats is Repeats.TRAINING and not self.schedule.every
        return "global" if repeats and self._settled > self._first_settled else "", lacking

    def _stages_beside(self, stage: int) -> set[int]:
        """The stages with which `stage` exchanges messages; perhaps some that do not exist."""
        count = self.topology.pp
        return {pp % count if self.schedule.ring else pp for pp in (stage - 1, stage + 1)}

    def _loses_logs(self, loss: Loss, scope: Collection[int]) -> bool:
        """Whether ranks outside the `scope` lose their logs for good."""
        for rank in loss.victims:
            beside = set(pipeline_neighbours(rank, self.topology, self.schedule.ring))
            returned = self.schedule.log_received and not beside & set(loss.victims)
            if self.topology.coordinates(rank).pp not in scope and not returned:
                return True
        return False

    def _expected_of_shards(self, loss: Loss) -> str:
        """Where the loss of shards is to lead, if that is plain: the step before was saved on all
        ranks when the one began in which they died, and its vote has not passed."""
        early = loss.point in ("forward", "backward", "reduce") or loss.point == "vote"
        if not self._settled or not early or loss.unseen:
            return ""
        return "global" if self._settled % self.schedule.every else "alone"

    # --- between processes ------------------------------------------------------------------------

    def meet(
        self,
        process: Process,
        epoch: int,
        what: tuple[Any, ...],
        value: Any,
        ranks: Sequence[int],
        *,
        votes_on: int = 0,
    ) -> list[Any]:
        """Exchange values between `ranks`; UnreachableError when the epoch ends before."""
        rank = process.rank
        with self.changed:
            self._live_or_die(process)
            values = self._gathered.setdefault((epoch, *what), {})
            values[rank] = value
            self.changed.notify_all()
            loss = self._left[0] if self._left else None
            unseen = loss is not None and loss.point == "vote" and loss.unseen and votes_on
            seen = loss is None or rank not in loss.unseen
            if loss is not None and unseen and votes_on >= loss.step and rank == loss.victims[0]:
                everyone = self.changed.wait_for(
                    lambda: len(values) == len(ranks) or self.epoch > epoch, WAIT_S
                )
                if everyone and self.epoch == epoch:
                    self._strike(loss)
                    raise Killed
            self.changed.wait_for(lambda: len(values) == len(ranks) or self.epoch > epoch, WAIT_S)
            if unseen and loss is not None and votes_on >= loss.step and not seen:
                self.changed.wait_for(lambda: self.epoch > epoch, WAIT_S)
                raise UnreachableError(ENDED)
            self._live_or_die(process)
            if len(values) < len(ranks):
                raise UnreachableError(ENDED)
            return [values[other] for other in ranks]

    def put(self, process: Process, epoch: int, to: int, data: bytes) -> None:
        with self.changed:
            self._live_or_die(process)
            if self.epoch > epoch:
                raise UnreachableError(ENDED)
            self._messages.setdefault((epoch, process.rank, to), []).append(data)
            self.changed.notify_all()

    def take(self, process: Process, epoch: int, source: int) -> bytes:
        with self.changed:
            queue = self._messages.setdefault((epoch, source, process.rank), [])
            self.changed.wait_for(lambda: queue or self.epoch > epoch or not process.alive, WAIT_S)
            self._live_or_die(process)
            if not queue:
                raise UnreachableError(ENDED)
            return queue.pop(0)

    def line(self, epoch: int) -> Generation | None:
        """Newest generation of which every rank has its snapshot, when the epoch begins."""
        with self.changed:
            if epoch not in self._lines:
                ranks = self.topology.world_size
                held = [
                    FakeDaemon(self.directory, rank=rank, world_size=ranks).sealed()
                    for rank in range(ranks)
                ]
                common = set.intersection(*(set(one) for one in held))
                self._lines[epoch] = max(common, default=None)
            return self._lines[epoch]

    # --- what must hold ---------------------------------------------------------------------------

    def count(self, event: str) -> None:
        """Count an event, of which several processes may have one at a time."""
        with self.changed:
            self.counts[event] += 1

    def begins(self, process: Process, epoch: int, step: int) -> None:
        """Check where a process goes on in an epoch."""
        assert process.session is not None
        plan = process.session._replaying
        if plan is not None:
            with self.changed:
                self.replays[epoch] = plan
                self._reached = max(self._reached, step)
        else:
            process.completed = step - 1  # less than before where it has gone back
        if epoch in process.first_in:
            return
        process.first_in[epoch] = step
        recovery = self.recoveries.get(epoch)
        if recovery is None or process not in recovery.survivors:
            return
        back = step <= recovery.completed[process.rank]
        self.count("goes back" if back else "goes on")
        if recovery.expected:
            if recovery.expected == "alone":
                # Those of the scope go back unless the line is of the step that they have.
                of_scope = self.topology.coordinates(process.rank).pp in recovery.scope
                wrong = back and not of_scope
            else:
                wrong = back != (recovery.expected == "global")
            assert not wrong, (
                f"rank {process.rank} goes on with step {step} in epoch {epoch} after step "
                f"{recovery.completed[process.rank]}, and {recovery.expected} was to follow from "
                f"{recovery.loss}"
            )
            self.count(recovery.expected)

    def draw(self, process: Process, epoch: int, step: int, *, again: bool) -> int:
        """Number of the data of a step: that of the execution before if it is executed `again`, and
        is to lead to the same state."""
        if not self.schedule.redraws:
            return self.schedule.draws[step - 1] if self.schedule.draws else 0
        with self.changed:
            self._live_or_die(process)
            if not again:
                self._drawn[step] = epoch
            return self._drawn[step]

    def completes(self, process: Process, epoch: int, step: int, *, alone: bool) -> None:
        """Check what a process has after a step that it has completed."""
        assert process.session is not None
        process.completed = max(step, process.completed or 0)
        process.repeated = step if alone else process.repeated
        inner = process.session._session
        assert isinstance(inner, ProtectedSession)
        if inner.repeats:
            return
        self.count("step alone" if alone else "step")
        digest = digest_of(inner)
        if alone and (epoch in self.diverging or self.lied):
            return  # what it has computed is compared when the replay ends
        if self.schedule.redraws:
            with self.changed:
                if process.alive:  # otherwise others may have gone on meanwhile
                    draws = tuple(self._drawn[one] for one in range(1, step + 1))
                    self.completed.append(
                        Completed(
                            rank=process.rank, step=step, draws=draws, digest=digest, epoch=epoch
                        )
                    )
        elif self.schedule.losses:
            assert digest == undisturbed(self.schedule)[process.rank, step], (
                f"rank {process.rank} has another state after step {step} in epoch {epoch}"
            )
        self.states[process.rank, step] = digest
        whole = self.schedule.log_bytes == ROOM and not self.schedule.every
        if process.pipeline and not self.recoveries and whole:
            kept = process.pipeline.log.last - process.pipeline.log.first + 1
            most = 2 * self.schedule.window + 1
            assert kept <= most, f"rank {process.rank} logs {kept} steps after step {step}"

    def ends_replay(self, process: Process, epoch: int, difference: str) -> None:
        """Check that only a replay that computes something else, or that had a wrong log, has
        differed from the first execution."""
        caused = self.lied or self.corrupted or epoch in self.diverging
        if process.repeats_in == epoch and difference and not caused:
            raise AssertionError(f"rank {process.rank} differs in epoch {epoch}: {difference}")

    def protects(self, epoch: int) -> None:
        """Note that a generation of an epoch is protected."""
        with self.changed:
            if epoch == self.epoch:
                self._has_late_logs = False

    def all_completed(self, epoch: int, step: int) -> None:
        """Note that all ranks of an epoch have completed a step, and that none is restoring."""
        with self.changed:
            if epoch != self.epoch:
                return
            frozen = any(
                one.session is None or one.session._session.repeats
                for one in self.processes.values()
            )
            self._settled = 0 if frozen else step
            if self._settled and self._settled_in != epoch:
                self._settled_in, self._first_settled = epoch, step
            if self._settled:
                self._repeating, self._returns_logs = frozenset(), False
                self._fruitless = self._reached = self._reached_before = 0
                for one in self.processes.values():
                    one.repeated = 0


class PlayedGroup:
    """Ranks of one stage."""

    def __init__(self, world: PipelineWorld, ranks: Sequence[int]) -> None:
        self._world, self._ranks = world, tuple(ranks)

    def add_up(self, tensor: torch.Tensor) -> None:
        """Sum over the stage's ranks, in their order."""
        parts = self._world.gather("group", tensor.clone(), self._ranks)
        tensor.copy_(functools.reduce(torch.add, parts))


class Transfer:
    """A message that is sent or received at the latest when somebody waits for it."""

    def __init__(self, complete: Callable[[], None]) -> None:
        self.wait = complete


class PipelineWorld:
    """The part of `World` that a session and a pipeline use."""

    stays, any_size = True, False
    failure: Exception | None = None
    groups_stay = False

    def __init__(self, cluster: Cluster, process: Process) -> None:
        self._cluster, self._process, self.rank = cluster, process, process.rank
        self.epoch, self._rounds, self._left = 0, 0, True
        self.met = 0
        """Newest epoch that its process has heard of."""
        self._calls: Counter[tuple[Any, ...]] = Counter()
        self.size, self.nproc = cluster.topology.world_size, cluster.schedule.per_node
        process.world = self
        self.verdict = self.stand(RankStanding())
        while self.verdict.action is StandingAction.FORWARD:
            self.verdict = self.stand(RankStanding())
        self.form()

    @property
    def ended(self) -> bool:
        return self._left or self._cluster.epoch > self.epoch

    def begin_alone(self, *, held_beside: bool) -> None:
        """The model's processes always stay."""

    def begin_step(self, step: int) -> None:
        """The model's scripts make no groups."""

    def go_back_to(self, step: int) -> None:
        """As `begin_step`."""

    def finish_collectives(self, since: Any = None) -> Any:
        """The model's collectives have their results when they return."""

    def build_again(self, *_: Any) -> str:
        """The model's worlds have one size."""
        return ""

    def check_process(self) -> None:
        """Threads do not fork."""

    def group(self, parts: Sequence[Sequence[int]]) -> PlayedGroup:
        return PlayedGroup(self, next(part for part in parts if self.rank in part))

    def survives(self, error: Exception) -> bool:
        if not isinstance(error, UnreachableError):
            return False
        self._left = True
        return True

    def stand(self, own: RankStanding, cause: Exception | None = None) -> StandingVerdict:
        del cause
        self._left, cluster = True, self._cluster
        while True:
            with cluster.changed:
                cluster.changed.wait_for(lambda: cluster.epoch > self.epoch, WAIT_S)
                if self.met != cluster.epoch:
                    self.met, self._rounds = cluster.epoch, 0
            self._rounds += 1
            if self.met > 1:
                cluster.at("stand", self._process, cluster.schedule.steps)
            try:
                what = ("stand", self._rounds)
                said = cluster.meet(self._process, self.met, what, own, range(self.size))
            except UnreachableError:
                continue
            return standing(said)

    def form(self) -> None:
        self.epoch, self._left = self.met, False
        self._calls.clear()

    def gather(
        self, name: str, value: Any, ranks: Sequence[int] = (), *, votes_on: int = 0
    ) -> list[Any]:
        """Exchange values with `ranks`, or with all, in the order in which they call it."""
        ranks = tuple(ranks or range(self.size))
        self._calls[name, ranks] += 1
        what = (name, ranks, self._calls[name, ranks])
        return self._cluster.meet(self._process, self.epoch, what, value, ranks, votes_on=votes_on)

    def gather_patiently(self, text: str) -> list[str]:
        self._cluster.ends_replay(self._process, self.epoch, text)
        return self.gather("patiently", text)

    def send(self, flat: torch.Tensor, to: int) -> None:
        self._cluster.put(self._process, self.epoch, to, flat.numpy().tobytes())

    def receive(self, flat: torch.Tensor, source: int) -> None:
        data = self._cluster.take(self._process, self.epoch, source)
        flat.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def start_send(self, flat: torch.Tensor, to: int) -> Transfer:
        self.send(flat, to)
        return Transfer(lambda: None)

    def start_receive(self, flat: torch.Tensor, source: int) -> Transfer:
        return Transfer(lambda: self.receive(flat, source))

    def add_up(self, tensor: torch.Tensor) -> None:
        tensor.copy_(functools.reduce(torch.add, self.gather("sum", tensor.clone())))

    def exchange(self, timeout_s: float) -> PipelineExchange:
        del timeout_s
        return PipelineExchange(self._cluster, self._process, self, "loop")


class PipelineExchange:
    """Exchange of one epoch."""

    together = True

    def __init__(self, cluster: Cluster, process: Process, world: PipelineWorld, name: str) -> None:
        self._cluster, self._process, self._world, self._name = cluster, process, world, name

    def gather(self, data: bytes) -> list[bytes]:
        if self._name == "restore" and self._world.epoch > 1:
            self._cluster.at("restore", self._process, self._cluster.schedule.steps)
        return self._world.gather(self._name, data)

    def add(self, numbers: Sequence[int]) -> list[int]:
        self._cluster.at("vote", self._process, numbers[0])
        found = self._world.gather("vote", list(numbers), votes_on=numbers[0])
        return [sum(column) for column in zip(*found, strict=True)]

    def subgroups(
        self, groups: Sequence[tuple[int, ...]], device: torch.device
    ) -> Iterator[tuple[tuple[int, ...], Broadcast]]:
        del device
        for ranks in groups:
            if self._world.rank not in ranks:
                continue

            def broadcast(
                buffer: torch.Tensor, source: int, ranks: tuple[int, ...] = ranks
            ) -> None:
                found = self._world.gather("broadcast", buffer.clone(), ranks)
                buffer.copy_(found[ranks.index(source)])

            yield ranks, broadcast

    def deal(
        self,
        given: torch.Tensor,
        given_bytes: Sequence[int],
        taken: torch.Tensor,
        taken_bytes: Sequence[int],
    ) -> None:
        parts = self._world.gather("deal", given.split(list(given_bytes)))
        mine = [of[self._world.rank] for of in parts]
        assert [len(one) for one in mine] == list(taken_bytes)
        taken.copy_(torch.cat(mine))


class Position:
    """Position in the data: what a step computes follows from it, as it would from a sampler."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Stage(nn.Module):
    """As many equal units as a window has steps, and perhaps an expert.

    Args:
        expert: number of the expert; None for none.
        exchange: adds up what the experts of all ranks of the stage have computed.
    """

    def __init__(
        self,
        units: int,
        stage: int,
        expert: int | None = None,
        exchange: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(units))
        _draw_weights(self, stage)
        self.expert, self._exchange = None, exchange
        if expert is not None:
            self.expert = nn.Linear(WIDTH, WIDTH)
            _draw_weights(self.expert, 100 * (1 + stage) + expert)

    def forward(self, x: torch.Tensor, part: slice = slice(None)) -> torch.Tensor:
        """Compute a part of the units, and with the last of them the expert."""
        layers = self.layers[part]
        for layer in layers:
            x = torch.tanh(layer(x)) + x
        if self.expert is not None and layers[-1] is self.layers[-1]:
            own = torch.tanh(self.expert(x))
            x = x + self._exchange(own.detach()) + own - own.detach()
        return x


def _draw_weights(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)  # threads share torch's own
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.5, 0.5, generator=generator)


class Shards(Stage):
    """A layer of a rank's own, and one that all ranks have."""

    def __init__(self, rank: int) -> None:
        super().__init__(1, rank)
        self.layers.append(Stage(1, RANKS).layers[0])


OF_RANK = [
    name
    for path in ("layers.0.weight", "layers.0.bias")
    for name in (path, *(f"{path}:{key}" for key in ("exp_avg", "exp_avg_sq", "step")))
]
"""What no other rank has of `Shards`."""


def unit_of(expert: int, name: str, tensor: torch.Tensor) -> UnitKey:
    """The unit of a parameter of the rank whose expert has this number."""
    del tensor
    if name.startswith("expert."):
        return UnitKey(0, UnitKind.EXPERT, expert)
    return UnitKey(int(name.split(".")[1]), UnitKind.DENSE)


def digest_of(session: ProtectedSession) -> int:
    """Digest of everything that training changes."""
    hasher = xxhash.xxh3_64()
    for source in sorted(session.live.sources(), key=lambda one: one.name):
        hasher.update(source.name.encode() + source.tensor.detach().numpy().tobytes())
    for name, one in sorted(session.holds.stateful.items()):
        hasher.update(f"{name} {one.state_dict()}".encode())
    return hasher.intdigest()


def _flip(process: Process) -> None:
    """Flip a bit in all that a process has logged."""
    log = process.pipeline.log if process.pipeline is not None else None
    for step in log._steps.values() if log is not None else ():
        for key, message in step.sent.items():
            data = bytearray(message.data)
            data[0] ^= 1
            step.sent[key] = type(message)(message.key, bytes(data), message.digest)


def _lie(process: Process, about: str) -> None:
    """Let a process's log lose what it states to have; see `Loss.lies`."""
    log = process.pipeline.log if process.pipeline is not None else None
    if log is None or log.last not in log._steps:
        return
    if about == "messages":
        log._steps[log.last].sent.clear()
        return
    for step in log._steps.values():
        step.received = {key: digest ^ 1 for key, digest in step.received.items()}


# --- the script -----------------------------------------------------------------------------------


def make_session(
    cluster: Cluster,
    process: Process,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    stateful: dict[str, Any],
) -> WorldSession:
    world, every = process.world, cluster.schedule.every
    shards = cluster.schedule.shards
    assert world is not None
    process.daemon = FakeDaemon(
        cluster.directory,
        rank=world.rank,
        world_size=world.size,
        epoch=world.epoch,
        protects=False,
        line=cluster.line(world.epoch),
    )
    made = holdfast.init(
        model=model,
        optimizer=optimizer,
        stateful=stateful,
        daemon=process.daemon,
        rank=world.rank,
        job="j",
        topology=cluster.topology,
        units=functools.partial(unit_of, cluster.topology.coordinates(world.rank).ep),
        private=OF_RANK if shards else [],
        settings=holdfast.Settings(
            policy=Full()
            if every
            else SparseWindows(window=cluster.schedule.window, repeats=cluster.schedule.repeats),
            check_replicas=False,
            start_wait_s=WAIT_S,
            nan_check_every=0,
        ),
    )
    assert isinstance(made, ProtectedSession)
    made._hooks._before = None  # the loop's hook calls it, as in a session with a world
    made._restore = replace(
        made._restore, exchange=PipelineExchange(cluster, process, world, "restore")
    )
    save, process.newest = made.save, None

    def noted(step: int) -> SaveHandle:
        if every and step % every:
            process.newest = None
            return SaveHandle(step)
        process.newest = save(step)
        return process.newest

    made.save = noted  # type: ignore[method-assign]
    return made


def settle(cluster: Cluster, process: Process, session: ElasticSession, step: int) -> None:
    """Wait for what the save before `step` leads to: with a window's last one, for its
    protection."""
    handle, inner = process.newest, session._session
    process.newest = None
    if handle is None or session._replaying is not None or process.world is None:
        return
    session.wait_staged()
    error = handle.error
    if "was repeated" in str(error):
        return
    if error is None:
        handle.staged.result(WAIT_S)
    if not cluster.schedule.every:
        windows = inner._saver.strategy  # type: ignore[attr-defined]
        decision = windows._deciding.at(handle.step)
        if decision is not None and handle.step != decision.span.last:
            return
    cluster.at("settle", process, step)
    if error is None:
        handle.committed.result(WAIT_S)
    # A rank may have had no free slot, where one of a world that ended was not given back yet.
    if any(process.world.gather("settle", error)):
        return
    assert process.daemon is not None
    process.daemon.announce("protected", Generation(process.world.epoch, handle.step))
    handle.protected.result(WAIT_S)
    cluster.protects(process.world.epoch)


class Line:
    """The channels of a stage that has one part of the model."""

    parts = (slice(None),)

    def __init__(self, pipeline: Pipeline) -> None:
        self.send_activation = pipeline.send_activation
        self.receive_activation = pipeline.receive_activation
        self.send_gradient = pipeline.send_gradient
        self.receive_gradient = pipeline.receive_gradient


class Ring:
    """The channels of a stage that has two parts of the model, as schedules of torch use them."""

    parts = (slice(0, 1), slice(1, None))

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline, topology = pipeline, pipeline.topology
        at = topology.coordinates(pipeline.world.rank)
        self._before, self._after = (
            topology.rank_at(dp=at.dp, tp=at.tp, pp=pp % topology.pp)
            for pp in (at.pp - 1, at.pp + 1)
        )

    def send_activation(self, microbatch: int, tensor: torch.Tensor) -> None:
        del microbatch
        self._pipeline.start_send(self._after, tensor)()

    def receive_activation(self, microbatch: int, into: torch.Tensor) -> None:
        del microbatch
        self._pipeline.start_receive(self._before, into)()

    def send_gradient(self, microbatch: int, tensor: torch.Tensor) -> None:
        del microbatch
        self._pipeline.start_send(self._before, tensor)()

    def receive_gradient(self, microbatch: int, into: torch.Tensor) -> None:
        del microbatch
        self._pipeline.start_receive(self._after, into)()


def run_step(
    cluster: Cluster,
    process: Process,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    position: Position,
) -> None:
    """Train one step, as a script with two micro-batches does."""
    pipeline, world = process.pipeline, process.world
    assert pipeline is not None and world is not None and process.session is not None
    position.step += 1
    step, at = position.step, cluster.topology.coordinates(process.rank)
    wrong = world.epoch in cluster.diverging and process.session._replaying is not None
    channels = Ring(pipeline) if cluster.schedule.ring else Line(pipeline)
    passes: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []
    for turn, part in enumerate(channels.parts):
        for m in range(MICROBATCHES):
            cluster.at("forward", process, step)
            x = torch.zeros(2, WIDTH)
            begins = pipeline.is_first and turn == 0
            if begins:
                x += torch.arange(2 * WIDTH).view(2, WIDTH) / 7 + step / 5 + (at.dp + at.tp) / 3
                x += process.draw / 11 - m / 2
            else:
                channels.receive_activation(m, x)
            x.requires_grad_(not begins)
            out = model(x, part) * (1.5 if wrong else 1.0)
            passes.append((turn, m, x, out))
            if not (pipeline.is_last and turn == len(channels.parts) - 1):
                channels.send_activation(m, out)
    for turn, m, x, out in sorted(passes, key=lambda one: (-one[0], one[1])):
        cluster.at("backward", process, step)
        gradient = torch.zeros(2, WIDTH)
        if pipeline.is_last and turn == len(channels.parts) - 1:
            gradient += out.detach() / (1 + m)
        else:
            channels.receive_gradient(m, gradient)
        out.backward(gradient)
        if x.grad is not None:
            channels.send_gradient(m, x.grad)
    cluster.at("reduce", process, step)
    squares = torch.zeros(1)
    stage: Any = pipeline.group
    experts = PlayedGroup(world, cluster.topology.expert_replicas(process.rank))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        (experts if name.startswith("expert.") else stage).add_up(parameter.grad)
        squares += parameter.grad.square().sum()
    cluster.at("sum", process, step)
    norm = pipeline.add_up(squares).sqrt()
    for parameter in model.parameters():
        parameter.grad = parameter.grad / (1 + norm) if parameter.grad is not None else None
    optimizer.step()
    cluster.at("optimizer", process, step)
    optimizer.zero_grad()


def run_step_of_shards(
    cluster: Cluster,
    process: Process,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    position: Position,
) -> None:
    """Train one step, in which the layers of all ranks are added up."""
    world = process.world
    assert world is not None
    position.step += 1
    assert isinstance(model, Shards)
    step, own, shared = position.step, model.layers[0], model.layers[1]
    cluster.at("forward", process, step)
    x = torch.arange(2 * WIDTH).view(2, WIDTH) / 7 + step / 5 + process.rank / 3
    part = torch.tanh(own(x))
    parts = world.gather("parts", part.detach().clone())
    together = functools.reduce(torch.add, parts)
    cluster.at("backward", process, step)
    shared(together + part - part.detach()).square().sum().backward()
    cluster.at("reduce", process, step)
    for parameter in shared.parameters():
        assert parameter.grad is not None
        given = world.gather("gradients", parameter.grad.clone())
        parameter.grad = functools.reduce(torch.add, given)
    optimizer.step()
    cluster.at("optimizer", process, step)
    optimizer.zero_grad()


def train(cluster: Cluster, process: Process) -> None:
    """One process."""
    schedule = cluster.schedule
    world: Any = PipelineWorld(cluster, process)
    at, ranks = cluster.topology.coordinates(process.rank), range(cluster.topology.world_size)
    beside = [rank for rank in ranks if cluster.topology.coordinates(rank).pp == at.pp]
    model: Stage = Shards(process.rank)
    if not schedule.shards:
        model = Stage(
            schedule.window,
            at.pp,
            at.ep if cluster.topology.ep > 1 else None,
            lambda own: functools.reduce(torch.add, world.gather("tokens", own, beside)),
        )
    position, run = Position(), run_step_of_shards if schedule.shards else run_step
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    stateful = {"position": position, "scheduler": scheduler}
    if not schedule.shards:
        process.pipeline = Pipeline(
            world,
            cluster.topology,
            log_bytes=schedule.log_bytes,
            log_received=schedule.log_received,
        )
        process.pipeline.is_ring = schedule.ring
    session = process.session = ElasticSession(
        world,
        lambda: make_session(cluster, process, model, optimizer, stateful),
        [optimizer],
        WAIT_S,
        votes=True,
        pipeline=process.pipeline,
    )
    for step in session.steps(schedule.steps):
        alone = session._replaying is not None
        frozen = session._session.repeats
        process.repeats_in = world.epoch if alone else process.repeats_in
        with step:
            cluster.begins(process, world.epoch, int(step))
            again = alone or frozen
            process.draw = cluster.draw(process, world.epoch, int(step), again=again)
            settle(cluster, process, session, int(step))
            run(cluster, process, model, optimizer, position)
            scheduler.step()
        if step._completed:
            if frozen:
                cluster.count("frozen step")
            cluster.completes(process, world.epoch, int(step), alone=alone)
            if not alone and not world.ended:
                with suppress(UnreachableError):
                    world.gather("completed", None)
                    cluster.all_completed(world.epoch, int(step))


# --- schedules ------------------------------------------------------------------------------------


def undisturbed(schedule: Schedule, draws: tuple[int, ...] = ()) -> dict[tuple[int, int], int]:
    """State of each rank after each step of a run without losses, whose steps have the data of
    these numbers."""
    return _undisturbed(schedule.topology, schedule.window, schedule.every, schedule.ring, draws)


@functools.cache
def _undisturbed(
    topology: Topology, window: int, every: int, ring: bool, draws: tuple[int, ...]
) -> dict[tuple[int, int], int]:
    schedule = Schedule(
        seed=-1,
        topology=topology,
        window=window,
        steps=len(draws) or STEPS_MAX,
        every=every,
        ring=ring,
        draws=draws,
    )
    return play(schedule).states


def check_drawn(cluster: Cluster) -> None:
    """Check all steps that were completed, where data are drawn anew: each state has to be that of
    a run whose steps have had the same data."""
    longest: list[tuple[int, ...]] = []
    for one in sorted(cluster.completed, key=lambda one: -one.step):
        draws = next((each for each in longest if each[: one.step] == one.draws), None)
        if draws is None:
            longest.append(draws := one.draws)
        assert one.digest == undisturbed(cluster.schedule, draws)[one.rank, one.step], (
            f"rank {one.rank} has another state after step {one.step} in epoch {one.epoch}"
        )
    cluster.counts["drawn anew"] += len(longest) > 1


def play(schedule: Schedule) -> Cluster:
    """Train through one schedule, and check it."""
    if schedule.losses and not schedule.redraws:
        undisturbed(schedule)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        ranks = range(schedule.topology.world_size)
        os.environ["WORLD_SIZE"] = str(len(ranks))
        cluster = Cluster(schedule, Path(path))
        for rank in ranks:
            cluster.start(rank)
        for thread in iter(cluster.threads):
            passed = -1
            while thread.is_alive() and passed != cluster.passed:
                passed = cluster.passed
                thread.join(2 * WAIT_S)
            assert not thread.is_alive(), "a rank does not end"
    if cluster.failures:
        raise cluster.failures[0]
    last = {rank for rank, step in cluster.states if step == schedule.steps}
    assert last == set(ranks), f"only ranks {sorted(last)} end"
    check_drawn(cluster)
    return cluster


@contextmanager
def surroundings() -> Iterator[None]:
    """Have what a script's process has."""
    size, before = os.environ.get("WORLD_SIZE"), torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    logging.disable(logging.ERROR)  # of losses that are played, and what follows from them
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        torch.use_deterministic_algorithms(before)
        os.environ.pop("WORLD_SIZE", None)
        if size is not None:
            os.environ["WORLD_SIZE"] = size


def run(first: int, count: int, *, shards: bool = False) -> Counter[str]:
    """Run `count` schedules, of stages or of `shards`; the summed counts of their events.

    Raises:
        AssertionError: when an invariant broke; the message begins with the seed.
    """
    total: Counter[str] = Counter()
    with surroundings():
        for seed in range(first, first + count):
            schedule = Schedule.of_shards(seed) if shards else Schedule.of(seed)
            try:
                total.update(play(schedule).counts)
            except Exception as error:
                raise AssertionError(f"seed {seed} failed: {error!r}\n{schedule}") from error
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--shards", action="store_true", help="ranks have shards, not stages")
    options = parser.parse_args()
    counts = run(options.first, options.count, shards=options.shards)
    for name, count in sorted(counts.items()):
        print(f"  {name:20} {count}")


if __name__ == "__main__":
    main()
