"""If a package is missing, the error names the extra to install.

Holdfast is one distribution; its optional dependencies come in groups, `pip install
"holdfast[daemon]"`. Starting a part of it without its group gives this error instead of a
traceback. This module imports nothing itself and looks for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from holdfast_core.errors import MissingPackageError

OWN = "holdfast"
"""Beginning of the names of our own packages: if one of them is missing, the installation is
broken, and no group repairs it."""


class PackageGroup(StrEnum):
    """Groups of optional dependencies, as pyproject.toml names them."""

    TRAINER = "trainer"
    DAEMON = "daemon"
    CATALOGUE = "catalogue"
    OPERATOR = "operator"
    CLI = "cli"
    HUGGINGFACE = "huggingface"
    LIGHTNING = "lightning"
    TORCHTITAN = "torchtitan"
    DEEPSPEED = "deepspeed"
    MEGATRON = "megatron"
    ALL = "all"


def missing(what: str, package: str, group: PackageGroup) -> MissingPackageError:
    """The error of `what`, which needs a package that is not installed."""
    return MissingPackageError(
        f"{what} needs the package {package}, which is not installed; "
        f'install it with: pip install "holdfast[{group}]"'
    )


@contextmanager
def needing(what: str, group: PackageGroup) -> Iterator[None]:
    """Translate imports that fail in this block.

    Args:
        what: what needs them, in words.
        group: the group that has them.

    Raises:
        MissingPackageError: a package of another project is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package.startswith(OWN):
            raise
        raise missing(what, package, group) from error
