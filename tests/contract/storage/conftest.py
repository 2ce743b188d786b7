"""Places to run the suites on: a directory, one in which no link is followed, memory, and a real
S3-compatible server."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import versitygw
from tiers import TierUnderTest

_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[versitygw.S3Server]:
    server = versitygw.S3Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.stop()


@pytest.fixture
def s3_tier(s3_server: versitygw.S3Server) -> TierUnderTest:
    prefix = f"s3://{versitygw.BUCKET}/t{next(_numbers)}"
    return TierUnderTest(uri=prefix, options=versitygw.options(s3_server.port))


@pytest.fixture(params=["local", "confined", "memory", pytest.param("s3", marks=pytest.mark.s3)])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> TierUnderTest:
    if request.param == "local":
        return TierUnderTest(uri=str(tmp_path / "tier"), options={})
    if request.param == "confined":
        return TierUnderTest(uri=str(tmp_path / "teams" / "a"), options={}, top=tmp_path)
    if request.param == "memory":
        return TierUnderTest(uri=f"memory://t{next(_numbers)}", options={})
    return request.getfixturevalue("s3_tier")  # type: ignore[no-any-return]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test that needs the server may have to build it."""
    if not versitygw.binary().exists():
        for item in items:
            if item.get_closest_marker("s3"):
                item.add_marker(pytest.mark.timeout(versitygw.BUILT_WITHIN_S))
