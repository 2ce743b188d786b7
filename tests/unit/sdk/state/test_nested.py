"""Optimizers within optimizers."""

from __future__ import annotations

import itertools
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from round_trips import WAIT_S, Training, check_round_trip, refusal, seed, session_of
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from wrapping_optimizers import WRAPPERS, Delegating, LookaheadOwnState, LookaheadSharedState

import holdfast
from holdfast._capture.gradients import Gradients
from holdfast._state.capture import LiveState
from holdfast._state.nested import StepHooks, with_nested
from holdfast._state.own_values import OwnValues
from holdfast.testing import FakeDaemon
from holdfast_core.errors import InvalidJobError, LayoutMismatchError
from holdfast_core.job.snapshots import Repeats, SparseWindows
from holdfast_core.topology import Topology


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def training_of(kind: str) -> Training:
    model = mlp()
    return Training(model, WRAPPERS[kind](list(model.parameters())))


@pytest.mark.parametrize("kind", WRAPPERS)
def test_what_optimizers_within_optimizers_hold_is_restored(kind: str, tmp_path: Path) -> None:
    check_round_trip(lambda: training_of(kind), tmp_path)


def test_an_averager_that_counts_its_steps_is_restored(tmp_path: Path) -> None:
    """PostLocalSGDOptimizer counts in an object that it holds, and no hook of its own is called."""

    def build() -> Training:
        model = mlp()
        averager = PeriodicModelAverager.__new__(PeriodicModelAverager)
        averager.step, averager.period, averager.warmup_steps = 0, 2, 100
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return Training(model, PostLocalSGDOptimizer(inner, averager))

    check_round_trip(build, tmp_path)
    seed(1)
    training = build()
    session = session_of(training, FakeDaemon(tmp_path, epoch=3))
    assert session.restore() == 7
    assert training.optimizer.averager.step == 7
    session.close()


class CountingSGD(torch.optim.SGD):
    """Counts, averages and remembers in attributes."""

    def __init__(self, params: Any, size: int = 1) -> None:
        super().__init__(params, lr=0.1)
        self.size, self.count, self.words = size, 0, {"mode": "first"}
        self.average = torch.zeros(size)
        self.made_late: Any = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.count += 1
        self.words["mode"] = f"after {self.count}"
        self.average += self.count
        self.made_late = [self.count, torch.full((2,), float(self.count))]


def test_numbers_and_tensors_in_attributes_are_restored(tmp_path: Path) -> None:
    def build() -> Training:
        model = mlp()
        return Training(model, CountingSGD(model.parameters()))

    check_round_trip(build, tmp_path)
    training = build()
    session = session_of(training, FakeDaemon(tmp_path, epoch=3))
    average = training.optimizer.average
    assert session.restore() == 7
    session.close()
    optimizer = training.optimizer
    assert (optimizer.count, optimizer.words, optimizer.size) == (7, {"mode": "after 7"}, 1)
    assert optimizer.average is average, "memory that is there is filled"
    assert average.tolist() == [28.0]
    assert optimizer.made_late[0] == 7
    assert optimizer.made_late[1].tolist() == [7.0, 7.0]


GENERATORS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(3),
    "Python": lambda: random.Random(3),
    "numpy": lambda: np.random.default_rng(3),
    "numpy, MT19937": lambda: np.random.Generator(np.random.MT19937(3)),
    "numpy, of old": lambda: np.random.RandomState(3),
}


class NoisySGD(torch.optim.SGD):
    """Draws its learning rate from a generator of its own, and counts in a `defaultdict`. With
    `within`, both are items of containers."""

    def __init__(self, params: Any, generator: Any, within: bool = False) -> None:
        super().__init__(params, lr=0.1)
        counts = defaultdict[str, int](int)
        if within:
            self.streams = {"noise": [generator, "normal"], "counts": (counts,)}
        else:
            self.generator, self.counts = generator, counts

    def held(self) -> tuple[Any, defaultdict[str, int]]:
        if "generator" in vars(self):
            return self.generator, self.counts
        (counts,), (generator, _) = self.streams["counts"], self.streams["noise"]
        return generator, counts

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        generator, counts = self.held()
        counts["steps"] += 1
        self.param_groups[0]["lr"] = 0.01 * drawn(generator) * counts["steps"]
        super().step()


