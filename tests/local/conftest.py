"""A cluster for each test; when the test fails, the state and logs of its daemons are shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from combinations import BY_REDUNDANCY, Combination, is_drawn
from harness import RawCluster
from local_jobs import short_folder
from small_tmpfs import mounted
from warm_processes import WarmProcesses

from holdfast_cli.local import processes, supervisor
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
def directory() -> Iterator[Path]:
    with short_folder() as made:
        yield made


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    """A small tmpfs of the test's own; needs root. Ask for it before `cluster`, whose daemons have
    to end first."""
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


@pytest.fixture(scope="session", autouse=True)
def _warm_processes() -> Iterator[None]:
    """Local runs fork their processes from one that has imported what these need; the first run
    starts that one."""
    warm: list[WarmProcesses] = []

    def spawn(
        arguments: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> processes.ProcessId:
        if not warm:
            warm.append(WarmProcesses())
        pid = warm[0].fork(arguments, environment, log)
        if pid is None:
            return processes.spawn(arguments, environment, log)
        return processes.identify(pid) or processes.ProcessId(pid, -1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "spawn", spawn)
        yield
    for each in warm:
        each.close()
