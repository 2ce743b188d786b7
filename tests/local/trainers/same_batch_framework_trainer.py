"""The Trainers of Hugging Face and Lightning with a global batch that is the same in worlds of any
size: the model, the data and the log of `same_batch_trainer`."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from same_batch_trainer import (
    BATCH,
    LIMIT,
    PACE_S,
    SEED,
    Line,
    make_model,
    make_optimizer,
    mean_loss,
    samples,
    state_hash,
)
from torch.utils.data import DataLoader, Dataset, TensorDataset

import holdfast
from holdfast import elastic

ENDLESS = 10**6


class Log:
    """Appends a line for each step of this process."""

    def __init__(self, path: Path, world: elastic.World, sampler: holdfast.ElasticSampler) -> None:
        self._file = path.open("a", buffering=1)
        self._world, self._sampler = world, sampler
        self._passes: list[tuple[list[int], torch.Tensor]] = []

    def note(self, indices: torch.Tensor, loss: torch.Tensor) -> None:
        """Note the samples of a pass, and the mean of their losses."""
        self._passes.append((indices.tolist(), loss.detach()))

    def write(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Write the line of a step that is complete. Collective."""
        time.sleep(PACE_S)
        passes, self._passes = self._passes, []
        parts = self._sampler.plan.micro_batches
        total = torch.zeros((), dtype=torch.float64)
        for (_, loss), part in zip(passes, parts, strict=True):
            total += loss * part.summed_weight
        self._world.wait(dist.all_reduce(total, async_op=True))
        line = Line(
            step=step,
            epoch=self._world.epoch,
            rank=self._world.rank,
            size=self._world.size,
            passes=[indices for indices, _ in passes],
            loss=float(total),
            hash=state_hash(model, optimizer),
        )
        self._file.write(json.dumps(asdict(line)) + "\n")

    def forget(self) -> None:
        """Forget the passes of a step that was cut off."""
        self._passes.clear()


class Rows(Dataset[dict[str, torch.Tensor]]):
    """The samples as Hugging Face's Trainer takes them."""

    def __init__(self) -> None:
        self.data = samples()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.data[index]
        return {"index": torch.tensor(index), "rows": row, "labels": row[-1]}


def train_huggingface(
    world: elastic.World, sampler: holdfast.ElasticSampler, log: Log, folder: Path, *, counts: bool
) -> None:
    """Train with Hugging Face's Trainer.

    Args:
        counts: whether the model divides its loss by the number of labels of all ranks, as models
            of transformers do.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from holdfast.integrations.huggingface import HoldfastTrainerCallback

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_model()

        def forward(
            self, index: torch.Tensor, rows: torch.Tensor, labels: torch.Tensor
        ) -> dict[str, torch.Tensor]:
            loss = mean_loss(self.layers, rows)
            log.note(index, loss)
            return {"loss": loss}

    class CountingModel(Model):
        def forward(
            self, index: torch.Tensor, rows: torch.Tensor, labels: torch.Tensor, **others: Any
        ) -> dict[str, torch.Tensor]:
            loss = super().forward(index, rows, labels)["loss"]
            return {"loss": loss * len(labels) / others["num_items_in_batch"]}

    class Lines(TrainerCallback):  # type: ignore[misc]  # the package is not type-checked
        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            log.forget()

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            log.write(state.global_step, model, optimizer)

    model = CountingModel() if counts else Model()
    optimizer = make_optimizer(model)
    arguments = TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        max_steps=ENDLESS,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=True,
    )
    protection = HoldfastTrainerCallback(world=world, sampler=sampler)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Rows(),
        callbacks=[protection, Lines()],
        optimizers=(optimizer, None),
    )
    protection.train(trainer)


def train_lightning(world: elastic.World, sampler: holdfast.ElasticSampler, log: Log) -> None:
    """Train with Lightning's Trainer."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    from holdfast.integrations.lightning import HoldfastCallback

    class Module(LightningModule):  # type: ignore[misc]  # the package is not type-checked
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_model()

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            index, rows = batch
            if batch_idx % sampler.plan.passes == 0:
                log.forget()
            loss = mean_loss(self.layers, rows)
            log.note(index, loss)
            return loss

        def train_dataloader(self) -> DataLoader[Any]:
            data = samples()
            return DataLoader(
                TensorDataset(torch.arange(len(data)), data),
                batch_sampler=sampler,
                generator=torch.Generator(),
            )

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self)

    class Lines(Callback):  # type: ignore[misc]  # as above
        def on_train_batch_end(
            self, trainer: Any, module: Any, out: Any, batch: Any, at: int
        ) -> None:
            if (at + 1) % sampler.plan.passes == 0:
                log.write(trainer.global_step, module, trainer.optimizers[0])

    protection = HoldfastCallback(world=world, sampler=sampler)
    trainer = Trainer(
        accelerator="cpu",
        num_nodes=world.size,
        devices=1,
        strategy="ddp" if world.size > 1 else "auto",
        max_steps=ENDLESS,
        max_epochs=-1,
        callbacks=[protection, Lines()],
        use_distributed_sampler=False,  # the loader has one
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    protection.fit(trainer, Module())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=["huggingface", "counting", "lightning"])
    parser.add_argument("--directory", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    world = elastic.init("gloo")
    sampler = holdfast.ElasticSampler(samples(), BATCH, world, micro_batch=LIMIT, seed=SEED)
    log = Log(args.directory / f"log-{os.getpid()}", world, sampler)
    if args.framework == "lightning":
        train_lightning(world, sampler, log)
    else:
        counts = args.framework == "counting"
        train_huggingface(world, sampler, log, args.directory, counts=counts)
    world.close()


if __name__ == "__main__":
    main()
