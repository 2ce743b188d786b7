"""`session.backward`: a replay without gradients of frozen units gives the same bits, or says that
it does not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import holdfast
from holdfast._session.unprotected import UnprotectedSession
from holdfast.testing import FakeDaemon
from holdfast_core.errors import InvalidJobError
from holdfast_core.job.snapshots import SparseWindows

pytestmark = pytest.mark.usefixtures("deterministic")

Same = Callable[[dict[str, Any], dict[str, Any]], None]
WINDOW, SAVES, WAIT_S = 4, 9, 20


class Exchanged(torch.autograd.Function):
    """Stands for a collective: counts its backward passes."""

    passes = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        Exchanged.passes += 1
        return grad


class Layer(nn.Module):
    """Two experts, to which tokens go and from which they return by `Exchanged`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Exchanged.apply(self.dense(x).tanh())
        mixed = torch.stack([expert(x) for expert in self.experts]).mean(0)
        out: torch.Tensor = self.drop(Exchanged.apply(mixed)) + x
        return out


class Loop:
    """A training loop that calls `session.backward`."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.ModuleDict(
            {"embedding": nn.Embedding(16, 8), "layers": nn.ModuleList(Layer(8) for _ in range(2))}
        )
        self.optimizers = self.make_optimizers()
        self.without: list[frozenset[str]] = []
        """Parameters without a gradient after each backward pass."""

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(self.model.parameters(), lr=1e-2)]

    def open(self, directory: Path, **more: Any) -> holdfast.Session:
        self.session = holdfast.init(
            model=self.model,
            optimizer=self.optimizers,
            daemon=FakeDaemon(directory, **more),
            settings=holdfast.Settings(policy=SparseWindows(window=WINDOW), start_wait_s=WAIT_S),
        )
        return self.session

    def layer(self, number: int, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model["layers"][number](x)  # type: ignore[index]
        return out

    def loss(self) -> torch.Tensor:
        x = self.model["embedding"](torch.randint(16, (8,)))
        for number in range(2):
            x = self.layer(number, x)
        loss: torch.Tensor = (x @ self.model["embedding"].weight.T).square().mean()
        return loss

    def train(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.backward()
        self.without.append(
            frozenset(name for name, p in self.model.named_parameters() if p.grad is None)
        )
        self.step()

    def backward(self) -> None:
        self.session.backward(self.loss())

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = {k: v.clone() for k, v in self.model.state_dict().items()}
        for name, p in self.model.named_parameters():
            for optimizer in self.optimizers:
                for key, value in optimizer.state.get(p, {}).items():
                    found[f"{name}:{key}"] = value.clone()
        return found


class Accumulating(Loop):
    """Steps once for three microbatches, with gradients that are zeros at first."""

    def backward(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=len(self.without) % 2 == 0)
        for _ in range(3):
            loss = self.loss()
            self.session.backward(loss, torch.full_like(loss, 1 / 3), retain_graph=True)


class Recomputing(Loop):
    """Keeps no activations within a layer."""

    def layer(self, number: int, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(super().layer, number, x, use_reentrant=False)
        return found


class Scaling(Loop):
    """Scales its losses; has an optimizer for experts, and one for the rest."""

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        experts = [p for name, p in self.model.named_parameters() if "experts" in name]
        ids = set(map(id, experts))
        others = [p for p in self.model.parameters() if id(p) not in ids]
        return [torch.optim.AdamW(experts), torch.optim.SGD(others, lr=0.1, momentum=0.9)]

    def open(self, directory: Path, **more: Any) -> holdfast.Session:
        self.session = holdfast.init(
            model=self.model,
            optimizer=self.optimizers,
            stateful={"scaler": self.scaler},
            daemon=FakeDaemon(directory, **more),
            settings=holdfast.Settings(policy=SparseWindows(window=WINDOW), start_wait_s=WAIT_S),
        )
        return self.session

    def backward(self) -> None:
        self.session.backward(self.scaler.scale(self.loss()))

    def step(self) -> None:
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()


class Clipping(Loop):
    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)
        super().step()


class Reentrant(Loop):
    def layer(self, number: int, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(super().layer, number, x, use_reentrant=True)
        return found


class Hooked(Loop):
    """Has a hook of one kind on each parameter, as wrappers that reduce gradients do."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.calls = 0
        self.nodes: list[Any] = []
        for number, p in enumerate(self.model.parameters()):
            if number % 3 == 0:
                p.register_hook(self.count)
            elif number % 3 == 1:
                p.register_post_accumulate_grad_hook(self.count)
            else:
                view: Any = p.view_as(p).grad_fn
                self.nodes.append(view.next_functions[0][0])
                self.nodes[-1].register_hook(self.count)

    def count(self, *_: Any) -> None:
        self.calls += 1


