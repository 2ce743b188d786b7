"""Compute weights that snapshots do not hold, because their masters have the same information."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.overrides import TorchFunctionMode

from holdfast._agree.plan import find_agreed_casts
from holdfast._copying.devices import Fence
from holdfast._copying.engine import CopyEngine
from holdfast._save.casts import Casts
from holdfast._state.capture import TensorSource
from holdfast.testing import FakeDaemon
from holdfast_core.errors import SnapshotSkippedError
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import Layout, TensorRole, decode_layout, encode_layout
from holdfast_core.snapshots.units import UnitKey, UnitKind

WAIT_S = 60

Same = Callable[[dict[str, Any], dict[str, Any]], None]


def mixed(make_trainer: Any, seed: int = 0) -> Any:
    return make_trainer("float32 masters", seed=seed, dtype=torch.bfloat16)


def layout_in(daemon: FakeDaemon, step: int) -> Layout:
    home = daemon.sealed()[Generation(1, step)].home
    return decode_layout((home / "layout.json").read_bytes())


def restored(make_trainer: Any, open_session: Any, directory: Path) -> Any:
    other = mixed(make_trainer, seed=9)
    session = open_session(other, FakeDaemon(directory, epoch=2))
    assert session.restore() is not None
    session.close()
    return other


def test_weights_that_follow_from_masters_take_no_room(
    make_trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    trainer, daemon = mixed(make_trainer), FakeDaemon(tmp_path)
    session = open_session(trainer, daemon, store_compute_weights=False)
    trainer.train()
    session.save(1).committed.result(WAIT_S)
    layout = layout_in(daemon, 1)
    weights = {f"{name}" for name, _ in trainer.model.named_parameters()}
    assert {cast.tensor.partition("[")[0] for cast in layout.casts} == weights
    assert not any(entry.role is TensorRole.COMPUTE for entry in layout.entries)
    assert decode_layout(encode_layout(layout)) == layout
    trainer.train()
    session.save(2).committed.result(WAIT_S)
    assert layout_in(daemon, 2) == layout


def test_they_are_stored_unless_the_job_leaves_them_out(
    make_trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    trainer, daemon = mixed(make_trainer), FakeDaemon(tmp_path)
    session = open_session(trainer, daemon)
    trainer.train()
    session.save(1).committed.result(WAIT_S)
    assert layout_in(daemon, 1).casts == ()


@pytest.mark.parametrize("bits", [1, 0x8000], ids=["one bit", "a sign"])
def test_weights_that_were_changed_beside_their_master_are_never_lost(
    make_trainer: Any, open_session: Any, tmp_path: Path, same: Same, bits: int
) -> None:
    trainer, daemon = mixed(make_trainer), FakeDaemon(tmp_path)
    session = open_session(trainer, daemon, store_compute_weights=False)
    trainer.train()
    session.save(1).committed.result(WAIT_S)
    trainer.train()
    with torch.no_grad():
        trainer.model.head.weight.view(torch.int16)[1, 1] ^= bits - (bits >> 15 << 16)
    handle = session.save(2)
    wait([handle.committed], WAIT_S)
    assert isinstance(handle.error, SnapshotSkippedError)
    assert "head.weight is no longer its float32 master, rounded" in str(handle.error)
    assert Generation(1, 2) not in daemon.sealed()
    session.save(3).committed.result(WAIT_S)
    assert [e.tensor for e in layout_in(daemon, 3).entries if e.role is TensorRole.COMPUTE] == [
        "head.weight"
    ]
    session.close()
    same(restored(make_trainer, open_session, tmp_path).state(), trainer.state())


def test_weights_that_differ_from_the_start_are_stored(
    make_trainer: Any, open_session: Any, tmp_path: Path, same: Same
) -> None:
    trainer, daemon = mixed(make_trainer), FakeDaemon(tmp_path)
    session = open_session(trainer, daemon, store_compute_weights=False)
    trainer.train()
    with torch.no_grad():
        trainer.model.layers[0].experts.w[1].mul_(2)
    session.save(1).committed.result(WAIT_S)
    stored = [e.tensor for e in layout_in(daemon, 1).entries if e.role is TensorRole.COMPUTE]
    assert stored == ["layers.0.experts.w[1]"]
    session.close()
    same(restored(make_trainer, open_session, tmp_path).state(), trainer.state())


def test_a_nan_is_stored_with_its_own_bits(
    make_trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    trainer = mixed(make_trainer)
    session = open_session(trainer, FakeDaemon(tmp_path), store_compute_weights=False)
    trainer.train()
    head = trainer.model.head.weight
    with torch.no_grad():
        trainer.optimizer.state[head]["master"][0, 0] = float("nan")
        head[0, 0] = float("nan")
        head.view(torch.int16)[0, 0] |= 5
    session.save(1).committed.result(WAIT_S)
    session.close()
    other = restored(make_trainer, open_session, tmp_path)
    assert torch.equal(other.model.head.weight.view(torch.int16), head.view(torch.int16))


class Inline:
    """The part of a copy engine that compares."""

    def each(self, work: Callable[[int], None], count: int, fence: Fence) -> None:
        for index in range(count):
            work(index)


class Rounded(TorchFunctionMode):
    """Counts the elements that are rounded, to be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to:
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))


def pair(name: str, elements: int) -> list[TensorSource]:
    """A 16-bit parameter and its master."""
    master = torch.randn(elements)
    unit, weights = UnitKey(0, UnitKind.DENSE), master.bfloat16()
    return [
        TensorSource(unit=unit, name=n, role=role, tensor=tensor, private=False)
        for n, role, tensor in (
            (name, TensorRole.COMPUTE, weights),
            (f"{name}:master", TensorRole.MASTER, master),
        )
    ]


def test_after_a_change_of_form_only_weights_in_another_place_are_compared() -> None:
    casts = Casts(cast(CopyEngine, Inline()), enabled=True)
    first, second, third = pair("a", 1000), pair("b", 200), pair("c", 30)
    with Rounded() as rounded:
        casts.find([*first, *second], None)
        assert rounded.elements == 1200
        casts.find([*first, *second, *third], None)
        assert rounded.elements == 1230
        second = pair("b", 200)
        second[0].tensor[7] += 1
        casts.find([*first, *second, *third], None)
        assert rounded.elements == 1430
    assert casts.masters == {"a": "a:master", "c": "c:master"}


def test_a_weight_is_left_out_only_where_all_that_hold_it_agree() -> None:
    tables = {0: {"a", "b"}, 1: {"a", "b"}, 2: {"c"}}
    claims = {0: {"a": "a:m", "b": "b:m"}, 1: {"a": "a:m"}, 2: {"c": "c:m"}}
    assert find_agreed_casts(claims, tables) == {"a": "a:m", "c": "c:m"}
    claims[1]["b"] = "b/master"
    assert "b" not in find_agreed_casts(claims, tables)
