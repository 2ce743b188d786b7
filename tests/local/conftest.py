"""A cluster for each test; when the test fails, the state and logs of its daemons are shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from combinations import BY_REDUNDANCY, Combination, is_drawn
from harness import RawCluster
from small_tmpfs import mounted

from holdfast_core.job.snapshots import PolicyType


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `--every-combination`, leave out the cases that only `make test-faults` runs."""
    if not config.getoption("--every-combination"):
        config.hook.pytest_deselected(items=[item for item in items if not is_drawn(item)])
        items[:] = [item for item in items if is_drawn(item)]


@pytest.fixture
def cluster() -> Iterator[RawCluster]:
    with RawCluster(arguments=("--metrics-port", "0")) as running:
        yield running
        print(running.report())


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    """A small tmpfs of the test's own; needs root."""
    with mounted() as where:
        yield where


@pytest.fixture(scope="module", params=BY_REDUNDANCY, ids=[one.name for one in BY_REDUNDANCY])
def combination(request: pytest.FixtureRequest) -> Combination:
    """A policy and a redundancy: all of them, or one for each case; see `combinations`."""
    assert isinstance(request.param, Combination)
    return request.param


@pytest.fixture(params=PolicyType)
def policy(request: pytest.FixtureRequest) -> PolicyType:
    """A policy for a job's saves: all of them, or Full and one more for each case."""
    return PolicyType(request.param)
