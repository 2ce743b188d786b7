"""The catalogue in the release's own Redis, read as a dashboard reads it: by its keys."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cluster import Cluster
from holdfast_system import NAMESPACE, Holdfast
from machine import ClusterError
from redis import Redis

from holdfast_core.snapshots.generations import Generation

PORT = 6379
TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Catalogued:
    """Contents of the catalogue about a job."""

    nodes: frozenset[str]
    """Nodes whose daemons have reported what they hold."""
    protected: dict[int, Generation]
    """Rank → the newest generation that is protected."""


def catalogued(holdfast: Holdfast, job: str) -> Catalogued:
    """Contents of the catalogue about the job with the key `job`.

    Raises:
        ClusterError: there is no Redis.
        redis.RedisError: it does not answer.
    """
    with connected(holdfast, password_of(holdfast.cluster)) as redis:
        # Its types do not know that answers are decoded.
        stages: Any = redis.hgetall(f"holdfast:job:{job}:stages")
        nodes: Any = redis.hkeys(f"holdfast:job:{job}:state")
    return Catalogued(
        nodes=frozenset(nodes),
        protected={
            int(name.partition(":")[0]): Generation.parse(text)
            for name, text in stages.items()
            if name.endswith(":protected")
        },
    )


@contextmanager
def connected(holdfast: Holdfast, password: str | None) -> Iterator[Redis]:
    """A client of the pod of Redis, from this host.

    Raises:
        ClusterError: when there is none with an address.
    """
    pods = [holdfast.cluster.get("pod", name, "-n", NAMESPACE) for name in holdfast.redis()]
    addresses = [pod["status"]["podIP"] for pod in pods if "podIP" in pod["status"]]
    if not addresses:
        raise ClusterError("there is no pod of Redis with an address")
    with Redis(
        host=addresses[0],
        port=PORT,
        password=password,
        decode_responses=True,
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=TIMEOUT_S,
    ) as redis:
        yield redis


def password_of(cluster: Cluster) -> str:
    """The password that the chart made."""
    data = cluster.get("secret", "holdfast-redis", "-n", NAMESPACE)["data"]
    return base64.b64decode(data["password"]).decode()
