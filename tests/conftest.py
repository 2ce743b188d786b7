"""What all tests share: reproducible Hypothesis runs, slow tests first, and tests that need a GPU
skip by name.

Fixtures of one part live beside that part's tests, not here.
"""

from __future__ import annotations

import gc
import importlib.util
import sys

import pytest
from hypothesis import settings

# The same examples in every run: a failure here is a failure everywhere. To search for new ones:
# `make test ARGS="--hypothesis-profile=explore"`.
settings.register_profile(
    "fixed", max_examples=50, derandomize=True, database=None, deadline=None, print_blob=True
)
settings.register_profile("explore", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("fixed")


def pytest_addoption(parser: pytest.Parser) -> None:
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

    Without `--every-combination`, leave out those marked `exhaustive`. Skip tests marked `gpu`
    where there is none; imports torch only if there are such tests.
    """
    if not config.getoption("--every-combination"):
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
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


def pytest_unconfigure() -> None:
    """Leave nothing frozen: libraries report as leaked what is not freed before they end."""
    gc.unfreeze()


def _cuda_is_available() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
