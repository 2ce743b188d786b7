"""Trains a byte-level Mixture-of-Experts language model on the source text of Python's library.

The example shows Holdfast in a real training script; all uses of Holdfast are in `main`. Start it
with `torchrun --nproc-per-node 2 examples/train_moe.py`, or protected on several nodes with
`holdfast run examples/moe-job.yaml`. Experts are spread over the ranks, and tokens reach them by
all-to-all; everything else is replicated, and its gradients are averaged. The state after step k
depends only on the seed, the number of ranks and k, so a run that was killed and restored ends with
the same bytes as an undisturbed one.

Each rank takes `--batch` sequences in a step, so a world with fewer ranks trains on fewer
sequences. In a job that may shrink (`minNodes`), fewer ranks share the same experts, and each holds
more of them: as many as it takes for all to hold the same number. With `--ep 1` each rank has all
experts. With `--stay`, `--ep` must divide the number of ranks in every world.

Shape suffixes: B sequences, S bytes in each, N = B·S tokens of a rank, D model width, H heads of
width d, V = 256 byte values, E experts of a layer, L experts on this rank, R ranks that share the
experts (E = R·L), K = 2 experts per token, C tokens that one rank may send to one expert.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.utils.data import DataLoader, Dataset

import holdfast
from holdfast import elastic

BYTE_VALUES, CHOICES, HEAD_WIDTH = 256, 2, 32
CAPACITY_FACTOR, BALANCE_WEIGHT = 1.25, 0.01
Group = elastic.WorldGroup


class AllToAll(torch.autograd.Function):
    """Sends block i of the first dimension to rank i of the group, and its gradient back."""

    @staticmethod
    def forward(ctx: Any, group: Group, x: Tensor) -> Tensor:
        ctx.group = group
        sent = x.contiguous().view(torch.uint8)  # bytes: not every backend supports bfloat16
        received = torch.empty_like(sent)
        group.wait(dist.all_to_all_single(received, sent, group=group.now, async_op=True))
        return received.view(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, AllToAll.apply(ctx.group, grads[0])


def multiply(x: Tensor, w: Tensor) -> Tensor:
    """`x @ w`. CPUs multiply bfloat16 in float32: without instructions for bfloat16 they would take
    20 times as long or more."""
    if x.is_cpu and x.dtype == torch.bfloat16:
        return (x.float() @ w.float()).bfloat16()
    return x @ w


class Linear(nn.Linear):
    """A linear layer without a bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight.T)


class Experts(nn.Module):
    """The experts of one layer that live on this rank, stacked."""

    def __init__(self, local: int, dim: int) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.empty(local, dim, 4 * dim))
        self.w_out = nn.Parameter(torch.empty(local, 4 * dim, dim))

    def forward(self, x_LXD: Tensor) -> Tensor:  # X = R·C
        return multiply(F.gelu(multiply(x_LXD, self.w_in)), self.w_out)


