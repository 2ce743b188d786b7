"""Model of a world whose processes stay: the SDK's loop and the rule of standing, in threads.

Three ranks train replicas, each in a thread of its own with a real session; what is played is the
world: collectives, deaths, and who sees the result of a collective in which another one dies. Each
crash ends the epoch, and a new process takes the place of the lost one. A second rank, or the new
process itself, may die at any point of the reform that follows. After each, training must go on
live, with the state of an undisturbed run.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast
from holdfast._agree.exchange import Broadcast
from holdfast._elastic.session import ElasticSession
from holdfast._session.interface import WorldSession
from holdfast._session.protected import ProtectedSession
from holdfast.testing import FakeDaemon
from holdfast_core.errors import UnreachableError
from holdfast_core.protection.standing import (
    RankStanding,
    StandingAction,
    StandingVerdict,
    standing,
)

RANKS, STEPS, FAULTY_STEP = 3, 5, 3
WAIT_S = 30.0
LEARNING_RATE = 0.25
CHANGE = 0.125
"""What a script adds to the parameter by itself."""


class Killed(BaseException):
    """The process dies here."""


@dataclass(frozen=True)
class Crash:
    """A death in step `FAULTY_STEP`."""

    rank: int
    point: str
    unseen: frozenset[int] = frozenset()
    """Ranks that do not see the result of the collective in which `rank` dies."""


@dataclass(frozen=True)
class SecondCrash:
    """A death in the epoch that the first one has begun, so in its reform or soon after it."""

    rank: int
    """That of the first crash stands for the process that has taken its place."""
    point: int
    """Number of points that the rank survives: before and after it takes part in a collective, and
    in its optimizer's step."""


SECOND_POINTS = 24
"""Points of a rank from the first crash to the end of its reform."""

SCRIPTS = {
    "steps twice": StandingAction.LIVE,
    "swallows the end of its steps": StandingAction.LIVE,
    "adds gradients up over steps": StandingAction.LINE,
    "changes a parameter before the vote": StandingAction.LINE,
    "changes a parameter after the vote": StandingAction.LIVE,
    "steps without the vote": StandingAction.LINE,
    "reduces after its optimizer": StandingAction.LINE,
    "scales its loss": StandingAction.LIVE,
    "scales its loss for a fused optimizer": StandingAction.LIVE,
}
"""What a script may do → where a death then leads."""


def crashes() -> Iterator[Crash]:
    """Every death of one rank, and everything that the others may see of it."""
    for rank in range(RANKS):
        others = [other for other in range(RANKS) if other != rank]
        for point in ("before-reduce", "before-vote", "in-optimizer", "after-optimizer"):
            yield Crash(rank, point)
        for point in ("in-reduce", "in-vote"):
            for count in range(len(others) + 1):
                for unseen in itertools.combinations(others, count):
                    yield Crash(rank, point, frozenset(unseen))


def second_crashes() -> Iterator[SecondCrash]:
    """Every second death."""
    for rank, point in itertools.product(range(RANKS), range(SECOND_POINTS)):
        yield SecondCrash(rank, point)


def crash_of(script: str) -> Crash:
    """The death that meets what `script` does."""
    match script:
        case "reduces after its optimizer":
            return Crash(1, "in-report", frozenset({0}))
        case "changes a parameter after the vote":
            return Crash(1, "in-vote", frozenset({0}))
        case "steps without the vote":
            return Crash(1, "before-reduce")
        case _:
            return Crash(1, "before-vote")


