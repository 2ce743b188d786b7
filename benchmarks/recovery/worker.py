"""Runs the example trainer with the SDK's messages in a file of its process.

    python worker.py FOLDER [arguments of the example]

The example does not configure logging, so the SDK's messages would be lost. Each becomes a JSON
line with its time and rank in `FOLDER/<pid>.jsonl`; the first line is written before torch is
imported.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_moe.py"


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


def main() -> None:
    """Run the example as `python examples/train_moe.py` would."""
    folder, *arguments = sys.argv[1:]
    handler = logging.FileHandler(Path(folder, f"{os.getpid()}.jsonl"))
    handler.setFormatter(AsJson())
    log = logging.getLogger("holdfast")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.info("process started")
    sys.argv = [str(EXAMPLE), *arguments]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    main()
