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
