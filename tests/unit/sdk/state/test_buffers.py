"""Buffers that appear, vanish or change their form while the program trains come back as they were,
or the first save that could not come back is refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast._restoring.fit import Wanted, make_room
from holdfast._state.buffers import ABSENT, NONE
from holdfast._state.capture import LiveState
from holdfast._state.collect import collect
from holdfast._state.extras import dtype_name
from holdfast.testing import FakeDaemon
from holdfast_core.errors import InvalidJobError, LayoutMismatchError
from holdfast_core.topology import Topology

WAIT_S = 20

FORMS: dict[str, Callable[[], torch.Tensor | None]] = {
    NONE: lambda: None,
    "float32[0]": lambda: torch.empty(0),
    "float32[3]": lambda: torch.rand(3),
    "float32[2, 2]": lambda: torch.rand(2, 2),
    "int64[3]": lambda: torch.randint(9, (3,)),
}


class Observer(nn.Module):
    """A layer, and a buffer `seen` of any form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen: torch.Tensor | None = None
        self.put(form)

    def put(self, form: str) -> None:
        """Give the buffer a form, and new content."""
        self._buffers.pop("seen", None)
        if form == ABSENT:
            self.seen = None  # an attribute, until it is a buffer
        else:
            vars(self).pop("seen", None)
            self.register_buffer("seen", FORMS[form]())

    def form(self) -> tuple[str, Any]:
        """Form and content of the buffer."""
        if "seen" not in self._buffers:
            return ABSENT, None
        seen = self._buffers["seen"]
        if seen is None:
            return NONE, None
        return f"{str(seen.dtype)[6:]}{list(seen.shape)}", seen.tolist()


def trainer_of(make_trainer: Any, model: nn.Module) -> Any:
    trainer = make_trainer()
    trainer.model = model
    trainer.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return trainer


ALL = [ABSENT, *FORMS]


