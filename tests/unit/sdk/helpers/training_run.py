"""A training run whose snapshots leave experts out, and the state that it should restore."""

from __future__ import annotations

from typing import Any

import torch

import holdfast
from holdfast.testing import FakeDaemon
from holdfast_core.job.snapshots import PartialExperts
from holdfast_core.snapshots.units import UnitKey, UnitKind

WAIT_S = 20.0
IN_TURN = PartialExperts(experts_per_layer=1)
LISTED = (3, 4)
"""Numbers of the experts in lists; those in stacks are 0 to 2."""


def unit_of(name: str) -> UnitKey:
    """The unit of a parameter of the small model, which has two kinds of experts."""
    parts = name.split(".")
    if parts[0] != "layers":
        return UnitKey(None, UnitKind.OTHER)
    layer = int(parts[1])
    if "listed" in parts:
        return UnitKey(layer, UnitKind.EXPERT, LISTED[int(parts[4])])
    return UnitKey(layer, UnitKind.DENSE)


def named(name: str, tensor: torch.Tensor) -> UnitKey | None:
    del tensor
    if "listed" in name:
        return unit_of(name)
    return UnitKey(int(name.split(".")[1]), UnitKind.DENSE) if "experts.w" in name else None


def loss_of(session: holdfast.Session) -> Any:
    """The counters' loss once the last save has ended, which may be after its futures resolve."""
    session.prepare()
    return session.counters.loss


class TrainingRun:
    """A training run that keeps its state of every step, and the step of each expert's capture."""

    def __init__(self, trainer: Any, daemon: FakeDaemon, **settings: Any) -> None:
        self.trainer, self.daemon = trainer, daemon
        self.session = holdfast.init(
            model=trainer.model,
            optimizer=trainer.optimizer,
            stateful={"scheduler": trainer.scheduler},
            daemon=daemon,
            units=named,
            settings=holdfast.Settings(reopen_backoff_s=0.0, **{"policy": IN_TURN, **settings}),
        )
        self.states: dict[int, dict[str, Any]] = {}
        self.captured: dict[UnitKey, int] = {}

    def save(self, step: int, counts: tuple[int, int] = (10, 10)) -> None:
        self.trainer.train()
        self.states[step] = self.trainer.state()
        for layer in range(2):
            self.session.count_tokens(layer, [0, 0, 0, *counts])
        self.session.save(step).protected.result(WAIT_S)

    def expect(self, step: int, ages: dict[UnitKey, int]) -> dict[str, Any]:
        """The state of `step`, with experts as they were at their own steps."""
        found = {}
        for name, value in self.states[step].items():
            unit = unit_of(name.partition(":")[0])
            found[name] = self.states[ages[unit]][name] if unit in ages else value
        return found


def expert(layer: int, index: int) -> UnitKey:
    return UnitKey(layer, UnitKind.EXPERT, LISTED[index])
