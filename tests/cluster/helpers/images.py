"""Builds our three images, and Redis for the chart, without an image registry, on a base of Debian.

Each layer is made once: the base by debootstrap, the third-party packages by pip, and ours, last,
from the work tree; so a change of a source file costs seconds. What pip and apt of this machine are
configured with is lent to the build, and stays out of the images.
"""

from __future__ import annotations

import ast
import hashlib
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from binaries import Binaries
from machine import ROOT, ClusterError, cache, locked, run

DAEMON = "localhost/holdfast-daemon:dev"
OPERATOR = "localhost/holdfast-operator:dev"
TRAINER = "localhost/holdfast-trainer:dev"
REDIS = "localhost/redis:dev"
PAUSE = "localhost/pause:1"

_DOCKERFILES = {
    DAEMON: ROOT / "Dockerfile.daemon",
    OPERATOR: ROOT / "Dockerfile.operator",
    TRAINER: ROOT / "Dockerfile.trainer",
    REDIS: ROOT / "tests" / "cluster" / "Dockerfile.redis",
}
_SUITE = "bookworm"
_SUITE_PYTHON = (3, 11)
_PACKAGES = "python3,python3-venv,ca-certificates"
_UNNEEDED = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache", "var/lib/apt")
_PUBLIC_MIRROR = "http://deb.debian.org/debian"
_CERTIFICATES = Path("/etc/ssl/certs")
_STORED_MAX = 300
"""Layers of images in the builder's store; it forgets none by itself, so begin anew then."""
_TIMESTAMP = "315532800"
"""Of every file in the images, in Unix seconds: the first of 1980, where the time of zip begins."""


def build() -> Path:
    """Build all images; an OCI archive that holds them.

    Raises:
        ClusterError: with the builder's words.
    """
    require_python()
    base = _build_base()
    key = _key(base)
    archive = cache() / "images" / f"holdfast-{key}.tar"
    if not archive.exists():
        with locked(cache() / "images" / "lock"):
            if not archive.exists():
                _build_all(base, archive)
                _forget_all_but(archive)
    return archive


def require_python() -> None:
    """The trainers import this machine's torch, so its Python must be that of the base.

    Raises:
        ClusterError: when it is not.
    """
    if sys.version_info[:2] != _SUITE_PYTHON:
        wanted = ".".join(map(str, _SUITE_PYTHON))
        raise ClusterError(f"The cluster's images have Python {wanted}: make PYTHON=python{wanted}")


def build_pause(binaries: Binaries) -> Path:
    """Build the image that holds the namespaces of pods; its archive."""
    program = binaries.find("pause")
    archive = cache() / "images" / f"{program.parent.name}.tar"
    if not archive.exists():
        with locked(cache() / "images" / "lock"), _scratch() as folder:
            dockerfile = folder / "Dockerfile"
            dockerfile.write_text('FROM scratch\nCOPY pause /\nENTRYPOINT ["/pause"]\n')
            _buildah("bud", "-f", dockerfile, "-t", PAUSE, program.parent)
            _push([PAUSE], archive)
    return archive


def _build_all(base: str, archive: Path) -> None:
    with _scratch() as folder:
        lent = _lend_pip_configuration(folder)
        arguments = [
            *(f"BASE={base}", f"SOURCE_DATE_EPOCH={_TIMESTAMP}", "TORCH=0"),
            *(f"MIRROR={_mirror()}", f"SUITE={_SUITE}"),
        ]
        for image, dockerfile in _DOCKERFILES.items():
            print(f"image {image}: building ...", flush=True)
            _buildah(
                "bud",
                *("--layers", "--isolation", "chroot", "--network", "host"),
                *("--timestamp", _TIMESTAMP, *lent),
                *(word for argument in arguments for word in ("--build-arg", argument)),
                *("-f", dockerfile, "-t", image, ROOT),
            )
        _push(list(_DOCKERFILES), archive)


def _push(images: list[str], archive: Path) -> None:
    """Several images in one archive share the layers that they have in common."""
    with _scratch() as folder:
        for image in images:
            # zstd takes a fifth of gzip's time, here and on every node.
            fast = ("--compression-format", "zstd", "--compression-level", "1")
            _buildah("push", *fast, image, f"oci:{folder}:{image}")
        new = archive.with_suffix(".new")
        run("tar", "-C", folder, "-cf", new, ".")
        new.rename(archive)


def _forget_all_but(archive: Path) -> None:
    for other in archive.parent.glob("holdfast-*.tar"):
        if other != archive:
            other.unlink()


