"""The tables of docs/what-failures-cost.md are what its commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from document_blocks import blocks, printed_by

from holdfast_cli.main import main

ROOT = Path(__file__).resolve().parents[4]
DOCUMENT = ROOT / "docs" / "what-failures-cost.md"
PICTURE = ROOT / "docs" / "what-failures-cost.svg"
BLOCKS = blocks(DOCUMENT.read_text(encoding="utf-8"))


def test_the_document_shows_a_job_each_paper_and_the_goal() -> None:
    commands = " ".join(BLOCKS)
    for part in ("table3", "table7", "figure11", "spot", "--goal", "--gpus 16384", "examples/"):
        assert part in commands


@pytest.mark.parametrize("command", BLOCKS)
def test_each_block_is_what_its_command_prints(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert BLOCKS[command] == printed_by(command), (
        "run python tests/unit/cli/helpers/document_blocks.py docs/what-failures-cost.md"
    )


def texts(path: Path) -> set[str]:
    return {node.text.strip() for node in ET.parse(path).iter() if node.text and node.text.strip()}


def test_the_picture_is_that_of_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (command,) = re.findall(r"(?m)^holdfast (simulate .*--plot .*)$", DOCUMENT.read_text())
    assert PICTURE.relative_to(ROOT).as_posix() in command
    drawn = tmp_path / "drawn.svg"
    arguments = shlex.split(command.replace("docs/what-failures-cost.svg", str(drawn)))
    assert main(arguments) == 0
    assert texts(drawn) == texts(PICTURE)
