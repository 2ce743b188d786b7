"""What torchtitan 0.3 needs to train on CPU and gloo, and configurations of models that are small
enough for it. Import this before anything of torchtitan. Nothing here is about Holdfast."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
import torch._utils
from torch.distributed.fsdp import FSDPModule


class _Properties:
    name = "cpu"
    total_memory = 1 << 34
    gcnArchName = ""


class _DeviceModule(types.ModuleType):
    """`torch.cpu` with the functions of `torch.cuda` that torchtitan calls."""

    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    empty_cache = staticmethod(lambda: None)
    get_device_name = staticmethod(lambda *device: "cpu")
    get_device_properties = staticmethod(lambda *device: _Properties)
    memory_stats = staticmethod(lambda *device: {})
    reset_peak_memory_stats = staticmethod(lambda *device: None)
    set_device = staticmethod(lambda *device: None)
    synchronize = staticmethod(lambda *device: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


# The device, before torchtitan asks for it.
_module, _other = _DeviceModule("cpu"), torch._utils._get_device_module
torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = functools.cache(
    lambda device: _module if device == "cpu" else _other(device)
)

from torchtitan.models import qwen3  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.common.decoder import Decoder  # noqa: E402
from torchtitan.models.qwen3 import config_registry  # noqa: E402
from torchtitan.tools import utils  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

utils.get_local_device = lambda: torch.device("cpu")


def _attend(  # torchtitan finds the arguments by these names
    self: Any,
    q_BLNH: torch.Tensor,
    k_BLNH: torch.Tensor,
    v_BLNH: torch.Tensor,
    *,
    scale: float | None = None,
    **others: Any,
) -> torch.Tensor:
    """Causal attention without masks of documents: flex attention needs a GPU or a compiler."""
    q, k, v = (each.transpose(1, 2) for each in (q_BLNH, k_BLNH, v_BLNH))
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, is_causal=True, scale=scale).transpose(1, 2)


def _make_attention(self: Any, config: Any) -> None:
    torch.nn.Module.__init__(self)


FlexAttention.__init__, FlexAttention.forward = _make_attention, _attend
Decoder.get_attention_masks = lambda self, positions: None

# FSDP2 would divide gradients while it sums them, which gloo cannot.
_set_divide_factor = FSDPModule.set_gradient_divide_factor


def _divide_apart(self: FSDPModule, factor: float) -> None:
    self.set_force_sum_reduction_for_comms(True)
    _set_divide_factor(self, factor)


FSDPModule.set_gradient_divide_factor = _divide_apart  # type: ignore[method-assign]

VOCABULARY, WIDTH, LAYERS, EXPERTS = 512, 32, 2, 8


def _model(attn_backend: str = "flex", moe_comm_backend: str = "standard") -> Any:
    """Configuration of a small Qwen3 with experts."""
    return qwen3.Qwen3Model.Config(
        vocab_size=VOCABULARY,
        dim=WIDTH,
        norm=qwen3._qwen3_norm(WIDTH),
        tok_embeddings=qwen3.Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=qwen3._EMBEDDING_INIT
        ),
        lm_head=qwen3.Linear.Config(
            in_features=WIDTH, out_features=VOCABULARY, param_init=qwen3._LINEAR_INIT
        ),
        layers=qwen3._build_qwen3_moe_layers(
            fuse_qkv=True,
            n_layers=LAYERS,
            dim=WIDTH,
            n_heads=4,
            n_kv_heads=2,
            head_dim=8,
            moe_hidden_dim=WIDTH,
            num_experts=EXPERTS,
            top_k=2,
            attn_backend=attn_backend,
            rope=qwen3.CosSinRoPE.Config(dim=8, max_seq_len=256, theta=10000.0),
            moe_comm_backend=moe_comm_backend,
        ),
    )


qwen3.qwen3_configs["tiny_moe"] = _model


def tiny_moe() -> Trainer.Config:
    """Configuration of a trainer of this model."""
    config = config_registry.qwen3_moe_debug()
    config.model_spec = qwen3.model_registry("tiny_moe", attn_backend="flex")
    config.loss.loss_fn.global_vocab_size = VOCABULARY
    config.training.seq_len = 32
    config.training.local_batch_size = 2
    config.training.disable_cuda_graphs = True
    config.debug.seed = 1
    return config
