"""What an index would get: a source distribution and a wheel, and environments made of the wheel
and the packages that it asks for, and no others.

Those packages are links to the ones that the tests run with, so nothing is downloaded.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Iterable
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCES = tuple(PROJECT["tool"]["setuptools"]["packages"]["find"]["where"])
GROUPS = ("trainer", "daemon", "catalogue", "operator", "cli")
FRAMEWORKS = ("huggingface", "lightning")
"""Groups of training frameworks, each with the module `holdfast.integrations.<group>`."""
ELSEWHERE = ("deepspeed", "megatron", "torchtitan")
"""Others, whose packages are not in the environment of these tests (`make test-deepspeed` and
others)."""
IMPORTED_BY_OTHERS = {"s3fs", "accelerate"}
"""Packages that fsspec and transformers import for us."""
BUILD = "import sys, setuptools.build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
IMPORT_ALL = """
import importlib, pkgutil, sys
package, *left_out = sys.argv[1:]
found = importlib.import_module(package)
for module in pkgutil.walk_packages(found.__path__, package + "."):
    if not module.name.endswith("__main__") and module.name not in left_out:
        importlib.import_module(module.name)
"""

Environment = Callable[..., Path]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the source distribution, and with the wheel that is built from it alone."""
    folder = tmp_path_factory.mktemp("distributions")
    tree = folder / "tree"
    tree.mkdir()
    for name in SOURCES:
        shutil.copytree(
            ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    build("build_sdist", tree, folder)
    (source,) = folder.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    build("build_wheel", unpacked, folder)
    return folder


def build(what: str, tree: Path, to: Path) -> None:
    run(sys.executable, "-c", BUILD, what, to, cwd=tree, check=True)


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    (found,) = distributions.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="module")
def environment(wheel: Path, metadata: Message) -> Environment:
    """Makes an environment with the wheel, and what it asks for with the given groups."""

    def make(*groups: str) -> Path:
        place = wheel.parent / "-".join(["environment", *groups])
        if place.exists():
            return place
        run(sys.executable, "-m", "venv", "--without-pip", place, check=True)
        pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", place / "bin" / "python"]
        run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, check=True)
        site = Path(sysconfig.get_path("purelib", vars={"base": str(place)}))
        for name in closure(requirements(metadata), groups):
            link(name, site)
        return place

    return make


def requirements(metadata: Message) -> list[Requirement]:
    return [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]


def closure(wanted: Iterable[Requirement], groups: Iterable[str]) -> set[str]:
    """Names of all packages that an installer would install for `wanted` with `groups`."""
    found: set[str] = set()
    open_ones = [(one, tuple(groups)) for one in wanted]
    while open_ones:
        one, extras = open_ones.pop()
        marker = one.marker
        if marker is not None and not any(marker.evaluate({"extra": e}) for e in ("", *extras)):
            continue
        if one.name == "holdfast" or one.name in found:
            continue
        try:
            needed = importlib.metadata.distribution(one.name).requires or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform, by a marker that names no extra
        found.add(one.name)
        open_ones += [(Requirement(text), tuple(one.extras)) for text in needed]
    return found


def link(name: str, site: Path) -> None:
    """Put links to an installed package's files into `site`."""
    distribution = importlib.metadata.distribution(name)
    for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
        target = site / top
        if not target.exists():
            target.symlink_to(Path(str(distribution.locate_file(top))))


def run(*command: str | Path, cwd: Path | None = None, check: bool = False) -> Done:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HOLDFAST"))}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, cwd=cwd, env=kept
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


Done = subprocess.CompletedProcess[str]


def test_the_distributions_hold_the_packages_with_types_and_protocol(
    distributions: Path, wheel: Path, metadata: Message
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.partition("/")[0] for name in names}
    packages = {"holdfast", "holdfast_core", "holdfast_daemon", "holdfast_operator"}
    packages |= {"holdfast_cli", "holdfast_host", "holdfast_protos", "holdfast_storage"}
    assert {top for top in tops if not top.endswith(".dist-info")} == packages
    assert {f"{package}/py.typed" for package in packages} <= names
    assert {"holdfast_protos/trainer.proto", "holdfast_protos/trainer_pb2.pyi"} <= names
    sources = {str(p.relative_to(ROOT / s)) for s in SOURCES for p in (ROOT / s).rglob("*.py")}
    assert sources <= names
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {*GROUPS, *FRAMEWORKS, *ELSEWHERE, "all"} <= set(metadata.get_all("Provides-Extra", []))
    assert "make demo" in str(metadata.get_payload())


def test_every_package_that_is_asked_for_is_imported_somewhere(metadata: Message) -> None:
    ours = {
        line.split()[1].partition(".")[0]
        for source in SOURCES
        for path in (ROOT / source).rglob("*.py")
        for line in path.read_text().splitlines()
        if line.lstrip().startswith(("import ", "from "))
    }
    imported = {
        name.lower().replace("_", "-")
        for module, names in importlib.metadata.packages_distributions().items()
        if module in ours
        for name in names
    }
    for one in requirements(metadata):
        groups = [
            g
            for g in (*GROUPS, *FRAMEWORKS, "")
            if one.marker is None or one.marker.evaluate({"extra": g})
        ]
        if groups and one.name != "holdfast":
            assert one.name in imported | IMPORTED_BY_OTHERS, f"{one} ({groups}) is not used"


