"""Compiles Kubernetes, containerd, CoreDNS, helm and other projects' controllers from Go modules,
once, into the cache.

Each folder below `go/` is a Go module that names the commands it wants as tools; its `go.sum` is
what makes the result the same everywhere. What can be of one module is: commands share the
compilation of packages, into which most of the time goes, only if they use the same versions. (This
containerd needs an older interface of the kubelet.) The compiled commands are static, so that they
need no C compiler and run in any node.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from machine import ClusterError, cache, environment, locked, require, run

SOURCES = Path(__file__).resolve().parents[1] / "go"
KWOK_STAGES = "kwok-stages.yaml"
"""What simulated nodes and pods do; KWOK does nothing without it."""

MANIFESTS = "manifests.yaml"
"""Resources and webhooks of a controller."""

_COMPONENTS = ("config/components/crd/bases/*.yaml", "config/components/webhook/manifests.yaml")
_KWOK_FOLDERS = ("node/fast", "node/heartbeat-with-lease", "pod/fast")
_PROGRESS_PACKAGES = 250


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """One folder below `go/`."""

    name: str
    what: tuple[str, ...] = ("tool",)
    """Packages to compile; `tool` is all that the module names as its tools."""
    tags: str = ""
    path: str = ""
    """Of another project's controller: its own module."""
    manifests: tuple[str, ...] = ()
    """Files of that module with its resources and webhooks."""

    @property
    def source(self) -> Path:
        return SOURCES / self.name


MODULES = (
    Module(name="pause", what=(".",)),
    Module(name="containerd", tags="no_btrfs no_devmapper no_zfs"),
    Module(name="kubernetes", what=("tool", "./coredns")),
)
CONTROLLERS = {
    each.name: each
    for each in (
        Module(name="jobset", path="sigs.k8s.io/jobset", manifests=_COMPONENTS),
        Module(name="kueue", path="sigs.k8s.io/kueue", manifests=_COMPONENTS),
        Module(
            name="trainer",
            path="github.com/kubeflow/trainer/v2",
            manifests=(
                "manifests/base/crds/trainer.kubeflow.org_*.yaml",
                "manifests/base/webhook/manifests.yaml",
            ),
        ),
    )
}
"""Compiled for the tests that need one, since no cluster does."""


@dataclass(frozen=True, slots=True)
class Binaries:
    """Where the compiled commands are."""

    folders: tuple[Path, ...]

    def find(self, name: str) -> Path:
        """The file of a command, or of another thing that was made with it."""
        for folder in self.folders:
            if (folder / name).exists():
                return folder / name
        raise ClusterError(f"no {name} was built; there is {self.search_path}")

    @property
    def search_path(self) -> str:
        """For PATH."""
        return ":".join(map(str, self.folders))


def build() -> Binaries:
    """Compile what the cache does not have yet; prints progress.

    Raises:
        ClusterError: with the compiler's words.
    """
    return Binaries(tuple(_build(module) for module in MODULES))


def build_controller(name: str) -> Path:
    """Compile another project's controller, if the cache does not have it yet.

    Returns:
        The folder with its command and `MANIFESTS`.

    Raises:
        ClusterError: with the compiler's words.
    """
    return _build(CONTROLLERS[name])


def kubernetes_version() -> str:
    """As it stands in go.mod, with its `v`."""
    for line in (SOURCES / "kubernetes" / "go.mod").read_text().splitlines():
        words = line.split()
        if words[:1] == ["k8s.io/kubernetes"]:
            return words[1]
    raise ClusterError("go/kubernetes/go.mod names no k8s.io/kubernetes")


def _arguments(module: Module) -> list[str]:
    version = kubernetes_version()
    major, minor = version.removeprefix("v").split(".")[:2]
    variables = {"gitVersion": version, "gitMajor": major, "gitMinor": minor}
    package = "k8s.io/component-base/version"
    flags = " ".join(["-s -w", *(f"-X {package}.{k}={v}" for k, v in variables.items())])
    return ["-trimpath", "-mod=readonly", "-tags", module.tags, "-ldflags", flags]


def _key(module: Module) -> str:
    digest = hashlib.sha256(repr([module.what, _arguments(module)]).encode())
    for file in sorted(each for each in module.source.rglob("*") if each.is_file()):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _build(module: Module) -> Path:
    target = cache() / "binaries" / f"{module.name}-{_key(module)}"
    if target.exists():
        return target
    with locked(cache() / "binaries" / "lock"):
        if target.exists():  # made by another clone while this one waited
            return target
        started = time.monotonic()
        new = target.with_suffix(".new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        _compile(module, new)
        if module.name == "kubernetes":
            (new / "server").rename(new / "etcd")  # go names a command after its folder
            (new / KWOK_STAGES).write_text("---\n".join(_kwok_stages(module)))
        if module.name in CONTROLLERS:
            (new / MANIFESTS).write_text("---\n".join(_manifests(module)))
        new.rename(target)
        print(f"{module.name}: compiled in {time.monotonic() - started:.0f} s", flush=True)
    return target


def _compile(module: Module, target: Path) -> None:
    print(f"{module.name}: compiling, once; Kubernetes takes some minutes ...", flush=True)
    command = ["go", "build", "-v", *_arguments(module), "-o", f"{target}/", *module.what]
    with subprocess.Popen(
        command,
        cwd=module.source,
        env={**environment(), "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false"},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as compiler:
        assert compiler.stderr is not None
        lines = []
        for line in compiler.stderr:  # with -v: the name of each package that is compiled
            lines.append(line)
            if len(lines) % _PROGRESS_PACKAGES == 0:
                print(f"{module.name}: {len(lines)} packages", flush=True)
    if compiler.returncode != 0:
        raise ClusterError(f"go build of {module.name} failed:\n{''.join(lines[-20:])}")


def _sources(module: Module, path: str) -> Path:
    """Where the sources of a Go module lie that `module` requires."""
    return Path(run("go", "list", "-m", "-f", "{{.Dir}}", path, cwd=module.source).strip())


def _manifests(module: Module) -> Iterator[str]:
    sources = _sources(module, module.path)
    for pattern in module.manifests:
        for file in sorted(sources.glob(pattern)):
            yield file.read_text()


def _kwok_stages(module: Module) -> Iterator[str]:
    stages = _sources(module, "sigs.k8s.io/kwok") / "kustomize" / "stage"
    for folder in _KWOK_FOLDERS:
        for file in sorted((stages / folder).glob("*.yaml")):
            if file.name != "kustomization.yaml":
                yield file.read_text()


def main() -> int:
    """Compile what the cache does not have yet; the exit code."""
    try:
        require()
        build()
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
