"""The document that docs/choosing-a-policy.md plans for."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from holdfast_cli.main import main

ROOT = Path(__file__).resolve().parents[3]


def test_the_plan_in_the_documentation_is_what_its_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs/choosing-a-policy.md").read_text()
    command, table = re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[:2]
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:3] == ["holdfast", "plan", "examples/gpt.yaml"]
    words[words.index("plan.png")] = str(tmp_path / "plan.png")
    assert main(words[1:]) == 0
    printed = capsys.readouterr().out
    for line in filter(None, map(str.strip, table.splitlines())):
        assert line in printed
    assert (tmp_path / "plan.png").stat().st_size > 0
