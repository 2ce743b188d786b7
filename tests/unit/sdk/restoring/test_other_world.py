"""Ranks go on from what another number of ranks, or ranks in another order, captured."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from stored import JOB, persist
from worlds import OPTIMIZERS, WAIT_S, Net, Ranks, State, assert_restored, whole_state

from holdfast._capture.window_records import WindowRecord, decode_record, encode_record
from holdfast._daemon.client import OnProgress, RestoreDecision, RestoreRequest
from holdfast._restoring.other_world import OtherWorld, SnapshotOffer
from holdfast._state.capture import LiveState
from holdfast.dcp import load_into
from holdfast.testing import FakeDaemon
from holdfast_core.errors import (
    CorruptError,
    HoldfastError,
    LayoutMismatchError,
    NoRecoveryLineError,
)
from holdfast_core.job.snapshots import Repeats, SparseWindows
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.manifests import Manifest
from holdfast_core.topology import Topology

STEP = 3
LINE = Generation(1, STEP)

WORLDS = {
    "4 to 3": (Topology(dp=4), Topology(dp=3), [[0], [2, 1], [3]]),
    "4 to 2": (Topology(dp=4), Topology(dp=2), [[3, 2], [1, 0]]),
    "2 to 3": (Topology(dp=2), Topology(dp=3), [[0], [1], []]),
    "1 to 4": (Topology(dp=1), Topology(dp=4), [[], [], [0], []]),
    "4 to 1": (Topology(dp=4), Topology(dp=1), [[0, 1, 2, 3]]),
    "3 to 3 in another order": (Topology(dp=3), Topology(dp=3), [[2], [0], [1]]),
    "offered by two ranks": (Topology(dp=2), Topology(dp=3), [[0], [1, 0], [1]]),
    "ep 2 to ep 1": (Topology(dp=4, ep=2), Topology(dp=3), [[0], [1], [2, 3]]),
    "ep 1 to ep 2": (Topology(dp=3), Topology(dp=4, ep=2), [[0], [1], [2], []]),
    "ep 4 to ep 2": (Topology(dp=4, ep=4), Topology(dp=2, ep=2), [[0, 2], [3, 1]]),
    "ep 2 in another order": (Topology(dp=4, ep=2), Topology(dp=4, ep=2), [[2], [1], [0], [3]]),
    "two stages": (Topology(dp=2, pp=2), Topology(dp=1, pp=2), [[1, 0, 2], [3]]),
}
"""Topologies of the old and the new world, and the old ranks that each new one reads."""

CASES: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "adamw"},
    "sgd": {"optimizer": "sgd"},
    "masters": {"optimizer": "masters", "dtype": torch.bfloat16},
    "foreign masters": {"optimizer": "foreign masters", "dtype": torch.bfloat16},
    "rounded copies left out": {
        "optimizer": "masters",
        "dtype": torch.bfloat16,
        "settings": {"store_compute_weights": False},
    },
    "rounded copies of foreign masters left out": {
        "optimizer": "foreign masters",
        "dtype": torch.bfloat16,
        "settings": {"store_compute_weights": False},
    },
}


@pytest.fixture(autouse=True)
def _one_thread_each() -> Iterator[None]:
    """Ranks are threads already."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def captured(directory: Path, topology: Topology, **case: Any) -> State:
    """The state that a world of this topology saved after STEP."""
    old = Ranks(directory, topology, **case)
    assert set(old.restore()) == {None}
    old.train(STEP)
    old.save(STEP)
    old.close()
    return whole_state(old.states())


def go_on(directory: Path, name: str, **more: Any) -> Ranks:
    was, now, reads = WORLDS[name]
    return Ranks(directory, now, epoch=2, captured_by=was.world_size, reads=reads, **more)


@pytest.mark.parametrize(
    ("name", "case"),
    [*((name, "adamw") for name in WORLDS)]
    + [(name, case) for name in ("4 to 3", "ep 2 to ep 1") for case in [*CASES][1:]],
)
def test_all_ranks_have_the_bytes_that_were_saved(name: str, case: str, tmp_path: Path) -> None:
    saved = captured(tmp_path, WORLDS[name][0], **CASES[case])
    new = go_on(tmp_path, name, **CASES[case])
    assert set(new.restore()) == {STEP}
    assert_restored(new, saved)
    new.close()


