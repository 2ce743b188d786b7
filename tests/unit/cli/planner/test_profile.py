"""Profiles of a job: the step that follows from its parts, and what `simulate` takes or refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plan_command import JOB

from holdfast_cli.main import main
from holdfast_cli.planner.profile import AllReduce, JobProfile, encode_profile, read_profile
from holdfast_core.errors import InvalidJobError

QUICK = ("--runs", "2", "--policies", "full", "--mtbf", "1h")
MEASURED: dict[str, Any] = {
    "gpus": 8,
    "step_s": 1.5,
    "expert_bytes": 1000,
    "other_bytes": 8000,
    "experts_per_layer": 4,
    "moe_layers": 2,
    "copy_bytes_s": 3e9,
    "network_bytes_s": 2e9,
    "storage_bytes_s": 1.5e9,
    "snapshot_portion": 0.01,
    "frozen_saves": 0.25,
    "detect_s": 3.0,
    "restart_s": 4.0,
    "reform_s": 1.0,
}
GIVEN = ("--step-seconds", "9", "--frozen-saves", "0.5")
PARTS: dict[str, Any] = {"pipelines_s": [[0.1, 0.2], [0.3, 0.1]], "micro_batches": 4}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def written(tmp_path: Path, fields: dict[str, Any]) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(fields))
    return path


def simulated(
    capsys: pytest.CaptureFixture[str], job: Path, *arguments: str | Path
) -> dict[str, tuple[str, str]]:
    """Input → its value and source."""
    assert main(["simulate", str(job), *map(str, arguments), *QUICK, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    return {each["name"]: (each["value"], each["from"]) for each in document["inputs"]}


def test_a_step_is_the_slowest_pipeline_and_what_computation_does_not_hide() -> None:
    """(4 + 2 - 1) x 0.3 s, half of an all-reduce of 0.1 s + 10 MB at 100 MB/s, and 0.2 s."""
    all_reduce = AllReduce(alpha_s=0.1, beta_s_byte=1e-8, gradient_bytes=1e7, hidden=0.5)
    profile = JobProfile(**PARTS, all_reduce=all_reduce, update_s=0.2)
    assert profile.iteration_s == pytest.approx(1.5 + 0.1 + 0.2)
    assert JobProfile(**PARTS, sync_s=0.3).iteration_s == pytest.approx(1.8)
    assert JobProfile(step_s=7.0).iteration_s == 7.0
    assert JobProfile().iteration_s is None


def test_every_measurement_is_used_and_named_as_the_source(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, MEASURED)
    inputs = simulated(capsys, job, "--profile", path)
    source = str(path)
    assert inputs["step"] == ("1.5 s", source)
    assert inputs["training state"] == ("16 kB, 50% in experts", source)
    assert inputs["experts"] == ("4 in each of 2 layers", source)
    assert inputs["copy, a node"] == ("3.0 GB/s", source)
    assert inputs["network, a node"] == ("2.0 GB/s", source)
    assert inputs["storage, a node"] == ("1.5 GB/s", source)
    assert inputs["a step with a snapshot is longer by"] == ("1 %", source)
    assert inputs["frozen experts save, of a step"] == ("25%", source)
    assert inputs["detection of a lost node"] == ("3 s", source)
    assert inputs["restart after it, processes stay"] == ("4 s", source)
    assert inputs["to go on with other nodes, in place"] == ("1 s", source)
    assert "profile" not in inputs
    other = simulated(capsys, job, "--profile", path, "--gpus", "64", *GIVEN)
    assert other["step"] == ("9 s", "given")
    assert other["frozen experts save, of a step"] == ("50%", "given")
    assert other["profile"] == ("measured on 8 GPUs", source)


def test_parts_of_a_step_bring_stages_and_micro_batches(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, PARTS | {"update_s": 0.5})
    inputs = simulated(capsys, job, "--profile", path)
    assert inputs["step"] == ("2 s", str(path))
    assert inputs["stages, micro-batches"] == ("2, 4", str(path))


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile = JobProfile(**MEASURED)
    path.write_bytes(encode_profile(profile))
    assert read_profile(path) == profile
    assert "pipelines_s" not in path.read_text()


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"step_seconds": 1.0}, "unknown field `step_seconds`; the fields are gpus, step_s"),
        ({"step_s": 0}, "`float` > 0.0 - at `$.step_s`"),
        ({"step_s": "1"}, "Expected `float | null`, got `str` - at `$.step_s`"),
        ({"pipelines_s": [[]]}, "length >= 1 - at `$.pipelines_s["),
        ({"all_reduce": {"alpha_s": 1}}, "missing required field `beta_s_byte`"),
        ({"step_s": 1, "update_s": 0.1}, "step_s is the whole step and update_s a part of one"),
        ({"sync_s": 1}, "sync_s is a part of a step, which also needs pipelines_s"),
        ({"pipelines_s": [[1]]}, "pipelines_s needs micro_batches"),
        (
            PARTS
            | {
                "sync_s": 1,
                "all_reduce": {"alpha_s": 0, "beta_s_byte": 0, "gradient_bytes": 1},
            },
            "sync_s and all_reduce: give one of them",
        ),
        (
            PARTS | {"pipelines_s": [[1], [1, 2]]},
            "pipelines of 1 and of 2 stages; all pipelines have the same number",
        ),
        ({"expert_bytes": 1}, "expert_bytes and other_bytes: give both, or neither"),
    ],
)
def test_a_wrong_profile_is_refused_with_the_field_to_change(
    tmp_path: Path, fields: dict[str, Any], refusal: str
) -> None:
    path = written(tmp_path, fields)
    with pytest.raises(InvalidJobError) as error:
        read_profile(path)
    assert refusal in str(error.value)
    assert str(path) in str(error.value)


def test_a_profile_that_does_not_fit_the_flags_or_is_not_there_is_refused(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, PARTS)
    assert main(["simulate", str(job), "--profile", str(path), "--stages", "3"]) == 2
    assert "--stages 3: pipelines_s of" in capsys.readouterr().err
    assert main(["simulate", str(job), "--profile", "/nowhere/p.json"]) == 2
    assert "cannot be read: No such file or directory; holdfast profile" in capsys.readouterr().err
