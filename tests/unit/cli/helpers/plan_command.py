"""`holdfast plan` for a job whose model is given by flags: its output and its refusals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from holdfast_cli.local.directory import NodeRecord, RunDirectory, RunRecord
from holdfast_cli.main import main
from holdfast_core.snapshots.layouts import Entry, Layout, TensorRole, encode_layout

JOB = """
apiVersion: holdfast.dev/v1alpha1
kind: MoETrainingJob
metadata: {name: gpt}
spec:
  nodes: 4
  nprocPerNode: 2
  parallelism: {dp: 8, ep: 8}
  model: {numExperts: 16, numMoELayers: 12}
  trainer: {template: {spec: {containers: [{name: t, image: i, command: [python, t.py]}]}}}
"""
SIZES = ["--expert-bytes", "335M", "--other-bytes", "8G", "--step-seconds", "2"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["plan", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The message for input that makes no sense, whether argparse or the command refuses it."""
    try:
        code = main(["plan", *map(str, arguments)])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2
    return capsys.readouterr().err


def _save_layout(root: Path, rank: int, world: int, units: Mapping[str, int]) -> None:
    entries, offset = [], 0
    for unit, nbytes in units.items():
        entries.append(
            Entry(
                unit=unit,
                tensor=f"{unit}.w",
                role=TensorRole.COMPUTE,
                dtype="float32",
                shape=(nbytes // 4,),
                start=0,
                nbytes=nbytes,
                offset=offset,
            )
        )
        offset += nbytes
    layout = Layout(
        rank=rank,
        world_size=world,
        topology="dp2·ep2·tp1·pp1",
        entries=tuple(entries),
        extras_offset=offset,
        extras_capacity=64,
    )
    arena = root / "jobs" / "default.gpt" / "arenas" / f"{rank}-{len(units)}"
    arena.mkdir(parents=True)
    (arena / "layout.json").write_bytes(encode_layout(layout))


def made_run(tmp_path: Path) -> Path:
    """A run of two nodes; rank 0's first layout was made before its optimizer had states."""
    directory = RunDirectory(tmp_path / "run", "default.gpt", memory=tmp_path / "memory")
    directory.path.mkdir()
    roots = {name: tmp_path / "memory" / name for name in ("n0", "n1")}
    directory.write_record(
        RunRecord(
            job="default.gpt",
            control_host="127.0.0.1",
            nodes={n: NodeRecord(name=n, host="", root=str(r)) for n, r in roots.items()},
        )
    )
    _save_layout(roots["n0"], 0, 2, {"embedding": 8})
    _save_layout(roots["n0"], 0, 2, {"embedding": 400, "layer1/expert0": 100, "layer1/gate": 20})
    _save_layout(roots["n1"], 1, 2, {"layer1/dense": 80, "layer1/expert1": 100})
    return directory.path
