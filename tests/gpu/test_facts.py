"""Facts about torch on a device that sparse snapshots and replays rest on; no code of ours is here.

A replay repeats training steps with some weights frozen: they take part in forward and backward
passes as they were, get no gradient and no update. It must repeat the other weights to the bit.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from machines import Machine, bits
from torch import nn

# Before CUDA starts: without it, cuBLAS is not deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

EXPERTS, STEPS = 4, 4

Tensors = list[torch.Tensor]


@pytest.fixture(autouse=True)
def _deterministic() -> object:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


class Block(nn.Module):
    """One layer with a gate and experts, in bfloat16."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        torch.manual_seed(1)
        width = self.width = 256 if machine.is_cuda else 32
        self.dense = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.gate = nn.Linear(width, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(EXPERTS)
        )
        self.to(device=machine.kind, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x + F.dropout(self.dense(x), 0.1, True)
        chosen, experts = self.gate(hidden).float().softmax(-1).topk(2)
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            tokens, turn = (experts == number).nonzero(as_tuple=True)
            if len(tokens):
                weight = chosen[tokens, turn].unsqueeze(-1).to(hidden.dtype)
                out = out.index_add(0, tokens, expert(hidden[tokens]) * weight)
        return hidden + out


class Training:
    """A block whose float32 masters a fused AdamW updates; weights are their casts."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.block = machine, Block(machine)
        self.weights = dict(self.block.named_parameters())
        self.masters = {name: w.detach().float() for name, w in self.weights.items()}
        self.optimizers = {
            name: torch.optim.AdamW([master], lr=1e-3, fused=True)
            for name, master in self.masters.items()
        }

    def backward(self, step: int, active: list[str] | None = None) -> tuple[Tensors, torch.Tensor]:
        """One forward and backward pass, with gradients of the `active` weights only.

        Returns:
            (gradients of the input and of these weights, output).
        """
        generator = torch.Generator().manual_seed(step)
        width = self.block.width
        x = torch.randn(width, width, generator=generator).to(self.machine.kind, torch.bfloat16)
        x.requires_grad_()
        self.block.zero_grad()
        torch.manual_seed(1000 + step)
        out = self.block(x)
        names = list(self.weights) if active is None else active
        wanted = [x, *(self.weights[name] for name in names)]
        torch.autograd.backward(out.float().square().mean(), inputs=wanted)
        frozen = self.weights.keys() - names
        assert all(self.weights[name].grad is None for name in frozen)
        return [bits(t.grad) for t in wanted if t.grad is not None], out.detach()

    @torch.no_grad()
    def update(self, active: list[str] | None = None) -> None:
        for name in list(self.weights) if active is None else active:
            gradient = self.weights[name].grad
            if gradient is not None:
                self.masters[name].grad = gradient.float()
                self.optimizers[name].step()
                self.weights[name].copy_(self.masters[name])

    def state(self, names: list[str]) -> Tensors:
        found: Tensors = []
        for name in names:
            state = self.optimizers[name].state[self.masters[name]]
            kept = [self.weights[name], self.masters[name], *(state[k] for k in sorted(state))]
            found += [bits(tensor) for tensor in kept]
        return found


def equal(left: Tensors, right: Tensors) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def test_a_step_gives_the_same_bits_twice(machine: Machine) -> None:
    one, other = Training(machine), Training(machine)
    for step in range(STEPS):
        first, second = one.backward(step), other.backward(step)
        assert equal(first[0], second[0])
        assert torch.equal(bits(first[1]), bits(second[1]))
        one.update()
        other.update()
    assert equal(one.state(list(one.weights)), other.state(list(one.weights)))


def test_gradients_of_active_weights_do_not_depend_on_frozen_ones(machine: Machine) -> None:
    training = Training(machine)
    active = [name for name in training.weights if name.startswith(("experts.0", "experts.2"))]
    for step in range(STEPS):
        training.backward(step)
        whole = [training.weights[name].grad for name in active]
        wanted = [bits(gradient) for gradient in whole if gradient is not None]
        of_input = training.backward(step)[0][0]
        some, _ = training.backward(step, active)
        assert equal(some, [of_input, *wanted])
        training.backward(step)
        training.update()


def test_a_replay_with_frozen_weights_repeats_the_others_to_the_bit(machine: Machine) -> None:
    """Frozen weights take the values that they had in each step."""
    training = Training(machine)
    active = [name for name in training.weights if not name.startswith("experts.1")]
    values = []
    for step in range(STEPS):
        values.append({name: w.detach().clone() for name, w in training.weights.items()})
        training.backward(step)
        training.update()

    replay = Training(machine)
    for step in range(STEPS):
        with torch.no_grad():
            for name in replay.weights.keys() - active:
                replay.weights[name].copy_(values[step][name])
        replay.backward(step, active)
        replay.update(active)
    assert equal(replay.state(active), training.state(active))


def test_a_replay_with_other_frozen_weights_gives_other_bits(machine: Machine) -> None:
    """So that the comparison above can fail."""
    training, replay = Training(machine), Training(machine)
    active = [name for name in training.weights if not name.startswith("experts.1")]
    for step in range(STEPS):
        training.backward(step)
        training.update()
        replay.backward(step, active)
        replay.update(active)
    assert not equal(replay.state(active), training.state(active))


def test_weights_are_the_cast_of_their_masters(machine: Machine) -> None:
    """The device's cast, the host's, and one on a side stream give the same bits."""
    training = Training(machine)
    for step in range(STEPS):
        training.backward(step)
        training.update()
        for name, weight in training.weights.items():
            master = training.masters[name]
            assert torch.equal(master.to(torch.bfloat16), weight), name
            assert torch.equal(bits(master.cpu().to(torch.bfloat16)), bits(weight)), name


def test_a_cast_can_be_compared_on_a_side_stream(machine: Machine) -> None:
    training = Training(machine)
    training.backward(0)
    training.update()
    masters, weights = list(training.masters.values()), list(training.weights.values())

    def same() -> bool:
        return all(torch.equal(m.to(w.dtype), w) for m, w in zip(masters, weights, strict=True))

    assert same()  # loads the kernels, which may wait for others
    side = machine.beside()
    machine.later(lambda: None)  # training's stream is busy
    with side:
        assert same()
    if machine.is_cuda:
        assert not torch.cuda.current_stream().query()  # and nothing has waited for it
    with torch.no_grad():
        weights[0].view(-1)[:1].add_(1)
    assert not torch.equal(masters[0].to(weights[0].dtype), weights[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_of_any_number_is_that_of_the_host(machine: Machine, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(-(1 << 31), 1 << 31, (1 << 20,), dtype=torch.int64, generator=generator)
    numbers = raw.to(torch.int32).view(torch.float32)
    # Which NaN comes out is up to the device, and what becomes of subnormal numbers to processors.
    numbers = numbers[numbers.abs() >= torch.finfo(torch.float32).tiny]
    numbers = torch.cat([numbers, torch.tensor([float("inf"), -float("inf"), 0.0, -0.0])])
    there = numbers.to(machine.kind).to(dtype)
    assert torch.equal(bits(there), bits(numbers.to(dtype)))
