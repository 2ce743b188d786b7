"""The house rules that no linter knows: docstrings, names, sizes, who reads the environment.

A function has to be seen at once. A module may be as long as its idea: a ceiling on modules makes
people cut one class in two.

An exception is listed here with its reason, or it does not exist. A listed exception that is no
longer needed fails too.
"""

from __future__ import annotations

import ast
import functools
import operator
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.utils._device

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCE_ROOTS = tuple(PROJECT["tool"]["setuptools"]["packages"]["find"]["where"])
OTHER_ROOTS = ("charts", "tests", "benchmarks", "examples", "gpu")

FUNCTION_LINES_MAX = 70

LONG_FUNCTIONS = {
    "trainer_sdk/holdfast/_init.py:init": "most of it describes the arguments of a session",
}
"""`path:qualified name` → why it is better long."""

LEFTOVERS = tuple(first + second for first, second in (("TO", "DO"), ("FIX", "ME"), ("XX", "X")))

FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def _modules(*roots: str) -> list[Path]:
    return sorted(
        path
        for root in roots
        for path in (ROOT / root).rglob("*.py")
        if not path.stem.endswith(("_pb2", "_pb2_grpc"))  # generated
    )


SOURCES = _modules(*SOURCE_ROOTS)
EVERYTHING = _modules(*SOURCE_ROOTS, *OTHER_ROOTS)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _functions(node: ast.AST, within: str = "") -> Iterator[tuple[str, int]]:
    """(qualified name, lines) of each function below `node`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTION | ast.ClassDef):
            name = f"{within}{child.name}"
            if not isinstance(child, ast.ClassDef):
                yield name, (child.end_lineno or child.lineno) - child.lineno + 1
            yield from _functions(child, f"{name}.")
        else:
            yield from _functions(child, within)


def _none(found: list[str], rule: str) -> None:
    assert not found, "\n  ".join([f"{rule}:", *found])


def test_functions_are_short() -> None:
    lines = {
        f"{_name(path)}:{name}": count
        for path in EVERYTHING
        for name, count in _functions(_tree(path))
    }
    long = {name: count for name, count in lines.items() if count > FUNCTION_LINES_MAX}
    _none(
        [f"{name}: {count} lines" for name, count in long.items() if name not in LONG_FUNCTIONS],
        f"at most {FUNCTION_LINES_MAX} lines: split by what it decides, or list it with a reason",
    )
    _none([name for name in LONG_FUNCTIONS if name not in long], "no longer needs its exception")


def test_every_module_has_a_docstring() -> None:
    """Tests are exempt: they mirror the module that they test, and their names are sentences."""
    paths = [*SOURCES, *_modules("charts", "benchmarks", "examples", "gpu")]
    _none([_name(path) for path in paths if not ast.get_docstring(_tree(path))], "no docstring")


def test_tensors_of_the_session_are_not_on_the_scripts_default_device() -> None:
    """After `torch.set_default_device("cuda")` what names no device is on that one. Parameters of
    layers follow the script."""
    of_torch = {one.__name__ for one in torch.utils._device._device_constructors()}
    found = []
    for path in _modules("trainer_sdk"):
        calls = [node for node in ast.walk(_tree(path)) if isinstance(node, ast.Call)]
        called = {id(node): ast.unparse(node.func) for node in calls}
        exempt = {
            id(below)
            for node in calls
            if called[id(node)] == "nn.Parameter"
            for below in ast.walk(node)
        }
        found += [
            f"{_name(path)}:{node.lineno}"
            for node in calls
            if called[id(node)].removeprefix("torch.") in of_torch
            and called[id(node)].startswith("torch.")
            and id(node) not in exempt
            and "device" not in {keyword.arg for keyword in node.keywords}
        ]
    _none(found, "give it a device")


def test_everything_public_in_core_has_a_docstring() -> None:
    undocumented = [
        f"{_name(path)}:{node.lineno} {node.name}"
        for path in _modules("core")
        for node in _tree(path).body
        if isinstance(node, FUNCTION | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    _none(undocumented, "public in core without a docstring")


def test_no_package_takes_the_name_of_the_standard_operator_module() -> None:
    """Our source root `operator/` must not become importable, nor a test folder beside it."""
    stdlib = Path(sysconfig.get_path("stdlib")).resolve()
    assert Path(str(operator.__file__)).resolve().parent == stdlib
    inits = [path for root in ("operator", "tests") for path in (ROOT / root).rglob("__init__.py")]
    shadows = [path for path in inits if path.parent.name == "operator"]
    below_roots = [path for root in SOURCE_ROOTS for path in (ROOT / root).rglob("operator")]
    shadows += [path for path in below_roots if path.is_dir()]
    _none([_name(path) for path in shadows], "hides the standard library's operator")


def test_tests_are_no_packages() -> None:
    _none([_name(path) for path in (ROOT / "tests").rglob("__init__.py")], "delete it")


def _reads_environment(node: ast.AST) -> bool:
    names = {"environ", "environb", "getenv"}
    match node:
        case ast.Attribute(value=ast.Name(id="os"), attr=attr):
            return attr in names
        case ast.ImportFrom(module="os", names=imported):
            return any(alias.name in names for alias in imported)
        case _:
            return False


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_one_module_of_each_application_reads_the_environment(root: str) -> None:
    readers = [
        _name(path)
        for path in _modules(root)
        if any(_reads_environment(node) for node in ast.walk(_tree(path)))
    ]
    strangers = [name for name in readers if not name.endswith("/_environment.py")]
    _none(strangers, "only a module named _environment reads the environment")
    assert len(readers) <= 1, readers


def test_nothing_is_left_for_later() -> None:
    found = [
        f"{_name(path)}:{number}: {word}"
        for path in EVERYTHING
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        for word in LEFTOVERS
        if word in line
    ]
    _none(found, "finish it, or file an issue")


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_json_is_decoded_by_decoders_made_at_import(path: Path) -> None:
    """`decode(data, type=T)` looks at T when it is first called; in two threads, that crashes."""
    late = [
        node.lineno
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).startswith("msgspec.")
        and ast.unparse(node.func).endswith(".decode")
        and any(keyword.arg == "type" for keyword in node.keywords)
    ]
    assert not late, f"make a Decoder at the module's top, lines {late}"


# --- nothing without a caller ---------------------------------------------------------------------

UNCALLED = {
    "holdfast.integrations.deepspeed.protect": "scripts that train with DeepSpeed call it",
    "holdfast.integrations.megatron.protect": "scripts that train with Megatron-Core call it",
    "holdfast.moe.place_experts": "scripts call it, as that of docs/elastic.md does",
}
"""Public name, qualified → why it stays although only tests use it."""


def _defined(statement: ast.stmt) -> set[str]:
    """The public names that a statement at a module's top gives a meaning."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            names = {statement.name}
        case ast.Assign(targets=targets):
            nodes = (node for target in targets for node in ast.walk(target))
            names = {node.id for node in nodes if isinstance(node, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            names = {name}
        case _:
            names = set()
    return {name for name in names if not name.startswith("_")}


def _used(module: str, tree: ast.Module) -> Iterator[str]:
    """The qualified names that a module imports, or uses beside their own definition."""
    imported: dict[str, str] = {}
    attributes: list[tuple[str, str]] = []
    for statement in tree.body:
        own = _defined(statement)
        for node in ast.walk(statement):
            match node:
                case ast.ImportFrom(module=source, names=names):
                    imported |= {one.asname or one.name: f"{source}.{one.name}" for one in names}
                    yield from (f"{source}.{one.name}" for one in names)
                case ast.Name(id=name, ctx=ast.Load()) if name not in own:
                    yield f"{module}.{name}"
                case ast.Attribute(value=ast.Name(id=name), attr=attr):
                    attributes.append((name, attr))
    yield from (f"{imported[name]}.{attr}" for name, attr in attributes if name in imported)


def test_what_is_public_has_a_caller_outside_tests() -> None:
    project = PROJECT["project"]
    groups = [project["scripts"], *project["entry-points"].values()]
    used = {entry.replace(":", ".") for group in groups for entry in group.values()}
    public: set[str] = set()
    for path in [*SOURCES, *_modules("charts", "benchmarks", "examples")]:
        parts = path.relative_to(ROOT).with_suffix("").parts[path in SOURCES :]
        module = ".".join(parts).removesuffix(".__init__")
        used.update(_used(module, _tree(path)))
        if path in SOURCES:
            public |= {f"{module}.{name}" for node in _tree(path).body for name in _defined(node)}
    _none(sorted(public - used - UNCALLED.keys()), "only tests use it: take it out")
    _none(sorted(UNCALLED.keys() - (public - used)), "no longer needs its exception")
