"""`holdfast persist` waits for the set that it asked for, and says why it does not come."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast_cli.commands.persist import _follow
from holdfast_cli.main import build_parser
from holdfast_core.errors import StorageError


def state(persisted: str | None, failure: str = "") -> dict[str, Any]:
    return {"persist": {"persisted": persisted, "failure": failure}}


def test_it_waits_for_what_was_protected_or_something_newer() -> None:
    states = iter([state(None), state("1.5"), state("2.3")])
    assert _follow(lambda: next(states), wanted="1.9", wait_s=60) == "2.3"


def test_without_anything_protected_any_set_will_do() -> None:
    assert _follow(lambda: state("1.1"), wanted=None, wait_s=60) == "1.1"


@pytest.mark.parametrize("why", ["no space left", ""])
def test_a_set_that_does_not_come_is_reported_with_its_failure(why: str) -> None:
    with pytest.raises(StorageError, match=why or "storage is slow"):
        _follow(lambda: state("1.5", why), wanted="1.9", wait_s=-1)


def test_the_command_takes_a_job_and_how_long_to_wait() -> None:
    options = build_parser().parse_args(["persist", "llm", "--wait", "5"])
    assert (options.job, options.wait, options.handler.__name__) == ("llm", 5.0, "_persist")
