"""Runs kubectl for requests that need a connection of their own: exec and port-forward.

kubectl knows each cluster's proxies, credential plugins and protocols, and everybody who may send
these requests has it. Its refusals are passed on unchanged.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast_core.errors import HoldfastError, UnreachableError

EXEC_S = 60.0
"""Time limit of a command in a pod."""

_FORWARDING = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) ")


class KubectlError(HoldfastError):
    """kubectl failed."""

    code = "kubectl"


def execute(options: argparse.Namespace, pod: str, container: str, *command: str) -> str:
    """Run `command` in a pod of the namespace in `options`; returns what it printed.

    Raises:
        KubectlError: when it cannot be run, or fails.
    """
    words = ["-n", options.namespace, "exec", pod, "-c", container, "--", *command]
    try:
        done = subprocess.run(
            _command(options, words), capture_output=True, text=True, timeout=EXEC_S, check=False
        )
    except OSError as error:
        raise _missing(error) from error
    except subprocess.TimeoutExpired as error:
        raise UnreachableError(f"a command in pod {pod} took more than {EXEC_S:.0f} s") from error
    if done.returncode != 0:
        raise KubectlError(f"in pod {pod}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


@contextmanager
def forward_port(
    options: argparse.Namespace, namespace: str, service: str, port: int
) -> Iterator[int]:
    """Forward a local port to a service until the context ends; the context's value is the port.

    Raises:
        KubectlError: when kubectl does not forward it.
    """
    words = [
        "-n",
        namespace,
        "port-forward",
        "--address",
        "127.0.0.1",
        f"svc/{service}",
        f":{port}",
    ]
    try:
        process = subprocess.Popen(
            _command(options, words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    except OSError as error:
        raise _missing(error) from error
    with process:
        try:
            assert process.stdout is not None and process.stderr is not None
            match = _FORWARDING.match(process.stdout.readline())
            if match is None:
                raise KubectlError(
                    f"no port is forwarded to service {service} in namespace {namespace}: "
                    f"{process.stderr.read().strip()}"
                )
            yield int(match[1])
        finally:
            process.terminate()


def _command(options: argparse.Namespace, words: list[str]) -> list[str]:
    chosen = [("--kubeconfig", options.kubeconfig), ("--context", options.context)]
    # Several paths, joined, are a value of KUBECONFIG, which kubectl reads itself.
    given = [f"{name}={value}" for name, value in chosen if value and ":" not in value]
    return ["kubectl", *given, *words]


def _missing(error: OSError) -> KubectlError:
    return KubectlError(f"this needs kubectl in PATH, which cannot be run: {error.strerror}")
