"""Who holds up a job that hangs, from the stacks of its processes: shapes, one by one."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from holdfast_core.inspections import (
    Frame,
    GroupCollectives,
    InspectedProcess,
    SessionActivity,
    bounded_process,
)
from holdfast_operator.reconciler.observe.culprits import (
    TEXT_CHARACTERS_MAX,
    HangKind,
    diagnose,
)

LIB = "/env/lib/python3.11"
TORCH = f"{LIB}/site-packages/torch"
MAIN = (
    Frame("/work/train.py", 90, "<module>"),
    Frame("<frozen runpy>", 88, "_run_code"),
    Frame("/src/holdfast/_launch/script.py", 70, "run_script"),
    Frame(f"{TORCH}/distributed/elastic/multiprocessing/api.py", 700, "_wrap"),
    Frame(f"{LIB}/multiprocessing/process.py", 108, "run"),
)
"""Outer frames of every worker that torchrun's launcher has forked."""


def of(rank: int, *frames: Frame, state: str = "S", **fields: str) -> InspectedProcess:
    stack = (*frames, *MAIN) if frames else ()
    process = InspectedProcess(rank=rank, state=state, frames=stack)
    return structs.replace(process, **fields)


def reduces(rank: int, line: int = 31, name: str = "all_reduce") -> InspectedProcess:
    return of(
        rank,
        Frame(f"{TORCH}/distributed/distributed_c10d.py", 2501, name),
        Frame(f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper"),
        Frame("/work/train.py", line, "step"),
    )


def helps(rank: int, function: str) -> InspectedProcess:
    """A collective in a function that two others call."""
    return of(rank, *reduces(rank).frames[:3], Frame("/work/train.py", 50, function))


def runs_backward(rank: int) -> InspectedProcess:
    return of(
        rank,
        Frame(f"{TORCH}/autograd/graph.py", 823, "_engine_run_backward"),
        Frame(f"{TORCH}/autograd/__init__.py", 347, "backward"),
        Frame(f"{TORCH}/_tensor.py", 626, "backward"),
        Frame("/work/train.py", 30, "step"),
    )


def votes(rank: int, line: int) -> InspectedProcess:
    """A wait of the SDK that polls, so that ranks are in different lines of it."""
    return of(
        rank,
        Frame(f"{LIB}/threading.py", 327, "wait"),
        Frame("/src/holdfast/_agree/exchange.py", line, "gather"),
        Frame("/work/train.py", 40, "step"),
    )


def loads(rank: int, **fields: str) -> InspectedProcess:
    return of(
        rank,
        Frame("/work/data.py", 12, "__getitem__"),
        Frame(f"{TORCH}/utils/data/_utils/fetch.py", 52, "<listcomp>"),
        Frame(f"{TORCH}/utils/data/dataloader.py", 708, "__next__"),
        Frame("/work/train.py", 28, "step"),
        **fields,
    )


def awaits_loader(rank: int, **fields: str) -> InspectedProcess:
    return of(
        rank,
        Frame(f"{LIB}/selectors.py", 415, "select"),
        Frame(f"{LIB}/multiprocessing/connection.py", 947, "wait"),
        Frame(f"{TORCH}/utils/data/dataloader.py", 1217, "_try_get_data"),
        Frame("/work/train.py", 28, "step"),
        **fields,
    )


def evaluates(rank: int, line: int = 60) -> InspectedProcess:
    return of(
        rank,
        Frame(f"{TORCH}/nn/modules/linear.py", 125, "forward"),
        Frame("/work/train.py", line, "evaluate"),
        Frame("/work/train.py", 80, "main"),
    )


def diagnosed(*found: InspectedProcess, **changes: object) -> tuple[str, set[int]]:
    answers: Mapping[int, InspectedProcess | None] = {each.rank: each for each in found}
    diagnosis = diagnose(range(len(found)), answers)
    return diagnosis.text, set(diagnosis.culprits)


SEVEN = [reduces(rank) for rank in range(1, 8)]
WAIT = "waiting in all_reduce (work/train.py:31)"


@pytest.mark.parametrize(
    ("found", "text", "culprits"),
    [
        (
            [of(0, state="T"), *SEVEN],
            f"rank 0 is stopped (by SIGSTOP or a debugger); 7 others are {WAIT}",
            {0},
        ),
        (
            [of(0, state="D", kernel="nfs_wait_bit_killable", no_stack="x"), *SEVEN],
            "rank 0 is waiting in nfs_wait_bit_killable of the kernel and cannot be interrupted "
            f"(state D): for storage or a driver; 7 others are {WAIT}",
            {0},
        ),
        (
            [of(0, state="D", call="read of /nfs/0.bin", no_stack="x"), *SEVEN],
            "rank 0 is waiting in read of /nfs/0.bin and cannot be interrupted (state D): for "
            f"storage or a driver; 7 others are {WAIT}",
            {0},
        ),
        (
            [loads(0, call="read of /data/7.bin"), *SEVEN],
            "rank 0 is in its data loader, in `__getitem__` (work/data.py:12): read of "
            f"/data/7.bin; 7 others are {WAIT}",
            {0},
        ),
        (
            [awaits_loader(0, helper="its child process 9 waits in read of /data/7"), *SEVEN],
            "rank 0 is in its data loader, in `step` (work/train.py:28): its child process 9 "
            f"waits in read of /data/7; 7 others are {WAIT}",
            {0},
        ),
        (
            [evaluates(0), *SEVEN],
            "rank 0 is in code of the script, in `evaluate` (work/train.py:60); 7 others are "
            f"{WAIT}",
            {0},
        ),
        (
            [evaluates(0), *map(runs_backward, range(1, 8))],
            "rank 0 is in code of the script, in `evaluate` (work/train.py:60); 7 others are "
            "waiting in the backward pass (work/train.py:30)",
            {0},
        ),
        (
            [*(votes(rank, 80 + rank % 3) for rank in range(7)), loads(7)],
            "rank 7 is in its data loader, in `__getitem__` (work/data.py:12); 7 others are "
            "waiting in gather of Holdfast (work/train.py:40)",
            {7},
        ),
        (
            [evaluates(0, 61), *(evaluates(rank) for rank in range(1, 8))],
            "rank 0 is in code of the script, in `evaluate` (work/train.py:61); 7 others are in "
            "code of the script, in `evaluate` (work/train.py:60)",
            {0},
        ),
        (
            [reduces(0), reduces(1), reduces(2, 32), reduces(3, 32)],
            f"ranks 0, 1 are {WAIT}; ranks 2, 3 are waiting in all_reduce (work/train.py:32); "
            "they wait for each other, as when two groups are used in opposite order or a branch "
            "differs",
            set(),
        ),
        (
            [helps(0, "evaluate"), *(helps(rank, "step") for rank in range(1, 8))],
            "rank 0 is waiting in all_reduce (work/train.py:31), called from `evaluate` "
            f"(work/train.py:50); 7 others are {WAIT}",
            {0},
        ),
        (
            [helps(0, "forwards"), helps(1, "backwards")],
            "rank 0 is waiting in all_reduce (work/train.py:31), called from `forwards` "
            "(work/train.py:50); rank 1 is waiting in all_reduce (work/train.py:31), called from "
            "`backwards` (work/train.py:50); they wait for each other, as when two groups are "
            "used in opposite order or a branch differs",
            set(),
        ),
        (
            [of(0, Frame("/me/holdfast/work.py", 5, "prepare")), *SEVEN],
            f"rank 0 is in code of the script, in `prepare` (holdfast/work.py:5); 7 others are "
            f"{WAIT}",
            {0},
        ),
        (
            [reduces(0, 50, "barrier"), *SEVEN],
            f"rank 0 is waiting in barrier (work/train.py:50); 7 others are {WAIT}",
            {0},
        ),
        (
            [reduces(0), *SEVEN],
            f"no culprit stands out: all 8 ranks are {WAIT}",
            set(),
        ),
        ([reduces(0)], f"no culprit stands out: the only rank is {WAIT}", set()),
        ([of(0, state="T")], "rank 0 is stopped (by SIGSTOP or a debugger)", {0}),
        (
            [of(0, no_stack="it did not react"), *SEVEN],
            f"no culprit stands out: ranks 1, 2, 3, 4, 5, 6, 7 are {WAIT}; rank 0 is without a "
            "stack (it did not react)",
            set(),
        ),
    ],
)
def test_each_shape_of_a_hang_has_its_words(
    found: list[InspectedProcess], text: str, culprits: set[int]
) -> None:
    assert diagnosed(*found) == (text, culprits)


def test_a_rank_whose_launcher_does_not_answer_is_named_and_not_blamed() -> None:
    answers = {rank: reduces(rank) for rank in range(8)}
    diagnosis = diagnose(range(16), answers)
    assert diagnosis.culprits == frozenset()
    assert diagnosis.text == (
        f"no culprit stands out: ranks 0, 1, 2, 3, 4, 5, 6, 7 are {WAIT}; not answering: the "
        "launcher of ranks 8, 9, 10, 11, 12, 13, 14, 15"
    )
    assert diagnose(range(2), {}).text == "not answering: the launcher of ranks 0, 1"


def test_a_rank_that_has_left_while_others_wait_is_named() -> None:
    diagnosis = diagnose(range(4), {0: None, **{rank: reduces(rank) for rank in range(1, 4)}})
    assert diagnosis.culprits == {0}
    assert diagnosis.text.startswith("rank 0 is without a process: the script has ended there")


def test_ranks_that_have_ended_are_not_blamed_where_nobody_waits_for_them() -> None:
    diagnosis = diagnose(range(4), {**dict.fromkeys(range(3)), 3: evaluates(3)})
    assert diagnosis.culprits == {3}
    assert diagnosis.text.startswith("rank 3 is in code of the script, in `evaluate` ")


def test_the_words_for_hundreds_of_ranks_that_differ_stay_short() -> None:
    answers = {rank: evaluates(rank, rank) for rank in range(500)}
    diagnosis = diagnose(range(1000), answers)
    assert "and 496 more places" in diagnosis.text
    assert "and 492 more" in diagnosis.text
    assert len(diagnosis.text) <= TEXT_CHARACTERS_MAX


FRAMES = st.lists(
    st.one_of(
        st.sampled_from([*(reduces(0).frames), *loads(0).frames, *votes(0, 1).frames]),
        st.builds(Frame, st.text(), st.integers(0, 2**32 - 1), st.text()),
    )
)
PROCESSES = st.builds(
    InspectedProcess,
    rank=st.integers(0, 3),
    state=st.sampled_from("RSDTtZX?") | st.text(),
    kernel=st.text(),
    call=st.text(),
    helper=st.text(),
    frames=FRAMES.map(tuple),
    no_stack=st.text(),
    collectives=st.lists(
        st.builds(
            GroupCollectives,
            group=st.sampled_from(["0 gloo", "1 gloo"]) | st.text(),
            entered=st.integers(0, 3) | st.integers(0, 2**63 - 1),
            pending=st.integers(0, 3) | st.integers(0, 2**63 - 1),
            operation=st.text(),
            size=st.integers(0, 5),
            members=st.lists(st.integers(0, 4)).map(tuple),
        )
    ).map(tuple),
)


@given(answers=st.dictionaries(st.integers(0, 3), st.none() | PROCESSES))
def test_whatever_trainers_send_the_words_are_short_and_printable(
    answers: dict[int, InspectedProcess | None],
) -> None:
    received = {rank: each and bounded_process(each) for rank, each in answers.items()}
    diagnosis = diagnose(range(4), received)
    assert diagnosis.text.isprintable() and 0 < len(diagnosis.text) <= TEXT_CHARACTERS_MAX
    assert diagnosis.culprits <= received.keys()


# --- faults of hardware ---------------------------------------------------------------------------

XID = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus"


def test_ranks_of_a_node_with_a_fault_of_hardware_are_named_wherever_they_wait() -> None:
    """With NCCL, all ranks wait in the same line."""
    answers = {
        rank: structs.replace(reduces(rank), hardware_fault=XID if rank in (2, 3) else "")
        for rank in range(6)
    }
    found = diagnose(range(6), answers)
    assert found.culprits == {2, 3} and found.hardware_fault and found.device == "0000:3b:00"
    assert found.text.startswith(f"ranks 2, 3 are on a node whose kernel wrote: {XID}; 4 others ")


@pytest.mark.parametrize("other", ["stopped", "alone in its evaluation"])
def test_ranks_that_stand_out_are_named_and_a_fault_elsewhere_is_not(other: str) -> None:
    """The fault may be minutes old, and the GPU may work again."""
    answers = {rank: reduces(rank) for rank in range(4)}
    answers[1] = structs.replace(answers[1], hardware_fault=XID)
    answers[2] = of(2, state="T") if other == "stopped" else evaluates(2)
    found = diagnose(range(4), answers)
    assert found.culprits == {2} and XID not in found.text
    assert not found.hardware_fault and not found.device


# --- collectives that torch has recorded ----------------------------------------------------------


def recorded(process: InspectedProcess, *collectives: GroupCollectives) -> InspectedProcess:
    return structs.replace(process, collectives=collectives)


def in_group(
    name: str, entered: int, members: tuple[int, ...], pending: int = 0, **fields: str
) -> GroupCollectives:
    operation = fields.get("operation", "all_reduce" if pending else "")
    return GroupCollectives(
        group=name,
        entered=entered,
        pending=pending,
        operation=operation,
        size=len(members),
        members=members if pending else (),
    )


def synchronizes(rank: int) -> InspectedProcess:
    """Where the main thread of every rank waits with NCCL."""
    return of(
        rank,
        Frame(f"{TORCH}/cuda/__init__.py", 1000, "synchronize"),
        Frame("/work/train.py", 33, "step"),
    )


def test_a_deadlock_of_two_groups_in_one_line_names_both() -> None:
    tp, ep = "1 nccl", "2 nccl"
    text, culprits = diagnosed(
        recorded(reduces(0), in_group(tp, 7, (0, 1), 7), in_group(ep, 6, (0, 1))),
        recorded(reduces(1), in_group(ep, 7, (0, 1), 7), in_group(tp, 6, (0, 1))),
    )
    assert text == (
        f"no culprit stands out: all 2 ranks are {WAIT}; they wait for each other: rank 0 waits in "
        "all_reduce 7 of group 1 nccl for rank 1, and rank 1 waits in all_reduce 7 of group 2 nccl "
        "for rank 0"
    )
    assert culprits == set()


def test_others_that_wait_for_a_deadlock_are_no_part_of_it() -> None:
    world = tuple(range(4))
    text, culprits = diagnosed(
        recorded(reduces(0), in_group("1 g", 3, (0, 1), 3), in_group("0 g", 8, world)),
        recorded(
            reduces(1),
            in_group("2 g", 3, (0, 1), 3),
            in_group("1 g", 2, (0, 1)),
            in_group("0 g", 8, world),
        ),
        *(recorded(reduces(rank, 40), in_group("0 g", 9, world, 9)) for rank in (2, 3)),
    )
    # Rank 0 has no record of group 2, so nothing shows that it is missing there.
    assert "rank 0 waits in all_reduce 3 of group 1 g for rank 1" in text
    assert "ranks 2, 3 wait in all_reduce 9 of group 0 g for ranks 0, 1" in text
    assert "for each other" not in text and culprits == set()


WORLD = tuple(range(8))


@pytest.mark.parametrize("place", [synchronizes, runs_backward], ids=["synchronize", "backward"])
def test_a_rank_that_is_missing_where_all_stacks_are_equal_is_named(place: object) -> None:
    assert callable(place)
    waits = [
        recorded(place(rank), in_group("0 nccl", 9, WORLD, 9)) for rank in range(8) if rank != 5
    ]
    absent = recorded(place(5), in_group("0 nccl", 8, WORLD))
    text, culprits = diagnosed(*waits[:5], absent, *waits[5:])
    assert text.startswith("rank 5 is missing from all_reduce 9 of group 0 nccl, but ")
    assert "; 7 others are " in text and culprits == {5}


@pytest.mark.parametrize(
    "other",
    [
        recorded(synchronizes(1)),
        recorded(synchronizes(1), in_group("1 nccl", 4, (1,))),
        recorded(synchronizes(1), in_group("0 nccl", 9, (0, 1))),
        recorded(reduces(1, 60, "recv"), in_group("0 nccl", 8, (0, 1))),
        recorded(
            synchronizes(1),
            in_group("1 nccl", 4, (0, 1), 4, operation="recv 1<-0"),
            in_group("0 nccl", 8, (0, 1)),
        ),
    ],
    ids=["no record", "no record of the group", "has entered it", "receives", "waits elsewhere"],
)
def test_nobody_is_blamed_without_a_record_that_shows_it(other: InspectedProcess) -> None:
    first = recorded(synchronizes(0), in_group("0 nccl", 9, (0, 1), 9))
    assert diagnosed(first, other)[1] == set()


def test_nobody_is_blamed_who_is_further_behind_than_a_wait_allows() -> None:
    """A job that is only slow: its launchers answer up to two seconds apart."""
    first = recorded(runs_backward(0), in_group("0 gloo", 40, WORLD))
    others = [recorded(runs_backward(r), in_group("0 gloo", 57, WORLD, 57)) for r in range(1, 8)]
    text, culprits = diagnosed(first, *others)
    assert culprits == set() and "missing" not in text and "entered" not in text


def test_a_collective_that_some_have_completed_is_not_held_up_below_them() -> None:
    gone_on = recorded(synchronizes(0), in_group("0 nccl", 12, WORLD))
    others = [recorded(synchronizes(r), in_group("0 nccl", 9, WORLD, 9)) for r in range(1, 8)]
    assert "entered" not in diagnosed(gone_on, *others)[0]


def test_groups_of_one_name_with_other_members_are_not_compared() -> None:
    text, culprits = diagnosed(
        *(recorded(reduces(rank), in_group("1 g", 9, (0, 1), 9)) for rank in (0, 1)),
        *(
            recorded(reduces(rank), in_group("1 g", 9, (2, 3), 9, operation="broadcast"))
            for rank in (2, 3)
        ),
    )
    assert culprits == set() and "not the same" not in text


def test_a_minority_that_waits_for_the_others_is_not_blamed() -> None:
    pair = tuple(range(6))
    text, culprits = diagnosed(
        *(
            recorded(reduces(r), in_group("1 g", 7, pair, 7), in_group("0 g", 8, WORLD))
            for r in pair
        ),
        *(recorded(reduces(r, 40), in_group("0 g", 9, WORLD, 9)) for r in (6, 7)),
    )
    assert culprits == set()
    assert "ranks 6, 7 wait in all_reduce 9 of group 0 g for ranks 0, 1, 2, 3, 4, 5" in text


def test_a_rank_that_has_left_for_another_collective_is_named_though_it_waits_itself() -> None:
    """It left the loop early, and waits in a barrier for a rank that waits for it in the loop."""
    world, pair = (0, 1, 2, 3), (0, 1)
    most = [
        recorded(reduces(rank), in_group("0 gloo", 9, world, 9), in_group("1 gloo", 4, pair))
        for rank in (0, 2, 3)
    ]
    left = recorded(
        reduces(1, 60, "barrier"),
        in_group("1 gloo", 5, pair, 5, operation="barrier"),
        in_group("0 gloo", 8, world),
    )
    found = diagnose(world, dict(enumerate((most[0], left, *most[1:]))))
    assert found.culprits == {1} and found.kind is HangKind.ELSEWHERE
    assert found.text.startswith("rank 1 is waiting in barrier ")
    assert "; 3 others are waiting in all_reduce " in found.text
    assert "and rank 1 waits in barrier 5 of group 1 gloo for rank 0" in found.text


def test_two_ranks_that_wait_for_each_other_are_a_deadlock_however_many_wait_for_them() -> None:
    most = [recorded(reduces(r, 40), in_group("0 gloo", 9, WORLD, 9)) for r in range(2, 8)]
    first, second = (
        recorded(
            helps(rank, order),
            in_group(f"{rank + 1} gloo", 5, (0, 1), 5),
            in_group(f"{2 - rank} gloo", 4, (0, 1)),
            in_group("0 gloo", 8, WORLD),
        )
        for rank, order in enumerate(("forwards", "backwards"))
    )
    found = diagnose(WORLD, dict(enumerate((first, second, *most))))
    assert found.culprits == set() and found.kind is HangKind.DEADLOCK
    assert "they wait for each other: rank 0 waits in all_reduce 5 of group 1 gloo" in found.text


def test_a_rank_that_waits_for_a_deadlock_is_not_blamed() -> None:
    world = (0, 1, 2)
    behind = [in_group("0 g", 8, world), in_group("1 g", 6, (0, 1)), in_group("2 g", 6, (0, 1))]
    waits = [in_group(name, 7, (0, 1), 7) for name in ("1 g", "2 g")]
    answers = {
        0: recorded(reduces(0), waits[0], behind[2], behind[0]),
        1: recorded(reduces(1), waits[1], behind[1], behind[0]),
        2: recorded(reduces(2, 40), in_group("0 g", 9, world, 9)),
    }
    found = diagnose(world, answers)
    assert (found.culprits, found.kind) == (frozenset(), HangKind.DEADLOCK)
    assert "they wait for each other: rank 0 waits in all_reduce 7 of group 1 g" in found.text


def test_a_rank_does_not_condemn_those_in_the_same_place_whose_devices_wait_for_it() -> None:
    found = diagnose(
        WORLD,
        {
            0: reduces(0, 50, "barrier"),
            1: reduces(1, 50, "barrier"),
            **{r: recorded(synchronizes(r), in_group("0 nccl", 9, WORLD, 9)) for r in range(2, 8)},
            5: recorded(synchronizes(5), in_group("0 nccl", 8, WORLD)),
        },
    )
    assert (found.culprits, found.kind) == (frozenset({5}), HangKind.MISSING)


@pytest.mark.parametrize("numbers", ["equal", "chain"])
def test_thousands_of_ranks_are_compared_in_a_bounded_number_of_steps(numbers: str) -> None:
    """In a chain, each rank waits for all that are behind it."""
    world = range(2000)
    answers = {
        rank: recorded(
            reduces(rank),
            structs.replace(in_group("0 g", number, (), number), size=len(world)),
            *(in_group(f"{name} g", 4, (rank, rank ^ 1), 4) for name in range(1, 8)),
        )
        for rank in world
        for number in [9 + (rank if numbers == "chain" else 0)]
    }
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        found = diagnose(world, answers)
    finally:
        sys.setprofile(None)
    assert found.culprits == frozenset()
    assert calls < 600 * len(world)


def test_what_one_of_many_sessions_waits_for_is_told_of_its_rank() -> None:
    def in_save(rank: int, saving: str) -> InspectedProcess:
        noted = SessionActivity(epoch=1, ranks=8, step=41, training="save", saving=saving)
        return structs.replace(reduces(rank), session=noted)

    agrees = "agrees with the other ranks"
    all_alike = [in_save(rank, agrees) for rank in range(8)]
    save = "in save of its session after step 41, while a save"
    assert diagnosed(*all_alike)[0].endswith(f"{WAIT}: {save} {agrees}")
    text, _ = diagnosed(*all_alike[:5], in_save(5, "waits for a slot"), *all_alike[6:])
    assert text.endswith(f"{WAIT}: {save} waits for a slot (rank 5)")


@pytest.mark.parametrize("count", [2, 8])
def test_a_rank_that_has_left_while_devices_wait_for_it_is_named(count: int) -> None:
    world = tuple(range(count))
    waiting = {r: recorded(synchronizes(r), in_group("0 nccl", 9, world, 9)) for r in world[1:]}
    found = diagnose(world, {0: None, **waiting})
    assert (found.culprits, found.kind) == (frozenset({0}), HangKind.ENDED)


def test_a_group_that_does_not_contain_its_rank_shows_nothing() -> None:
    """The script may have numbered its ranks in another way than the launcher."""
    text, culprits = diagnosed(
        recorded(synchronizes(0), in_group("0 g", 9, (4, 5), 9)),
        recorded(synchronizes(1), in_group("0 g", 8, (4, 5))),
    )
    assert culprits == set() and "missing" not in text and "for rank" not in text


def test_a_collective_that_all_have_entered_is_held_up_below_them() -> None:
    text, culprits = diagnosed(
        *(recorded(synchronizes(rank), in_group("0 nccl", 9, WORLD, 9)) for rank in range(8))
    )
    assert text.endswith(
        "; all of its ranks have entered all_reduce 9 of group 0 nccl, so the network or a device "
        "holds it up"
    )
    assert culprits == set()


def test_different_operations_in_one_number_are_named() -> None:
    text, _ = diagnosed(
        recorded(synchronizes(0), in_group("0 nccl", 9, (0, 1), 9)),
        recorded(synchronizes(1), in_group("0 nccl", 9, (0, 1), 9, operation="broadcast")),
    )
    assert text.endswith(
        "; number 9 of group 0 nccl is not the same on all: rank 0 in all_reduce; rank 1 in "
        "broadcast"
    )
