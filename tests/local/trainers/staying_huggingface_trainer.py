"""The Trainer of Hugging Face in processes that stay, with faults where a file tells it to.

Each rank appends a line for each completed step to `log-<rank>`, and rank 0 writes at the end what
the trainer has logged and what its callbacks hold.
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
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from dtensor_trainer import state_hash
from staying_trainer import Faults
from train_huggingface import CONFIG, Passages
from transformers import (
    EarlyStoppingCallback,
    MixtralForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import holdfast
from holdfast.integrations.huggingface import HoldfastTrainerCallback

PACE_S = 0.02
"""Part of each step in which a rank computes nothing: ranks outnumber cores."""


class Model(MixtralForCausalLM):  # type: ignore[misc]  # the package is not type-checked
    """A small Mixtral that comes to points, and notes what it is trained on."""

    faults: Faults
    seen: list[str]

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **others: Any) -> Any:
        if not self.training:
            self.faults.at("evaluation")
            return super().forward(input_ids=input_ids, labels=labels, **others)
        self.seen.append(hashlib.sha256(input_ids.numpy().tobytes()).hexdigest()[:16])
        self.faults.at("forward")
        output = super().forward(input_ids=input_ids, labels=labels, **others)
        output.logits.register_hook(lambda gradient: self.faults.at("backward"))
        return output


class ShardingTrainer(Trainer):  # type: ignore[misc]  # the package is not type-checked
    """Shards the model by accelerate's FSDP2, which accelerate leaves out on CPUs."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        self.is_fsdp_enabled = True


class Lines(TrainerCallback):  # type: ignore[misc]  # the package is not type-checked
    """Appends a line for each step."""

    def __init__(self, path: Path, faults: Faults) -> None:
        self._path, self._faults = path, faults
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.model.seen.clear()  # the last step of an epoch may have fewer batches

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        line = {
            "step": state.global_step,
            "epoch": state.epoch,
            "pid": os.getpid(),
            "rate": kwargs["lr_scheduler"].get_last_lr(),
            "seen": list(self.trainer.model.seen),
            "hash": hash_of(self.trainer),
            "time": time.time(),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        time.sleep(PACE_S)
        self._faults.at("step-end")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._faults.at("save")


def hash_of(trainer: Trainer) -> str:
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return state_hash(trainer.model, optimizer)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--sorts", action="store_true", help="let DDP sort its buckets")
    parser.add_argument("--sharded", action="store_true", help="train under FSDP2")
    parser.add_argument("--restarts", action="store_true", help="end with the world")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    faults = Faults(args.directory, rank)
    world = holdfast.elastic.init("gloo", stay=not args.restarts)
    arguments = TrainingArguments(
        output_dir=str(args.directory / "checkpoints"),
        max_steps=args.steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        warmup_steps=5,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=5,
        save_strategy="no" if args.sharded else "steps",
        save_steps=10,
        save_total_limit=1,
        metric_for_best_model="eval_loss",
        ddp_find_unused_parameters=not args.sorts,
        report_to="none",
        disable_tqdm=True,
        seed=1,
        use_cpu=True,
        fsdp="full_shard" if args.sharded else None,
    )
    torch.manual_seed(arguments.seed)
    model = Model(CONFIG)
    model.faults, model.seen = faults, []
    lines = Lines(args.directory / f"log-{rank}", faults)
    stopping = EarlyStoppingCallback(early_stopping_patience=1000)
    protection = HoldfastTrainerCallback(world=world)
    trainer = (ShardingTrainer if args.sharded else Trainer)(
        model,
        arguments,
        train_dataset=Passages(200),
        eval_dataset=Passages(16),
        callbacks=[protection, lines, stopping],
    )
    lines.trainer = trainer
    optimizer = trainer.create_optimizer()
    optimizer.register_step_pre_hook(lambda *_: faults.at("before-optimizer"))
    optimizer.register_step_post_hook(lambda *_: faults.at("in-optimizer"))
    output = protection.train(trainer)
    end = {
        "pid": os.getpid(),
        "hash": hash_of(trainer),
        "loss": output.training_loss,
        "history": [without_times(line) for line in trainer.state.log_history],
        "patience": stopping.early_stopping_patience_counter,
        "best": [trainer.state.best_metric, trainer.state.best_global_step],
        "flos": trainer.state.total_flos,
    }
    (args.directory / f"end-{rank}").write_text(json.dumps(end))
    world.close()


def without_times(line: dict[str, float]) -> dict[str, float]:
    return {
        name: value
        for name, value in line.items()
        if "runtime" not in name and "per_second" not in name
    }


if __name__ == "__main__":
    main()
