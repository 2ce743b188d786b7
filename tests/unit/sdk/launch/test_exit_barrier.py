"""The barrier of agents whose workers have finished, and strangers at its store."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported by torch

from holdfast._daemon.sealed_store import SealedStore, new_store_key
from holdfast._launch.agent import FINISHED, LEFT, ExitBarrier

NODES, TIMEOUT = 3, timedelta(seconds=20)
FAKES: dict[str, Callable[[TCPStore, str], object]] = {
    "counted": lambda store, name: (store.delete_key(name), store.add(name, NODES)),
    "deleted": TCPStore.delete_key,
    "set": lambda store, name: store.set(name, ""),
    "copied": lambda store, name: store.set(name, store.get(f"epoch-1/{FINISHED}-0")),  # type: ignore[arg-type]
}


@pytest.fixture
def served() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


@pytest.fixture
def barriers(served: TCPStore) -> list[ExitBarrier]:
    sealed = SealedStore(served, "epoch-1", new_store_key())
    return [ExitBarrier(sealed, node, NODES) for node in range(NODES)]


def test_it_opens_when_the_workers_of_all_nodes_have_finished(barriers: list[ExitBarrier]) -> None:
    first, second, third = barriers
    assert not second.all_finished() and not first.all_finished() and not third.all_finished()
    assert first.all_finished()
    first.leave()
    assert second.all_finished() and third.all_finished()
    second.leave()
    assert not first.all_left()
    third.leave()
    assert first.all_left()


@pytest.mark.parametrize("name", [FINISHED, f"{FINISHED}-2", f"{LEFT}-1", f"{LEFT}-2"])
@pytest.mark.parametrize("fake", FAKES)
def test_a_stranger_opens_it_for_nobody_and_keeps_it_shut_for_nobody(
    served: TCPStore, barriers: list[ExitBarrier], fake: str, name: str
) -> None:
    first, second, third = barriers
    assert not second.all_finished() and not first.all_finished()
    FAKES[fake](served, f"epoch-1/{name}")
    assert not first.all_finished() and not second.all_finished()
    assert not third.all_finished()
    assert first.all_finished()
    first.leave()
    FAKES[fake](served, f"epoch-1/{name}")
    assert not first.all_left()  # and says again what was overwritten
    assert second.all_finished() and third.all_finished()
    second.leave()
    third.leave()
    assert first.all_left()
