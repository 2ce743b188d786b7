"""Ranks that restore uneven copies go on with the bits of those that never stopped."""

from __future__ import annotations

from pathlib import Path

import torch
from dense_moe import Shape, backward, join, make_layer
from ports import reserve_port
from ranks import run_ranks
from torch import nn

import holdfast
from holdfast import elastic, moe
from holdfast.testing import FakeDaemon

WAIT_S = 60
UNEVEN = Shape(
    ranks=3,
    top_k=2,
    copies=(((0, 1), (1, 1), (2, 2)), ((1, 1),), ((0, 2), (2, 1)), ((0, 1),)),
)


class Trainer:
    """A model of one layer, its optimizer and its session."""

    def __init__(self, directory: str, world: elastic.World, group: elastic.WorldGroup) -> None:
        self.model = nn.ModuleDict({"moe": make_layer(UNEVEN, group, torch.float32)})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.gradients = moe.SummedGradients(self.model, group)
        self.tokens = UNEVEN.tokens(torch.float32)[world.rank]
        self.session = holdfast.init(
            model=self.model,
            optimizer=self.optimizer,
            topology=holdfast.Topology(dp=3, ep=3),
            daemon=FakeDaemon(directory, rank=world.rank, world_size=3),
            settings=holdfast.Settings(start_wait_s=WAIT_S, exchange_timeout_s=WAIT_S),
        )

    def train(self) -> None:
        self.optimizer.zero_grad()
        out, balance = self.model["moe"](self.tokens)
        backward(out, balance, sum(UNEVEN.batches))
        self.gradients.sum()
        self.optimizer.step()

    def state(self) -> list[torch.Tensor]:
        parameters = list(self.model.parameters())
        states = [v for p in parameters for _, v in sorted(self.optimizer.state[p].items())]
        return [one.detach().clone() for one in (*parameters, *states)]


def save_and_restore(rank: int, port: int, directory: str) -> None:
    world, group = join(rank, port, 3)
    first = Trainer(directory, world, group)
    for step in (1, 2):
        first.train()
        first.session.save(step).committed.result(WAIT_S)
    first.session.close()
    first.train()

    second = Trainer(directory, world, group)
    with torch.no_grad():
        for p in second.model.parameters():
            p.fill_(9.0)
    assert second.session.restore() == 2
    moe.check_copies(second.model, second.optimizer, group)
    second.train()
    for one, other in zip(first.state(), second.state(), strict=True):
        assert torch.equal(one, other)
    second.session.close()
    world.close()


def test_a_restored_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    run_ranks(save_and_restore, (reserve_port(), str(tmp_path)), 3)
