"""What an API server refuses (`tests/cluster/test_crd.py`), `parse_job` refuses, too."""

from __future__ import annotations

import re

import pytest
from invalid_jobs import BASE, INVALID_JOBS, InvalidJob

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.parsing import parse_job
from holdfast_core.job.rules import RULES


def test_the_base_of_the_table_is_valid() -> None:
    assert parse_job(BASE).key == "default.tiny"


@pytest.mark.parametrize("case", INVALID_JOBS, ids=lambda case: case.name)
def test_a_local_run_refuses_what_the_api_server_refuses(case: InvalidJob) -> None:
    with pytest.raises(InvalidJobError) as caught:
        parse_job(case.document)
    message = str(caught.value)
    assert case.local in message
    assert case.path in message


def test_the_table_breaks_every_rule() -> None:
    """A rule that nothing breaks may say anything."""
    messages = "\n".join(case.server for case in INVALID_JOBS)
    rules = [rule for group in RULES.values() for rule in group if "oldSelf" not in rule.rule]
    unbroken = [rule.says for rule in rules if not re.search(_pattern(rule.says), messages)]
    assert unbroken == []


def _pattern(says: str) -> str:
    return re.escape(says).replace("%d", r"\d+").replace("%s", ".+")
