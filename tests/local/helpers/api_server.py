"""An API server that only reviews tokens, on HTTPS with a CA of its own."""

from __future__ import annotations

import base64
import json
import ssl
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ports import reserve_port

AUDIENCE = "holdfast.dev/daemon"
REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"


def web_token(claims: dict[str, Any], signature: str) -> str:
    """A JSON web token whose signature cannot be verified."""
    parts = [json.dumps({"alg": "none"}), json.dumps(claims)]
    coded = [base64.urlsafe_b64encode(part.encode()).decode().rstrip("=") for part in parts]
    return ".".join([*coded, signature])


class ApiServer:
    """Serves TokenReviews from `start` to `stop`; `directory` becomes the daemon's service account.

    As a context manager, it is started on entry.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.own_token = "own-token"
        self.statuses: dict[str, dict[str, Any]] = {}
        """Status of the review of each token; any other token is not accepted."""
        self.answer: tuple[int, bytes] | None = None
        """Answer to every request instead; None for real reviews."""
        self.asked: list[dict[str, Any]] = []
        self.port = reserve_port()  # it is to be the same after `stop`
        self._server: ThreadingHTTPServer | None = None
        self._certify()
        (directory / "token").write_text(f"{self.own_token}\n")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def admit(self, namespace: str, pod: str, *, lasts_s: float = 3600.0) -> str:
        """A token that is valid for this pod."""
        claims = {"exp": int(time.time() + lasts_s), "number": len(self.statuses)}
        token = web_token(claims, f"signature{len(self.statuses)}")
        self.statuses[token] = {
            "authenticated": True,
            "audiences": [AUDIENCE],
            "user": {
                "username": f"system:serviceaccount:{namespace}:trainer",
                "extra": {"authentication.kubernetes.io/pod-name": [pod]},
            },
        }
        return token

    def start(self) -> None:
        """Listen."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, answer = outer._answer(self.path, self.headers["Authorization"], body)
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing: tests look at `asked`."""

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.directory / "ca.crt", self.directory / "ca.key")
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _answer(self, path: str, bearer: str, body: dict[str, Any]) -> tuple[int, bytes]:
        self.asked.append(body)
        if self.answer is not None:
            return self.answer
        if path != REVIEWS or body["kind"] != "TokenReview":
            return 404, b"{}"
        if bearer != f"Bearer {self.own_token}":
            return 401, b"{}"
        spec = body["spec"]
        status = self.statuses.get(spec["token"], {"error": f"not known: {spec['token']}"})
        if spec["audiences"] != [AUDIENCE]:
            status = {"error": "token audiences do not match"}
        return 201, json.dumps({"kind": "TokenReview", "status": status}).encode()

    def _certify(self) -> None:
        """Write a certificate for 127.0.0.1 that is its own CA."""
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        names = ["-subj", "/CN=tests", "-addext", "subjectAltName=IP:127.0.0.1"]
        files = ["-keyout", f"{self.directory}/ca.key", "-out", f"{self.directory}/ca.crt"]
        subprocess.run(
            ["openssl", "req", "-x509", "-days", "2", *key, *names, *files],
            check=True,
            capture_output=True,
        )
