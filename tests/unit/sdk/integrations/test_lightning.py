"""Lightning's Trainer goes on after a restart as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from holdfast import ElasticSampler, moe
from holdfast._elastic.world import World
from holdfast.testing import FakeDaemon
from holdfast_core.errors import InvalidJobError
from holdfast_core.snapshots.generations import Generation

pytorch = pytest.importorskip("lightning.pytorch")
pytest.importorskip("torchdata")
import train_lightning  # noqa: E402
from waiting import wait_for  # noqa: E402

from holdfast.integrations.lightning import HoldfastCallback  # noqa: E402

STEPS = 7
BYTES = 4 * train_lightning.BATCH  # an epoch has four steps
WAIT_S = 60.0

pytestmark = [
    pytest.mark.timeout(300),
    # Lightning and torchdata warn about their own calls of a newer torch, and give advice.
    pytest.mark.filterwarnings("default"),
]


class Killed(Exception):
    """Ends training where a process would be killed."""


class KillAfter(pytorch.Callback):  # type: ignore[misc, name-defined]
    """Has every step committed up to one, and ends training after it."""

    def __init__(self, step: int, daemon: FakeDaemon) -> None:
        self._step, self._daemon = step, daemon

    def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
        self._look(trainer)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._look(trainer)

    def _look(self, trainer: Any) -> None:
        if not 0 < trainer.global_step <= self._step:
            return
        saved = Generation(self._daemon.epoch, trainer.global_step)
        wait_for("the snapshot", lambda: saved in self._committed(), WAIT_S)
        if trainer.global_step == self._step:
            raise Killed

    def _committed(self) -> list[Generation]:
        return [manifest.generation for manifest in self._daemon.manifests]


class Validated(train_lightning.NextByte):
    """Draws a random number in each validation."""

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(4)))

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        assert len(batch) == 1


def train(tmp_path: Path, daemon: FakeDaemon, kill_after: int = 0) -> str:
    """Train to the end, or to the step at which the process dies; return the state's hash."""
    args = train_lightning.parse_args(
        ["--steps", str(STEPS), "--bytes", str(BYTES), "--log-file", str(tmp_path / "log")]
    )
    protection = HoldfastCallback(daemon=daemon)
    trainer = train_lightning.make_trainer(args, protection)
    trainer.callbacks.append(KillAfter(kill_after, daemon))
    trainer.val_check_interval = 2
    torch.manual_seed(1)
    try:
        trainer.fit(Validated(args.log_file, args.bytes))
    except Killed:
        protection.teardown(trainer, trainer.lightning_module, "fit")  # frees the arena
        raise
    return train_lightning.state_sha256(trainer)


def losses(tmp_path: Path) -> list[dict[str, float]]:
    """What was logged."""
    return [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, float]]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return train(folder, FakeDaemon(folder / "memory")), losses(folder)


@pytest.mark.parametrize("step", [2, 4, 6], ids=["in the first epoch", "at its end", "in the next"])
def test_training_that_dies_after_a_step_ends_with_the_same_losses_and_bytes(
    tmp_path: Path, undisturbed: tuple[str, list[dict[str, float]]], step: int
) -> None:
    memory = tmp_path / "memory"
    with pytest.raises(Killed):
        train(tmp_path, FakeDaemon(memory), kill_after=step)
    state = train(tmp_path, FakeDaemon(memory, epoch=2))
    assert losses(tmp_path) == undisturbed[1]
    assert state == undisturbed[0]


@pytest.fixture
def alone() -> Iterator[World]:
    world = World(
        "gloo", None, store_address="", local_rank=0, nproc=1, timeout_s=30.0, reform_s=30.0
    )
    world.join()
    yield world
    world.close()


