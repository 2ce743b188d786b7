"""A Qwen3-MoE of transformers under DDP in processes that stay; no line of it counts tokens.

Each rank appends lines to `log-<rank>`, as `staying_moe_trainer` does, with the tokens that it sent
to each expert in the step, noted one by one. Faults are as in `staying_trainer`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from staying_moe_trainer import versions
from staying_trainer import PACE_S, Faults
from trained_policies import CHOICES, CONFIG, EXPERTS, LENGTH, WORDS
from transformers import Qwen3MoeForCausalLM

import holdfast

BATCH, LAYERS = 2, CONFIG.num_hidden_layers


class Noted:
    """The tokens of each expert, layer by layer, in one step."""

    def __init__(self, model: Any, faults: Faults) -> None:
        self.tokens = [0] * (LAYERS * EXPERTS)
        self._faults = faults
        for layer, block in enumerate(model.model.layers):
            block.mlp.gate.register_forward_hook(partial(self._note, layer))

    def _note(self, layer: int, router: Any, inputs: Any, output: Any) -> None:
        for row in output[0]:
            for expert in row.argsort(descending=True)[:CHOICES].tolist():
                self.tokens[layer * EXPERTS + expert] += 1
        if layer:
            self._faults.at("forward")


def digests(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Digests of the state: of the experts of each layer in turn, and of the rest."""
    dense, experts = hashlib.sha256(), [hashlib.sha256() for _ in range(LAYERS * EXPERTS)]
    for name, parameter in model.named_parameters():
        for _, tensor in [("", parameter.detach()), *sorted(optimizer.state[parameter].items())]:
            if ".experts." not in name or not tensor.ndim:
                dense.update(tensor.numpy().tobytes())
                continue
            at = int(name.split(".")[2]) * EXPERTS
            for expert, rows in enumerate(tensor):
                experts[at + expert].update(rows.numpy().tobytes())
    return {
        "dense": dense.hexdigest()[:12],
        "experts": [each.hexdigest()[:12] for each in experts],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    faults = Faults(args.directory, rank)
    world = holdfast.elastic.init("gloo")
    torch.manual_seed(1)
    base: Any = Qwen3MoeForCausalLM(CONFIG)
    noted = Noted(base, faults)
    model = world.ddp(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = holdfast.init(model=model, optimizer=optimizer, world=world)
    with (args.directory / f"log-{rank}").open("a", buffering=1) as log:
        for step in session.steps(10**6, seed=1):
            with step:
                line: dict[str, Any] = {"step": int(step), "epoch": world.epoch}
                line.update(pid=os.getpid(), size=world.size)
                if step.resumed and step > 1:
                    line["found"] = {**digests(base, optimizer), "versions": versions(session)}
                if (loss := session.counters.loss) is not None and loss.report is not None:
                    line.update(lost=loss.report.lost, routed=loss.report.routed)
                time.sleep(PACE_S)
                noted.tokens = [0] * (LAYERS * EXPERTS)
                draw = torch.Generator().manual_seed(int(step) * world.size + world.rank)
                words = torch.randint(0, WORDS, (BATCH, LENGTH), generator=draw)
                model(input_ids=words, labels=words).loss.backward()
                faults.at("before-optimizer")
                optimizer.step()
                optimizer.zero_grad()
                line.update(digests(base, optimizer), tokens=noted.tokens)
                log.write(json.dumps(line) + "\n")
            faults.at("after-save")


if __name__ == "__main__":
    main()
