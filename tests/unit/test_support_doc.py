"""docs/support.md names the versions that its commands install."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/support.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize(
    ("row", "package"),
    [
        ("torch", "torch"),
        ("Hugging Face transformers", "transformers"),
        ("accelerate", "accelerate"),
        ("Lightning", "lightning"),
        ("torchdata", "torchdata"),
    ],
)
def test_what_is_tested_is_what_is_pinned(row: str, package: str) -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (version,) = re.findall(rf"(?m)^{package}==(\S+)$", pins)
    (tested,) = re.findall(rf"(?m)^\| {row} \|[^|]*\| ([\w.]+) \|", TEXT)
    assert tested == version


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("DeepSpeed", "deepspeed"),
        ("megatron-core", "megatron"),
        ("peft", "optimizers"),
        ("pytorch-optimizer", "optimizers"),
        ("torchao", "optimizers"),
        ("torchtitan", "torchtitan"),
    ],
)
def test_what_has_an_environment_of_its_own_is_tested_in_the_version_of_its_group(
    name: str, group: str
) -> None:
    (tested,) = re.findall(rf"(?m)^\| {name} \|[^|]*\| ([\w.]+) \|", TEXT)
    assert f"{name.lower()}=={tested}" in PROJECT["optional-dependencies"][group]


def test_the_second_torch_and_python_are_those_of_the_bundle() -> None:
    machine = tomllib.loads((ROOT / "gpu/machine.toml").read_text(encoding="utf-8"))
    rows = re.findall(r"(?m)^\| \| \| ([\w.]+) \| `make test-py312` \|$", TEXT)
    assert rows == [machine["python"], machine["installed"]["torch"]]


@pytest.mark.parametrize(
    ("row", "module", "folder"),
    [
        ("Kubernetes", "k8s.io/kubernetes", "kubernetes"),
        ("Helm", "helm.sh/helm/v4", "kubernetes"),
        ("Kueue", "sigs.k8s.io/kueue", "kueue"),
        ("JobSet", "sigs.k8s.io/jobset", "jobset"),
        ("Kubeflow Trainer", "github.com/kubeflow/trainer/v2", "trainer"),
    ],
)
def test_the_cluster_is_the_one_that_is_built(row: str, module: str, folder: str) -> None:
    built = (ROOT / f"tests/cluster/go/{folder}/go.mod").read_text(encoding="utf-8")
    (version,) = re.findall(rf"(?m)^\s*{re.escape(module)} v(\S+)", built)
    (tested,) = re.findall(rf"(?m)^\| {row} \|[^|]*\| ([\w.]+) \|", TEXT)
    assert tested == version


@pytest.mark.parametrize("package", ["grpcio", "protobuf", "numpy", "msgspec", "xxhash"])
def test_the_oldest_that_is_allowed_is_what_is_declared(package: str) -> None:
    (required,) = (r for r in PROJECT["dependencies"] if r.startswith(f"{package}>="))
    assert f"| {package} | {required.removeprefix(f'{package}>=')} and newer |" in TEXT
