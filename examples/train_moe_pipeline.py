"""Trains a small Mixture-of-Experts model in pipeline stages, each of which may be lost.

The model is the one of `train_moe.py`, cut between its layers. The schedule of micro-batches is
written out, to show where tensors cross a boundary; `--schedule` chooses one of
`torch.distributed.pipelining` instead. With processes that stay, a stage whose ranks are all lost
repeats steps alone, with the tensors that its neighbours have logged. Snapshots are copied while a
stage waits for another one, which the pipeline marks; at its end, a protected run prints how long
each stage has waited, and how much was copied meanwhile. Start it with `torchrun --nproc-per-node 4
examples/train_moe_pipeline.py`, or protected with `holdfast run examples/moe-pipeline-job.yaml`.

Shape suffixes are those of `train_moe.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.utils.data import DataLoader
from train_moe import BALANCE_WEIGHT, BYTE_VALUES, Block, Linear, MasterAdamW, MoE, Passages

import holdfast
from holdfast import elastic

DIM, EXPERTS, CLIP, DROPOUT = 64, 4, 0.5, 0.1


SCHEDULES = {
    "GPipe": lambda rank, ranks: [rank],
    "1F1B": lambda rank, ranks: [rank],
    "Interleaved1F1B": lambda rank, ranks: [rank, ranks + rank],
    "InterleavedZeroBubble": lambda rank, ranks: [rank, ranks + rank],
    "ZBVZeroBubble": lambda rank, ranks: [rank, 2 * ranks - 1 - rank],
}
"""Schedules of torch, and the layers that each gives to a rank of a pipeline."""


class Stage(nn.Module):
    """One layer; the first stage also has the embedding, the last one the head."""

    def __init__(self, layer: int, layers: int, ranks: int, group: elastic.WorldGroup) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTE_VALUES, DIM) if layer == 0 else None
        block = Block(DIM, MoE(DIM, EXPERTS, ranks, group))
        self.layers = nn.ModuleDict({str(layer): block})  # numbered as in the whole model
        self.head = Linear(DIM, BYTE_VALUES) if layer == layers - 1 else None

    def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
        """The output for the next stage, or logits, and the load-balancing loss. The input is
        bytes, or the output of the previous stage."""
        x_BSD = given if self.embedding is None else self.embedding(given)
        [layer] = self.layers.values()
        x_BSD, balance = layer(F.dropout(x_BSD, DROPOUT))
        return x_BSD if self.head is None else self.head(x_BSD).float(), balance


def loss_of(logits_BSV: Tensor, next_BS: Tensor) -> Tensor:
    return F.cross_entropy(logits_BSV.flatten(0, 1), next_BS.flatten())


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
        out, balance = stage(part_BT[:, :-1] if x_BSD is None else x_BSD)
        if pipeline.is_last:
            out = loss_of(out, part_BT[:, 1:])
        else:
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


class AddBalance(torch.autograd.Function):
    """Adds the load-balancing loss to the loss that is computed from `out`: torch's stages know no
    loss but the last one's."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, balance: Tensor) -> Tensor:
        del ctx, balance
        return out.clone()  # zero-bubble schedules detach it in place, which a view refuses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        del ctx
        return grad, torch.tensor(BALANCE_WEIGHT)


