"""Drawing is optional: modules that draw import matplotlib when they are used, and report what to
install if it is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from holdfast_core.errors import InvalidJobError


@contextmanager
def needs_matplotlib() -> Iterator[None]:
    """Translate the import error of a module that draws.

    Raises:
        InvalidJobError: when matplotlib is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        raise InvalidJobError(
            "--plot draws with matplotlib, which is not installed; pip install 'holdfast[cli]'"
        ) from error