@dataclass
class Cluster:
    """What all processes share."""

    crash: Crash
    directory: Path
    script: str = ""
    """What the script does otherwise than others; see `SCRIPTS`."""
    second: SecondCrash | None = None
    survived: int = 0
    """Points that the rank of `second` has survived in epoch 2."""
    epoch: int = 1
    changed: threading.Condition = field(default_factory=threading.Condition)
    said: dict[tuple[Any, ...], dict[int, Any]] = field(default_factory=dict)
    verdicts: list[StandingAction] = field(default_factory=list)
    states: dict[int, dict[int, float]] = field(default_factory=dict)
    """Step → rank → the parameter after it, as its newest process has it."""
    threads: list[threading.Thread] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)

    def meet(
        self,
        epoch: int,
        what: tuple[Any, ...],
        rank: int,
        value: Any,
        ranks: Sequence[int] = range(RANKS),
    ) -> list[Any]:
        """Exchange values between `ranks`; UnreachableError when the epoch ends before."""
        point, step = what[0], what[-1]
        with self.changed:
            self._pass_point(epoch, rank)
            values = self.said.setdefault((epoch, *what), {})
            values[rank] = value
            self.changed.notify_all()
            if self._dies(f"in-{point}", rank, step):
                self._kill(rank)
            self._pass_point(epoch, rank)
            self.changed.wait_for(lambda: len(values) == len(ranks) or self.epoch > epoch, WAIT_S)
            missed = self.crash.point == f"in-{point}" and step == FAULTY_STEP and epoch == 1
            if missed and rank in self.crash.unseen:
                self.changed.wait_for(lambda: self.epoch > epoch, WAIT_S)
                raise UnreachableError("the training world has ended")
            if len(values) < len(ranks):
                raise UnreachableError("the training world has ended")
            return [values[other] for other in ranks]

    def _dies(self, point: str, rank: int, step: Any) -> bool:
        crash = (self.crash.rank, self.crash.point, FAULTY_STEP)
        return self.epoch == 1 and crash == (rank, point, step)

    def _pass_point(self, epoch: int, rank: int) -> None:
        """Die here, if that is the second crash."""
        second = self.second
        if second is None or (epoch, self.epoch, rank) != (2, 2, second.rank):
            return
        if self.survived == second.point:
            self._kill(rank)
        self.survived += 1

    def at(self, point: str, rank: int, step: int) -> None:
        """Die here, if that is a crash."""
        with self.changed:
            self._pass_point(self.epoch, rank)
            if not self._dies(point, rank, step):
                return
            if self.script == "steps without the vote":
                reduces = (1, "reduce", FAULTY_STEP)
                self.changed.wait_for(lambda: 0 in self.said.get(reduces, ()), WAIT_S)
            self._kill(rank)

    def _kill(self, rank: int) -> None:
        self.epoch += 1
        self.changed.notify_all()
        self.start(rank)
        raise Killed

    def start(self, rank: int) -> None:
        """Start a process."""
        thread = threading.Thread(target=self._run, args=(rank,), daemon=True)
        self.threads.append(thread)
        thread.start()

    def _run(self, rank: int) -> None:
        try:
            with suppress(Killed):
                train(self, rank)
        except BaseException as error:
            self.failures.append(error)
            with self.changed:
                self.epoch += 100  # nobody waits for it
                self.changed.notify_all()


class ReplicasExchange:
    """Exchange of one epoch."""

    together = True

    def __init__(self, cluster: Cluster, epoch: int, rank: int, name: str) -> None:
        self._cluster, self._epoch, self._rank, self._name = cluster, epoch, rank, name
        self._calls = self._sent = 0

    def gather(self, data: bytes) -> list[bytes]:
        self._calls += 1
        what = (self._name, "gather", self._calls)
        return self._cluster.meet(self._epoch, what, self._rank, data)

    def add(self, numbers: Sequence[int]) -> list[int]:
        self._calls += 1
        # Votes are told apart by their step: it is what ranks add up.
        what = ("vote", numbers[0]) if self._name == "loop" else (self._name, "add", self._calls)
        values = self._cluster.meet(self._epoch, what, self._rank, list(numbers))
        return [sum(column) for column in zip(*values, strict=True)]

    def subgroups(
        self, groups: Sequence[tuple[int, ...]], device: torch.device
    ) -> Iterator[tuple[tuple[int, ...], Broadcast]]:
        del device
        for ranks in groups:
            if self._rank not in ranks:
                continue

            def broadcast(
                buffer: torch.Tensor, source: int, ranks: tuple[int, ...] = ranks
            ) -> None:
                self._sent += 1
                what = (self._name, "broadcast", ranks, self._sent)
                data = bytes(buffer.tolist())
                found = self._cluster.meet(self._epoch, what, self._rank, data, ranks)
                buffer.copy_(torch.tensor(list(found[ranks.index(source)]), dtype=torch.uint8))

            yield ranks, broadcast

    def deal(self, *parts: Any) -> None:
        raise AssertionError(f"nothing of another world is restored: {parts}")