def _key(base: str) -> str:
    """Hash of everything that the images are made from."""
    digest = hashlib.sha256(base.encode())
    for file in _inputs():
        digest.update(file.relative_to(ROOT).as_posix().encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _inputs() -> Iterator[Path]:
    yield from _DOCKERFILES.values()
    for name in (".dockerignore", "LICENSE", "README.md", "constraints.txt", "pyproject.toml"):
        yield ROOT / name
    for kind in ("", "_elastic", "_pipeline"):
        yield ROOT / "examples" / f"train_moe{kind}.py"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for root in project["tool"]["setuptools"]["packages"]["find"]["where"]:
        for file in sorted((ROOT / root).rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                yield file


# ---------------------------------------------------------------------------------------- base


def _build_base() -> str:
    """The image that stands in for python:3.11-slim; its name."""
    key = hashlib.sha256(repr([_SUITE, _PACKAGES, _UNNEEDED]).encode()).hexdigest()[:16]
    image, archive = f"localhost/base:{key}", cache() / "images" / f"base-{key}.tar"
    with locked(cache() / "images" / "lock"):
        if not archive.exists():
            print(f"image {image}: debootstrap of {_SUITE} ...", flush=True)
            _bootstrap(archive)
        if len(_buildah("images", "--quiet", "--all").split()) > _STORED_MAX:
            _buildah("rmi", "--all", "--force")
        if not _buildah("images", "--quiet", "--filter", f"reference={image}").strip():
            with _scratch() as folder:
                (folder / "Dockerfile").write_text(f"FROM scratch\nADD {archive.name} /\n")
                # Without a time stamp: compiled modules of Debian go by the date of their source.
                _buildah("bud", "-f", folder / "Dockerfile", "-t", image, archive.parent)
    return image


def _bootstrap(archive: Path) -> None:
    with _scratch() as folder:
        rootfs = folder / "rootfs"
        kind = ("--variant=minbase", f"--include={_PACKAGES}")
        run("debootstrap", *kind, _SUITE, rootfs, _mirror())
        for name in _UNNEEDED:
            shutil.rmtree(rootfs / name, ignore_errors=True)
            (rootfs / name).mkdir()
        # What the bootstrap leaves of this machine; and no packages are installed later.
        for name in ("etc/resolv.conf", "etc/hostname", "etc/apt/sources.list"):
            (rootfs / name).unlink(missing_ok=True)
        new = archive.with_suffix(".new")
        run("tar", "-C", rootfs, "--numeric-owner", "--exclude=./dev/*", "-cf", new, ".")
        new.rename(archive)


def _mirror() -> str:
    """The mirror that this machine's apt uses for the suite, or the public one."""
    files = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    for file in files:
        if not file.is_file() or file.suffix not in (".list", ".sources"):
            continue
        for stanza in _stanzas(file):
            suites, uris = stanza
            if _SUITE in suites and uris:
                return uris[0]
    return _PUBLIC_MIRROR


def _stanzas(file: Path) -> Iterator[tuple[list[str], list[str]]]:
    """Suites and addresses of each entry of an apt source list, in either format."""
    text = file.read_text()
    if file.suffix == ".list":
        for line in text.splitlines():
            words = [word for word in line.split() if not word.startswith("[")]
            if words[:1] == ["deb"] and len(words) > 2:
                yield [words[2]], [words[1]]
        return
    for paragraph in text.split("\n\n"):
        fields = {
            name.strip(): value.split()
            for name, found, value in (line.partition(":") for line in paragraph.splitlines())
            if found and not name.startswith("#")
        }
        yield fields.get("Suites", []), fields.get("URIs", [])


# ------------------------------------------------------------------------------------- buildah


def _buildah(command: str, *words: str | Path) -> str:
    store = cache() / "images" / "store"
    return run("buildah", "--root", store, "--runroot", store / "run", command, *words)


def _lend_pip_configuration(folder: Path) -> Iterable[str]:
    """Mounts that give the build's pip what this machine's pip is configured with."""
    settings: dict[str, str] = {}
    for line in run(sys.executable, "-m", "pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section == ":env:" or key not in settings:  # the environment beats the files
            settings[key] = str(ast.literal_eval(value))
    (folder / "pip.conf").write_text(
        "[global]\n" + "".join(f"{k} = {v}\n" for k, v in sorted(settings.items()))
    )
    paths = {p for v in settings.values() for p in map(Path, v.split()) if p.is_absolute()}
    mounts = {_CERTIFICATES, *(p for p in paths if _CERTIFICATES not in p.parents)}
    lent = {folder / "pip.conf": Path("/etc/pip.conf"), **{p: p for p in mounts if p.exists()}}
    return [w for src, dst in lent.items() for w in ("--volume", f"{src}:{dst}:ro")]


@contextmanager
def _scratch() -> Iterator[Path]:
    (cache() / "images").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache() / "images", prefix="scratch-") as folder:
        yield Path(folder)
