"""Ranks go on from snapshots that left experts out and that another number of ranks captured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stored import JOB, persist
from worlds import EXPERTS, OPTIMIZERS, Net, Rank, Ranks, State, assert_restored, whole_state

from holdfast._daemon.client import OnProgress, RestoreDecision, RestoreRequest
from holdfast._state.capture import LiveState
from holdfast.dcp import load_into
from holdfast.testing import FakeDaemon
from holdfast_core.errors import CorruptError
from holdfast_core.experts.ledger import ExpertLedger
from holdfast_core.job.snapshots import ExpertChoice, LossyPolicy, PartialExperts, Selective
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.units import UnitKey, UnitKind
from holdfast_core.topology import Topology

LAST = 4
LINE = Generation(1, LAST)
TOKENS = (1, 20, 300, 4000)
"""Tokens of each expert in a step of one rank."""

IN_TURN = PartialExperts(experts_per_layer=1, loss_limit=1)
POLICIES: dict[str, LossyPolicy] = {
    "turn": IN_TURN,
    "load": PartialExperts(experts_per_layer=1, selection=ExpertChoice.LOAD_AWARE, loss_limit=1),
    "selective": Selective(experts=2, loss_limit=1),
}

WORLDS = {
    "4 to 3": (Topology(dp=4), Topology(dp=3), [[0], [2, 1], [3]]),
    "4 to 2": (Topology(dp=4), Topology(dp=2), [[3, 2], [1, 0]]),
    "2 to 3": (Topology(dp=2), Topology(dp=3), [[], [1, 0], [1]]),
    "ep 2 to ep 1": (Topology(dp=4, ep=2), Topology(dp=3), [[0], [1], [2, 3]]),
    "ep 1 to ep 2": (Topology(dp=3), Topology(dp=4, ep=2), [[0], [1], [2], []]),
}
"""Topologies of the old and the new world, and the old ranks that each new one reads."""


@pytest.fixture(autouse=True)
def _one_thread_each() -> Iterator[None]:
    """Ranks are threads already."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def save(ranks: Ranks, step: int) -> State:
    """Train a step, route its tokens, and save it; return the state after it."""
    ranks.train(step)
    for rank in ranks.ranks:
        for layer in layers_of(rank):
            rank.session.count_tokens(layer, list(TOKENS))
    ranks.save(step)
    return whole_state(ranks.states())


def layers_of(rank: Rank) -> list[int]:
    """Layers that the rank's sources have experts of."""
    units = {source.unit for source in rank.live.sources()}
    return sorted({u.layer for u in units if u.kind is UnitKind.EXPERT and u.layer is not None})


def ledger_of(rank: Rank) -> ExpertLedger:
    found: ExpertLedger = rank.session._saver.strategy._ledger  # type: ignore[attr-defined]
    return found


def captured(directory: Path, topology: Topology, policy: LossyPolicy) -> tuple[State, set[int]]:
    """The state that the line of this world holds, composed of what each step had left, and the
    steps that its experts are of."""
    old = Ranks(directory, topology, policy=policy)
    old.restore()
    states = {step: save(old, step) for step in range(1, LAST + 1)}
    versions: dict[UnitKey, int] = {}
    for rank in range(topology.world_size):
        snapshot = FakeDaemon(directory, rank=rank).sealed()[LINE]
        for one in snapshot.manifest.experts:
            unit = UnitKey.parse(one.unit)
            versions[unit] = max(one.generation.step, versions.get(unit, 0))
    # The counter of a stack's steps goes with the first of its experts on the lowest rank.
    unit_of = {
        f"{rank.stage}{source.name}": source.unit
        for rank in reversed(old.ranks)
        for source in rank.live.discover()
    }
    old.close()
    found = {
        name: states[versions.get(unit_of[name], LAST)][name] if name in unit_of else tensor
        for name, tensor in states[LAST].items()
    }
    return found, set(versions.values())


def go_on(directory: Path, name: str, policy: LossyPolicy, **more: Any) -> Ranks:
    was, now, reads = WORLDS[name]
    return Ranks(
        directory,
        now,
        epoch=2,
        captured_by=was.world_size,
        reads=reads,
        policy=policy,
        **more,
    )