class TorchStage(nn.Module):
    """A stage with one output."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, given: Tensor) -> Tensor:
        out: Tensor = AddBalance.apply(*self.stage(given))
        return out


def make_schedule(
    name: str, stages: list[Stage], layers: int, group: dist.ProcessGroup, shape_BT: torch.Size
) -> Callable[[Tensor], float]:
    """A schedule of torch for batches of this shape, with each sequence as a micro-batch. The
    returned function takes a batch, accumulates gradients and returns the loss, or 0 on ranks
    without the last layer."""
    kind: Any = get_schedule_class(name)
    tokens_BS = torch.zeros(1, shape_BT[1] - 1, dtype=torch.int64)
    x_BSD = torch.zeros(*tokens_BS.shape, DIM, dtype=torch.bfloat16, requires_grad=True)
    logits_BSV = torch.zeros(*tokens_BS.shape, BYTE_VALUES, requires_grad=True)
    parts = [
        PipelineStage(
            TorchStage(stage),
            int(next(iter(stage.layers))),
            layers,
            torch.device("cpu"),
            input_args=tokens_BS if stage.embedding is not None else x_BSD,
            output_args=logits_BSV if stage.head is not None else x_BSD,
            group=group,
        )
        for stage in stages
    ]
    several = issubclass(kind, PipelineScheduleMulti)
    schedule = kind(parts if several else parts[0], shape_BT[0], loss_fn=loss_of)

    def run(bytes_BT: Tensor) -> float:
        losses: list[Tensor] = []
        given = [bytes_BT[:, :-1]] if any(part.is_first for part in parts) else []
        target = bytes_BT[:, 1:] if any(part.is_last for part in parts) else None
        schedule.step(*given, target=target, losses=losses)
        return sum(float(loss.detach()) for loss in losses) / shape_BT[0]

    return run


@torch.no_grad()
def reduce_gradients(pipeline: elastic.Pipeline, stage: nn.Module, loss: float) -> float:
    """Average gradients over the stage's ranks and clip them by the norm of all stages; return the
    mean loss."""
    replicas, ep = pipeline.topology.dp, pipeline.topology.ep
    # With expert parallelism, gradients of all ranks' tokens have come to the one that has an
    # expert.
    gathered = [
        (p.grad, ep > 1 and ".experts." in name)
        for name, p in stage.named_parameters()
        if p.grad is not None
    ]
    own = [grad for grad, is_own in gathered if is_own]
    grads = [grad for grad, is_own in gathered if not is_own]
    flat = torch.cat([grad.float().view(-1) for grad in grads])
    pipeline.group.wait(dist.all_reduce(flat, group=pipeline.group.now, async_op=True))
    flat /= replicas
    # Each replica of a stage adds the same square, and the last stage's ranks their losses.
    squares = flat.square().sum()
    for grad in own:
        grad.div_(replicas)
        squares += replicas * grad.float().square().sum()
    sums = pipeline.add_up(torch.stack([squares, torch.tensor(loss)]))
    norm, mean_loss = (sums[0] / replicas).sqrt(), float(sums[1]) / replicas
    factor = (CLIP / (norm + 1e-6)).clamp(max=1.0)
    flat *= factor
    for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(mean.view_as(grad))
    for grad in own:
        grad.mul_(factor)
    return mean_loss


@torch.no_grad()
def state_sha256(stage: nn.Module, optimizer: MasterAdamW) -> str:
    """SHA-256 of this rank's parameters and optimizer states."""
    digest = hashlib.sha256()
    for name, p in sorted(stage.named_parameters()):
        for key, tensor in [("", p.detach()), *sorted(optimizer.state[p].items())]:
            digest.update(f"{name}:{key}".encode())
            digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def print_waits(pipeline: elastic.Pipeline, session: holdfast.Session) -> None:
    """Print what became of the waits of a protected stage: of its first rank's, for all."""
    waited_s, copied = session.counters.bubble_s, session.counters.bubble_bytes
    if waited_s and pipeline.topology.coordinates(pipeline.world.rank).dp == 0:
        print(
            f"stage {pipeline.stage} waited {waited_s:.2f} s for other stages; snapshots copied "
            f"{copied / 2**20:.1f} MiB meanwhile",
            flush=True,
        )


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument(
        "--schedule", choices=[*SCHEDULES], help="a schedule of torch.distributed.pipelining"
    )
    parser.add_argument(
        "--expert-parallel",
        action="store_true",
        help="share the experts of a stage out among its ranks, so that each has its own",
    )
    parser.add_argument("--seq", type=int, default=32, help="bytes per sequence")
    parser.add_argument(
        "--seed",
        type=int,
        help="seed the dropout of each step, so that a rank which gets its state from a replica "
        "draws the same numbers as the rank before it",
    )
    parser.add_argument(
        "--log-mib", type=float, default=64, help="MiB that the log of a rank may take"
    )
    parser.add_argument(
        "--log-received",
        action="store_true",
        help="log what a rank receives as well, so that its neighbours get their logs back after "
        "they are replaced",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        help="directory for the logs: a line of JSON for each step and rank",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    world = elastic.init("gloo")
    replicas = world.size // args.stages
    ep = replicas if args.expert_parallel else 1
    topology = holdfast.Topology(dp=replicas, ep=ep, pp=args.stages)
    log_bytes = int(args.log_mib * 2**20)
    pipeline = elastic.Pipeline(
        world, topology, log_bytes=log_bytes, log_received=args.log_received
    )
    alone = world.group([[rank] for rank in range(world.size)])
    dispatch = alone if ep == 1 else pipeline.group

    group = pipeline.torch_group() if args.schedule else None

    held = SCHEDULES[args.schedule](pipeline.stage, args.stages) if group else [pipeline.stage]
    layers = args.stages * len(held)
    torch.manual_seed(pipeline.stage)
    stages = [Stage(layer, layers, ep, dispatch) for layer in held]
    # Names number layers as in the whole model, and nothing else.
    model = nn.ModuleDict({f"layer{layer}": each for layer, each in zip(held, stages, strict=True)})
    if ep > 1:
        torch.manual_seed(world.size + world.rank)
    for name, p in model.named_parameters():
        if ".experts." in name:
            nn.init.normal_(p, std=p.shape[1] ** -0.5)
    model.to(torch.bfloat16)
    optimizer = MasterAdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(world.rank)  # dropout
    data = Passages(args.seq + 1)
    replica = topology.coordinates(world.rank).dp
    sampler = holdfast.RecoverableSampler(data, rank=replica, replicas=topology.dp)
    # Its own generator: an iterator that is made anew would draw a number from that of dropout.
    loader = DataLoader(data, args.microbatches, sampler=sampler, generator=torch.Generator())
    session = holdfast.init(
        model=model,
        optimizer=optimizer,
        stateful={"sampler": sampler},
        topology=topology,
        world=world,
        pipeline=pipeline,
    )
    for step in session.steps(args.steps, seed=args.seed):
        with step:
            if step.resumed:
                batches = itertools.chain.from_iterable(itertools.repeat(loader))
            bytes_BT = next(batches)
            optimizer.zero_grad()
            if group is None:
                loss = run_microbatches(pipeline, stages[0], bytes_BT, args.microbatches)
            else:
                if step.resumed:
                    run = make_schedule(args.schedule, stages, layers, group.now, bytes_BT.shape)
                loss = run(bytes_BT)
            mean_loss = reduce_gradients(pipeline, model, loss)
            optimizer.step()
            sampler.advance(len(bytes_BT))
            if args.directory:
                line: dict[str, Any] = {"step": step, "loss": mean_loss, "epoch": session.epoch}
                line |= {"time": time.time(), "pid": os.getpid(), "logged": pipeline.log.nbytes}
                line["state"] = state_sha256(model, optimizer)
                with (args.directory / f"log-{world.rank}").open("a") as log:
                    log.write(json.dumps(line) + "\n")
            if world.rank == 0 and step % 10 == 0:
                print(f"step {step:5d}   loss {mean_loss:.4f} nats/byte", flush=True)
    session.close()
    print_waits(pipeline, session)
    world.close()


if __name__ == "__main__":
    main()
