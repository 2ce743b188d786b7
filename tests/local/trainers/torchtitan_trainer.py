"""`python -m torchtitan.train` on CPU, with a tiny model: writes the loss of each step, the number
of the process and digests of the final state of each rank into `--dump-folder`. While there is a
file `hold`, it waits in the step whose number is in it."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchtitan_on_cpu
from torch.distributed.tensor import DTensor
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import derive
from torchtitan.train import main
from torchtitan.trainer import Trainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
from waiting import wait_for

WAIT_S = 600.0


class RecordingMetrics(MetricsProcessor):  # type: ignore[misc]  # the package is not type-checked
    """Appends a line a step to `log-<rank>`, and writes digests to `state-<rank>` at the end."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]  # as above
        pass

    def __init__(self, config: Config, *, dump_folder: str, **others: Any) -> None:
        super().__init__(config, dump_folder=dump_folder, **others)
        self._folder, self._rank = Path(dump_folder), os.environ["RANK"]
        self._folder.mkdir(parents=True, exist_ok=True)

    def log(self, step: int, global_avg_loss: float, *others: Any, **more: Any) -> None:
        line = {"step": step, "loss": global_avg_loss, "pid": os.getpid()}
        with (self._folder / f"log-{self._rank}").open("a") as log:
            log.write(json.dumps(line) + "\n")
        wait_for("the step to go on", lambda: self._held_step() != step, WAIT_S)
        super().log(step, global_avg_loss, *others, **more)

    def _held_step(self) -> int | None:
        try:
            return int((self._folder / "hold").read_text())
        except FileNotFoundError:
            return None

    def close(self) -> None:
        digests = {
            name: digest
            for part, model in enumerate(self.model_parts or ())
            for name, digest in _digests(f"part{part}", model)
        }
        for number, optimizer in enumerate(self.optimizers or ()):
            digests |= _digests_of_states(f"optimizer{number}", optimizer)
        (self._folder / f"state-{self._rank}").write_text(json.dumps(digests, indent=1))
        super().close()


def _digests(name: str, model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        yield f"{name}.{key}", _digest(tensor)


def _digests_of_states(name: str, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    digests = {}
    for index, group in enumerate(optimizer.param_groups):
        values = {key: value for key, value in group.items() if key != "params"}
        digests[f"{name}.group{index}"] = repr(sorted(values.items()))
        for number, parameter in enumerate(group["params"]):
            for key, value in optimizer.state[parameter].items():
                digests[f"{name}.group{index}.{number}.{key}"] = _digest(value)
    return digests


def _digest(tensor: torch.Tensor) -> str:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    flat = local.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def tiny_moe() -> Trainer.Config:
    """The configuration that `--module torchtitan_trainer --config tiny_moe` names."""
    config = torchtitan_on_cpu.tiny_moe()
    config.metrics = derive(config.metrics, RecordingMetrics.Config)
    return config


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
