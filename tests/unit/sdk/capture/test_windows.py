"""Sparse windows: training repeated from a window's first save is the training that never failed,
bit for bit, at every step."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mixed_precision import MasterOptimizer
from torch.utils.checkpoint import checkpoint

import holdfast
from holdfast._agree.exchange import Alone
from holdfast._capture.window_records import decode_record
from holdfast._daemon.client import Hello, Opened
from holdfast._elastic.session import ElasticSession
from holdfast.testing import FakeDaemon
from holdfast_core.errors import UnreachableError
from holdfast_core.job.snapshots import ExpertOrder, Full, Repeats, SparseWindows
from holdfast_core.protection.standing import (
    RankStanding,
    StandingAction,
    StandingVerdict,
    standing,
)
from holdfast_core.snapshots.generations import Generation
from holdfast_core.snapshots.layouts import decode_layout

pytestmark = pytest.mark.usefixtures("deterministic")

Same = Callable[[dict[str, Any], dict[str, Any]], None]
WAIT_S = 20


class Foreign:
    """An optimizer of another library."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        self.param_groups = [{"params": params}]
        self.state: dict[torch.Tensor, Any] = {}


KINDS = [
    ("adamw", torch.float32),
    ("sgd with momentum", torch.float32),
    ("float32 masters", torch.bfloat16),
]


def undisturbed(
    make_trainer: Any, open_session: Any, directory: Path, kind: Any, window: int, saves: int
) -> list[dict[str, Any]]:
    """The state after each step of a run whose session saves the first `saves` of them, and which
    goes on for another window."""
    optimizer, dtype = kind
    trainer = make_trainer(optimizer, dtype=dtype)
    policy = SparseWindows(window=window)
    session = open_session(trainer, FakeDaemon(directory), policy=policy, start_wait_s=WAIT_S)
    assert session.restore() is None
    states = [trainer.state()]
    for step in range(1, saves + window + 2):
        trainer.train()
        states.append(trainer.state())
        if step <= saves:
            session.save(step).staged.result(WAIT_S)
        if step == saves:
            session.close()
    return states


@pytest.mark.parametrize(
    ("kind", "window"),
    [
        (KINDS[0], 1),
        *(pytest.param(KINDS[0], window, marks=pytest.mark.slow) for window in (2, 6)),
        (KINDS[1], 3),
        (KINDS[2], 3),
    ],
    ids=lambda given: str(given[0]) if isinstance(given, tuple) else str(given),
)
def test_a_replay_gives_the_bits_of_the_run_that_never_failed(
    kind: Any, window: int, make_trainer: Any, open_session: Any, tmp_path: Path, same: Same
) -> None:
    states = undisturbed(make_trainer, open_session, tmp_path, kind, window, 3 * window)
    trainer = make_trainer(kind[0], seed=99, dtype=kind[1])
    daemon = FakeDaemon(tmp_path, epoch=2)
    session = open_session(trainer, daemon, policy=SparseWindows(window=window))
    last = max(daemon.sealed()).step
    done = session.restore()
    assert (window > 1) == (done < last)
    assert last - window < done
    for step in range(done + 1, len(states)):
        trainer.train()
        session.save(step)
        if step >= last:
            same(trainer.state(), states[step])


class FewSlots(FakeDaemon):
    """Calls the arenas that it gives arenas of so many slots."""

    slots = 3

    def open(self, *request: Any) -> Opened:
        return replace(super().open(*request), slots=self.slots)


