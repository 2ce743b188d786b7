"""Steps that torch compiles, and steps in CUDA graphs, around saves: the same numbers as without a
session, and snapshots that hold exactly these."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import Machine, bits
from torch import nn
from torch._dynamo.utils import counters

import holdfast
from holdfast._state.nested import StepHooks
from holdfast.testing import FakeDaemon

WAIT_S = 30.0
STEPS, TOKENS, WIDTH, EXPERTS = 5, 16, 32, 4
OWN_BREAK = "torch.compiler.disable"
"""What torch calls the break at a hook that is not to be compiled."""

pytestmark = pytest.mark.timeout(120)


class Layer(nn.Module):
    """A dense part, and experts that take all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        stack = torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5
        self.moe = nn.ModuleDict({"experts": nn.ParameterDict({"w": nn.Parameter(stack)})})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        experts: Any = self.moe["experts"]
        return x + torch.einsum("td,edf->tf", torch.tanh(self.dense(x)), experts["w"])


@dataclass
class Trained:
    """What a run leaves."""

    state: dict[str, torch.Tensor]
    graphs: int
    calls: int
    breaks: set[str] = field(default_factory=set)


class Loop:
    """A model, its optimizer and, with a folder for a daemon's memory, a session."""

    def __init__(self, kind: str, arenas: Path | None, *, seed: int = 0, **more: Any) -> None:
        torch.manual_seed(seed)
        layers = nn.ModuleList(Layer() for _ in range(2))
        self.kind, self.model = kind, nn.ModuleDict({"layers": layers}).to(kind)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, **more)
        self.session: holdfast.Session | None = None
        self.saves: list[holdfast.SaveHandle] = []
        if arenas is not None:
            self.session = holdfast.init(
                model=self.model,
                optimizer=self.optimizer,
                daemon=FakeDaemon(arenas, epoch=1 + seed),
                settings=holdfast.Settings(start_wait_s=WAIT_S),
            )

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        layers: Any = self.model["layers"]
        for layer in layers:
            x = layer(x)
        return x.square().mean()

    def batch(self, step: int) -> torch.Tensor:
        return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(step)).to(
            self.kind
        )

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and optimizer states by name."""
        found: dict[str, torch.Tensor] = {}
        for name, weight in self.model.named_parameters():
            found[name] = weight.detach()
            for key, value in self.optimizer.state[weight].items():
                found[f"{name}:{key}"] = value
        return found

    def save(self, step: int) -> None:
        if self.session is not None:
            self.saves.append(self.session.save(step))

    def train(self, backward: Callable[[torch.Tensor], object], step: Callable[[], object]) -> None:
        """Train with saves in between. Tensors stay where they are."""
        addresses: dict[str, int] = {}
        for number in range(1, STEPS + 1):
            self.optimizer.zero_grad(set_to_none=False)
            backward(self.batch(number))
            step()
            self.save(number)
            now = {name: tensor.data_ptr() for name, tensor in self.state().items()}
            assert not addresses or now == addresses
            addresses = now

    def check_restored(self, arenas: Path) -> None:
        """Compare the newest snapshot with the live tensors: the last step is saved once more, and
        was trained by nobody since."""
        assert self.session is not None
        for one in self.saves:  # a save that begins during another one is skipped
            one.protected.exception(WAIT_S)
        self.session.save(STEPS + 1).protected.result(WAIT_S)
        wanted = {name: bits(tensor) for name, tensor in self.state().items()}
        self.session.close()
        other = Loop(self.kind, arenas, seed=1)
        assert other.session is not None
        assert other.session.restore() == STEPS + 1
        found = {name: bits(tensor) for name, tensor in other.state().items()}
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
        other.session.close()


def train_compiled(kind: str, arenas: Path | None, backend: str, *, optimizer: bool) -> Trained:
    """Train with compiled code, whose forward pass is one graph or raises."""
    torch._dynamo.reset()
    counters.clear()
    loop = Loop(kind, arenas)
    loss = torch.compile(loop.loss, backend=backend, fullgraph=True)
    step: Callable[[], object] = loop.optimizer.step
    if optimizer:
        step = torch.compile(loop.optimizer.step, backend=backend)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(lr|Profiler|lru_cache).*")
        loop.train(lambda x: loss(x).backward(), step)
    found = Trained(
        state={name: bits(tensor) for name, tensor in loop.state().items()},
        graphs=counters["stats"]["unique_graphs"],
        calls=counters["stats"]["calls_captured"],
        breaks=set(counters["graph_break"]),
    )
    if arenas is not None:
        loop.check_restored(arenas)
    return found


BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor", marks=[pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(300)]
    ),
]


@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_steps_are_saved_as_they_are_and_compiled_as_without_a_session(
    machine: Machine, arenas: Path, backend: str, optimizer: bool
) -> None:
    alone = train_compiled(machine.kind, None, backend, optimizer=optimizer)
    saved = train_compiled(machine.kind, arenas, backend, optimizer=optimizer)
    assert all(torch.equal(alone.state[name], saved.state[name]) for name in alone.state)
    assert alone.graphs >= 1
    assert (saved.graphs, saved.calls) == (alone.graphs, alone.calls)
    assert all(OWN_BREAK in one and "_hold" in one for one in saved.breaks - alone.breaks)
    assert optimizer or not saved.breaks


def test_hooks_are_called_around_each_compiled_step(machine: Machine) -> None:
    """They wait for the copy of a save, and count steps."""
    torch._dynamo.reset()
    loop, called = Loop(machine.kind, None), list[str]()
    before: dict[str, torch.Tensor] = {}
    loop.loss(loop.batch(1)).backward()
    hooks = StepHooks(
        [loop.optimizer],
        lambda _: called.append("before" if unchanged(loop, before) else "too late"),
        lambda _: called.append("too early" if unchanged(loop, before) else "after"),
    )
    step = torch.compile(loop.optimizer.step, backend="aot_eager")
    for _ in range(3):
        before = {name: tensor.clone() for name, tensor in loop.state().items()}
        step()
    hooks.remove()
    assert called == ["before", "after"] * 3


def unchanged(loop: Loop, before: dict[str, torch.Tensor]) -> bool:
    """Whether all that was there before is as it was."""
    now = loop.state()
    return all(torch.equal(now[name], tensor) for name, tensor in before.items())


def test_compiled_passes_are_saved_with_the_bytes_of_passes_that_are_not(
    machine: Machine, arenas: Path
) -> None:
    compiled = train_compiled(machine.kind, arenas, "aot_eager", optimizer=False)
    eager = Loop(machine.kind, None)
    eager.train(lambda x: eager.loss(x).backward(), eager.optimizer.step)
    for name, tensor in eager.state().items():
        assert torch.equal(compiled.state[name], bits(tensor)), name


# --- CUDA graphs ----------------------------------------------------------------------------------


def capture(work: Callable[[], object]) -> Callable[[], object]:
    """Return what replays `work`, which is captured in a CUDA graph after warm-ups on a stream of
    its own."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def train_in_graphs(loop: Loop, whole: bool) -> None:
    """Train by replays of the forward and backward passes or, with `whole`, of the step as well;
    a save is between each two."""
    batch = loop.batch(0)

    def passes() -> None:
        loop.optimizer.zero_grad(set_to_none=False)
        loop.loss(batch).backward()

    def step() -> None:
        passes()
        loop.optimizer.step()

    loop.save(1)
    if loop.session is not None:
        loop.session.wait_staged()
    replay = capture(step if whole else passes)

    def backward(x: torch.Tensor) -> None:
        if whole and loop.session is not None:
            loop.session.wait_staged()  # a replay calls no hook of the optimizer
        batch.copy_(x)
        replay()

    for number in range(2, STEPS + 1):
        backward(loop.batch(number))
        if not whole:
            loop.optimizer.step()
        loop.save(number)
    torch.cuda.synchronize()


