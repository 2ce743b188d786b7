"""The command lines of a local run's processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from virtual_world import make_job

from holdfast_operator.local.commands import Commands
from holdfast_operator.local.directory import NodeRecord, RunDirectory, RunRecord


@pytest.mark.parametrize(
    ("reform_s", "options"), [(30, []), (7.5, ["--reform-s", "7.5"]), (31, ["--reform-s", "31.0"])]
)
def test_the_launcher_is_told_of_a_time_that_is_not_its_default(
    tmp_path: Path, reform_s: float, options: list[str]
) -> None:
    job = make_job(reformSeconds=reform_s)
    directory = RunDirectory(tmp_path, job.key)
    node = NodeRecord(name="n0", host="127.0.0.1", root=str(tmp_path))
    run = RunRecord(job=job.key, control_host="127.0.0.1")
    made = Commands().agent(directory, run, job, node, attempt=1).arguments
    launcher = list(made[: made.index("--")])
    waits = launcher.index("--wait-file")
    assert launcher[waits + 2 :] == options
    assert made[made.index("--") + 1 :] == tuple(job.command)
