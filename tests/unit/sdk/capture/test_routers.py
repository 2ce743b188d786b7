"""Hooks on the routers of transformers' models count what the routers have chosen."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import holdfast
from holdfast._capture.capacity import Capacity
from holdfast._capture.routers import Routers
from holdfast._capture.tokens import Tokens
from holdfast._capture.whole import WholeCapture
from holdfast._state.capture import LiveState
from holdfast.testing import FakeDaemon
from holdfast_core.experts.replenish import Replenishing
from holdfast_core.job.snapshots import ExpertOrder, PartialExperts, Selective, SparseWindows
from holdfast_core.snapshots.units import UnitKey, UnitKind
from holdfast_core.topology import Topology

transformers = pytest.importorskip("transformers")

WORDS, LENGTH, BATCH, EXPERTS = 64, 8, 2, 4
SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
}
Counts = dict[tuple[int, int], int]
"""(Layer, expert) → tokens."""


def best_logits(output: Any, at: int = 0, top_k: int = 2) -> list[list[int]]:
    """The experts of each token, by the logits that a router returns."""
    logits = output[at].reshape(-1, output[at].shape[-1])
    return [row.argsort(descending=True)[:top_k].tolist() for row in logits]


def listed(output: Any) -> list[list[int]]:
    rows: list[list[int]] = output[2].tolist()
    return rows


def masked(output: Any) -> list[list[int]]:
    rows = output[0].reshape(-1, EXPERTS).tolist()
    return [[expert for expert, sent in enumerate(row) if sent] for row in rows]


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SMALL, num_local_experts=EXPERTS)
    )


def qwen3() -> Any:
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **SMALL, num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=8
        )
    )


def qwen2() -> Any:
    return transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(
            **SMALL,
            num_experts=EXPERTS,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=8,
        )
    )


def deepseek() -> Any:
    small = SMALL | {"num_key_value_heads": 2}
    small.pop("head_dim")
    return transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            **small,
            n_routed_experts=EXPERTS,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            kv_lora_rank=8,
            q_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
        )
    )


def gpt_oss() -> Any:
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**SMALL, num_local_experts=EXPERTS, num_experts_per_tok=2)
    )


def llama4() -> Any:
    return transformers.Llama4ForCausalLM(
        transformers.Llama4TextConfig(
            **SMALL,
            intermediate_size_mlp=16,
            num_local_experts=EXPERTS,
            num_experts_per_tok=2,
            interleave_moe_layer_step=1,
        )
    )


def jetmoe() -> Any:
    small = {k: v for k, v in SMALL.items() if k not in ("head_dim", "num_attention_heads")}
    return transformers.JetMoeForCausalLM(
        transformers.JetMoeConfig(
            **small, kv_channels=8, num_local_experts=EXPERTS, num_experts_per_tok=2
        )
    )


MODELS: dict[str, tuple[Callable[[], Any], str, Callable[[Any], list[list[int]]]]] = {
    "Mixtral": (mixtral, "mlp.gate", best_logits),
    "Qwen2-MoE": (qwen2, "mlp.gate", best_logits),
    "Qwen3-MoE": (qwen3, "mlp.gate", best_logits),
    "DeepSeek-V3": (deepseek, "mlp.gate", listed),
    "GPT-OSS": (gpt_oss, "mlp.router", best_logits),
    "Llama 4": (llama4, "feed_forward.router", partial(best_logits, at=1)),
    "JetMoE": (jetmoe, "router", partial(best_logits, at=4)),
}
"""Maker of a model, the end of its routers' paths, and the choices in what one returns."""
IN_CI = ("Mixtral", "DeepSeek-V3", "Llama 4")


def watch(
    model: nn.Module, end: str, choices: Callable[[Any], list[list[int]]]
) -> tuple[Counts, list[Any]]:
    """Count what routers choose, one by one, from now on."""
    found: Counts = Counter()
    hooks = []

    def note(layer: int, module: nn.Module, inputs: Any, output: Any) -> None:
        for token in choices(output):
            for expert in token:
                found[layer, expert] += 1

    for path, module in model.named_modules():
        if path.endswith(end):
            layer = next(int(part) for part in path.split(".") if part.isdigit())
            hooks.append(module.register_forward_hook(partial(note, layer)))
    assert hooks
    return found, hooks


