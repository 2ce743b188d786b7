"""Trains a small Qwen3-MoE in a plain loop with accelerate, protected by Holdfast.

Start it with `holdfast run examples/accelerate-job.yaml`, or without protection with `torchrun
--nproc-per-node 2 examples/train_accelerate.py`. All uses of Holdfast are in `train`. `world.ddp`
wraps the model instead of `prepare`, so when a rank is lost, the processes on the other nodes stay.
A run that was killed logs the same losses as an undisturbed run, and ends with the same bytes.

Shape suffixes: P passages, B passages of a batch, T bytes of a passage.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import holdfast

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
    attention_dropout=0.1,  # so that a run depends on its random generators
)
PASSAGE_BYTES, BATCH = 64, 4


def passages(count: int) -> TensorDataset:
    """The first `count` passages of a module of Python's library."""
    text = bytearray(Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes())
    passages_PT = torch.frombuffer(text, dtype=torch.uint8)[: count * PASSAGE_BYTES]
    return TensorDataset(passages_PT.view(-1, PASSAGE_BYTES).long())


def train(args: argparse.Namespace) -> None:
    world = holdfast.elastic.init("nccl" if torch.cuda.is_available() else "gloo")
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(1)
    model = world.ddp(Qwen3MoeForCausalLM(CONFIG).to(accelerator.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
    data = passages(args.passages)
    sampler = holdfast.RecoverableSampler(data, rank=world.rank, replicas=world.size, seed=1)
    loader = DataLoader(
        data,
        BATCH,
        sampler=sampler,
        generator=torch.Generator(),  # the global one would be drawn from at each recovery
    )
    session = holdfast.init(
        model=model,
        optimizer=optimizer,
        stateful={"scheduler": scheduler, "sampler": sampler},
        world=world,
    )
    steps, rates = accelerator.prepare(optimizer, scheduler)
    for step in session.steps(args.steps, seed=1):
        with step:
            if step.resumed:
                batches = itertools.chain.from_iterable(itertools.repeat(loader))
            passages_BT = next(batches)[0].to(accelerator.device)
            loss = model(input_ids=passages_BT, labels=passages_BT).loss
            accelerator.backward(loss)
            steps.step()
            rates.step()
            steps.zero_grad()
            sampler.advance(len(passages_BT))
            if args.log_file and accelerator.is_main_process:
                with args.log_file.open("a") as file:
                    file.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")
    session.close()
    if args.hash_file and accelerator.is_main_process:
        args.hash_file.write_text(state_sha256(model, optimizer) + "\n")
    world.close()


def state_sha256(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 of all parameters and optimizer states."""
    digest = hashlib.sha256()
    for name, p in model.named_parameters():
        for key, tensor in [("", p.detach()), *sorted(optimizer.state[p].items())]:
            digest.update(f"{name}:{key}".encode())
            digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--passages", type=int, default=96, help="number of passages (default %(default)s)"
    )
    parser.add_argument("--log-file", type=Path, help="file for a line of JSON for each step")
    parser.add_argument("--hash-file", type=Path, help="file for the hash of the final state")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    torch.set_num_threads(1)
    train(parse_args(argv))


if __name__ == "__main__":
    main()
