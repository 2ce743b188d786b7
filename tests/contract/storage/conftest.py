"""Places to run the suites on: a directory, one in which no link is followed, memory, a real
S3-compatible server and, with `make test-stores`, emulators of Google's and Azure's storage."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import emulators
import fsspec
import pytest
import versitygw
from tiers import TierUnderTest

_numbers = itertools.count()
_EMULATED = (
    pytest.mark.exhaustive,
    pytest.mark.timeout(300),  # Azurite loads hundreds of packages
    # gcsfs and adlfs hand parts of a file to aiohttp whole, which is theirs to decide.
    pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning"),
)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[versitygw.S3Server]:
    server = versitygw.S3Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.stop()


@pytest.fixture
def s3_tier(s3_server: versitygw.S3Server) -> TierUnderTest:
    prefix = f"s3://{versitygw.BUCKET}/t{next(_numbers)}"
    return TierUnderTest(uri=prefix, options=versitygw.options(s3_server.port))


@pytest.fixture(scope="session")
def gs_options() -> Iterator[dict[str, object]]:
    yield from _emulated("gs", emulators.Google())


@pytest.fixture(scope="session")
def abfs_options() -> Iterator[dict[str, object]]:
    yield from _emulated("abfs", emulators.Azure())


def _emulated(
    scheme: str, server: emulators.Google | emulators.Azure
) -> Iterator[dict[str, object]]:
    """Options for fsspec to reach the emulator, which has a bucket, until the tests end."""
    try:
        fsspec.filesystem(scheme, **server.options).mkdir(versitygw.BUCKET)
        yield server.options
    finally:
        server.stop()


@pytest.fixture(
    params=[
        "local",
        "confined",
        "memory",
        pytest.param("s3", marks=pytest.mark.s3),
        pytest.param("gs", marks=_EMULATED),
        pytest.param("abfs", marks=_EMULATED),
    ]
)
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> TierUnderTest:
    kind = request.param
    if kind == "local":
        return TierUnderTest(uri=str(tmp_path / "tier"), options={})
    if kind == "confined":
        return TierUnderTest(uri=str(tmp_path / "teams" / "a"), options={}, top=tmp_path)
    if kind == "memory":
        return TierUnderTest(uri=f"memory://t{next(_numbers)}", options={})
    if kind == "s3":
        return request.getfixturevalue("s3_tier")  # type: ignore[no-any-return]
    options = request.getfixturevalue(f"{kind}_options")
    return TierUnderTest(uri=f"{kind}://{versitygw.BUCKET}/t{next(_numbers)}", options=options)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test that needs the server may have to build it."""
    if not versitygw.binary().exists():
        for item in items:
            if item.get_closest_marker("s3"):
                item.add_marker(pytest.mark.timeout(versitygw.BUILT_WITHIN_S))
