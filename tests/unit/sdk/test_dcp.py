"""One rank's snapshots, persisted and loaded by torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stored import JOB, persist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import holdfast
from holdfast.dcp import HoldfastReader, Reading, load_into
from holdfast.testing import FakeDaemon
from holdfast_core.errors import InvalidJobError, LayoutMismatchError
from holdfast_core.snapshots.generations import Generation

WAIT_S = 20.0
Same = Callable[[dict[str, Any], dict[str, Any]], None]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def stored(tmp_path: Path, trainer: Any, open_session: Any) -> Path:
    """A tier with the states after steps 1 and 3 of `trainer`, which is at step 3."""
    daemon = FakeDaemon(tmp_path / "daemon")
    session = open_session(trainer, daemon)
    for step in (1, 2, 3):
        trainer.train()
        session.save(step).protected.result(WAIT_S)
        if step != 2:
            persist(tmp_path / "daemon", tmp_path / "tier", 1, Generation(1, step))
    return tmp_path / "tier"


def load(trainer: Any, reader: HoldfastReader, *, flat: bool = False, **more: Any) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state: dict[str, Any] = {
        **get_model_state_dict(trainer.model),
        "optim": get_optimizer_state_dict(trainer.model, trainer.optimizer, options=options),
    }
    state_dict_loader.load(state, storage_reader=reader, **more)
    optim = state.pop("optim")
    set_model_state_dict(trainer.model, state)
    set_optimizer_state_dict(
        trainer.model, trainer.optimizer, optim_state_dict=optim, options=options
    )


@pytest.mark.parametrize("flat", [False, True])
def test_a_persisted_set_loads_into_a_new_model(
    stored: Path, trainer: Any, make_trainer: Any, same: Same, flat: bool
) -> None:
    other = make_trainer(seed=7)
    other.optimizer.param_groups[0]["lr"] = 5.0
    reader = HoldfastReader(str(stored), job=JOB)
    load(other, reader, flat=flat)
    other.scheduler.load_state_dict(reader.extras()["stateful"]["scheduler"])
    same(other.state(), trainer.state())
    assert reader.generation == Generation(1, 3)
    assert reader.extras()["step"] == 3


def test_an_older_set_is_chosen_by_its_generation(stored: Path, make_trainer: Any) -> None:
    reader = HoldfastReader(str(stored), job=JOB)
    assert reader.generation == Generation(1, 3)
    load(make_trainer(), reader, checkpoint_id="1.1")
    assert reader.generation == Generation(1, 1)
    assert HoldfastReader(str(stored), job=JOB, generation="1.1").extras()["step"] == 1


def test_a_generation_that_is_not_there_is_refused_with_those_that_are(
    stored: Path, make_trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CheckpointException):
        load(make_trainer(), HoldfastReader(str(stored), job=JOB, generation="1.2"))
    assert "set 1.2 of job 'fake'; it has: 1.3, 1.1" in caplog.text
    with pytest.raises(InvalidJobError, match="name the set"):
        HoldfastReader(str(stored))


def test_a_flipped_byte_is_found_before_it_is_used(
    stored: Path, make_trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (path,) = (stored / JOB).glob("*3/rank-00000.safetensors")
    data = bytearray(path.read_bytes())
    header_bytes = 8 + int.from_bytes(data[:8], "little")
    data[header_bytes] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointException):
        load(make_trainer(), HoldfastReader(str(stored), job=JOB))
    assert "does not match its digest" in caplog.text


def test_boxes_of_tensors_are_read_alone(stored: Path, trainer: Any) -> None:
    """Targets that are not contiguous, of another dtype, a part of the whole."""
    source = HoldfastReader(str(stored), job=JOB).source
    weight = trainer.model.layers[0].experts.w.detach()
    found = source.array(source.tensors["layers.0.experts.w"], (1, 2, 3), (2, 4, 5))
    assert found.tobytes() == weight[1:3, 2:6, 3:8].contiguous().numpy().tobytes()
    target = torch.zeros(8, 8, 3, dtype=torch.float64).permute(2, 0, 1)
    state = {"layers.0.experts.w": target}
    state_dict_loader.load(state, storage_reader=HoldfastReader(str(stored), job=JOB))
    assert torch.equal(target, weight.double())


def test_experts_can_be_tensors_of_their_own(stored: Path, trainer: Any) -> None:
    reader = HoldfastReader(str(stored), job=JOB, reading=Reading(by_expert=True))
    state = {f"layers.1.experts.w[{i}]": torch.zeros(8, 8) for i in range(3)}
    state_dict_loader.load(state, storage_reader=reader)
    for i, found in enumerate(state.values()):
        assert torch.equal(found, trainer.model.layers[1].experts.w[i])


@pytest.mark.parametrize("optimizer", ["adamw", "sgd with momentum", "float32 masters"])
def test_a_live_model_and_its_optimizer_take_a_set_in_place(
    tmp_path: Path, make_trainer: Any, open_session: Any, same: Same, optimizer: str
) -> None:
    trainer = make_trainer(optimizer, dtype=torch.bfloat16)
    session = open_session(trainer, FakeDaemon(tmp_path / "daemon"), store_compute_weights=False)
    trainer.train(2)
    session.save(2).protected.result(WAIT_S)
    persist(tmp_path / "daemon", tmp_path / "tier", 1, Generation(1, 2))
    other = make_trainer(optimizer, seed=7, dtype=torch.bfloat16)
    reader = load_into(other.model, other.optimizer, str(tmp_path / "tier"), job=JOB)
    other.scheduler.load_state_dict(reader.extras()["stateful"]["scheduler"])
    same(other.state(), trainer.state())


def test_a_model_that_is_not_the_sets_is_refused(stored: Path, trainer: Any) -> None:
    trainer.model.register_parameter("more", torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(LayoutMismatchError, match="the snapshot lacks more"):
        load_into(trainer.model, trainer.optimizer, str(stored), job=JOB)


def test_states_that_are_one_ranks_alone_are_named_after_it_and_not_guessed(
    tmp_path: Path, trainer: Any
) -> None:
    session = holdfast.init(
        model=trainer.model,
        optimizer=trainer.optimizer,
        private=["head.bias:exp_avg"],
        daemon=FakeDaemon(tmp_path / "daemon"),
    )
    trainer.train()
    with session:
        session.save(1).protected.result(WAIT_S)
    persist(tmp_path / "daemon", tmp_path / "tier", 1, Generation(1, 1))
    state = {"rank-00000/head.bias:exp_avg": torch.zeros(16)}
    state_dict_loader.load(state, storage_reader=HoldfastReader(str(tmp_path / "tier"), job=JOB))
    expected = trainer.optimizer.state[trainer.model.head.bias]["exp_avg"]
    assert torch.equal(state["rank-00000/head.bias:exp_avg"], expected)
    with pytest.raises(LayoutMismatchError, match="belongs to one rank"):
        load_into(trainer.model, trainer.optimizer, str(tmp_path / "tier"), job=JOB)
