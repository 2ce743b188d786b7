"""Modules that a launcher imports before it forks workers: what workers find, and what is refused
because a fork could not use it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

WAIT_S = 240.0

LAUNCHERS = """
import json, multiprocessing, os, sys
from holdfast._launch.forking import start_fork_server
from holdfast_core.errors import InvalidJobError

def launch(modules):
    *_, module = wanted = modules.split(",")
    try:
        start_fork_server([], wanted)
    except InvalidJobError as error:
        return str(error)
    found = f"{module!r} in sys.modules and gc.get_freeze_count()"
    works = f"getattr(sys.modules[{module!r}], 'work', bool)()"
    look = f"import gc, sys; sys.exit(1 if not ({found}) or {works} else 0)"
    worker = multiprocessing.get_context("forkserver").Process(target=exec, args=(look,))
    worker.start()
    worker.join()
    return "" if worker.exitcode == 0 else "its workers do not find it, or collect it"

for module in sys.argv[1:]:
    pid = os.fork()
    if not pid:
        print(json.dumps([module, launch(module)]), flush=True)
        sys.exit()
    os.waitpid(pid, 0)
"""

HARMLESS = {
    "quiet": "",
    "ends_its_thread_before_a_fork": """
import os, threading
over = threading.Event()
thread = threading.Thread(target=over.wait)
thread.start()
os.register_at_fork(before=lambda: (over.set(), thread.join()))
""",
}
ARROW = """
import pyarrow, pyarrow.compute
def work():  # on Arrow's threads
    table = pyarrow.table({"one": list(range(100_000)), "two": [5] * 100_000})
    found = table.group_by("two").aggregate([("one", "sum")]).column("one_sum").to_pylist()
    return found != [sum(range(100_000))]
"""
needs_arrow = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None, reason="make test-torchtitan, which has pyarrow"
)
REFUSED = {
    "threaded": (
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, name='idle', daemon=True).start()",
        "importing it starts threads (idle), which workers that are forked afterwards could not",
    ),
    "broken": ("raise OSError('no such device')", "OSError: no such device; name modules that are"),
    "absent": (None, "ModuleNotFoundError: No module named 'absent'"),
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a launcher that preloads a module says against it; empty if its workers find it. Each
    launcher is a fork of one process, whose imports take long."""
    folder = tmp_path_factory.mktemp("launchers")
    sources = HARMLESS | {name: source for name, (source, _) in REFUSED.items()}
    sources |= {"arrow": ARROW, "pyarrow,arrow": None}
    for name, source in sources.items():
        if source is not None:
            (folder / f"{name}.py").write_text(source)
    script = folder / "launchers.py"
    script.write_text(LAUNCHERS)
    command = [sys.executable, str(script), *sources]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    return dict(json.loads(line) for line in ended.stdout.splitlines())


@pytest.mark.parametrize("module", HARMLESS)
def test_workers_find_what_their_launcher_was_told_to_import_and_need_not_look_through_it(
    refusals: dict[str, str], module: str
) -> None:
    assert refusals[module] == ""


@pytest.mark.parametrize("module", REFUSED)
def test_a_module_is_refused_that_no_fork_could_use(refusals: dict[str, str], module: str) -> None:
    assert refusals[module].startswith(f"HOLDFAST_PRELOAD names {module}, ")
    assert REFUSED[module][1] in refusals[module]


@needs_arrow
def test_threads_of_arrow_may_stay_if_it_is_named_first(refusals: dict[str, str]) -> None:
    assert "name pyarrow before it, whose threads may stay, or leave it out" in refusals["arrow"]
    assert refusals["pyarrow,arrow"] == ""
