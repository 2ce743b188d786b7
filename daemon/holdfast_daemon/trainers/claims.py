"""Tokens and session ids: a trainer's proofs of the rights that it was granted.

Both are unguessable, so a caller that presents one received it from a call that was checked
(`auth`). A trainer of another job reaches the same sockets, but has neither.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from holdfast_core.errors import ProtocolError, UnknownSessionError
from holdfast_daemon.job.host import JobHost
from holdfast_daemon.memory.arena_claims import ClaimRequest

_SEAL_BYTES = 16
TOKENS_MAX = 4096
"""Tokens that were issued and not used yet; beyond that, the oldest is forgotten. A trainer uses
its token at once."""


@dataclass(slots=True)
class Claims:
    """Tokens of the arena socket, and the sessions they belong to."""

    requests: dict[str, ClaimRequest] = field(default_factory=dict)
    sessions: dict[str, tuple[JobHost, str]] = field(default_factory=dict)

    def issue(self, path: Path, session: tuple[JobHost, str] | None) -> str:
        """A token for the arena at `path`: a claim of `session`, or read-only when that is None."""
        while len(self.requests) >= TOKENS_MAX:
            oldest = next(iter(self.requests))
            del self.requests[oldest]
            self.sessions.pop(oldest, None)
        token = secrets.token_hex(24)
        self.requests[token] = ClaimRequest(path=path, exclusive=session is not None)
        if session is not None:
            self.sessions[token] = session
        return token

    def resolve(self, token: str) -> ClaimRequest:
        """The claim that a token stands for. A token is valid once.

        Raises:
            ProtocolError: the token is not known.
        """
        request = self.requests.pop(token, None)
        if request is None:
            raise ProtocolError("the token is not known; open the session again")
        return request

    def refused(self, token: str) -> None:
        """Forget a claim whose arena was not given out: no connection will report its end."""
        self.sessions.pop(token, None)

    def granted(self, token: str) -> None:
        """Report to the engine that the claim's lock is taken."""
        if entry := self.sessions.get(token):
            host, session = entry
            host.carry_out(host.engine.claimed(session, host.now))

    def closed(self, token: str) -> None:
        """Report to the engine that the trainer's process is gone, or has closed its claim."""
        if entry := self.sessions.pop(token, None):
            host, session = entry
            if not host.dropped:
                host.carry_out(host.engine.session_ended(session, clean=False, now=host.now))


class SessionSeal:
    """Makes session ids unguessable: the engine numbers its sessions, trainers see them sealed.

    It needs no table, and a call of a session needs no token: training goes on while tokens cannot
    be reviewed. A restarted daemon has another key, and no sessions from before anyway.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def seal(self, session: str) -> str:
        """The id that a trainer is given for `session`."""
        return f"{session}/{self._proof(session)}"

    def open(self, sealed: str) -> str:
        """The session of a sealed id; UnknownSessionError for an id that was not sealed here."""
        session, _, proof = sealed.rpartition("/")
        if not hmac.compare_digest(proof.encode(), self._proof(session).encode()):
            raise UnknownSessionError(f"session {sealed} is not known here; open a new one")
        return session

    def _proof(self, session: str) -> str:
        return hashlib.blake2b(session.encode(), key=self._key, digest_size=_SEAL_BYTES).hexdigest()
