"""Trains a small Qwen3-MoE in a plain loop with accelerate, protected by Holdfast.

Start it with `holdfast run examples/accelerate-job.yaml`, or without protection with `torchrun
--nproc-per-node 2 examples/train_accelerate.py`. All uses of Holdfast are in `train`. The data
comes from a `StatefulDataLoader` with workers, which is not given to `prepare`: the session keeps
its position. A run that was killed and restored logs the same losses as an undisturbed run, and
ends with the same bytes.

Shape suffixes: P passages, B passages of a batch, T bytes of a passage.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
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
PASSAGE_BYTES = 64


class Passages:
    """Endless passages of a module of Python's library, in another order in each epoch."""

    def __init__(self, count: int, accelerator: Accelerator) -> None:
        text = bytearray(Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes())
        passages_PT = torch.frombuffer(text, dtype=torch.uint8)[: count * PASSAGE_BYTES]
        data = TensorDataset(passages_PT.view(-1, PASSAGE_BYTES).long())
        ranks, rank = accelerator.num_processes, accelerator.process_index
        self.sampler = StatefulDistributedSampler(data, ranks, rank, seed=1)
        self.loader = StatefulDataLoader[Any](
            data,
            batch_size=4,
            sampler=self.sampler,
            num_workers=2,
            generator=torch.Generator(),  # the global one would be drawn from at each restart
        )
        self.epoch = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.sampler.set_epoch(self.epoch)
            for (passages_BT,) in self.loader:
                yield passages_BT
            self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "loader": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]
        self.loader.load_state_dict(state["loader"])


def train(args: argparse.Namespace) -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(1)
    model = Qwen3MoeForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
    data = Passages(args.passages, accelerator)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    session = holdfast.init(
        model=model,
        optimizer=optimizer.optimizer,  # torch's own, below accelerate's
        stateful={"scheduler": scheduler, "data": data},
        topology=holdfast.Topology(dp=accelerator.num_processes),
    )
    start = session.restore() or 0
    batches = iter(data)  # after the restore, which brought the position back
    for step in range(start + 1, args.steps + 1):
        passages_BT = next(batches).to(accelerator.device)
        loss = model(input_ids=passages_BT, labels=passages_BT).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        session.save(step)
        if args.log_file and accelerator.is_main_process:
            with args.log_file.open("a") as file:
                file.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")
    session.close()
    if args.hash_file and accelerator.is_main_process:
        args.hash_file.write_text(state_sha256(model, optimizer.optimizer) + "\n")


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
