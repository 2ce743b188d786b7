from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast_core.errors import (
    HoldfastError,
    MemoryBudgetError,
    ProtocolError,
    UnknownSessionError,
    by_code,
    known_code,
)


def tree(root: type[HoldfastError]) -> Iterator[type[HoldfastError]]:
    yield root
    for child in root.__subclasses__():
        yield from tree(child)


ALL = sorted(
    {kind for kind in tree(HoldfastError) if kind.__module__ == HoldfastError.__module__},
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_a_code_leads_back_to_the_kind_of_error(kind: type[HoldfastError]) -> None:
    error = by_code(kind.code, "what was wrong")
    assert type(error) is kind
    assert str(error) == "what was wrong"


def test_codes_are_unique() -> None:
    assert len({kind.code for kind in ALL}) == len(ALL)


def test_an_unknown_code_is_still_a_holdfast_error() -> None:
    assert type(by_code("from_the_future", "x")) is HoldfastError


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_the_code_of_each_kind_is_known(kind: type[HoldfastError]) -> None:
    assert known_code(kind.code) == kind.code


@pytest.mark.parametrize("code", ["", "from_the_future", "Corrupt", "x" * 10**6])
def test_an_unknown_code_counts_as_none(code: str) -> None:
    assert known_code(code) == ""


def test_a_budget_error_carries_both_numbers() -> None:
    error = MemoryBudgetError("too much", needed_bytes=5, available_bytes=3)
    assert (error.needed_bytes, error.available_bytes, str(error)) == (5, 3, "too much")


def test_unknown_sessions_are_protocol_errors() -> None:
    assert issubclass(UnknownSessionError, ProtocolError)
