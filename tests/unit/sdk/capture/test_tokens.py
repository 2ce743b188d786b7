"""Counting tokens without waiting for a device: numbers are read together, and only when needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from training_run import TrainingRun

from holdfast._capture.tokens import Tokens
from holdfast.testing import FakeDaemon
from holdfast_core.snapshots.units import UnitKey, UnitKind

READS = ("item", "tolist", "numpy", "cpu", "__int__", "__index__", "__bool__", "__float__")


class Scalars(TorchDispatchMode):
    """Counts the numbers that are taken out of tensors one by one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.taken = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.taken += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class Reads(TorchFunctionMode):
    """Counts what would wait for a device, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def scalars() -> Iterator[Scalars]:
    with Scalars() as mode:
        yield mode


@pytest.fixture
def reads() -> Iterator[Reads]:
    with Reads() as mode:
        yield mode


def unit(layer: int, expert: int) -> UnitKey:
    return UnitKey(layer, UnitKind.EXPERT, expert)


def test_the_modes_of_this_test_see_what_waits(scalars: Scalars, reads: Reads) -> None:
    [int(n) for n in torch.arange(3)]
    torch.arange(3).tolist()
    assert scalars.taken == 3
    assert reads.seen["tolist"] == 1


def test_tensors_are_added_up_without_a_look_at_them(scalars: Scalars, reads: Reads) -> None:
    tokens = Tokens()
    for layer in range(4):
        counts = torch.arange(64) + layer
        tokens.add(layer, counts)
        tokens.add(layer, counts, 10_000)
        counts.zero_()  # as a router does that keeps its buffers
    assert (scalars.taken, reads.seen) == (0, Counter())
    counted, assigned = tokens.read()
    assert (scalars.taken, reads.seen) == (0, Counter(tolist=1)), "all layers in one transfer"
    assert counted[unit(3, 5)] == 2 * (5 + 3)
    assert assigned[3] == sum(range(3, 67)) + 10_000


def test_numbers_and_tensors_of_one_layer_add_up() -> None:
    tokens = Tokens()
    assert not tokens
    tokens.add(1, [1, 2])
    tokens.add(1, torch.tensor([10.0, 20.0, 30.0]))
    tokens.add(1, (100,), 7)
    assert tokens
    counted, assigned = tokens.read()
    assert counted == {unit(1, 0): 111, unit(1, 1): 22, unit(1, 2): 30}
    assert assigned == {1: 3 + 60 + 7}
    assert tokens.read() == (counted, assigned), "what was read stays"


def test_a_step_reads_counts_once_while_capacities_depend_on_them_and_never_otherwise(
    make_trainer: Any, daemon: FakeDaemon, tmp_path: Path
) -> None:
    run = TrainingRun(make_trainer(), daemon)
    for step in (1, 2, 3):
        run.save(step)
    run.session.close()
    session = TrainingRun(make_trainer(seed=5), FakeDaemon(tmp_path, epoch=2)).session
    session.restore()  # expert 4 of layer 0 and 3 of layer 1 went back by 10 tokens
    layers = [torch.tensor([0, 0, 0, 0, 110]), torch.tensor([0, 0, 0, 109, 0])]
    for step_reads in (1, 1):
        with Scalars() as scalars, Reads() as reads:
            for layer, counts in enumerate(layers):
                session.count_tokens(layer, counts)
            factors = [session.capacity_factors(layer, 5) for layer in range(2)]
        assert (scalars.taken, reads.seen.total()) == (0, step_reads)
        layers[1] = torch.tensor([0, 0, 0, 1, 0])
    assert factors == [[1.0] * 5] * 2, "nothing is owed any more"
    with Scalars() as scalars, Reads() as reads:
        for layer, counts in enumerate(layers):
            session.count_tokens(layer, counts)
            session.capacity_factors(layer, 5)
    assert (scalars.taken, reads.seen.total()) == (0, 0)
    session.close()


def test_sums_of_probabilities_are_added_up_in_parts_of_one() -> None:
    tokens = Tokens(1 << 20)
    tokens.add(0, torch.tensor([0.25, 0.5]))
    tokens.add(0, [0.25, 1.0])
    first, second = (UnitKey(0, UnitKind.EXPERT, number) for number in range(2))
    assert tokens.read()[0] == {first: 1 << 19, second: 3 << 19}
    again = tokens.empty_copy()
    assert not again
    again.add(0, [1.0, 0.0])
    assert again.read()[0] == {first: 1 << 20, second: 0}
