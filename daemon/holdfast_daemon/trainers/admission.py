"""Decides which calls of trainers are admitted, and whose account each is charged to.

A call is charged to the caller that has proved to make it: first its right is checked, then the
account of its job or session is charged. All callers without a right share one separate account, so
that strangers who name a job cannot use up the calls that its trainers need.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

from holdfast_core.errors import HoldfastError, UnknownSessionError
from holdfast_daemon.job.host import JobHost
from holdfast_daemon.limits.rates import (
    JOB_RATE,
    REFUSALS,
    SESSION_RATE,
    STRANGERS,
    WAIT_S_MAX,
    Accounts,
)
from holdfast_daemon.limits.refusals import Context
from holdfast_daemon.trainers.auth import Authenticator
from holdfast_protos.connections import channels

REFUSALS_HELD_MAX = 64
"""Refused calls that are delayed at once because refusals come too fast. Beyond that, calls are
refused without delay, since a delayed call takes the place of another."""

_TOKEN_HEADER, _BEARER = "authorization", "Bearer "
_T = TypeVar("_T")


class Admission:
    """Admits calls. For one event loop.

    Args:
        accounts: accounts of this service's callers.
        is_placed: whether a job is on this node.
        limited: called for each refusal that came too fast.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        accounts: Accounts,
        is_placed: Callable[[str], bool],
        limited: Callable[[], None],
    ) -> None:
        self._authenticator, self._accounts = authenticator, accounts
        self._is_placed, self._limited = is_placed, limited
        self._held = 0

    async def admit_job(self, token: str, job: str) -> None:
        """Return when it is the turn of a call for `job`. Raises as `Authenticator.authorize` does,
        and RateLimitedError."""
        async with self._refusals_held_up():
            await self._authenticator.authorize(token, job)
        account = (("job", job), JOB_RATE) if self._is_placed(job) else STRANGERS
        await self._accounts.admit(*account)

    async def admit_session(self, sealed: str, find: Callable[[str], _T]) -> _T:
        """The result of `find` for a session's sealed id, when it is the call's turn. Raises as
        `find` does, and RateLimitedError."""
        async with self._refusals_held_up():
            session = find(sealed)
        await self._accounts.admit(("session", sealed.rpartition("/")[0]), SESSION_RATE)
        return session

    async def visible(self, token: str, jobs: Iterable[str]) -> list[str]:
        """The jobs among `jobs` that the caller may see, when it is the call's turn. Raises as
        `Authenticator.visible` does, and RateLimitedError."""
        async with self._refusals_held_up():
            seen = await self._authenticator.visible(token, jobs)
        await self._accounts.admit(*STRANGERS)
        return seen

    async def share_of(
        self,
        headers: dict[str, str],
        of_session: bool,
        find: Callable[[str], tuple[JobHost, str]],
    ) -> str:
        """The job in whose share a call is counted, by its headers. A session's id is proof enough,
        whatever token the call carries: training goes on while tokens cannot be reviewed.

        Raises:
            UnknownSessionError: a call of a session proves neither its session nor its token.
            HoldfastError: as `Authenticator.job_of` raises, for any other call.
        """
        try:
            host, _ = find(headers.get(channels.SESSION_HEADER, ""))
            return host.job
        except UnknownSessionError as unknown:
            try:
                async with self._refusals_held_up():
                    return await self._authenticator.job_of(_bearer(headers.get(_TOKEN_HEADER)))
            except HoldfastError as error:
                raise (unknown if of_session else error) from None

    async def hold_refusal(self) -> None:
        """Return when a call may be refused: at once, unless refusals come too fast."""
        wait_s = self._accounts.wait_s(*REFUSALS)
        if wait_s > WAIT_S_MAX:
            self._limited()
        if wait_s > 0 and self._held < REFUSALS_HELD_MAX:
            self._held += 1
            try:
                await asyncio.sleep(min(wait_s, WAIT_S_MAX))
            finally:
                self._held -= 1

    @asynccontextmanager
    async def _refusals_held_up(self) -> AsyncIterator[None]:
        """Delay the error of a refused call until the call may be refused (`hold_refusal`)."""
        try:
            yield
        except HoldfastError:
            await self.hold_refusal()
            raise


def bearer_token(context: Context) -> str:
    """The bearer token of a call; empty when it carries none."""
    return _bearer(dict(context.invocation_metadata() or ()).get(_TOKEN_HEADER))


def _bearer(header: str | bytes | None) -> str:
    known = isinstance(header, str) and header.startswith(_BEARER)
    return str(header).removeprefix(_BEARER) if known else ""
