"""A script in a child of a fork server finds what it would find in a fresh interpreter."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

from holdfast._launch.script import run_script

SCRIPT = """
import multiprocessing, sys
from pathlib import Path
Path(sys.argv[1]).write_text(multiprocessing.get_start_method())
"""


def test_a_script_starts_processes_of_its_own_as_in_a_fresh_interpreter(tmp_path: Path) -> None:
    """Workers of its data loaders, for example: another way would run the script in them anew."""
    script, here, fresh = (tmp_path / name for name in ("script.py", "here", "fresh"))
    script.write_text(SCRIPT)
    subprocess.run([sys.executable, script, fresh], check=True)
    context: Any = multiprocessing.get_context("forkserver")
    process = context.Process(target=run_script, args=((), str(script), str(here)))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert here.read_text() == fresh.read_text()