class MoE(nn.Module):
    """Sends each token to its two best experts, within their capacity. After a recovery `factors`
    gives some experts more capacity, and `room` reserves space for it on every rank."""

    def __init__(self, dim: int, experts: int, ranks: int, group: Group) -> None:
        super().__init__()
        self.num_experts, self.ranks, self.group = experts, ranks, group
        self.gate = Linear(dim, experts)
        self.experts = Experts(experts // ranks, dim)
        self.factors, self.room = [1.0] * experts, 1.0
        self.routed_E: Tensor  # tokens of the newest batch, by expert

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted outputs of the experts, and the load-balancing loss."""
        (N, D), E, R, device = x_ND.shape, self.num_experts, self.ranks, x_ND.device
        capacity = CAPACITY_FACTOR * CHOICES * N / E
        C = int(capacity * self.room)
        limit_E = torch.tensor([int(capacity * factor) for factor in self.factors], device=device)
        assert max(self.factors) <= self.room, "an expert's tokens would take its neighbour's place"
        probs_NE = self.gate(x_ND).float().softmax(-1)
        weights_NK, expert_NK = probs_NE.topk(CHOICES)
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)

        # Each token's place in its expert's queue, all first choices before all second ones.
        queue_P = expert_NK.T.reshape(-1)  # P = K·N
        chosen_PE = F.one_hot(queue_P, E)
        place_P = ((chosen_PE.cumsum(0) - 1) * chosen_PE).sum(-1)
        kept_P = place_P < limit_E[queue_P]
        slot_P = torch.where(kept_P, queue_P * C + place_P, E * C)  # the last: dropped
        self.routed_E = chosen_PE[kept_P].sum(0)
        token_of_slot = torch.full((E * C + 1,), N, device=device)  # N: no token, zeros
        token_of_slot[slot_P] = torch.arange(N, device=device).repeat(CHOICES)

        sent = F.pad(x_ND, (0, 0, 0, 1))[token_of_slot[:-1]].view(R, -1, D)
        arrived_RLCD = AllToAll.apply(self.group, sent).view(R, E // R, C, D)
        answer_LXD = self.experts(arrived_RLCD.transpose(0, 1).reshape(E // R, R * C, D))
        answer_RLCD = answer_LXD.view(E // R, R, C, D).transpose(0, 1)
        returned = AllToAll.apply(self.group, answer_RLCD.reshape(R, -1, D)).view(E * C, D)
        answer_KND = F.pad(returned, (0, 0, 0, 1))[slot_P].view(CHOICES, N, D)
        out_ND = (answer_KND * weights_NK.T.unsqueeze(-1).to(x_ND.dtype)).sum(0)
        return out_ND, E * (chosen_PE.float().mean(0) * probs_NE.mean(0)).sum()


class Block(nn.Module):
    """Causal self-attention, then the experts."""

    def __init__(self, dim: int, moe: nn.Module) -> None:
        super().__init__()
        self.heads = dim // HEAD_WIDTH
        self.attn_norm, self.moe_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.proj = Linear(dim, 3 * dim), Linear(dim, dim)
        self.moe = moe

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        B, S, D = x_BSD.shape
        qkv = self.qkv(self.attn_norm(x_BSD)).view(B, S, 3, self.heads, D // self.heads)
        q_BHSd, k_BHSd, v_BHSd = qkv.permute(2, 0, 3, 1, 4)
        mixed_BHSd = F.scaled_dot_product_attention(q_BHSd, k_BHSd, v_BHSd, is_causal=True)
        x_BSD = x_BSD + self.proj(mixed_BHSd.transpose(1, 2).reshape(B, S, D))
        answer_ND, balance = self.moe(self.moe_norm(x_BSD).view(B * S, D))
        return x_BSD + answer_ND.view(B, S, D), balance


class ByteLM(nn.Module):
    """Predicts each next byte of a text."""

    def __init__(self, args: argparse.Namespace, ranks: int, group: Group) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTE_VALUES, args.dim)
        self.position = nn.Parameter(torch.randn(args.seq, args.dim) * 0.02)
        self.layers = nn.ModuleList(
            Block(args.dim, MoE(args.dim, args.experts, ranks, group)) for _ in range(args.layers)
        )
        self.norm = nn.RMSNorm(args.dim)
        self.head = Linear(args.dim, BYTE_VALUES)

    def forward(self, bytes_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropy in nats per byte, and the mean load-balancing loss. T = S + 1."""
        x_BSD, balances = self.embedding(bytes_BT[:, :-1]) + self.position, []
        for layer in self.layers:
            x_BSD, balance = layer(x_BSD)
            balances.append(balance)
        logits_BSV = self.head(self.norm(x_BSD)).float()
        loss = F.cross_entropy(logits_BSV.flatten(0, 1), bytes_BT[:, 1:].flatten())
        return loss, torch.stack(balances).mean()


class MasterAdamW(torch.optim.Optimizer):
    """AdamW on float32 master weights; the parameters are their bfloat16 copies."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.01) -> None:
        defaults = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        for p in (p for group in self.param_groups for p in group["params"]):
            master = p.detach().float().clone()
            self.state[p] = {
                "master": master,
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
                "step": torch.zeros((), device=p.device),
            }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] for p in params]
            keys = ("master", "exp_avg", "exp_avg_sq", "step")
            masters, means, spreads, steps = ([s[key] for s in states] for key in keys)
            adamw(
                masters,
                [p.grad.float() for p in params],
                means,
                spreads,
                [],
                steps,
                fused=True,  # daemons can repeat its arithmetic (snapshot.policy…recompute)
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for p, master in zip(params, masters, strict=True):
                p.copy_(master)


class Passages(Dataset[Tensor]):
    """The Python sources of the standard library, cut into passages of `length` bytes. `held_out`
    of these passages, evenly spread, are left out."""

    def __init__(self, length: int, held_out: int = 0) -> None:
        files, left_out = [], {"site-packages", "test"}
        for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
            folders[:] = set(folders) - left_out  # the rest is never entered
            files += [Path(folder, name) for name in names if name.endswith(".py")]
        text = bytearray().join(f.read_bytes() for f in sorted(files))
        count = len(text) // length
        text_PT = torch.frombuffer(text, dtype=torch.uint8)[: count * length].view(-1, length)
        is_held_out_P = torch.zeros(count, dtype=torch.bool)
        is_held_out_P[torch.linspace(0, count - 1, held_out, dtype=torch.double).long()] = True
        self.held_out_PT = text_PT[is_held_out_P]
        self.text_PT = text_PT[~is_held_out_P] if held_out else text_PT

    def __len__(self) -> int:
        return len(self.text_PT)

    def __getitem__(self, index: int) -> Tensor:
        return self.text_PT[index].long()


@torch.no_grad()
def average_gradients(
    world: elastic.World, model: ByteLM, loss: Tensor, replicas: Group, ep: int
) -> float:
    """Average gradients over the ranks that hold the same weights; return the mean loss. Experts
    already have the gradients of all tokens that were sent to them."""
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    dense = [grad for name, grad in grads.items() if ".experts." not in name]
    flat = torch.cat([loss.detach().view(1), *(grad.float().view(-1) for grad in dense)])
    world.wait(dist.all_reduce(flat, async_op=True))
    flat /= world.size
    mean_loss, *means = flat.split([1, *(grad.numel() for grad in dense)])
    for grad, mean in zip(dense, means, strict=True):
        grad.copy_(mean.view_as(grad))
    for grad in (grad for name, grad in grads.items() if ".experts." in name):
        total = grad.float()
        if world.size > ep:
            replicas.wait(dist.all_reduce(total, group=replicas.now, async_op=True))
        grad.copy_(total / world.size)
    return float(mean_loss)


def build(
    args: argparse.Namespace, rank: int, sharing: Group, ep: int, device: torch.device
) -> tuple[ByteLM, MasterAdamW]:
    """The model in the state that the seed gives, and its optimizer."""
    torch.manual_seed(args.seed)  # the same dense weights everywhere
    model = ByteLM(args, ep, sharing)
    torch.manual_seed(args.seed + 1 + rank % ep)  # other experts on each rank that shares them
    for name, p in model.named_parameters():
        if ".experts." in name:
            nn.init.normal_(p, std=p.shape[1] ** -0.5)
    model.to(device, torch.bfloat16)
    return model, MasterAdamW(model.parameters(), lr=1e-3)


def train_step(
    world: elastic.World,
    model: ByteLM,
    optimizer: MasterAdamW,
    bytes_BT: Tensor,
    replicas: Group,
    ep: int,
    backward: Callable[[Tensor], None] = torch.autograd.backward,
) -> float:
    """Train on one batch of each rank; return the mean loss."""
    loss, balance = model(bytes_BT)
    optimizer.zero_grad()
    backward(loss + BALANCE_WEIGHT * balance)
    mean_loss = average_gradients(world, model, loss, replicas, ep)
    optimizer.step()
    return mean_loss


@torch.no_grad()
def held_out_loss(model: ByteLM, moes: list[MoE], passages_PT: Tensor, batch: int) -> float:
    """Loss in nats per byte, with capacity for every token, so that the loss of a passage does not
    depend on the rest of its batch. Every rank takes part."""
    for moe in moes:
        moe.room = moe.num_experts / CHOICES
        moe.factors = [moe.room] * moe.num_experts
    device = model.position.device
    losses = [model(part.long().to(device))[0] for part in passages_PT.split(batch)]
    return float(torch.stack(losses).mean())


@torch.no_grad()
def state_sha256(world: elastic.World, model: ByteLM, optimizer: MasterAdamW) -> str:
    """SHA-256 of all parameters and optimizer states, ordered by rank and then by name. Ranks with
    the same state count once, so that worlds of any size can be compared with ep 1."""
    digest = hashlib.sha256()
    for name, p in sorted(model.named_parameters()):
        for key, tensor in [("", p.detach()), *sorted(optimizer.state[p].items())]:
            digest.update(f"{name}:{key}".encode())
            digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    own = torch.tensor(list(digest.digest()), dtype=torch.uint8, device=model.position.device)
    digests = [torch.empty_like(own) for _ in range(world.size)]
    world.wait(dist.all_gather(digests, own, async_op=True))
    distinct = dict.fromkeys(bytes(each.tolist()).hex() for each in digests)
    return hashlib.sha256("".join(distinct).encode()).hexdigest()


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--dim", type=int, default=128, help=f"width of the model, a multiple of {HEAD_WIDTH}"
    )
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument(
        "--experts", type=int, default=16, help="experts of a layer, over all ranks"
    )
    parser.add_argument("--ep", type=int, help="most ranks that share the experts (default: all)")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank and step")
    parser.add_argument("--seq", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--stay", action="store_true", help="keep processes when other ranks are lost"
    )
    parser.add_argument(
        "--held-out", type=int, default=0, help="passages held out for a loss at the end"
    )
    parser.add_argument(
        "--step-seconds", type=float, default=0.0, help="the least a step lasts, to watch it"
    )
    parser.add_argument("--log-file", type=Path, help="append a JSON line for each step (rank 0)")
    parser.add_argument("--hash-file", type=Path, help="file for the hash of the final state")
    parser.add_argument("--hash-steps", action="store_true", help="log the hash of every state")
    return parser.parse_args(argv)


def report(args: argparse.Namespace, **line: Any) -> None:
    if args.log_file:
        with args.log_file.open("a") as log:
            log.write(json.dumps(line) + "\n")
    if line["step"] % 10 == 0:
        print(f"step {line['step']:5d}   loss {line['loss']:.4f} nats/byte", flush=True)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    backend = "nccl" if on_gpu else "gloo"
    world = elastic.init(backend, stay=args.stay, any_size=args.ep is not None)
    most = args.ep or world.size
    topology = holdfast.Topology(dp=most, ep=most).fitted(world.size, experts=args.experts)
    ep = topology.ep
    sharing = world.group(lambda size: [range(at, at + ep) for at in range(0, size, ep)])
    replicas = world.group(lambda size: [range(at, size, ep) for at in range(ep)])

    model, optimizer = build(args, world.rank, sharing, ep, device)
    data = Passages(args.seq + 1, args.held_out)
    sampler = holdfast.RecoverableSampler(
        data, rank=world.rank, replicas=world.size, seed=args.seed
    )
    loader = DataLoader(data, args.batch, sampler=sampler)

    session = holdfast.init(
        model=model,
        optimizer=optimizer,
        stateful={"sampler": sampler},
        topology=topology,
        world=world,
    )
    moes = [module for module in model.modules() if isinstance(module, MoE)]
    for step in session.steps(args.steps):
        with step:
            until = time.monotonic() + args.step_seconds
            if step.resumed:  # perhaps in a world of another size
                sampler.split(rank=world.rank, replicas=world.size)
                batches = itertools.chain.from_iterable(itertools.repeat(loader))
                restored = state_sha256(world, model, optimizer) if args.hash_steps else ""
            bytes_BT = next(batches)
            for layer, moe in enumerate(moes):
                moe.factors = session.capacity_factors(layer, args.experts)
                moe.room = session.capacity_room
            mean_loss = train_step(
                world, model, optimizer, bytes_BT.to(device), replicas, ep, session.backward
            )
            sampler.advance(len(bytes_BT))
            for layer, moe in enumerate(moes):
                session.count_tokens(layer, moe.routed_E, CHOICES * len(bytes_BT) * args.seq)
            line: dict[str, Any] = {"step": step, "loss": mean_loss, "time": time.time()}
            line |= {"epoch": session.epoch, "lost": session.counters.loss.lost}
            line["ranks"] = world.size
            line["boosted"] = sum(factor > 1 for moe in moes for factor in moe.factors)
            if args.held_out and step > 0.9 * args.steps and step % 5 == 0:
                line["held_out"] = held_out_loss(model, moes, data.held_out_PT, args.batch)
            if args.hash_steps:
                line |= {"restored": restored, "state": state_sha256(world, model, optimizer)}
            if world.rank == 0:
                report(args, **line)
            time.sleep(max(0.0, until - time.monotonic()))
    sha256 = state_sha256(world, model, optimizer)
    if world.rank == 0 and args.hash_file:
        args.hash_file.write_text(sha256 + "\n")
    session.close()
    world.close()


if __name__ == "__main__":
    main()
