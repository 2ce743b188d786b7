"""What an API server refuses (`tests/cluster/test_crd.py`), `parse_job` refuses, too."""

from __future__ import annotations

import pytest
from invalid_jobs import BASE, INVALID_JOBS, InvalidJob

from holdfast_core.errors import InvalidJobError
from holdfast_core.job.parsing import parse_job


def test_the_base_of_the_table_is_valid() -> None:
    assert parse_job(BASE).key == "default.tiny"


@pytest.mark.parametrize("case", INVALID_JOBS, ids=lambda case: case.name)
def test_a_local_run_refuses_what_the_api_server_refuses(case: InvalidJob) -> None:
    with pytest.raises(InvalidJobError) as caught:
        parse_job(case.document)
    message = str(caught.value)
    assert case.local in message
    assert case.path in message
