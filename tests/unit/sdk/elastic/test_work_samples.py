"""Samples of work give the same bytes wherever they are performed, and only what may be compared is
kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import nn

from holdfast._elastic import work_samples
from holdfast._elastic.kinds import kind_of_rank
from holdfast._elastic.recording import Recorder
from holdfast._elastic.work_samples import (
    Operations,
    WorkSample,
    digest_of_sample,
    is_comparable,
    left_out,
    perform,
    steps_of_optimizers,
)
from holdfast._state.collect import RandomGenerators

aten = torch.ops.aten


class Nesting(torch.optim.Optimizer):
    """An optimizer whose step is that of another one, which it finds in one of many places."""

    inner: Any = None

    def step(self, closure: Any = None) -> Any:
        del closure
        self.found().step()

    def found(self) -> Any:
        return self.inner or self.defaults["inner"]


class Attending(nn.Module):
    """Attention, embeddings, a convolution and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.norm, self.mix = nn.RMSNorm(8), nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(batch.long().clamp(0, 15))
        heads = hidden.unflatten(-1, (2, 4)).transpose(1, 2)
        heads = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        hidden = self.norm(hidden + heads.transpose(1, 2).flatten(-2))
        hidden = hidden + self.mix(hidden.transpose(1, 2)).transpose(1, 2)
        out: torch.Tensor = self.out(nn.functional.dropout(hidden, 0.1)).log_softmax(-1)
        return out


class Experts(nn.Module):
    """Stacked experts in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 16, 24, dtype=torch.bfloat16))
        self.down = nn.Parameter(torch.randn(4, 24, 16, dtype=torch.bfloat16))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = batch.bfloat16().expand(4, -1, -1).bmm(self.up)
        return nn.functional.silu(hidden).bmm(self.down)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": layers,
    "attention": Attending,
    "experts": Experts,
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "fused Adam": lambda parameters: torch.optim.Adam(parameters, fused=True),
    "Adafactor": torch.optim.Adafactor,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "fused SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True),
    "learning rate in a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
    "Adagrad": torch.optim.Adagrad,
    "RAdam": torch.optim.RAdam,
}


def work_of(
    model: nn.Module, optimizer: Any, steps: int
) -> tuple[set[str], list[WorkSample], list[WorkSample]]:
    """Names of the operations, samples of them, and of the steps of the optimizer."""
    listed: dict[object, int] = {}
    names, kept = set[str](), list[WorkSample]()
    stepped = list[WorkSample]()
    for _ in range(steps):
        operations = Operations(listed)
        recorder = Recorder(operations)
        recorder.begin()
        try:
            model(torch.rand(4, 16)).square().mean().backward()
        finally:
            recorder.end()
        listed, names = operations.listed, names | operations.names
        kept += operations.kept
        stepped += steps_of_optimizers([optimizer], lambda _: "", 1 << 20)
        optimizer.step()
        optimizer.zero_grad()
    return names, kept, stepped


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [*((one, "AdamW") for one in MODELS), *(("layers", o) for o in OPTIMIZERS)],
)
def test_samples_give_the_same_bytes_on_a_rank_with_another_state(
    model: str, optimizer: str
) -> None:
    owner, other = MODELS[model](), MODELS[model]()
    stepping = OPTIMIZERS[optimizer](owner.parameters())
    names, kept, stepped = work_of(owner, stepping, 4)
    before = [parameter.detach().clone() for parameter in owner.parameters()]
    of_other = OPTIMIZERS[optimizer](other.parameters())
    assert kept and stepped
    drawn = RandomGenerators.now()
    for sample in (*kept, *stepped):
        own = perform(sample.data, sample.digest, names, [stepping])
        assert own is not None and own == perform(sample.data, sample.digest, names, [of_other]), (
            sample.text
        )
    for was, parameter in zip(before, owner.parameters(), strict=True):
        assert torch.equal(was, parameter), "the live state only is read"
    assert torch.equal(drawn.states["torch"], RandomGenerators.now().states["torch"])
    assert kind_of_rank() == kind_of_rank()


def test_a_rank_of_whose_kind_something_is_not_known_takes_no_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> str:
        raise RuntimeError("two generations of flags are mixed")

    assert kind_of_rank() is not None
    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuse)
    assert kind_of_rank() is None


def test_where_libraries_log_to_is_no_part_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    kind = kind_of_rank()
    monkeypatch.setenv("CUBLASLT_LOG_FILE", "/var/log/node-7")
    assert kind_of_rank() == kind
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert kind_of_rank() != kind


def perform_again(
    model: str, optimizer: str, names: set[str], samples: list[WorkSample]
) -> list[int | None]:
    """Perform `samples` in another process, whose model and optimizer have other values."""
    torch.set_num_threads(1)
    owned = OPTIMIZERS[optimizer](MODELS[model]().parameters())
    return [perform(each.data, each.digest, names, [owned]) for each in samples]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_a_thousand_steps_raise_no_alarm() -> None:
    torch.set_num_threads(1)
    shapes = [("layers", "AdamW"), ("layers", "SGD"), ("attention", "AdamW")]
    shapes += [("experts", "Adafactor")]
    with get_context("spawn").Pool(1) as other:
        for model, optimizer in shapes:
            owner = MODELS[model]()
            stepping = OPTIMIZERS[optimizer](owner.parameters())
            names, kept, stepped = work_of(owner, stepping, 1000 // len(shapes))
            samples = [*kept, *stepped]
            again = other.apply(perform_again, (model, optimizer, names, samples))
            own = [perform(each.data, each.digest, names, [stepping]) for each in samples]
            assert None not in own and own == again
            print(f"{model} with {optimizer}: {len(samples)} samples, no alarm")


@pytest.mark.parametrize(
    "operation",
    [
        aten.randn_like.default,
        aten.native_dropout.default,
        aten.empty_like.default,
        aten.convolution.default,
        aten._grouped_mm.default,
        aten.embedding_dense_backward.default,
        aten.index_put.default,
        aten.cumsum.default,
        aten.sort.default,
        aten.transpose.int,
        aten.uniform.default,
        torch.ops._c10d_functional.all_reduce.default,
    ],
    ids=str,
)
def test_what_may_give_other_bits_is_not_compared(operation: Any) -> None:
    assert not is_comparable(operation)


def test_attention_with_dropout_is_not_kept() -> None:
    heads = torch.rand(1, 2, 4, 8)
    named = {"dropout_p": 0.5}
    for given, count in (({}, 1), (named, 0)):
        operations = Operations({"any": 0})
        attention = aten._scaled_dot_product_flash_attention_for_cpu.default
        operations.note(attention, (heads, heads, heads), given)
        assert len(operations.kept) == count


def test_a_rank_performs_only_what_it_executes_itself() -> None:
    operations = Operations({"any": 0})
    operations.note(aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2)), {})
    (sample,) = operations.kept
    assert perform(sample.data, sample.digest, {"aten.mm.default"}, []) is not None
    assert perform(sample.data, sample.digest, {"aten.bmm.default"}, []) is None
    for data in (b"", b"\xff" * 64, sample.data[:-9], sample.data[:40]):
        assert perform(data, digest_of_sample(data), {"aten.mm.default"}, []) is None


def test_bytes_that_its_owner_has_not_encoded_are_not_performed() -> None:
    """Where a bit flips in the owner's memory, or on the way, the second rank is not to blame."""
    operations = Operations({"any": 0})
    operations.note(aten.mm.default, (torch.ones(8, 8), torch.ones(8, 8)), {})
    (sample,) = operations.kept
    names, at = {"aten.mm.default"}, sample.data.index(torch.ones(1).numpy().tobytes())
    flipped = bytearray(sample.data)
    flipped[at + 2] ^= 0x10
    data = bytes(flipped)
    got = perform(sample.data, sample.digest, names, [])
    assert perform(data, digest_of_sample(data), names, []) not in (None, got)
    assert perform(data, sample.digest, names, []) is None