def test_each_rank_receives_what_it_needs_and_does_not_read_itself(tmp_path: Path) -> None:
    saved = captured(tmp_path, Topology(dp=4))
    new = go_on(tmp_path, "4 to 3")
    new.restore()
    state = sum(tensor.nbytes for tensor in saved.values())
    padding = 64 * len(saved)
    arrived = [seat.arrived for seat in new.seats]
    # Rank 1 reads two of the four snapshots, and the others one.
    assert 2 * state <= sum(arrived) <= 2 * state + 3 * padding
    assert arrived[1] == min(arrived)
    new.close()


def test_a_job_shrinks_and_grows_and_each_world_restores_its_own(tmp_path: Path) -> None:
    first = Ranks(tmp_path, Topology(dp=3))
    first.train(1)
    first.save(1)
    first.close()
    second = Ranks(tmp_path, Topology(dp=2), epoch=2, captured_by=3, reads=[[0], [1, 2]])
    assert second.restore() == [1, 1]
    second.train(2)
    second.save(2)
    second.close()
    again = Ranks(tmp_path, Topology(dp=2), epoch=3)
    assert again.restore() == [2, 2]
    for was, now in zip(second.states(), again.states(), strict=True):
        assert_same(was, now)
    again.train(3)
    again.save(3)
    again.close()
    third = Ranks(tmp_path, Topology(dp=3), epoch=4, captured_by=2, reads=[[0], [1], []])
    assert third.restore() == [3] * 3
    assert_restored(third, whole_state(again.states()))
    assert [rank.who.rank for rank in third.ranks] == [0, 1, 0]
    third.close()


@pytest.mark.parametrize(
    ("name", "whose"),
    [("4 to 3", [0, 2, 3]), ("1 to 4", [0] * 4), ("3 to 3 in another order", [0, 1, 2])],
)
def test_a_rank_takes_the_extras_of_its_old_self(
    name: str, whose: list[int], tmp_path: Path
) -> None:
    captured(tmp_path, WORLDS[name][0], optimizer="masters")
    new = go_on(tmp_path, name, optimizer="masters")
    new.restore()
    assert [rank.who.rank for rank in new.ranks] == whose
    for rank in new.ranks:  # plain values of the optimizer, of experts that the old rank lacked too
        assert {state["calls"] for state in rank.optimizer.state.values()} == {1}
    new.close()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("case", ["adamw", "rounded copies left out"])
@pytest.mark.parametrize("name", ["4 to 3", "ep 1 to ep 2"])
def test_it_is_what_loading_from_storage_gives(name: str, case: str, tmp_path: Path) -> None:
    was = WORLDS[name][0]
    captured(tmp_path, was, **CASES[case])
    persist(tmp_path, tmp_path / "tier", was.world_size, LINE)
    new = go_on(tmp_path, name, **CASES[case])
    new.restore()
    model = Net(dtype=CASES[case].get("dtype", torch.float32))
    optimizer = OPTIMIZERS[CASES[case]["optimizer"]](model.parameters())
    load_into(model, optimizer, str(tmp_path / "tier"), job=JOB)
    sources = LiveState(model, [optimizer], Topology(dp=1), 0).discover()
    loaded = {source.name: source.tensor for source in sources}
    for rank in new.ranks:
        for source in rank.live.discover():
            if not source.name.endswith("load(buffer)"):
                assert torch.equal(source.tensor, loaded[source.name]), source.name
    new.close()


# --- what is refused ------------------------------------------------------------------------------


def assert_same(was: State, now: State) -> None:
    assert was.keys() == now.keys()
    assert all(torch.equal(was[name], now[name]) for name in was)


def assert_untouched(ranks: Ranks, before: list[State]) -> None:
    for was, now in zip(before, ranks.states(), strict=True):
        assert_same(was, now)


@pytest.mark.parametrize("share", [0.0, 0.4, 0.99, "extras"])
def test_a_flipped_byte_fails_on_all_ranks_and_leaves_the_state_as_it_was(
    share: float | str, tmp_path: Path
) -> None:
    captured(tmp_path, Topology(dp=4))
    daemon = FakeDaemon(tmp_path, rank=2)
    manifest = daemon.sealed()[LINE].manifest
    at = manifest.extras_offset
    at = at + 1 if isinstance(share, str) else int(share * at)
    daemon.corrupt(LINE, at)
    new = go_on(tmp_path, "4 to 3")
    before = new.states()
    for error in new.errors():
        assert isinstance(error, CorruptError)
        assert "failed on ranks [1] of 3: rank 1: rank 2, generation 1.3: piece" in str(error)
    assert_untouched(new, before)
    new.close()


