"""`python -m holdfast.integrations.torchtitan_train` on CPU, with the tiny model of
`torchtitan_trainer`, and faults where a file tells it to."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchtitan_trainer
from staying_trainer import Faults
from torchtitan.config import derive
from torchtitan.distributed import utils as dist_utils
from torchtitan.trainer import Trainer

from holdfast.integrations.torchtitan_train import main

PACE_S = 0.02
"""Part of each step in which a rank computes nothing: ranks outnumber cores."""


class FaultyTrainer(Trainer):  # type: ignore[misc]  # the package is not type-checked
    """Comes to points in each step."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]  # as above
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.faults = faults = Faults(Path(config.dump_folder), int(os.environ["RANK"]))
        for layer in self.model_parts[0].layers.values():
            layer.register_forward_hook(self._at_forward)
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(lambda *_: faults.at("before-optimizer"))
            optimizer.register_step_post_hook(lambda *_: faults.at("in-optimizer"))
        # The first collective after the backward pass.
        faults.before(dist_utils, "clip_grad_norm_", "before-norm", "after-norm")

    def _at_forward(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.faults.at("forward")
        if output.requires_grad:
            output.register_hook(lambda gradient: self.faults.at("backward"))

    def train_step(self, *arguments: Any) -> None:
        super().train_step(*arguments)
        time.sleep(PACE_S)
        self.faults.at("step-end")


def tiny_moe() -> Trainer.Config:
    """The configuration that `--module staying_torchtitan_trainer --config tiny_moe` names."""
    return derive(torchtitan_trainer.tiny_moe(), FaultyTrainer.Config)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
