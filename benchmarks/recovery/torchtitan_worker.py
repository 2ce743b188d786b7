"""torchtitan's trainer with the tiny model of its tests, for `benchmarks.recovery.stacks`.

    python torchtitan_worker.py torchtitan STEPS FOLDER [--restart]

Writes the same lines as `stacks_worker`. The folder of the local tests is on the path, and the
packages of torchtitan's environment are.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torchtitan_on_cpu
from torch.distributed.tensor import DTensor
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import ConfigManager, derive
from torchtitan.trainer import Trainer
from torchtitan_assets import make_assets

from holdfast.elastic import World
from holdfast.integrations.torchtitan import protect, start, train

PACE_S = 0.01


class Lines(MetricsProcessor):  # type: ignore[misc]  # the package is not type-checked
    """Appends a line for each step."""

    world: ClassVar[World | None] = None
    """The world of this process, if it stays."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]  # as above
        pass

    def __init__(self, config: Config, *, dump_folder: str, **others: Any) -> None:
        super().__init__(config, dump_folder=dump_folder, **others)
        self._path = Path(dump_folder) / os.environ["RANK"]

    def log(self, step: int, *others: Any, **more: Any) -> None:
        epoch = self.world.epoch if self.world is not None else 0
        with self._path.open("a") as file:
            file.write(f"{step} {epoch} {os.getpid()} {time.time()}\n")
        time.sleep(PACE_S)

    def close(self) -> None:
        digest = hashlib.sha256()
        for tensor in self._tensors():
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            digest.update(
                local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
        with self._path.open("a") as file:
            file.write(f"end {digest.hexdigest()}\n")
        super().close()

    def _tensors(self) -> Iterator[torch.Tensor]:
        for part in self.model_parts or ():
            yield from part.parameters()
        for optimizer in self.optimizers or ():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state = optimizer.state[parameter]
                    yield from (state[name] for name in sorted(state))


def tiny_moe() -> Trainer.Config:
    """The configuration that `--module torchtitan_worker --config tiny_moe` names."""
    config = torchtitan_on_cpu.tiny_moe()
    config.metrics = derive(config.metrics, Lines.Config)
    return config


def main() -> None:
    steps, folder = sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    assets = folder / f"assets-{os.environ['RANK']}"
    if not assets.exists():
        make_assets(assets)
    arguments = {
        "module": "torchtitan_worker",
        "config": "tiny_moe",
        "training.steps": steps,
        "hf_assets_path": str(assets / "tokenizer"),
        "dataloader.dataset_path": str(assets / "data"),
        "dump_folder": str(folder),
    }
    pairs = [each for name, value in arguments.items() for each in (f"--{name}", value)]
    config = ConfigManager().parse_args(pairs)
    if "--restart" in sys.argv:
        config.checkpoint = protect(config.checkpoint)
        trainer = config.build()
        trainer.train()
        trainer.close()
        return
    world = Lines.world = start(config)
    trainer = config.build()
    train(trainer, world)
    trainer.close()
    world.close()


if __name__ == "__main__":
    main()