def test_a_snapshot_that_no_rank_reads_is_named(tmp_path: Path) -> None:
    captured(tmp_path, Topology(dp=4))
    new = Ranks(tmp_path, Topology(dp=2), epoch=2, captured_by=4, reads=[[0], [3]])
    for error in new.errors():
        assert isinstance(error, NoRecoveryLineError)
        assert r"snapshots of ranks [1, 2] of the 4 that captured generation 1.3" in str(error)
    new.close()


class Changing(FakeDaemon):
    """A daemon whose decisions a test changes."""

    def restore(
        self, request: RestoreRequest, timeout_s: float, on_progress: OnProgress
    ) -> RestoreDecision:
        return self.changed(super().restore(request, timeout_s, on_progress))

    def changed(self, decision: RestoreDecision) -> RestoreDecision:
        held = tuple(
            replace(one, manifest=self.manifest(one.manifest)) for one in decision.snapshots
        )
        return replace(decision, snapshots=held)

    def manifest(self, manifest: Manifest) -> Manifest:
        return manifest


class Another(Changing):
    """Rank 1's is not what rank 0 has under this name."""

    def manifest(self, manifest: Manifest) -> Manifest:
        return replace(manifest, job="another") if self.rank == 1 else manifest


class OtherSize(Changing):
    def manifest(self, manifest: Manifest) -> Manifest:
        return replace(manifest, world_size=9)


class Stray(Changing):
    def manifest(self, manifest: Manifest) -> Manifest:
        return replace(manifest, rank=7)


REFUSED: dict[str, tuple[type[Changing], type[HoldfastError], str]] = {
    "two snapshots of one rank": (
        Another,
        CorruptError,
        "ranks 0 and 1 offer different snapshots of rank 0 of 2 in generation 1.3",
    ),
    "another size": (OtherSize, CorruptError, "offers generation 1.3 of rank 0 of 9"),
    "another rank": (Stray, CorruptError, "offers generation 1.3 of rank 7 of 2"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_decisions_are_refused_in_words(what: str, tmp_path: Path) -> None:
    make_daemon, kind, words = REFUSED[what]
    captured(tmp_path, Topology(dp=2))
    new = go_on(tmp_path, "offered by two ranks", make_daemon=make_daemon)
    before = new.states()
    for error in new.errors():
        assert isinstance(error, kind)
        assert words in str(error)
    assert_untouched(new, before)
    new.close()


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (Topology(dp=1, tp=2), "restore with tp=1 and pp=1"),
        (Topology(dp=1, pp=2), "only dp and ep"),
    ],
)
def test_another_way_to_cut_layers_is_refused(now: Topology, words: str, tmp_path: Path) -> None:
    captured(tmp_path, Topology(dp=4))
    new = Ranks(tmp_path, now, epoch=2, captured_by=4, reads=[[0, 1], [2, 3]])
    for error in new.errors():
        assert isinstance(error, LayoutMismatchError)
        assert words in str(error)
    new.close()


STACK = "layers.1.experts.w"
WINDOWED = {"policy": SparseWindows(window=3, repeats=Repeats.OPTIMIZER)}


def window_captured(
    directory: Path, topology: Topology, without: Collection[int] = (), **case: Any
) -> State:
    """The state after step 4, which ends the window that a world of this topology captured.

    Args:
        without: ranks that have no gradient of `STACK` in step 3.
    """
    old = Ranks(directory, topology, settings=WINDOWED | case.pop("settings", {}), **case)
    old.restore()
    for step in range(1, 5):  # the first save is whole
        for rank in old.ranks:
            rank.train(step, STACK if step == 3 and rank.rank in without else "")
        handles = old.each(lambda rank, step=step: rank.session.save(step))  # type: ignore[misc]
        for handle in handles:
            handle.staged.result(WAIT_S)
    for handle in handles:
        handle.committed.result(WAIT_S)
    saved = whole_state(old.states())
    old.close()
    return saved


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, "adamw") for name in WORLDS]
    + [(name, case) for name in ("4 to 3", "ep 2 to ep 1") for case in ("sgd", "masters")],
)
def test_a_window_of_gradients_is_brought_to_its_last_step_by_another_world(
    name: str, case: str, tmp_path: Path
) -> None:
    saved = window_captured(tmp_path, WORLDS[name][0], **CASES[case])
    new = go_on(tmp_path, name, **CASES[case])
    assert set(new.restore()) == {4}
    assert_restored(new, saved)
    new.close()


