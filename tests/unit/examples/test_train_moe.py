"""The example trainer: its layers against plain formulas, its optimizer against torch's, and runs
that end with the same bytes."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ports import reserve_port
from ranks import run_ranks

import holdfast
from holdfast.elastic import WorldGroup

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "train_moe.py"
RANKS = 2
SMALL = ["--dim", "32", "--layers", "2", "--experts", "4", "--seq", "32", "--steps", "4"]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_moe", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_moe"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def train_moe() -> ModuleType:
    return load()


@pytest.fixture
def alone() -> Iterator[WorldGroup]:
    """A group of a world of this process only."""
    world = holdfast.elastic.init("gloo")
    yield world.group([[0]])
    world.close()


def make_moe(train_moe: ModuleType, group: WorldGroup, dim: int, experts: int) -> Any:
    torch.manual_seed(3)
    moe = train_moe.MoE(dim, experts, 1, group)
    for parameter in moe.experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return moe


def test_every_token_gets_its_two_best_experts_where_there_is_room(
    train_moe: ModuleType, alone: WorldGroup
) -> None:
    moe = make_moe(train_moe, alone, dim=8, experts=2)  # two experts: each token goes to both
    x = torch.randn(10, 8)
    answer, _ = moe(x)
    probs = moe.gate(x).softmax(-1)
    w_in, w_out = moe.experts.w_in, moe.experts.w_out
    expected = sum(probs[:, [e]] * (F.gelu(x @ w_in[e]) @ w_out[e]) for e in range(2))
    torch.testing.assert_close(answer, expected)


def test_tokens_beyond_an_experts_capacity_get_nothing_from_it(
    train_moe: ModuleType, alone: WorldGroup
) -> None:
    moe = make_moe(train_moe, alone, dim=8, experts=8)
    x = torch.randn(1, 8).expand(32, 8)  # all tokens want the same two experts
    answer, balance = moe(x)
    capacity = int(train_moe.CAPACITY_FACTOR * train_moe.CHOICES * 32 / 8)
    assert (answer[:capacity].abs().sum(-1) > 0).all()
    assert (answer[capacity:] == 0).all()
    assert balance > 1.0  # 1 is a perfect balance


def test_an_expert_with_more_capacity_takes_more_tokens_and_the_others_do_not(
    train_moe: ModuleType, alone: WorldGroup
) -> None:
    moe = make_moe(train_moe, alone, dim=8, experts=8)
    x = torch.randn(1, 8).expand(64, 8)  # all tokens want the same two experts
    plain, _ = moe(x)
    capacity = int(train_moe.CAPACITY_FACTOR * train_moe.CHOICES * 64 / 8)
    first, second = sorted(moe.gate(x[0]).topk(2).indices.tolist())
    assert moe.routed_E.tolist() == [capacity * (e in (first, second)) for e in range(8)]
    moe.room = 1.1  # as on every rank once one of them has an expert with more
    roomy, _ = moe(x)
    torch.testing.assert_close(roomy, plain)
    moe.factors[first] = 1.1
    moe(x)
    assert moe.routed_E[first] == int(1.1 * capacity) > capacity
    assert moe.routed_E[second] == capacity


def test_the_held_out_loss_does_not_depend_on_what_is_in_a_batch(
    train_moe: ModuleType, alone: WorldGroup
) -> None:
    args = train_moe.parse_args([*SMALL, "--experts", "16"])
    torch.manual_seed(4)
    model = train_moe.ByteLM(args, 1, alone)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    moes = [module for module in model.modules() if isinstance(module, train_moe.MoE)]
    text = torch.randint(256, (12, 33), dtype=torch.uint8)
    model(text.long())
    everything = 12 * 32 * train_moe.CHOICES
    assert all(int(moe.routed_E.sum()) < everything for moe in moes)  # in training some are dropped
    found = [train_moe.held_out_loss(model, moes, text, batch) for batch in (1, 4, 12)]
    assert found[1:] == pytest.approx(found[:1] * 2, rel=1e-6)
    assert all(int(moe.routed_E.sum()) == everything for moe in moes)


def test_held_out_passages_are_spread_over_the_text_and_are_not_trained_on(
    train_moe: ModuleType,
) -> None:
    whole, data = train_moe.Passages(65), train_moe.Passages(65, held_out=10)
    assert len(data.held_out_PT) == 10
    assert len(data) == len(whole) - 10
    assert torch.equal(data.held_out_PT[0], whole.text_PT[0])
    assert torch.equal(data.held_out_PT[-1], whole.text_PT[-1])
    assert torch.equal(data[0], whole[1])


def test_the_optimizer_is_adamw_on_the_master_weights(train_moe: ModuleType) -> None:
    torch.manual_seed(5)
    start, grads = torch.randn(6, 4), [torch.randn(6, 4) for _ in range(5)]
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    optimizer = train_moe.MasterAdamW([ours], lr=0.01)
    reference = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), weight_decay=0.01)
    for grad in grads:
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours, theirs)
    assert sorted(optimizer.state[ours]) == ["exp_avg", "exp_avg_sq", "master", "step"]


def test_the_text_is_large(train_moe: ModuleType) -> None:
    data = train_moe.Passages(65)
    assert len(data) * 65 > 10_000_000
    assert data[0].dtype == torch.int64
    assert bytes(data[0].tolist()).isascii()


def work(rank: int, port: int, arguments: list[str]) -> None:
    """A rank of a training run, as torchrun would start it."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    load().main(arguments)


def train(arguments: list[str]) -> None:
    run_ranks(work, (reserve_port(), arguments), RANKS)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ep", [1, 2])
def test_two_runs_with_one_seed_end_with_the_same_bytes_and_a_lower_loss(
    tmp_path: Path, ep: int
) -> None:
    hashes = []
    for name in ("a", "b"):
        hash_file, log_file = tmp_path / name, tmp_path / f"{name}.jsonl"
        files = ["--hash-file", str(hash_file), "--log-file", str(log_file)]
        train([*SMALL, "--ep", str(ep), *files])
        hashes.append(hash_file.read_text())
        log = [json.loads(line) for line in log_file.read_text().splitlines()]
        assert [line["step"] for line in log] == [1, 2, 3, 4]
        assert log[-1]["loss"] < log[0]["loss"]
    assert hashes[0] == hashes[1]
