"""`.ci/release` refuses a commit that is not fit for a release, and says all that is wrong."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def git(tree: Path, *command: str) -> None:
    author = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    subprocess.run(["git", "-C", str(tree), *author, *command], check=True, capture_output=True)


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository whose commit is fit to be released as 1.2.3."""
    copied = (
        "pyproject.toml",
        "charts/holdfast/Chart.yaml",
        "examples/moe-job.yaml",
        ".ci/release",
    )
    for name in copied:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    chart = tmp_path / "charts/holdfast/Chart.yaml"
    for path, key in ((tmp_path / "pyproject.toml", "version = "), (chart, "version: ")):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        (old,) = (line for line in lines if line.startswith(key))
        change(path, old, f'{key}"1.2.3"\n' if "=" in key else f"{key}1.2.3\n")
    (old,) = (line for line in chart.read_text().splitlines() if line.startswith("appVersion: "))
    change(chart, old, "appVersion: 1.2.3")
    (old,) = (
        line
        for line in (tmp_path / "pyproject.toml").read_text().splitlines()
        if line.startswith("Source = ")
    )
    change(tmp_path / "pyproject.toml", old, 'Source = "https://code.example/holdfast"')
    image = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    change(tmp_path / "examples/moe-job.yaml", f"trainer:{image}", "trainer:1.2.3")
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [1.2.3] - 2026-01-31\n\n- A.\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "All")
    return tmp_path


def checked(tree: Path) -> tuple[int, str]:
    done = subprocess.run(
        [str(tree / ".ci/release"), "--check"], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_a_commit_that_is_fit_passes(tree: Path) -> None:
    assert checked(tree) == (0, "This commit can be released as 1.2.3.\n")


def test_everything_that_is_wrong_is_said_at_once(tree: Path) -> None:
    change(tree / "pyproject.toml", 'version = "1.2.3"', 'version = "1.2.4.dev0"')
    change(tree / "pyproject.toml", "Source = ", "Documentation = ")
    change(tree / "CHANGELOG.md", "## [Unreleased]\n", "## [Unreleased]\n\n- B.\n")
    code, text = checked(tree)
    assert code == 1
    starts = [
        "- pyproject.toml has version 1.2.4.dev0",
        "- charts/holdfast/Chart.yaml has appVersion 1.2.3",
        "- charts/holdfast/Chart.yaml has version 1.2.3",
        "- examples/moe-job.yaml names images of another version",
        "- CHANGELOG.md has no section '## [1.2.4.dev0]",
        "- CHANGELOG.md has lines below Unreleased",
        "- pyproject.toml has no Source in [project.urls]",
        "- the work tree has changes",
    ]
    lines = text.splitlines()[1:]
    assert len(lines) == len(starts)
    assert all(map(str.startswith, lines, starts)), text


@pytest.mark.parametrize("source", [None, "https://code.example/holdfast/"])
def test_an_index_shows_a_readme_whose_links_work(tree: Path, source: str | None) -> None:
    shutil.copy(ROOT / "README.md", tree / "README.md")
    if source is None:
        change(tree / "pyproject.toml", "Source = ", "Documentation = ")
    else:
        change(tree / "pyproject.toml", "https://code.example/holdfast", source)
    command = [sys.executable, str(ROOT / "docs/site/index_readme.py"), str(tree)]
    subprocess.run(command, check=True)
    text, shown = ((each / "README.md").read_text("utf-8") for each in (ROOT, tree))
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert len(targets) > 20
    lead = "https://code.example/holdfast/blob/v1.2.3/"
    assert re.findall(r"\]\(([^)]*)\)", shown) == [lead + each for each in targets if source]
    assert re.sub(r"\]\([^)]*\)|\[", "", shown) == re.sub(r"\]\([^)]*\)|\[", "", text)


@pytest.mark.parametrize("kind", [[], ["--annotate", "--message", "Holdfast 1.2.3"]])
def test_a_commit_with_its_tag_passes(tree: Path, kind: list[str]) -> None:
    git(tree, "tag", *kind, "v1.2.3")
    assert checked(tree) == (0, "This commit can be released as 1.2.3.\n")


def test_a_version_is_released_once(tree: Path) -> None:
    git(tree, "tag", "v1.2.3")
    git(tree, "commit", "--quiet", "--allow-empty", "--message", "More")
    code, text = checked(tree)
    assert code == 1
    assert "the tag v1.2.3 is on another commit" in text


def test_this_version_is_the_newest_of_the_changelog() -> None:
    """So that a tag is all that a release of the repository's head lacks."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    newest = re.search(r"(?m)^## \[(\d.*)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"))
    assert newest is not None
    assert version == newest[1] or version.endswith(".dev0")
