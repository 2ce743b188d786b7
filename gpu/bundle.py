"""`make gpu-bundle`: the folder to bring to a CUDA machine that has no network.

It holds this checkout's files, the wheels that `machine.toml` does not find there, and the
distribution's metadata, by which torchrun finds our rendezvous. Refuses a bundle that is too large
or that imports a package which neither it nor the machine has; proving that it runs is the tests'
part.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gpu import ROOT, SOURCES

MACHINE = ROOT / "gpu" / "machine.toml"
CONSTRAINTS = ROOT / "constraints.txt"
OUT = ROOT / "build" / "gpu-bundle"

TESTS = ("tests/gpu", "tests/unit/sdk", "tests/conftest.py")
RUN = (*SOURCES, "gpu", "benchmarks/gpu", "benchmarks/experts", *TESTS)
"""What runs on the machine; its imports are checked."""


class BundleError(Exception):
    """Reason why there is no bundle, with advice."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR")
    parser.add_argument("--cache", type=Path, required=True, metavar="DIR", help="keeps the wheels")
    options = parser.parse_args(arguments)
    try:
        machine = tomllib.loads(MACHINE.read_text(encoding="utf-8"))
        make(options.out, wheels_for(machine, options.cache), machine)
    except BundleError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{options.out}: {_mib(options.out):.1f} MiB; there: gpu/run.sh --out DIR")
    return 0


def make(out: Path, wheels: Path, machine: dict[str, Any]) -> None:
    """Replace `out` by a bundle with the wheels of the folder `wheels`.

    Raises:
        BundleError: it would be too large, or imports what is neither brought nor installed there,
            or cannot collect its tests there.
    """
    new = out.with_name(out.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    for name in _tracked():
        (new / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, new / name)
    shutil.copytree(wheels, new / "wheels")
    if _mib(new) > machine["bundle_mib_max"]:
        raise BundleError(
            f"the bundle has {_mib(new):.1f} MiB, more than {machine['bundle_mib_max']}: take "
            f"packages out of {_name(MACHINE)}"
        )
    if missing := unresolved(new, machine):
        raise BundleError(
            "these modules are imported, and neither brought nor installed there: "
            f"{', '.join(missing)}; state in {_name(MACHINE)} where they come from"
        )
    if files := uncollectable(new, machine):
        raise BundleError(
            "these files of tests need modules that are left out there: "
            f"{', '.join(files)}; import them in the tests, by pytest.importorskip"
        )
    _write_metadata(new)
    shutil.rmtree(out, ignore_errors=True)
    new.rename(out)


def wheels_for(machine: dict[str, Any], cache: Path) -> Path:
    """Folder with the wheels that the machine lacks, downloaded once for each list and pins.

    Raises:
        BundleError: a package has no wheel for that machine, or there is no network.
    """
    content = MACHINE.read_bytes() + CONSTRAINTS.read_bytes()
    folder = cache / f"gpu-wheels-{hashlib.sha256(content).hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    new = folder.with_name(folder.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    wanted: set[str] = {
        canonicalize_name(name) for group in machine["brought"].values() for name in group
    }
    there: set[str] = {canonicalize_name(name) for name in machine["installed"]}
    while wanted:
        _download(sorted(wanted), machine, new)
        there |= wanted
        wanted = {need for wheel in new.glob("*.whl") for need in needs(wheel, machine)} - there
    new.rename(folder)
    return folder


def unresolved(bundle: Path, machine: dict[str, Any]) -> list[str]:
    """Modules that the bundle's code imports and that will not be there."""
    known = set(sys.stdlib_module_names) | {"gpu", "benchmarks", "charts", "examples"}
    known |= set(machine["installed"]) | set(machine["left_out"]["modules"])
    for wheel in (bundle / "wheels").glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
        known |= {re.split(r"[/.]", name)[0] for name in names if name.endswith((".py", ".so"))}
    project = tomllib.loads((bundle / "pyproject.toml").read_text(encoding="utf-8"))
    helpers = project["tool"]["pytest"]["ini_options"]["pythonpath"]
    known |= {path.stem for root in (*SOURCES, *helpers) for path in (bundle / root).glob("*")}
    files = [path for part in RUN for path in _python_files(bundle / part)]
    return sorted({name for path in files for name in _imported(path)} - known)


def uncollectable(bundle: Path, machine: dict[str, Any]) -> list[str]:
    """Files of tests that import a left-out module before any test begins, as `FILE (MODULE)`:
    none of their tests would run."""
    left_out = set(machine["left_out"]["modules"])
    files = [path for part in TESTS for path in _python_files(bundle / part)]
    return [
        f"{path.relative_to(bundle).as_posix()} ({name})"
        for path in files
        if path.name.startswith(("test_", "conftest"))
        for name in sorted(_imported_at_once(path) & left_out)
    ]


def _python_files(part: Path) -> list[Path]:
    return [part] if part.is_file() else sorted(part.rglob("*.py"))


def _imported(path: Path) -> set[str]:
    """Names of the top-level modules that a file imports anywhere."""
    return _modules(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def _imported_at_once(path: Path) -> set[str]:
    """Names of the top-level modules without which a file of tests cannot be imported, and that it
    does not skip its tests for."""
    text = path.read_text(encoding="utf-8")
    return _modules(ast.parse(text).body).difference(re.findall(r'importorskip\("(\w+)', text))


def _modules(nodes: Iterable[ast.AST]) -> set[str]:
    names = set[str]()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def _download(names: Sequence[str], machine: dict[str, Any], folder: Path) -> None:
    """Download pinned wheels of `names` for the machine, without what they need."""
    target = ["--python-version", machine["python"], "--implementation", "cp"]
    target += ["--abi", machine["abi"], "--abi", "abi3", "--abi", "none"]
    for platform in machine["platforms"]:
        target += ["--platform", platform]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", *target, "--constraint", str(CONSTRAINTS)]
    done = subprocess.run([*command, "--dest", str(folder), *names], check=False)
    if done.returncode != 0:
        raise BundleError(f"no wheels of {', '.join(names)} for that machine: see above")


def needs(wheel: Path, machine: dict[str, Any]) -> Iterator[str]:
    """Names of the packages that a wheel requires on the machine."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (
            found
            for found in archive.namelist()
            if re.fullmatch(r"[^/]+\.dist-info/METADATA", found)
        )
        headers = HeaderParser().parsestr(archive.read(name).decode())
    there = {"python_version": machine["python"], "python_full_version": f"{machine['python']}.3"}
    for line in headers.get_all("Requires-Dist", []):
        need = Requirement(line)
        environment = {**default_environment(), **there, "extra": ""}
        if need.marker is None or need.marker.evaluate(environment):
            yield canonicalize_name(need.name)


def _tracked() -> list[str]:
    """This checkout's files, those not yet added too."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BundleError(f"git cannot list this checkout's files: {done.stderr.strip()}")
    names = sorted(set(done.stdout.split("\0")) - {""})
    return [name for name in names if (ROOT / name).is_file()]


def _write_metadata(bundle: Path) -> None:
    """Write the distribution's metadata, as an installation would, into a folder of its own."""
    folder = bundle / "metadata"
    folder.mkdir()
    code = "import sys; from setuptools import build_meta as b; "
    code += "b.prepare_metadata_for_build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, cwd=bundle, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BundleError(f"setuptools cannot describe the distribution: {done.stderr.strip()}")


def _mib(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


if __name__ == "__main__":
    raise SystemExit(main())
