"""Trains a small transformer that FSDP2 shards over the ranks, in a loop of its own, protected by
Holdfast.

Start it with `holdfast run examples/fsdp2-job.yaml`, or without protection with `torchrun
--nproc-per-node 2 examples/train_fsdp2.py`. All uses of Holdfast are in `train`. When a rank is
lost, the others keep their processes, their shards and their place in the loop. A run in which a
rank was killed logs the same losses as an undisturbed run, and ends with the same bytes.

Shape suffixes: B sequences of a batch, T tokens of a sequence, D features, V tokens that exist.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import holdfast

VOCABULARY, FEATURES, BATCH, LENGTH = 128, 32, 4, 16


class Model(nn.Module):
    """A transformer of two layers that predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, FEATURES)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(FEATURES, 4, 4 * FEATURES, dropout=0.1, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(FEATURES, VOCABULARY, bias=False)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        hidden_BTD = self.embedding(tokens_BT)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens_BT.shape[1])
        for layer in self.layers:
            hidden_BTD = layer(hidden_BTD, src_mask=mask)
        logits_BTV: torch.Tensor = self.head(hidden_BTD)
        return logits_BTV


def make_batch(step: int, rank: int) -> torch.Tensor:
    """The sequences [B, T + 1] of a rank in a step, which count upwards from random tokens."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    first_B = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    return (first_B + torch.arange(LENGTH + 1)) % VOCABULARY


def train(args: argparse.Namespace) -> None:
    world = holdfast.elastic.init("gloo")
    # Between here and `session.steps`, no collective: a process that joins later runs this alone.
    # Building on each rank from the seed and making meshes are none.
    torch.manual_seed(1)
    model = Model()
    mesh = init_device_mesh("cpu", (world.size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    session = holdfast.init(model=model, optimizer=optimizer, world=world)
    for step in session.steps(args.steps, seed=1):
        with step:
            tokens = make_batch(int(step), world.rank)
            logits_BTV = model(tokens[:, :-1])
            loss = cross_entropy(logits_BTV.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if args.log_file and world.rank == 0:
                with args.log_file.open("a") as file:
                    file.write(json.dumps({"step": int(step), "loss": loss.item()}) + "\n")
    digest = state_sha256(model, optimizer)
    if args.hash_file and world.rank == 0:
        args.hash_file.write_text(digest + "\n")
    session.close()
    world.close()


def state_sha256(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 of all parameters and optimizer states, whole. All ranks call it."""
    digest = hashlib.sha256()
    for name, p in model.named_parameters():
        states: list[tuple[str, Any]] = [("", p.detach()), *sorted(optimizer.state[p].items())]
        for key, tensor in states:
            whole: torch.Tensor = getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)()
            digest.update(f"{name}:{key}".encode())
            digest.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--log-file", type=Path, help="file for a line of JSON for each step")
    parser.add_argument("--hash-file", type=Path, help="file for the hash of the final state")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    torch.set_num_threads(1)
    train(parse_args(argv))


if __name__ == "__main__":
    main()