@pytest.mark.parametrize(
    ("name", "without"),
    [("ep 2 to ep 1", range(4)), ("ep 2 in another order", [1, 3])],
)
def test_a_stack_that_had_no_gradient_in_a_step_is_left_out_of_it(
    name: str, without: Collection[int], tmp_path: Path
) -> None:
    """On all ranks, or on those that stay apart from the others. The restore compares digests."""
    window_captured(tmp_path, WORLDS[name][0], without)
    new = go_on(tmp_path, name)
    assert set(new.restore()) == {4}
    new.close()


def test_parts_of_a_stack_are_refused_of_which_only_some_had_a_gradient(tmp_path: Path) -> None:
    window_captured(tmp_path, WORLDS["ep 2 to ep 1"][0], [1, 3])
    new = go_on(tmp_path, "ep 2 to ep 1")
    before = new.states()
    for error in new.errors():
        assert isinstance(error, LayoutMismatchError)
        assert f"{STACK} had a gradient on rank 0 and none on rank 1 in step 3" in str(error)
    assert_untouched(new, before)
    new.close()


CHANGED: dict[str, tuple[Callable[[WindowRecord], WindowRecord | None], str]] = {
    "another window": (
        lambda record: msgspec.structs.replace(record, first=record.first - 1),
        "ranks 0 and 1 captured windows of other steps or units: from step 2 and from step 1",
    ),
    "other digests": (
        lambda record: msgspec.structs.replace(
            record, digests={unit: digest ^ 1 for unit, digest in record.digests.items()}
        ),
        "ranks captured different states of",
    ),
    "no window": (lambda record: None, "only ranks [0] captured the generation as a window"),
}
"""What becomes of the record of rank 1, and the words of the error."""


@pytest.mark.parametrize("what", CHANGED)
def test_ranks_that_did_not_capture_one_window_are_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, words = CHANGED[what]
    offers = OtherWorld.offers

    def changed(world: OtherWorld) -> tuple[SnapshotOffer, ...]:
        found = list(offers(world))
        for at, offer in enumerate(found):
            record = decode_record(offer.window)
            if offer.rank == 1 and record is not None:
                other = change(record)
                window = b"" if other is None else encode_record(other)
                found[at] = msgspec.structs.replace(offer, window=window)
        return tuple(found)

    window_captured(tmp_path, Topology(dp=2))
    monkeypatch.setattr(OtherWorld, "offers", changed)
    new = go_on(tmp_path, "2 to 3")
    before = new.states()
    for error in new.errors():
        assert isinstance(error, CorruptError)
        assert words in str(error)
    assert_untouched(new, before)
    new.close()


@pytest.mark.usefixtures("deterministic")
def test_a_sparse_window_is_refused(tmp_path: Path) -> None:
    """Its units are of different steps: a job may have left that policy since, and then shrunk."""
    old = Ranks(tmp_path, Topology(dp=2), settings={"policy": SparseWindows(window=2)})
    old.restore()
    for step in range(1, 4):  # the first save is whole
        old.train(step)
        handles = old.each(lambda rank, step=step: rank.session.save(step))  # type: ignore[misc]
        for handle in handles:
            handle.staged.result(WAIT_S)
    for handle in handles:
        handle.committed.result(WAIT_S)
    old.close()
    new = go_on(tmp_path, "2 to 3")
    before = new.states()
    for error in new.errors():
        assert isinstance(error, LayoutMismatchError)
        assert "generation 1.3 is a sparse window of 2 ranks, whose steps only their" in str(error)
    assert_untouched(new, before)
    new.close()


def test_a_tensor_that_the_model_no_longer_has_is_refused(tmp_path: Path) -> None:
    captured(tmp_path, Topology(dp=2))
    new = go_on(tmp_path, "2 to 3", optimizer="adamw")
    for rank in new.ranks:
        rank.model.register_module("embedding", None)
        rank.optimizer.param_groups[0]["params"].pop(0)
    for error in new.errors():
        assert isinstance(error, LayoutMismatchError)
        assert "the snapshot has embedding.weight, which the model" in str(error)
    new.close()
