"""torchtitan's trainer with the tiny model of its tests, for `benchmarks.recovery.stacks`.

    python torchtitan_worker.py torchtitan STEPS FOLDER [--restart]

The folder of the local tests is on the path, and the packages of torchtitan's environment are.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torchtitan_on_cpu
from torch.distributed.tensor import DTensor
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import derive
from torchtitan_assets import make_assets

from benchmarks.recovery.stacks_model import StepLog
from holdfast.elastic import World
from holdfast.integrations.torchtitan import protect, start, train


class Lines(MetricsProcessor):  # type: ignore[misc]  # the package is not type-checked
    """Logs each step."""

    steps: ClassVar[StepLog]
    world: ClassVar[World | None] = None
    """The world of this process, if it stays."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]  # as above
        pass

    def log(self, step: int, *others: Any, **more: Any) -> None:
        self.steps.completed(step, self.world.epoch if self.world is not None else 0)

    def close(self) -> None:
        digest = hashlib.sha256()
        for tensor in self._tensors():
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            digest.update(
                local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
        self.steps.end(digest.hexdigest())
        super().close()

    def _tensors(self) -> Iterator[torch.Tensor]:
        for part in self.model_parts or ():
            yield from part.parameters()
        for optimizer in self.optimizers or ():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state = optimizer.state[parameter]
                    yield from (state[name] for name in sorted(state))


def main() -> None:
    steps, folder, rank = int(sys.argv[2]), Path(sys.argv[3]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    assets = folder / f"assets-{rank}"
    if not assets.exists():
        make_assets(assets)
    # Not by torchtitan's command line, which would import this module a second time.
    config = torchtitan_on_cpu.tiny_moe()
    config.training.steps = steps
    config.hf_assets_path = str(assets / "tokenizer")
    config.dataloader.dataset_path = str(assets / "data")
    config.dump_folder = str(folder)
    config.metrics = derive(config.metrics, Lines.Config)
    Lines.steps = StepLog(folder, rank)
    if "--restart" in sys.argv:
        config.checkpoint = protect(config.checkpoint)
        trainer = config.build()
        trainer.train()
    else:
        Lines.world = start(config)
        trainer = config.build()
        train(trainer, Lines.world)
    trainer.close()
    if Lines.world is not None:
        Lines.world.close()


if __name__ == "__main__":
    main()
