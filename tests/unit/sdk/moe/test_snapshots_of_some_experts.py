"""Snapshots whose saves hold some uneven copies of experts, when these change ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense_moe import DIM, HIDDEN, join
from ports import reserve_port
from ranks import run_ranks
from stored import JOB, persist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader

import holdfast
from holdfast import elastic, moe
from holdfast._agree.exchange import make_exchange
from holdfast._capture.partial_state import START, PartialState
from holdfast._moe.reseating import SeatChanges
from holdfast._session.protected import ProtectedSession
from holdfast.dcp import HoldfastReader
from holdfast.export import main
from holdfast.testing import FakeDaemon
from holdfast_core.elastic_experts.reports import PlanReport
from holdfast_core.errors import SnapshotSkippedError
from holdfast_core.job.snapshots import (
    Full,
    PartialExperts,
    Policy,
    Repeats,
    Selective,
    SparseWindows,
)
from holdfast_core.protection.standing import StandingAction, StandingVerdict
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.units import UnitKey

WAIT_S = 60
RANKS, LAYERS, EXPERTS, SEATS = 3, 2, 4, 3
EVEN = [[1] * EXPERTS] * LAYERS
SKEWED = [[1, 1, 9, 1], [9, 1, 1, 1]]
OTHERWISE = [[9, 1, 1, 1], [1, 9, 1, 1]]
NEW = 1
"""Rank whose process is lost."""

POLICIES: dict[str, Policy] = {
    "full": Full(),
    "turn": PartialExperts(experts_per_layer=1, loss_limit=1),
    "selective": Selective(experts=2, loss_limit=1),
}
WINDOWS = SparseWindows(window=3, repeats=Repeats.OPTIMIZER)
State = Mapping[str, torch.Tensor]


class Trainer:
    """A model of two layers, its optimizer and its session."""

    def __init__(
        self,
        directory: str,
        world: elastic.World,
        group: elastic.WorldGroup,
        policy: Policy,
        *,
        loads: Any = EVEN,
        epoch: int = 1,
    ) -> None:
        self.rank = world.rank
        plan = moe.plan_experts(loads, moe.ExpertRoom(nodes=RANKS, rank_seats=SEATS))
        torch.manual_seed(5)
        self.layers: Any = nn.ModuleList(
            moe.MoELayer(DIM, HIDDEN, plan, at, group) for at in range(LAYERS)
        )
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), lr=1e-2)
        self.gradients = moe.SummedGradients(self.layers, group)
        self.policy = policy
        self.begin(directory, epoch)

    def begin(self, directory: str, epoch: int) -> None:
        """Make a session, as each world has its own."""
        self.daemon = FakeDaemon(directory, rank=self.rank, world_size=RANKS, epoch=epoch)
        session = holdfast.init(
            model=self.layers,
            optimizer=self.optimizer,
            daemon=self.daemon,
            settings=holdfast.Settings(
                start_wait_s=WAIT_S, exchange_timeout_s=WAIT_S, policy=self.policy
            ),
        )
        assert isinstance(session, ProtectedSession)
        self.session = session

    def step(self, step: int) -> dict[str, torch.Tensor]:
        """Train and save a step; return the state of all ranks after it."""
        self.train(step).committed.result(WAIT_S)
        return self.state()

    def train(self, step: int) -> holdfast.SaveHandle:
        """Train a step, and begin to save it."""
        x = torch.randn(6 + self.rank, DIM, generator=torch.Generator().manual_seed(step))
        self.optimizer.zero_grad()
        for layer in self.layers:
            x = x + layer(x)[0]
        (x.square().sum() / 21).backward()
        self.gradients.sum()
        self.optimizer.step()
        return self.session.save(step)

    def state(self) -> dict[str, torch.Tensor]:
        """The state of all ranks, by name."""
        own = {one.name: one.tensor.clone() for one in self.session.live.sources()}
        found: dict[str, torch.Tensor] = {}
        for of_rank in every(own):
            found.update(of_rank)
        return found

    def versions(self, generation: Generation) -> dict[str, int]:
        """Step of each expert in a generation, by what the rank that captured it says. Each has one
        such rank."""
        seated = [one for one in self.session.live.sources() if one.seats and one.captured]
        own = {str(one.unit) for one in seated}
        recorded = self.daemon.sealed()[generation].manifest.experts
        steps = dict.fromkeys(own, generation.step)
        steps |= {one.unit: one.generation.step for one in recorded if one.unit in own}
        said = [pair for of_rank in every(list(steps.items())) for pair in of_rank]
        assert set(Counter(unit for unit, _ in said).values()) == {1}
        assert len(said) == LAYERS * EXPERTS
        return dict(said)

    def copied(self) -> int:
        """Bytes that all ranks have copied for the newest save."""
        return sum(every(self.session.counters.copied_bytes))

    def check_restored(self, states: Mapping[int, State], versions: Mapping[str, int]) -> None:
        """Every expert is as it was in its version, and all else as after the newest step."""
        for one in self.session.live.discover():
            step = versions.get(str(one.unit), max(states))
            assert torch.equal(one.tensor, states[step][one.name]), (one.name, step)
        moe.check_copies(self.layers, self.optimizer, self.gradients._group)


def every(own: Any) -> list[Any]:
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, own)
    return found


def reseat(trainer: Trainer, loads: Any, rank: int, **more: Any) -> PlanReport:
    """Have the experts take the seats of a plan for other loads."""
    for layer in trainer.layers:
        layer.history.add([1000 * tokens for tokens in loads[layer.layer]])
    reseating, exchange = SeatChanges(trainer.layers), make_exchange(RANKS, WAIT_S)
    live = trainer.session.live
    if more:
        reseating.follow(live, exchange, rank, moves=True, **more)
    else:
        assert reseating.rebalance(live, exchange, rank, step_s=10.0, steps=200)
    return reseating.report(1, 0)


def restore_and_reseat(rank: int, port: int, directory: str, policy: str) -> None:
    world, group = join(rank, port, RANKS)
    trainer = Trainer(directory, world, group, POLICIES[policy])
    states = {1: trainer.step(1)}
    full = trainer.copied()
    states |= {step: trainer.step(step) for step in range(2, 5)}
    versions = trainer.versions(Generation(1, 4))
    partial = policy != "full"
    assert max(versions.values()) == 4
    assert (min(versions.values()) < 4) == partial
    assert (trainer.copied() < full) == partial
    trainer.session.close()

    again = Trainer(directory, world, group, POLICIES[policy], loads=SKEWED, epoch=2)
    assert again.session.restore() == 4
    again.check_restored(states, versions)

    states = {5: again.step(5), 6: again.step(6)}
    captured = [layer.experts.captured for layer in again.layers]
    again.session.on_reseated(reseat(again, OTHERWISE, rank), moved=True)
    found = [layer.experts.captured for layer in again.layers]
    assert any(every(found != captured))
    states |= {7: again.step(7)}
    assert set(again.versions(Generation(2, 7)).values()) == {7}
    assert again.copied() == full
    states |= {step: again.step(step) for step in (8, 9)}
    versions = again.versions(Generation(2, 9))
    assert set(versions.values()) == ({7, 8, 9} if partial else {9})
    again.session.close()

    third = Trainer(directory, world, group, POLICIES[policy], epoch=3)
    assert third.session.restore() == 9
    third.check_restored(states, versions)
    state = third.state()
    if rank == 0:
        torch.save(state, Path(directory) / "state.pt")
    third.session.close()
    world.close()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("policy", POLICIES)
def test_experts_return_to_their_versions_in_any_seats_and_all_are_captured_after_a_move(
    policy: str, tmp_path: Path
) -> None:
    run_ranks(restore_and_reseat, (reserve_port(), str(tmp_path), policy), RANKS)
    check_loads_densely(tmp_path, torch.load(tmp_path / "state.pt"))


def check_loads_densely(directory: Path, state: State) -> None:
    """What was captured in uneven copies loads into one process that has each expert once, from the
    set in storage and from an export of it."""
    tier, exported = directory / "tier", directory / "exported"
    persist(directory, tier, RANKS, Generation(2, 9))
    wanted: dict[str, Any] = {}
    for name, tensor in sorted(state.items()):
        base, _, key = name.partition(":")
        stack, bracket, _ = base.partition("[")
        full = f"optim.state.{stack}.{key}" if key else stack
        if bracket:  # experts are in the order of their numbers
            wanted.setdefault(full, []).append(tensor)
        else:
            wanted[full] = tensor
    wanted = {k: torch.stack(v) if isinstance(v, list) else v for k, v in wanted.items()}
    assert wanted["1.experts.w_in"].shape == (EXPERTS, DIM, HIDDEN)
    assert main([str(tier), "--job", JOB, "--to", str(exported)]) == 0
    for source in (
        {"storage_reader": HoldfastReader(str(tier), job=JOB)},
        {"checkpoint_id": exported},
    ):
        found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
        state_dict_loader.load(found, **source)
        for name, tensor in wanted.items():
            assert torch.equal(torch.as_tensor(found[name]), tensor), name


def policy_state(session: ProtectedSession) -> PartialState:
    """What the session would leave to the next world's, as it is."""
    return session._saver.leave(session._number, session._tokens.empty_copy(), START.replenishing)


