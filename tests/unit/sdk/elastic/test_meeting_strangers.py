"""Strangers at the store where a world's ranks meet: they can disturb it, not decide."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported by torch

from holdfast._daemon.sealed_store import SealedStore, new_store_key
from holdfast._elastic import groups
from holdfast._elastic.forming import Listener, read_listener
from holdfast._elastic.groups import MeetingPoint
from holdfast_core.errors import HoldfastError, StaleEpochError, UnreachableError

KEY, TIMEOUT_S = "5e" * 16, 100.0
TIMEOUT = timedelta(seconds=TIMEOUT_S)
CODE_BYTES = 32
TEXTS = ["step 7", "step 8"]
RANKS = 3


@pytest.fixture
def served() -> TCPStore:
    """The store of a world, as everybody reaches it."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


def _gather(
    served: TCPStore,
    first: int = 0,
    between: Callable[[], object] = lambda: None,
    *,
    alone: bool = False,
) -> list[list[str] | BaseException]:
    """What each of two ranks finds; `between` happens once rank `first` has spoken. The world ends
    once a rank has failed, as worlds do. With `alone`, the other rank comes when the first has
    ended, and finds that the world lasts."""
    over = threading.Event()

    def meet(rank: int) -> list[str]:
        point = MeetingPoint(
            f"127.0.0.1:{served.port}", KEY, epoch=1, rank=rank, size=2, ended=over.is_set
        )
        try:
            return point.gather(TEXTS[rank], TIMEOUT_S)
        except HoldfastError:
            over.set()
            raise

    with ThreadPoolExecutor(2) as pool:
        found = {first: pool.submit(meet, first)}
        served.wait([f"world-1/come-1-{first}"], TIMEOUT)
        between()
        if alone:
            wait([found[first]])
            over.clear()
        found[1 - first] = pool.submit(meet, 1 - first)
        return [found[rank].exception() or found[rank].result() for rank in range(2)]


def test_ranks_with_the_key_find_what_all_have_said(served: TCPStore) -> None:
    assert _gather(served) == [TEXTS] * 2


@pytest.mark.parametrize("value", [b"step 9", bytes(32) + b"step 9", b"", b"1"])
@pytest.mark.parametrize("rank", range(2))
def test_what_a_stranger_writes_in_a_ranks_place_is_taken_by_nobody(
    served: TCPStore, rank: int, value: bytes
) -> None:
    name = f"world-1/come-1-{rank}"
    first, second = _gather(served, rank, lambda: served.set(name, value))  # type: ignore[arg-type]
    assert isinstance(first, UnreachableError) and name in str(first)
    assert isinstance(second, StaleEpochError)


def test_what_one_rank_has_said_is_not_taken_for_anothers_words(served: TCPStore) -> None:
    def exchange() -> None:
        served.set("world-1/come-1-1", served.get("world-1/come-1-0"))  # type: ignore[arg-type]
        SealedStore(served, "world-1", new_store_key()).set("come-1-0", "step 9")

    first, second = _gather(served, 0, exchange)
    assert isinstance(first, UnreachableError) and isinstance(second, StaleEpochError)


def test_what_was_said_in_another_world_is_not_taken_for_words_of_this_one(
    served: TCPStore,
) -> None:
    SealedStore(served, "world-0", KEY).set("come-1-1", "step 9")
    old = served.get("world-0/come-1-1")
    first, _ = _gather(served, 1, lambda: served.set("world-1/come-1-1", old))  # type: ignore[arg-type]
    assert isinstance(first, UnreachableError)


@pytest.mark.parametrize("value", [b"", b"\x92\xa6step 9\xa6step 9", b"2"])
def test_a_list_that_a_stranger_hands_out_is_taken_by_nobody(
    served: TCPStore, value: bytes
) -> None:
    """Rank 1 is told that all have come before they have."""

    def hand_out() -> None:
        served.set("world-1/complete-1", value)  # type: ignore[arg-type]

    first, second = _gather(served, 1, hand_out, alone=True)
    assert isinstance(second, UnreachableError) and "world-1/complete-1" in str(second)
    assert first == TEXTS  # by what both have said


