"""What all tests share: reproducible Hypothesis runs, slow tests first or left out, tests that need
a GPU, which skip by name, and faults planted in new processes.

Fixtures of one part live beside that part's tests, not here.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, however slow the machine is: a failure here is a failure
# everywhere. To search for new ones: `make test ARGS="--hypothesis-profile=explore"`.
_patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "fixed", _patient, max_examples=50, derandomize=True, database=None, print_blob=True
)
settings.register_profile("explore", _patient, max_examples=2000)
settings.load_profile("fixed")

LEFT_OUT = pytest.StashKey[int]()
"""Number of slow tests that this run leaves out."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without-slow",
        action="store_true",
        help="leave out tests marked `slow`, as `make test` does; not with --every-combination",
    )
    parser.addoption(
        "--slow-part",
        type=_part,
        metavar="PART/PARTS",
        help="of the tests marked `slow`, run those in one part of the files, as `.ci/run` does: "
        "0/3, 1/3 or 2/3; not with --every-combination",
    )
    parser.addoption(
        "--every-combination",
        action="store_true",
        help="run each fault test for every policy and redundancy, not for one of them, and tests "
        "marked `exhaustive` (long)",
    )
    parser.addoption(
        "--schedules",
        type=int,
        default=1000,
        help="how many seeded schedules of a whole cluster the simulation runs",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with tests marked `slow`: one that begins last runs beside an idle core.

    Without `--every-combination`, leave out those marked `exhaustive`, and with `--without-slow`
    those marked `slow`, too. Skip tests marked `gpu` where there is none; imports torch only if
    there are such tests.
    """
    if not config.getoption("--every-combination"):
        _leave_out("exhaustive", config, items)
        if config.getoption("--without-slow"):
            config.stash[LEFT_OUT] = _leave_out("slow", config, items)
        elif (chosen := config.getoption("--slow-part")) is not None:
            config.stash[LEFT_OUT] = _leave_out("slow", config, items, but=chosen)
    # Stories of a cluster have an order of their own.
    items.sort(
        key=lambda i: bool(i.get_closest_marker("cluster") or not i.get_closest_marker("slow"))
    )
    # A process has one fork server, and what starts it first decides what it has imported.
    if daemons := sys.modules.get("daemons"):  # some test forks daemons
        daemons.warm_up()
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _cuda_is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Have the collector leave alone what was collected, and look at the rest less often: going
    through thousands of tests again and again takes longer than many of them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Report to the process that prints the summary, where this is a worker of it."""
    output = getattr(session.config, "workeroutput", {})
    output["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what a worker reports: all have collected the same tests."""
    output = getattr(node, "workeroutput", {})  # a worker that crashed has none
    node.config.stash[LEFT_OUT] = output.get("left_out", node.config.stash.get(LEFT_OUT, 0))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Name what was left out, and what runs it."""
    if left_out := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(
            f"{left_out} slow tests were left out: make test-all and make test-cluster run them"
        )


def pytest_unconfigure() -> None:
    """Leave nothing frozen: libraries report as leaked what is not freed before they end."""
    gc.unfreeze()


def _part(text: str) -> tuple[int, int]:
    """(part, parts) of "part/parts"."""
    part, parts = map(int, text.split("/"))
    if not 0 <= part < parts:
        raise ValueError(text)
    return part, parts


def _leave_out(
    marker: str, config: pytest.Config, items: list[pytest.Item], but: tuple[int, int] | None = None
) -> int:
    """Leave out the tests with a marker, but for one part of their files; how many."""

    def stays(item: pytest.Item) -> bool:
        if item.get_closest_marker(marker) is None:
            return True
        file = item.nodeid.partition("::")[0]
        return but is not None and zlib.crc32(file.encode()) % but[1] == but[0]

    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        (kept if stays(item) else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept
    return len(left_out)


def _cuda_is_available() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes every Python process that starts afterwards run some text first."""

    def planting(text: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    return planting