@pytest.mark.parametrize("whole", [False, True])
def test_steps_in_cuda_graphs_are_saved_as_they_are(
    machine: Machine, arenas: Path, whole: bool
) -> None:
    if not machine.is_cuda:
        pytest.skip("CUDA graphs need a CUDA device")
    alone = Loop(machine.kind, None, capturable=True)
    train_in_graphs(alone, whole)
    saved = Loop(machine.kind, arenas, capturable=True)
    train_in_graphs(saved, whole)
    for name, tensor in alone.state().items():
        assert torch.equal(bits(tensor), bits(saved.state()[name])), name
    saved.check_restored(arenas)


def test_the_graphs_that_torch_makes_itself_are_saved_as_they_are(
    machine: Machine, arenas: Path
) -> None:
    """`mode="reduce-overhead"`."""
    if not machine.is_cuda:
        pytest.skip("CUDA graphs need a CUDA device")
    found = []
    for folder in (None, arenas):
        torch._dynamo.reset()
        loop = Loop(machine.kind, folder)
        loss = torch.compile(loop.loss, mode="reduce-overhead", fullgraph=True)

        def backward(x: torch.Tensor, loss: Callable[..., torch.Tensor] = loss) -> None:
            torch.compiler.cudagraph_mark_step_begin()
            loss(x).backward()

        loop.train(backward, loop.optimizer.step)
        found.append({name: bits(tensor) for name, tensor in loop.state().items()})
        if folder is not None:
            loop.check_restored(folder)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
