"""Results of checks of a machine, and what they are allowed to prove.

A check is a function that returns what it found, in words, or raises one of the errors here. It
fails only if the machine gives wrong bytes, or is so slow that no healthy one is. What cannot be
checked, such as a disk that this process may not write to, is said and proves nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """Result of a check."""

    PASSED = "passed"
    FAILED = "failed"
    """The machine must not take part."""
    NOTICED = "noticed"
    """Somebody should look at it; it keeps no node from taking part."""
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class Result:
    """What one check found."""

    check: str
    outcome: Outcome
    text: str
    """In words, with the measured value and its limit."""


class CheckFailedError(Exception):
    """The machine gave wrong bytes, or was too slow; the message says what and where."""


class TooSlowError(CheckFailedError):
    """The machine was too slow. Beside other work that is noticed, and is no failure."""


class NoticedError(Exception):
    """Somebody should look at it; the message says at what."""


class NotCheckedError(Exception):
    """The check cannot be made here; the message says why."""


def run_checks(checks: Mapping[str, Callable[[], str]], *, beside: bool) -> Iterator[Result]:
    """Run checks in this process, one after the other. `beside` other work, what is too slow has
    not failed."""
    for name, check in checks.items():
        try:
            yield Result(name, Outcome.PASSED, check())
        except TooSlowError as error:
            yield Result(name, Outcome.NOTICED if beside else Outcome.FAILED, str(error))
        except CheckFailedError as error:
            yield Result(name, Outcome.FAILED, str(error))
        except NoticedError as error:
            yield Result(name, Outcome.NOTICED, str(error))
        except Exception as error:  # what a check cannot do proves nothing about the machine
            text = str(error) or type(error).__name__
            yield Result(name, Outcome.NOT_CHECKED, text)


def write_results(results: Iterator[Result]) -> bool:
    """Write each result as a line of JSON once it is there; returns whether one has failed."""
    failed = False
    for result in results:
        print(json.dumps(asdict(result)), flush=True)
        failed |= result.outcome is Outcome.FAILED
    return failed


def read_result(line: str) -> Result | None:
    """The result in a line; None for what something else has written."""
    with suppress(ValueError, KeyError, TypeError):
        document = json.loads(line)
        return Result(document["check"], Outcome(document["outcome"]), document["text"])
    return None


def failures_in_words(results: Sequence[Result]) -> str:
    """What has failed, in one line; empty if nothing has."""
    failed = [each for each in results if each.outcome is Outcome.FAILED]
    return "; ".join(f"{each.check}: {each.text}" for each in failed)