@pytest.mark.parametrize(
    ("name", "policy"),
    [*((name, "turn") for name in WORLDS), ("4 to 3", "load"), ("ep 2 to ep 1", "selective")],
)
def test_each_expert_is_as_it_was_captured(name: str, policy: str, tmp_path: Path) -> None:
    whole, versions = captured(tmp_path, WORLDS[name][0], POLICIES[policy])
    assert min(versions) < LAST in versions
    new = go_on(tmp_path, name, POLICIES[policy])
    assert set(new.restore()) == {LAST}
    assert_restored(new, whole)
    new.close()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["ep 1 to ep 2"])
def test_it_is_what_loading_from_storage_gives(name: str, tmp_path: Path) -> None:
    was = WORLDS[name][0]
    captured(tmp_path, was, IN_TURN)
    persist(tmp_path, tmp_path / "tier", was.world_size, LINE)
    new = go_on(tmp_path, name, IN_TURN)
    new.restore()
    model = Net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    load_into(model, optimizer, str(tmp_path / "tier"), job=JOB)
    sources = LiveState(model, [optimizer], Topology(dp=1), 0).discover()
    loaded = {source.name: source.tensor for source in sources}
    for rank in new.ranks:
        for source in rank.live.discover():
            if not source.name.endswith("load(buffer)"):
                assert torch.equal(source.tensor, loaded[source.name]), source.name
    new.close()


@pytest.mark.parametrize("policy", ["turn", "selective"])
def test_the_first_snapshot_of_the_new_world_has_every_expert(policy: str, tmp_path: Path) -> None:
    captured(tmp_path, Topology(dp=4), POLICIES[policy])
    new = go_on(tmp_path, "4 to 3", POLICIES[policy])
    new.restore()
    whole = save(new, LAST + 1)
    first = [daemon.sealed()[Generation(2, LAST + 1)] for daemon in new.daemons]
    assert all(set(one.piece_map.places) <= {one.piece_map.slot} for one in first)
    new.close()
    again = Ranks(tmp_path, Topology(dp=2), epoch=3, captured_by=3, reads=[[0], [1, 2]])
    again.restore()
    assert_restored(again, whole)
    again.close()


def test_later_snapshots_leave_experts_out_again(tmp_path: Path) -> None:
    captured(tmp_path, Topology(dp=4), IN_TURN)
    new = go_on(tmp_path, "4 to 3", IN_TURN)
    new.restore()
    states = {step: save(new, step) for step in (LAST + 1, LAST + 2)}
    old = {
        one.unit
        for one in new.daemons[0].sealed()[Generation(2, LAST + 2)].manifest.experts
        if one.generation.step == LAST + 1
    }
    assert len(old) == 2 * (EXPERTS - 1)
    new.close()
    again = Ranks(tmp_path, Topology(dp=3), epoch=3, policy=IN_TURN)
    assert set(again.restore()) == {LAST + 2}
    found = whole_state(again.states())
    for name, tensor in found.items():
        assert torch.equal(tensor, states[LAST + 1][name]) or torch.equal(
            tensor, states[LAST + 2][name]
        ), name
    again.close()


# --- tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["4 to 2", "2 to 3"])
def test_no_token_is_lost_from_the_count_or_counted_twice(name: str, tmp_path: Path) -> None:
    was = WORLDS[name][0]
    captured(tmp_path, was, IN_TURN)
    rows = FakeDaemon(tmp_path).sealed()[LINE].manifest.experts
    routed = LAST * was.dp * sum(TOKENS)  # of each layer
    kept = {one.unit: was.dp * TOKENS[UnitKey.parse(one.unit).expert or 0] for one in rows}
    lost = sum((LAST - one.generation.step) * kept[one.unit] for one in rows)
    assert lost > 0
    new = go_on(tmp_path, name, IN_TURN)
    new.restore()
    ledgers = [ledger_of(rank) for rank in new.ranks]
    assert {one.snapshots for one in ledgers} == {LAST}
    for layer in (0, 1):
        assert sum(one.assignments[layer] for one in ledgers) == routed
    for one in rows:
        unit = UnitKey.parse(one.unit)
        restored = sum(ledger.tokens[unit] for ledger in ledgers)
        assert restored == kept[one.unit] * one.generation.step
    losses = [rank.session.counters.loss for rank in new.ranks]
    (newest,) = {loss.report.newest for loss in losses if loss.report is not None}
    assert newest is not None
    assert (newest.epoch, newest.step, newest.lost_tokens) == (2, LAST, lost)
    new.close()


