"""A small GPT of Megatron-Core, on CPU if MEGATRON_DEVICE names no other device."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import megatron_on_cpu
import torch

if os.environ.get("MEGATRON_DEVICE", "cpu") == "cpu":
    megatron_on_cpu.enter()

from megatron.core import parallel_state, tensor_parallel  # on CPU
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

WORDS, LENGTH, BATCH, ACCUMULATED = 64, 8, 2, 2
LOSS_SCALE = 2.0**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Settings of a model and its optimizer."""

    distributed: bool = True
    dtype: str = "bf16"
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Chunks of the model on each pipeline stage."""
    ep: int = 1
    experts: int = 0
    sequence: bool = False
    """Whether tensor-parallel ranks divide the sequence outside of attention and MLP."""
    varying: bool = False
    """Whether sequences may vary in length, so that stages tell each other shapes."""
    capacity: float | None = None
    """Capacity factor of the experts, which drop tokens beyond it."""


def use_groups(case: Case) -> None:
    """Have Megatron make its groups of ranks."""
    parallel_state.initialize_model_parallel(
        case.tp,
        case.pp,
        virtual_pipeline_model_parallel_size=case.vpp if case.vpp > 1 else None,
        expert_model_parallel_size=case.ep,
        create_gloo_process_groups=True,
    )


def _precision(case: Case) -> dict[str, bool]:
    return {case.dtype: True} if case.dtype != "fp32" else {}


def make_config(case: Case) -> TransformerConfig:
    """The settings of a small model."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[case.dtype]
    moe = {
        "num_moe_experts": case.experts,
        "expert_model_parallel_size": case.ep,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "moe_expert_capacity_factor": case.capacity,
    }
    return TransformerConfig(
        num_layers=max(case.pp * case.vpp, 2),
        hidden_size=16,
        num_attention_heads=2,
        ffn_hidden_size=32,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp if case.vpp > 1 else None,
        # Two stages are neighbours in both directions, and messages between them are told apart by
        # their groups.
        overlap_p2p_comm=case.vpp > 1,
        batch_p2p_comm=case.vpp == 1,
        sequence_parallel=case.sequence,
        variable_seq_lengths=case.varying,
        # Only there experts have a capacity, and sequences may vary.
        moe_token_dispatcher_type="alltoall" if case.capacity or case.varying else "allgather",
        use_cpu_initialization=True,
        add_bias_linear=False,
        # Draws from Megatron's own generators, which differ between tensor-parallel ranks.
        attention_dropout=0.1,
        hidden_dropout=0.1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        **_precision(case),
        **(moe if case.experts else {}),
    )


def make_chunk(
    config: TransformerConfig, *, first: bool, last: bool, number: int | None = None
) -> GPTModel:
    """A new chunk of the model, perhaps the `first` or the `last` one."""
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=False
        ),
        vocab_size=WORDS,
        max_sequence_length=LENGTH,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=False,
        vp_stage=number,
    )


class Trained:
    """A new model with its optimizer and scheduler."""

    def __init__(self, seed: int, case: Case) -> None:
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        self.config = make_config(case)
        precision = _precision(case)
        settings = DistributedDataParallelConfig(use_distributed_optimizer=case.distributed)
        self.chunks: list[Any] = []
        for number in range(case.vpp):
            at: dict[str, Any] = {"ignore_virtual": False, "vp_stage": number}
            chunk: Any = make_chunk(
                self.config,
                first=parallel_state.is_pipeline_first_stage(**at),
                last=parallel_state.is_pipeline_last_stage(**at),
                number=number if case.vpp > 1 else None,
            ).cuda()
            if precision:
                chunk = Float16Module(self.config, chunk)
            self.chunks.append(DistributedDataParallel(self.config, settings, chunk))
        self.model = self.chunks[0]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=0.01,
                min_lr=1e-5,
                use_distributed_optimizer=case.distributed,
                params_dtype=self.config.params_dtype,
                clip_grad=1.0,
                # The first scale overflows, and steps are skipped.
                initial_loss_scale=LOSS_SCALE,
                hysteresis=1,
                loss_scale_window=3,
                **precision,
            ),
            self.chunks,
        )
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=0.01,
            min_lr=1e-5,
            lr_warmup_steps=2,
            lr_decay_steps=40,
            lr_decay_style="cosine",
            start_wd=0.01,
            end_wd=0.01,
            wd_incr_steps=40,
            wd_incr_style="constant",
        )
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss

    def step(self, iteration: int) -> float:
        """Train on the micro-batches of one step; return the sum of their losses."""
        shard = parallel_state.get_data_parallel_rank()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = [_batch(iteration, shard, i) for i in range(ACCUMULATED)]
        data = [iter(batches) for _ in self.chunks]
        results = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=data if len(data) > 1 else data[0],
            model=self.chunks,
            num_microbatches=ACCUMULATED,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        self.optimizer.step()
        self.scheduler.step(increment=1)
        return sum(float(each["loss"]) for each in results)

    def inner(self) -> list[Any]:
        """Megatron's optimizers in a chain."""
        return [*getattr(self.optimizer, "chained_optimizers", [self.optimizer])]

    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters of all chunks by name."""
        return {
            f"{number}.{name}": p
            for number, chunk in enumerate(self.chunks)
            for name, p in chunk.named_parameters()
        }

    def digests(self) -> dict[str, str]:
        """Digests of all that training has changed on this rank."""
        found = {name: _digest(p) for name, p in self.weights().items()}
        for i, one in enumerate(self.inner()):
            for index, group in enumerate(one.optimizer.param_groups):
                settings = sorted((k, v) for k, v in group.items() if k != "params")
                found[f"{i}.{index}"] = repr(settings)
                for number, p in enumerate(group["params"]):
                    found[f"{i}.{index}.{number}"] = _digest(p)
                    for key, value in one.optimizer.state[p].items():
                        found[f"{i}.{index}.{number}.{key}"] = _digest(value)
            scaler = getattr(one, "grad_scaler", None)
            found[f"{i}.scaler"] = repr(scaler and scaler.state_dict())
        for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items():
            found[f"generator {name}"] = _digest(state)
        found["generator"] = _digest(torch.get_rng_state())
        found["scheduler"] = repr(self.scheduler.state_dict())
        return found


def _batch(iteration: int, shard: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed((iteration * 100 + shard) * 10 + micro)
    return torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator).cuda()


def _forward(batches: Iterator[torch.Tensor], model: Any) -> Any:
    words = next(batches)
    places = torch.arange(LENGTH, device=words.device).expand(BATCH, -1)
    mask = torch.triu(words.new_ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    return model(words, places, mask, labels=words), partial(_loss)


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach()}


def _digest(value: torch.Tensor) -> str:
    flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.cpu().numpy().tobytes()).hexdigest()