@pytest.mark.parametrize("name", ["come-1", "complete", "come-1-0/num_members", "come-2-0"])
def test_counting_in_the_ranks_place_brings_no_meeting_to_an_end(
    served: TCPStore, name: str
) -> None:
    assert _gather(served, 1, lambda: served.add(f"world-1/{name}", 2)) == [TEXTS] * 2


class LateMeetingPoint(MeetingPoint):
    """That of a rank that looks for the others' addresses only when the stranger is done."""

    clock: Any

    @contextmanager
    def forming(self, backend: str | None) -> Iterator[None]:
        with super().forming(backend):
            self.clock.get("changed")
            yield


def form_beside_a_stranger(rank: int, port: int) -> None:
    clock: Any = TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    kind = LateMeetingPoint if rank == RANKS - 1 else MeetingPoint
    point = kind(
        f"127.0.0.1:{port}",
        KEY,
        epoch=1,
        rank=rank,
        size=RANKS,
        ended=lambda: clock.check(["over"]),
    )
    if isinstance(point, LateMeetingPoint):
        point.clock = clock
        with pytest.raises(UnreachableError, match="was not written by one of its ranks"):
            point.form("gloo", TIMEOUT_S)
        clock.set("over", "")
    else:
        # The others may have connected to it before it has looked at what was changed, and lose it
        # before it has said that the world is over.
        try:
            point.form("gloo", TIMEOUT_S)
        except (UnreachableError, StaleEpochError):
            pass
        except RuntimeError as error:
            # The kernel says so where it closes before it has read what they sent.
            assert re.search("onnection (closed|reset) by peer", str(error)), error
    groups.leave()


def test_gloo_connects_to_no_address_that_a_stranger_has_written(served: TCPStore) -> None:
    with socket.create_server(("", 0)) as stranger, ThreadPoolExecutor(1) as pool:
        stranger.setblocking(False)
        port = stranger.getsockname()[1].to_bytes(2, "big")
        ranks = pool.submit(run_ranks, form_beside_a_stranger, (served.port,), RANKS)
        served.wait(["world-1/complete-1"], TIMEOUT)  # they start first
        while len(addresses := _addresses(served)) < RANKS - 1:
            assert not ranks.done(), ranks.result()
        for name, own in addresses.items():
            value = served.get(name)
            served.set(name, value.replace(own.port.to_bytes(2, "big"), port))  # type: ignore[arg-type]
            changed = read_listener(served.get(name)[CODE_BYTES:])
            assert changed is not None and changed.port == stranger.getsockname()[1]
        served.set("changed", "")
        ranks.result()
        with pytest.raises(BlockingIOError):
            stranger.accept()


def _addresses(served: TCPStore) -> dict[str, Listener]:
    """Names in the store under which gloo looks for addresses, and these."""
    names = [name for name in served.list_keys() if name.startswith("world-1/gloo/")]
    found = {name: read_listener(served.get(name)[CODE_BYTES:]) for name in names}
    return {name: listener for name, listener in found.items() if listener is not None}


def form_and_add_up(rank: int, port: int) -> None:
    point = MeetingPoint(
        f"127.0.0.1:{port}", KEY, epoch=1, rank=rank, size=RANKS, ended=lambda: False
    )
    point.form("gloo", TIMEOUT_S)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == RANKS
    groups.leave()


def test_everything_in_the_store_of_a_world_of_gloo_is_sealed(served: TCPStore) -> None:
    """So there is no name under which a stranger's value would be taken."""
    run_ranks(form_and_add_up, (served.port,), RANKS)
    names = [name for name in served.list_keys() if name.startswith("world-1/")]
    assert any("/gloo/" in name for name in names) and any("/come-" in name for name in names)
    for name in names:
        prefix = "world-1/gloo" if name.startswith("world-1/gloo/") else "world-1"
        SealedStore(served, prefix, KEY).get(name.removeprefix(f"{prefix}/"))
