"""`holdfast preflight` shows what the checks of a node have found."""

from __future__ import annotations

import json

import pytest

from holdfast import node_checks
from holdfast_cli.commands.preflight import STYLES
from holdfast_cli.main import main
from holdfast_host.results import Outcome, Result

FOUND = [
    Result("memory", Outcome.PASSED, "copies reach 12.3 GB/s"),
    Result("disk", Outcome.FAILED, "/tmp: Input/output error"),
]


@pytest.fixture(params=[2, 1])
def found(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    """The first results, which the checks find."""
    results = FOUND[: request.param]

    class Found:
        def __init__(self, daemon: object) -> None:
            assert daemon is None

        def results(self) -> list[Result]:
            return results

    monkeypatch.setattr(node_checks, "NodeChecks", Found)
    return results


def test_results_are_a_table_with_a_verdict(
    found: list[Result], capsys: pytest.CaptureFixture[str]
) -> None:
    failed = len(found) > 1
    assert main(["preflight"]) == int(failed)
    out = capsys.readouterr().out
    assert "memory" in out and "copies reach 12.3 GB/s" in out
    assert ("must not take part" in out) == failed == ("Input/output error" in out)


def test_results_are_json_for_programs(
    found: list[Result], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["preflight", "--json"]) == int(len(found) > 1)
    assert [each["outcome"] for each in json.loads(capsys.readouterr().out)] == [
        result.outcome.value for result in found
    ]


def test_each_result_has_a_style() -> None:
    assert STYLES.keys() == set(Outcome)
