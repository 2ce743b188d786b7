"""A small trainer with experts and sparse windows, which fails where a file tells it to.

It runs with processes that stay (`--stay`) or start anew. Each rank appends a line for each step to
`log-<rank>`: digests of the weights that the step began with, of its gradients, and of the whole
state after it. Which of the first two are equal in all executions of a step, whoever was frozen.
Faults are as in `staying_trainer`, at the points `step-<n>` and `saved-<n>` of each step that is n
modulo `--period`: a test need not know which step comes next; and at `resumed` after the first step
that follows a restore.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from staying_trainer import Faults
from torch import nn

import holdfast

EXPERTS, WIDTH, TOKENS = 4, 16, 12
_EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "train_moe.py"
PACE_S = 0.03


class Layer(nn.Module):
    """A gate, and experts of which each token uses the best one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores = self.gate(self.norm(tokens)).softmax(-1)
        best = scores.argmax(-1)
        outputs = torch.stack([expert(tokens) for expert in self.experts], 1)
        chosen = outputs[torch.arange(len(tokens)), best]
        output: torch.Tensor = tokens + chosen * scores.gather(1, best[:, None])
        return nn.functional.dropout(output, 0.1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            tokens = layer(tokens)
        output: torch.Tensor = self.head(tokens)
        return output


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The example's AdamW on float32 masters."""
    spec = importlib.util.spec_from_file_location("train_moe", _EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    made: torch.optim.Optimizer = example.MasterAdamW(model.parameters(), lr=1e-2)
    return made


def digest(tensors: Iterable[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def digest_of_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    states = [s[key] for s in optimizer.state.values() for key in sorted(s)]
    return digest([*model.parameters(), *states])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--period", type=int, required=True)
    parser.add_argument("--stay", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    rank = int(os.environ["RANK"])
    faults = Faults(args.directory, rank)
    world = holdfast.elastic.init("gloo", stay=args.stay)
    model = Model().bfloat16()
    torch.manual_seed(10 + rank)  # for dropout, which the extras carry
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    session = holdfast.init(
        model=model,
        optimizer=optimizer,
        stateful={"scheduler": scheduler},
        settings=holdfast.Settings(go_on_live=False),
        world=world,
    )
    with (args.directory / f"log-{rank}").open("a", buffering=1) as log:
        for step in session.steps(args.steps):
            with step:
                line: dict[str, Any] = {"step": int(step), "pid": os.getpid()}
                line |= {"epoch": world.epoch, "resumed": step.resumed}
                line["weights"] = digest(model.parameters())
                time.sleep(PACE_S)
                seed = 1000 * int(step) + rank
                data = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))
                optimizer.zero_grad()
                model(data.bfloat16()).float().square().mean().backward()
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                for gradient in gradients:
                    whole = gradient.float()
                    dist.all_reduce(whole)
                    gradient.copy_(whole / world.size)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                line["gradients"] = digest([*gradients, norm])
                faults.at(f"step-{step % args.period}")
                optimizer.step()
                scheduler.step()
                line["state"] = digest_of_state(model, optimizer)
                log.write(json.dumps(line) + "\n")
            faults.at(f"saved-{step % args.period}")
            if step.resumed:
                faults.at("resumed")
    session.close()
    world.close()


if __name__ == "__main__":
    main()
