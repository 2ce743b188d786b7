"""Who may act for which job, and what is remembered of tokens."""

from __future__ import annotations

import asyncio
import threading
from contextlib import nullcontext

import pytest
from api_server import web_token

from holdfast_core.errors import (
    AccessDeniedError,
    HoldfastError,
    UnauthenticatedError,
    UnknownSessionError,
    UnreachableError,
)
from holdfast_daemon.trainers.auth import (
    AWAY_S,
    CALLS_WAITING_MAX,
    DENIED_FRESH_S,
    FRESH_S,
    REFUSED_REMEMBERED_MAX,
    REMEMBERED_MAX,
    REVIEWS_WAITING_MAX,
    PodIdentity,
    Pods,
    TokenAuthenticator,
    TrustingAuthenticator,
    may_act_for,
    token_expiry,
)
from holdfast_daemon.trainers.claims import SessionSeal

NOW = 1_000_000.0
JOB = "team.moe"


class FakeReviewer:
    """Knows one pod under every token, until it is set to fail."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.pod = "moe-0-1"
        self.error: HoldfastError | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.held = ""
        """What tokens that wait at the gate begin with."""

    def review(self, token: str) -> PodIdentity:
        self.asked.append(token)
        assert not token.startswith(self.held) or self.gate.wait(10)
        if self.error is not None:
            raise self.error
        return PodIdentity(namespace="team", pod=self.pod)


class Bench:
    """An authenticator over a fake reviewer, on a clock of its own."""

    def __init__(self) -> None:
        self.now = NOW
        self.set_back_s = 0.0
        """Seconds by which the wall clock was set back."""
        self.reviewer = FakeReviewer()
        self.outcomes: list[str] = []
        self.auth = TokenAuthenticator(
            self.reviewer,
            lambda: self.now,
            lambda: self.now - self.set_back_s,
            self.outcomes.append,
        )


def token_until(expires_at: float) -> str:
    return web_token({"exp": int(expires_at)}, "signature")


@pytest.mark.parametrize(
    ("namespace", "pod", "job", "allowed"),
    [
        ("team", "moe-0-1", "team.moe", True),
        ("team", "moe-12-345", "team.moe", True),
        ("team", "my-moe-0-1", "team.my-moe", True),
        ("team", "moe-0-0-1", "team.moe-0", True),
        ("team", "moe-0-0-1", "team.moe", False),
        ("team", "my-moe-0-1", "team.moe", False),
        ("team", "moe-0", "team.moe", False),
        ("team", "moe-0-1x", "team.moe", False),
        ("team", "moe-0-1\n", "team.moe", False),
        ("team", "moe-0-\u0661", "team.moe", False),
        ("other", "moe-0-1", "team.moe", False),
        ("team", "m-e-0-1", "team.m.e", False),
        ("team", "mxe-0-1", "team.m.e", False),
        ("team", "moe-0-1", "moe", False),
        ("", "-0-1", "", False),
    ],
)
def test_a_pod_acts_for_its_own_job_only(namespace: str, pod: str, job: str, allowed: bool) -> None:
    assert may_act_for(PodIdentity(namespace=namespace, pod=pod), job) is allowed


def test_any_pod_of_the_namespace_acts_for_a_job_whose_pods_another_controller_makes() -> None:
    pod = PodIdentity(namespace="team", pod="train-0-x7k2p")
    assert may_act_for(pod, JOB, Pods.ANY)
    assert not may_act_for(pod, "other.moe", Pods.ANY)
    assert not may_act_for(pod, JOB, Pods.UNKNOWN)


@pytest.mark.parametrize(
    ("pods", "job", "error"),
    [
        (Pods.ANY, JOB, None),
        (Pods.NAMED, JOB, AccessDeniedError),
        (Pods.UNKNOWN, JOB, UnreachableError),
        (Pods.UNKNOWN, "other.moe", AccessDeniedError),
        (Pods.ANY, "other.moe", AccessDeniedError),
    ],
)
def test_a_pod_waits_for_its_job_and_is_kept_out_of_others(
    pods: Pods, job: str, error: type[HoldfastError] | None
) -> None:
    async def run() -> None:
        reviewer = FakeReviewer()
        reviewer.pod = "train-0-x7k2p"
        auth = TokenAuthenticator(reviewer, lambda: NOW, lambda: NOW, pods_of=lambda job: pods)
        with pytest.raises(error) if error is not None else nullcontext():
            await auth.authorize("token", job)
        seen = await auth.visible("token", [JOB, "other.moe"])
        assert seen == ([JOB] if pods is Pods.ANY else [])

    asyncio.run(run())


@pytest.mark.parametrize(
    ("token", "expiry"),
    [
        (web_token({"exp": 17}, "s"), 17.0),
        (web_token({}, "s"), None),
        (web_token({"exp": "soon"}, "s"), None),
        ("opaque", None),
        ("a.!.c", None),
        ("a.bm90IGpzb24.c", None),
        ("a.W10.c", None),
    ],
)
def test_the_expiry_is_read_from_tokens_that_have_one(token: str, expiry: float | None) -> None:
    assert token_expiry(token) == expiry


def test_an_answer_is_asked_for_once_a_minute() -> None:
    async def run() -> None:
        bench, token = Bench(), token_until(NOW + 3600)
        for _ in range(3):
            await bench.auth.authorize(token, JOB)
        assert len(bench.reviewer.asked) == 1
        bench.now += FRESH_S
        await bench.auth.authorize(token, JOB)
        assert bench.reviewer.asked == [token, token]
        assert bench.outcomes == ["allowed", "allowed"]

    asyncio.run(run())


def test_an_answer_does_not_outlive_the_token() -> None:
    async def run() -> None:
        bench, token = Bench(), token_until(NOW + 10)
        await bench.auth.authorize(token, JOB)
        bench.now += 10
        bench.reviewer.error = UnauthenticatedError("token has expired")
        with pytest.raises(UnauthenticatedError, match="token has expired"):
            await bench.auth.authorize(token, JOB)

    asyncio.run(run())


def test_calls_that_come_together_ask_once_and_one_may_be_given_up() -> None:
    async def run() -> None:
        bench, token = Bench(), token_until(NOW + 3600)
        bench.reviewer.gate.clear()
        calls = [asyncio.create_task(bench.auth.authorize(token, JOB)) for _ in range(4)]
        await asyncio.sleep(0)
        calls[0].cancel()
        bench.reviewer.gate.set()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(ended[0], asyncio.CancelledError)
        assert ended[1:] == [None, None, None]
        assert len(bench.reviewer.asked) == 1

    asyncio.run(run())


def test_no_token_is_refused_with_what_to_mount_and_asks_nobody() -> None:
    async def run() -> None:
        bench = Bench()
        with pytest.raises(
            UnauthenticatedError, match=r"audience holdfast\.dev/daemon.*HOLDFAST_TO"
        ):
            await bench.auth.authorize("", JOB)
        assert not bench.reviewer.asked

    asyncio.run(run())


def test_the_refusal_of_a_stranger_names_the_pods_that_may() -> None:
    async def run() -> None:
        bench = Bench()
        with pytest.raises(
            AccessDeniedError, match=r"pod moe-0-1 of namespace team .* job b\.moe"
        ) as e:
            await bench.auth.authorize(token_until(NOW + 3600), "b.moe")
        assert not isinstance(e.value, UnauthenticatedError)
        assert "pods of namespace b that are named moe-<member>-<attempt>" in str(e.value)

    asyncio.run(run())


def test_a_refusal_is_remembered_for_seconds_and_never_repeats_the_token() -> None:
    async def run() -> None:
        bench, token = Bench(), token_until(NOW + 3600)
        bench.reviewer.error = UnauthenticatedError(f"no such token: {token}")
        for _ in range(3):
            with pytest.raises(UnauthenticatedError, match=r"holdfast\.dev/daemon") as refused:
                await bench.auth.authorize(token, JOB)
            assert token not in str(refused.value)
        assert len(bench.reviewer.asked) == 1
        bench.now += DENIED_FRESH_S
        bench.reviewer.error = None
        await bench.auth.authorize(token, JOB)
        assert bench.outcomes == ["denied", "allowed"]

    asyncio.run(run())


def test_a_silent_api_server_denies_no_known_token_and_admits_no_unknown_one() -> None:
    async def run() -> None:
        bench, token = Bench(), token_until(NOW + 3600)
        bench.reviewer.error = UnreachableError("api:443: no answer in time")
        with pytest.raises(UnreachableError, match=r"cannot review the token .* no answer in time"):
            await bench.auth.authorize(token, JOB)
        bench.reviewer.error = None
        await bench.auth.authorize(token, JOB)
        assert bench.outcomes == ["failed", "allowed"]

    asyncio.run(run())


def test_while_the_api_server_is_away_a_known_token_is_good_until_it_expires() -> None:
    async def run() -> None:
        bench, token = Bench(), token_until(NOW + 600)
        await bench.auth.authorize(token, JOB)
        bench.reviewer.error = UnreachableError("away")
        bench.now += FRESH_S
        await bench.auth.authorize(token, JOB)
        await bench.auth.authorize(token, JOB)
        assert len(bench.reviewer.asked) == 2, "a server that is away is not asked for each call"
        bench.now += AWAY_S
        await bench.auth.authorize(token, JOB)
        assert len(bench.reviewer.asked) == 3
        bench.now = NOW + 600
        with pytest.raises(UnreachableError):
            await bench.auth.authorize(token, JOB)

    asyncio.run(run())


def test_a_pod_that_is_gone_is_refused_once_the_api_server_is_back() -> None:
    async def run() -> None:
        bench, token = Bench(), token_until(NOW + 600)
        await bench.auth.authorize(token, JOB)
        bench.reviewer.error = UnreachableError("away")
        bench.now += FRESH_S
        await bench.auth.authorize(token, JOB)
        bench.reviewer.error = UnauthenticatedError("pod not found")
        bench.now += AWAY_S
        with pytest.raises(UnauthenticatedError, match="pod not found"):
            await bench.auth.authorize(token, JOB)
        bench.reviewer.error = UnreachableError("away again")
        bench.now += DENIED_FRESH_S
        with pytest.raises(UnreachableError):
            await bench.auth.authorize(token, JOB)

    asyncio.run(run())


def test_answers_become_old_although_the_wall_clock_was_set_back() -> None:
    async def run() -> None:
        bench, gone, early = Bench(), token_until(NOW + 3600), token_until(NOW + 3601)
        await bench.auth.authorize(gone, JOB)
        bench.reviewer.error = UnauthenticatedError("pod not found")
        with pytest.raises(UnauthenticatedError):
            await bench.auth.authorize(early, JOB)
        bench.set_back_s = 86400.0
        bench.now += FRESH_S
        with pytest.raises(UnauthenticatedError):
            await bench.auth.authorize(gone, JOB)
        bench.reviewer.error = None
        await bench.auth.authorize(early, JOB)

    asyncio.run(run())


def test_a_flood_of_tokens_takes_bounded_memory() -> None:
    async def run() -> None:
        bench = Bench()
        first = token_until(NOW + 3600)
        await bench.auth.authorize(first, JOB)
        for number in range(REMEMBERED_MAX):
            await bench.auth.authorize(web_token({"exp": NOW + 3600}, str(number)), JOB)
        asked = len(bench.reviewer.asked)
        await bench.auth.authorize(first, JOB)
        assert len(bench.reviewer.asked) == asked + 1, "the oldest was forgotten"

    asyncio.run(run())


def test_a_flood_of_garbage_does_not_push_out_a_good_token() -> None:
    async def run() -> None:
        bench, good = Bench(), token_until(NOW + 3600)
        await bench.auth.authorize(good, JOB)
        bench.reviewer.error = UnauthenticatedError("no such token")
        for number in range(REMEMBERED_MAX + 1):
            with pytest.raises(UnauthenticatedError):
                await bench.auth.authorize(f"garbage-{number}", JOB)
        asked = len(bench.reviewer.asked)
        await bench.auth.authorize(good, JOB)
        assert len(bench.reviewer.asked) == asked, "the good token was not asked about again"
        assert len(bench.auth._refused) == REFUSED_REMEMBERED_MAX

    asyncio.run(run())


def test_garbage_waits_in_a_queue_with_an_end_and_a_known_token_does_not_wait_behind_it() -> None:
    async def run() -> None:
        bench, good = Bench(), token_until(NOW + 3600)
        await bench.auth.authorize(good, JOB)
        bench.now += FRESH_S
        bench.reviewer.held, bench.reviewer.error = "garbage", None
        bench.reviewer.gate.clear()
        crowd = [
            asyncio.create_task(bench.auth.authorize(f"garbage-{number}", JOB))
            for number in range(3 * REVIEWS_WAITING_MAX)
        ]
        await asyncio.sleep(0)
        with pytest.raises(UnreachableError, match=r"review 64 unknown tokens; repeat the call"):
            await bench.auth.authorize("garbage-too", JOB)
        await asyncio.wait_for(bench.auth.authorize(good, JOB), 10)
        bench.reviewer.gate.set()
        ended = await asyncio.gather(*crowd, return_exceptions=True)
        assert [type(error) for error in ended].count(UnreachableError) == 2 * REVIEWS_WAITING_MAX
        assert bench.outcomes.count("shed") == 2 * REVIEWS_WAITING_MAX + 1
        await bench.auth.authorize("garbage-too", JOB)

    asyncio.run(run())


def test_calls_that_wait_for_one_made_up_token_have_an_end() -> None:
    async def run() -> None:
        bench = Bench()
        bench.reviewer.gate.clear()
        crowd = [
            asyncio.create_task(bench.auth.job_of("made-up")) for _ in range(CALLS_WAITING_MAX)
        ]
        await asyncio.sleep(0)
        with pytest.raises(UnreachableError, match=r"256 calls already wait .* review 1 unknown"):
            await bench.auth.job_of("made-up")
        bench.reviewer.gate.set()
        assert set(await asyncio.gather(*crowd)) == {JOB}
        assert await bench.auth.job_of("made-up") == JOB

    asyncio.run(run())


@pytest.mark.parametrize(("pod", "job"), [("moe-0-1", "team.moe"), ("moe-0-0-1", "team.moe-0")])
def test_a_token_names_the_job_of_its_bearer(pod: str, job: str) -> None:
    async def run() -> None:
        bench = Bench()
        bench.reviewer.pod = pod
        assert await bench.auth.job_of(token_until(NOW + 3600)) == job
        bench.reviewer.error = UnauthenticatedError("no such token")
        with pytest.raises(UnauthenticatedError):
            await bench.auth.job_of("made-up")
        assert may_act_for(PodIdentity(namespace="team", pod=pod), job)

    asyncio.run(run())


def test_only_own_jobs_are_visible() -> None:
    async def run() -> None:
        jobs = ["team.moe", "team.other", "b.moe"]
        assert await Bench().auth.visible(token_until(NOW + 3600), jobs) == ["team.moe"]
        assert await TrustingAuthenticator().visible("", jobs) == jobs
        await TrustingAuthenticator().authorize("", JOB)

    asyncio.run(run())


def test_a_session_is_known_by_its_sealed_id_only() -> None:
    seal = SessionSeal()
    sealed = seal.seal("team.moe/1/1")
    assert seal.open(sealed) == "team.moe/1/1"
    guesses = ["team.moe/1/1", "", "team.moe/1/2" + sealed[12:], SessionSeal().seal("team.moe/1/1")]
    for guess in guesses:
        with pytest.raises(UnknownSessionError, match="open a new one"):
            seal.open(guess)
