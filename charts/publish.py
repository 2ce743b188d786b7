"""`make images` and `make push`: build Holdfast's images with the installed builder, push them, and
write the files with which a cluster uses them.

    python charts/publish.py build [--registry registry.example/team] [--tag 1] [-- MORE...]
    python charts/publish.py push --registry registry.example/team

Without a registry the images get the names that the chart and the example use by default, for
clusters that read this machine's images. Contacts no registry itself, and changes no cluster.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "charts" / "holdfast"
EXAMPLE = ROOT / "examples" / "moe-job.yaml"
FILES = ROOT / "build" / "push"

IMAGES = ("daemon", "operator", "trainer")
BUILDERS = {"docker": "build", "podman": "build", "buildah": "bud"}
"""Subcommand of each program that builds from a Dockerfile; the first installed program is used."""

_REGISTRY = re.compile(r"[a-z0-9][a-z0-9.-]*(:[0-9]+)?(/[a-z0-9][a-z0-9._-]*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


class PublishError(Exception):
    """A failure to build or push, with advice."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("command", choices=["build", "push"])
    parser.add_argument("--registry", default="", metavar="HOST/PATH")
    parser.add_argument("--tag", default="")
    parser.add_argument("--builder", default="", metavar="PROGRAM")
    parser.add_argument("--files", type=Path, default=FILES, metavar="DIR")
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    options, more = parser.parse_args(words[:end]), words[end + 1 :]
    try:
        if options.command == "build":
            build(options.registry, options.tag, options.builder, more)
        else:
            print(push(options.registry, options.tag, options.builder, options.files))
    except PublishError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def reference(image: str, registry: str = "", tag: str = "") -> str:
    """Full name of one of Holdfast's images; registry and tag default to the chart's."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["image"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    registry = registry or values["registry"]
    tag = tag or values["tag"] or chart["appVersion"]
    if not _REGISTRY.fullmatch(registry):
        raise PublishError(
            f"REGISTRY={registry!r} is no place for images: give host and path without a scheme, "
            f"as in REGISTRY=registry.example/team"
        )
    if not _TAG.fullmatch(tag):
        raise PublishError(f"TAG={tag!r} is no tag: letters, digits, dots, dashes and underscores")
    return f"{registry}/holdfast-{image}:{tag}"


def build(registry: str, tag: str, builder: str, more: Sequence[str]) -> None:
    """Build all images.

    Raises:
        PublishError: when no builder is installed, or it fails.
    """
    names = {image: reference(image, registry, tag) for image in IMAGES}
    program = _find(builder)
    word = BUILDERS.get(Path(program).name, "build")
    for image, name in names.items():
        file = ROOT / f"Dockerfile.{image}"
        print(f"{name}: building with {Path(program).name} ...", flush=True)
        _run(program, word, "-f", str(file), "-t", name, *more, str(ROOT))


def push(registry: str, tag: str, builder: str, files: Path) -> str:
    """Push all images, and write the values and the job that name them; return instructions.

    Raises:
        PublishError: without a registry, when no builder is installed, or when it fails.
    """
    if not registry:
        raise PublishError("name a registry: make push REGISTRY=registry.example/team")
    names = {image: reference(image, registry, tag) for image in IMAGES}
    program = _find(builder)
    for name in names.values():
        print(f"{name}: pushing with {Path(program).name} ...", flush=True)
        _run(program, "push", name)
    files.mkdir(parents=True, exist_ok=True)
    values, job = files / "values.yaml", files / "moe-job.yaml"
    image = {"registry": registry, "tag": names["daemon"].rpartition(":")[2]}
    values.write_text(yaml.safe_dump({"image": image}), encoding="utf-8")
    text = EXAMPLE.read_text(encoding="utf-8")
    job.write_text(text.replace(reference("trainer"), names["trainer"]), encoding="utf-8")
    return f"""\
Install the pushed images, and train (docs/install.md explains the values that matter):
  helm install holdfast charts/holdfast --namespace holdfast-system --create-namespace \\
    --values {_short(values)}
  helm test holdfast --namespace holdfast-system
  kubectl apply -f {_short(job)}"""


def _find(wanted: str) -> str:
    for name in (wanted,) if wanted else BUILDERS:
        found = shutil.which(name)
        if found is not None:
            return found
    if wanted:
        raise PublishError(
            f"BUILDER={wanted!r} is not on this machine: install it, or leave it out"
        )
    raise PublishError(
        f"None of {', '.join(BUILDERS)} is on this machine: install one of them (Debian: apt-get "
        f"install buildah), or name another with BUILDER=PROGRAM that has `build` and `push`"
    )


def _run(*words: str) -> None:
    code = subprocess.run(words, check=False).returncode
    if code != 0:
        raise PublishError(f"`{' '.join(words)}` ended with code {code}: see above")


def _short(path: Path) -> Path:
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


if __name__ == "__main__":
    raise SystemExit(main())
