"""A bundle is refused where it would not run; that it runs is shown by `make test-py312`."""

from __future__ import annotations

import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from gpu import bundle
from gpu.bundle import BundleError

MACHINE: dict[str, Any] = {
    "python": "3.12",
    "bundle_mib_max": 55,
    "installed": {"numpy": "2.5.2", "safetensors": "0.8.0", "torch": "2.11.0", "triton": "3.6.0"},
    "left_out": tomllib.loads(bundle.MACHINE.read_text(encoding="utf-8"))["left_out"],
}
MODULES = [
    *("aiohttp", "cryptography", "dlrover", "fsspec", "google", "greenlet", "grpc", "hypothesis"),
    *(
        "kopf",
        "kubernetes",
        "msgspec",
        "packaging",
        "prometheus_client",
        "psutil",
        "pytest",
        "redis",
        "rich",
    ),
    *("xxhash", "yaml", "yarl"),
]


def _wheel(folder: Path, modules: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    wheel = folder / "all-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in modules:
            archive.writestr(f"{name}/__init__.py", "")
        archive.writestr(
            "all-1.dist-info/METADATA",
            "Name: all\nRequires-Dist: Typing_Extensions>=4\n"
            'Requires-Dist: tomli; python_version < "3.11"\nRequires-Dist: plots; extra == "all"\n',
        )
    return wheel


def test_a_bundle_holds_sources_wheels_and_metadata(tmp_path: Path) -> None:
    wheels = _wheel(tmp_path / "wheels", MODULES).parent
    out = tmp_path / "bundle"
    bundle.make(out, wheels, MACHINE)
    assert (out / "gpu" / "run.sh").stat().st_mode & 0o100
    assert (out / "trainer_sdk" / "holdfast" / "__init__.py").exists()
    assert list((out / "wheels").iterdir())
    (points,) = (out / "metadata").glob("holdfast-*.dist-info/entry_points.txt")
    assert "torchrun.handlers" in points.read_text(encoding="utf-8")


def test_a_package_that_nobody_brings_is_named(tmp_path: Path) -> None:
    wheels = _wheel(tmp_path / "wheels", [name for name in MODULES if name != "grpc"]).parent
    with pytest.raises(BundleError, match="brought nor installed there: grpc;"):
        bundle.make(tmp_path / "bundle", wheels, MACHINE)
    assert not (tmp_path / "bundle").exists()


def test_a_bundle_that_is_too_large_is_refused(tmp_path: Path) -> None:
    wheels = _wheel(tmp_path / "wheels", MODULES).parent
    with pytest.raises(BundleError, match="more than 1"):
        bundle.make(tmp_path / "bundle", wheels, MACHINE | {"bundle_mib_max": 1})


def test_wheels_bring_what_they_need_on_that_machine(tmp_path: Path) -> None:
    assert list(bundle.needs(_wheel(tmp_path, MODULES), MACHINE)) == ["typing-extensions"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from accelerate import Accelerator", ["tests/unit/sdk/test_new.py (accelerate)"]),
        ("import lightning.pytorch as pl", ["tests/unit/sdk/test_new.py (lightning)"]),
        ('pytest.importorskip("accelerate")\nfrom accelerate import Accelerator', []),
        ("def test_one():\n    import accelerate", []),
        ("import torch", []),
    ],
)
def test_tests_that_cannot_be_collected_there_are_named(
    text: str, found: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "tests" / "unit" / "sdk"
    folder.mkdir(parents=True)
    (folder / "test_new.py").write_text(text, encoding="utf-8")
    (tmp_path / "tests" / "conftest.py").touch()
    assert bundle.uncollectable(tmp_path, MACHINE) == found
