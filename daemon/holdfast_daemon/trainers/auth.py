"""Decides which callers may act for which job, by the tokens of the trainers.

In Kubernetes the trainers' sockets are open to every pod that mounts them, so a caller proves its
identity with a projected service-account token, and may act for a job when its pod is one of the
job's (`may_act_for`). The API server maps a token to its pod (`trainers.token_review`), and its
answer is kept for a minute. While the API server cannot be reached, its earlier answer about a
token that has not expired still holds: a daemon must not stop the training that it protects because
the control plane is being upgraded.

Must not: keep, log or repeat a token. Only its SHA-256 is remembered.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from base64 import urlsafe_b64decode
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from holdfast_core.errors import (
    AccessDeniedError,
    HoldfastError,
    UnauthenticatedError,
    UnreachableError,
)
from holdfast_daemon.logs import bind

AUDIENCE = "holdfast.dev/daemon"
FRESH_S = 60.0
"""Time for which the API server's answer about a token is not asked for again. A deleted pod keeps
its access for at most this long, and has lost its socket by then."""
DENIED_FRESH_S = 5.0
"""Same as FRESH_S, for a refused token: it will not become valid, but calls may be repeated."""
AWAY_S = 5.0
"""Pause before an API server that did not answer is asked again about a token known before."""
REMEMBERED_MAX = 4096
"""Accepted tokens remembered: more than the pods of a node use in a day, with hourly renewals."""
REFUSED_REMEMBERED_MAX = 1024
"""Refused tokens remembered. They are kept apart, so that a flood of them does not displace the
accepted ones."""
REVIEWS_AT_ONCE = 4
"""Concurrent reviews of tokens that are not known to be good."""
REVIEWS_WAITING_MAX = 64
"""Tokens not known to be good that are under review or wait for it: 16 rounds of REVIEWS_AT_ONCE,
each of which lasts at most as long as a review may take."""
CALLS_WAITING_MAX = 256
"""Calls that wait for those reviews."""
RENEWALS_AT_ONCE = 2
"""Concurrent reviews of tokens known to be good; they do not queue behind other reviews."""

_log = bind(logging.getLogger(__name__))


@dataclass(frozen=True, kw_only=True, slots=True)
class PodIdentity:
    """The pod that a token was made for."""

    namespace: str
    pod: str


class Reviewer(Protocol):
    """Maps tokens to pods. Its calls block, and are made on threads."""

    def review(self, token: str) -> PodIdentity:
        """The pod that `token` was issued to.

        Raises:
            UnauthenticatedError: the token is refused.
            UnreachableError: there is no answer.
        """


class Authenticator(Protocol):
    """Decides what the bearer of a token may do."""

    async def authorize(self, token: str, job: str) -> None:
        """Return when the caller may act for `job`.

        Raises:
            UnauthenticatedError: there is no token, or it is refused.
            AccessDeniedError: the caller does not belong to the job.
            UnreachableError: the token cannot be reviewed now; the call can be repeated.
        """

    async def visible(self, token: str, jobs: Iterable[str]) -> list[str]:
        """The jobs among `jobs` that the caller may act for. Raises as `authorize` does, except
        AccessDeniedError."""

    async def job_of(self, token: str) -> str:
        """The job that the bearer belongs to; "" where callers prove nothing. Raises as `visible`
        does, and for every token that is not valid for any job."""

    def close(self) -> None:
        """Stop answering."""


class TrustingAuthenticator:
    """Allows every caller everything: the socket's permissions keep strangers out."""

    async def authorize(self, token: str, job: str) -> None:
        del token, job

    async def visible(self, token: str, jobs: Iterable[str]) -> list[str]:
        del token
        return list(jobs)

    async def job_of(self, token: str) -> str:
        del token
        return ""

    def close(self) -> None:
        """Do nothing: there is nothing to end."""


class Pods(StrEnum):
    """Pods of a namespace that hold the ranks of a job of that namespace."""

    NAMED = "named"
    """Pods that the operator has made, which are named `<job>-<member>-<attempt>`."""
    ANY = "any"
    """Pods that another controller has made, with any name."""
    UNKNOWN = "unknown"
    """Unknown pods: the job is not on this node."""