def go_on_live(rank: int, port: int, directory: str, policy: str) -> None:
    """A process is lost after a step, and one more save was called on rank 0 than on rank 2."""
    world, group = join(rank, port, RANKS)
    trainer = Trainer(directory, world, group, POLICIES[policy])
    states = {step: trainer.step(step) for step in (1, 2)}
    if rank == 0:
        trainer.session._number += 1
    before = trainer.session.leave()
    assert before == trainer.session.leave()
    counted = before.ledger.tokens
    assert sum(counted.values()) == 2 * LAYERS * 2 * (6 + rank)
    outlived = rank != NEW
    if outlived:
        trainer.begin(directory, 2)
        trainer.session.follow(before)
    else:
        trainer = Trainer(directory, world, group, POLICIES[policy], epoch=2)
    reseat(trainer, SKEWED, rank, outlived=outlived)
    verdict = StandingVerdict(
        action=StandingAction.LIVE, reason="a test", step=2, sources={NEW: (0, 0)}
    )
    assert trainer.session.go_on(verdict, "")
    assert trainer.session._number == 3  # as on the rank that had called most
    now = policy_state(trainer.session)
    assert set(now.ledger.tokens) == set(counted)
    assert now.ledger.tokens == (counted if outlived else dict.fromkeys(counted, 0))
    assert (now.account, now.k, now.recoveries) == (before.account, before.k, before.recoveries)
    trainer.check_restored({2: states[2]}, {})

    states = {3: trainer.step(3)}
    assert set(trainer.versions(Generation(2, 3)).values()) == {3}
    states |= {step: trainer.step(step) for step in (4, 5)}
    versions = trainer.versions(Generation(2, 5))
    assert min(versions.values()) < 5
    trainer.session.close()
    again = Trainer(directory, world, group, POLICIES[policy], epoch=3)
    assert again.session.restore() == 5
    again.check_restored(states, versions)
    assert set(map(UnitKey.parse, versions)) == set(counted)
    again.session.close()
    world.close()


