"""Values in a world's store: those of its ranks, and those of strangers."""

from __future__ import annotations

import pytest

from holdfast._daemon.store_keys import StoreSeal, new_store_key
from holdfast_core.errors import UnreachableError

KEY = new_store_key()


@pytest.mark.parametrize("value", [b"", b"step 7", bytes(100)])
def test_a_rank_of_the_world_reads_what_another_has_written(value: bytes) -> None:
    sealed = StoreSeal(KEY, 3).seal("said-1-0", value)
    assert StoreSeal(KEY, 3).open("said-1-0", sealed) == value


@pytest.mark.parametrize(
    ("seal", "name"),
    [
        (StoreSeal(new_store_key(), 3), "said-1-0"),
        (StoreSeal(KEY, 2), "said-1-0"),
        (StoreSeal(KEY, 3), "said-1-1"),
        (StoreSeal(KEY, 3), "said-2-0"),
        (StoreSeal("", 3), "said-1-0"),
        (StoreSeal(KEY, 33), "aid-1-0"),
    ],
)
def test_a_value_counts_under_its_name_in_its_world_only(seal: StoreSeal, name: str) -> None:
    moved = seal.seal(name, b"step 7")
    with pytest.raises(UnreachableError, match="was not written by a rank of this world"):
        StoreSeal(KEY, 3).open("said-1-0", moved)


def test_no_change_of_a_sealed_value_is_taken_for_it() -> None:
    seal = StoreSeal(KEY, 3)
    sealed = seal.seal("a", b"7")
    changed = [sealed[:i] + bytes([sealed[i] ^ 1]) + sealed[i + 1 :] for i in range(len(sealed))]
    for each in (*changed, *(sealed[:i] for i in range(len(sealed))), sealed + b"0", b"7", b""):
        with pytest.raises(UnreachableError):
            seal.open("a", each)


def test_keys_differ_and_are_hard_to_guess() -> None:
    keys = {new_store_key() for _ in range(100)}
    assert len(keys) == 100 and {len(key) for key in keys} == {32}


def test_without_a_key_values_stay_as_they_are() -> None:
    seal = StoreSeal("", 3)
    assert seal.open("a", seal.seal("b", b"7")) == b"7"
