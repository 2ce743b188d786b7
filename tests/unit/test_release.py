"""`.ci/release` refuses a commit that is not fit for a release, and says all that is wrong."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
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
    for name in ("pyproject.toml", "charts/holdfast/Chart.yaml", ".ci/release"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    chart = tmp_path / "charts/holdfast/Chart.yaml"
    for path, key in ((tmp_path / "pyproject.toml", "version = "), (chart, "version: ")):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        (old,) = (line for line in lines if line.startswith(key))
        change(path, old, f'{key}"1.2.3"\n' if "=" in key else f"{key}1.2.3\n")
    (old,) = (line for line in chart.read_text().splitlines() if line.startswith("appVersion: "))
    change(chart, old, "appVersion: 1.2.3")
    urls = '[project.urls]\nSource = "https://code.example/holdfast"\n\n[project.scripts]'
    change(tmp_path / "pyproject.toml", "[project.scripts]", urls)
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


def test_a_version_is_released_once(tree: Path) -> None:
    git(tree, "tag", "v1.2.3")
    code, text = checked(tree)
    assert code == 1
    assert "the tag v1.2.3 exists" in text
