"""What logs of pipeline stages take, beside what the trainers' log really keeps."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast._elastic.boundary_log import BoundaryLog, Crossing, Key
from holdfast_cli.planner.models.boundary_logs import plan_logs
from holdfast_core.errors import InvalidJobError
from holdfast_core.job.parsing import MoETrainingJob, parse_job

ACTIVATION, MICRO_BATCHES = 48, 3


def job(pp: int = 4, nproc: int = 1, **policy: Any) -> MoETrainingJob:
    container = {"name": "trainer", "command": ["train"]}
    return parse_job(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "MoETrainingJob",
            "metadata": {"name": "logs"},
            "spec": {
                "nodes": 2 * pp // nproc,
                "nprocPerNode": nproc,
                "parallelism": {"dp": 2, "pp": pp},
                "snapshot": {"policy": {"type": "Full"} | policy},
                "trainer": {"template": {"spec": {"containers": [container]}}},
            },
        }
    )


def sparse(window: int) -> MoETrainingJob:
    return job(type="Sparse", sparse={"window": window})


def most_kept(every: int, window: int, lag: int, sends: int, *, received: bool) -> int:
    """Most bytes of a log in a run whose saves are protected in the `lag`-th step after them, and
    skipped while one is not."""
    log, most, busy_until = BoundaryLog(10**9, keeps_received=received), 0, 0
    protected: dict[int, int] = {}  # by the step that begins next: what a restore brings back
    for step in range(1, 12 * every + 1):
        if step in protected:
            log.drop_to(protected.pop(step))
        log.begin(step)
        for number in range(MICRO_BATCHES):
            for crossing in (Crossing.ACTIVATION, Crossing.GRADIENT)[:sends]:
                log.add_sent(1, Key(step, crossing, number), bytes(ACTIVATION))
                log.add_received(1, Key(step, crossing, number), bytes(ACTIVATION))
        log.complete(step)
        most = max(most, log.nbytes)
        if step % every == 0 and step >= busy_until:
            busy_until = step + lag
            protected[step + lag + 1] = step - window + 1 if window else step
    return most


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("of_steps", [1, 2, 5])
@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("received", [False, True])
def test_the_plan_is_what_the_log_keeps(
    received: bool, windows: bool, of_steps: int, lag: int
) -> None:
    found = plan_logs(
        sparse(of_steps) if windows else job(),
        activation_bytes=ACTIVATION,
        micro_batches=MICRO_BATCHES,
        interval_steps=1 if windows else of_steps,
        lag_steps=lag,
        log_received=received,
    )
    window = of_steps if windows else 0
    ends, inner = (most_kept(of_steps, window, lag, sends, received=received) for sends in (1, 2))
    assert found.rank_bytes == (ends, inner, inner, ends)


@pytest.mark.parametrize("window", [1, 3, 4])
def test_windows_of_gradients_need_the_logs_of_snapshots_as_far_apart(window: int) -> None:
    def planned(of: MoETrainingJob, every: int) -> tuple[int, ...]:
        return plan_logs(
            of,
            activation_bytes=ACTIVATION,
            micro_batches=MICRO_BATCHES,
            interval_steps=every,
            lag_steps=2,
        ).rank_bytes

    of_gradients = job(type="Sparse", sparse={"window": window, "repeats": "Optimizer"})
    assert planned(of_gradients, 1) == planned(job(), window)


def test_a_node_holds_the_logs_of_its_ranks() -> None:
    for nproc, of_node in ((1, 2), (2, 4), (4, 6)):
        found = plan_logs(
            job(nproc=nproc), activation_bytes=1, micro_batches=1, interval_steps=1, lag_steps=1
        )
        assert found.step_bytes == (1, 2, 2, 1)
        assert found.node_bytes == 2 * of_node


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (job(pp=1), "has one pipeline stage"),
        (job(type="PartialExperts", partialExperts={}), "PartialExperts, no stage repeats steps"),
    ],
)
def test_logs_that_help_nobody_are_refused(wrong: MoETrainingJob, message: str) -> None:
    with pytest.raises(InvalidJobError, match=message):
        plan_logs(wrong, activation_bytes=1, micro_batches=1, interval_steps=1, lag_steps=1)
