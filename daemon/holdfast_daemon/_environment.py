"""The only module of the daemon that reads the environment."""

from __future__ import annotations

import os


def api_server_address() -> str:
    """`host:port` of the API server, from the variables of every pod; empty outside a pod."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if ":" in host:
        host = f"[{host}]"
    return f"{host}:{port}" if host else ""


def redis_url() -> str:
    """URL of the catalogue, if the command line gives none: it may contain a password, and every
    user of a machine can read command lines."""
    return os.environ.get("HOLDFAST_REDIS_URL", "")


def given() -> dict[str, str]:
    """The whole environment, for options that have a variable."""
    return dict(os.environ)
