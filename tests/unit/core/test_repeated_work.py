"""Ranks repeat each other's work: a device that is wrong each time is named, and no other one."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from holdfast_core.repeated_work import (
    DISPUTES_MAX,
    Dispute,
    Verdict,
    agreed,
    disputes,
    judge,
    seconds,
)

CHECKS = 1000
SAMPLES = 20


@dataclass
class Ranks:
    """Ranks with devices, each of which gives bytes of its kind for each sample of work."""

    kinds: list[int | None]
    wrong: frozenset[int] = frozenset()
    """Ranks whose device is wrong in the same way each time, in some of the work."""
    loose: frozenset[int] = frozenset()
    """Ranks that get other bytes each time in some of the work, so that they state none."""
    rng: random.Random = field(default_factory=random.Random)

    def get(self, rank: int, owner: int, sample: int) -> int | None:
        """What a rank gets for a sample."""
        if rank in self.loose and sample % 3 == 0:
            return None
        wrong = rank in self.wrong and sample % 4 == 1
        return hash((self.kinds[rank], owner, sample, rank if wrong else None))

    def check(self, turn: int) -> tuple[Verdict, list[Dispute]]:
        pairs = seconds(self.kinds, turn)
        own = [[self.get(rank, rank, at) for at in range(SAMPLES)] for rank in range(len(pairs))]
        repeated: list[list[int | None]] = [[] for _ in pairs]
        for owner, second in enumerate(pairs):
            if second is not None:
                repeated[second] = [self.get(second, owner, at) for at in range(SAMPLES)]
        found = disputes(self.kinds, turn, own, repeated)
        thirds = [
            None if one.third is None else self.get(one.third, one.owner, one.sample)
            for one in found
        ]
        return judge(found, own, repeated, thirds), found


def shapes(rng: random.Random) -> list[int | None]:
    """Ranks of one kind, of several, and some that take no part."""
    kinds = rng.choice([1, 1, 2, 3])
    ranks = rng.choice([1, 2, 3, 4, 8, 16, 64])
    return [None if rng.random() < 0.05 else rng.randrange(kinds) for _ in range(ranks)]


def test_devices_that_are_right_raise_no_alarm() -> None:
    rng = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    for turn in range(CHECKS):
        kinds = shapes(rng)
        loose = frozenset(rank for rank in range(len(kinds)) if rng.random() < 0.2)
        assert Ranks(kinds, loose=loose).check(turn) == (Verdict(), [])


def test_a_device_that_is_wrong_each_time_is_named_where_a_third_can_decide() -> None:
    rng = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    for turn in range(CHECKS):
        kinds = shapes(rng)
        wrong = rng.randrange(len(kinds))
        verdict, _ = Ranks(kinds, wrong=frozenset({wrong})).check(turn)
        alike = [rank for rank, kind in enumerate(kinds) if kind == kinds[wrong]]
        if kinds[wrong] is None or len(alike) == 1:
            assert verdict == Verdict(), "nobody has repeated its work"
        elif len(alike) == 2:
            assert verdict == Verdict(candidates=tuple(alike)), "either of them may be wrong"
        else:
            assert verdict == Verdict(wrong=(wrong,), candidates=(wrong,)), (kinds, wrong)


def test_several_that_are_contradicted_at_once_are_different_and_none_is_named() -> None:
    """Such as the ranks of a node with another driver."""
    verdict, _ = Ranks([0] * 16, wrong=frozenset({3, 4})).check(0)
    assert verdict == Verdict(different=(3, 4))


def test_two_checks_have_to_find_the_same_rank() -> None:
    nobody, named = Verdict(), [Verdict(wrong=(r,), candidates=(r,)) for r in range(3)]
    pair = [Verdict(candidates=each) for each in ((0, 1), (0, 2), (1, 2))]
    once, unknown = Verdict(candidates=(0,)), Verdict(different=(0, 1))
    for checks, shown in (
        ([nobody, nobody], nobody),
        ([named[0], nobody], once),
        ([named[0], nobody, named[0]], named[0]),
        ([named[0], named[1]], unknown),
        ([named[0], named[0], named[1]], unknown),
        ([named[0], named[1], named[0], named[0]], unknown),
        ([pair[0], pair[0]], pair[0]),
        ([pair[0], pair[1]], once),
        ([pair[0], named[0]], named[0]),
        ([named[0], pair[0]], once),
        ([named[0], pair[0], named[0], pair[1], nobody], named[0]),
        ([named[0], pair[2]], Verdict(different=(0, 1, 2))),
        ([named[0], unknown], unknown),
    ):
        found = nobody
        for each in checks:
            found = agreed(found, each)
        assert found == shown, checks


def test_ranks_of_a_node_with_other_libraries_are_seldom_named() -> None:
    """They differ in few samples, so one check often finds a single one of them."""
    rng = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    once = named = 0
    for _ in range(CHECKS // 10):
        shown = Verdict()
        for turn in range(40):
            drawn = frozenset(rank for rank in range(8) if rng.random() < 0.05)
            verdict, _ = Ranks([0] * 64, wrong=drawn).check(turn)
            once += bool(verdict.wrong) and not shown.candidates
            shown = agreed(shown, verdict)
            if shown.wrong or shown.different:
                break
        named += bool(shown.wrong)
    print(f"{once} found by a single check first, {named} named")
    assert named < once / 2


def test_a_third_that_gets_other_bytes_than_both_decides_nothing() -> None:
    one = Dispute(owner=0, sample=0, second=1, third=2)
    own, repeated = [[1], [9], [9]], [[9], [2], [9]]
    assert judge([one], own, repeated, [3]) == Verdict(candidates=(0, 1))
    assert judge([one], own, repeated, [None]) == Verdict(candidates=(0, 1))
    assert judge([one], own, repeated, [2]) == Verdict(wrong=(0,), candidates=(0,))
    assert judge([one], own, repeated, [1]) == Verdict(wrong=(1,), candidates=(1,))


@pytest.mark.parametrize("ranks", range(2, 9))
def test_each_rank_meets_each_other_one_of_its_kind(ranks: int) -> None:
    met: dict[int, set[int | None]] = {rank: set() for rank in range(ranks)}
    for turn in range(ranks - 1):
        pairs = seconds([7] * ranks, turn)
        assert sorted(rank for rank in pairs if rank is not None) == list(range(ranks))
        for rank, second in enumerate(pairs):
            met[rank].add(second)
    for rank, others in met.items():
        assert others == set(range(ranks)) - {rank}


def test_disputes_are_bounded_and_come_from_all_owners() -> None:
    _, found = Ranks([0] * 4, wrong=frozenset({0, 1, 2, 3})).check(0)
    assert len(found) == DISPUTES_MAX
    assert [one.owner for one in found[:4]] == [0, 1, 2, 3]


def test_a_rank_that_is_decided_on_and_a_pair_without_it_are_two_faults() -> None:
    decided = Dispute(owner=3, sample=0, second=6, third=7)
    open_one = Dispute(owner=4, sample=0, second=5, third=8)
    own, repeated = [[0]] * 9, [[9]] * 9
    verdict = judge([decided, open_one], own, repeated, [9, None])
    assert verdict == Verdict(different=(3, 4, 5))