def test_large_input_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_samples, "BYTES_MAX", 1000)
    operations = Operations({"any": 0, "other": 1})
    operations.note(aten.neg.default, (torch.ones(1000),), {})
    operations.note(aten.neg.default, (torch.ones(1).expand(1000),), {})
    assert [sample.text for sample in operations.kept] == ["aten.neg.default of [1000]"]


def stepping(live: Any, place: str) -> list[Any]:
    """Optimizers of a session, one of which steps `live` in its own step."""
    parameters = live.param_groups[0]["params"]
    if place == "of the session":
        outer = Nesting(parameters, {})
        outer.inner = live
        return [outer, live]
    if place == "class":
        kind = type("AdamW", (Nesting,), {"inner": live})
        return [kind(parameters, {})]
    if place == "defaults":
        return [Nesting(parameters, {"inner": live})]
    if place == "a function":
        inner = Nesting(parameters, {})
        inner.found = lambda: live  # type: ignore[method-assign]
        return [inner]
    if place == "torch's own":
        # Torch's own step does not use these, wherever they are.
        own: Any = torch.optim.SGD(parameters, lr=0.1)
        own.step = live.step
        own._init_group = lambda *_: live.step()
        own.defaults["inner"] = live
        own.register_step_pre_hook(lambda *_: live.step())
        return [own]
    outer = Nesting(parameters, {})
    outer.inner = live
    return [outer]


@pytest.mark.parametrize(
    "place", ["instance", "of the session", "class", "defaults", "a function", "torch's own"]
)
def test_no_live_optimizer_is_ever_stepped(place: str) -> None:
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    live = torch.optim.AdamW([parameter], lr=0.1)
    optimizers = stepping(live, place)
    samples = steps_of_optimizers(optimizers, lambda _: "", 1 << 20)
    # A sample of another rank may name any class that this rank has.
    names = {type(one).__name__ for one in optimizers}
    (own,) = steps_of_optimizers([live], lambda _: "", 1 << 20)
    renamed = [own.data.replace(b"AdamW", name.encode()) for name in names if len(name) == 5]
    for data in (own.data, *renamed, *(each.data for each in samples)):
        perform(data, digest_of_sample(data), (), optimizers)
    assert torch.equal(parameter, torch.ones(4)) and not live.state
    others = [one for one in optimizers if one is not live and type(one) is not torch.optim.SGD]
    assert left_out(optimizers) == sorted(type(one).__qualname__ for one in others)
    sampled = {"instance": 1, "of the session": 1, "a function": 0, "torch's own": 1}
    assert len(samples) == sampled.get(place, 0)


def test_a_class_of_torch_of_which_something_was_replaced_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    (sample,) = steps_of_optimizers([optimizer], lambda _: "", 1 << 20)
    assert perform(sample.data, sample.digest, (), [optimizer]) is not None
    step = torch.optim.SGD.step

    @wraps(step)
    def counted(*args: Any, **named: Any) -> Any:
        return step(*args, **named)

    monkeypatch.setattr(torch.optim.SGD, "step", counted)
    assert steps_of_optimizers([optimizer], lambda _: "", 1 << 20) == []
    assert perform(sample.data, sample.digest, (), [optimizer]) is None
    assert left_out([optimizer]) == ["SGD"]
