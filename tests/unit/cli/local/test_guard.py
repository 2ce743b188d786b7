"""A run whose control process is killed ends with it, if it has a guard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast_cli.local.directory import RunDirectory
from holdfast_cli.local.processes import kill_marked, marked_processes

WAIT_S = 60.0
CONTROL = """
import sys
from pathlib import Path
from holdfast_cli.local.directory import RunDirectory
from holdfast_cli.local.guard import guarded
from holdfast_cli.local.processes import MARK, spawn

run, memory, folder = map(Path, sys.argv[1:])
directory = RunDirectory(run, "default.moe", memory)
with guarded(directory, folder):
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    for node in ("n0", "n1"):
        spawn(command, {MARK: directory.mark(node, "daemon")}, run / "log")
    print("running", flush=True)
    sys.stdin.readline()
print("ended", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "ended by itself"])
def test_what_a_killed_control_process_leaves_is_ended_and_removed(
    killed: bool, tmp_path: Path
) -> None:
    run, memory = tmp_path / "folder" / "run", tmp_path / "shared" / "memory"
    for folder in (run, memory / "n0"):
        folder.mkdir(parents=True)
    directory = RunDirectory(run, "default.moe", memory)
    control = subprocess.Popen(
        [sys.executable, "-c", CONTROL, str(run), str(memory), str(run.parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert control.stdin is not None
    assert control.stdout is not None
    try:
        assert control.stdout.readline() == "running\n"
        assert len(marked_processes(directory.mark())) == 2
        if not killed:
            control.stdin.write("\n")
            control.stdin.flush()
            assert control.stdout.readline() == "ended\n"
        os.killpg(control.pid, signal.SIGKILL)
        if not killed:
            assert len(marked_processes(directory.mark())) == 2
            assert memory.exists() and run.exists()
            return
        until = time.monotonic() + WAIT_S
        while run.parent.exists() or memory.parent.exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        assert not marked_processes(directory.mark())
    finally:
        kill_marked(directory.mark())
        control.communicate()
