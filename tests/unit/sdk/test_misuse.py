"""What a session says to arguments and tensors that it cannot use, and that it goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import holdfast
from holdfast.testing import FakeDaemon
from holdfast_core.errors import HoldfastError, InvalidJobError, StepOrderError
from holdfast_core.job.elastic import ElasticVariable

WAIT_S = 20


def error_of(handle: holdfast.SaveHandle) -> HoldfastError:
    wait([handle.committed], WAIT_S)
    assert handle.error is not None
    return handle.error


@pytest.mark.parametrize(
    ("step", "shown"),
    [
        (None, "with None;"),
        ("8", "with '8';"),
        (7.5, "with 7.5;"),
        (2**70, f"with {2**70};"),
        (2**63, f"with {2**63};"),
        (10**5000, "with an integer of 16610 bits;"),
        (-1, "with -1;"),
        ("s" * 100, "s" * 39 + ";"),
        ([1], "with a list;"),
        (torch.tensor(1.5), "with a Tensor;"),
    ],
    ids=[
        "none",
        "text",
        "fraction",
        "2**70",
        "2**63",
        "long",
        "negative",
        "long text",
        "list",
        "t",
    ],
)
def test_a_step_that_is_no_number_of_steps_is_refused_and_the_next_save_succeeds(
    step: Any, shown: str, trainer: Any, open_session: Any, daemon: FakeDaemon, caplog: Any
) -> None:
    session = open_session(trainer, daemon)
    session.save(1).committed.result(WAIT_S)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        error = error_of(session.save(step))
    assert isinstance(error, StepOrderError)
    assert shown in str(error)
    assert "pass the completed steps" in str(error)
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.exc_info for record in warned] == [None]
    assert str(error) in caplog.text
    session.save(2).committed.result(WAIT_S)


@pytest.mark.parametrize("step", [0, np.int64(3), torch.tensor(4), 2**63 - 1])
def test_whole_numbers_of_every_kind_are_steps(
    step: Any, trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    handle = open_session(trainer, daemon).save(step)
    assert handle.committed.result(WAIT_S) == int(step)
    assert type(handle.step) is int


def meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def on_xpu(tensor: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="xpu")


def sparse(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_sparse()


def freed(tensor: torch.Tensor) -> torch.Tensor:
    gone = tensor.clone()
    gone.untyped_storage().resize_(0)
    return gone


def partly_freed(tensor: torch.Tensor) -> torch.Tensor:
    gone = tensor.clone()
    gone.untyped_storage().resize_(8)
    return gone


def conjugate(tensor: torch.Tensor) -> torch.Tensor:
    return torch.complex(tensor, tensor).conj()


def negative(tensor: torch.Tensor) -> torch.Tensor:
    return conjugate(tensor).imag


BAD: dict[Callable[[torch.Tensor], torch.Tensor], str] = {
    meta: "on the meta device",
    on_xpu: "on the device xpu:0, whose memory Holdfast cannot copy",
    sparse: "of layout torch.sparse_coo; make it dense",
    freed: "was freed: its storage holds 0 bytes of 288",
    partly_freed: "was freed: its storage holds 8 bytes of 288",
    conjugate: "resolve_conj()",
    negative: "resolve_neg()",
}
HOLES: dict[str, Callable[[Any, torch.Tensor], None]] = {
    "odd.weight": lambda trainer, bad: setattr(
        trainer.model, "odd", nn.ParameterDict({"weight": nn.Parameter(bad)})
    ),
    "odd": lambda trainer, bad: trainer.model.register_buffer("odd", bad),
    "head.bias:odd": lambda trainer, bad: trainer.optimizer.state[
        trainer.model.head.bias
    ].__setitem__("odd", bad),
}


@pytest.mark.parametrize("name", HOLES)
@pytest.mark.parametrize("make", BAD, ids=lambda make: make.__name__)
def test_a_tensor_that_cannot_be_copied_is_named_and_the_session_stays_usable(
    make: Callable[[torch.Tensor], torch.Tensor],
    name: str,
    trainer: Any,
    open_session: Any,
    daemon: FakeDaemon,
) -> None:
    session = open_session(trainer, daemon)
    trainer.train()
    session.save(1).committed.result(WAIT_S)
    HOLES[name](trainer, make(torch.ones(8, 9)))
    error = error_of(session.save(2))
    assert isinstance(error, InvalidJobError)
    assert str(error).startswith(f"{name} ")
    assert BAD[make] in str(error)
    assert session.problem is None
    if "odd" in trainer.model._buffers or "odd" in trainer.model._modules:
        del trainer.model.odd
    trainer.optimizer.state[trainer.model.head.bias].pop("odd", None)
    session.save(3).committed.result(WAIT_S)


@pytest.mark.parametrize("make", [meta, freed], ids=lambda make: make.__name__)
def test_a_tensor_without_bytes_in_what_is_stateful_is_named(
    make: Callable[[torch.Tensor], torch.Tensor],
    trainer: Any,
    open_session: Any,
    daemon: FakeDaemon,
) -> None:
    trainer.scheduler.odd = make(torch.ones(8, 9))
    error = error_of(open_session(trainer, daemon).save(1))
    assert isinstance(error, holdfast.UnsupportedValueError)
    assert "extras['stateful']['scheduler']['odd'] " in str(error)


def test_a_parameter_that_is_freed_after_a_save_is_named_at_the_next(
    trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    session = open_session(trainer, daemon)
    session.save(1).committed.result(WAIT_S)
    weight = trainer.model.head.weight
    nbytes = weight.untyped_storage().nbytes()
    weight.untyped_storage().resize_(0)
    assert "head.weight was freed" in str(error_of(session.save(2)))
    weight.untyped_storage().resize_(nbytes)
    session.save(3).committed.result(WAIT_S)


def test_a_layer_without_a_shape_is_named(
    trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    trainer.model.odd = nn.LazyLinear(3)
    session = open_session(trainer, daemon)
    assert "odd.weight has no shape yet" in str(error_of(session.save(1)))


@pytest.mark.parametrize(
    "optimizer",
    [
        None,
        object(),
        SimpleNamespace(param_groups=[{"lr": 1.0}], state={}),
        SimpleNamespace(param_groups=[]),
    ],
    ids=["none", "object", "groups without parameters", "no state"],
)
def test_an_optimizer_without_groups_of_parameters_is_refused_at_init(
    optimizer: Any, trainer: Any, daemon: FakeDaemon
) -> None:
    kind = type(optimizer).__qualname__
    with pytest.raises(InvalidJobError, match=f"optimizer 1 is a {kind} without"):
        holdfast.init(model=trainer.model, optimizer=[trainer.optimizer, optimizer], daemon=daemon)


def test_an_optimizer_with_state_of_no_parameter_is_told_where_to_keep_it(
    trainer: Any, daemon: FakeDaemon
) -> None:
    session = holdfast.init(model=trainer.model, optimizer=trainer.optimizer, daemon=daemon)
    session.restore()
    trainer.optimizer.state[7] = 1
    error = error_of(session.save(1))
    assert "holds state under 7, which is no parameter: keep" in str(error)
    session.close()


@pytest.mark.parametrize(
    ("stateful", "shown"),
    [
        ({"seeds": torch.Generator()}, r"stateful\['seeds'\] is a Generator without `state_dict`"),
        ({"scheduler": None}, r"stateful\['scheduler'\] is a NoneType without `state_dict`"),
        ([torch.Generator()], "stateful is a list: give a dict"),
    ],
    ids=["generator", "none", "list"],
)
def test_what_has_no_state_to_capture_is_refused_at_init(
    stateful: Any, shown: str, trainer: Any, daemon: FakeDaemon
) -> None:
    with pytest.raises(InvalidJobError, match=shown):
        holdfast.init(
            model=trainer.model, optimizer=trainer.optimizer, stateful=stateful, daemon=daemon
        )


def test_a_job_that_seats_experts_needs_layers_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    elastic = ElasticVariable(seats_per_rank=4, node_mtbf_days=100.0)
    monkeypatch.setenv("HOLDFAST_ELASTIC", msgspec.json.encode(elastic).decode())
    model = nn.Linear(2, 2)
    world = holdfast.elastic.init("gloo")
    try:
        with pytest.raises(InvalidJobError, match="of the job seats experts"):
            holdfast.init(model=model, optimizer=torch.optim.SGD(model.parameters()), world=world)
    finally:
        world.close()


def test_saves_and_restores_within_inference_mode_are_as_any_others(
    make_trainer: Any, open_session: Any, daemon: FakeDaemon, tmp_path: Path, same: Any
) -> None:
    first, second = make_trainer(), make_trainer(seed=1)
    session = open_session(first, daemon)
    for step in (1, 2):
        first.train()
        with torch.inference_mode():
            session.save(step).committed.result(WAIT_S)
    restored = open_session(second, FakeDaemon(tmp_path, epoch=2))
    with torch.inference_mode():
        assert restored.restore() == 2
    session.close()
    same(second.state(), first.state())
    second.train()
    restored.save(3).committed.result(WAIT_S)
