"""Flips of single bits in the state of one replica: it is named, and nobody else is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from meeting import WAIT_S, Meeting, Seat
from msgspec.structs import replace

from holdfast._agree.replica_check import ReplicaCheck
from holdfast._agree.replicas import UnitDigests, digests_of
from holdfast._copying.devices import CpuDevice
from holdfast._copying.engine import CopyEngine
from holdfast._state.capture import LiveState
from holdfast_core.corruption import HISTORY_MAX, Compared, Divergence, Proof
from holdfast_core.errors import HoldfastError, ReplicasDivergedError
from holdfast_core.topology import Topology

Make = Callable[[Any], torch.optim.Optimizer]
Where = Literal["parameter", "gradient", "moment", "before the step", "activation"]
FIRST, STEPS = 3, 8

OPTIMIZERS: list[Make] = [
    lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    lambda parameters: torch.optim.Adam(parameters, lr=1e-2, foreach=True),
]


def flip(tensor: torch.Tensor, bit: int = 21) -> None:
    """Flip one bit of one element."""
    with torch.no_grad():
        tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << bit)


class Replica:
    """One rank: a model, its optimizer, and its part in the comparisons."""

    def __init__(self, rank: int, ranks: int, make: Make) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
        self.optimizer = make(self.model.parameters())
        self.topology = Topology(dp=ranks)
        self.live = LiveState(self.model, [self.optimizer], self.topology, rank)
        self.check: ReplicaCheck

    @property
    def weight(self) -> torch.Tensor:
        return self.model.get_parameter("1.weight")

    def flip(self, where: Where) -> None:
        if where == "gradient":
            assert self.weight.grad is not None
            flip(self.weight.grad, 30)  # an exponent: an Adam's first steps forget the rest
        elif where == "moment":
            state = self.optimizer.state[self.weight]
            flip(next(v for name, v in sorted(state.items()) if name != "step"))
        else:
            flip(self.weight)

    def digests(self, engine: CopyEngine) -> UnitDigests:
        return digests_of(self.live.discover(), self.topology, self.rank, engine, None)


class Job:
    """Replicas that train together on one thread, and compare every save of theirs."""

    def __init__(self, ranks: int, make: Make) -> None:
        self.replicas = [Replica(rank, ranks, make) for rank in range(ranks)]
        self.engine = CopyEngine(1, CpuDevice())
        self.noise: Callable[[int], float] = lambda rank: 0.0
        """Rank → what its computation adds to its gradients after they were summed."""
        self.step, self._number = 0, 0
        self.begin([None] * ranks)

    def begin(self, earlier: list[Divergence | None], every: int = 1) -> None:
        """Begin an epoch, in which each rank gets its own report of the one before."""
        meeting = Meeting(len(self.replicas))
        for replica, report in zip(self.replicas, earlier, strict=True):
            replica.check = ReplicaCheck(Seat(meeting, replica.rank), replica.topology, every)
            replica.check.expect_repeated(report, self.step)

    def close(self) -> None:
        for replica in self.replicas:
            replica.check.close(WAIT_S)
        self.engine.close()

    def state(self) -> Any:
        """What a generation of this step holds."""
        return self.step, [
            copy.deepcopy((each.model.state_dict(), each.optimizer.state_dict()))
            for each in self.replicas
        ]

    def restore(self, state: Any) -> None:
        self.step, states = state
        for replica, (model, optimizer) in zip(self.replicas, copy.deepcopy(states), strict=True):
            replica.model.load_state_dict(model)
            replica.optimizer.load_state_dict(optimizer)

    def train(self, *, wrong: int | None = None, where: Where = "parameter") -> None:
        """Train one step, in which a bit of rank `wrong` flips."""
        self.step += 1
        if wrong is not None and where == "before the step":
            self.replicas[wrong].flip(where)
        batch = torch.arange(16.0).view(2, 8) * 0.01 * self.step
        for replica in self.replicas:
            replica.optimizer.zero_grad()
            hidden = replica.model[0](batch)
            if replica.rank == wrong and where == "activation":
                flip(hidden)
            replica.model[1](hidden).square().sum().backward()
        for parameters in zip(*(each.model.parameters() for each in self.replicas), strict=True):
            mean = torch.stack([each.grad for each in parameters]).mean(0)
            for rank, each in enumerate(parameters):
                assert each.grad is not None
                each.grad.copy_(mean + self.noise(rank))
        if wrong is not None and where == "gradient":
            self.replicas[wrong].flip(where)
        for replica in self.replicas:
            replica.optimizer.step()
        if wrong is not None and where in ("parameter", "moment"):
            self.replicas[wrong].flip(where)

    def save(self) -> list[HoldfastError | None]:
        """Compare the replicas as a save of this step does; the outcome on each rank."""
        number, self._number = self._number, self._number + 1
        for replica in self.replicas:
            replica.check.on_save_called(number, self.step)
        refused: dict[int, HoldfastError] = {}
        for replica in self.replicas:
            try:
                if replica.check.due(number, WAIT_S):
                    replica.check.hand_over(number, replica.digests(self.engine))
            except HoldfastError as error:
                refused[replica.rank] = error
        return [refused.get(each.rank) or outcome(each.check, number) for each in self.replicas]

    def found(self) -> Divergence | None:
        """What all ranks have concluded."""
        (found,) = {
            None if (told := each.check.divergence) is None else told.essence
            for each in self.replicas
        }
        return found

    def reports(self) -> list[Divergence | None]:
        return [each.check.divergence for each in self.replicas]


def outcome(check: ReplicaCheck, number: int) -> HoldfastError | None:
    try:
        check.settle(number)
    except HoldfastError as error:
        return error
    return None


@pytest.fixture(params=OPTIMIZERS, ids=["AdamW", "SGD", "foreach Adam"])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def adamw() -> Make:
    return OPTIMIZERS[0]


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    made: list[Job] = []
    yield made
    for job in made:
        job.close()


def trained(jobs: list[Job], ranks: int, make: Make) -> Job:
    """A job whose first steps found its replicas equal."""
    job = Job(ranks, make)
    jobs.append(job)
    for _ in range(FIRST):
        job.train()
        assert job.save() == [None] * ranks
    return job


def gone_on(job: Job, steps: int = STEPS) -> int | None:
    """Number of steps until replicas differ; None when they do not."""
    for count in range(1, steps + 1):
        job.train()
        if any(job.save()):
            return count
    return None


@pytest.mark.parametrize("where", ["parameter", "gradient", "moment", "before the step"])
@pytest.mark.parametrize("wrong", [0, 2])
def test_a_flip_in_one_of_three_replicas_is_found_in_its_step_and_names_it(
    jobs: list[Job],
    make: Make,
    where: Where,
    wrong: int,
) -> None:
    job = trained(jobs, 3, make)
    job.train(wrong=wrong, where=where)
    for error in job.save():
        assert isinstance(error, ReplicasDivergedError), error
        assert f"ranks [{wrong}] are wrong (Majority)" in str(error)
    found = job.found()
    assert found is not None
    assert (found.wrong, found.proof) == ((wrong,), Proof.MAJORITY)
    assert (found.step, found.equal_step) == (FIRST + 1, FIRST), "steps until it is found: 1"
    assert found.ranks == (0, 1, 2) and found.compared_all
    gone_on(job, 2)
    assert job.found() == found, "the first comparison that differed is the one that counts"


def test_of_saves_of_which_every_third_is_compared_a_flip_is_found_within_three_steps(
    jobs: list[Job], adamw: Make
) -> None:
    job = Job(3, adamw)
    jobs.append(job)
    job.begin([None] * 3, every=3)
    assert gone_on(job, 3) is None
    job.train(wrong=1)
    assert not any(job.save())
    assert gone_on(job) == 2
    found = job.found()
    assert found is not None and (found.wrong, found.compared_all) == ((1,), False)
    assert (found.step, found.equal_step) == (6, 3)


def test_a_flip_in_an_activation_reaches_all_replicas_alike_and_is_not_found(
    jobs: list[Job], adamw: Make
) -> None:
    """Gradients are summed over all ranks before anybody could see that one of them is wrong."""
    job = trained(jobs, 3, adamw)
    job.train(wrong=1, where="activation")
    assert job.save() == [None] * 3 and gone_on(job) is None
    assert job.found() is None


def diverged_pair(jobs: list[Job], make: Make, where: Where, wrong: int) -> tuple[Job, Any]:
    """Two replicas of which one was wrong, and the newest generation before that."""
    job = trained(jobs, 2, make)
    line = job.state()
    job.train()
    assert not any(job.save())  # its snapshot is not protected before the flip
    job.train(wrong=wrong, where=where)
    assert all(job.save())
    found = job.found()
    assert found is not None and (found.wrong, found.proof) == ((), Proof.NONE)
    assert found.ranks == (0, 1)
    return job, line


def repeated(job: Job, line: Any, reports: list[Divergence | None] | None = None) -> None:
    """Go back to `line` in another epoch."""
    reports = reports or job.reports()
    for replica in job.replicas:
        replica.check.close(WAIT_S)
    job.restore(line)
    job.begin(reports)


@pytest.mark.parametrize("where", ["parameter", "gradient", "moment"])
@pytest.mark.parametrize("wrong", [0, 1])
def test_of_two_replicas_the_one_whose_bytes_do_not_come_again_is_named(
    jobs: list[Job],
    make: Make,
    where: Where,
    wrong: int,
) -> None:
    job, line = diverged_pair(jobs, make, where, wrong)
    first = job.found()
    repeated(job, line)
    assert gone_on(job, 1) is None and job.found() is None, "the step in question comes next"
    assert gone_on(job, 1) is None
    found = job.found()
    assert first is not None and found is not None
    assert found == replace(first, wrong=(wrong,), proof=Proof.REPEATED)
    assert gone_on(job) is None
    assert job.found() == found, "what was found stays known while the replicas are equal"


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("late", [1, 2])
def test_a_replica_that_is_wrong_again_is_named_also_if_that_is_at_an_earlier_step(
    jobs: list[Job], adamw: Make, wrong: int, late: int
) -> None:
    job, line = diverged_pair(jobs, adamw, "parameter", wrong)
    repeated(job, line)
    for step in range(1, late + 1):
        job.train(wrong=wrong if step == late else None, where="moment")
        assert any(job.save()) == (step == late)
    found = job.found()
    assert found is not None and (found.wrong, found.proof) == ((wrong,), Proof.REPEATED)
    gone_on(job, 2)
    assert job.found() == found


def test_where_wrong_values_had_reached_both_replicas_nobody_is_blamed(
    jobs: list[Job], adamw: Make
) -> None:
    job, line = diverged_pair(jobs, adamw, "before the step", 1)
    repeated(job, line)
    assert gone_on(job, 2) is None
    found = job.found()
    assert found is not None and (found.wrong, found.proof) == ((), Proof.UNDECIDED)


def test_training_that_is_not_deterministic_blames_nobody(jobs: list[Job], adamw: Make) -> None:
    job = trained(jobs, 2, adamw)
    line, times = job.state(), iter(range(10**6))
    job.noise = lambda rank: next(times) * 1e-4
    assert gone_on(job) == 1
    repeated(job, line)
    assert gone_on(job) == 1
    found = job.found()
    assert found is not None and (found.wrong, found.proof) == ((), Proof.UNDECIDED)


def test_ranks_that_always_compute_different_things_show_nobody_to_blame(
    jobs: list[Job], adamw: Make
) -> None:
    """Such as one whose gradient is not reduced, or a device that is wrong in the same way each
    time: nothing shows which of these it is, so nobody is blamed."""
    job = trained(jobs, 2, adamw)
    line = job.state()
    job.noise = lambda rank: rank * 1e-3
    assert gone_on(job) == 1
    repeated(job, line)
    assert gone_on(job) == 1
    found = job.found()
    assert found is not None and (found.wrong, found.proof) == ((), Proof.UNDECIDED)


def test_a_pair_that_differs_hides_nobody_who_is_outvoted_later(
    jobs: list[Job], adamw: Make
) -> None:
    job = trained(jobs, 4, adamw)
    before = job.state()
    job.noise = lambda rank: (rank % 2) * 1e-3
    assert gone_on(job, 1) == 1
    tie = job.found()
    assert tie is not None and tie.proof is Proof.NONE
    job.noise = lambda rank: 0.0
    job.restore(before)
    job.train(wrong=3)
    assert all(job.save())
    named = job.found()
    assert named is not None and (named.wrong, named.proof) == ((3,), Proof.MAJORITY)
    job.noise = lambda rank: (rank % 2) * 1e-3
    gone_on(job, 2)
    assert job.found() == named


def test_a_difference_after_the_step_in_question_was_not_repeated(
    jobs: list[Job], adamw: Make
) -> None:
    job, line = diverged_pair(jobs, adamw, "parameter", 0)
    repeated(job, line)
    job.train()
    assert not any(job.save())
    job.train()  # its save is skipped
    job.train(wrong=1)
    assert all(job.save())
    found = job.found()
    assert found is not None and (found.wrong, found.proof) == ((), Proof.NONE)


def test_a_first_comparison_that_differs_claims_nothing_of_earlier_ones(
    jobs: list[Job], adamw: Make
) -> None:
    job = Job(2, adamw)
    jobs.append(job)
    job.train(wrong=1)
    for error in job.save():
        assert "no comparison of this session has found them equal" in str(error)
        assert "mixture" not in str(error), "every save is compared"


def test_without_one_ranks_memory_of_the_first_time_nobody_is_blamed(
    jobs: list[Job], adamw: Make
) -> None:
    """Its member has moved meanwhile."""
    job, line = diverged_pair(jobs, adamw, "parameter", 0)
    repeated(job, line, [job.reports()[0], None])
    assert gone_on(job, 2) is None
    found = job.found()
    assert found is not None and (found.wrong, found.proof) == ((), Proof.UNDECIDED)


@pytest.mark.parametrize("nonsense", ["other steps", "a later line", "not all compared"])
def test_a_report_of_no_use_is_not_judged(jobs: list[Job], adamw: Make, nonsense: str) -> None:
    job, line = diverged_pair(jobs, adamw, "parameter", 0)
    report = job.reports()[0]
    assert report is not None
    others = {
        "other steps": replace(report, history=(Compared(999, 1, 2),)),
        "a later line": replace(report, step=line[0] - 1),
        "not all compared": replace(report, compared_all=False),
    }
    repeated(job, line, [others[nonsense]] * 2)
    assert gone_on(job) is None
    found = job.found()
    assert found is None or (found.wrong, found.proof) == ((), Proof.UNDECIDED)
    assert (found is None) == (nonsense != "other steps")


def test_a_rank_remembers_a_bounded_number_of_steps(jobs: list[Job], adamw: Make) -> None:
    job = trained(jobs, 2, adamw)
    assert gone_on(job, HISTORY_MAX + 5) is None
    job.train(wrong=1)
    job.save()
    for report in job.reports():
        assert report is not None and len(report.history) == HISTORY_MAX
        assert report.history[-1].step == job.step


def test_replicas_that_hold_the_same_again_have_nothing_to_report(
    jobs: list[Job], adamw: Make
) -> None:
    job = trained(jobs, 2, adamw)
    before = job.state()
    job.train(wrong=1)
    assert all(job.save()) and job.found() is not None
    job.restore(before)
    job.train()
    assert not any(job.save()) and job.found() is None


@pytest.mark.parametrize("ranks", [2, 3])
def test_undisturbed_training_raises_no_alarm(jobs: list[Job], adamw: Make, ranks: int) -> None:
    job = trained(jobs, ranks, adamw)
    line = job.state()
    assert gone_on(job, 40) is None and job.reports() == [None] * ranks
    repeated(job, line)
    assert gone_on(job, 40) is None and job.reports() == [None] * ranks
