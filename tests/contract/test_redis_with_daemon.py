"""Real daemons with a real Redis that dies, hangs and forgets: saves do not notice."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import RawCluster, RawJob
from redis import Redis
from waiting import WAIT_S, wait_for

from holdfast_cli.main import main
from holdfast_core.experts.loss_reports import JobLoss, LossReport, RecoveryLoss, merged
from holdfast_protos import trainer_pb2
from holdfast_protos.losses import loss_from_proto, loss_to_proto

pytestmark = pytest.mark.redis

SAVE_S_MAX = 2.0
"""A save of one rank, on a machine that has much else to do; Redis' own time limit is longer."""

CAUGHT_UP_S = 30.0
"""The daemons' longest pause before they try Redis again, three times."""


@pytest.fixture
def job(redis_server: Any) -> Iterator[RawJob]:
    with RawCluster(arguments=("--redis", redis_server.url)) as cluster:
        yield RawJob(cluster, cluster.start_nodes(2))
        print(cluster.report())


def _begin(job: RawJob) -> None:
    job.form()
    job.start_trainers()


def _train(job: RawJob, steps: int) -> None:
    """Save and protect, each save in its time; one may wait for the machine."""
    took_s = []
    for _ in range(steps):
        job.step += 1
        for trainer in job.trainers:
            began = time.monotonic()
            assert trainer.save(job.step)
            took_s.append(time.monotonic() - began)
        job.wait_protected(job.step)
    assert sorted(took_s)[-2] < SAVE_S_MAX, took_s


def _wait_catalogue(job: RawJob, url: str) -> None:
    """Wait until Redis has of every rank what the daemons have."""
    with Redis.from_url(url, decode_responses=True, socket_timeout=CAUGHT_UP_S) as redis:

        def caught_up() -> bool:
            stages = redis.hgetall(f"holdfast:job:{job.name}:stages")
            states = redis.hgetall(f"holdfast:job:{job.name}:state")
            assert isinstance(stages, dict) and isinstance(states, dict)
            wanted = {f"{rank}:protected": str(job.generation) for rank in range(job.size)}
            return wanted.items() <= stages.items() and set(job.nodes) <= set(states)

        wait_for("the catalogue to hold everything", caught_up, CAUGHT_UP_S)


def test_redis_may_be_dead_when_the_daemons_start(job: RawJob, redis_server: Any) -> None:
    _begin(job)
    _train(job, 3)
    redis_server.start()
    _wait_catalogue(job, redis_server.url)


@pytest.mark.parametrize("fault", ["killed", "stopped", "wiped"])
def test_saves_do_not_notice_what_becomes_of_redis(
    job: RawJob, redis_server: Any, fault: str
) -> None:
    redis_server.start()
    _begin(job)
    _train(job, 2)
    _wait_catalogue(job, redis_server.url)
    match fault:
        case "killed":
            redis_server.kill()
        case "stopped":
            redis_server.stop()
        case "wiped":
            with Redis.from_url(redis_server.url) as redis:
                redis.flushall()
    _train(job, 4)
    match fault:
        case "killed":
            redis_server.start()
        case "stopped":
            redis_server.resume()
    _wait_catalogue(job, redis_server.url)
    newest = job.generation
    job.form()
    assert job.check_restored(job.start_trainers(), newest) == newest


def _recovery(epoch: int) -> RecoveryLoss:
    """That lost ten tokens, like the one before each."""
    return RecoveryLoss(
        epoch=epoch,
        step=1,
        lost_tokens=10,
        plt=0.01,
        mlt=0.01,
        k_before=1,
        k_after=2,
        total_tokens=10 * epoch,
        total_plt=0.01,
        total_mlt=0.01,
    )


def _tell(job: RawJob, *epochs: int) -> None:
    """Every rank says what the recoveries of these epochs lost: rank 0 has routed a tenth of what
    rank 1 has."""
    for trainer in job.trainers:
        report = LossReport(
            ranks=1,
            k=2,
            experts_max=8,
            limit=0.05,
            layers=(0,),
            at_risk=(5,),
            routed=(900 * trainer.rank + 100,),
            lost=(10 * len(epochs),),
            recoveries=tuple(map(_recovery, epochs)),
        )
        message = trainer_pb2.ProgressReport(session=trainer.session, loss=loss_to_proto(report))
        trainer.daemon.stub().Progress(message, timeout=WAIT_S)