def test_training_in_a_world_is_the_same_training(
    tmp_path: Path, undisturbed: tuple[str, list[dict[str, float]]], alone: World
) -> None:
    args = train_lightning.parse_args(
        ["--steps", str(STEPS), "--bytes", str(BYTES), "--log-file", str(tmp_path / "log")]
    )
    protection = HoldfastCallback(world=alone)
    trainer = train_lightning.make_trainer(args, protection)
    trainer.val_check_interval = 2
    torch.manual_seed(1)
    protection.fit(trainer, Validated(args.log_file, args.bytes))
    assert losses(tmp_path) == undisturbed[1]
    assert train_lightning.state_sha256(trainer) == undisturbed[0]


def test_fitting_past_the_callback_in_a_world_is_refused(alone: World) -> None:
    args = train_lightning.parse_args(["--steps", "1"])
    trainer = train_lightning.make_trainer(args, HoldfastCallback(world=alone))
    with pytest.raises(InvalidJobError, match=r"call protection\.fit\(trainer, module\)"):
        trainer.fit(train_lightning.NextByte())


def test_a_static_graph_in_a_world_is_refused(alone: World) -> None:
    strategy = pytest.importorskip("lightning.pytorch.strategies").DDPStrategy(static_graph=True)
    trainer = pytorch.Trainer(accelerator="cpu", strategy=strategy, logger=False)
    with pytest.raises(InvalidJobError, match="static_graph"):
        HoldfastCallback(world=alone).fit(trainer, train_lightning.NextByte())


class WithoutMemory(train_lightning.NextByte):
    def configure_model(self) -> None:
        self.to("meta")


def test_a_model_that_gets_its_memory_later_is_refused_in_a_world(alone: World) -> None:
    protection = HoldfastCallback(world=alone)
    trainer = train_lightning.make_trainer(train_lightning.parse_args(["--steps", "1"]), protection)
    with pytest.raises(InvalidJobError, match="leaves parameters on the meta device"):
        protection.fit(trainer, WithoutMemory())


def test_a_checkpoint_beside_it_is_refused(tmp_path: Path) -> None:
    args = train_lightning.parse_args(["--steps", "1"])
    trainer = train_lightning.make_trainer(args, HoldfastCallback(daemon=FakeDaemon(tmp_path)))
    trainer.strategy.connect(train_lightning.NextByte())
    trainer.ckpt_path = "last.ckpt"
    with pytest.raises(InvalidJobError, match="leave ckpt_path out"):
        HoldfastCallback().on_fit_start(trainer, trainer.lightning_module)


@pytest.mark.parametrize(
    ("accumulated", "why"),
    [
        (3, r"Trainer\(accumulate_grad_batches=…\) is 3 beside sampler"),
        (1, "the batches do not come from sampler"),
    ],
)
def test_what_a_global_batch_could_not_stay_the_same_with_is_refused(
    alone: World, accumulated: int, why: str
) -> None:
    protection = HoldfastCallback(world=alone, sampler=ElasticSampler(range(8), 4, alone))
    trainer = train_lightning.make_trainer(train_lightning.parse_args(["--steps", "1"]), protection)
    trainer.accumulate_grad_batches = accumulated
    with pytest.raises(InvalidJobError, match=why):
        protection.fit(trainer, train_lightning.NextByte())


@pytest.mark.parametrize(
    ("seats", "arguments", "why"),
    [
        (True, {}, "Lightning reduces gradients as if all ranks had the same experts"),
        (False, {"pipeline": object()}, "Lightning cannot repeat the steps of a stage alone"),
    ],
)
def test_what_only_a_loop_of_ones_own_can_train_is_refused(
    seats: bool, arguments: dict[str, Any], why: str
) -> None:
    trainer = train_lightning.make_trainer(
        train_lightning.parse_args(["--steps", "1"]), HoldfastCallback(**arguments)
    )
    module = train_lightning.NextByte()
    if seats:
        module.add_module("seats", moe.SeatedExperts(4, 8, (0, 1), 2))
    with pytest.raises(InvalidJobError, match=why):
        trainer.fit(module)
