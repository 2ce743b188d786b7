"""Model of a world whose processes stay: the SDK's loop and the rule of standing, in threads.

Three ranks train replicas, each in a thread of its own with a real session; what is played is the
world: collectives, deaths, and who sees the result of a collective in which another one dies. Each
crash ends the epoch, and a new process takes the place of the lost one. A second rank, or the new
process itself, may die at any point of the reform that follows. After each, training must go on
live, with the state of an undisturbed run.

In a sharded run no rank has the weight of another one, and each step is saved. Then the lost rank
alone must restore the line where it is of the step that the others have, and otherwise all ranks.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast
from holdfast._agree.exchange import Broadcast
from holdfast._daemon.handles import SaveHandle
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
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.units import UnitKey, UnitKind

RANKS, STEPS, FAULTY_STEP = 3, 5, 3
WAIT_S = 100.0
LEARNING_RATE, MOMENTUM = 0.25, 0.5
WRONG = 2.0**20
"""What a gradient is while the device has not reduced it."""
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


SAVES = "saves"
"""Name of the exchange in which ranks agree on who captures what."""

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
    "reduces on the device": StandingAction.LIVE,
    "reduces on the device after its optimizer": StandingAction.LINE,
    "skips an optimizer on one rank": StandingAction.LIVE,
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


SHARDED_SCRIPTS = {
    "": True,
    "changes its shard between steps": False,
    "changes a hyperparameter between steps": False,
}
"""What a script of a sharded run may do → whether the lost rank then restores alone."""


def crash_of(script: str) -> Crash:
    """The death that meets what `script` does."""
    match script:
        case "reduces after its optimizer" | "reduces on the device after its optimizer":
            return Crash(1, "in-report", frozenset({0}))
        case "reduces on the device":
            return Crash(1, "in-reduce", frozenset({0}))
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
    sharded: bool = False
    """Whether each rank has a weight of its own, which it saves at each step."""
    lines: dict[int, Generation | None] = field(default_factory=dict)
    """Epoch → the newest generation of which every rank had its snapshot when it began."""
    daemons: dict[int, list[FakeDaemon]] = field(default_factory=dict)
    """Epoch → the daemon of each session."""
    ahead: set[int] = field(default_factory=set)
    """Ranks for which the vote of `FAULTY_STEP` passed in its first execution."""
    survived: int = 0
    """Points that the rank of `second` has survived in epoch 2."""
    epoch: int = 1
    changed: threading.Condition = field(default_factory=threading.Condition)
    said: dict[tuple[Any, ...], dict[int, Any]] = field(default_factory=dict)
    verdicts: list[StandingAction] = field(default_factory=list)
    states: dict[int, dict[int, tuple[float, float]]] = field(default_factory=dict)
    """Step → rank → weight and bias after it, as its newest process has them."""
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
            if point == SAVES:  # on a thread of the session, which does not die by itself
                return self._collect(epoch, what, rank, value, ranks)
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

    def _collect(
        self, epoch: int, what: tuple[Any, ...], rank: int, value: Any, ranks: Sequence[int]
    ) -> list[Any]:
        """Exchange values. With the lock held."""
        values = self.said.setdefault((epoch, *what), {})
        values[rank] = value
        self.changed.notify_all()
        self.changed.wait_for(lambda: len(values) == len(ranks) or self.epoch > epoch, WAIT_S)
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

    def at(self, point: str, world: ReplicasWorld, step: int) -> None:
        """Die here, if that is a crash. What a rank passes before it has heard of the first one is
        none of the points of the second one: how many these are is a matter of threads."""
        rank = world.rank
        with self.changed:
            self._pass_point(world.met, rank)
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

    def line(self, epoch: int) -> Generation | None:
        """The line of an epoch, decided once."""
        with self.changed:
            if epoch not in self.lines:
                held = [
                    set(FakeDaemon(self.directory, rank=rank, world_size=RANKS).sealed())
                    for rank in range(RANKS)
                ]
                self.lines[epoch] = max(set.intersection(*held), default=None)
            return self.lines[epoch]

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
        self._calls, self._sent = 0, Counter[tuple[int, ...]]()

    def gather(self, data: bytes) -> list[bytes]:
        self._calls += 1
        what = (self._name, "gather", self._calls)
        return self._cluster.meet(self._epoch, what, self._rank, data)

    def add(self, numbers: Sequence[int]) -> list[int]:
        self._calls += 1
        # Votes are told apart by their step: it is what ranks add up.
        votes = self._name.startswith("loop")
        what = ("vote", numbers[0]) if votes else (self._name, "add", self._calls)
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
                self._sent[ranks] += 1
                what = (self._name, "broadcast", ranks, self._sent[ranks])
                data = bytes(buffer.tolist())
                found = self._cluster.meet(self._epoch, what, self._rank, data, ranks)
                buffer.copy_(torch.tensor(list(found[ranks.index(source)]), dtype=torch.uint8))

            yield ranks, broadcast

    def deal(self, *parts: Any) -> None:
        raise AssertionError(f"nothing of another world is restored: {parts}")


class ReplicasWorld:
    """The part of `World` that a session uses."""

    stays, groups_stay, size, nproc = True, False, RANKS, 1
    failure: Exception | None = None

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self._cluster, self.rank = cluster, rank
        self.epoch, self._rounds, self._left = 0, 0, True
        self.met = 0
        """Newest epoch that its process has heard of."""
        self.sessions = 0
        """Sessions in this epoch."""
        self.handles: list[SaveHandle] = []
        """Saves of this process."""
        self.queued: list[Callable[[], None]] = []
        """What the device has to compute."""
        while self._left:
            self.verdict = self.stand(RankStanding())
            if self.verdict.action is not StandingAction.FORWARD:
                with suppress(UnreachableError):
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
        """Let the device compute what is queued."""
        queued, self.queued = self.queued, []
        for compute in queued:
            compute()
        return since

    def build_again(self, *_: Any) -> str:
        """The model's worlds have one size."""
        return ""

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
            if self.met != self._cluster.epoch:
                self.met, self._rounds = self._cluster.epoch, 0
            self._rounds += 1
            what = ("stand", self._rounds)
            with suppress(UnreachableError):
                verdict = standing(self._cluster.meet(self.met, what, self.rank, own))
                break
        self._cluster.verdicts.append(verdict.action)
        if verdict.action is StandingAction.LINE and self.met > 1 and not self._cluster.sharded:
            raise Killed  # the model has no line
        return verdict

    def gather_patiently(self, text: str) -> list[str]:
        return self._cluster.meet(self.epoch, ("patiently", 0), self.rank, text)

    def form(self) -> None:
        self._cluster.meet(self.met, ("form", 0), self.rank, None)
        self.epoch, self._left, self.sessions = self.met, False, 0

    def exchange(self, timeout_s: float) -> ReplicasExchange:
        del timeout_s
        return ReplicasExchange(self._cluster, self.epoch, self.rank, f"loop {self.sessions}")


