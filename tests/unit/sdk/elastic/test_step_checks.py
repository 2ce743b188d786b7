"""A bit flips in state that has no replica: the step is executed again, and the rank is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from checked_steps import FIRST, Fault, Job, Outcome, outcomes_of, train_all
from ranks import run_ranks

from holdfast_core.corruption import Proof, bounded_divergence

WRONG = 1
AT_REST = ("parameter", "moment")

pytestmark = pytest.mark.timeout(180)


def train(directory: Path, jobs: list[Job], ranks: int = 2) -> list[list[Outcome]]:
    run_ranks(train_all, (ranks, jobs, str(directory)), ranks)
    return outcomes_of(directory, ranks)


def check_blamed(
    fault: Fault, outcomes: list[Outcome], undisturbed: list[Outcome], executions: int = 3
) -> None:
    """Check that all ranks find where the difference began, in the step in which the bit flipped,
    and that the fault left nothing behind."""
    # Before a check was clean nothing shows that the steps of this training can be repeated.
    wrong = (WRONG,) if fault.check > 1 else ()
    for each, right in zip(outcomes, undisturbed, strict=True):
        found = each.found
        assert found is not None and found == outcomes[0].found
        assert (found.proof, found.ranks, found.wrong) == (Proof.REEXECUTED, (WRONG,), wrong)
        assert found.step == each.checked[fault.check - 1]
        assert bounded_divergence(found) == found, "daemons take it"
        assert each.executed.count(found.step) == executions
        assert each.state == right.state and each.problem == ""


def check_changed(outcomes: list[Outcome]) -> None:
    """Check that all ranks name the one whose memory changed, and that nothing is saved any
    more."""
    for each in outcomes:
        found = each.found
        assert found is not None and found == outcomes[0].found
        assert (found.proof, found.wrong) == (Proof.CHANGED, (WRONG,))
        assert found.step == each.checked[1] == each.checked[-1]
        assert bounded_divergence(found) == found
        assert "so its memory is not reliable" in each.problem


def faults(kind: str) -> list[Job]:
    flips = [Fault(rank=WRONG, where=w) for w in ("activation", "gradient", "reduced gradient")]
    at_rest = [Fault(rank=WRONG, where=where) for where in AT_REST]
    early = Fault(rank=WRONG, where="activation", check=1)
    return [Job(kind=kind, fault=each) for each in (*flips, *at_rest, early)]


def check_faults(kind: str, directory: Path, jobs: list[Job], ranks: int) -> None:
    found = train(directory, [Job(kind=kind, share=0.0), Job(kind=kind), *jobs], ranks)
    undisturbed, checked, *disturbed = found
    for each, right in zip(checked, undisturbed, strict=True):
        assert each.found is None and each.executed.count(FIRST) == 2
        assert each.recorded and set(each.recorded) == set(each.checked)
        assert each.state == right.state, "steps that are executed twice change nothing"
        assert set(each.drawn) == set(right.drawn), "and draw the same random numbers"
    for job, outcomes in zip(jobs, disturbed, strict=True):
        assert job.fault is not None
        if job.fault.where in AT_REST:
            check_changed(outcomes)
        else:
            check_blamed(job.fault, outcomes, undisturbed)


@pytest.mark.slow
def test_flips_in_shards_of_fsdp_are_found_and_the_right_rank_is_named(tmp_path: Path) -> None:
    check_faults("fsdp", tmp_path, faults("fsdp"), 2)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["fsdp", "tp", "ddp", "messages"])
def test_flips_in_any_execution_and_parallelism_are_found(kind: str, tmp_path: Path) -> None:
    jobs = faults(kind)
    for job in faults(kind):
        assert job.fault is not None
        if job.fault.where != "moment":
            fault = Fault(rank=WRONG, where=job.fault.where, check=job.fault.check, execution=2)
            jobs.append(Job(kind=kind, fault=fault))
    check_faults(kind, tmp_path, jobs, 2 if kind == "tp" else 3)


def test_a_device_that_is_wrong_each_time_is_found_by_other_ranks(tmp_path: Path) -> None:
    devices = [("fsdp", "addcdiv_"), ("messages", "native_layer_norm")]
    jobs = [Job(kind=kind, wrong=(WRONG, operation)) for kind, operation in devices]
    jobs += [Job(kind="messages", wrong=(WRONG, "mm"), staged=True)]
    for job, outcomes in zip(jobs, train(tmp_path, jobs, 3), strict=True):
        for each in outcomes:
            found = each.found
            assert found is not None and found == outcomes[0].found
            assert (found.proof, found.ranks, found.wrong) == (Proof.ELSEWHERE, (WRONG,), (WRONG,))
            assert bounded_divergence(found) == found and each.problem == ""
            assert found.step in each.checked[1:], "one check names nobody"
            assert each.executed.count(found.step) == (1 if job.staged else 2)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_where_no_step_is_executed_again_memory_is_checked(tmp_path: Path) -> None:
    """As in stages of a pipeline, and where experts have seats."""
    faults = [Fault(rank=WRONG, where=where) for where in AT_REST]
    jobs = [Job(kind="messages", staged=True, fault=fault) for fault in (None, *faults)]
    clean, *changed = train(tmp_path, jobs)
    for each in clean:
        assert each.found is None and each.executed == list(range(1, 21))
        assert len(each.checked) > 1 and each.recorded == each.checked
    for outcomes in changed:
        check_changed(outcomes)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_of_two_ranks_neither_is_named(tmp_path: Path) -> None:
    for outcomes in train(tmp_path, [Job(kind="fsdp", wrong=(WRONG, "mm"), steps=28)]):
        for each in outcomes:
            found = each.found
            assert found is not None
            assert (found.proof, found.ranks, found.wrong) == (Proof.ELSEWHERE, (0, 1), ())
            assert bounded_divergence(found) == found


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_loop_that_is_entered_again_is_no_training_that_cannot_be_repeated(
    tmp_path: Path,
) -> None:
    """Frameworks make another DistributedDataParallel then, whose first buckets are others."""
    late = Fault(rank=WRONG, where="gradient", execution=2)
    jobs = [Job(kind="wrapped anew", share=0.0), Job(kind="wrapped anew")]
    unchecked, checked, faulty = train(tmp_path, [*jobs, Job(kind="wrapped anew", fault=late)])
    for each, right in zip(checked, unchecked, strict=True):
        assert each.found is None and each.state == right.state
        assert len(each.checked) > 1 and {each.executed.count(s) for s in each.checked} == {3}
    check_blamed(late, faulty, unchecked, executions=4)


def test_training_that_cannot_be_repeated_is_told_from_corruption(tmp_path: Path) -> None:
    jobs = [
        Job(kind="fsdp", noise=True, steps=28),
        Job(kind="fsdp", writes=True, steps=28),
        Job(kind="fsdp", fault=Fault(rank=WRONG, where="written")),
        Job(kind="fsdp", scaled=True, share=0.0),
        Job(kind="fsdp", scaled=True),
        Job(kind="fsdp", gathers=4, share=0.0, steps=28),
        Job(kind="fsdp", gathers=4, steps=28),
    ]
    noisy, writing, late, unchecked, scaled, unasked, adding = train(tmp_path, jobs)
    for each, right in zip(adding, unasked, strict=True):
        assert len(each.recorded) == 2, "it ends where no optimizer steps in what is recorded"
        assert each.found is None and each.executed == list(range(1, 29))
        assert each.state == right.state
    for each in late:
        assert each.found is not None and each.found.proof is Proof.UNREPEATABLE
        assert each.found.ranks == (WRONG,) and each.problem == ""
        assert each.checked == [FIRST, each.found.step]
    for outcomes, times in ((noisy, 3), (writing, 1)):
        for each in outcomes:
            assert each.found is not None and each.found.proof is Proof.UNREPEATABLE
            assert bounded_divergence(each.found) == each.found
            assert each.checked == [FIRST], "no further step is checked"
            assert each.executed.count(FIRST) == times and each.problem == ""
    for each, right in zip(scaled, unchecked, strict=True):
        assert each.found is None and each.state == right.state
        assert each.executed.count(FIRST) == 2