class Replicated(Loop):
    """Trains through a wrapper to which the session's model does not refer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.wrapper = DistributedDataParallel(_Losses(self))


class _Losses(nn.Module):
    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.model, self.compute = loop.model, loop.loss
        loop.loss = self  # type: ignore[method-assign]

    def forward(self) -> torch.Tensor:
        return self.compute()


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def undisturbed(kind: type[Loop], directory: Path) -> list[dict[str, Any]]:
    """The state after each step of a run whose session saves the first `SAVES` of them."""
    loop = kind()
    states = [loop.state()]
    with loop.open(directory) as session:
        assert session.restore() is None
        for step in range(1, SAVES + 3):
            loop.train()
            states.append(loop.state())
            if step <= SAVES:
                session.save(step).staged.result(WAIT_S)
    assert set(loop.without) == {frozenset()}
    return states


def repeat(kind: type[Loop], directory: Path, states: list[dict[str, Any]], same: Same) -> Loop:
    """Restore the newest window, repeat its steps, and go on to the last step of `states`."""
    loop = kind(seed=9)
    with loop.open(directory, epoch=2) as session:
        assert session.restore() == SAVES - WINDOW + 1
        for step in range(SAVES - WINDOW + 2, len(states)):
            loop.train()
            session.save(step)
            if step >= SAVES:
                same(loop.state(), states[step])
    return loop


@pytest.mark.parametrize("kind", [Loop, Accumulating, Recomputing, Scaling])
def test_a_replay_without_frozen_gradients_has_the_same_bits(
    kind: type[Loop], tmp_path: Path, same: Same
) -> None:
    loop = repeat(kind, tmp_path, undisturbed(kind, tmp_path), same)
    repeated, after = loop.without[: WINDOW - 1], loop.without[WINDOW - 1 :]
    if kind is not Accumulating:  # in every other step it begins with gradients of zeros
        assert repeated[0] > repeated[1] > repeated[2] > frozenset()
    assert repeated[0]
    assert set(after) == {frozenset()}


def test_what_may_communicate_runs_as_often_as_in_training(tmp_path: Path, same: Same) -> None:
    states = undisturbed(Loop, tmp_path)
    Exchanged.passes = 0
    loop = repeat(Loop, tmp_path, states, same)
    assert Exchanged.passes == 2 * 2 * len(loop.without)


def test_ranks_with_other_experts_have_gradients_of_the_same_parameters(
    tmp_path: Path, same: Same
) -> None:
    """Nodes that may communicate run although all parameters behind them are frozen."""
    loop = repeat(Loop, tmp_path, undisturbed(Loop, tmp_path), same)
    shared = {name for name, _ in loop.model.named_parameters() if "experts" not in name}
    assert shared - loop.without[0] == {"layers.1.dense.bias"}  # kept for scalers of losses


def test_a_loop_that_clips_by_the_norm_of_all_is_found_out(tmp_path: Path, same: Same) -> None:
    states = undisturbed(Clipping, tmp_path)
    with pytest.raises(InvalidJobError, match=r"depends on the gradients of other units"):
        repeat(Clipping, tmp_path, states, same)

    class Plain(Clipping):
        def backward(self) -> None:
            self.loss().backward()

    assert set(repeat(Plain, tmp_path, states, same).without) == {frozenset()}


def test_a_replay_that_is_not_the_same_training_is_logged(
    tmp_path: Path, same: Same, caplog: pytest.LogCaptureFixture
) -> None:
    class Noisy(Loop):
        def backward(self) -> None:
            (self.loss() * 1.5).backward()

    states = undisturbed(Loop, tmp_path)
    with caplog.at_level(logging.WARNING, logger="holdfast"), pytest.raises(AssertionError):
        repeat(Noisy, tmp_path, states, same)
    assert "training is not deterministic" in caplog.text


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Replicated, "DistributedDataParallel waits for the gradient of each parameter"),
        (Reentrant, "checkpoint() is called with use_reentrant=True"),
        (Hooked, ""),
    ],
)
def test_all_gradients_are_computed_where_something_waits_for_them(
    kind: type[Loop], why: str, tmp_path: Path, same: Same, caplog: pytest.LogCaptureFixture
) -> None:
    states = undisturbed(kind, tmp_path)
    with caplog.at_level(logging.INFO, logger="holdfast"):
        loop = repeat(kind, tmp_path, states, same)
    assert set(loop.without) == {frozenset()}
    assert caplog.text.count("gradients of frozen units are computed and dropped: ") == bool(why)
    assert why in caplog.text
    if isinstance(loop, Hooked):
        assert loop.calls == len(loop.without) * len(list(loop.model.parameters()))


def test_without_a_daemon_it_is_the_backward_pass_of_the_loss() -> None:
    weight = torch.ones(3, requires_grad=True)
    UnprotectedSession().backward(2 * weight, torch.arange(3.0), retain_graph=True)
    assert weight.grad is not None
    assert weight.grad.tolist() == [0, 2, 4]