def make_session(
    cluster: Cluster,
    world: ReplicasWorld,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> WorldSession:
    line = cluster.line(world.epoch) if cluster.sharded else None
    daemon = FakeDaemon(
        cluster.directory, rank=world.rank, world_size=RANKS, epoch=world.epoch, line=line
    )
    with cluster.changed:
        cluster.daemons.setdefault(world.epoch, []).append(daemon)
    made = holdfast.init(
        model=model,
        optimizer=optimizer,
        stateful={"scaler": scaler},
        daemon=daemon,
        rank=world.rank,
        job="j",
        private=["weight", "weight:momentum_buffer"] if cluster.sharded else [],
        units=unit_of if cluster.sharded else None,
        settings=holdfast.Settings(check_replicas=False, start_wait_s=WAIT_S),
    )
    assert isinstance(made, ProtectedSession)
    world.sessions += 1
    name = f"restore {world.sessions}"
    exchange = ReplicasExchange(cluster, world.epoch, world.rank, name)
    made._restore = replace(made._restore, exchange=exchange)
    if cluster.sharded:
        saver = made._saver.pipeline
        saver._exchange = ReplicasExchange(cluster, world.epoch, world.rank, SAVES)
        save, handles = made.save, world.handles

        def noted(step: int) -> SaveHandle:
            handles.append(save(step))
            return handles[-1]

        made.save = noted  # type: ignore[method-assign]
    return made


def unit_of(name: str, tensor: torch.Tensor) -> UnitKey:
    """A unit that is a rank's own, and one that one rank captures for all."""
    del tensor
    return UnitKey(0 if name == "weight" else 1, UnitKind.DENSE)


def settle(cluster: Cluster, world: ReplicasWorld, step: int) -> None:
    """Wait until every rank has saved the step before `step`."""
    if world.handles and world.handles[-1].step == step - 1:
        world.handles[-1].committed.result(WAIT_S)
    cluster.meet(world.epoch, ("settle", step), world.rank, None)


def gradient(step: int, rank: int) -> float:
    """Gradient of a rank in a step: a sum of few binary digits, exact in any order."""
    return ((step * 7 + rank * 3) % 11) / 8


def expected(step: int, script: str, shard: int = 0, momentum: float = 0.0) -> tuple[float, float]:
    """Weight and bias after `step` steps. The weight of a `shard` differs from others from the
    beginning, and by its gradients."""
    weight, bias, of_weight, of_bias = 1.0 + shard, 0.0, 0.0, 0.0
    for one in range(1, step + 1):
        total = sum(gradient(one, rank) for rank in range(RANKS))
        of_weight = momentum * of_weight + total + shard
        of_bias = momentum * of_bias + total
        weight += CHANGE if script == "changes a parameter after the vote" else 0.0
        weight -= LEARNING_RATE * of_weight
        bias -= LEARNING_RATE * of_bias
    return weight, bias


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
        if script == "reduces on the device":
            reduce_later(cluster, world, model, number)
            parts = [WRONG]
        else:
            parts = cluster.meet(world.epoch, ("reduce", number), rank, gradient(number, rank))
    except UnreachableError:
        if script != "steps without the vote" or rank != 0:
            raise
        parts = [gradient(number, rank)]
        session._body.voted = True
    total = scaler.scale(torch.tensor([[sum(parts)]]))
    before = model.weight.grad
    own = total + (rank if cluster.sharded else 0)
    model.weight.grad = own if before is None else own + before
    model.bias.grad = total[0].clone() if before is None else total[0] + model.bias.grad
    if script == "adds gradients up over steps" and number == FAULTY_STEP - 1:
        return
    if script == "skips an optimizer on one rank" and number == FAULTY_STEP - 2:
        update_or_skip(cluster, world, model, optimizer, number)
        return
    cluster.at("before-vote", world, number)
    if script == "changes a parameter before the vote":
        with torch.no_grad():
            model.weight.add_(0.0)
    if script == "steps twice":
        model.weight.grad /= 2
        model.bias.grad /= 2
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
    if script == "reduces on the device after its optimizer":
        world.queued.append(partial(cluster.meet, world.epoch, ("report", number), rank, 0))
    model.weight.grad = model.bias.grad = None


def update_or_skip(cluster: Cluster, world: Any, model: Any, optimizer: Any, step: int) -> None:
    """Update by the optimizer, or on rank 0 without it, and let the devices reduce something
    afterwards."""
    if world.rank:
        optimizer.step()
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(LEARNING_RATE * parameter.grad)
    world.queued.append(partial(cluster.meet, world.epoch, ("report", step), world.rank, 0))
    model.weight.grad = model.bias.grad = None


def reduce_later(cluster: Cluster, world: Any, model: Any, step: int) -> None:
    """Let the device reduce the gradients, when something waits for it."""

    def reduce() -> None:
        parts = cluster.meet(world.epoch, ("reduce", step), world.rank, gradient(step, world.rank))
        model.weight.grad.fill_(sum(parts))
        model.bias.grad.fill_(sum(parts))

    world.queued = [reduce]


def train(cluster: Cluster, rank: int) -> None:
    """One process."""
    world: Any = ReplicasWorld(cluster, rank)
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, 1 + rank if cluster.sharded else 1)
    nn.init.zeros_(model.bias)
    scales, fused = "scales" in cluster.script, "fused" in cluster.script
    momentum = MOMENTUM if cluster.sharded else 0.0
    optimizer = torch.optim.SGD(
        model.parameters(), lr=LEARNING_RATE, momentum=momentum, fused=fused
    )
    scaler = torch.amp.GradScaler("cpu", enabled=scales)

    def make() -> WorldSession:
        return make_session(cluster, world, model, optimizer, scaler)

    session = ElasticSession(world, make, [optimizer], 30.0, votes=True)
    with closing(session):  # the kernel closes the claim of the arena of a process that dies
        run_steps(cluster, world, session, model, optimizer, scaler)


