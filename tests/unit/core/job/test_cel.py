"""The part of CEL that rules use; a real API server judges the rules in `tests/cluster`."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast_core.job.cel import compile_cel
from holdfast_core.job.rule import Rule
from holdfast_core.job.rules import RULES

SELF: dict[str, Any] = {"n": 7, "word": "auto", "gone": None, "list": [{"x": 1}, {"x": 2}]}

EVALUATED = {
    "1 + 2 * 3 - 4 / 2": 5,
    "(1 + 2) * 3 % 4": 1,
    "-7 / 2": -3,
    "-7 % 2": -1,
    "!true || 1 < 2 && 'a' != 'b'": True,
    "false && true || true": True,
    "self.n > 9 ? 'many' : self.n > 5 ? 'some' : 'few'": "some",
    "has(self.n) && !has(self.gone) && !has(self.absent)": True,
    "self.word in ['auto', 'none']": True,
    "type(self.n) == int && type(self.word) != int": True,
    "type(self.n == 7) == int": False,
    "self.list[1].x + size(self.list)": 4,
    "self.list.exists(one, one.x == self.n - 5)": True,
    "self.list.filter(one, one.x > 1).size() == 1": True,
    "self.word.matches('^[a-z]+$') && !self.word.matches('^uto')": True,
    "self.word.matches('ut')": True,
    "self.word.contains('ut') && self.word.split('u') == ['a', 'to']": True,
    "isQuantity('10M') && !isQuantity('10X')": True,
    "quantity('0.01Gi').compareTo(quantity('10M'))": 1,
    "0.5 < 1.5": True,
}


@pytest.mark.parametrize("text", EVALUATED)
def test_an_expression_has_the_value_that_cel_gives_it(text: str) -> None:
    assert compile_cel(text)({"self": SELF}) == EVALUATED[text]


def test_the_end_of_a_pattern_is_the_end_of_the_text_and_no_line_feed_before_it() -> None:
    assert not compile_cel("self.matches('^a$')")({"self": "a\n"})


@pytest.mark.parametrize("text", ["self.absent == 1", "self.gone == 1", "1 / 0", "self.n < 'a'"])
def test_what_is_an_error_in_cel_is_one_here(text: str) -> None:
    with pytest.raises((KeyError, ZeroDivisionError, TypeError)):
        compile_cel(text)({"self": SELF})


@pytest.mark.parametrize(
    "text",
    ["", "1 +", "(1", "1 2", "self.", "self.upper()", "dyn(self)", "'a\\n'", "[1, 2", "a ? b", "#"],
)
def test_what_is_not_here_is_refused_when_a_rule_is_compiled(text: str) -> None:
    with pytest.raises(ValueError, match="no rule may hold"):
        compile_cel(text)


@pytest.mark.parametrize(
    "rule", [pytest.param(r, id=r.says[:60]) for group in RULES.values() for r in group]
)
def test_every_rule_and_every_value_of_its_message_can_be_compiled(rule: Rule) -> None:
    for text in (rule.rule, *rule.values):
        compile_cel(text)
    assert rule.says.count("%") == len(rule.values)
    assert "; " in rule.says, "what is wrong; what to do"
