"""What checked steps conclude from the samples of work that other ranks have repeated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast._elastic.repeated_work import Comparison, RepeatedWork
from holdfast._elastic.step_checks import StepChecks, _Statement
from holdfast_core.corruption import Divergence
from holdfast_core.repeated_work import Verdict

STATED = [_Statement(executions=2, equal=True, cost_s=1.0, step_s=1.0)] * 3
NAMED = Verdict(wrong=(1,), candidates=(1,))


class Shown:
    """What repeating samples shows, in one check after another."""

    def __init__(self, *shown: tuple[Verdict, tuple[int, ...]]) -> None:
        self._shown = list(shown)

    def compare(self, *_: Any) -> Comparison:
        verdict, samples = self._shown.pop(0)
        return Comparison(verdict=verdict, text="mm", unit="", samples=samples, cost_s=0.0)

    def drop(self) -> None: ...


def findings(*shown: tuple[Verdict, tuple[int, ...]]) -> list[Divergence | None]:
    """What checks in steps 10, 20 and so on report."""
    checks = StepChecks(0.1)
    checks.restart(0)
    checks._work = Shown(*shown)  # type: ignore[assignment]
    holds: Any = SimpleNamespace(rank=0, live=SimpleNamespace(sources=list))
    exchange: Any = None
    found = list[Divergence | None]()
    for number in range(len(shown)):
        checks._compare_work(10 * (number + 1), exchange, holds, [], STATED)
        finding = checks.take_finding()
        found.append(finding.divergence if finding else None)
    return found


@pytest.mark.parametrize(("samples", "step"), [((3, 3, 3), 10), ((3, 0, 3), None)])
def test_a_check_without_samples_of_a_rank_says_nothing_of_it(
    samples: tuple[int, ...], step: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    seen = (3, 3, 3)
    first, second, third, fourth = findings(
        (Verdict(), samples), (NAMED, seen), (NAMED, seen), (NAMED, seen)
    )
    assert (first, second, fourth) == (None, None, None), "one check names nobody"
    assert third is not None and (third.step, third.wrong) == (30, (1,))
    assert third.equal_step == step
    told = [each for each in caplog.messages if "no work of 1 ranks was repeated" in each]
    assert len(told) == (samples != seen)


def test_that_nothing_is_compared_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    findings(*[(Verdict(), (0, 0, 0))] * 3)
    (text,) = caplog.messages
    assert text.startswith("step 10: no work of 3 ranks was repeated on another rank")


def test_optimizers_that_are_left_out_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class Own(torch.optim.SGD):
        """Another class than torch's own."""

    work, optimizer = RepeatedWork(), Own([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    for _ in range(2):
        work._turn += 1
        assert work._prepare([optimizer], lambda _: "")[1] == []
    (text,) = caplog.messages
    assert "Own are not repeated on other ranks" in text


def test_input_of_an_earlier_execution_is_not_held_beside_that_of_a_later_one() -> None:
    work = RepeatedWork()
    for _ in range(2):
        operations = work.begin(keeps=True)
        assert not work._kept, "all of a rank's samples have one bound together"
        product = torch.ops.aten.mm.default
        operations.note(product, (torch.ones(2, 2), torch.ones(2, 2)), {})
        work.end(operations)
    assert len(work._kept) == 1


def test_ranks_that_differ_in_turn_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    other = Verdict(wrong=(2,), candidates=(2,))
    assert findings((NAMED, (3, 3, 3)), (other, (3, 3, 3))) == [None, None]
    assert "ranks [1, 2] get other bytes than others of the same kind" in caplog.text


def test_what_follows_the_vote_is_no_work_of_a_sample() -> None:
    """The optimizer's own operations are recorded as well, and nobody would compare them."""
    work = RepeatedWork()
    operations = work.begin(keeps=True)
    operations.note(torch.ops.aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2)), {})
    work.end(operations)
    operations.note(torch.ops.aten.neg.default, (torch.ones(3),), {})
    assert len(work._listed) == 1
