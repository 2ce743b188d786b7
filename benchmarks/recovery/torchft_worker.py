"""The loop of `stacks_worker` under torchft, for `benchmarks.recovery.stacks`.

    python torchft_worker.py RANK RANKS STEPS FOLDER

Each rank is a replica group of its own, the least that torchft loses with a process. A step takes
place with all of them or not at all, so that the final state does not depend on what is killed.

Gradients are averaged here, because torchft 0.2.0's `DistributedDataParallel` cannot lose a rank
during an allreduce: `assert fut._fut` in its hook then ends all other processes, too.
"""

from __future__ import annotations

import logging
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchft import Manager, Optimizer, ProcessGroupGloo

from benchmarks.recovery.stacks_model import StepLog, backward, make_model, state_sha256

GLOO_TIMEOUT = timedelta(seconds=5)
"""As in torchft's example of DDP. A rank that has no connection to the lost one leaves an allreduce
only after this; the default is 60 s."""


def main() -> None:
    rank, ranks, steps, folder = *map(int, sys.argv[1:4]), Path(sys.argv[4])
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    model = make_model()
    inner = torch.optim.AdamW(model.parameters())

    def load_state(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=GLOO_TIMEOUT),
        load_state_dict=load_state,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=ranks,
        # A process that has just joined then takes part in its first step, too.
        use_async_quorum=False,
        init_sync=False,
        replica_id=f"{rank}",
        hostname="localhost",
    )
    optimizer = Optimizer(manager, inner)
    log = StepLog(folder, rank)
    while manager.current_step() < steps:
        optimizer.zero_grad()  # forms a quorum, in which a new process gets the others' state
        step = manager.current_step() + 1
        backward(model, step, rank)
        average_gradients(manager, model)
        optimizer.step()
        if manager.current_step() == step:
            log.completed(step, manager._quorum_id)
    log.end(state_sha256(model, inner))
    manager.shutdown()


def average_gradients(manager: Manager, model: nn.Module) -> None:
    """Average the gradients of all ranks, in one allreduce as DDP with one bucket."""
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    vector = nn.utils.parameters_to_vector(gradients)
    manager.allreduce(vector).wait()
    nn.utils.vector_to_parameters(vector, gradients)


if __name__ == "__main__":
    main()
