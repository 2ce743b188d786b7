"""One cluster of five nodes for all tests here: four for members and a spare.

`--running-cluster` takes the one of `make cluster` instead, with the images that it has, and leaves
it running: quicker while one writes a test. Whatever a test leaves behind, the next one meets.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import images
import pytest
from cluster import Cluster
from holdfast_system import Holdfast
from machine import ClusterError

_HERE = Path(__file__).parent
_TIMEOUT_S = 600.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--running-cluster",
        action="store_true",
        help="test on the cluster that `make cluster` started",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder: they take minutes, not the usual seconds. Files that install
    Holdfast come last: others run an operator of their own, and two would work on the same jobs."""
    installing = {each.path for each in items if "holdfast" in getattr(each, "fixturenames", ())}
    items.sort(key=lambda item: item.path in installing)
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker("cluster")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(_TIMEOUT_S))


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    try:
        if request.config.getoption("--running-cluster"):
            yield Cluster.running()
            return
        archive = images.build()
        owned = Cluster(nodes=5)
    except ClusterError as error:
        pytest.exit(str(error), returncode=1)
    with owned:
        owned.load_image(archive)
        yield owned


@pytest.fixture(scope="session")
def holdfast(cluster: Cluster) -> Holdfast:
    """The chart, installed; it stays. A test that changes the release puts it back."""
    system = Holdfast(cluster)
    system.install()
    return system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Gather logs, objects and events at the moment of a failure, and say where they are."""
    report = yield
    found = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and isinstance(found, Cluster):
        report.sections.append(("cluster", f"logs are in {found.collect_logs(item.nodeid)}"))
    return report
