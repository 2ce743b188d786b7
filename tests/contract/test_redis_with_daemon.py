"""Real daemons with a real Redis that dies, hangs and forgets: saves do not notice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from harness import RawCluster, RawJob
from redis import Redis
from waiting import wait_for

pytestmark = pytest.mark.redis

SAVE_S_MAX = 2.0
"""A save of one rank, on a machine that has much else to do; Redis' own time limit is longer."""

CAUGHT_UP_S = 30.0
"""The daemons' longest pause before they try Redis again, three times."""


@pytest.fixture
def job(redis_server: Any) -> Iterator[RawJob]:
    with RawCluster(arguments=("--redis", redis_server.url)) as cluster:
        yield RawJob(cluster, cluster.start_nodes(2))
        print(cluster.story())


def _begin(job: RawJob) -> None:
    job.form()
    job.start_trainers()


def _train(job: RawJob, steps: int) -> None:
    """Save and protect, each save in its time."""
    for _ in range(steps):
        job.step += 1
        for trainer in job.trainers:
            began = time.monotonic()
            assert trainer.save(job.step)
            assert time.monotonic() - began < SAVE_S_MAX
        job.wait_protected(job.step)


def _wait_catalogue(job: RawJob, url: str) -> None:
    """Until Redis says of every rank what the daemons say."""
    with Redis.from_url(url, decode_responses=True, socket_timeout=2.0) as redis:

        def told() -> bool:
            stages = redis.hgetall(f"holdfast:job:{job.name}:stages")
            states = redis.hgetall(f"holdfast:job:{job.name}:state")
            assert isinstance(stages, dict) and isinstance(states, dict)
            wanted = {f"{rank}:protected": str(job.generation) for rank in range(job.size)}
            return wanted.items() <= stages.items() and set(job.nodes) <= set(states)

        wait_for("the catalogue to hold everything", told, CAUGHT_UP_S)


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
