"""Peers compute experts' state from gradients, as far as the device's optimizer does what they do.

An optimizer that computes otherwise on a device is recognised at its first step, which the log
states once, and what peers cannot compute is sent. A replica is right in every case.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from followed_run import Run
from machines import Machine, bits

from holdfast.testing import FakeDaemon

ALL, MOMENTS, NOTHING = "all", "moments", "nothing"

OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "fused AdamW": (torch.optim.AdamW, {"fused": True, "weight_decay": 0.1}),
    "foreach AdamW": (torch.optim.AdamW, {"foreach": True, "weight_decay": 0.1}),
    "AdamW, one by one": (torch.optim.AdamW, {"foreach": False, "weight_decay": 0.1}),
    "capturable AdamW": (torch.optim.AdamW, {"foreach": True, "capturable": True}),
    "fused Adam": (torch.optim.Adam, {"fused": True}),
    "Adam with decay": (torch.optim.Adam, {"fused": True, "weight_decay": 0.5}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
}

ON_A_CPU = {"fused AdamW": {ALL}, "Adam with decay": {NOTHING}, "SGD": {ALL}}
"""What peers compute where the processor is known; the other variants depend on its libraries."""

Make = Callable[[Any], torch.optim.Optimizer]


@pytest.fixture
def run(machine: Machine, arenas: Path) -> Iterator[Callable[[Make], Run]]:
    made: list[Run] = []

    def make(optimizer: Make) -> Run:
        made.append(Run(FakeDaemon(arenas), optimizer, device=machine.kind))
        return made[-1]

    yield make
    for one in made:
        one.session.close()


def computed(text: str) -> str:
    """What peers compute, from the log."""
    if "all of its state is sent" in text:
        return NOTHING
    return MOMENTS if "its weights differ from those of" in text else ALL


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_peer_computes_what_the_device_computes_and_fetches_the_rest(
    machine: Machine, run: Callable[[Make], Run], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    kind, options = OPTIMIZERS[name]
    if options.get("capturable") and not machine.is_cuda:
        pytest.skip("torch has capturable optimizers on accelerators only")
    caplog.set_level(logging.WARNING, logger="holdfast")
    trained = run(lambda params: kind(params, lr=1e-3, **options))
    trained.train()
    trained.save()
    trained.both()  # this step is watched; the replica is compared here and below
    for _ in range(2):
        changed, fetched = trained.both()
    computes = computed(caplog.text)
    print(f"{name} on {machine.kind}: peers compute {computes}; {trained.counted}")
    assert len(caplog.records) == (0 if computes == ALL else 1)
    if computes == NOTHING:
        assert (changed, trained.counted.units) == (fetched, 0)
    else:
        assert trained.counted.units == 2 * 4
        assert fetched < changed
    if not machine.is_cuda:
        assert computes in ON_A_CPU.get(name, {ALL, MOMENTS})


def test_a_snapshot_that_carries_gradients_is_restored_without_them(
    machine: Machine, run: Callable[[Make], Run], arenas: Path
) -> None:
    def fused(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-3, fused=True)

    trained = run(fused)
    trained.train()
    trained.save()
    for _ in range(2):
        trained.both()
    other = Run(FakeDaemon(arenas, epoch=2), fused, seed=8, device=machine.kind)
    assert other.session.restore() == trained.step
    for found, wanted in zip(other.model.parameters(), trained.model.parameters(), strict=True):
        assert torch.equal(bits(found), bits(wanted))
        for key, value in trained.optimizer.state[wanted].items():
            assert other.optimizer.state[found][key].device == value.device
            assert torch.equal(bits(other.optimizer.state[found][key]), bits(value)), key
    other.session.close()
