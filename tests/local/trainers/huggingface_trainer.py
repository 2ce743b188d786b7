"""A small Qwen3 MoE of Hugging Face in a loop of its own, in a process that stays. With
`--accelerate`, the loop is one for accelerate, and DDP reduces the gradients.

Rank 0 appends the loss of each step to `--log-file`; each rank appends its process id to `pids` in
the same folder.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader, default_collate
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, set_seed

import holdfast

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))
from train_huggingface import Passages  # noqa: E402

CONFIG = Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    output_router_logits=True,
    attention_dropout=0.1,  # so that a run depends on its random generators
)
BATCH = 4


class PassagesTask:
    """The task of `changing_trainer --transformers`."""

    def __init__(self) -> None:
        self._data = Passages()

    def make_model(self) -> torch.nn.Module:
        set_seed(1)  # Python's generators and numpy's too: new ranks take those that all have
        made: torch.nn.Module = Qwen3MoeForCausalLM(CONFIG).train()
        return made

    def loss(self, model: torch.nn.Module, indices: list[int]) -> torch.Tensor:
        batch = default_collate([self._data[index % len(self._data)] for index in indices])
        found: torch.Tensor = model(**batch).loss
        return found


def state_sha256(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 of all parameters and optimizer states."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for tensor in (parameter.detach(), *(state[name] for name in sorted(state))):
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def average_gradients(model: torch.nn.Module, world: holdfast.elastic.World) -> None:
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        world.wait(dist.all_reduce(parameter.grad, async_op=True))
        parameter.grad /= world.size


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--log-file", type=Path, required=True)
    parser.add_argument("--hash-file", type=Path, required=True)
    parser.add_argument("--accelerate", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    world = holdfast.elastic.init("gloo")
    torch.manual_seed(1)
    model = Qwen3MoeForCausalLM(CONFIG).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=args.steps)
    ddp: torch.nn.Module | None = None
    if args.accelerate:
        accelerator = Accelerator(cpu=True)
        ddp = world.ddp(model)
    data = Passages()
    sampler = holdfast.RecoverableSampler(data, rank=world.rank, replicas=world.size)
    own = torch.Generator()  # each new iterator draws a number
    loader = DataLoader(data, BATCH, sampler=sampler, drop_last=True, generator=own)
    session = holdfast.init(
        model=ddp or model,
        optimizer=optimizer,
        stateful={"sampler": sampler, "schedule": schedule},
        world=world,
    )
    if args.accelerate:
        steps, rates = accelerator.prepare(optimizer, schedule)
    else:
        steps, rates = optimizer, schedule
    with (args.log_file.parent / "pids").open("a") as pids:
        pids.write(f"{world.rank} {os.getpid()}\n")
    with args.log_file.open("a", buffering=1) as log:
        for step in session.steps(args.steps):
            with step:
                if step.resumed:
                    batches = itertools.chain.from_iterable(itertools.repeat(loader))
                steps.zero_grad()
                if ddp is not None:
                    loss = ddp(**next(batches)).loss
                    accelerator.backward(loss)
                else:
                    loss = model(**next(batches)).loss
                    loss.backward()
                    average_gradients(model, world)
                steps.step()
                rates.step()
                sampler.advance(BATCH)
                if world.rank == 0:
                    log.write(json.dumps({"step": int(step), "loss": loss.item()}) + "\n")
    if world.rank == 0:
        args.hash_file.write_text(state_sha256(model, optimizer))
    session.close()
    world.close()


if __name__ == "__main__":
    main()
