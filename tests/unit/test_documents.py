"""House rules for the documents: prose fits in 100 columns, and whatever they name exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COLUMNS_MAX = 100
GENERATED = {"docs/job.md"}
"""Text that comes from the sources."""
FOLDERS = (
    "benchmarks|charts|cli|core|crds|daemon|docs|examples|gpu|host|operator|protos|storage|tests"
    "|trainer_sdk"
)
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "charts/**/*.md")
    for path in ROOT.glob(pattern)
    if path.relative_to(ROOT).as_posix() not in GENERATED
)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _prose(text: str) -> str:
    """`text` with code blocks, commands of blocks, table rows and link targets emptied, line by
    line."""
    code = re.sub(r"(?ms)^ *```.*?^ *```$", lambda block: "\n" * block[0].count("\n"), text)
    return re.sub(r"(?m)^(?:\||<!--).*$|\]\([^)]*\)", "", code)


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_prose_fits_in_a_hundred_columns(path: Path) -> None:
    lines = enumerate(_prose(path.read_text(encoding="utf-8")).splitlines(), start=1)
    long = [number for number, line in lines if len(line) > COLUMNS_MAX]
    assert not long, f"wrap lines {long} of {_name(path)} at {COLUMNS_MAX} columns"


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_every_file_that_a_document_names_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    named = re.findall(rf"`((?:{FOLDERS})/[\w./-]+)", text)
    linked = re.findall(r"\]\(([\w./-]+)[#)]", text)
    missing = [name for name in named if not (ROOT / name).exists()]
    missing += [target for target in linked if not (path.parent / target).exists()]
    assert not missing, missing


def test_every_decision_that_a_source_names_exists() -> None:
    numbers = {path.name[:4] for path in (ROOT / "docs/decisions").glob("[0-9]*.md")}
    command = ["git", "grep", "-hE", "[Dd]ecisions?[ /][0-9]{4}", "--", "*.py", "*.txt", "*.md"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = set(re.findall(r"[Dd]ecisions?[ /](\d{4})\b", found))
    assert len(named) > 20
    assert named <= numbers


def test_the_readme_answers_each_question_about_the_source_in_three_files() -> None:
    """That they exist is tested with those of all documents."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| (.*\?) \| (.*) \|$", text)
    files = {question: re.findall(r"`[\w/]+\.py`", answer) for question, answer in rows}
    assert len(files) == 6
    assert not {question: named for question, named in files.items() if not 1 <= len(named) <= 3}


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_every_target_of_make_that_a_document_names_exists(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = re.findall(r"(?m)(?:`|^)make\s+([a-z][a-z0-9-]+)", path.read_text(encoding="utf-8"))
    missing = [each for each in named if f"\n{each}:" not in makefile]
    assert not missing, missing


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_every_heading_that_a_link_names_exists(path: Path) -> None:
    links = re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", path.read_text(encoding="utf-8"))
    missing = [
        f"{target}#{heading}"
        for target, heading in links
        if heading not in _headings(path.parent / target if target else path)
    ]
    assert not missing, missing


def test_every_test_that_a_document_names_exists() -> None:
    tests = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/test_*.py"))
    known = set(re.findall(r"def (test_\w+)\(", tests))
    named = {
        name for path in DOCUMENTS for name in re.findall(r"::(test_\w+)", path.read_text("utf-8"))
    }
    assert named, "no document names a test: the pattern no longer finds them"
    assert named <= known, sorted(named - known)


def _headings(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"(?m)^#+ (.+)$", _prose(path.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
