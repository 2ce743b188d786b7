"""Combinations of every policy with every redundancy, and of every redundancy with two slots, for
the fault tests.

A test that uses the fixture `combination` is collected with each of them. `make test-faults` runs
all; `make test` runs one for each case, drawn from the case's own name, so that all combinations
occur and each case has the same one in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from zlib import crc32

import pytest
from harness import RawCluster, RawJob

from holdfast_core.job.snapshots import PolicyType
from holdfast_core.snapshots.layouts import SLOTS_MAX, SLOTS_MIN
from holdfast_core.snapshots.membership import Redundancy

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Combination:
    """Policy and redundancy of a job's snapshots, and the slots of its ranks."""

    policy: PolicyType
    redundancy: Redundancy
    slots: int = SLOTS_MAX

    @property
    def name(self) -> str:
        return f"{self.policy}-{self.redundancy}" + f"-{self.slots}-slots" * (self.slots < 3)

    def job(self, cluster: RawCluster, nodes: list[str], **more: Any) -> RawJob:
        """A job with these; with Replication, of two replicas."""
        return RawJob(
            cluster,
            nodes,
            policy=self.policy,
            redundancy=self.redundancy,
            replicas=2,
            slots=self.slots,
            **more,
        )


_REDUNDANT = tuple(redundancy for redundancy in Redundancy if redundancy is not Redundancy.NONE)
COMBINATIONS = (
    *(Combination(policy, redundancy) for policy in PolicyType for redundancy in _REDUNDANT),
    *(Combination(PolicyType.PARTIAL_EXPERTS, redundancy, SLOTS_MIN) for redundancy in _REDUNDANT),
)
BY_REDUNDANCY = sorted(COMBINATIONS, key=lambda each: (each.redundancy, each.slots))
"""In the order of tests, so that those that share a cluster follow each other."""
CARRYING = tuple(policy for policy in PolicyType if policy is not PolicyType.FULL)
"""Those whose saves carry pieces over."""


def is_drawn(item: pytest.Item) -> bool:
    """Whether `make test` runs this case: one combination for each set of other parameters."""
    params = item.callspec.params if isinstance(item, pytest.Function) and _is_many(item) else {}
    combination, policy = params.get("combination"), params.get("policy")
    if isinstance(combination, Combination):
        return combination == _drawn(item.nodeid.replace(combination.name, ""), COMBINATIONS)
    if isinstance(policy, PolicyType) and policy is not PolicyType.FULL:
        return policy == _drawn(item.nodeid.replace(policy, ""), CARRYING)
    return True


def _is_many(item: pytest.Function) -> bool:
    return hasattr(item, "callspec")


def _drawn(case: str, among: Sequence[T]) -> T:
    return among[crc32(case.encode()) % len(among)]
