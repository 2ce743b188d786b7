"""A missing package of another project becomes a sentence; one of ours stays what it is."""

from __future__ import annotations

import importlib

import pytest

from holdfast_core.errors import HoldfastError, MissingPackageError
from holdfast_core.packages import PackageGroup, needing


def test_an_import_that_fails_names_the_package_and_its_group() -> None:
    with (
        pytest.raises(
            MissingPackageError, match=r"that needs the package nowhere_at_all, .*\[cli\]"
        ),
        needing("that", PackageGroup.CLI),
    ):
        importlib.import_module("nowhere_at_all.inside")


def test_the_error_is_an_import_error_and_one_of_ours() -> None:
    assert issubclass(MissingPackageError, ImportError)
    assert issubclass(MissingPackageError, HoldfastError)


def test_a_module_of_ours_that_is_missing_is_a_broken_installation() -> None:
    with (
        pytest.raises(ModuleNotFoundError, match=r"holdfast_core\.nowhere"),
        needing("that", PackageGroup.CLI),
    ):
        importlib.import_module("holdfast_core.nowhere")
