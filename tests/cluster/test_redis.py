"""The chart's own Redis, in its pod. What daemons write into it is checked in test_survival.py."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from holdfast_system import NAMESPACE, Holdfast
from machine import wait_for
from redis.exceptions import AuthenticationError
from redis_catalogue import PORT, connected, password_of

WAIT_S = 90.0
USER = "65532"

Document = dict[str, Any]


class Pod:
    """The pod of Redis."""

    def __init__(self, holdfast: Holdfast) -> None:
        self.cluster = holdfast.cluster
        (self.name,) = holdfast.redis()

    def get(self) -> Document:
        found: Document = self.cluster.get("pod", self.name, "-n", NAMESPACE)
        return found

    def is_ready(self) -> bool:
        (status,) = self.get()["status"]["containerStatuses"]
        return bool(status["ready"])

    def restarts(self) -> int:
        (status,) = self.get()["status"]["containerStatuses"]
        return int(status["restartCount"])

    def server(self) -> int:
        """Pid of the server, as this host sees it."""
        found = []
        for pid in self.cluster.pod_processes(self.name, NAMESPACE):
            with suppress(OSError):  # a probe, which has ended
                if Path(f"/proc/{pid}/comm").read_text().strip() == "redis-server":
                    found.append(pid)
        (server,) = found
        return server


@pytest.fixture
def pod(holdfast: Holdfast) -> Iterator[Pod]:
    found = Pod(holdfast)
    wait_for("Redis to be ready", found.is_ready, WAIT_S)
    yield found


@pytest.mark.parametrize("password", [None, "guessed"])
def test_nobody_is_let_in_without_the_password(
    holdfast: Holdfast, pod: Pod, password: str | None
) -> None:
    with connected(holdfast, password) as redis, pytest.raises(AuthenticationError):
        redis.get("anything")


def test_the_password_is_in_no_command_line_and_lets_in(holdfast: Holdfast, pod: Pod) -> None:
    password = password_of(holdfast.cluster)
    with connected(holdfast, password) as redis:
        assert redis.ping()
    assert password not in Path(f"/proc/{pod.server()}/cmdline").read_text()


def test_it_keeps_nothing_and_forgets_the_oldest(holdfast: Holdfast, pod: Pod) -> None:
    with connected(holdfast, password_of(holdfast.cluster)) as redis:
        config: Any = redis.config_get("*")
    assert config["save"] == ""
    assert config["appendonly"] == "no"
    assert config["maxmemory-policy"] == "allkeys-lru"
    assert int(config["maxmemory"]) == 128 * 2**20
    claims = holdfast.cluster.get("persistentvolumeclaims", "-n", NAMESPACE)["items"]
    assert claims == []


def test_it_runs_without_root_and_cannot_write_its_image(pod: Pod) -> None:
    server = pod.server()
    status = Path(f"/proc/{server}/status").read_text()
    ids = re.findall(r"^[UG]id:\s+(.*)$", status, re.MULTILINE)
    assert {word for line in ids for word in line.split()} == {USER}
    assert re.search(r"^CapEff:\s+0+$", status, re.MULTILINE)
    mounts = Path(f"/proc/{server}/mounts").read_text().splitlines()
    (root,) = (line.split()[3] for line in mounts if line.split()[1] == "/")
    assert "ro" in root.split(",")


def test_one_that_hangs_is_not_ready_and_one_that_goes_on_is(pod: Pod) -> None:
    server, restarts = pod.server(), pod.restarts()
    os.kill(server, signal.SIGSTOP)
    try:
        wait_for("Redis to be found hanging", lambda: not pod.is_ready(), WAIT_S)
    finally:
        os.kill(server, signal.SIGCONT)
    wait_for("Redis to be ready again", pod.is_ready, WAIT_S)
    assert pod.restarts() == restarts


def test_one_that_crashes_is_started_again_with_the_same_password(
    holdfast: Holdfast, pod: Pod
) -> None:
    password, restarts = password_of(holdfast.cluster), pod.restarts()
    os.kill(pod.server(), signal.SIGKILL)
    wait_for("Redis to be started again", lambda: pod.restarts() > restarts, WAIT_S)
    wait_for("Redis to be ready again", pod.is_ready, WAIT_S)
    with connected(holdfast, password) as redis:
        assert redis.ping()


def test_only_daemons_are_let_through_to_it(holdfast: Holdfast) -> None:
    cluster = holdfast.cluster
    theirs, its = _policy(cluster, "holdfast-daemon"), _policy(cluster, "holdfast-redis")
    daemons, redis = theirs["podSelector"], its["podSelector"]
    ports = [{"port": PORT, "protocol": "TCP"}]
    assert its["ingress"] == [{"from": [{"podSelector": daemons}], "ports": ports}]
    assert its.get("egress", []) == []
    assert {"to": [{"podSelector": redis}], "ports": ports} in theirs["egress"]


def _policy(cluster: Cluster, name: str) -> Document:
    found: Document = cluster.get("networkpolicy", name, "-n", NAMESPACE)["spec"]
    return found
