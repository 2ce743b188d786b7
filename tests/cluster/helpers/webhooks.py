"""A mutating webhook that puts a sidecar first in the pods of a namespace, as meshes do; served by
the process that runs the tests."""

from __future__ import annotations

import base64
import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from cluster import Cluster
from machine import run

Document = dict[str, Any]


class SidecarWebhook:
    """Puts `sidecar` before the containers of every pod that is made in a namespace. A context
    manager, which installs it and takes it away."""

    def __init__(self, cluster: Cluster, namespace: str, sidecar: Document) -> None:
        self._cluster, self._namespace = cluster, namespace
        self._address = cluster.network.host_address
        home = cluster.home / "sidecar-webhook"
        home.mkdir(parents=True, exist_ok=True)
        self._key, self._certificate = home / "tls.key", home / "tls.crt"
        self._name = f"sidecar-first-in-{namespace}"
        patch = [{"op": "add", "path": "/spec/containers/0", "value": sidecar}]
        self._patch = base64.b64encode(json.dumps(patch).encode()).decode()

    def __enter__(self) -> Self:
        run(
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=sidecar", "-addext", f"subjectAltName=IP:{self._address}"),
            *("-keyout", self._key, "-out", self._certificate),
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._certificate, self._key)
        self._server = ThreadingHTTPServer((self._address, 0), _handler(self._patch))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self._cluster.apply(self._configuration())
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.kubectl("delete", "mutatingwebhookconfiguration", self._name)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _configuration(self) -> Document:
        authority = base64.b64encode(self._certificate.read_bytes()).decode()
        url = f"https://{self._address}:{self._server.server_port}/"
        pods = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"]}
        return {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingWebhookConfiguration",
            "metadata": {"name": self._name},
            "webhooks": [
                {
                    "name": "sidecar.holdfast.test",
                    "clientConfig": {"url": url, "caBundle": authority},
                    "rules": [{**pods, "operations": ["CREATE"]}],
                    "namespaceSelector": {
                        "matchLabels": {"kubernetes.io/metadata.name": self._namespace}
                    },
                    "admissionReviewVersions": ["v1"],
                    "sideEffects": "None",
                    "failurePolicy": "Fail",
                }
            ],
        }


def _handler(patch: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            review["response"] = {
                "uid": review.pop("request")["uid"],
                "allowed": True,
                "patchType": "JSONPatch",
                "patch": patch,
            }
            body = json.dumps(review).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            return

    return Handler
