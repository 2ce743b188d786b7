"""The part of CEL in which a job's rules are written, for runs without an API server.

An API server evaluates rules in the Common Expression Language. A second version of a rule in
Python could differ from it, so the same text is evaluated here. Only what the rules use is here:
arithmetic, comparisons, `? :`, lists, `has`, `size`, `type`, `matches`, `contains`, `split`,
`exists`, `filter`, and quantities of bytes. Anything else is refused when a rule is compiled. As in
CEL, division truncates and texts are not numbers; unlike in CEL, an error on the left of `||` or
`&&` is an error even if the right decides.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from holdfast_core.errors import InvalidJobError
from holdfast_core.quantities import parse_bytes

Scope = Mapping[str, Any]
"""Values by the names that an expression may use, such as `self`."""
Expression = Callable[[Scope], Any]

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]+(?:[.][0-9]+)?)|'(?P<text>[^'\\]*)'|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<sign>\|\||&&|[=!<>]=|[-+*/%<>!?:.,()\[\]]))"
)
_LEVELS: tuple[tuple[str, ...], ...] = (
    ("||",),
    ("&&",),
    ("==", "!=", "<", "<=", ">", ">=", "in"),
    ("+", "-"),
    ("*", "/", "%"),
)
"""Binary operators, those that bind least first."""


def _divide(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda a, b: a in b,
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divide,
    "%": lambda a, b: a - b * _divide(a, b),
}
_CONSTANTS = {"true": True, "false": False, "int": int}


def _is_quantity(value: object) -> bool:
    try:
        parse_bytes(str(value))
    except InvalidJobError:
        return False
    return True


def _matches(text: str, pattern: str) -> bool:
    # RE2's `$` is the end of the text; Python's also matches before a last line feed.
    return re.search(re.sub(r"\$\Z", r"\\Z", pattern), text) is not None


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "size": len,
    "type": type,
    "isQuantity": _is_quantity,
    "quantity": parse_bytes,
}
_METHODS: dict[str, Callable[..., Any]] = {
    "size": len,
    "matches": _matches,
    "contains": lambda text, part: part in text,
    "split": lambda text, separator: text.split(separator),
    "compareTo": lambda a, b: (a > b) - (a < b),
}


@cache
def compile_cel(text: str) -> Expression:
    """A function that evaluates the expression `text` for a scope.

    Raises:
        ValueError: it is not CEL, or uses more of it than is here.
    """
    parser = _Parser(text)
    expression = parser.expression()
    if parser.kind is not None:
        raise parser.error()
    return expression


class _Parser:
    """One pass over an expression; each method consumes what it is named for."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self.kind: str | None = None
        self.token = ""
        self._advance()

    def error(self) -> ValueError:
        return ValueError(f"no rule may hold {self.token!r} before {self._at} of {self._text!r}")

    def expression(self) -> Expression:
        condition = self._binary(0)
        if not self._take("?"):
            return condition
        then = self.expression()
        self._expect(":")
        otherwise = self.expression()
        return lambda scope: then(scope) if condition(scope) else otherwise(scope)

    def _binary(self, level: int) -> Expression:
        if level == len(_LEVELS):
            return self._unary()
        left = self._binary(level + 1)
        while self.kind != "text" and self.token in _LEVELS[level]:
            sign = self._advance()
            left = _join(sign, left, self._binary(level + 1))
        return left

    def _unary(self) -> Expression:
        if self._take("!"):
            negated = self._unary()
            return lambda scope: not negated(scope)
        if self._take("-"):
            number = self._unary()
            return lambda scope: -number(scope)
        return self._member()

    def _member(self) -> Expression:
        value = self._primary()
        while True:
            if self._take("."):
                name = self._name()
                value = self._method(value, name) if self._take("(") else _Field(value, name)
            elif self._take("["):
                value = _join_index(value, self.expression())
                self._expect("]")
            else:
                return value

    def _method(self, of: Expression, name: str) -> Expression:
        if name in ("exists", "filter"):
            variable = self._name()
            self._expect(",")
            (condition,) = self._arguments()
            return _macro(name, of, variable, condition)
        return _call(_METHODS.get(name), (of, *self._arguments()), self.error())

    def _primary(self) -> Expression:
        kind, token = self.kind, self._advance()
        if kind in ("number", "text"):
            value = token if kind == "text" else float(token) if "." in token else int(token)
            return lambda scope: value
        if kind == "name" and self._take("("):
            arguments = self._arguments()
            if token == "has" and isinstance(arguments[0], _Field):
                return arguments[0].is_present
            return _call(_FUNCTIONS.get(token), arguments, self.error())
        if kind == "name":
            return lambda scope: scope[token] if token in scope else _CONSTANTS[token]
        if token == "(":
            inner = self.expression()
            self._expect(")")
            return inner
        if token == "[":
            members = self._arguments("]")
            return lambda scope: [member(scope) for member in members]
        raise self.error()

    def _arguments(self, end: str = ")") -> tuple[Expression, ...]:
        arguments: list[Expression] = []
        while not self._take(end):
            if arguments:
                self._expect(",")
            arguments.append(self.expression())
        return tuple(arguments)

    def _name(self) -> str:
        if self.kind != "name":
            raise self.error()
        return self._advance()

    def _take(self, sign: str) -> bool:
        matches = self.kind == "sign" and self.token == sign
        if matches:
            self._advance()
        return matches

    def _expect(self, sign: str) -> None:
        if not self._take(sign):
            raise self.error()

    def _advance(self) -> str:
        """Go to the next token; returns the one that was there."""
        previous = self.token
        match = _TOKEN.match(self._text, self._at)
        if match is None and self._text[self._at :].strip():
            raise ValueError(f"no rule may hold {self._text[self._at :]!r}")
        self.kind = match.lastgroup if match else None
        self.token = match[match.lastgroup or 0] if match else ""
        self._at = match.end() if match else len(self._text)
        return previous


def _join(sign: str, left: Expression, right: Expression) -> Expression:
    if sign == "||":
        return lambda scope: left(scope) or right(scope)
    if sign == "&&":
        return lambda scope: left(scope) and right(scope)
    function = _OPERATORS[sign]
    return lambda scope: function(left(scope), right(scope))


def _join_index(of: Expression, index: Expression) -> Expression:
    return lambda scope: of(scope)[index(scope)]


class _Field:
    """Access to a field; one that is absent or null has no value."""

    def __init__(self, of: Expression, name: str) -> None:
        self._of, self._name = of, name

    def __call__(self, scope: Scope) -> Any:
        if not self.is_present(scope):
            raise KeyError(f"no field {self._name}: ask with has() first")
        return self._of(scope)[self._name]

    def is_present(self, scope: Scope) -> bool:
        return self._of(scope).get(self._name) is not None


def _call(
    function: Callable[..., Any] | None, arguments: tuple[Expression, ...], error: ValueError
) -> Expression:
    if function is None:
        raise error
    return lambda scope: function(*(argument(scope) for argument in arguments))


def _macro(name: str, of: Expression, variable: str, condition: Expression) -> Expression:
    def filtered(scope: Scope) -> list[Any]:
        return [one for one in of(scope) if condition({**scope, variable: one})]

    return filtered if name == "filter" else lambda scope: bool(filtered(scope))
