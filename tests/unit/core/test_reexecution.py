"""Executions of one step that differ: who made the difference, and who only received it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from holdfast_core.reexecution import Execution, Given, Judgement, culprits, judge

FAULTS = 4000


def execution(*given: tuple[str, int], **gradients: int) -> Execution:
    return Execution(given=tuple(Given(*each) for each in given), gradients=gradients)


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
                key = f"0:{source}>{to}#{at}"
                given[source].append(Given(key, state[source]))
                given[to].append(Given(key, 0))
                state[to] = hash((state[to], state[source]))
                continue
            total = sum(state[rank] for rank in ranks)
            for rank in ranks:
                given[rank].append(Given(f"{sorted(ranks)}#{at}", state[rank]))
                state[rank] = hash((state[rank], total))
        return [
            Execution(given=tuple(each), gradients={"layer0/dense": state[rank]})
            for rank, each in enumerate(given)
        ]


def judged(executions: Sequence[Sequence[Execution]]) -> Judgement:
    first, second, third = executions
    return judge(first, second, third)


def test_whatever_the_program_is_the_rank_whose_bit_flipped_is_named() -> None:
    rng = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    for _ in range(FAULTS):
        program = Program(rng)
        rank, at = rng.randrange(program.ranks), rng.randint(0, len(program.steps))
        right, wrong = program.run(), program.run((rank, at, 1 << rng.randrange(60)))
        executions = [right, right, right]
        executions[rng.randrange(2)] = wrong
        found = judged(executions)
        assert (found.repeatable, found.wrong) == (True, (rank,)), (program.steps, rank, at)
        assert rank in found.differing and found.unit == "layer0/dense"


def test_in_equal_executions_nobody_is_wrong() -> None:
    rng = random.Random(1)
    for _ in range(200):
        program = Program(rng)
        assert culprits(program.run(), program.run()) == frozenset()


@pytest.mark.parametrize("at", [0, 1])
def test_executions_that_are_all_different_name_nobody(at: int) -> None:
    both = [execution(("0#1", 1), a=at), execution(("0#1", 2), a=at)]
    other = [execution(("0#1", 3), a=1), execution(("0#1", 2), a=1)]
    third = [execution(("0#1", 4), a=2), execution(("0#1", 2), a=2)]
    found = judge(both, other, third)
    assert not found.repeatable and found.wrong == ()


def test_where_each_rank_makes_a_difference_of_its_own_the_program_is_different() -> None:
    """Such as one that forms its buckets of gradients in its second step."""
    first = [execution(("0#1", 7), ("0#2", 1)), execution(("0#1", 8), ("0#2", 2))]
    again = [execution(("0#1", 1)), execution(("0#1", 2))]
    assert judge(first, again, again) == Judgement(repeatable=False, differing=(0, 1))


def test_of_several_ranks_that_differ_by_themselves_none_is_named() -> None:
    right = [execution(a=1), execution(a=1), execution(a=1)]
    wrong = [execution(a=2), execution(a=2), execution(a=1)]
    found = judge(right, wrong, right)
    assert found == Judgement(repeatable=True, differing=(0, 1), unit="a")


def test_a_record_with_gaps_names_nobody() -> None:
    """A rank may have received the difference by what is not recorded."""
    right = [execution(a=1), Execution(gradients={"a": 1}, whole=False)]
    wrong = [execution(a=2), Execution(gradients={"a": 1}, whole=False)]
    assert judge(wrong, right, right).wrong == ()


def test_a_job_of_one_rank_names_it() -> None:
    assert judge([execution(a=2)], [execution(a=1)], [execution(a=1)]).wrong == (0,)


def test_the_unit_is_one_that_the_wrong_rank_had_wrong() -> None:
    right = [execution(("0#1", 1), b=1, c=1), execution(("0#1", 1), a=1)]
    wrong = [execution(("0#1", 2), b=1, c=2), execution(("0#1", 1), a=2)]
    found = judge(wrong, right, right)
    assert (found.wrong, found.differing, found.unit) == ((0,), (0, 1), "c")
