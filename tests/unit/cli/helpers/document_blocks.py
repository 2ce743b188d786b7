"""Blocks of a document that a command prints: between `<!-- holdfast … -->`, or
`<!-- python -m benchmarks.papers … -->`, and `<!-- end -->`.

    python tests/unit/cli/helpers/document_blocks.py docs/what-failures-cost.md

writes what the commands print now into the document. The command above a picture draws it.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path

from benchmarks.papers import __main__ as papers

from holdfast_cli import main as command_line

PAPERS = "python -m benchmarks.papers"
BLOCK = re.compile(
    rf"(?ms)^<!-- (?P<command>(?:holdfast|{PAPERS}) [^\n]+) -->\n(?P<text>.*?)^<!-- end -->$"
)
TIMED = re.compile(r"(?m)^.* events a second$\n?")
"""A line that differs from run to run."""


def blocks(document: str) -> dict[str, str]:
    """The text of each block by its command."""
    return {found["command"]: found["text"] for found in BLOCK.finditer(document)}


def printed_by(command: str) -> str:
    """What a command prints, as a block holds it: tables of its own as code, without the lines that
    differ from run to run and without spaces at the ends of lines."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        if command.startswith(PAPERS):
            code = papers.main(shlex.split(command.removeprefix(PAPERS)))
        else:
            code = command_line.main(shlex.split(command.removeprefix("holdfast")))
    if code:
        raise RuntimeError(f"{command} ended with {code}")
    lines = [line.rstrip() for line in TIMED.sub("", output.getvalue()).splitlines()]
    text = "\n".join(lines).strip("\n")
    return f"\n{text}\n\n" if command.startswith(PAPERS) else f"\n```\n{text}\n```\n\n"


def renewed(document: str) -> str:
    """The document with what its commands print now."""

    def block(found: re.Match[str]) -> str:
        command = found["command"]
        return f"<!-- {command} -->\n{printed_by(command)}<!-- end -->"

    return BLOCK.sub(block, document)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
