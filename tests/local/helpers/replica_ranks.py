"""Two data-parallel ranks with a small model, each in a process and a session of its own."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import holdfast


class ReplicaRank:
    """One of two ranks, in a session with its node's daemon. Collective.

    Args:
        width: inputs and outputs of each layer of the model.
        gradient: gradient of every element in step 1; in step n it is n times as much.
    """

    def __init__(
        self,
        rank: int,
        sockets: list[Path],
        job: str,
        store: Path,
        settings: holdfast.Settings,
        *,
        width: int,
        gradient: float,
        layers: int = 4,
    ) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        torch.manual_seed(0)
        self.rank, self._gradient = rank, gradient
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.session = holdfast.init(
            model=self.model,
            optimizer=self.optimizer,
            topology=holdfast.Topology(dp=2),
            socket=sockets[rank],
            job=job,
            settings=settings,
        )

    def save(self, step: int) -> holdfast.SaveHandle:
        """Take a step, and call `save` for it."""
        for p in self.model.parameters():
            p.grad = torch.full_like(p, self._gradient * step)
        self.optimizer.step()
        return self.session.save(step)

    def end(self) -> None:
        self.session.close()
        dist.barrier()
        dist.destroy_process_group()
