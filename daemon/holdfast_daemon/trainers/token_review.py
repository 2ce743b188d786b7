"""Asks the API server which pod a token belongs to (TokenReview, authentication.k8s.io/v1).

Uses the standard library, on a thread, over a fresh connection each time: a review is a request of
a kilobyte, and each pod causes about one a minute (docs/decisions/0058). The daemon's own token and
the cluster's CA are read again for each review, because both are rotated.

Must not: put a token, or the body of the API server's answer, into an error.
"""

from __future__ import annotations

import json
import ssl
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

from holdfast_core.errors import InvalidJobError, UnauthenticatedError, UnreachableError
from holdfast_daemon.trainers.auth import AUDIENCE, PodIdentity

REVIEW_TIMEOUT_S = 3.0
"""Shorter than the timeout of a trainer's call, so that the trainer gets the reason."""
ANSWER_BYTES_MAX = 1 << 20

_PATH = "/apis/authentication.k8s.io/v1/tokenreviews"
_POD_NAME = "authentication.kubernetes.io/pod-name"
_USER = "system:serviceaccount:"


class TokenReviewApi:
    """`trainers.auth.Reviewer` over HTTPS.

    Args:
        address: `host:port` of the API server.
        service_account: directory with the daemon's own `token`, and the cluster's `ca.crt`.

    Raises (on construction):
        InvalidJobError: when there is no address, or a file is missing.
    """

    def __init__(
        self, address: str, service_account: Path, timeout_s: float = REVIEW_TIMEOUT_S
    ) -> None:
        self._address, self._timeout_s = address, timeout_s
        self._token_file = service_account / "token"
        self._ca_file = service_account / "ca.crt"
        if not address:
            raise InvalidJobError(
                "--auth token-review needs an API server: run the daemon in a pod, or name one "
                "with --api-server HOST:PORT"
            )
        for file in (self._token_file, self._ca_file):
            if not file.is_file():
                raise InvalidJobError(
                    f"--auth token-review needs {file}: give the daemon's pod a service account "
                    f"whose token is mounted, or name its directory with --service-account"
                )

    def review(self, token: str) -> PodIdentity:
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [AUDIENCE]},
        }
        try:
            status, body = self._post(json.dumps(request).encode())
        except (OSError, HTTPException) as error:
            raise UnreachableError(f"{self._address}: {_reason(error)}") from error
        if status in (401, 403):
            raise UnreachableError(
                f"{self._address} refuses the daemon's own token ({status}): let its service "
                f"account create tokenreviews.authentication.k8s.io"
            )
        if status not in (200, 201):
            raise UnreachableError(f"{self._address} answered {status}")
        return identity_in(body)

    def _post(self, body: bytes) -> tuple[int, bytes]:
        own = self._token_file.read_text().strip()
        context = ssl.create_default_context(cafile=str(self._ca_file))
        # Certificates of some clusters lack the key identifiers that newer Pythons insist on.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        connection = HTTPSConnection(self._address, timeout=self._timeout_s, context=context)
        try:
            headers = {"Authorization": f"Bearer {own}", "Content-Type": "application/json"}
            connection.request("POST", _PATH, body, headers)
            response = connection.getresponse()
            return response.status, response.read(ANSWER_BYTES_MAX)
        finally:
            connection.close()


def identity_in(body: bytes) -> PodIdentity:
    """The pod that the API server's answer, `body`, names.

    Raises:
        UnauthenticatedError: the token is refused.
        UnreachableError: the answer is not a TokenReview.
    """
    try:
        status: dict[str, Any] = json.loads(body)["status"]
        if not status.get("authenticated"):
            raise UnauthenticatedError(status.get("error") or "the API server does not accept it")
        if AUDIENCE not in status.get("audiences", ()):
            # An API server that does not know audiences would accept any token of the cluster.
            raise UnauthenticatedError("the API server did not check its audience")
        user = status["user"]
        name, pods = user["username"], user.get("extra", {}).get(_POD_NAME, [])
        if not name.startswith(_USER) or len(pods) != 1:
            raise UnauthenticatedError(f"it belongs to {name}, not to a pod's service account")
        return PodIdentity(namespace=name.removeprefix(_USER).partition(":")[0], pod=str(pods[0]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnreachableError("the API server's answer is not a TokenReview") from error


def _reason(error: Exception) -> str:
    """Why a request failed, in words that cannot contain what was sent."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return type(error).__name__
