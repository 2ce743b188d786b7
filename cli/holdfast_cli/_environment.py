"""The only module of the command that reads the environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_DECIDED = ("HOLDFAST_TLS", "HOLDFAST_TLS_DOMAIN", "HOLDFAST_INSECURE")


def process_environment() -> dict[str, str]:
    """Environment for the processes of a local run: the caller's, with the directory of this
    interpreter first in PATH, so that a job's `python` is the one in which Holdfast is installed.
    Variables for identity are left out, because the run sets them."""
    environment = {k: v for k, v in os.environ.items() if k not in _DECIDED}
    first = str(Path(sys.executable).parent)
    environment["PATH"] = os.pathsep.join(filter(None, (first, environment.get("PATH", ""))))
    return environment


def own_environment() -> dict[str, str]:
    """The environment as it is, for options that can also be set by a variable."""
    return dict(os.environ)


def redis_url() -> str:
    """URL of the catalogue if the command line gives none. It may contain a password, and every
    user of a machine can read command lines."""
    return os.environ.get("HOLDFAST_REDIS_URL", "")


def kubeconfig() -> str:
    """Path of the kubeconfig that kubectl would read here, or several paths joined as in
    KUBECONFIG; empty when there is none."""
    named = os.environ.get("KUBECONFIG", "") or str(Path.home() / ".kube" / "config")
    return named if any(Path(path).is_file() for path in named.split(os.pathsep)) else ""