def may_act_for(identity: PodIdentity, job: str, pods: Pods = Pods.NAMED) -> bool:
    """Whether the pod is one of the job's: in its namespace, and one of `pods`.

    Job keys are `<namespace>.<name>`, and neither part has a dot.
    """
    namespace, dot, name = job.partition(".")
    if not dot or identity.namespace != namespace:
        return False
    named = re.fullmatch(rf"{re.escape(name)}-[0-9]+-[0-9]+", identity.pod) is not None
    return named or pods is Pods.ANY


@dataclass(frozen=True, kw_only=True, slots=True)
class _Known:
    """The API server's answer about a token."""

    identity: PodIdentity | None
    refusal: str
    """Reason why there is no identity; empty when there is one."""
    fresh_until: float
    """Monotonic time at which the API server is asked again."""
    expires_at: float | None = None
    """Unix time at which the token expires; the answer does not hold after it. None where it holds
    only while it is fresh."""


class TokenAuthenticator:
    """Judges tokens by the answers of a `Reviewer`. For one event loop.

    Args:
        clock: monotonic seconds, by which answers become old: a wall clock that is set back must
            not keep a refusal, or the access of a pod that is gone.
        wall: Unix time in seconds, by which tokens expire.
        reviewed: called after each review with `allowed`, `denied` or `failed`, and with `shed`
            when a review was not begun because too many were waiting.
        pods_of: the pods that may hold ranks of a job.
    """

    def __init__(
        self,
        reviewer: Reviewer,
        clock: Callable[[], float],
        wall: Callable[[], float],
        reviewed: Callable[[str], None] = lambda outcome: None,
        pods_of: Callable[[str], Pods] = lambda job: Pods.NAMED,
    ) -> None:
        self._reviewer, self._reviewed = reviewer, reviewed
        self._clock, self._wall = clock, wall
        self._pods_of = pods_of
        self._known: dict[bytes, _Known] = {}
        """Tokens that the API server accepted."""
        self._refused: dict[bytes, _Known] = {}
        """Tokens that the API server refused."""
        self._asking: dict[bytes, asyncio.Task[_Known]] = {}
        self._strange: set[bytes] = set()
        """Tokens in `_asking` that are not known to be good."""
        self._waiting = 0
        """Calls that wait for reviews of the tokens in `_strange`."""
        self._threads = ThreadPoolExecutor(REVIEWS_AT_ONCE, thread_name_prefix="token-review")
        self._renewals = ThreadPoolExecutor(RENEWALS_AT_ONCE, thread_name_prefix="token-renewal")

    async def authorize(self, token: str, job: str) -> None:
        identity = await self._identify(token)
        pods = self._pods_of(job)
        if not may_act_for(identity, job, pods):
            namespace, _, name = job.partition(".")
            if pods is Pods.UNKNOWN and may_act_for(identity, job, Pods.ANY):
                raise UnreachableError(
                    f"job {job} is not on this node, so that it is not known whether pod "
                    f"{identity.pod} is one of its pods"
                )
            raise AccessDeniedError(
                f"pod {identity.pod} of namespace {identity.namespace} may not act for job {job}: "
                f"only pods of namespace {namespace} that are named {name}-<member>-<attempt> may; "
                f"run the trainer in the pods that the operator makes for the job, or set "
                f"spec.trainer.external"
            )

    async def visible(self, token: str, jobs: Iterable[str]) -> list[str]:
        identity = await self._identify(token)
        return [job for job in jobs if may_act_for(identity, job, self._pods_of(job))]

    async def job_of(self, token: str) -> str:
        identity = await self._identify(token)
        return f"{identity.namespace}.{re.sub(r'-[0-9]+-[0-9]+$', '', identity.pod)}"

    def close(self) -> None:
        for task in self._asking.values():
            task.cancel()
        for threads in (self._threads, self._renewals):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _identify(self, token: str) -> PodIdentity:
        if not token:
            raise UnauthenticatedError(
                f"this call carries no token: mount a projected service-account token of audience "
                f"{AUDIENCE}, and name its file in HOLDFAST_TOKEN_FILE"
            )
        digest = hashlib.sha256(token.encode()).digest()
        answer = self._known.get(digest) or self._refused.get(digest)
        if answer is None or self._clock() >= answer.fresh_until or self._has_expired(answer):
            answer = await self._ask(digest, token)
        if answer.identity is None:
            raise UnauthenticatedError(
                f"the token is refused: {answer.refusal}; it must be a service-account token of "
                f"this cluster for audience {AUDIENCE}, bound to a running pod"
            )
        return answer.identity

    async def _ask(self, digest: bytes, token: str) -> _Known:
        """Review a token: once for all calls that wait for it, whichever of them is cancelled."""
        strange = digest not in self._known
        if strange:
            self._make_room(digest)
        task = self._asking.get(digest)
        if task is None:
            threads = self._threads if strange else self._renewals
            task = asyncio.get_running_loop().create_task(self._review(digest, token, threads))
            self._asking[digest] = task
            task.add_done_callback(lambda ended: self._answered(digest, ended))
        self._waiting += strange
        try:
            return await asyncio.shield(task)
        finally:
            self._waiting -= strange

    def _make_room(self, digest: bytes) -> None:
        is_new = digest not in self._strange
        if self._waiting >= CALLS_WAITING_MAX or (
            is_new and len(self._strange) >= REVIEWS_WAITING_MAX
        ):
            self._reviewed("shed")
            raise UnreachableError(
                f"{self._waiting} calls already wait for the API server to review "
                f"{len(self._strange)} unknown tokens; repeat the call later"
            )
        self._strange.add(digest)

    def _answered(self, digest: bytes, ended: asyncio.Task[_Known]) -> None:
        del self._asking[digest]
        self._strange.discard(digest)
        if not ended.cancelled():
            ended.exception()  # retrieved here, because every caller may have been cancelled

    async def _review(self, digest: bytes, token: str, threads: ThreadPoolExecutor) -> _Known:
        loop = asyncio.get_running_loop()
        try:
            identity = await loop.run_in_executor(threads, self._reviewer.review, token)
        except UnauthenticatedError as error:
            self._reviewed("denied")
            answer = _Known(
                identity=None,
                refusal=str(error).replace(token, "<token>"),
                fresh_until=self._clock() + DENIED_FRESH_S,
            )
        except HoldfastError as error:
            self._reviewed("failed")
            answer = self._known_before(digest, error)
        else:
            self._reviewed("allowed")
            answer = _Known(
                identity=identity,
                refusal="",
                fresh_until=self._clock() + FRESH_S,
                expires_at=token_expiry(token),
            )
        self._remember(digest, answer)
        return answer

    def _known_before(self, digest: bytes, error: HoldfastError) -> _Known:
        """The API server's earlier answer, which holds while it cannot be reached, until the token
        expires."""
        before = self._known.get(digest)
        if before is None or before.identity is None or self._is_over(before):
            raise UnreachableError(
                f"the API server cannot review the token of this call: {error}; repeat the call "
                f"later"
            ) from error
        _log.warning("token_review_failed", cause=str(error), pod=before.identity.pod)
        return replace(before, fresh_until=self._clock() + AWAY_S)

    def _has_expired(self, known: _Known) -> bool:
        return known.expires_at is not None and self._wall() >= known.expires_at

    def _is_over(self, known: _Known) -> bool:
        """Whether an answer does not hold any more, even if the API server cannot be reached."""
        if known.expires_at is None:
            return self._clock() >= known.fresh_until
        return self._has_expired(known)

    def _remember(self, digest: bytes, known: _Known) -> None:
        self._known.pop(digest, None)
        self._refused.pop(digest, None)
        if known.identity is None:
            answers, most = self._refused, REFUSED_REMEMBERED_MAX
        else:
            answers, most = self._known, REMEMBERED_MAX
        if len(answers) >= most:
            for over in [d for d, k in answers.items() if self._is_over(k)]:
                del answers[over]
        if len(answers) >= most:
            del answers[next(iter(answers))]
        answers[digest] = known


def token_expiry(token: str) -> float | None:
    """Unix time at which a JSON web token expires; None when it names none.

    Only for tokens that are also reviewed: the signature is not checked.
    """
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        claims = json.loads(urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        return float(claims["exp"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
