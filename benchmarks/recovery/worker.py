"""Runs the example trainer with the SDK's messages in a file of its process.

    python worker.py [--every-other-vote] FOLDER [arguments of the example]

The example does not configure logging, so the SDK's messages would be lost. Each becomes a JSON
line with its time and rank in `FOLDER/<pid>.jsonl`; the first line is written before torch is
imported.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import runpy
import sys
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_moe.py"


EVERY_OTHER_VOTE = "--every-other-vote"


class AsJson(logging.Formatter):
    """A message as a line that `benchmarks.recovery.traces` reads."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": record.created,
            "pid": record.process,
            "rank": int(os.environ["RANK"]),
            "text": record.getMessage(),
        }
        return json.dumps(line)


def vote_in_every_other_step() -> None:
    """Have ranks vote in even steps only."""
    owner: Any = importlib.import_module("holdfast._elastic.session").ElasticSession
    begin = owner.begin

    def begin_step(session: Any, step: int) -> None:
        session._votes = step % 2 == 0
        begin(session, step)

    owner.begin = begin_step


def main() -> None:
    """Run the example as `python examples/train_moe.py` would."""
    every_other_vote = sys.argv[1] == EVERY_OTHER_VOTE
    folder, *arguments = sys.argv[1 + every_other_vote :]
    handler = logging.FileHandler(Path(folder, f"{os.getpid()}.jsonl"))
    handler.setFormatter(AsJson())
    log = logging.getLogger("holdfast")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.info("process started")
    if every_other_vote:
        vote_in_every_other_step()
    sys.argv = [str(EXAMPLE), *arguments]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    main()