def hook(model: nn.Module, capacity: Capacity | None = None) -> tuple[Tokens, Routers]:
    live = LiveState(model, [torch.optim.SGD(model.parameters(), lr=0.1)], Topology(dp=1), 0)
    tokens = Tokens()
    return tokens, Routers(live, WholeCapture(), tokens.add, capacity or Capacity())


def counted(tokens: Tokens) -> Counts:
    return {(key.layer or 0, key.expert or 0): n for key, n in tokens.read()[0].items() if n}


def words(seed: int = 0) -> torch.Tensor:
    return torch.randint(1, WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def step(model: Any, seed: int = 0) -> None:
    model(input_ids=words(seed), labels=words(seed)).loss.backward()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in IN_CI else pytest.mark.exhaustive) for name in MODELS],
)
def test_hooks_count_what_routers_choose_in_steps_of_several_passes(name: str) -> None:
    make, end, choices = MODELS[name]
    model = make().train()
    tokens, routers = hook(model)
    chosen, _ = watch(model, end, choices)
    for seed in range(3):
        step(model, seed)
    assert counted(tokens) == chosen
    layers = {layer for layer, _ in chosen}
    assert routers.layers == layers
    routers.remove()
    step(model)
    assert sum(counted(tokens).values()) == 3 / 4 * sum(chosen.values())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_pass_that_is_repeated_for_its_gradients_counts_once(reentrant: bool) -> None:
    model = mixtral().train()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    tokens, _ = hook(model)
    chosen, _ = watch(model, "mlp.gate", best_logits)
    for seed in range(2):
        step(model, seed)
    assert {key: 2 * n for key, n in counted(tokens).items()} == chosen


def test_two_passes_before_their_backward_passes_count_once_each() -> None:
    block = mixtral().model.layers[0].mlp.train()
    model = nn.ModuleDict({"layers": nn.ModuleList([block])})
    tokens, _ = hook(model)
    losses = []
    for seed in range(2):
        x = torch.randn(1, LENGTH, 16, generator=torch.Generator().manual_seed(seed))
        x.requires_grad_()
        losses.append(checkpoint(block, x, use_reentrant=False).sum())
    for loss in losses:
        loss.backward()
    assert sum(counted(tokens).values()) == 2 * LENGTH * 2


def test_evaluations_do_not_count() -> None:
    model = qwen3().eval()
    tokens, _ = hook(model)
    step(model)
    model.train()
    with torch.no_grad():
        model(input_ids=words())
    assert not tokens
    step(model)
    assert tokens


def test_experts_in_share_of_a_rank_are_counted_by_their_numbers_over_all_ranks() -> None:
    model = mixtral().train()
    tokens, _ = hook(model)
    chosen, _ = watch(model, "mlp.gate", best_logits)
    for layer in model.model.layers:  # as transformers' expert parallelism leaves it
        layer.mlp.experts.num_experts = EXPERTS // 2
        layer.mlp.experts.forward = lambda hidden, index, weights: hidden * weights.sum()
    step(model)
    assert counted(tokens) == chosen


# --- a session ----------------------------------------------------------------------------------


class Run:
    """A training whose tokens a session counts."""

    def __init__(self, model: Any, directory: Path, epoch: int = 1, policy: Any = None) -> None:
        self.model = model.train()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.session = holdfast.init(
            model=model,
            optimizer=self.optimizer,
            daemon=FakeDaemon(directory, epoch=epoch),
            settings=holdfast.Settings(policy=policy or PartialExperts()),
        )

    def step(self, number: int, seed: int | None = None) -> None:
        step(self.model, number if seed is None else seed)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, number: int) -> Any:
        self.session.save(number).committed.result(20)
        self.session.prepare()
        return self.session.counters.loss.report


@pytest.fixture
def closing() -> Iterator[list[Run]]:
    runs: list[Run] = []
    yield runs
    for run in runs:
        run.session.close()


