"""Trains a small Mixture-of-Experts model in pipeline stages, each of which can be lost.

The model is that of `train_moe.py`, cut between its layers; the schedule of micro-batches is
written out, so that one sees where tensors cross a boundary. With processes that stay, a stage
whose ranks are all lost repeats steps alone, with what its neighbours have logged. Start it with
`torchrun --nproc-per-node 4 examples/train_moe_pipeline.py`, or protected with `holdfast run
examples/moe-pipeline-job.yaml`.

Shape suffixes as in `train_moe.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from train_moe import BALANCE_WEIGHT, BYTE_VALUES, Block, Linear, MasterAdamW, MoE, Passages

import holdfast
from holdfast import elastic

DIM, EXPERTS, CLIP, DROPOUT = 64, 4, 0.5, 0.1


class Stage(nn.Module):
    """One layer, with the embedding before the first one and the head behind the last one."""

    def __init__(self, pipeline: elastic.Pipeline, alone: elastic.WorldGroup) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTE_VALUES, DIM) if pipeline.is_first else None
        block = Block(DIM, MoE(DIM, EXPERTS, 1, alone))
        self.layers = nn.ModuleDict({str(pipeline.stage): block})  # numbered as in the whole model
        self.head = Linear(DIM, BYTE_VALUES) if pipeline.is_last else None

    def forward(self, bytes_BT: Tensor, x_BSD: Tensor | None) -> tuple[Tensor, Tensor]:
        """What goes to the next stage, or the cross entropy; and the load-balancing loss."""
        if self.embedding is not None:
            x_BSD = self.embedding(bytes_BT[:, :-1])
        assert x_BSD is not None
        [layer] = self.layers.values()
        x_BSD, balance = layer(F.dropout(x_BSD, DROPOUT))
        if self.head is None:
            return x_BSD, balance
        logits_BSV = self.head(x_BSD).float()
        return F.cross_entropy(logits_BSV.flatten(0, 1), bytes_BT[:, 1:].flatten()), balance


def run_microbatches(
    pipeline: elastic.Pipeline, stage: Stage, bytes_BT: Tensor, microbatches: int
) -> float:
    """Accumulate the gradients of a batch, all forward passes first; return the last stage's loss,
    0 on the others."""
    forwards: list[tuple[Tensor | None, Tensor, Tensor]] = []
    for number, part_BT in enumerate(bytes_BT.chunk(microbatches)):
        x_BSD: Tensor | None = None
        if not pipeline.is_first:
            (B, T), dtype = part_BT.shape, torch.bfloat16
            x_BSD = torch.empty(B, T - 1, DIM, dtype=dtype, device=bytes_BT.device)
            pipeline.receive_activation(number, x_BSD)
            x_BSD.requires_grad_()
        out, balance = stage(part_BT, x_BSD)
        if not pipeline.is_last:
            pipeline.send_activation(number, out)
        forwards.append((x_BSD, out, balance))
    total = 0.0
    for number, (x_BSD, out, balance) in enumerate(forwards):
        extra = BALANCE_WEIGHT * balance / microbatches
        if pipeline.is_last:
            (out / microbatches + extra).backward()
            total += float(out.detach()) / microbatches
        else:
            grad = pipeline.receive_gradient(number, torch.empty_like(out))
            torch.autograd.backward([out, extra], [grad, torch.ones_like(extra)])
        if x_BSD is not None:
            assert x_BSD.grad is not None
            pipeline.send_gradient(number, x_BSD.grad)
    return total


@torch.no_grad()
def reduce_gradients(pipeline: elastic.Pipeline, stage: Stage, loss: float) -> float:
    """Average gradients over the stage's ranks and clip them by the norm of all stages; return the
    mean loss."""
    grads = [p.grad for p in stage.parameters() if p.grad is not None]
    replicas = pipeline.topology.dp
    flat = torch.cat([grad.float().view(-1) for grad in grads])
    pipeline.group.wait(dist.all_reduce(flat, group=pipeline.group.now, async_op=True))
    flat /= replicas
    # Each replica of a stage adds the same square, and the last stage's ranks their losses.
    sums = pipeline.add_up(torch.stack([flat.square().sum(), torch.tensor(loss)]))
    norm, mean_loss = (sums[0] / replicas).sqrt(), float(sums[1]) / replicas
    flat *= (CLIP / (norm + 1e-6)).clamp(max=1.0)
    for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(mean.view_as(grad))
    return mean_loss


@torch.no_grad()
def state_sha256(stage: Stage, optimizer: MasterAdamW) -> str:
    """SHA-256 of this rank's parameters and optimizer states."""
    digest = hashlib.sha256()
    for name, p in sorted(stage.named_parameters()):
        for key, tensor in [("", p.detach()), *sorted(optimizer.state[p].items())]:
            digest.update(f"{name}:{key}".encode())
            digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--seq", type=int, default=32, help="bytes per sequence")
    parser.add_argument("--log-mib", type=float, default=64, help="bound of each rank's log")
    parser.add_argument(
        "--directory", type=Path, help="receives a JSON line for each step, by rank"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    world = elastic.init("gloo")
    topology = holdfast.Topology(dp=world.size // args.stages, pp=args.stages)
    pipeline = elastic.Pipeline(world, topology, log_bytes=int(args.log_mib * 2**20))
    alone = world.group([[rank] for rank in range(world.size)])

    torch.manual_seed(pipeline.stage)
    stage = Stage(pipeline, alone)
    for name, p in stage.named_parameters():
        if ".experts." in name:
            nn.init.normal_(p, std=p.shape[1] ** -0.5)
    stage.to(torch.bfloat16)
    optimizer = MasterAdamW(stage.parameters(), lr=1e-3)
    torch.manual_seed(world.rank)  # dropout
    data = Passages(args.seq + 1)
    replica = topology.coordinates(world.rank).dp
    sampler = holdfast.RecoverableSampler(data, rank=replica, replicas=topology.dp)
    # Its own generator: an iterator that is made anew would draw a number from that of dropout.
    loader = DataLoader(data, args.microbatches, sampler=sampler, generator=torch.Generator())
    session = holdfast.init(
        model=stage,
        optimizer=optimizer,
        stateful={"sampler": sampler},
        topology=topology,
        world=world,
        pipeline=pipeline,
    )
    for step in session.steps(args.steps):
        with step:
            if step.resumed:
                batches = itertools.chain.from_iterable(itertools.repeat(loader))
            bytes_BT = next(batches)
            optimizer.zero_grad()
            loss = run_microbatches(pipeline, stage, bytes_BT, args.microbatches)
            mean_loss = reduce_gradients(pipeline, stage, loss)
            optimizer.step()
            sampler.advance(len(bytes_BT))
            if args.directory:
                line: dict[str, Any] = {"step": step, "loss": mean_loss, "epoch": session.epoch}
                line |= {"time": time.time(), "pid": os.getpid(), "logged": pipeline.log.nbytes}
                line["state"] = state_sha256(stage, optimizer)
                with (args.directory / f"log-{world.rank}").open("a") as log:
                    log.write(json.dumps(line) + "\n")
            if world.rank == 0 and step % 10 == 0:
                print(f"step {step:5d}   loss {mean_loss:.4f} nats/byte", flush=True)
    session.close()
    world.close()


if __name__ == "__main__":
    main()
