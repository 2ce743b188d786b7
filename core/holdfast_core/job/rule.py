"""One rule of a job's document, in CEL, with the message of a document that breaks it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast_core.job.cel import compile_cel
from holdfast_core.job.documents import MISSING, Problem, at


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One rule of the part of a document that is at one path."""

    rule: str
    """CEL over `self` (and `oldSelf`), true when all is well."""
    says: str
    """Message: what is wrong; what to do. `%d` and `%s` stand for the values."""
    values: tuple[str, ...] = ()
    """CEL of each value. `format` inserts them: the API server assumes that the text of a number
    (`string(n)`) has no maximum length, and refuses to join such texts."""
    field: str = ""
    """Path below the schema that holds the rule, such as `.parallelism`; shown to people."""
    forbidden: bool = False
    """Whether the value is well-formed but must not be set now."""

    @property
    def changes(self) -> bool:
        """Whether it is about a change, and says nothing about one document."""
        return "oldSelf" in self.rule

    def problem(self, value: Any, path: str) -> Problem | None:
        """The problem of `value`, found at `path`, if it breaks the rule."""
        scope = {"self": value}
        if compile_cel(self.rule)(scope):
            return None
        says = self.says % tuple(compile_cel(part)(scope) for part in self.values)
        wrong, _, fix = says.partition("; ")
        shown = at(value, *self.field.split(".")[1:])
        plain = isinstance(shown, list) and not any(isinstance(one, dict) for one in shown)
        return Problem(
            path=(path + self.field).removeprefix("."),
            value=shown if plain or isinstance(shown, str | int | float) else MISSING,
            wrong=wrong,
            fix=fix,
        )
