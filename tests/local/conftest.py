"""A cluster for each test; what its daemons held and said is shown when the test fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import RawCluster


@pytest.fixture
def cluster() -> Iterator[RawCluster]:
    with RawCluster(arguments=("--metrics-port", "0")) as running:
        yield running
        print(running.story())


@pytest.fixture(params=[False, True], ids=["Full", "PartialExperts"])
def carries(request: pytest.FixtureRequest) -> bool:
    """Whether the saves of a job carry pieces over."""
    return bool(request.param)
