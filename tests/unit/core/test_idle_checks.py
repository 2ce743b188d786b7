"""What daemons report about idle nodes: bounded, and counted only where it is the node's."""

from __future__ import annotations

import math

import pytest

from holdfast_core.idle_checks import (
    TEXT_CHARACTERS_MAX,
    FailedCheck,
    IdleCheck,
    each_once,
    failed_check,
    in_words,
    nodes_to_avoid,
)


def failed(check: IdleCheck = IdleCheck.DISK, text: str = "broken") -> FailedCheck:
    return FailedCheck(check=check, text=text, failing_s=1.0)


@pytest.mark.parametrize(
    ("check", "failing_s"),
    [("disk", -1.0), ("disk", math.nan), ("disk", math.inf), ("gpu", 1.0), ("", 1.0)],
)
def test_what_cannot_be_is_no_failed_check(check: str, failing_s: float) -> None:
    assert failed_check(check, "broken", failing_s, confirmed=True) is None


def test_a_text_is_one_bounded_line_without_secrets_and_control_sequences() -> None:
    text = "\x1b[31m/tmp:\nInput\r password=hunter22 " + "x" * 9999
    found = failed_check("disk", text, 0.0, confirmed=False)
    assert found is not None and found.check is IdleCheck.DISK
    assert len(found.text) <= TEXT_CHARACTERS_MAX and found.text.isprintable()
    assert "hunter22" not in found.text


def test_each_check_counts_once_and_in_order() -> None:
    many = [failed(text="one"), failed(IdleCheck.MEMORY), failed(text="two")]
    assert each_once(many) == (failed(IdleCheck.MEMORY), failed(text="one"))
    assert in_words(many[:2]) == "failed check of disk: one; failed check of memory: broken"
    assert in_words(()) == ""


@pytest.mark.parametrize(
    ("failing", "passing", "avoided"),
    [(0, 3, 0), (1, 0, 1), (1, 1, 1), (2, 2, 2), (2, 1, 0), (2, 0, 0), (3, 50, 3)],
)
def test_what_most_nodes_have_in_common_counts_against_none(
    failing: int, passing: int, avoided: int
) -> None:
    """One that fails alone counts, also while no other node reports anything."""
    reports = {f"bad{n}": (failed(),) for n in range(failing)}
    found = nodes_to_avoid({**reports, **{f"good{n}": () for n in range(passing)}})
    assert len(found) == avoided and found.items() <= reports.items()


def test_failures_of_different_checks_do_not_excuse_each_other() -> None:
    """Each check is counted by itself."""
    reports: dict[str, tuple[FailedCheck, ...]]
    reports = {"a": (failed(IdleCheck.MEMORY),), "b": (failed(),)}
    assert nodes_to_avoid(reports) == reports
    common = failed(IdleCheck.CLOCK)
    reports = {"a": (failed(IdleCheck.MEMORY), common), "b": (common,), "c": ()}
    assert nodes_to_avoid(reports) == {"a": (failed(IdleCheck.MEMORY),)}