@pytest.mark.parametrize("name", ["4 to 3", "2 to 3"])
def test_the_fraction_of_lost_tokens_is_that_of_all_ranks(name: str, tmp_path: Path) -> None:
    was, now, _ = WORLDS[name]
    captured(tmp_path, was, IN_TURN)
    new = go_on(tmp_path, name, IN_TURN)
    new.restore()
    losses = [rank.session.counters.loss for rank in new.ranks]
    (newest,) = {loss.report.newest for loss in losses if loss.report is not None}
    assert newest is not None
    assert {loss.lost for loss in losses} == {newest.total_plt}  # before any save
    save(new, LAST + 1)
    save(new, LAST + 2)
    routed = 2 * sum(TOKENS) * (LAST * was.dp + 2 * now.dp)  # the figure is as of the last commit
    for rank in new.ranks:
        rank.session.prepare()
        assert rank.session.counters.loss.lost == pytest.approx(newest.total_tokens / routed)
    new.close()


def test_k_grows_alike_on_ranks_that_were_there_and_on_those_that_were_not(tmp_path: Path) -> None:
    strict = PartialExperts(experts_per_layer=1, loss_limit=0.0)
    captured(tmp_path, Topology(dp=2), strict)
    new = go_on(tmp_path, "2 to 3", strict)
    new.restore()
    assert {rank.session.counters.loss.k for rank in new.ranks} == {2}
    save(new, LAST + 1)
    save(new, LAST + 2)
    newest = new.daemons[0].sealed()[Generation(2, LAST + 2)].manifest.experts
    fresh = [one for one in newest if one.generation.step == LAST + 2]
    assert len(fresh) == 2 * 2
    new.close()


def test_what_experts_owe_goes_to_one_rank_of_those_that_process_them(tmp_path: Path) -> None:
    was = Topology(dp=4)
    captured(tmp_path, was, IN_TURN)
    new = go_on(tmp_path, "4 to 3", IN_TURN)
    new.restore()
    assert {rank.session.capacity_room for rank in new.ranks} == {1.1}
    owed = [rank.session._capacity.tracker.owed for rank in new.ranks]
    old = [
        UnitKey.parse(one.unit)
        for one in FakeDaemon(tmp_path).sealed()[LINE].manifest.experts
        if one.generation.step == 1
    ]
    assert old
    for unit in old:
        each = 11 * (LAST - 1) * TOKENS[unit.expert or 0]
        assert [one[unit] for one in owed] == [2 * each, each, each]  # ranks 0 and 3, 1, 2
    new.close()


# --- what is refused ------------------------------------------------------------------------------


class Torn(FakeDaemon):
    """Names another version of an expert than the rank that has its other part."""

    def restore(
        self, request: RestoreRequest, timeout_s: float, on_progress: OnProgress
    ) -> RestoreDecision:
        decision = super().restore(request, timeout_s, on_progress)
        held = []
        for one in decision.snapshots:
            manifest = one.manifest
            of_expert = {e.unit: e for e in manifest.experts}
            unit = "layer0/expert0"  # of which each rank has a private buffer
            of_expert[unit] = replace(of_expert[unit], generation=Generation(1, self.rank + 1))
            held.append(replace(one, manifest=replace(manifest, experts=tuple(of_expert.values()))))
        return replace(decision, snapshots=tuple(held))


def test_parts_of_an_expert_of_two_saves_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    captured(tmp_path, Topology(dp=3), IN_TURN)
    new = go_on(tmp_path, "ep 1 to ep 2", IN_TURN, make_daemon=Torn)
    before = new.states()
    for error in new.errors():
        assert isinstance(error, CorruptError)
        assert "parts of layer0/expert0 of different generations" in str(error)
    for was, now in zip(before, new.states(), strict=True):
        assert all(torch.equal(was[name], now[name]) for name in was)
    new.close()