class ReplicasWorld:
    """The part of `World` that a session uses."""

    stays, size, nproc = True, RANKS, 1
    failure: Exception | None = None

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self._cluster, self.rank = cluster, rank
        self.epoch, self._met, self._rounds, self._left = 0, 0, 0, True
        while self._left:
            self.verdict = self.stand(RankStanding())
            if self.verdict.action is not StandingAction.FORWARD:
                with suppress(UnreachableError):
                    self.form()

    @property
    def ended(self) -> bool:
        return self._left or self._cluster.epoch > self.epoch

    def begin_alone(self) -> None:
        """The model's processes always stay."""

    def begin_step(self, step: int) -> None:
        """The model's scripts make no groups."""

    def go_back_to(self, step: int) -> None:
        """As `begin_step`."""

    def check_process(self) -> None:
        """Threads do not fork."""

    def survives(self, error: Exception) -> bool:
        if not isinstance(error, UnreachableError):
            return False
        self._left = True
        return True

    def stand(self, own: RankStanding, cause: Exception | None = None) -> StandingVerdict:
        del cause
        self._left = True
        with self._cluster.changed:
            self._cluster.changed.wait_for(lambda: self._cluster.epoch > self.epoch, WAIT_S)
        while True:
            if self._met != self._cluster.epoch:
                self._met, self._rounds = self._cluster.epoch, 0
            self._rounds += 1
            what = ("stand", self._rounds)
            with suppress(UnreachableError):
                verdict = standing(self._cluster.meet(self._met, what, self.rank, own))
                break
        self._cluster.verdicts.append(verdict.action)
        if verdict.action is StandingAction.LINE and self._met > 1:
            raise Killed  # the model has no line
        return verdict

    def form(self) -> None:
        self._cluster.meet(self._met, ("form", 0), self.rank, None)
        self.epoch, self._left = self._met, False

    def exchange(self, timeout_s: float) -> ReplicasExchange:
        del timeout_s
        return ReplicasExchange(self._cluster, self.epoch, self.rank, "loop")


