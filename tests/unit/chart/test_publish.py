"""Images are built and pushed by what there is, under the names that charts and jobs use."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from publish import BUILDERS, EXAMPLE, IMAGES, ROOT, main, reference


class Machine:
    """Programs that note how they are called, and nothing else in PATH."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.notes = folder / "bin", folder / "notes"
        self.bin.mkdir()

    def add(self, name: str, code: int = 0) -> None:
        program = self.bin / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {self.notes}\nexit {code}\n')
        program.chmod(0o755)

    def calls(self) -> list[str]:
        return self.notes.read_text().splitlines() if self.notes.exists() else []


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine(tmp_path)
    monkeypatch.setenv("PATH", str(found.bin))
    return found


@pytest.mark.parametrize(("builder", "word"), BUILDERS.items())
def test_all_images_are_built_by_whichever_builder_is_there(
    machine: Machine, builder: str, word: str
) -> None:
    machine.add(builder)
    assert main(["build"]) == 0
    assert machine.calls() == [
        f"{builder} {word} -f {ROOT}/Dockerfile.{image} -t {reference(image)} {ROOT}"
        for image in IMAGES
    ]


def test_a_registry_a_tag_and_words_for_the_builder_are_passed_on(machine: Machine) -> None:
    machine.add("buildah")
    machine.add("docker")
    where = ("--registry", "registry.example:5000/team", "--tag", "7")
    assert main(["build", *where, "--builder", "buildah", "--", "--build-arg", "TORCH=0"]) == 0
    last = machine.calls()[-1]
    assert last.startswith("buildah bud")
    assert f"-t registry.example:5000/team/holdfast-trainer:7 --build-arg TORCH=0 {ROOT}" in last


def test_without_a_builder_the_error_names_what_to_install(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build"]) == 1
    assert capsys.readouterr().err == (
        "None of docker, podman, buildah is on this machine: install one of them (Debian: apt-get "
        "install buildah), or name another with BUILDER=PROGRAM that has `build` and `push`\n"
    )
    assert main(["push", "--registry", "registry.example", "--builder", "kaniko"]) == 1
    assert "'kaniko' is not on this machine" in capsys.readouterr().err


def test_what_the_builder_cannot_do_ends_it(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.add("podman", code=3)
    assert main(["build"]) == 1
    assert len(machine.calls()) == 1
    assert "ended with code 3: see above" in capsys.readouterr().err


def test_a_push_writes_values_and_a_job_with_the_names_that_were_pushed(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.add("docker")
    files = tmp_path / "push"
    words = ["push", "--registry", "registry.example/team", "--files", str(files)]
    assert main(words) == 0
    tag = reference("daemon").rpartition(":")[2]
    pushed = [f"registry.example/team/holdfast-{image}:{tag}" for image in IMAGES]
    assert machine.calls() == [f"docker push {name}" for name in pushed]
    values = yaml.safe_load((files / "values.yaml").read_text())
    assert values == {"image": {"registry": "registry.example/team", "tag": tag}}
    job = yaml.safe_load((files / "moe-job.yaml").read_text())
    (container,) = job["spec"]["trainer"]["template"]["spec"]["containers"]
    assert container["image"] == pushed[-1]
    assert f"--values {files}/values.yaml" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["push"], "name a registry: make push REGISTRY=registry.example/team"),
        (["push", "--registry", "https://r.example"], "'https://r.example' is no place for images"),
        (["build", "--registry", "R/x"], "'R/x' is no place for images"),
        (["build", "--registry", "r.example/"], "'r.example/' is no place for images"),
        (["build", "--tag", "a b"], "TAG='a b' is no tag"),
    ],
)
def test_a_name_that_no_registry_takes_is_refused_before_anything_is_done(
    machine: Machine, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    machine.add("docker")
    assert main(arguments) == 1
    assert message in capsys.readouterr().err
    assert machine.calls() == []


def test_the_example_uses_the_image_that_is_built_by_default() -> None:
    job = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    (container,) = job["spec"]["trainer"]["template"]["spec"]["containers"]
    assert container["image"] == reference("trainer")


def test_the_trainer_image_has_torch_unless_asked_otherwise() -> None:
    assert "ARG TORCH=1\n" in (ROOT / "Dockerfile.trainer").read_text(encoding="utf-8")