def run_steps(
    cluster: Cluster,
    world: Any,
    session: ElasticSession,
    model: Any,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> None:
    """Run the loop of a process."""
    rank, now = world.rank, [0]

    def after_vote(*_: Any) -> None:
        cluster.at("in-optimizer", world, now[0])
        if cluster.script == "changes a parameter after the vote":
            with torch.no_grad():
                model.weight.add_(CHANGE)

    optimizer.register_step_pre_hook(after_vote)
    for step in session.steps(STEPS):
        with step:
            now[0] = int(step)
            if cluster.sharded:
                settle(cluster, world, int(step))
            cluster.at("before-reduce", world, step)
            run_step(cluster, world, session, model, optimizer, scaler, step)
            if (world.epoch, step) == (1, FAULTY_STEP):
                cluster.ahead.add(rank)
            cluster.states.setdefault(int(step), {})[rank] = state_of(model)
            cluster.at("after-optimizer", world, step)
        if world.ended:
            continue
        if cluster.script == "changes its shard between steps":
            session.wait_staged()
            with torch.no_grad():
                model.weight.add_(CHANGE)
        if cluster.script == "changes a hyperparameter between steps":
            optimizer.param_groups[0]["dampening"] += 2.0**-20
    cluster.states.setdefault(STEPS, {})[rank] = state_of(model)


def state_of(model: Any) -> tuple[float, float]:
    """Weight and bias."""
    return model.weight.item(), model.bias.item()


def run_sharded(crash: Crash, script: str = "", second: SecondCrash | None = None) -> None:
    """Train shards with a crash, and perhaps a second one, and check where it leads."""
    what = f"crash {crash} of shards, then {second}"
    with tempfile.TemporaryDirectory() as path:
        cluster = Cluster(crash, Path(path), script, second, sharded=True)
        play(cluster, what)
    alone = SHARDED_SCRIPTS[script] and cluster.ahead <= {crash.rank}
    for step, values in cluster.states.items() if not script else ():
        wanted = {rank: expected(step, script, rank, MOMENTUM) for rank in range(RANKS)}
        assert values == wanted, f"{what}: {step}: {values}"
    assert len(cluster.states[STEPS]) == RANKS
    assert second is None or cluster.epoch == 3, f"{what}: the second one does not come"
    if second is None:
        live = ["go_live" in daemon.calls for daemon in cluster.daemons[2]]
        assert live[-RANKS:] == [alone] * RANKS, f"{what}: {live}"


def play(cluster: Cluster, what: str) -> None:
    """Run the processes of a cluster to their ends."""
    for rank in range(RANKS):
        cluster.start(rank)
    for thread in iter(cluster.threads):
        thread.join(WAIT_S)
        assert not thread.is_alive(), f"{what}: a rank does not end"
    assert not cluster.failures, f"{what}: {cluster.failures[0]!r}"


def run(crash: Crash, script: str = "", second: SecondCrash | None = None) -> None:
    """Train with a crash, and perhaps a second one, and check where it leads."""
    what = f"crash {crash}" if second is None else f"crash {crash}, then {second}"
    with tempfile.TemporaryDirectory() as path:
        cluster = Cluster(crash, Path(path), script, second)
        play(cluster, what)
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
        run_sharded(crash)
    for script in SHARDED_SCRIPTS:
        run_sharded(crash_of(script), script)
    for crash, second in itertools.product(crashes(), second_crashes()):
        run(crash, "", second)
    for script in SCRIPTS:
        run(crash_of(script), script)


if __name__ == "__main__":
    main()
