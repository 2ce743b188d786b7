"""Experts of transformers models that are placed on ranks: the same bits as the original blocks."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense_moe import join, relative_error
from ports import reserve_port
from ranks import run_ranks
from torch import nn

from holdfast import InvalidJobError, elastic, moe
from holdfast._capture.capacity import Capacity
from holdfast._capture.routers import Routers
from holdfast._capture.tokens import Tokens
from holdfast._capture.whole import WholeCapture
from holdfast._state.capture import LiveState
from holdfast_core.topology import Topology

transformers = pytest.importorskip("transformers")

GUIDE = (Path(__file__).parents[4] / "docs" / "elastic.md").read_text(encoding="utf-8")
EXPERTS, LAYERS, VOCABULARY = 6, 2, 32
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 3,
}
DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": EXPERTS,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


def make_model(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(1)
    if kind == "Mixtral":
        config = transformers.MixtralConfig(**SMALL, num_local_experts=EXPERTS)
        model = transformers.MixtralForCausalLM(config)
    elif kind == "Qwen3-MoE":
        config = transformers.Qwen3MoeConfig(
            **SMALL, num_experts=EXPERTS, moe_intermediate_size=16, output_router_logits=True
        )
        model = transformers.Qwen3MoeForCausalLM(config)
    else:
        config = transformers.DeepseekV3Config(**SMALL, **DEEPSEEK)
        model = transformers.DeepseekV3ForCausalLM(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".mlp." in name:
                p.normal_(std=0.3)
    return model.to(dtype)


def set_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what torchrun gives the only worker of a job."""
    given = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    for name, value in (given | {"MASTER_PORT": reserve_port()}).items():
        monkeypatch.setenv(name, str(value))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[elastic.World, elastic.WorldGroup]]:
    """A world of this process alone."""
    set_alone(monkeypatch)
    threads = torch.get_num_threads()
    world, group = join(0, int(os.environ["MASTER_PORT"]), 1)
    yield world, group
    world.close()
    torch.set_num_threads(threads)


def backward(model: Any, ids: torch.Tensor) -> Any:
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    return out


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3-MoE", "DeepSeek-V3"])
def test_a_model_whose_experts_are_placed_has_the_same_bits(
    kind: str, implementation: str, alone: tuple[elastic.World, elastic.WorldGroup]
) -> None:
    ids = torch.randint(0, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(2))
    for dtype in (torch.float32, torch.bfloat16):
        original = make_model(kind, dtype).train()
        original.set_experts_implementation(implementation)
        placed = copy.deepcopy(original)
        plan = moe.place_experts(placed, *alone)
        assert [len(layer.copies) for layer in plan.layers] == [EXPERTS] * len(plan.layers)
        expected, out = backward(original, ids), backward(placed, ids)
        assert torch.equal(out.logits, expected.logits)
        assert torch.equal(out.loss, expected.loss)
        moe.SummedGradients(placed, alone[1]).sum()
        names = [name for name, _ in placed.named_parameters()]
        assert names == [name for name, _ in original.named_parameters()]
        for name, p in original.named_parameters():
            grad = placed.get_parameter(name).grad
            assert p.grad is not None
            assert grad is not None
            if implementation == "grouped_mm" and ".experts." in name:
                # Sums over tokens, in the order of a sort that is not stable.
                bound = 1e-5 if dtype is torch.float32 else 2e-2
                assert relative_error(grad[:EXPERTS], p.grad) < bound, name
            else:
                assert torch.equal(grad[: len(p)], p.grad), name


def test_the_whole_state_loads_into_the_original_model(
    alone: tuple[elastic.World, elastic.WorldGroup],
) -> None:
    original, placed = make_model("Qwen3-MoE"), make_model("Qwen3-MoE")
    room = moe.ExpertRoom(nodes=1, rank_seats=EXPERTS + 2)
    plan = moe.plan_experts([[1] * EXPERTS] * LAYERS, room, min_copies=1)
    moe.place_experts(placed, *alone, plan=plan)
    placed_at = "model.layers.1.mlp.experts.down_proj"
    assert len(placed.get_parameter(placed_at)) == EXPERTS + 2
    with torch.no_grad():
        for p in placed.parameters():
            p.mul_(2.0)
    whole = moe.whole_state_dict(placed)
    before = original.state_dict()
    assert whole.keys() == before.keys()
    assert all(torch.equal(whole[name], 2.0 * before[name]) for name in whole)
    original.load_state_dict(whole)
    ids = torch.arange(8).view(1, 8)
    assert torch.equal(original(ids).logits, placed(ids).logits)


