"""Trains a small Mixture-of-Experts model with Lightning, protected by Holdfast.

Start it with `holdfast run examples/lightning-job.yaml`, or without protection with `torchrun
--nproc-per-node 2 examples/train_lightning.py`. Holdfast needs only what `main` and `fit` do with
the callback. A run that was killed and restored logs the same losses as an undisturbed run, and
ends with the same bytes. When a rank is lost, the processes on the other nodes stay.

Shape suffixes: N bytes, D model width, E experts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast.integrations.lightning import HoldfastCallback

EXPERTS, WIDTH, BATCH = 4, 32, 64


class Experts(nn.Module):
    """The experts of the layer, stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * WIDTH**-0.5)
        self.w_out = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * WIDTH**-0.5)

    def forward(self, x_ND: Tensor, weights_NE: Tensor) -> Tensor:
        hidden = F.gelu(torch.einsum("nd,edh->neh", x_ND, self.w_in))
        return torch.einsum("neh,ehd,ne->nd", hidden, self.w_out, weights_NE)


class NextByte(LightningModule):  # type: ignore[misc]  # the package is not type-checked
    """Predicts each next byte of a text from the previous one."""

    def __init__(self, log_file: Path | None = None, count: int | None = None) -> None:
        """Train on the first `count` bytes of a module of Python's library."""
        super().__init__()
        self.log_file, self.count = log_file, count
        self.embedding, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        bytes_N, next_N = batch
        x_ND = F.dropout(self.embedding(bytes_N), 0.1)
        x_ND = x_ND + self.experts(x_ND, self.gate(x_ND).softmax(-1))
        loss = F.cross_entropy(self.head(x_ND), next_N)
        if self.log_file and self.global_rank == 0:
            with self.log_file.open("a") as file:
                line = {"step": self.global_step + 1, "loss": loss.item()}
                file.write(json.dumps(line) + "\n")
        return loss

    def train_dataloader(self) -> StatefulDataLoader[Any]:
        text = bytearray(Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes())
        bytes_N = torch.frombuffer(text, dtype=torch.uint8)[: self.count].long()
        data = TensorDataset(bytes_N[:-1], bytes_N[1:])
        ranks, rank = self.trainer.world_size, self.trainer.global_rank
        sampler = DistributedSampler[Any](data, ranks, rank, seed=1)
        # The restored epoch: the loader goes on in its order before Lightning sets it.
        sampler.set_epoch(self.trainer.fit_loop.epoch_progress.current.processed)
        return StatefulDataLoader(data, BATCH, sampler=sampler, generator=torch.Generator())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def make_trainer(args: argparse.Namespace, protection: HoldfastCallback) -> Trainer:
    """A trainer over the ranks that torchrun started."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        num_nodes=ranks // on_node,
        devices=on_node,
        strategy="ddp" if ranks > 1 else "auto",
        max_steps=args.steps,
        max_epochs=-1,
        callbacks=[protection],
        use_distributed_sampler=False,  # the loader has one
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def state_sha256(trainer: Trainer) -> str:
    """SHA-256 of all parameters and optimizer states."""
    digest, (optimizer,) = hashlib.sha256(), trainer.optimizers
    for name, p in trainer.lightning_module.named_parameters():
        for key, tensor in [("", p.detach()), *sorted(optimizer.state[p].items())]:
            digest.update(f"{name}:{key}".encode())
            digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--bytes", type=int, help="number of bytes of data (default: all)")
    parser.add_argument("--log-file", type=Path, help="file for a line of JSON for each step")
    parser.add_argument("--hash-file", type=Path, help="file for the hash of the final state")
    return parser.parse_args(argv)


def fit(args: argparse.Namespace, trainer: Trainer, protection: HoldfastCallback) -> None:
    """Train to the end."""
    seed_everything(1, verbose=False)
    protection.fit(trainer, NextByte(args.log_file, args.bytes))


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    torch.set_num_threads(1)
    world = holdfast.elastic.init("nccl" if torch.cuda.is_available() else "gloo")
    protection = HoldfastCallback(world=world)
    trainer = make_trainer(args, protection)
    fit(args, trainer, protection)
    world.close()
    if args.hash_file and trainer.is_global_zero:
        args.hash_file.write_text(state_sha256(trainer) + "\n")


if __name__ == "__main__":
    main()