def drawn(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return torch.rand((), generator=generator).item()
    normal = hasattr(generator, "normal")
    return float(generator.normal() if normal else generator.gauss(0.0, 1.0))


@pytest.mark.parametrize("within", [False, True], ids=["in attributes", "in containers"])
@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_and_counters_in_attributes_are_restored(
    kind: str, within: bool, tmp_path: Path
) -> None:
    """The generator stays the same object: others may hold it, too."""
    made = []

    def build() -> Training:
        model = mlp()
        made.append(GENERATORS[kind]())
        return Training(model, NoisySGD(model.parameters(), made[-1], within))

    check_round_trip(build, tmp_path)
    training = build()
    session = session_of(training, FakeDaemon(tmp_path, epoch=3))
    assert session.restore() == 7
    session.close()
    generator, counts = training.optimizer.held()
    assert generator is made[-1]
    assert counts == {"steps": 7}
    assert counts["others"] == 0


def test_a_generator_that_nobody_has_used_yet_is_restored_as_well(tmp_path: Path) -> None:
    def build() -> Training:
        model = mlp()
        return Training(model, NoisySGD(model.parameters(), random.Random()))

    states = list[Any]()
    for epoch in (1, 2):
        training = build()
        with session_of(training, FakeDaemon(tmp_path, epoch=epoch)) as session:
            assert session.restore() == (1 if states else None)
            states.append(training.optimizer.generator.getstate())
            session.save(epoch).committed.result(WAIT_S)
    assert states[0] == states[1]


@pytest.mark.parametrize("other", ["torch", "numpy, MT19937", None])
def test_the_state_of_another_kind_of_generator_is_refused(
    other: str | None, tmp_path: Path
) -> None:
    model = mlp()
    training = Training(model, NoisySGD(model.parameters(), GENERATORS["numpy"]()))
    with session_of(training, FakeDaemon(tmp_path)) as session:
        session.save(1).committed.result(WAIT_S)
    generator = 3.5 if other is None else GENERATORS[other]()
    training = Training(model, NoisySGD(model.parameters(), generator))
    session = session_of(training, FakeDaemon(tmp_path, epoch=2))
    with pytest.raises(LayoutMismatchError, match="attribute 'generator' is a "):
        session.restore()
    session.close()


class Scheduled(torch.optim.SGD):
    """Takes its learning rates from an iterator."""

    def __init__(self, params: Any, rates: Any) -> None:
        super().__init__(params, lr=0.1)
        self.rates = rates


class SlowUnderParameters(torch.optim.SGD):
    """Keeps slow weights in a dictionary of its own, under the parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.slow = {p: p.detach().clone() for g in self.param_groups for p in g["params"]}


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (SlowUnderParameters, "'slow', together with parameters or states: keep them in its state"),
        (
            lambda params: CountingSGD(params, 3 << 20),
            "13 MB of tensors in its attribute 'average'",
        ),
        (
            lambda params: Scheduled(params := list(params), {params[0]: random.Random(1)}),
            "generator in its attribute 'rates', together with parameters or states: keep it in",
        ),
    ],
    ids=["under parameters", "large", "a generator under a parameter"],
)
def test_attributes_that_no_snapshot_carries_are_refused_by_name(
    make: Any, why: str, tmp_path: Path
) -> None:
    def build() -> Training:
        model = mlp()
        return Training(model, make(model.parameters()))

    assert why in refusal(build, tmp_path)


@pytest.mark.parametrize(
    ("rates", "kind"),
    [
        (itertools.count(1), "count"),
        ({"lr": [iter([0.1, 0.2])]}, "list_iterator"),
        ((0.1 / n for n in range(1, 9)), "generator"),
        (SimpleNamespace(lr=itertools.cycle([0.1])), "cycle"),
    ],
)
def test_iterators_in_attributes_are_refused_by_name(rates: Any, kind: str, tmp_path: Path) -> None:
    def build() -> Training:
        model = mlp()
        return Training(model, Scheduled(model.parameters(), rates))

    why = refusal(build, tmp_path)
    assert f"Scheduled keeps an iterator ({kind}) in its attribute 'rates" in why
    assert "count in a number" in why


def test_an_open_file_in_an_attribute_is_no_state(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w", encoding="utf-8") as log:

        def build() -> Training:
            model = mlp()
            return Training(model, Scheduled(model.parameters(), [log]))

        check_round_trip(build, tmp_path)


class CountingEach(torch.optim.SGD):
    """Counts the steps of each parameter, and lets the learning rate follow."""

    def __init__(self, params: Any, counts: Callable[[list[Any]], Any]) -> None:
        super().__init__(params, lr=0.1)
        self.groups_too = self.param_groups
        self.counts = counts(self.param_groups[0]["params"])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        steps = 0
        for parameter in self.param_groups[0]["params"]:
            if isinstance(self.counts, dict):
                self.counts[parameter] += 1
                steps += self.counts[parameter]
            else:
                pair = next(pair for pair in self.counts if pair[0] is parameter)
                pair[1] += 1
                steps += pair[1]
        self.groups_too[0]["lr"] = 0.1 / steps
        super().step()


COUNTS: dict[str, Callable[[list[Any]], Any]] = {
    "from the start": lambda parameters: dict.fromkeys(parameters, 0),
    "later": lambda _: defaultdict(int),
    "by a Counter": lambda _: Counter(),
    "in an order": lambda parameters: OrderedDict.fromkeys(parameters, 0),
    "in pairs": lambda parameters: [[one, 0] for one in reversed(parameters)],
}


@pytest.mark.parametrize("kind", COUNTS)
def test_numbers_beside_parameters_in_an_attribute_are_restored(kind: str, tmp_path: Path) -> None:
    def build() -> Training:
        model = mlp()
        return Training(model, CountingEach(model.parameters(), COUNTS[kind]))

    check_round_trip(build, tmp_path)
    training = build()
    session = session_of(training, FakeDaemon(tmp_path, epoch=3))
    assert session.restore() == 7
    session.close()
    optimizer = training.optimizer
    assert optimizer.groups_too is optimizer.param_groups
    counts = {id(one): count for one, count in dict(optimizer.counts).items()}
    assert counts == {id(one): 7 for one in training.model.parameters()}


def test_numbers_beside_parameters_go_back_to_those_of_the_start() -> None:
    """As before a second restore, of a snapshot that was saved before any step."""
    model = mlp()
    optimizer = CountingEach(model.parameters(), COUNTS["from the start"])
    values = OwnValues([optimizer])
    Training(model, optimizer).train(1)
    assert {*optimizer.counts.values()} == {1}
    values.put_back(0, 0, {}, {})
    assert optimizer.counts == dict.fromkeys(model.parameters(), 0)


def test_numbers_beside_a_parameter_that_is_missing_are_refused() -> None:
    optimizer = CountingEach(mlp().parameters(), COUNTS["later"])
    values = OwnValues([optimizer])
    saved = {"attributes": {"counts": {"value": {("a parameter", "gone"): 3}, "device": "cpu"}}}
    with pytest.raises(
        LayoutMismatchError, match="'counts' has a value under the parameter 'gone'"
    ):
        values.put_back(0, 0, saved, {})


def test_a_list_of_parameters_in_an_attribute_is_no_state(tmp_path: Path) -> None:
    class Listing(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1, momentum=0.9)
            self.all = [p for group in self.param_groups for p in group["params"]]
            self.of = {p: index for index, p in enumerate(self.all)}
            self.flat = [p.detach().view(-1) for p in self.all]

    def build() -> Training:
        model = mlp()
        return Training(model, Listing(model.parameters()))

    check_round_trip(build, tmp_path)


def test_another_nesting_than_that_of_the_snapshot_is_refused(tmp_path: Path) -> None:
    training = training_of("SAM")
    session = session_of(training, FakeDaemon(tmp_path))
    training.train(1)
    session.save(1).committed.result(20)
    session.close()
    plain = mlp()
    other = Training(plain, torch.optim.Adam(plain.parameters()))
    session = session_of(other, FakeDaemon(tmp_path, epoch=2))
    with pytest.raises(LayoutMismatchError, match=r"holds 0 others \(Adam\), in the snapshot .* 1"):
        session.restore()
    session.close()


@pytest.mark.parametrize("repeats", Repeats)
def test_windows_refuse_what_does_more_than_the_optimizer_within(
    repeats: Repeats, tmp_path: Path, deterministic: None
) -> None:
    training = training_of("Lookahead with a state of its own")
    settings = holdfast.Settings(policy=SparseWindows(window=2, repeats=repeats))
    with pytest.raises(InvalidJobError, match=r"LookaheadOwnState holds another optimizer \(Adam"):
        session_of(training, FakeDaemon(tmp_path), settings=settings)


def test_replicas_are_not_computed_from_gradients_where_a_wrapper_does_more() -> None:
    """The weights that Lookahead leaves are not those of Adam."""
    model = nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(4, 4) for _ in range(2))})
    adam = torch.optim.Adam(model.parameters())

    def computed(optimizer: Any) -> int:
        live = LiveState(model, [optimizer], Topology(dp=1), 0)
        live.discover()
        return len(Gradients(live).sources())

    assert computed(adam) > 0
    assert computed(LookaheadSharedState(adam)) == 0


@pytest.mark.parametrize("kind", ["ZeroRedundancyOptimizer", "PostLocalSGDOptimizer"])
def test_an_optimizer_that_keeps_a_process_group_is_refused_in_a_world_that_stays(
    kind: str, tmp_path: Path
) -> None:
    model, world = mlp(), holdfast.elastic.init("gloo")
    try:
        optimizer: Any
        if kind == "ZeroRedundancyOptimizer":
            inner = torch.optim.AdamW
            optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=inner, lr=0.1)
        else:
            averager = PeriodicModelAverager(period=2)
            optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters()), averager)
        why = f"{kind} keeps its first process group, .* leave `world` out"
        with pytest.raises(InvalidJobError, match=why):
            holdfast.init(
                model=model, optimizer=optimizer, world=world, socket=tmp_path / "none", job="a/b"
            )
    finally:
        world.close()


def test_one_step_of_a_wrapper_is_one_step() -> None:
    """Whichever optimizer within it says so first, and whether or not the outer one calls hooks."""
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    for wrapped in (
        LookaheadOwnState(torch.optim.SGD([parameter], lr=0.1)),
        Delegating(torch.optim.SGD([parameter], lr=0.1)),
        torch.optim.SGD([parameter], lr=0.1),
    ):
        calls: list[tuple[str, object]] = []

        def note(when: str, one: object, calls: list[tuple[str, object]] = calls) -> None:
            calls.append((when, one))

        hooks = StepHooks([wrapped], partial(note, "before"), partial(note, "after"))
        wrapped.step()
        assert calls == [("before", wrapped), ("after", wrapped)]
        hooks.remove()
        wrapped.step()
        assert len(calls) == 2


def test_optimizers_that_refer_to_each_other_are_each_listed_once() -> None:
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    one, other = (torch.optim.SGD([p], lr=0.1) for p in parameters)
    one.other, other.other = other, one  # type: ignore[attr-defined]
    assert with_nested(one) == (one, other)
    assert with_nested(one, [one, other]) == (one,)
