"""What a session runs, most important first: the deadline cuts it off at the end.

A step is a file of tests or a module that prints figures. Each runs in a process of its own, within
a limit that no healthy run comes near.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

FIGURES = "benchmarks/gpu/"
"""Folder whose modules print figures: `python -m benchmarks.gpu.NAME --out FILE.json [--small]`."""


class Kind(StrEnum):
    """What a step yields."""

    TESTS = "tests"
    FIGURES = "figures"


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One process of a session."""

    path: str
    """File or folder below the bundle's root."""
    limit_s: float
    """Time after which it is ended."""
    test_limit_s: float = 45.0
    """Time after which one of its tests is ended, and the others go on in a new process."""
    parallel: bool = False
    """Whether processes share its tests; not where they measure or fill a device."""

    @property
    def kind(self) -> Kind:
        return Kind.FIGURES if self.path.startswith(FIGURES) else Kind.TESTS


STEPS = (
    Step(path="tests/gpu/test_capture.py", limit_s=90),
    Step(path="tests/gpu/test_fence.py", limit_s=60),
    Step(path="tests/gpu/test_device_hashes.py", limit_s=60),
    Step(path="tests/gpu/test_kill.py", limit_s=60),
    Step(path="benchmarks/gpu/hashing.py", limit_s=45),
    Step(path="benchmarks/gpu/restoring.py", limit_s=70),
    Step(path="benchmarks/gpu/copying.py", limit_s=60),
    Step(path="benchmarks/gpu/saving.py", limit_s=75),
    Step(path="benchmarks/gpu/step.py", limit_s=190),
    Step(path="benchmarks/gpu/dispatching.py", limit_s=45),
    Step(path="tests/gpu/test_message_copies.py", limit_s=30),
    Step(path="benchmarks/gpu/boundary_logs.py", limit_s=35),
    Step(path="tests/gpu/test_arenas.py", limit_s=60),
    Step(path="tests/gpu/test_experts.py", limit_s=60),
    Step(path="tests/gpu/test_node_checks.py", limit_s=60),
    Step(path="tests/gpu/test_moe_layers.py", limit_s=120, test_limit_s=60),
    Step(path="tests/gpu/test_pipelines.py", limit_s=45),
    Step(path="tests/gpu/test_windows.py", limit_s=60),
    Step(path="tests/gpu/test_compiled_steps.py", limit_s=120, test_limit_s=60),
    Step(path="tests/gpu/test_dtensor.py", limit_s=60),
    Step(path="tests/gpu/test_groups.py", limit_s=90),
    Step(path="tests/gpu/test_staying.py", limit_s=150, test_limit_s=60),
    Step(path="benchmarks/gpu/detectors.py", limit_s=200),
    Step(path="tests/gpu/test_facts.py", limit_s=60),
    Step(path="benchmarks/gpu/peers.py", limit_s=75),
    Step(path="tests/gpu/test_frameworks.py", limit_s=300, test_limit_s=120),
    Step(path="tests/unit/sdk", limit_s=900, parallel=True),
    Step(path="tests/unit/protos", limit_s=600, parallel=True),
    Step(path="tests/unit/daemon", limit_s=600, parallel=True),
    Step(path="tests/unit/operator_side/reconciler", limit_s=600, parallel=True),
    Step(path="tests/unit/operator_side/control", limit_s=600, parallel=True),
    Step(path="tests/unit/operator_side/kube", limit_s=600, parallel=True),
)
