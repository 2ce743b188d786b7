"""Trains the model of train_moe.py with uneven copies of its experts.

Popular experts have more copies, and every expert has at least two, on two nodes or more. The plan
is the one that `holdfast plan --experts` shows for `spec.elastic` of the job. No token is dropped.
Start it with `torchrun --nproc-per-node 2 examples/train_moe_elastic.py`, or protected on several
nodes with `holdfast run examples/moe-elastic-job.yaml`.

A step has `--batch` sequences whatever the number of ranks, so losses depend on that number only by
rounding (least with `--dtype float64`). A rank with fewer sequences has less weight. With fewer
ranks each has more of them: `--micro-batch` limits those of one pass, and a rank then adds up the
gradients of several.

With `--stay`, processes stay when nodes are lost or join (`minNodes`): experts move to other seats,
and training continues with the next step as long as every expert has a copy left. Each expert is
captured by one of the ranks that hold it.

`--save-loads` writes the number of tokens that each expert received, and `--loads` plans with these
numbers the next time.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from train_moe import (
    BALANCE_WEIGHT,
    BYTE_VALUES,
    CHOICES,
    Block,
    ByteLM,
    Linear,
    MasterAdamW,
    Passages,
    report,
    state_sha256,
)

import holdfast
from holdfast import elastic, moe

CLIP_NORM = 1.0


class ElasticLM(ByteLM):
    """The byte-level language model, with layers whose experts lie where the plan puts them."""

    def __init__(
        self, args: argparse.Namespace, plan: moe.ExpertPlan, group: elastic.WorldGroup
    ) -> None:
        nn.Module.__init__(self)
        self.embedding = nn.Embedding(BYTE_VALUES, args.dim)
        self.position = nn.Parameter(torch.randn(args.seq, args.dim) * 0.02)
        self.layers = nn.ModuleList(
            Block(
                args.dim,
                moe.MoELayer(
                    args.dim, 4 * args.dim, plan, layer, group, top_k=CHOICES, seed=args.seed
                ),
            )
            for layer in range(args.layers)
        )
        self.norm = nn.RMSNorm(args.dim)
        self.head = Linear(args.dim, BYTE_VALUES)


def make_plan(args: argparse.Namespace, world: elastic.World) -> moe.ExpertPlan:
    """The plan, which is the same on all ranks: the job's, unless --seats is given."""
    loads = [[1] * args.experts] * args.layers
    if args.loads:
        loads = json.loads(args.loads.read_text())
        if [len(layer) for layer in loads] != [args.experts] * args.layers:
            raise SystemExit(f"{args.loads}: not {args.layers} layers of {args.experts} experts")
    if not args.seats:
        return moe.plan_of_job(loads, world)
    nodes = world.size // world.nproc
    room = moe.ExpertRoom(nodes=nodes, nproc=world.nproc, rank_seats=args.seats)
    placement = moe.Placement(args.placement)
    return moe.plan_experts(loads, room, min_copies=args.min_copies, placement=placement)


def sum_over(world: elastic.World, value: Tensor) -> float:
    total = value.detach().clone()
    world.wait(dist.all_reduce(total, async_op=True))
    return float(total)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dim", type=int, default=128, help="width of the model, a multiple of 32")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--experts", type=int, default=16, help="experts of a layer")
    parser.add_argument(
        "--seats", type=int, help="copies on a rank, instead of the job's spec.elastic"
    )
    parser.add_argument(
        "--min-copies", type=int, default=2, help="with --seats: copies of each expert"
    )
    parser.add_argument(
        "--placement",
        choices=list(moe.Placement),
        default="Auto",
        help="with --seats: how copies are placed",
    )
    parser.add_argument("--loads", type=Path, help="JSON file with the tokens of each expert")
    parser.add_argument("--save-loads", type=Path, help="file for these tokens at the end (rank 0)")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step, over all ranks")
    parser.add_argument("--per-rank", action="store_true", help="--batch counts for each rank")
    parser.add_argument(
        "--micro-batch", type=int, help="sequences that fit one pass of a rank (default: all)"
    )
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32", "float64"],
        default="bfloat16" if torch.cuda.is_available() else "float32",
        help="default here: %(default)s (many CPUs are slow in bfloat16)",
    )
    parser.add_argument("--seq", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--stay", action="store_true", help="keep processes when other ranks are lost"
    )
    parser.add_argument("--log-file", type=Path, help="append a JSON line for each step (rank 0)")
    parser.add_argument("--hash-file", type=Path, help="file for the hash of the final state")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    world = elastic.init("nccl" if on_gpu else "gloo", stay=args.stay, any_size=args.stay)
    group = world.group(lambda size: [range(size)])
    plan = make_plan(args, world)
    if world.rank == 0:
        print(plan.reason, flush=True)

    torch.manual_seed(args.seed)  # the same weights everywhere; those of experts by their number
    model = ElasticLM(args, plan, group).to(device, getattr(torch, args.dtype))
    optimizer = MasterAdamW(model.parameters(), lr=1e-3)
    gradients = moe.SummedGradients(model, group)
    data = Passages(args.seq + 1)
    sampler = holdfast.ElasticSampler(
        data,
        args.batch,
        world,
        per_rank=args.per_rank,
        micro_batch=args.micro_batch,
        seed=args.seed,
    )
    loader = DataLoader(data, batch_sampler=sampler)

    stateful = {"sampler": sampler}
    session = holdfast.init(model=model, optimizer=optimizer, stateful=stateful, world=world)
    layers = [module for module in model.modules() if isinstance(module, moe.MoELayer)]
    loads = [[0] * args.experts for _ in layers]
    for step in session.steps(args.steps):
        with step:
            if step.resumed:
                moe.check_copies(model, optimizer, group)
                batches = iter(loader)
            batch, mean_loss = sampler.plan, torch.zeros((), device=device)
            optimizer.zero_grad()
            for part in batch.micro_batches:
                loss, balance = model(next(batches).to(device))
                loss = loss * part.summed_weight  # a part of all ranks' loss, as the balance is
                (loss + BALANCE_WEIGHT * balance / batch.passes).backward()
                mean_loss = mean_loss + loss.detach()
                for total, layer in zip(loads, layers, strict=True):
                    total[:] = map(sum, zip(total, layer.tokens_E, strict=True))
            gradients.sum()
            norm = gradients.clip(CLIP_NORM)
            optimizer.step()
            sampler.advance()
            line: dict[str, Any] = {"step": step, "loss": sum_over(world, mean_loss), "norm": norm}
            line |= {"time": time.time(), "epoch": session.epoch, "ranks": world.size}
            line |= {"least_nodes": layers[0].plan.least_nodes, "passes": batch.passes}
            if world.rank == 0:
                report(args, **line)
    moe.check_copies(model, optimizer, group)
    sha256 = state_sha256(world, model, optimizer)
    if world.rank == 0 and args.hash_file:
        args.hash_file.write_text(sha256 + "\n")
    if world.rank == 0 and args.save_loads:
        args.save_loads.write_text(json.dumps(loads) + "\n")
    session.close()
    world.close()


if __name__ == "__main__":
    main()
