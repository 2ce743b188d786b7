"""The recipes in docs/frameworks.md for frameworks that no test here can train with: what they take
from a package is in the version that the document names.

Packages are downloaded alone, without what they need, and read: nothing of them is imported.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/frameworks.md").read_text(encoding="utf-8")
OURS = {"torch", "holdfast", "session"}
"""Names whose attributes are not the package's."""

OF_TORCH = {"parameters"}
"""Names that recipes take from torch's objects."""

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(300)]

Open = Callable[[str], "Package"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A section of the document."""

    title: str
    package: str
    """Its name in the document's list of versions, and on the index."""
    uses: tuple[str, ...]
    """`module:name` or `module:Class.member`; with `(a, b)` it takes these arguments."""


RECIPES = (
    Recipe(
        title="Megatron-LM",
        package="megatron-core",
        uses=(
            "megatron.core.parallel_state:get_data_parallel_world_size(with_context_parallel)",
            "megatron.core.parallel_state:get_tensor_model_parallel_world_size()",
            "megatron.core.parallel_state:get_pipeline_model_parallel_world_size()",
            "megatron.core.parallel_state:get_expert_model_parallel_world_size()",
            "megatron.core.tensor_parallel.random:get_cuda_rng_tracker()",
            "megatron.core.tensor_parallel.random:CudaRNGStatesTracker.get_states()",
            "megatron.core.tensor_parallel.random:CudaRNGStatesTracker.set_states(states)",
            "megatron.core.optimizer.optimizer:ChainedOptimizer.chained_optimizers",
            "megatron.core.optimizer.optimizer:MegatronOptimizer.optimizer",
            "megatron.core.optimizer.optimizer:MegatronOptimizer.step()",
            "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler.step()",
            "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler.state_dict()",
            "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler.load_state_dict()",
        ),
    ),
)


class Package:
    """The sources of a package, unpacked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, module: str, name: str, *member: str) -> ast.AST | None:
        """What defines a function, a class or a member of it, in the module or where that has it
        from."""
        path = self._folder / module.replace(".", "/")
        is_folder = path.is_dir()
        file = path / "__init__.py" if is_folder else path.with_suffix(".py")
        if not file.exists():
            return None
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.ClassDef() if node.name == name:
                    return _member(node, *member) if member else node
                case ast.FunctionDef() if node.name == name and not member:
                    return node
                case ast.ImportFrom() if name in {each.asname or each.name for each in node.names}:
                    return self.find(_imported(module, node, is_folder), name, *member)
        return None


def _member(made: ast.ClassDef, name: str) -> ast.AST | None:
    """What defines a member of the class: a method, a field, or an assignment to `self`."""
    for node in ast.walk(made):
        match node:
            case ast.FunctionDef(name=found) | ast.AnnAssign(target=ast.Name(id=found)):
                pass
            case ast.Attribute(value=ast.Name(id="self"), attr=found, ctx=ast.Store()):
                pass
            case ast.Subscript(
                value=ast.Attribute(value=ast.Name(id="self"), attr="__dict__"),
                slice=ast.Constant(value=found),
                ctx=ast.Store(),
            ):
                pass
            case _:
                continue
        if found == name:
            return node
    return None


def _imported(module: str, node: ast.ImportFrom, is_folder: bool) -> str:
    """The full name of the module that an import in `module` names."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    kept = parts[: len(parts) - node.level + is_folder]
    return ".".join([*kept, *filter(None, [node.module])])


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Downloads a package as the document names it, alone."""

    def download(name: str) -> Package:
        (version,) = re.findall(rf"\b{name} (\d[\d.]*\d)", TEXT)
        folder = tmp_path_factory.mktemp(name)
        command = ["-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run(
            [sys.executable, *command, "--dest", str(folder), f"{name}=={version}"], check=True
        )
        (archive,) = folder.iterdir()
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(folder)
            return Package(folder)
        with tarfile.open(archive) as source:
            source.extractall(folder, filter="data")
        (unpacked,) = (each for each in folder.iterdir() if each.is_dir())
        return Package(unpacked)

    return download


def code(title: str) -> list[ast.Module]:
    """The Python blocks of the section."""
    section = TEXT.split(f"### {title}\n")[1].split("\n### ")[0]
    return [ast.parse(block) for block in re.findall(r"(?ms)^```python\n(.*?)^```", section)]


def foreign(title: str) -> Iterator[str]:
    """Names that the section takes from packages that are not ours."""
    for tree in code(title):
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name(id=root)) if root in OURS:
                    pass
                case ast.Attribute(attr=name) if _root(node) not in OURS:
                    yield name
                case ast.ImportFrom(module=str(module), names=names) if module not in OURS:
                    yield from (each.name for each in names)


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.title)
def test_what_a_recipe_takes_is_in_the_package(recipe: Recipe, package: Open) -> None:
    sources = package(recipe.package)
    missing = [use for use in recipe.uses if not _is_there(use, sources)]
    assert not missing


def _is_there(use: str, sources: Package) -> bool:
    parts = re.fullmatch(r"([\w.]+):([\w.]+)(?:\(([\w, ]*)\))?", use)
    assert parts is not None, use
    module, names, arguments = parts.groups()
    found = sources.find(module, *names.split("."))
    if arguments is None or found is None:
        return found is not None
    if not isinstance(found, ast.FunctionDef):
        return False
    taken = {each.arg for each in (*found.args.args, *found.args.kwonlyargs)}
    return set(filter(None, arguments.split(", "))) <= taken


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.title)
def test_all_that_a_recipe_takes_is_looked_for(recipe: Recipe) -> None:
    looked_for = {word for use in recipe.uses for word in re.findall(r"\w+", use)}
    assert set(foreign(recipe.title)) <= looked_for | OF_TORCH
