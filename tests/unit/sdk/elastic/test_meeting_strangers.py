"""Strangers at the store where a world's ranks meet: they can disturb it, not decide."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # re-exported

from holdfast._daemon.store_keys import StoreSeal, new_store_key
from holdfast._elastic.forming import FormingStore
from holdfast._elastic.groups import MeetingPoint
from holdfast_core.errors import UnreachableError

KEY, TIMEOUT_S = new_store_key(), 20.0


@pytest.fixture
def served() -> TCPStore:
    """The store of a world."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _points(served: TCPStore, keys: list[str]) -> list[MeetingPoint]:
    address = f"127.0.0.1:{served.port}"
    return [MeetingPoint(address, 1, len(keys), lambda: False, key) for key in keys]


def _stranger(served: TCPStore) -> TCPStore:
    timeout = timedelta(seconds=TIMEOUT_S)
    return TCPStore("127.0.0.1", served.port, is_master=False, timeout=timeout)


def _gather(
    served: TCPStore, keys: list[str], between: Callable[[], None] = lambda: None
) -> list[list[str] | BaseException]:
    """What each of two ranks finds; `between` happens once the first has spoken."""
    points = _points(served, keys)
    texts = ["step 7", "step 8"]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(points[0].gather, 0, texts[0], TIMEOUT_S)
        _stranger(served).wait(["world-1/come-1"], timedelta(seconds=TIMEOUT_S))
        between()
        second = pool.submit(points[1].gather, 1, texts[1], TIMEOUT_S)
        return [each.exception() or each.result() for each in (first, second)]


def test_ranks_with_the_key_find_what_all_have_said(served: TCPStore) -> None:
    assert _gather(served, [KEY, KEY]) == [["step 7", "step 8"]] * 2


@pytest.mark.parametrize("value", [b"step 9", bytes(32) + b"step 9", b""])
def test_what_a_stranger_writes_in_a_ranks_place_is_taken_by_nobody(
    served: TCPStore, value: bytes
) -> None:
    stranger = _stranger(served)
    between = functools.partial(stranger.set, "world-1/said-1-0", value)  # type: ignore[arg-type]
    for each in _gather(served, [KEY, KEY], between):
        assert isinstance(each, UnreachableError) and "said-1-0" in str(each)


def test_what_one_rank_has_said_is_not_taken_for_anothers_words(served: TCPStore) -> None:
    stranger = _stranger(served)

    def exchange() -> None:
        stranger.set("world-1/said-1-1", stranger.get("world-1/said-1-0"))  # type: ignore[arg-type]
        stranger.set("world-1/said-1-0", StoreSeal(new_store_key(), 1).seal("said-1-0", b"step 9"))  # type: ignore[arg-type]

    for each in _gather(served, [KEY, KEY], exchange):
        assert isinstance(each, UnreachableError)


@pytest.mark.parametrize("value", [b"", b"\xc1", b"\x91\xc4\x01a", b"[]"])
def test_a_list_that_a_stranger_hands_out_is_taken_by_nobody(
    served: TCPStore, value: bytes
) -> None:
    """The first rank is told that all have come before they have."""
    stranger = _stranger(served)
    with ThreadPoolExecutor(1) as pool:
        [point, _] = _points(served, [KEY, KEY])
        first = pool.submit(point.gather, 0, "step 7", TIMEOUT_S)
        stranger.wait(["world-1/said-1-0"], timedelta(seconds=TIMEOUT_S))
        stranger.set("world-1/complete-1", value)  # type: ignore[arg-type]
        assert isinstance(first.exception(), UnreachableError)


def test_a_rank_whose_daemon_passes_on_no_key_is_named_as_the_cause(served: TCPStore) -> None:
    whole, without = _gather(served, [KEY, ""])
    assert isinstance(whole, UnreachableError) and "too old to pass on" in str(whole)
    assert without != ["step 7", "step 8"]


def test_gloo_connects_to_no_address_that_a_stranger_has_written(served: TCPStore) -> None:
    inner = PrefixStore("groups", served)
    one, other = (
        FormingStore(inner, 1, lambda: False, TIMEOUT_S, StoreSeal(KEY, 1)) for _ in range(2)
    )
    one.set("0/1", b"10.0.0.1:1234")
    assert other.get("0/1") == b"10.0.0.1:1234"
    one.set("words", "as text")
    assert other.get("words") == b"as text"
    _stranger(served).set("groups/0/1", b"192.0.2.1:1234")  # type: ignore[arg-type]
    with pytest.raises(UnreachableError, match="'0/1' in the world's store"):
        other.get("0/1")
