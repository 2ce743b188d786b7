"""The check that `helm test` runs in a pod: the operator leads, MoETrainingJob is served, and every
daemon is healthy.

Needs only the standard library. Repeats the check until it passes or time is up, and then prints
the problems.
"""

from __future__ import annotations

import argparse
import json
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import Request, urlopen

API_SERVER = "https://kubernetes.default.svc"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
DAEMON_PORT = 7703
REQUEST_S = 5.0
PAUSE_S = 2.0

Ask = Callable[[str], bytes]
"""Function from a URL or path to the body of a successful answer; raises OSError otherwise."""


def problems(
    ask: Ask, ask_api: Ask, *, operator: str, namespace: str, daemons: str, selector: str
) -> Iterator[str]:
    """Problems of the installation; none when it is healthy.

    Args:
        ask: fetches URLs over plain HTTP.
        ask_api: fetches paths of the API server.
        operator: URL of the operator's probes.
        daemons: name of the DaemonSet.
        selector: labels of its pods.
    """
    yield from _unanswered(ask, f"{operator}/readyz", "the operator is not ready")
    path = "/apis/holdfast.dev/v1alpha1"
    try:
        served = [each["name"] for each in json.loads(ask_api(path))["resources"]]
        if "moetrainingjobs" not in served:
            yield f"{path} has no moetrainingjobs: install the chart with crds.enabled"
    except OSError as error:
        yield f"MoETrainingJob is not served ({error}): install the chart with crds.enabled"
    try:
        status = json.loads(ask_api(f"/apis/apps/v1/namespaces/{namespace}/daemonsets/{daemons}"))[
            "status"
        ]
        pods = json.loads(
            ask_api(f"/api/v1/namespaces/{namespace}/pods?labelSelector={quote(selector)}")
        )["items"]
    except OSError as error:
        yield f"the daemons cannot be listed: {error}"
        return
    wanted = status.get("desiredNumberScheduled", 0)
    if wanted == 0:
        yield "no node gets a daemon: check daemon.nodeSelector and daemon.tolerations"
    if len(pods) < wanted:
        yield f"{len(pods)} of {wanted} daemons have a pod"
    for pod in pods:
        yield from _daemon_problems(ask, pod)


def _daemon_problems(ask: Ask, pod: dict[str, Any]) -> Iterator[str]:
    name, node = pod["metadata"]["name"], pod["spec"].get("nodeName", "no node")
    address = pod["status"].get("podIP")
    if not address:
        yield f"the daemon {name} on {node} has not started: kubectl describe pod {name}"
        return
    host = f"[{address}]" if ":" in address else address
    url = f"http://{host}:{DAEMON_PORT}/healthz"
    yield from _unanswered(ask, url, f"the daemon {name} on {node} is not healthy")


def _unanswered(ask: Ask, url: str, what: str) -> Iterator[str]:
    try:
        ask(url)
    except OSError as error:
        yield f"{what}: {url}: {error}"


def over_http(url: str) -> bytes:
    """Fetch the body at `url`.

    Raises:
        OSError: without a successful answer.
    """
    with urlopen(url, timeout=REQUEST_S) as answer:
        body: bytes = answer.read()
        return body


def over_api(path: str) -> bytes:
    """Fetch the body at a path of the API server, with this pod's token."""
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    # Certificates of some clusters lack the key identifiers that newer Pythons require.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    token = (ACCOUNT / "token").read_text().strip()
    request = Request(f"{API_SERVER}{path}", headers={"Authorization": f"Bearer {token}"})
    with urlopen(request, timeout=REQUEST_S, context=context) as answer:
        body: bytes = answer.read()
        return body


def main() -> int:
    """Run the check; return 0 when all is well, otherwise 1 after printing the problems."""
    parser = argparse.ArgumentParser(description="Check an installation from inside.")
    parser.add_argument("--operator", required=True, metavar="URL")
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--daemons", required=True, metavar="NAME", help="name of the DaemonSet")
    parser.add_argument("--selector", required=True, metavar="LABELS", help="labels of its pods")
    parser.add_argument("--patience", type=float, default=90.0, metavar="S")
    options = vars(parser.parse_args())
    end = time.monotonic() + options.pop("patience")
    while found := list(problems(over_http, over_api, **options)):
        if time.monotonic() > end:
            print(*found, sep="\n", file=sys.stderr)
            return 1
        time.sleep(PAUSE_S)
    print("The operator leads, MoETrainingJob is served, and every daemon is healthy.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
