"""The only module of the daemon that reads the environment."""

from __future__ import annotations

import os


def api_server_address() -> str:
    """`host:port` of the API server, as Kubernetes tells every pod; empty outside a pod."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if ":" in host:
        host = f"[{host}]"
    return f"{host}:{port}" if host else ""


def redis_url() -> str:
    """Of the catalogue, where the command line names none: it may hold a password, which everybody
    on a machine could read there."""
    return os.environ.get("HOLDFAST_REDIS_URL", "")


def given() -> dict[str, str]:
    """The environment as it is, for options that have a variable."""
    return dict(os.environ)
