"""Lightning's Trainer in processes that stay, with faults where a file tells it to.

Each rank appends a line for each completed step to `log-<rank>`, and writes at the end what its
loops and callbacks hold.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from dtensor_trainer import state_hash
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import ModelParallelStrategy
from staying_trainer import Faults
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from train_lightning import BATCH, NextByte

import holdfast
from holdfast.integrations.lightning import HoldfastCallback

PACE_S = 0.02
"""Part of each step in which a rank computes nothing: ranks outnumber cores."""
BYTES = 13 * 4 * BATCH  # an epoch has six steps of two batches, and one of a single batch


class Model(NextByte):
    """Comes to points, and notes what it is trained on."""

    def __init__(self, faults: Faults, *, sharded: bool) -> None:
        super().__init__(None, BYTES + 1)
        self.faults, self.sharded = faults, sharded
        self.seen: list[str] = []

    def configure_model(self) -> None:
        if self.sharded:
            for part in self.children():
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> Any:
        self.seen.append(hashlib.sha256(batch[0].numpy().tobytes()).hexdigest()[:16])
        self.faults.at("forward")
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(lambda gradient: self.faults.at("backward"))
        self.log("loss", loss, sync_dist=True)
        return loss

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(8)), batch_size=4)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.faults.at("evaluation")
        self.log("drawn", torch.rand(()), sync_dist=True)

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        made["optimizer"].register_step_post_hook(lambda *_: self.faults.at("in-optimizer"))
        return made

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.faults.at("before-optimizer")


class Lines(Callback):  # type: ignore[misc]  # the package is not type-checked
    """Appends a line for each step."""

    def __init__(self, path: Path, faults: Faults) -> None:
        self._path, self._faults, self._step = path, faults, 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
        if trainer.global_step == self._step:  # gradients still add up
            return
        self._step = trainer.global_step
        line = {
            "step": trainer.global_step,
            "epoch": trainer.fit_loop.epoch_progress.current.processed,
            "pid": os.getpid(),
            "rate": trainer.optimizers[0].param_groups[0]["lr"],
            "seen": module.seen[-1],
            "loss": float(trainer.callback_metrics["loss"]),
            "hash": state_hash(trainer.lightning_module, trainer.optimizers[0]),
            "time": time.time(),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        time.sleep(PACE_S)
        self._faults.at("step-end")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--sharded", action="store_true", help="train under FSDP2")
    parser.add_argument("--restarts", action="store_true", help="end with the world")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_node = int(os.environ["LOCAL_WORLD_SIZE"])
    faults = Faults(args.directory, rank)
    world = holdfast.elastic.init("gloo", stay=not args.restarts)
    protection = HoldfastCallback(world=world)
    stopping = EarlyStopping("drawn", patience=10**6)
    trainer = Trainer(
        accelerator="cpu",
        num_nodes=ranks // on_node,
        devices=on_node,
        strategy=ModelParallelStrategy(ranks, 1) if args.sharded else "ddp",
        max_steps=args.steps,
        max_epochs=-1,
        accumulate_grad_batches=2,
        val_check_interval=4,
        callbacks=[protection, stopping, Lines(args.directory / f"log-{rank}", faults)],
        use_distributed_sampler=False,  # the loader has one
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    seed_everything(1, verbose=False)
    protection.fit(trainer, Model(faults, sharded=args.sharded))
    end = {
        "pid": os.getpid(),
        "hash": state_hash(trainer.lightning_module, trainer.optimizers[0]),
        "epochs": trainer.fit_loop.epoch_progress.current.processed,
        "waited": stopping.wait_count,
        "best": float(stopping.best_score),
    }
    (args.directory / f"end-{rank}").write_text(json.dumps(end))
    world.close()


if __name__ == "__main__":
    main()