@pytest.mark.parametrize(
    ("policy", "slots"), [(SparseWindows(), 2), (SparseWindows(), 3), (Full(), 2)]
)
def test_two_slots_for_windows_are_announced(
    policy: Any,
    slots: int,
    make_trainer: Any,
    open_session: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer, daemon = make_trainer(), FewSlots(tmp_path)
    daemon.slots = slots
    session = open_session(trainer, daemon, policy=policy)
    trainer.train()
    session.save(1).committed.result(WAIT_S)
    announced = "every second window is left out" in caplog.text
    assert announced == (slots == 2 and isinstance(policy, SparseWindows))


def tied(base: Any) -> Any:
    """Trainer whose first and last layer share a parameter."""

    class Tied(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.model.head.weight = self.model.embedding.weight
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    return Tied


def accumulating(base: Any) -> Any:
    """Trainer that steps once for three micro-batches."""

    class Accumulating(base):  # type: ignore[misc]
        def train(self, steps: int = 1) -> None:
            for _ in range(steps):
                self.optimizer.zero_grad()
                for _ in range(3):
                    tokens = torch.randint(16, (8,))
                    (self.model(tokens).float().square().mean() / 3).backward()
                self.optimizer.step()
                self.scheduler.step()

    return Accumulating


def recomputing(base: Any) -> Any:
    """Trainer that keeps no activations within a layer."""

    class Recomputing(base):  # type: ignore[misc]
        def train(self, steps: int = 1) -> None:
            for _ in range(steps):
                self.optimizer.zero_grad()
                x = self.model.embedding(torch.randint(16, (8,)))
                for layer in self.model.layers:
                    x = checkpoint(layer, torch.nn.functional.dropout(x, 0.1), use_reentrant=False)
                self.model.head(x).float().square().mean().backward()
                self.optimizer.step()
                self.scheduler.step()

    return Recomputing


def scaling(base: Any) -> Any:
    """Trainer with a loss scaler, which leaves out each fifth step because its loss overflows."""

    class Scaling(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

        def open(self, daemon: FakeDaemon, **settings: Any) -> holdfast.Session:
            return holdfast.init(
                model=self.model,
                optimizer=self.optimizer,
                stateful={"scheduler": self.scheduler, "scaler": self.scaler},
                daemon=daemon,
                settings=holdfast.Settings(**{"reopen_backoff_s": 0.0, **settings}),
            )

        def train(self, steps: int = 1) -> None:
            for _ in range(steps):
                self.optimizer.zero_grad()
                loss = self.model(torch.randint(16, (8,))).square().mean()
                if self.scheduler.last_epoch % 5 == 4:
                    loss = loss * torch.inf
                self.scaler.scale(loss).backward()
                self.scaler.unscale_(self.optimizer)
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.scheduler.step()

        def state(self) -> dict[str, Any]:
            return {**super().state(), "scaler": str(self.scaler.state_dict())}

    return Scaling


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # of a step left out
@pytest.mark.parametrize("loop", [tied, accumulating, recomputing, scaling])
def test_a_replay_has_the_same_bits_whatever_the_loop_does(
    loop: Any, make_trainer: Any, open_session: Any, tmp_path: Path, same: Same
) -> None:
    make = loop(make_trainer)
    states = undisturbed(make, open_session, tmp_path, KINDS[0], 3, 10)
    trainer = make(seed=99)
    daemon = FakeDaemon(tmp_path, epoch=2)
    session = open_session(trainer, daemon, policy=SparseWindows(window=3))
    whole = max(daemon.sealed()).step
    done = session.restore()
    assert (done, whole) == (8, 10)  # the scaler leaves step 10 out
    for step in range(done + 1, len(states)):
        trainer.train()
        session.save(step)
        if step >= whole:
            same(trainer.state(), states[step])


def run_on(trainer: Any, session: Any, first: int, last: int) -> None:
    for step in range(first, last + 1):
        trainer.train()
        session.save(step).staged.result(WAIT_S)


def test_a_job_may_change_to_windows_and_back(
    make_trainer: Any, open_session: Any, tmp_path: Path, same: Same
) -> None:
    trainer = make_trainer("float32 masters", dtype=torch.bfloat16)
    states, done = [trainer.state()], 0
    for epoch, policy in enumerate((Full(), SparseWindows(window=3), Full()), 1):
        session = open_session(
            trainer, FakeDaemon(tmp_path, epoch=epoch), policy=policy, start_wait_s=WAIT_S
        )
        restored = session.restore() or 0
        assert restored == done - 2 * (epoch == 3)
        for step in range(restored + 1, restored + 9):
            trainer.train()
            handle = session.save(step)
            if step <= done:
                assert "was repeated" in str(handle.error) or step == done
            if step >= done:
                states = [*states[:step], trainer.state()]
        handle.staged.result(WAIT_S)
        session.close()
        held = max(FakeDaemon(tmp_path, epoch=epoch + 1).sealed())
        done = held.step
        assert held.epoch == epoch
        trainer = make_trainer("float32 masters", seed=epoch, dtype=torch.bfloat16)
    other = make_trainer("float32 masters", dtype=torch.bfloat16)
    for step in range(1, len(states)):
        other.train()
        same(other.state(), states[step])


class OneRank:
    """World of one process that stays; each time it is cut off, another one begins."""

    stays, size, ended, groups_stay = True, 1, False, False
    failure: Exception | None = None
    verdict: StandingVerdict | None = None

    def __init__(self) -> None:
        self.epoch = 2
        self.verdicts: list[StandingVerdict] = []

    def check_process(self) -> None: ...

    def begin_step(self, step: int) -> None: ...

    def go_back_to(self, step: int) -> None: ...

    def finish_collectives(self, since: Any = None) -> Any: ...

    def build_again(self, *_: Any) -> str:
        return ""

    def exchange(self, timeout_s: float) -> Alone:
        del timeout_s
        return Alone()

    def survives(self, error: Exception) -> bool:
        return isinstance(error, UnreachableError)

    def stand(self, own: RankStanding, cause: Exception | None) -> StandingVerdict:
        del cause
        self.verdicts.append(standing([own]))
        return self.verdicts[-1]

    def form(self) -> None:
        self.epoch += 1


def test_a_process_that_stays_goes_live_only_where_no_unit_is_frozen(
    make_trainer: Any, open_session: Any, tmp_path: Path, same: Same
) -> None:
    """A job has left its policy Sparse, and a window is repeated under Full, which goes on live."""
    states = undisturbed(make_trainer, open_session, tmp_path, KINDS[2], 3, 7)
    trainer = make_trainer("float32 masters", seed=5, dtype=torch.bfloat16)
    world: Any = OneRank()

    def make() -> Any:
        daemon = FakeDaemon(tmp_path, epoch=world.epoch)
        return open_session(trainer, daemon, policy=Full(), start_wait_s=WAIT_S)

    session = ElasticSession(world, make, [trainer.optimizer], WAIT_S, votes=True)
    cut, steps = {7, 9}, []
    for step in session.steps(len(states) - 1):
        with step:
            steps.append(int(step))
            if step in cut:
                cut.remove(int(step))
                raise UnreachableError("a rank is lost")
            trainer.train()
            if step > 7:  # the last of the window
                same(trainer.state(), states[step])
    assert steps == [6, 7, 6, 7, 8, 9, 9, *range(10, len(states))]
    assert [one.action for one in world.verdicts] == [StandingAction.LINE, StandingAction.LIVE]
    assert "units are frozen until the window of steps is repeated" in world.verdicts[0].reason


@pytest.mark.parametrize("prepares", [False, True])
def test_a_window_that_is_not_whole_is_never_seen(
    prepares: bool,
    trainer: Any,
    open_session: Any,
    daemon: FakeDaemon,
    caplog: pytest.LogCaptureFixture,
) -> None:
    session = open_session(trainer, daemon, policy=SparseWindows(window=3), start_wait_s=WAIT_S)
    seen = []
    for step in range(1, 8):
        trainer.train()
        if prepares and step == 1:
            session.prepare()
            assert not [one for one in caplog.records if one.levelname in ("WARNING", "ERROR")]
        handle = session.save(step)
        handle.staged.result(WAIT_S)
        if step in (1, 4, 7):  # the first save is full
            handle.committed.result(WAIT_S)
        seen.append(max(g.step for g in daemon.sealed()))
    assert seen == [1, 1, 1, 4, 4, 4, 7]


def test_all_saves_of_a_window_end_with_it(
    trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    session = open_session(trainer, daemon, policy=SparseWindows(window=3), start_wait_s=WAIT_S)
    handles = []
    for step in range(1, 5):
        trainer.train()
        handles.append(session.save(step))
        handles[-1].staged.result(WAIT_S)
    assert [handle.protected.result(WAIT_S) for handle in handles] == [1, 2, 3, 4]
    assert session.counters.committed == 2


def test_the_saves_of_an_open_window_end_with_the_session(
    trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    session = open_session(trainer, daemon, policy=SparseWindows(window=3), start_wait_s=WAIT_S)
    for step in range(1, 3):
        trainer.train()
        handle = session.save(step)
        handle.staged.result(WAIT_S)
    session.close()
    assert "lost: the session was closed" in str(handle.protected.exception(WAIT_S))


def test_a_missed_save_costs_its_window_and_no_other(
    trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    session = open_session(trainer, daemon, policy=SparseWindows(window=3), start_wait_s=WAIT_S)
    handles = {}
    for step in (1, 2, 4, 5, 6, 7):  # 3 is missed, in the window of 2 to 4
        trainer.train()
        handles[step] = session.save(step)
        handles[step].committed.exception(WAIT_S) if step in (1, 4, 7) else None
    assert "lacks an earlier save; the next one begins in 1 steps" in str(handles[4].error)
    assert "the window of steps 2 to 4 is lost" in str(handles[2].error)
    assert [handles[step].committed.result(WAIT_S) for step in (1, 5, 6, 7)] == [1, 5, 6, 7]
    assert sorted(g.step for g in daemon.sealed()) == [1, 7]
    assert "lost: the save of step 3 was missed" in str(handles[2].error)


def test_a_save_that_fails_before_it_has_a_slot_ends_its_window_at_once(
    trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    session = open_session(trainer, daemon, policy=SparseWindows(window=3), start_wait_s=WAIT_S)
    handles = {}
    for step in (1, 2):
        trainer.train()
        handles[step] = session.save(step)
        handles[step].staged.result(WAIT_S)
    trainer.scheduler.grown = "x" * 2**20  # does not fit the extras, so another session is opened
    daemon.fail("open", UnreachableError("no daemon"))
    trainer.train()
    handles[3] = session.save(3)
    assert isinstance(handles[3].committed.exception(WAIT_S), UnreachableError)
    assert "steps 2 to 4 is lost: UnreachableError" in str(handles[2].error)


@pytest.mark.parametrize("repeats", list(Repeats))
@pytest.mark.parametrize("lost_after", [8, 9, 13])
def test_one_save_captures_everything_in_place_of_a_window_when_a_set_is_due(
    lost_after: int,
    repeats: Repeats,
    make_trainer: Any,
    open_session: Any,
    tmp_path: Path,
    same: Same,
) -> None:
    """Windows are of steps 2 to 4, 5 to 7 and so on; the third one gives way to step 8."""
    policy = SparseWindows(window=3, repeats=repeats)
    daemon, trainer = FakeDaemon(tmp_path), make_trainer()
    session = open_session(trainer, daemon, policy=policy, start_wait_s=WAIT_S)
    states, handles = [trainer.state()], dict[int, holdfast.SaveHandle]()
    for step in range(1, 17):
        trainer.train()
        states.append(trainer.state())
        if step > lost_after:
            continue
        if step == 4:
            daemon.announce("whole_after", Generation(1, 1))
            assert handles[1].protected.result(WAIT_S) == 1
        handles[step] = session.save(step)
        wait([handles[step].staged], WAIT_S)
        if step in (4, 7, 8, 13):
            assert handles[step].protected.result(WAIT_S) == step
    assert session.counters.skipped == session.counters.failed == 0
    session.close()
    firsts = {held.generation.step: held.first_step for held in daemon.manifests}
    assert firsts == {
        step: first
        for step, first in {1: 0, 4: 2, 7: 5, 8: 0, 13: 11}.items()
        if step <= lost_after
    }
    for step in range(9, min(lost_after, 10) + 1):
        assert "step 8 captured everything in place of this window" in str(handles[step].error)
    again = make_trainer(seed=99)
    session = open_session(again, FakeDaemon(tmp_path, epoch=2), policy=policy)
    line = max(firsts)
    done = session.restore()
    assert done == (11 if line == 13 and repeats is Repeats.TRAINING else line)
    for step in range(done + 1, len(states)):
        again.train()
        session.save(step)
        if step >= line:
            same(again.state(), states[step])


def test_a_daemon_that_starts_anew_within_a_window_costs_that_window(
    trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    session = open_session(trainer, daemon, policy=SparseWindows(window=3), start_wait_s=WAIT_S)
    for step in range(1, 11):
        trainer.train()
        if step == 3:
            daemon.restart()
        wait([session.save(step).staged], WAIT_S)
    session.close()
    assert max(g.step for g in daemon.sealed()) == 10


def test_the_saves_of_a_window_copy_the_bytes_that_the_schedule_says(
    open_session: Any, daemon: FakeDaemon
) -> None:
    """Six equal units of 16-bit weights, masters and one moment: 8 bytes in full, 2 if frozen."""
    model = torch.nn.ModuleDict(
        {"experts": torch.nn.ModuleList(torch.nn.Linear(32, 32, bias=False) for _ in range(6))}
    ).bfloat16()
    optimizer = MasterOptimizer(model.parameters())
    session = holdfast.init(
        model=torch.nn.ModuleDict({"layers": torch.nn.ModuleList([model])}),
        optimizer=optimizer,
        daemon=daemon,
        settings=holdfast.Settings(policy=SparseWindows(window=3), start_wait_s=WAIT_S),
    )
    copied = []
    for step in range(1, 5):
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.25)
        optimizer.step()
        session.save(step).staged.result(WAIT_S)
        copied.append(session.counters.copied_bytes)
    session.close()
    assert copied[1:] == [1024 * (2 * 8 + 4 * 2), 1024 * (2 * 8 + 2 * 2), 1024 * 2 * 8]


def test_a_repeated_step_without_its_save_is_an_error(
    make_trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    undisturbed(make_trainer, open_session, tmp_path, KINDS[0], 3, 7)
    trainer = make_trainer()
    session = open_session(trainer, FakeDaemon(tmp_path, epoch=2), policy=SparseWindows(window=3))
    assert session.restore() == 5
    trainer.train(2)
    with pytest.raises(holdfast.StepOrderError, match=r"save\(7\) after step 5, while"):
        session.save(7)


def test_frozen_units_keep_their_bits(make_trainer: Any, open_session: Any, tmp_path: Path) -> None:
    undisturbed(make_trainer, open_session, tmp_path, KINDS[2], 3, 7)
    trainer = make_trainer("float32 masters", seed=5, dtype=torch.bfloat16)
    session = open_session(trainer, FakeDaemon(tmp_path, epoch=2), policy=SparseWindows(window=3))
    assert session.restore() == 5
    before = trainer.state()
    trainer.train()
    after = trainer.state()
    kept = {name for name in before if ":" in name and str(before[name]) == str(after[name])}
    assert "head.weight:master" in kept and "head.weight:momentum" in kept  # of the last slot
    assert "layers.0.listed.experts.0.weight:master" not in kept  # of the first
    stack = "layers.0.experts.w:master"
    moved = [not torch.equal(a, b) for a, b in zip(before[stack], after[stack], strict=True)]
    assert any(moved) and not all(moved)  # experts of one parameter, in two slots
    assert all(p.grad is None for p in trainer.model.head.parameters())


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (torch.optim.LBFGS, "LBFGS computes one update from all parameters"),
        (Foreign, "Foreign is not a torch.optim.Optimizer"),
    ],
)
def test_optimizers_whose_steps_cannot_be_repeated_are_refused(
    make: Any, why: str, daemon: FakeDaemon
) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(holdfast.InvalidJobError, match=why):
        holdfast.init(
            model=model,
            optimizer=make(list(model.parameters())),
            daemon=daemon,
            settings=holdfast.Settings(policy=SparseWindows()),
        )


class Normed(torch.optim.Adam):
    """Adam whose updates are scaled by a norm: of each parameter, as LAMB does, or of all
    together."""

    def __init__(self, params: Any, *, together: bool) -> None:
        super().__init__(params, lr=1e-2)
        self.together = together

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.clone() for p in held]
        super().step(closure)
        changes = [p - old for p, old in zip(held, before, strict=True)]
        total = torch.cat([change.view(-1) for change in changes]).norm()
        for p, old, change in zip(held, before, changes, strict=True):
            p.copy_(old + change / (1 + (total if self.together else change.norm())))


def stepped(
    trainer: Any, optimizer: torch.optim.Optimizer, daemon: FakeDaemon, open_session: Any
) -> holdfast.Session:
    """A session that has saved some steps of `optimizer`."""
    trainer.optimizer = optimizer
    trainer.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    session: holdfast.Session = open_session(
        trainer, daemon, policy=SparseWindows(window=2), start_wait_s=WAIT_S
    )
    for step in range(1, 6):
        trainer.train()
        session.save(step).staged.exception(WAIT_S)
    return session


@pytest.mark.parametrize(
    ("together", "named"), [(False, r"layers\.0\.experts\.w"), (True, r"layers\.0\.gate\.bias")]
)
def test_an_optimizer_that_mixes_parameters_is_refused_by_what_it_does(
    together: bool, named: str, make_trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    """A norm of each parameter mixes the experts of a stack."""
    trainer = make_trainer()
    optimizer = Normed(trainer.model.parameters(), together=together)
    session = stepped(trainer, optimizer, daemon, open_session)
    assert isinstance(session.problem, holdfast.InvalidJobError)
    assert re.search(rf"step of .*{named}.* does not follow from its own", str(session.problem))
    assert max(daemon.sealed()).step == 1


@pytest.mark.parametrize("make", ["Adagrad", "NAdam", "RMSprop", "SGD", "hooked"])
def test_an_optimizer_that_mixes_none_is_not_refused(
    make: str, make_trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    trainer = make_trainer()
    kind = getattr(torch.optim, make, torch.optim.AdamW)
    optimizer = kind(trainer.model.parameters(), lr=1e-2)

    def double(*_: Any) -> None:
        for p in trainer.model.parameters():
            p.grad.mul_(2)

    def open_and_hook(*args: Any, **kwargs: Any) -> Any:
        made = open_session(*args, **kwargs)
        if make == "hooked":  # after the session's hook, and in each repetition again
            optimizer.register_step_pre_hook(double)
        return made

    session = stepped(trainer, optimizer, daemon, open_and_hook)
    assert session.problem is None
    session.close()
    assert max(daemon.sealed()).step == 5


def test_gradients_that_a_closure_computes_within_a_step_are_refused(
    make_trainer: Any, open_session: Any, daemon: FakeDaemon
) -> None:
    """A recovery would drop the gradients of frozen units before there are any."""
    trainer = make_trainer()
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-2)

    def closure() -> torch.Tensor:
        with torch.enable_grad():
            optimizer.zero_grad()
            loss: torch.Tensor = trainer.model(torch.arange(8)).square().mean()
            loss.backward()
        return loss

    trainer.train = lambda: optimizer.step(closure)
    session = stepped(trainer, optimizer, daemon, open_session)
    assert session.counters.failed == 5
    assert "AdamW is given a closure that computes gradients" in session.counters.failure
    assert not daemon.sealed()


def test_a_loop_without_deterministic_algorithms_is_refused(daemon: FakeDaemon) -> None:
    torch.use_deterministic_algorithms(False)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(
        holdfast.InvalidJobError, match=r"call torch\.use_deterministic_algorithms\(True\) before"
    ):
        holdfast.init(
            model=model,
            optimizer=torch.optim.SGD(model.parameters()),
            daemon=daemon,
            settings=holdfast.Settings(policy=SparseWindows()),
        )


def test_a_decay_that_no_order_uses_is_refused() -> None:
    with pytest.raises(holdfast.InvalidJobError, match=r"policy\.decay = 0\.5: is given, but spec"):
        holdfast.Settings(policy=SparseWindows(decay=0.5))


def orders_of(daemon: FakeDaemon) -> list[list[tuple[str, ...]]]:
    """The schedules of the windows that a daemon holds, the oldest first."""
    found = []
    for generation, held in sorted(daemon.sealed().items()):
        layout = decode_layout((held.home / "layout.json").read_bytes())
        slot = held.piece_map.slot
        with (held.home / "arena").open("rb") as arena:
            arena.seek(slot * layout.slot_bytes + held.manifest.extras_offset)
            record = decode_record(arena.read(held.manifest.extras_bytes))
        found += [[*record.slots]] if record is not None and generation.step > 1 else []
    return found


class SixExperts:
    """Six experts in training, each of which changes in every step."""

    def __init__(self) -> None:
        experts = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(6))
        self.model = torch.nn.ModuleDict(
            {"layers": torch.nn.ModuleList([torch.nn.ModuleDict({"experts": experts})])}
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        with torch.no_grad():
            for number, p in enumerate(self.model.parameters()):
                p.fill_(number + 1)

    def train(self) -> None:
        parameters = [*self.model.parameters()]
        for one, other in zip(parameters, parameters[1:] + parameters[:1], strict=True):
            one.grad = torch.sin(one.detach() + 2 * other.detach())
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        moments = {
            f"moment {at}": one["momentum_buffer"].clone()
            for at, one in enumerate(self.optimizer.state.values())
        }
        return {**{k: v.clone() for k, v in self.model.state_dict().items()}, **moments}


def test_a_replay_follows_the_order_in_which_its_window_was_captured(
    tmp_path: Path, same: Same
) -> None:
    """The order changes with the window that is lost, and the next session begins with the first
    order again."""
    policy, last = SparseWindows(window=3, order=ExpertOrder.HARD_COUNT), 1 + 3 * 36
    settings = holdfast.Settings(policy=policy, start_wait_s=WAIT_S)
    trainer, daemon = SixExperts(), FakeDaemon(tmp_path)

    def init(one: SixExperts, on: FakeDaemon) -> holdfast.Session:
        return holdfast.init(model=one.model, optimizer=one.optimizer, daemon=on, settings=settings)

    session = init(trainer, daemon)
    states = [trainer.state()]
    for step in range(1, last + 4):
        trainer.train()
        states.append(trainer.state())
        if step <= last:  # the lower an expert's number, the more it is used
            session.count_tokens(0, [11, 9, 7, 5, 3, 1])
            session.save(step).staged.result(WAIT_S)
        if step == last:
            session.close()
    before, after = orders_of(daemon)[-2:]
    units = [f"layer0/expert{number}" for number in range(6)]
    assert [one for slot in before for one in slot] == units
    least_used, expected = units[::-1], []
    for slot in before:
        expected.append(tuple(sorted(least_used[: len(slot)])))
        del least_used[: len(slot)]
    assert after == expected
    replayed = SixExperts()
    session = init(replayed, FakeDaemon(tmp_path, epoch=2))
    assert session.restore() == last - 2
    for step in range(last - 1, last + 4):
        replayed.train()
        session.save(step)
        if step >= last:
            same(replayed.state(), states[step])
    session.close()


def test_an_interval_that_is_measured_is_refused() -> None:
    with pytest.raises(holdfast.InvalidJobError, match="a window needs the save of every step"):
        holdfast.Settings(policy=SparseWindows(), recoveries_per_day=3.0)


class PodsOfOthers(FakeDaemon):
    """A daemon of a job whose pods another controller makes."""

    def hello(self) -> Hello:
        return replace(super().hello(), external=True)


def test_training_is_not_repeated_where_pods_may_change_places(
    make_trainer: Any, open_session: Any, tmp_path: Path
) -> None:
    """No rank could be restored once they have, however often it is started."""
    trainer = make_trainer("adamw")
    session = open_session(trainer, PodsOfOthers(tmp_path), policy=SparseWindows(window=3))
    with pytest.raises(
        holdfast.InvalidJobError, match=r"repeats=Repeats\.OPTIMIZER, or another policy"
    ):
        session.restore()
    session.close()
    for number, policy in enumerate((SparseWindows(window=3, repeats=Repeats.OPTIMIZER), Full())):
        daemon = PodsOfOthers(tmp_path / str(number))
        session = open_session(make_trainer("adamw"), daemon, policy=policy)
        assert session.restore() is None
        session.close()
