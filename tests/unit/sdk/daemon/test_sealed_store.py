"""Values in a world's store: those of its ranks, and those of strangers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]  # re-exported

from holdfast._daemon.sealed_store import SealedStore, new_store_key
from holdfast_core.errors import ProtocolError, UnreachableError

KEY, WORLD = "5e" * 16, "world-3"


@pytest.fixture
def plain() -> HashStore:
    """What everybody reaches who reaches the port."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    return store


def _sealed(plain: HashStore, prefix: str = WORLD, key: str = KEY) -> SealedStore:
    return SealedStore(plain, prefix, key)


@pytest.mark.parametrize("value", [b"", b"step 7", bytes(100), "text"])
def test_a_rank_of_the_world_reads_what_another_has_written(
    plain: HashStore, value: str | bytes
) -> None:
    _sealed(plain).set("come-1-0", value)
    expected = value.encode() if isinstance(value, str) else value
    assert _sealed(plain).get("come-1-0") == expected
    assert _sealed(plain).multi_get(["come-1-0", "come-1-0"]) == [expected] * 2


@pytest.mark.parametrize(
    ("prefix", "key", "name"),
    [
        (WORLD, "6f" * 16, "come-1-0"),
        ("world-2", KEY, "come-1-0"),
        (WORLD, KEY, "come-1-1"),
        (WORLD, KEY, "come-2-0"),
        ("world-33", KEY, "ome-1-0"),
        ("world-3/c", KEY, "ome-1-0"),
    ],
)
def test_a_value_counts_under_its_name_in_its_world_only(
    plain: HashStore, prefix: str, key: str, name: str
) -> None:
    _sealed(plain, prefix, key).set(name, b"step 7")
    moved = plain.get(f"{prefix}/{name}")
    plain.set(f"{WORLD}/come-1-0", moved)  # type: ignore[arg-type]  # torch takes bytes
    with pytest.raises(UnreachableError, match="world-3/come-1-0 in the store of this training"):
        _sealed(plain).get("come-1-0")


def test_no_change_of_a_sealed_value_is_taken_for_it(plain: HashStore) -> None:
    store, at = _sealed(plain), f"{WORLD}/a"
    store.set("a", b"7")
    sealed = plain.get(at)
    changed = [sealed[:i] + bytes([sealed[i] ^ 1]) + sealed[i + 1 :] for i in range(len(sealed))]
    for each in (*changed, *(sealed[:i] for i in range(len(sealed))), sealed + b"0", b"7", b""):
        plain.set(at, each)  # type: ignore[arg-type]
        with pytest.raises(UnreachableError):
            store.get("a")
        with pytest.raises(UnreachableError):
            store.multi_get(["a"])
        with pytest.raises(UnreachableError):
            store.compare_set("a", b"7", b"8")
        assert plain.get(at) == each


def test_keys_differ_and_are_hard_to_guess() -> None:
    keys = {new_store_key() for _ in range(100)}
    assert len(keys) == 100 and {len(key) for key in keys} == {32}


def test_without_a_key_the_daemons_are_named_as_too_old(plain: HashStore) -> None:
    with pytest.raises(ProtocolError, match="older than this image; upgrade all daemons before"):
        _sealed(plain, key="")


def test_it_is_a_store_as_any_other_to_torch(plain: HashStore) -> None:
    """By the calls from C++ too: a store behind another one is called by it."""
    direct = _sealed(plain)
    stores: list[Any] = [direct, PrefixStore("group", direct)]
    for both in stores:
        both.set("a", b"\x00\xff")
        assert both.get("a") == b"\x00\xff"
        assert both.check(["a"]) and not both.check(["a", "b"])
        both.wait(["a"])
        with pytest.raises(RuntimeError):
            both.wait(["b"], timedelta(milliseconds=1))
        both.multi_set(["b", "c"], ["1", "2"])
        assert both.multi_get(["b", "c"]) == [b"1", b"2"]
        assert both.compare_set("d", "", "1") == b"1"
        assert both.compare_set("d", "2", "3") == b"1"
        assert both.compare_set("d", "1", "3") == both.get("d") == b"3"
        assert both.add("n", 2) == 2 and both.add("n", 1) == 3


def test_it_waits_as_long_as_it_is_told(plain: HashStore) -> None:
    store = _sealed(plain)
    assert store.timeout == plain.timeout == timedelta(seconds=20)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(milliseconds=1))
    assert store.timeout == timedelta(milliseconds=1)  # type: ignore[attr-defined]
    for wait in (lambda: store.get("a"), lambda: store.wait(["a"]), lambda: store.multi_get(["a"])):
        with pytest.raises(RuntimeError):
            wait()
