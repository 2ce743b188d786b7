"""What `helm test` says of an installation."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "charts/holdfast/files/check_install.py"

RESOURCES = "/apis/holdfast.dev/v1alpha1"
DAEMONS = "/apis/apps/v1/namespaces/hf/daemonsets/hf-daemon"
PODS = "/api/v1/namespaces/hf/pods?labelSelector=component%3Ddaemon"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_install", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pod(node: str, address: str) -> dict[str, Any]:
    return {
        "metadata": {"name": f"daemon-{node}"},
        "spec": {"nodeName": node},
        "status": {"podIP": address} if address else {},
    }


class Installation:
    """Answers requests; what is not there is refused."""

    def __init__(self) -> None:
        self.probes = {
            "http://operator:7704/readyz",
            "http://10.0.0.1:7703/healthz",
            "http://[fd00::2]:7703/healthz",
        }
        self.api: dict[str, Any] = {
            RESOURCES: {"resources": [{"name": "moetrainingjobs"}]},
            DAEMONS: {"status": {"desiredNumberScheduled": 2}},
            PODS: {"items": [pod("a", "10.0.0.1"), pod("b", "fd00::2")]},
        }

    def ask(self, url: str) -> bytes:
        if url not in self.probes:
            raise OSError("refused")
        return b"ok"

    def ask_api(self, path: str) -> bytes:
        if path not in self.api:
            raise OSError("404")
        return json.dumps(self.api[path]).encode()

    def problems(self, script: ModuleType) -> list[str]:
        return list(
            script.problems(
                self.ask,
                self.ask_api,
                operator="http://operator:7704",
                namespace="hf",
                daemons="hf-daemon",
                selector="component=daemon",
            )
        )


def test_an_installation_that_is_well_has_no_problems(script: ModuleType) -> None:
    assert Installation().problems(script) == []


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (
            lambda it: it.probes.remove("http://operator:7704/readyz"),
            "the operator is not ready: http://operator:7704/readyz: refused",
        ),
        (lambda it: it.api.pop(RESOURCES), "MoETrainingJob is not served (404)"),
        (lambda it: it.api.update({RESOURCES: {"resources": []}}), "has no moetrainingjobs"),
        (
            lambda it: it.probes.remove("http://10.0.0.1:7703/healthz"),
            "the daemon daemon-a on a is not healthy",
        ),
        (
            lambda it: it.api.update({PODS: {"items": [pod("a", "10.0.0.1")]}}),
            "1 of 2 daemons have a pod",
        ),
        (
            lambda it: it.api.update({PODS: {"items": [pod("a", "10.0.0.1"), pod("b", "")]}}),
            "the daemon daemon-b on b has not started",
        ),
        (lambda it: it.api.pop(DAEMONS), "the daemons cannot be listed: 404"),
    ],
)
def test_a_problem_is_named(
    script: ModuleType, spoil: Callable[[Installation], object], problem: str
) -> None:
    installation = Installation()
    spoil(installation)
    (found,) = installation.problems(script)
    assert problem in found


def test_no_daemon_at_all_is_a_problem(script: ModuleType) -> None:
    installation = Installation()
    installation.api |= {DAEMONS: {"status": {}}, PODS: {"items": []}}
    (found,) = installation.problems(script)
    assert "no node gets a daemon" in found
