"""Executions of one step that differ: who made the difference, and who only received it."""

from __future__ import annotations

import random

import pytest
from msgspec import json
from msgspec.structs import replace

from holdfast_core.reexecution import (
    GROUPS_MAX,
    Execution,
    Given,
    Judgement,
    difference,
    judge,
    odd_one,
    origins,
)

FAULTS = 4000


def execution(*given: tuple[str, int] | tuple[str, int, bool], **gradients: int) -> Execution:
    return Execution(given=tuple(Given(*each) for each in given), gradients=gradients)


def compare(odd: list[Execution], right: list[Execution]) -> Judgement:
    return judge([difference(*both) for both in zip(odd, right, strict=True)])


class Program:
    """A random program of some ranks: collectives of some of them, and messages.

    The state of a rank is one number. Each communication mixes what it gives with what it gets, so
    a difference spreads as far as it can.
    """

    def __init__(self, rng: random.Random) -> None:
        self.ranks = rng.randint(1, 6)
        self.steps = list[tuple[int, ...] | None]()
        """Ranks of each communication; two ranks are a message from the first one."""
        for _ in range(rng.randint(0, 12)):
            size = rng.randint(min(2, self.ranks), self.ranks)
            self.steps.append(tuple(rng.sample(range(self.ranks), size)))
        self.inputs = [rng.getrandbits(60) for _ in range(self.ranks)]
        self.is_message = [rng.random() < 0.5 for _ in self.steps]

    def run(self, fault: tuple[int, int, int] | None = None) -> list[Execution]:
        """Execute it.

        Args:
            fault: (rank, number of communications before it, bits that flip in its state).
        """
        state = list(self.inputs)
        given: list[list[Given]] = [[] for _ in state]
        for at, ranks in enumerate([*self.steps, None]):
            for rank, value in enumerate(state):
                state[rank] = hash((value, rank, at))  # its own work
            if fault is not None and fault[1] == at:
                state[fault[0]] ^= fault[2]
            if ranks is None:
                break
            if len(ranks) == 2 and self.is_message[at]:
                source, to = ranks
                group = f"0:{source}>{to}"
                given[source].append(Given(group, state[source]))
                given[to].append(Given(group, 0))
                state[to] = hash((state[to], state[source]))
                continue
            total = sum(state[rank] for rank in ranks)
            for rank in ranks:
                given[rank].append(Given(f"{sorted(ranks)}", state[rank]))
                state[rank] = hash((state[rank], total))
        return [
            Execution(given=tuple(each), gradients={"layer0/dense": state[rank]})
            for rank, each in enumerate(given)
        ]


def test_whatever_the_program_is_the_rank_whose_bit_flipped_is_named() -> None:
    rng = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    for _ in range(FAULTS):
        program = Program(rng)
        rank, at = rng.randrange(program.ranks), rng.randint(0, len(program.steps))
        right, wrong = program.run(), program.run((rank, at, 1 << rng.randrange(60)))
        executions, odd = [right, right, right], rng.randrange(2)
        executions[odd] = wrong
        digests = [[each.digest() for each in one] for one in zip(*executions, strict=True)]
        found = odd_one(digests)
        assert found is not None and found[0] == odd and executions[found[1]] is right
        judgement = compare(wrong, right)
        assert judgement.wrong == judgement.origins == (rank,), (program.steps, rank, at)
        assert judgement.unit == "layer0/dense"


def test_in_equal_executions_nobody_is_wrong() -> None:
    rng = random.Random(1)
    for _ in range(200):
        program = Program(rng)
        assert compare(program.run(), program.run()) == Judgement()


def test_executions_of_which_no_two_agree_on_all_ranks_show_nothing() -> None:
    assert odd_one([(1, 2, 3), (1, 1, 1)]) is None
    assert odd_one([(1, 1, 2), (1, 2, 2)]) is None
    assert odd_one([(1, 2, 1), (1, 1, 1)]) == (1, 2)


def test_where_each_rank_makes_a_difference_of_its_own_none_is_named() -> None:
    """Such as a program that forms its buckets of gradients in its second step."""
    first = [execution(("0", 7), ("0", 1)), execution(("0", 8), ("0", 2))]
    again = [execution(("0", 1)), execution(("0", 2))]
    assert compare(first, again) == Judgement(origins=(0, 1))