def test_the_script_of_the_guide_trains_and_its_model_loads_without_holdfast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_alone(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (script,) = re.findall(r"```python\n(import torch\nfrom transformers .*?)```", GUIDE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(script, names)
    loaded = transformers.Qwen3MoeForCausalLM.from_pretrained("trained").state_dict()
    whole = names["state"]
    assert loaded.keys() == whole.keys()
    assert all(torch.equal(loaded[name], whole[name]) for name in whole)
    first = transformers.Qwen3MoeForCausalLM(names["config"]).state_dict()
    assert all(loaded[name].shape == one.shape for name, one in first.items())


def test_a_session_counts_tokens_under_the_numbers_of_the_models_layers(
    alone: tuple[elastic.World, elastic.WorldGroup],
) -> None:
    model = make_model("DeepSeek-V3").train()  # its first layer has no experts
    moe.place_experts(model, *alone)
    live = LiveState(model, [torch.optim.SGD(model.parameters(), lr=0.1)], Topology(dp=1), 0)
    tokens = Tokens()
    routers = Routers(live, WholeCapture(), tokens.add, Capacity())
    assert routers.layers == {1}
    ids = torch.arange(8).view(1, 8)
    model(ids)
    with torch.no_grad():
        model(ids)
    routed = model.model.layers[1].mlp.experts.routed_E
    assert sum(routed) == 8 * 3
    found = {(key.layer, key.expert): n for key, n in tokens.read()[0].items()}
    assert found == {(1, expert): n for expert, n in enumerate(routed)}


# --- refusals -------------------------------------------------------------------------------------


class Block(nn.Module):
    """A MoE block as those of transformers are built."""

    def __init__(self, experts: nn.Module, choices: int = 2) -> None:
        super().__init__()
        self.experts, self.choices = experts, choices
        self.gate = nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x).softmax(-1).topk(self.choices)
        out: torch.Tensor = self.experts(x, index, weights)
        return out


class Stacked(nn.Module):
    """Experts as those of transformers, with a bias."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, 12, 8))
        self.down = nn.Parameter(torch.randn(experts, 8, 12))
        self.bias = nn.Parameter(torch.randn(experts, 8))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            place, token = torch.where((top_k_index == expert).T)
            inner = F.silu(hidden_states[token] @ self.up[expert].T)
            answer = inner @ self.down[expert].T + self.bias[expert]
            out = out.index_add(0, token, answer * top_k_weights[token, place, None])
        return out


class Shared(Stacked):
    """Experts with something that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)


REFUSED = {
    "a list of experts": (
        Block(nn.ModuleList(nn.Linear(8, 8) for _ in range(4))),
        "ModuleList takes .* only experts that take .* can be placed",
    ),
    "something shared": (Block(Shared()), r"Shared has \['norm.weight', 'norm.bias'\] beside"),
    "different numbers": (
        nn.Sequential(Block(Stacked(4)), Block(Stacked(5))),
        r"MoE blocks of \[4, 5\] experts",
    ),
    "no experts": (nn.Linear(2, 2), r"MoE blocks of \[\] experts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_whose_experts_cannot_be_placed_are_refused(
    name: str, alone: tuple[elastic.World, elastic.WorldGroup]
) -> None:
    model, message = REFUSED[name]
    with pytest.raises(InvalidJobError, match=message):
        moe.place_experts(model, *alone)


def test_plans_for_other_models_are_refused(
    alone: tuple[elastic.World, elastic.WorldGroup],
) -> None:
    def plan(layers: int, experts: int) -> moe.ExpertPlan:
        room = moe.ExpertRoom(nodes=1, rank_seats=8)
        return moe.plan_experts([[1] * experts] * layers, room, min_copies=1)

    model = Block(Stacked())
    with pytest.raises(InvalidJobError, match="has 2 layers, and the model 1 MoE blocks"):
        moe.place_experts(model, *alone, plan=plan(2, 4))
    with pytest.raises(InvalidJobError, match="5 experts in layer 0, and the model 4"):
        moe.place_experts(model, *alone, plan=plan(1, 5))
    moe.place_experts(model, *alone)
    with pytest.raises(InvalidJobError, match="experts are placed already"):
        moe.place_experts(model, *alone)


# --- on several ranks -----------------------------------------------------------------------------


def compare(rank: int, port: int) -> None:
    """Two ranks with equal seats and equal batches have the bits of the original; with seats and
    batches of any kind, what the original has, except for the order of additions."""
    world, group = join(rank, port, 2)
    tokens = [torch.randn(n, 8, generator=torch.Generator().manual_seed(n)) for n in (9, 0)]
    for seats, batches in ((4, [tokens[0]] * 2), (3, tokens)):
        torch.manual_seed(3)
        original = Block(Stacked()).double()
        placed = copy.deepcopy(original)
        room = moe.ExpertRoom(nodes=2, rank_seats=seats)
        plan = moe.plan_experts([[1] * 4], room, min_copies=1)
        moe.place_experts(placed, world, group, plan=plan)
        xs = [one.double().requires_grad_() for one in batches]
        expected = [original(one) for one in xs]
        torch.cat(expected).square().sum().backward()
        own = batches[rank].double().requires_grad_()
        out = placed(own)
        out.square().sum().backward()
        moe.SummedGradients(placed, group).sum()
        experts: Any = placed.experts
        bound = 0.0 if seats == 4 else 1e-12
        assert relative_error(out, expected[rank]) <= bound
        assert own.grad is not None
        assert relative_error(own.grad, xs[rank].grad) <= bound  # type: ignore[arg-type]
        for name, p in original.named_parameters():
            grad, whole = placed.get_parameter(name).grad, p.grad
            assert grad is not None
            assert whole is not None
            if name.startswith("experts."):
                grad = grad[list(experts.seat_of.values())]
                whole = whole[list(experts.seat_of)]
            assert relative_error(grad, whole) <= bound, name
        state = moe.whole_state_dict(placed)
        assert all(torch.equal(state[name], one) for name, one in original.state_dict().items())
    world.close()


def test_two_ranks_compute_what_the_original_block_does() -> None:
    run_ranks(compare, (reserve_port(),), 2)