def test_ranks_that_go_on_live_keep_their_counts_and_capture_every_expert_first(
    tmp_path: Path,
) -> None:
    run_ranks(go_on_live, (reserve_port(), str(tmp_path), "selective"), RANKS)


def move_within_windows(rank: int, port: int, directory: str) -> None:
    world, group = join(rank, port, RANKS)
    states: dict[int, State] = {}
    handles: dict[int, holdfast.SaveHandle] = {}

    def run(trainer: Trainer, *steps: int) -> None:
        for step in steps:
            handles[step] = trainer.train(step)
            trainer.session.wait_staged()
            states[step] = trainer.state()

    def move(trainer: Trainer, loads: Any) -> None:
        before = [layer.experts.captured for layer in trainer.layers]
        trainer.session.on_reseated(reseat(trainer, loads, rank), moved=True)
        found = [layer.experts.captured for layer in trainer.layers]
        assert any(every(found != before))

    first = Trainer(directory, world, group, WINDOWS)
    run(first, 1, 2, 3, 4, 5, 6)
    assert handles[4].committed.result(WAIT_S) == 4
    # Experts move within a window: no rank completes it, also one that captures the same experts.
    move(first, SKEWED)
    run(first, 7)
    moved = "experts have changed ranks"
    for step, why in ((5, moved), (6, moved), (7, "lacks an earlier save")):
        error = handles[step].committed.exception(WAIT_S)
        assert isinstance(error, SnapshotSkippedError), error
        assert why in str(error)
    # The next one is of their new seats, and is read into others.
    run(first, 8, 9, 10)
    assert handles[10].committed.result(WAIT_S) == 10
    assert first.session.problem is None
    first.session.close()
    second = Trainer(directory, world, group, WINDOWS, epoch=2)
    assert second.session.restore() == 10
    second.check_restored({10: states[10]}, {})
    assert second.state().keys() == states[10].keys()

    # Between two windows, a move costs none.
    run(second, 11, 12, 13, 14)
    move(second, OTHERWISE)
    run(second, 15, 16, 17)
    for step in (14, 15, 16, 17):
        handles[step].committed.result(WAIT_S)
    assert second.session.problem is None
    second.session.close()
    third = Trainer(directory, world, group, WINDOWS, loads=SKEWED, epoch=3)
    assert third.session.restore() == 17
    third.check_restored({17: states[17]}, {})
    third.session.close()
    world.close()


def test_a_window_does_not_outlive_a_move_and_is_read_into_any_seats(tmp_path: Path) -> None:
    run_ranks(move_within_windows, (reserve_port(), str(tmp_path)), RANKS)