def test_of_several_ranks_that_differ_by_themselves_none_is_named() -> None:
    right = [execution(a=1), execution(a=1), execution(a=1)]
    wrong = [execution(a=2), execution(a=2), execution(a=1)]
    assert compare(wrong, right) == Judgement(origins=(0, 1), unit="a")


@pytest.mark.parametrize("gap", [0, 1])
def test_a_record_with_gaps_names_nobody(gap: int) -> None:
    """A rank may have received the difference by what is not recorded."""
    right, wrong = [execution(a=1), execution(a=1)], [execution(a=2), execution(a=1)]
    for one in (right, wrong):
        one[gap] = Execution(gradients=one[gap].gradients, whole=False)
    assert compare(wrong, right) == Judgement(origins=(0,), unit="a")


def test_a_rank_that_got_a_wrong_sum_is_not_named() -> None:
    """The ranks of a group add up each other's parts: in a ring, another one added up its part."""
    right = [execution(("0", rank, True), a=1) for rank in range(3)]
    wrong = [*right[:2], execution(("0", 2, True), a=2)]
    assert compare(wrong, right) == Judgement(origins=(2,), unit="a")


@pytest.mark.parametrize(
    ("odd", "right", "wrong"),
    [({0: 5}, {0: 5}, (2,)), ({0: 5}, {0: 6}, ()), ({}, {0: 5}, ()), ({0: 5}, {}, ())],
)
def test_a_rank_is_named_if_the_sums_that_it_took_before_are_known_to_be_right(
    odd: dict[int, int], right: dict[int, int], wrong: tuple[int, ...]
) -> None:
    given = ("0", 2, True)
    pair = [
        replace(execution(given, ("0", digest, True), a=digest), taken=taken)
        for digest, taken in ((9, odd), (1, right))
    ]
    others = [execution(given, ("0", 1, True), a=1)] * 2
    assert compare([*others, pair[0]], [*others, pair[1]]).wrong == wrong


def test_what_a_rank_took_makes_no_difference_by_itself() -> None:
    one, other = (replace(execution(("0", 1, True)), taken={0: taken}) for taken in (1, 2))
    assert one.digest() == other.digest() and compare([one], [other]) == Judgement()


def test_a_rank_that_gave_other_bytes_before_it_got_any_sum_is_named() -> None:
    right = [execution(("0", 1), ("0", rank, True), a=1) for rank in range(3)]
    wrong = [execution(("0", 1), ("0", rank + 7 * (rank == 2), True), a=2) for rank in range(3)]
    assert compare(wrong, right) == Judgement(wrong=(2,), origins=(2,), unit="a")


def test_a_rank_of_too_many_groups_to_compare_counts_as_one_with_gaps() -> None:
    groups = [(f"{at}", 0) for at in range(GROUPS_MAX + 1)]
    assert compare([execution(*groups, a=1)], [execution(*groups, a=2)]).wrong == ()
    assert compare([execution(*groups[1:], a=1)], [execution(*groups[1:], a=2)]).wrong == (0,)


def test_a_job_of_one_rank_names_it() -> None:
    assert compare([execution(a=2)], [execution(a=1)]).wrong == (0,)


def test_the_unit_is_one_that_the_wrong_rank_had_wrong() -> None:
    right = [execution(("0", 1), b=1, c=1), execution(("0", 1), a=1)]
    wrong = [execution(("0", 2), b=1, c=2), execution(("0", 1), a=2)]
    assert compare(wrong, right) == Judgement(wrong=(0,), origins=(0,), unit="c")


def test_what_a_rank_states_does_not_grow_with_what_it_communicates() -> None:
    """Each rank gathers it from all of them."""
    calls = [(f"{at % 100}", at) for at in range(20_000)]
    others = [(group, digest + 1) for group, digest in calls]
    found = difference(execution(*calls), execution(*others))
    assert len(found.first_other) == 100 and len(json.encode(found)) < 2000


def test_ranks_that_excuse_each_other_are_compared_with_others_only() -> None:
    """Of a group it is enough to know the first other bytes of two ranks."""
    right = [execution(("0", rank), ("0", rank)) for rank in range(4)]
    odd = [execution(("0", 9 if rank == 1 else rank), ("0", 8)) for rank in range(4)]
    differences = [difference(*both) for both in zip(odd, right, strict=True)]
    assert origins(differences) == (1,)
