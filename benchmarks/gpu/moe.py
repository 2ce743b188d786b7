"""A Mixture-of-Experts training step that fills a device: bfloat16 compute, float32 masters, Adam.

Experts are stacked and computed by batched matrix products, each with room for as many tokens as
it would get if all got the same. The loss is of random tokens: it means nothing, and costs the
same.

Shape suffixes: N tokens of a micro-batch, D width, H hidden width, E experts, C tokens of one
expert, B sequences, S tokens of each, A attention heads, W their width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.adamw import adamw

EXPERTS, CHOICES, HEAD_WIDTH, VOCABULARY = 8, 2, 64, 1024
BYTES_PER_PARAMETER = 14
"""Two for the compute weight, twelve for its master and two moments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of the model and of a micro-batch."""

    dim: int
    layers: int
    sequences: int
    length: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.length


def shape_for(state_bytes: int, *, small: bool) -> Shape:
    """Choose the widest model of at least two layers whose state has at most `state_bytes`."""
    if small:
        return Shape(dim=HEAD_WIDTH, layers=1, sequences=1, length=16)
    parameters = state_bytes // BYTES_PER_PARAMETER
    dim = next((d for d in (4096, 2048, 1024, 512) if 2 * _layer(d) < parameters), 256)
    return Shape(
        dim=dim, layers=max((parameters - _ends(dim)) // _layer(dim), 1), sequences=8, length=2048
    )


class Experts(nn.Module):
    """Stacked experts of one layer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(EXPERTS, dim, 4 * dim) * dim**-0.5)
        self.w_out = nn.Parameter(torch.randn(EXPERTS, 4 * dim, dim) * (4 * dim) ** -0.5)


class Moe(nn.Module):
    """Experts, and the gate that chooses among them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, EXPERTS, bias=False)
        self.experts = Experts(dim)

    def forward(self, x_ND: Tensor) -> Tensor:
        tokens = x_ND.shape[0]
        room = max(CHOICES * tokens // EXPERTS, 1)
        weights_NE = self.gate(x_ND).float().softmax(dim=-1)
        # Each expert takes the tokens that want it most, so that all shapes are known beforehand.
        weights_EC, taken_EC = weights_NE.t().topk(min(room, tokens), dim=1)
        x_ECD = x_ND[taken_EC]
        hidden_ECH = F.gelu(torch.bmm(x_ECD, self.experts.w_in))
        out_ECD = torch.bmm(hidden_ECH, self.experts.w_out) * weights_EC.to(x_ND.dtype)[..., None]
        flat = out_ECD.reshape(-1, x_ND.shape[1])
        return torch.zeros_like(x_ND).index_add(0, taken_EC.reshape(-1), flat)


class Block(nn.Module):
    """Attention and experts."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.moe = Moe(dim)

    def forward(self, x_BSD: Tensor) -> Tensor:
        batch, length, dim = x_BSD.shape
        qkv = self.qkv(self.norms[0](x_BSD)).view(batch, length, 3, -1, HEAD_WIDTH)
        q_BASW, k_BASW, v_BASW = qkv.permute(2, 0, 3, 1, 4)
        seen_BASW = F.scaled_dot_product_attention(q_BASW, k_BASW, v_BASW, is_causal=True)
        x_BSD = x_BSD + self.proj(seen_BASW.transpose(1, 2).reshape(batch, length, dim))
        added_ND: Tensor = self.moe(self.norms[1](x_BSD).view(-1, dim))
        return x_BSD + added_ND.view_as(x_BSD)


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.dim)
        self.layers = nn.ModuleList(Block(shape.dim) for _ in range(shape.layers))
        self.head = nn.Linear(shape.dim, VOCABULARY, bias=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSD = self.embedding(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        logits = self.head(x_BSD).float().view(-1, VOCABULARY)
        return F.cross_entropy(logits, tokens_BS.reshape(-1))


class MasterAdam(torch.optim.Optimizer):
    """Adam on float32 masters; the parameters are their bfloat16 copies."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-4})
        for p in self.param_groups[0]["params"]:
            master = p.detach().float()
            self.state[p] = {
                "master": master,
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
                "step": torch.zeros((), device=p.device),
            }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        for p in params:  # one at a time: float32 gradients of all of them need much memory
            state = self.state[p]
            adamw(
                [state["master"]],
                [p.grad.float()],
                [state["exp_avg"]],
                [state["exp_avg_sq"]],
                [],
                [state["step"]],
                fused=True,
                amsgrad=False,
                beta1=0.9,
                beta2=0.95,
                lr=self.param_groups[0]["lr"],
                weight_decay=0.01,
                eps=1e-8,
                maximize=False,
            )
            p.copy_(state["master"])


class Training:
    """A model and its optimizer on `device`, and steps of some micro-batches."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        torch.manual_seed(0)
        with device:
            self.model = Model(shape).to(torch.bfloat16)
            self._tokens_BS = torch.randint(VOCABULARY, (shape.sequences, shape.length))
        self.optimizer = MasterAdam(self.model.parameters())
        self.micro_batches = 1

    @property
    def state_bytes(self) -> int:
        return sum(p.numel() * BYTES_PER_PARAMETER for p in self.model.parameters())

    def step(self) -> None:
        """Queue one training step."""
        for _ in range(self.micro_batches):
            (self.model(self._tokens_BS) / self.micro_batches).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


def _layer(dim: int) -> int:
    return EXPERTS * (8 * dim * dim + dim) + 4 * dim * dim + 4 * dim


def _ends(dim: int) -> int:
    return 2 * VOCABULARY * dim
