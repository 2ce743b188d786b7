"""Trains a small Mixtral with the Trainer of Hugging Face transformers, protected by Holdfast.

Start it with `holdfast run examples/huggingface-job.yaml`, or without protection with `torchrun
--nproc-per-node 2 examples/train_huggingface.py`. All uses of Holdfast are in `main`. A run that
was killed and restored logs the same losses as an undisturbed run, and ends with the same bytes.
When a rank is lost, the processes on the other nodes stay.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import holdfast
from holdfast.integrations.huggingface import HoldfastTrainerCallback

CONFIG = MixtralConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    attention_dropout=0.1,  # so that a run depends on its random generators
)


class Passages(Dataset[dict[str, torch.Tensor]]):
    """The first `count` passages of 64 bytes of a module of Python's library."""

    def __init__(self, count: int | None = None) -> None:
        text = bytearray(Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes())
        whole = torch.frombuffer(text, dtype=torch.uint8)[: len(text) // 64 * 64]
        self.text_PT = whole.view(-1, 64)[:count]

    def __len__(self) -> int:
        return len(self.text_PT)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.text_PT[index].long(), "labels": self.text_PT[index].long()}


class LossFile(TrainerCallback):  # type: ignore[misc]  # the package is not type-checked
    """Appends the values that the trainer logs, as lines of JSON."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


def state_sha256(trainer: Trainer) -> str:
    """SHA-256 of all parameters and optimizer states."""
    digest = hashlib.sha256()
    for name, p in trainer.model.named_parameters():
        for key, tensor in [("", p.detach()), *sorted(trainer.optimizer.state[p].items())]:
            digest.update(f"{name}:{key}".encode())
            digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def make_trainer(args: argparse.Namespace, protection: HoldfastTrainerCallback) -> Trainer:
    """A trainer in the state that the seed gives."""
    arguments = TrainingArguments(
        output_dir="build/huggingface",
        max_steps=args.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        warmup_steps=5,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=1,
        use_cpu=not torch.cuda.is_available(),
    )
    torch.manual_seed(arguments.seed)
    callbacks = [protection, *([LossFile(args.log_file)] if args.log_file else [])]
    data = Passages(args.passages)
    return Trainer(MixtralForCausalLM(CONFIG), arguments, train_dataset=data, callbacks=callbacks)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--passages", type=int, help="number of passages (default: all)")
    parser.add_argument("--log-file", type=Path, help="file for a line of JSON for each step")
    parser.add_argument("--hash-file", type=Path, help="file for the hash of the final state")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    torch.set_num_threads(1)
    world = holdfast.elastic.init("nccl" if torch.cuda.is_available() else "gloo")
    protection = HoldfastTrainerCallback(world=world)
    trainer = make_trainer(args, protection)
    protection.train(trainer)
    world.close()
    if args.hash_file and trainer.is_world_process_zero():
        args.hash_file.write_text(state_sha256(trainer) + "\n")


if __name__ == "__main__":
    main()
