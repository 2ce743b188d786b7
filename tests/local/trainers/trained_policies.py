"""One small MoE model of transformers, trained by each framework under any policy: a process trains
it, notes its states and its tokens, and is killed; the next one restores."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
from waiting import wait_saved

import holdfast
from holdfast.testing import FakeDaemon
from holdfast_core.job.snapshots import Policy

STEPS, KILLED_AFTER, PASSES = 6, 4, 2
WAIT_S = 60.0
WORDS, LENGTH, BATCH, EXPERTS, CHOICES = 64, 8, 2, 4, 2
CONFIG = Qwen3MoeConfig(
    vocab_size=WORDS,
    hidden_size=16,
    intermediate_size=16,
    moe_intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=EXPERTS,
    num_experts_per_tok=CHOICES,
    attention_dropout=0.1,  # so that a run depends on its random generators
)
State = dict[str, torch.Tensor]
Chosen = dict[tuple[int, int], int]
"""(Layer, expert) → tokens."""


class Passages(Dataset[dict[str, torch.Tensor]]):
    """Random words, the same in each process."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(7)
        self.words = torch.randint(0, WORDS, (STEPS * PASSES * BATCH, LENGTH), generator=draw)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[index], "labels": self.words[index]}


class Training:
    """What one process sees of its training.

    Args:
        folder: for what it notes.
        killed: whether it is killed after a step.
    """

    def __init__(self, folder: Path, epoch: int, policy: Policy, *, killed: bool) -> None:
        torch.manual_seed(epoch)
        torch.use_deterministic_algorithms(True)
        self.model: Any = Qwen3MoeForCausalLM(CONFIG)
        torch.manual_seed(1)
        if epoch == 1:
            self.model = Qwen3MoeForCausalLM(CONFIG)
        self.arguments: dict[str, Any] = {
            "daemon": FakeDaemon(folder / "memory", epoch=epoch),
            "settings": holdfast.Settings(policy=policy, start_wait_s=60.0),
        }
        self._folder, self._killed = folder, killed
        self._chosen: Chosen = Counter()
        for layer, block in enumerate(self.model.model.layers):
            block.mlp.gate.register_forward_hook(partial(self._note, layer))

    def _note(self, layer: int, router: Any, inputs: Any, output: Any) -> None:
        for row in output[0]:
            for expert in row.argsort(descending=True)[:CHOICES].tolist():
                self._chosen[layer, expert] += 1

    def state(self, optimizer: torch.optim.Optimizer) -> State:
        """All parameters and optimizer states."""
        return {
            f"{name}:{key}": tensor.detach().clone()
            for name, p in self.model.named_parameters()
            for key, tensor in [("", p), *sorted(optimizer.state[p].items())]
        }

    def on_restored(self, optimizer: torch.optim.Optimizer) -> None:
        torch.save(self.state(optimizer), self._folder / "restored")

    def on_saved(self, step: int, session: holdfast.Session, optimizer: Any) -> None:
        """Note the state after a step whose save was called, and perhaps die."""
        wait_saved(session, WAIT_S)
        assert session.counters.failed == session.counters.skipped == 0, session.counters
        if self._killed:
            noted = self.state(optimizer), Counter(self._chosen)
            torch.save(noted, self._folder / f"step{step}")
            if step == KILLED_AFTER:
                os.kill(os.getpid(), signal.SIGKILL)
        elif session.counters.loss is not None:
            torch.save(session.counters.loss.report, self._folder / "report")

    def on_ended(self, optimizer: torch.optim.Optimizer) -> None:
        torch.save(self.state(optimizer), self._folder / "ended")


def with_accelerate(training: Training) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PASSES)
    model = training.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Passages()
    sampler = holdfast.RecoverableSampler(data, rank=0, replicas=1, seed=1)
    loader = DataLoader(data, BATCH, sampler=sampler, generator=torch.Generator())
    session = holdfast.init(
        model=model, optimizer=optimizer, stateful={"sampler": sampler}, **training.arguments
    )
    done = session.restore() or 0
    training.on_restored(optimizer)
    model, steps = accelerator.prepare(model.train(), optimizer)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            steps.step()
            steps.zero_grad()
        sampler.advance(BATCH)
        if accelerator.sync_gradients:
            done += 1
            session.save(done)
            training.on_saved(done, session, optimizer)
            if done == STEPS:
                break
    session.close()
    training.on_ended(optimizer)


def with_huggingface(training: Training) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from holdfast.integrations.huggingface import HoldfastTrainerCallback

    protection = HoldfastTrainerCallback(**training.arguments)

    class Watching(TrainerCallback):  # type: ignore[misc]  # not type-checked
        begun: int | None = None

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            training.on_restored(trainer.optimizer.optimizer)

        def on_step_begin(self, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
            if state.global_step and state.global_step != self.begun:
                assert protection.session is not None
                training.on_saved(
                    state.global_step, protection.session, trainer.optimizer.optimizer
                )
            self.begun = state.global_step

    arguments = TrainingArguments(
        output_dir="build/policies",
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=PASSES,
        learning_rate=1e-2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        logging_strategy="no",
        seed=1,
    )
    trainer = Trainer(
        training.model,
        arguments,
        train_dataset=Passages(),
        callbacks=[protection, Watching()],
    )
    protection.train(trainer)
    training.on_ended(trainer.optimizer.optimizer)


def with_lightning(training: Training, *, manual: bool = False) -> None:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torchdata.stateful_dataloader import StatefulDataLoader

    from holdfast.integrations.lightning import HoldfastCallback

    protection = HoldfastCallback(**training.arguments)

    class Module(LightningModule):  # type: ignore[misc]  # not type-checked
        def __init__(self) -> None:
            super().__init__()
            self.base, self.automatic_optimization = training.model, not manual

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.base(**batch).loss
            if not manual:
                return loss
            self.manual_backward(loss)
            if index % PASSES == PASSES - 1:
                optimizer = self.optimizers()
                self.clip_gradients(optimizer, 1.0, "norm")
                optimizer.step()
                optimizer.zero_grad()
            return None

        def train_dataloader(self) -> Any:
            return StatefulDataLoader(Passages(), BATCH, generator=torch.Generator())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    class Watching(Callback):  # type: ignore[misc]  # not type-checked
        def on_train_start(self, trainer: Any, module: Any) -> None:
            module.train()
            self.begun = trainer.global_step
            training.on_restored(trainer.optimizers[0])

        def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
            if trainer.global_step > self.begun:
                self.begun = trainer.global_step
                assert protection.session is not None
                training.on_saved(self.begun, protection.session, trainer.optimizers[0])

    trainer = Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        **({} if manual else {"accumulate_grad_batches": PASSES, "gradient_clip_val": 1.0}),
        callbacks=[protection, Watching()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    protection.fit(trainer, Module())
    training.on_ended(trainer.optimizers[0])


INTEGRATIONS: dict[str, Callable[[Training], None]] = {
    "accelerate": with_accelerate,
    "huggingface": with_huggingface,
    "lightning": with_lightning,
    "lightning, manual": partial(with_lightning, manual=True),
}


def train(
    rank: int, folder: Path, name: str, epoch: int, policy: Policy, *, killed: bool = False
) -> None:
    """Train in this process."""
    del rank
    torch.set_num_threads(1)
    os.environ["WORLD_SIZE"] = "1"
    INTEGRATIONS[name](Training(folder, epoch, policy, killed=killed))