def make_session(
    cluster: Cluster,
    world: ReplicasWorld,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> WorldSession:
    daemon = FakeDaemon(cluster.directory, rank=world.rank, world_size=RANKS, epoch=world.epoch)
    made = holdfast.init(
        model=model,
        optimizer=optimizer,
        stateful={"scaler": scaler},
        daemon=daemon,
        rank=world.rank,
        job="j",
    )
    assert isinstance(made, ProtectedSession)
    exchange = ReplicasExchange(cluster, world.epoch, world.rank, "restore")
    made._restore = replace(made._restore, exchange=exchange)
    return made


def gradient(step: int, rank: int) -> float:
    """Gradient of a rank in a step: a sum of few binary digits, exact in any order."""
    return ((step * 7 + rank * 3) % 11) / 8


def expected(step: int, script: str) -> float:
    """The parameter after `step` steps."""
    value = 1.0
    for one in range(1, step + 1):
        value += CHANGE if script == "changes a parameter after the vote" else 0.0
        value -= LEARNING_RATE * sum(gradient(one, rank) for rank in range(RANKS))
    return value


def run_step(
    cluster: Cluster,
    world: Any,
    session: Any,
    model: Any,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    step: int,
) -> None:
    """Reduce gradients and run the optimizer, as the script does."""
    script, rank, number = cluster.script, world.rank, int(step)
    try:
        parts = cluster.meet(world.epoch, ("reduce", number), rank, gradient(number, rank))
    except UnreachableError:
        if script != "steps without the vote" or rank != 0:
            raise
        parts = [gradient(number, rank)]
        session._body.voted = True
    total = scaler.scale(torch.tensor([[sum(parts)]]))
    before = model.weight.grad
    model.weight.grad = total if before is None else total + before
    if script == "adds gradients up over steps" and number == FAULTY_STEP - 1:
        return
    cluster.at("before-vote", rank, number)
    if script == "changes a parameter before the vote":
        with torch.no_grad():
            model.weight.add_(0.0)
    if script == "steps twice":
        model.weight.grad /= 2
        optimizer.step()
    for _ in range(2 if script.startswith("swallows") else 0):  # it tries again, too
        with suppress(UnreachableError):
            optimizer.step()
            break
    if not script.startswith("swallows"):
        scaler.step(optimizer)
        if scaler.is_enabled():
            scaler.update()
    if script == "reduces after its optimizer":
        cluster.meet(world.epoch, ("report", number), rank, 0)
    model.weight.grad = None


def train(cluster: Cluster, rank: int) -> None:
    """One process."""
    world: Any = ReplicasWorld(cluster, rank)
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    scales, fused = "scales" in cluster.script, "fused" in cluster.script
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, fused=fused)
    scaler = torch.amp.GradScaler("cpu", enabled=scales)

    def make() -> WorldSession:
        return make_session(cluster, world, model, optimizer, scaler)

    session = ElasticSession(world, make, [optimizer], 30.0, votes=True)

    def after_vote(*_: Any) -> None:
        cluster.at("in-optimizer", rank, now[0])
        if cluster.script == "changes a parameter after the vote":
            with torch.no_grad():
                model.weight.add_(CHANGE)

    optimizer.register_step_pre_hook(after_vote)
    now = [0]
    for step in session.steps(STEPS):
        with step:
            now[0] = int(step)
            cluster.at("before-reduce", rank, step)
            run_step(cluster, world, session, model, optimizer, scaler, step)
            cluster.states.setdefault(int(step), {})[rank] = model.weight.item()
            cluster.at("after-optimizer", rank, step)
    cluster.states.setdefault(STEPS, {})[rank] = model.weight.item()
    session.close()


def run(crash: Crash, script: str = "", second: SecondCrash | None = None) -> None:
    """Train with a crash, and perhaps a second one, and check where it leads."""
    what = f"crash {crash}" if second is None else f"crash {crash}, then {second}"
    with tempfile.TemporaryDirectory() as path:
        cluster = Cluster(crash, Path(path), script, second)
        for rank in range(RANKS):
            cluster.start(rank)
        for thread in iter(cluster.threads):
            thread.join(WAIT_S)
            assert not thread.is_alive(), f"{what}: a rank does not end"
    assert not cluster.failures, f"{what}: {cluster.failures[0]!r}"
    later = cluster.verdicts[RANKS:]
    assert later, f"{what}: nobody stands"
    if SCRIPTS.get(script) is StandingAction.LINE:
        assert later[-1] is StandingAction.LINE, f"{what}: goes on live"
        return
    wrong = StandingAction.LINE in later
    assert not wrong, f"{what}: a rank that could go on live does not"
    for step, values in cluster.states.items():
        assert set(values.values()) == {expected(step, script)}, f"{what}: {step}: {values}"
    assert len(cluster.states[STEPS]) == RANKS
    assert second is None or cluster.epoch == 3, f"{what}: the second one does not come"


def main() -> None:
    os.environ["WORLD_SIZE"] = str(RANKS)
    for crash in crashes():
        run(crash)
    for crash, second in itertools.product(crashes(), second_crashes()):
        run(crash, "", second)
    for script in SCRIPTS:
        run(crash_of(script), script)


if __name__ == "__main__":
    main()
