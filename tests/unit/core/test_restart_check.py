from __future__ import annotations

import msgspec
import pytest

from holdfast_core.errors import StorageError
from holdfast_core.restart_check import (
    Beside,
    Captured,
    Order,
    Phase,
    Record,
    Stage,
    State,
    Tensor,
    captured_by,
    compare,
    decode_order,
    decode_record,
)


def tensor(digest: str = "a") -> Tensor:
    return Tensor(unit="layer0/dense", role="compute", nbytes=8, digest=digest)


def thing(kind: str, digest: str, name: str = "it of main()") -> Beside:
    return Beside(kind=kind, name=name, type="Kind", digest=digest)


STATE = State(
    tensors={"w": tensor(), "b": tensor("b")},
    extras={"generator of torch": "1"},
    beside=(thing("scheduler", "s"),),
    batches=("x",),
)


def record(
    rank: int = 0, *, step: int | None = 3, ready: State | None = None, **state: object
) -> Record:
    return Record(
        rank=rank,
        phase=Phase.FIRST,
        stage=Stage.STEPPED,
        step=step,
        ready=ready or State(tensors=STATE.tensors),
        stepped=msgspec.structs.replace(STATE, **state),
    )


def test_equal_records_come_back_and_what_is_beside_them_is_named() -> None:
    comparison = compare([record(0), record(1)], [record(0), record(1)])
    assert comparison.comes_back
    assert comparison.same_data is True
    assert comparison.same == ("scheduler it of main() (Kind)",)
    assert comparison.lost == comparison.loaders == ()


@pytest.mark.parametrize(
    ("second", "change"),
    [
        (record(step=None), "step 3 was saved, but the second process restored nothing"),
        (record(step=2), "step 3 was saved, but the second process restored step 2"),
        (
            record(ready=State(tensors={"w": tensor("?"), "b": tensor("b")})),
            "the restored state is not the saved one: w (layer0/dense)",
        ),
        (record(batches=("y",)), "the data order changes at a restart: "),
        (
            record(beside=(thing("scheduler", "?"),)),
            "scheduler it of main() is not captured, and a restart changes its state: give it in "
            "stateful= of holdfast.init",
        ),
        (record(extras={}), "generator of torch differs after one more step"),
        (
            record(tensors={"w": tensor(), "b": tensor("?")}),
            "1 of 2 tensors differ after one more step: b (layer0/dense)",
        ),
    ],
)
def test_each_difference_is_a_sentence_with_the_rank_that_has_it(
    second: Record, change: str
) -> None:
    comparison = compare(
        [record(0), record(1)], [record(0), msgspec.structs.replace(second, rank=1)]
    )
    assert not comparison.comes_back
    (sentence,) = comparison.changes
    assert sentence.startswith(change)
    assert sentence.endswith(" (rank 1)")
    assert compare([record()], [second]).changes == (sentence.removesuffix(" (rank 1)"),)


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("optimizer", "give it in optimizer="),
        ("module", "make it a part of model="),
        ("buffer", "register it with persistent=True"),
        ("generator", "draw from torch's own generator"),
        ("gradient scaler", "give it in stateful="),
    ],
)
def test_each_kind_that_is_not_captured_has_a_remedy(kind: str, remedy: str) -> None:
    first, second = (record(beside=(thing(kind, digest),)) for digest in "ab")
    comparison = compare([first], [second])
    assert comparison.lost == (f"{kind} it of main() (Kind)",)
    assert remedy in comparison.changes[0]


def test_what_comes_and_goes_or_has_no_state_is_no_difference() -> None:
    first = record(beside=(thing("data loader", ""), thing("generator", "a", "gone")))
    second = record(beside=(thing("data loader", ""), thing("generator", "b", "new")))
    comparison = compare([first], [second])
    assert comparison.comes_back
    assert comparison.loaders == ("data loader it of main() (Kind)",)
    assert comparison.lost == comparison.same == ()


def test_a_model_that_is_not_called_says_nothing_about_the_data() -> None:
    assert compare([record(batches=())], [record(batches=())]).same_data is None


def test_many_tensors_are_named_by_the_first_ones() -> None:
    tensors = {f"w{i}": tensor() for i in range(9)}
    others = {name: tensor("?") for name in tensors}
    comparison = compare([record(tensors=tensors)], [record(tensors=others)])
    assert comparison.changes[0].startswith("9 of 9 tensors differ")
    assert comparison.changes[0].endswith("w3 (layer0/dense) and 5 more")


def test_captured_tensors_are_added_up_by_role_over_all_ranks() -> None:
    assert captured_by([record(0), record(1)]) == (Captured(role="compute", tensors=4, nbytes=32),)


def test_records_and_orders_are_read_as_they_were_written() -> None:
    order = Order(phase=Phase.SECOND, save=2, step=7)
    assert decode_order(msgspec.json.encode(order)) == order
    assert decode_record(msgspec.json.encode(record())) == record()
    for damaged in (b"", b"{}", b"\xff", b'{"phase": "third"}'):
        with pytest.raises(StorageError, match="no record of a check"):
            decode_record(damaged)
        with pytest.raises(StorageError, match="no order of a check"):
            decode_order(damaged)
