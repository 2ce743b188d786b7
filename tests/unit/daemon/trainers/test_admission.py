"""Who pays for a call of a trainer: its job when it has a right, strangers together when not."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, NoReturn, cast

import grpc
import pytest

from holdfast_core.errors import UnauthenticatedError
from holdfast_core.links import LinkVerdict
from holdfast_daemon.job.host import JobHost
from holdfast_daemon.limits.rates import JOB_RATE, REFUSAL_RATE
from holdfast_daemon.metrics import DaemonMetrics
from holdfast_daemon.trainers import admission
from holdfast_daemon.trainers.auth import PodIdentity, TokenAuthenticator
from holdfast_daemon.trainers.claims import Claims
from holdfast_daemon.trainers.service import TrainerService
from holdfast_daemon.trainers.waiting_agents import WaitingAgents
from holdfast_protos import codec, trainer_pb2

JOB = "team.moe"


class _Reviewer:
    def review(self, token: str) -> PodIdentity:
        pods = {"mine": "moe-0-1", "another's": "other-0-1"}
        if token not in pods:
            raise UnauthenticatedError("no such token")
        return PodIdentity(namespace="team", pod=pods[token])


class _Aborted(Exception):
    pass


class _Context:
    def __init__(self, token: str) -> None:
        self._headers = (("authorization", f"Bearer {token}"),) if token else ()

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._headers

    async def abort(
        self, code: grpc.StatusCode, details: str, trailing_metadata: object = ()
    ) -> NoReturn:
        raise _Aborted(code.name)


async def _no_links(job: str) -> LinkVerdict:
    return LinkVerdict()


def _service(metrics: DaemonMetrics) -> TrainerService:
    """The service of a node that has the job, but no state of it: a call that is let in fails."""
    return TrainerService(
        agents=WaitingAgents(time.monotonic),
        host_of=lambda job: cast(JobHost, object()) if job == JOB else None,
        hosts=dict,
        ended=lambda job: False,
        claims=Claims(),
        arena_socket=Path("arena.sock"),
        node_host="127.0.0.1",
        status=lambda: {"jobs": {}},
        authenticator=TokenAuthenticator(_Reviewer(), time.monotonic, time.time),
        metrics=metrics,
        check_links=_no_links,
    )


async def _hello(service: TrainerService, token: str) -> str:
    """How the call ends: `let in`, or the name of the status that it is refused with."""
    request = trainer_pb2.HelloRequest(protocol_version=codec.PROTOCOL_VERSION, job=JOB)
    context: Any = _Context(token)
    try:
        await service.Hello(request, context)
    except _Aborted as aborted:
        return str(aborted)
    except AttributeError:
        return "let in"
    raise AssertionError("the job of this node can answer nothing")


def _limited(metrics: DaemonMetrics) -> float:
    return (
        metrics.registry.get_sample_value("holdfast_rate_limited_total", {"service": "trainers"})
        or 0.0
    )


@pytest.mark.parametrize("token", ["", "another's", "made up"])
def test_strangers_who_name_a_job_do_not_spend_what_its_trainers_may_call(token: str) -> None:
    async def run() -> None:
        metrics = DaemonMetrics()
        service = _service(metrics)
        assert await _hello(service, "mine") == "let in"
        await _hello(service, token)  # whose it is, is known from now on
        crowd = [asyncio.create_task(_hello(service, token)) for _ in range(3 * JOB_RATE.burst)]
        while not crowd[REFUSAL_RATE.burst - 1].done():
            await asyncio.sleep(0)
        done = sum(call.done() for call in crowd)
        assert await _hello(service, "mine") == "let in"
        assert sum(call.done() for call in crowd) == done, "it did not wait for a turn"
        answers = set(await asyncio.gather(*crowd))
        assert answers == {"PERMISSION_DENIED" if token == "another's" else "UNAUTHENTICATED"}
        assert _limited(metrics) > 0

    asyncio.run(run())


def test_few_refusals_are_held_up_whoever_floods() -> None:
    async def run() -> None:
        service = _service(DaemonMetrics())
        crowd = [asyncio.create_task(_hello(service, "")) for _ in range(3 * REFUSAL_RATE.burst)]
        for _ in range(10):
            await asyncio.sleep(0)
        waiting = [call for call in crowd if not call.done()]
        assert 0 < len(waiting) <= admission.REFUSALS_HELD_MAX
        await asyncio.gather(*crowd)

    asyncio.run(run())


def test_sessions_that_were_never_opened_are_refused_too() -> None:
    async def run() -> None:
        metrics = DaemonMetrics()
        service = _service(metrics)

        async def close(number: int) -> str:
            context: Any = _Context("")
            with pytest.raises(_Aborted) as aborted:
                await service.Close(trainer_pb2.CloseRequest(session=f"{JOB}/1/{number}"), context)
            return str(aborted.value)

        answers = await asyncio.gather(*(close(number) for number in range(1000)))
        assert set(answers) == {"NOT_FOUND"}
        assert _limited(metrics) > 0

    asyncio.run(run())
