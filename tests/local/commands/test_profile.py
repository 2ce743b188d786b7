"""`holdfast profile` of a real run, and the simulation that uses it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
import yaml

from holdfast_cli.local import LocalCluster, LocalSettings
from holdfast_cli.main import main
from holdfast_core.job.parsing import parse_job

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
WAIT_S = 240.0


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_run_that_has_lost_a_rank_is_measured_and_simulated(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = yaml.safe_load((EXAMPLES / "moe-job.yaml").read_text(encoding="utf-8"))
    spec = document["spec"]
    spec |= {"nodes": 2, "parallelism": {"dp": 2, "ep": 2}, "redundancy": {"type": "Replication"}}
    spec["failurePolicy"]["spares"] = 0
    (container,) = spec["trainer"]["template"]["spec"]["containers"]
    container["command"] = [sys.executable, str(EXAMPLES / "train_moe.py")]
    container["args"] = ["--steps", "100000"]
    job = directory / "job.yaml"
    job.write_text(yaml.safe_dump(document))
    run = directory / "run"

    async def profile() -> int:
        async with LocalCluster(parse_job(document), LocalSettings(directory=run)) as cluster:
            await cluster.wait_for(lambda status: bool(status.protected), timeout_s=WAIT_S)
            await cluster.kill_rank(1)
            await cluster.wait_for(
                lambda status: status.protected.startswith("2."), timeout_s=WAIT_S
            )
            arguments = ["profile", str(job), "--dir", str(run), "--seconds", "10"]
            return await asyncio.to_thread(main, arguments)

    assert asyncio.run(profile()) == 0
    printed = capsys.readouterr()
    measured = json.loads(printed.out)
    assert measured["gpus"] == 2
    assert (measured["experts_per_layer"], measured["moe_layers"]) == (16, 3)
    for name in ("step_s", "copy_bytes_s", "network_bytes_s", "restart_s", "expert_bytes"):
        assert measured[name] > 0, name
    assert "has not shown storage_bytes_s" in printed.err
    path = directory / "profile.json"
    path.write_text(printed.out)
    arguments = ["--policies", "full", "--runs", "2", "--mtbf", "1h", "--json"]
    assert main(["simulate", str(job), "--profile", str(path), *arguments]) == 0
    inputs = {each["name"]: each for each in json.loads(capsys.readouterr().out)["inputs"]}
    assert inputs["step"]["from"] == inputs["copy, a node"]["from"] == str(path)
