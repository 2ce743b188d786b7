"""Bounds of what a trainer makes the daemon keep."""

from __future__ import annotations

from math import inf, nan

import pytest

from holdfast_core.errors import ProtocolError
from holdfast_daemon.trainers.request_limits import (
    KEY_CHARACTERS_MAX,
    check_store_key,
    duration_s,
)


@pytest.mark.parametrize(
    ("claimed_s", "taken_s"), [(0.0, 0.0), (1.5, 1.5), (-1.0, 0.0), (inf, 0.0), (nan, 0.0)]
)
def test_only_durations_are_taken_for_durations(claimed_s: float, taken_s: float) -> None:
    assert duration_s(claimed_s) == taken_s


def test_the_key_of_a_store_is_short_and_of_letters_and_digits() -> None:
    for good in ("", "0af9", "k" * KEY_CHARACTERS_MAX):
        check_store_key(good)
    for bad in ("k" * (KEY_CHARACTERS_MAX + 1), "a b", "\n", "é", "a/b"):
        with pytest.raises(ProtocolError, match="is not the key of a training world's store"):
            check_store_key(bad)
