"""The examples of Hugging Face and Lightning, for `benchmarks.recovery.stacks`.

    python frameworks_worker.py FRAMEWORK STEPS FOLDER [--restart]

The folder of the examples is on the path.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import holdfast
from benchmarks.recovery.stacks_model import StepLog
from holdfast.elastic import World

PASSAGES = 256
TEXT_BYTES = 1 << 14


def main() -> None:
    framework, steps, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    world = holdfast.elastic.init("gloo", stay="--restart" not in sys.argv)
    log = StepLog(folder, int(os.environ["RANK"]))
    train = {"huggingface": train_huggingface, "lightning": train_lightning}[framework]
    log.end(train(world, steps, lambda step: log.completed(step, world.epoch)))
    world.close()


def train_huggingface(world: World, steps: int, on_step: Callable[[int], None]) -> str:
    """Train with Hugging Face's Trainer, and return the hash of the final state."""
    # Imported here, as in `train_lightning`, because a new process shall import one framework only.
    from train_huggingface import make_trainer, state_sha256  # noqa: PLC0415
    from transformers import TrainerCallback  # noqa: PLC0415

    from holdfast.integrations.huggingface import HoldfastTrainerCallback  # noqa: PLC0415

    class Steps(TrainerCallback):  # type: ignore[misc]  # the package is not type-checked
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            on_step(state.global_step)

    protection = HoldfastTrainerCallback(world=world)
    settings = Namespace(steps=steps, passages=PASSAGES, log_file=None)
    trainer = make_trainer(settings, protection)
    trainer.add_callback(Steps())
    protection.train(trainer)
    return state_sha256(trainer)


def train_lightning(world: World, steps: int, on_step: Callable[[int], None]) -> str:
    """Train with Lightning's Trainer, and return the hash of the final state."""
    from lightning.pytorch import Callback  # noqa: PLC0415
    from train_lightning import fit, make_trainer, state_sha256  # noqa: PLC0415

    from holdfast.integrations.lightning import HoldfastCallback  # noqa: PLC0415

    class Steps(Callback):  # type: ignore[misc]  # the package is not type-checked
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            on_step(trainer.global_step)

    protection = HoldfastCallback(world=world)
    settings = Namespace(steps=steps, bytes=TEXT_BYTES, log_file=None)
    trainer = make_trainer(settings, protection)
    trainer.callbacks.append(Steps())
    fit(settings, trainer, protection)
    return state_sha256(trainer)


if __name__ == "__main__":
    main()