def _wait_losses(job: RawJob, url: str, *epochs: int) -> None:
    """Wait until Redis has exactly these recoveries."""
    with Redis.from_url(url, decode_responses=True, socket_timeout=CAUGHT_UP_S) as redis:

        def caught_up() -> bool:
            found = redis.hvals(f"holdfast:job:{job.name}:losses")
            assert isinstance(found, list)
            known = [RecoveryLoss.from_dict(json.loads(text)) for text in found]
            return sorted(known, key=lambda each: each.epoch) == list(map(_recovery, epochs))

        wait_for(f"the catalogue to know the recoveries {epochs}", caught_up, CAUGHT_UP_S)


def _figures(job: RawJob) -> JobLoss | None:
    """What a control loop makes of the daemons' heartbeats; None while a rank has not spoken."""
    states = [job.cluster.control.state(node, job.name) for node in job.nodes]
    reporting = [state for state in states if state is not None and state.HasField("loss")]
    report = merged(loss_from_proto(state.loss) for state in reporting)
    return JobLoss.of(report) if report is not None and report.ranks == job.size else None


def test_what_recoveries_lost_outlives_daemons_trainers_and_redis(
    job: RawJob, redis_server: Any
) -> None:
    redis_server.start()
    _begin(job)
    _train(job, 2)
    _tell(job, 1)
    _wait_losses(job, redis_server.url, 1)
    figures = wait_for("all ranks to have spoken", lambda: _figures(job))
    assert figures is not None
    assert (figures.at_risk, figures.lost) == (10 / 1100, 10 / 1100)
    for node in job.nodes:
        job.cluster.restart(node)  # with their trainers
    job.form()
    job.start_trainers()
    _train(job, 1)
    _wait_losses(job, redis_server.url, 1)  # though no daemon knows of it
    assert _figures(job) is None
    redis_server.kill()  # and with it all that it knew
    _tell(job, 1, 2)
    _train(job, 1)
    figures = wait_for("all ranks to have spoken again", lambda: _figures(job))
    assert figures is not None and figures.newest == _recovery(2)
    redis_server.start()
    _wait_losses(job, redis_server.url, 1, 2)


def test_the_history_of_a_job_is_read_without_daemons_and_stays_after_its_end(
    job: RawJob, redis_server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    redis_server.start()
    _begin(job)
    _train(job, 2)
    newest = job.generation
    job.trainers[0].die()

    def is_noticed() -> bool:
        state = job.cluster.control.state(job.nodes[0], job.name)
        return state is not None and all(rank.lost for rank in state.ranks)

    wait_for("the loss to be noticed", is_noticed)  # in its epoch
    job.form()
    assert job.check_restored(job.start_trainers(), newest) == newest
    _train(job, 1)
    arguments = ["history", job.name, "--redis", redis_server.url]

    def told() -> dict[str, Any]:
        known = main([*arguments, "--json"]) == 0
        printed = capsys.readouterr().out
        return json.loads(printed) if known else {"recoveries": [], "ended_at": None}

    def recoveries() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = told()["recoveries"]
        is_told = (
            len(found) == 2
            and found[1]["seconds"]["protected"]
            and 0 in found[1]["lost_ranks"]  # maybe rank 1 as well, which ended then
        )
        return found if is_told else []

    start, recovery = wait_for("the recovery to be told", recoveries, CAUGHT_UP_S)
    assert (start["epoch"], start["line"], start["lost_ranks"]) == (1, None, [])
    assert (recovery["epoch"], recovery["line"]) == (2, str(newest))
    assert (recovery["live"], recovery["stayed"]) == (False, [])
    seconds = [value for value in recovery["seconds"].values() if value is not None]
    assert seconds[-1] > 0 and seconds == sorted(seconds)
    job.drop()

    def ended() -> dict[str, Any]:
        found = told()
        return found if found["ended_at"] is not None else {}

    ended_with = wait_for("the end of the job to be known", ended, CAUGHT_UP_S)
    assert [each["epoch"] for each in ended_with["recoveries"]] == [1, 2]
    assert main([*arguments, "--plot", str(tmp_path / "history.svg")]) == 0
    shown = capsys.readouterr().out
    assert "1 recovery, ended" in shown and "  rank " in shown
    assert "epoch 2" in (tmp_path / "history.svg").read_text()