@pytest.mark.parametrize(
    "installed, command, group",
    [
        ("", "holdfast run job.yaml", "all"),
        ("", "holdfast status", "cli"),
        ("", "kubectl-holdfast status -n team-a", "cli"),
        ("", "holdfast-daemon --help", "daemon"),
        ("", "holdfast-operator --help", "operator"),
        ("cli", "holdfast run job.yaml", "all"),
        ("cli", "holdfast status -n team-a", "operator"),
        ("cli", "holdfast history llm --redis redis://127.0.0.1:1/0", "catalogue"),
        ("cli", "holdfast export s3://bucket/a/b --to model", "daemon"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("", "holdfast demo", "all"),
                ("", "holdfast inject kill-node n1", "cli"),
                ("", "holdfast persist", "cli"),
                ("", "holdfast suspend llm", "cli"),
                ("", "holdfast resume llm", "cli"),
                ("", "holdfast logs llm", "cli"),
                ("", "holdfast history", "cli"),
                ("", "holdfast plan job.yaml", "cli"),
                ("", "holdfast simulate job.yaml", "cli"),
                ("", "holdfast certificates --out tls", "cli"),
                ("", "holdfast export file:///a/b --to model", "cli"),
                ("", "holdfast completion bash", "cli"),
                ("cli", "holdfast demo", "all"),
                ("cli", "holdfast inject kill-rank 3 -n team-a --job llm --yes", "operator"),
                ("cli", "holdfast persist -n team-a llm", "operator"),
                ("cli", "holdfast suspend -n team-a llm", "operator"),
                ("cli", "kubectl-holdfast logs -n team-a llm", "operator"),
            )
        ),
    ],
)
def test_a_command_without_its_packages_names_what_to_install(
    environment: Environment, installed: str, command: str, group: str
) -> None:
    name, *arguments = command.split()
    done = run(environment(*installed.split()) / "bin" / name, *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f'pip install "holdfast[{group}]"' in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_without_any_group_the_command_has_its_help_and_its_version(
    environment: Environment,
) -> None:
    command = environment() / "bin" / "holdfast"
    assert run(command, "--version", check=True).stdout.startswith("holdfast ")
    assert "holdfast demo" in run(command, "--help", check=True).stdout
    completing = command.with_name("kubectl_complete-holdfast")
    assert run(completing, "hist", check=True).stdout.startswith("history\t")


def test_an_import_without_torch_names_what_to_install(environment: Environment) -> None:
    catch = "try:\n import holdfast\nexcept ImportError as e: print(e)"
    done = run(environment() / "bin" / "python", "-c", catch, check=True)
    assert done.stdout.startswith("import holdfast needs the package torch")
    assert 'pip install "holdfast[trainer]"' in done.stdout


@pytest.mark.parametrize(
    "group, packages",
    [
        pytest.param("trainer", ["holdfast"], marks=pytest.mark.slow),
        ("daemon", ["holdfast_daemon", "holdfast_host", "holdfast_storage"]),
        pytest.param(
            "catalogue",
            ["holdfast_daemon.observing", "holdfast_storage"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "operator",
            ["holdfast_operator.kube", "holdfast_operator.reconciler"],
            marks=pytest.mark.slow,
        ),
        ("cli", ["holdfast_cli.commands", "holdfast_cli.local", "holdfast_operator.crd"]),
    ],
)
def test_a_group_has_all_that_its_part_imports(
    environment: Environment, group: str, packages: list[str]
) -> None:
    groups = ["daemon", group] if group == "catalogue" else [group]
    python = environment(*groups) / "bin" / "python"
    left_out = [f"holdfast.integrations.{framework}" for framework in (*FRAMEWORKS, *ELSEWHERE)]
    left_out.append("holdfast.integrations.torchtitan_train")
    if group == "daemon":
        left_out += ["holdfast_daemon.observing.catalogue_redis", "holdfast_storage.catalogue"]
    for package in packages:
        run(python, "-c", IMPORT_ALL, package, *left_out, check=True)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("group", FRAMEWORKS)
def test_a_framework_has_a_group_that_is_named_without_it(
    environment: Environment, group: str
) -> None:
    module = f"import holdfast.integrations.{group}"
    done = run(environment("trainer") / "bin" / "python", "-c", module)
    assert f'pip install "holdfast[{group}]"' in done.stderr
    run(environment("trainer", group) / "bin" / "python", "-c", module, check=True)


def test_a_daemon_without_redis_says_what_a_catalogue_needs(
    environment: Environment, tmp_path: Path
) -> None:
    command = environment("daemon") / "bin" / "holdfast-daemon"
    where = ("--root", tmp_path, "--node", "a", "--host", "127.0.0.1", "--insecure")
    done = run(command, *where, "--budget", "1000000", "--redis", "redis://127.0.0.1:1/0")
    assert done.returncode == 2
    assert 'pip install "holdfast[catalogue]"' in done.stderr
    assert "Traceback" not in done.stderr


JOB = """
apiVersion: holdfast.dev/v1alpha1
kind: MoETrainingJob
metadata: {name: installed}
spec:
  nodes: 2
  parallelism: {dp: 2}
  snapshot: {memoryPerNode: 16Mi}
  redundancy: {type: RAIM5}
  trainer:
    template:
      spec:
        containers: [{name: trainer, command: [python, train.py]}]
"""
TRAINER = """
import torch
import torch.distributed as dist
import holdfast
dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
session = holdfast.init(model=model, optimizer=optimizer)
for step in range((session.restore() or 0) + 1, 6):
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    session.save(step).protected.result(60)
session.close()
"""


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_job_runs_where_all_groups_are_installed(
    environment: Environment, tmp_path: Path
) -> None:
    place = environment("all", *GROUPS)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "train.py").write_text(TRAINER)
    done = run(place / "bin" / "holdfast", "run", "job.yaml", "--dir", tmp_path / "r", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Complete" in done.stdout