@pytest.mark.parametrize(("begun", "saved"), list(product(ALL, ALL)))
def test_a_buffer_comes_back_in_the_form_of_the_snapshot_when_the_program_starts_again(
    begun: str, saved: str, make_trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    old = trainer_of(make_trainer, Observer(begun))
    session = open_session(old, FakeDaemon(tmp_path))
    assert session.restore() is None
    session.save(1).committed.result(WAIT_S)
    old.model.put(saved)
    session.save(2).committed.result(WAIT_S)
    session.close()
    new = trainer_of(make_trainer, Observer(begun))
    assert open_session(new, FakeDaemon(tmp_path, epoch=2)).restore() == 2
    if (begun, saved) not in ((ABSENT, NONE), (NONE, ABSENT)):  # no tensor either way
        assert new.model.form() == old.model.form()


@pytest.mark.parametrize(("saved", "later"), list(product(ALL, ALL)))
def test_it_has_that_form_again_where_a_process_that_stays_has_changed_it_since(
    saved: str, later: str
) -> None:
    model = Observer("float32[0]")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = LiveState(model, [optimizer], Topology(dp=1), 0)
    live.begun.begin()
    model.put(saved)
    wanted = {
        source.name: Wanted(
            tensor=source.name,
            dtype=dtype_name(source.tensor.dtype),
            shape=tuple(source.tensor.shape),
            ranges=[],
        )
        for source in live.sources()
    }
    extras, form = collect(live, {}, 1), model.form()[0]
    model.put(later)
    live.begun.begin()  # the second restore changes nothing in what the program begins with
    make_room(live, wanted, extras)
    assert model.form()[0] == form or {saved, later} == {ABSENT, NONE}


def test_it_comes_back_a_second_time_after_a_restart(
    make_trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    forms: list[tuple[str, Any]] = []
    for epoch, form in enumerate(["float32[3]", "float32[2, 2]", "int64[3]"], start=1):
        trainer = trainer_of(make_trainer, Observer("float32[0]"))
        session = open_session(trainer, FakeDaemon(tmp_path, epoch=epoch))
        assert session.restore() == (epoch - 1 or None)
        assert epoch == 1 or trainer.model.form() == forms[-1]
        trainer.model.put(form)
        session.save(epoch).committed.result(WAIT_S)
        forms.append(trainer.model.form())
        session.close()


def test_what_two_modules_share_is_shared_when_it_comes_back(
    make_trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    def shared() -> Any:
        model: Any = nn.ModuleList([Observer("float32[0]"), Observer(ABSENT)])
        model[1].put("float32[0]")
        model[1]._buffers["seen"] = model[0]._buffers["seen"]
        return trainer_of(make_trainer, model)

    old, new = shared(), shared()
    session = open_session(old, FakeDaemon(tmp_path))
    assert session.restore() is None
    old.model[0].seen.data = torch.rand(3)
    session.save(1).committed.result(WAIT_S)
    session.close()
    assert open_session(new, FakeDaemon(tmp_path, epoch=2)).restore() == 1
    assert new.model[1].seen is new.model[0].seen
    assert torch.equal(new.model[1].seen, old.model[0].seen)


def test_a_program_that_begins_with_another_buffer_is_another_program(
    make_trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    old = trainer_of(make_trainer, Observer("float32[3]"))
    session = open_session(old, FakeDaemon(tmp_path))
    session.save(1).committed.result(WAIT_S)
    session.close()
    for form, why in [
        ("float32[2, 2]", r"seen\(buffer\) is float32\[2, 2\], in the snapshot it is float32\[3\]"),
        (ABSENT, r"seen\(buffer\) is absent, in the snapshot it is float32\[3\]"),
    ]:
        other = trainer_of(make_trainer, Observer(form))
        with pytest.raises(LayoutMismatchError, match=why):
            open_session(other, FakeDaemon(tmp_path, epoch=2)).restore()


def test_a_buffer_that_the_snapshot_never_had_is_an_error(
    make_trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    session = open_session(trainer_of(make_trainer, Observer(ABSENT)), FakeDaemon(tmp_path))
    session.save(1).committed.result(WAIT_S)
    session.close()
    other = trainer_of(make_trainer, Observer("float32[3]"))
    with pytest.raises(LayoutMismatchError, match=r"the snapshot lacks seen\(buffer\)"):
        open_session(other, FakeDaemon(tmp_path, epoch=2)).restore()


def test_a_buffer_of_a_module_that_is_added_later_is_refused_by_the_save(
    make_trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    trainer = trainer_of(make_trainer, nn.Sequential(nn.Linear(2, 2)))
    session = open_session(trainer, FakeDaemon(tmp_path))
    assert session.restore() is None
    trainer.model.append(nn.BatchNorm1d(2, affine=False))
    for step in (1, 2):  # refused again, not saved without it
        error = session.save(step).committed.exception(WAIT_S)
        assert isinstance(error, InvalidJobError)
        assert "1.running_mean is a buffer of a module that was not in the model" in str(error)


def test_a_buffer_without_a_shape_at_first_is_refused_by_the_save(
    make_trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False))
    trainer = trainer_of(make_trainer, model)
    session = open_session(trainer, FakeDaemon(tmp_path))
    model(torch.rand(4, 2))
    error = session.save(1).committed.exception(WAIT_S)
    assert isinstance(error, InvalidJobError)
    assert "run a forward pass before holdfast.init" in str(error)


class HalfExtra(nn.Linear):
    """A module whose extra state can be read and not written."""

    def get_extra_state(self) -> Any:
        return {"calls": 1}


def test_extra_state_that_no_restore_could_load_is_refused_by_the_save(
    make_trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    trainer = trainer_of(make_trainer, nn.Sequential(HalfExtra(2, 2)))
    session = open_session(trainer, FakeDaemon(tmp_path))
    error = session.save(1).committed.exception(WAIT_S)
    assert isinstance(error, InvalidJobError)
    assert "0 is a HalfExtra with get_extra_state and without set_extra_state" in str(error)