def test_a_session_measures_losses_without_a_line_in_the_loop(
    tmp_path: Path, closing: list[Run], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    run = Run(qwen3(), tmp_path)
    closing.append(run)
    run.session.restore()
    for number in (1, 2, 3):
        run.step(number)
        report = run.save(number)
    each = BATCH * LENGTH * 2
    assert report.routed == (3 * each, 3 * each)
    assert "hooks on Qwen3MoeExperts count the tokens of layers [0, 1]" in caplog.text


def test_the_scripts_own_counts_take_the_place_of_hooks(tmp_path: Path, closing: list[Run]) -> None:
    run = Run(qwen3(), tmp_path)
    closing.append(run)
    run.session.restore()
    for number in (1, 2):
        run.step(number)
        run.session.count_tokens(1, torch.tensor([5, 0, 0, 0]))
        report = run.save(number)
    assert report.routed == (2 * BATCH * LENGTH * 2, 2 * 5)


class Plain(nn.Module):
    """A model with experts, and a router that no hook knows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        block = nn.ModuleDict(
            {"gate": nn.Linear(16, 2), "experts": nn.ModuleList(nn.Linear(16, 16) for _ in "ab")}
        )
        self.layers = nn.ModuleList([block])

    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> Any:
        x, block = self.embedding(input_ids), dict(self.layers[0].named_children())
        gate = block["gate"](x).softmax(-1)
        outputs = [one(x) for one in block["experts"].children()]
        loss = sum((gate[..., e, None] * o).sum() for e, o in enumerate(outputs))
        return type("Output", (), {"loss": loss})


@pytest.mark.parametrize(
    ("policy", "level", "why"),
    [
        (Selective(), "WARNING", "by which the policy chooses experts: layers.0.gate (Linear) is"),
        (PartialExperts(), "INFO", "so what a recovery costs in tokens is not known"),
        (
            SparseWindows(window=2, order=ExpertOrder.SOFT_COUNT),
            "WARNING",
            "order SoftCount adds up probabilities, which hooks do not see",
        ),
    ],
)
@pytest.mark.usefixtures("deterministic")
def test_routers_of_no_known_family_are_named_once(
    tmp_path: Path,
    closing: list[Run],
    caplog: pytest.LogCaptureFixture,
    policy: Any,
    level: str,
    why: str,
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    run = Run(Plain(), tmp_path, policy=policy)
    closing.append(run)
    run.session.restore()
    for number in (1, 2):
        run.step(number)
        run.session.save(number).staged.result(20)
    (told,) = [r for r in caplog.records if "nobody counts" in r.message]
    assert told.levelname == level
    assert why in told.message
    assert "call session.count_tokens(layer, counts)" in told.message


# --- capacities -----------------------------------------------------------------------------------


def switch() -> Any:
    return transformers.SwitchTransformersForConditionalGeneration(
        transformers.SwitchTransformersConfig(
            vocab_size=WORDS,
            d_model=16,
            d_kv=8,
            d_ff=16,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=2,
            num_experts=EXPERTS,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            expert_capacity=10,
            router_jitter_noise=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    )


def to_one_expert(classifier: nn.Linear, expert: int) -> None:
    """Let the classifier of a router choose one expert for all tokens."""
    with torch.no_grad():
        classifier.weight.zero_()
    classifier.register_forward_hook(lambda _, inputs, output: output + torch.eye(EXPERTS)[expert])


def test_an_expert_that_makes_up_for_lost_tokens_gets_more_room_in_a_router_with_a_capacity() -> (
    None
):
    layer = switch().encoder.block[1].layer[-1].mlp.train()
    to_one_expert(layer.router.classifier, 2)
    model = nn.ModuleDict({"block": nn.ModuleList([layer])})
    capacity = Capacity()
    tokens, routers = hook(model, capacity)
    x = torch.randn(BATCH, 20, 16, requires_grad=True)
    layer(x)
    assert counted(tokens) == {(0, 2): BATCH * 10}
    assert tokens.read()[1] == {0: BATCH * 20}, "dropped tokens are assigned, too"
    owed = {UnitKey(0, UnitKind.EXPERT, 2): 5}
    capacity.resume(Replenishing(owed=owed), someone=True)
    layer(x)
    assert counted(tokens) == {(0, 2): BATCH * 10 + BATCH * 11}
    assert layer.router.expert_capacity == 10, "the model keeps its own"
    routers.on_save([0])
    capacity.count(0, [0, 0, 5, 0])
    layer(x)
    assert counted(tokens) == {(0, 2): BATCH * 10 + BATCH * 11 + BATCH * 10}


def test_experts_in_dictionaries_are_experts() -> None:
    _, routers = hook(switch())
    assert routers.layers == {1}
    units = {
        source.unit
        for source in LiveState(
            switch(), [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)], Topology(dp=1), 0
        ).sources()
        if source.unit.kind is UnitKind.EXPERT
    }
    assert units == {UnitKey(1, UnitKind.EXPERT, expert) for expert in range(EXPERTS)}
