"""The example for accelerate goes on where a run before it ended: same batches, same losses."""

from __future__ import annotations

import importlib
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.testing import FakeDaemon

EPOCH, STEPS = 4, 11
"""Batches of an epoch of sixteen passages, and steps of the whole run."""
WAIT_S = 60.0


def losses(path: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, path.read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "ended_after",
    [
        pytest.param(EPOCH + 2, id="in an epoch", marks=pytest.mark.slow),
        pytest.param(2 * EPOCH, id="at its end"),
    ],
)
def test_a_run_goes_on_with_the_next_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended_after: int
) -> None:
    script: Any = importlib.import_module("train_accelerate")

    def run(name: str, steps: int, daemon: FakeDaemon | None) -> list[tuple[int, float]]:
        def init(**arguments: Any) -> holdfast.Session:
            if daemon is None:
                return real(**arguments)
            every_save = holdfast.Settings(start_wait_s=WAIT_S)
            del arguments["world"]  # this daemon has one epoch: the process ends with its world
            return real(**arguments, daemon=daemon, job="accelerate", settings=every_save)

        real = holdfast.init
        with monkeypatch.context() as patch:
            patch.setattr(script.holdfast, "init", init)
            files = [
                "--log-file",
                str(tmp_path / name),
                "--hash-file",
                str(tmp_path / f"{name}-hash"),
            ]
            script.main(["--passages", str(4 * EPOCH), "--steps", str(steps), *files])
        return losses(tmp_path / name)

    whole = run("whole", STEPS, None)
    with closing(FakeDaemon(tmp_path / "memory")) as daemon:
        run("parts", ended_after, daemon)
    with closing(FakeDaemon(tmp_path / "memory")) as daemon:
        parts = run("parts", STEPS, daemon)
    assert parts == whole
    hashes = [(tmp_path / f"{name}-hash").read_text() for name in ("whole", "parts")]
    assert hashes[0] == hashes[1]
