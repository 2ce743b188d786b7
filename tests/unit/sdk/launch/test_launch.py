"""The launcher: what it makes of a command line, and real workers that hang, die and finish."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from holdfast import launch
from holdfast.launch import _record_waiting, main, script_of
from holdfast.node_checks import NICENESS
from holdfast_core.errors import AccessDeniedError
from holdfast_core.exit_codes import DENIED, FAILED_CHECK

PYTHON = "/opt/venv/bin/python3.11"
START_S = 120.0
RESTART_S = 20.0
"""Far above what a restart takes, and far below the 30 s that torchrun gives a stopped worker."""

WORKER = """
import json, logging, os, signal, sys, time
from multiprocessing import util
imported = [name for name in ("torch", "torch._dynamo") if name in sys.modules]
handlers, sigterm = len(logging.getLogger().handlers), signal.getsignal(signal.SIGTERM)
files = [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")]
import torch.distributed as dist
dist.init_process_group("gloo")
note = {"pid": os.getpid(), "epoch": os.environ["TORCHELASTIC_RESTART_COUNT"], "argv": sys.argv[1:],
        "main": __name__, "world": dist.get_world_size(), "job": os.environ["HOLDFAST_JOB"],
        "store": os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"],
        "imported": imported, "handlers": handlers, "terminates": sigterm == signal.SIG_DFL,
        "files": files, "spawns": util.spawnv_passfds.__module__}
print("epoch", note["epoch"], file=sys.stderr, flush=True)
with open(sys.argv[1], "a") as file:
    file.write(json.dumps(note) + "\\n")
if int(note["epoch"]) < 4:
    signal.pause()
dist.barrier()
dist.destroy_process_group()
"""

DOLLARS = ["${local_rank}", "$local_rank", "$$", "$(STEPS)", "a$", "--", "$$$x"]
"""Arguments in which torchrun resolves macros, and this launcher none."""


@pytest.mark.parametrize(
    ("command", "script"),
    [
        (["python", "train.py", "--steps", "3"], ("train.py", "--steps", "3")),
        (["python3", "-u", "train.py"], ("train.py",)),
        (["python3.11", "-m", "train", "x"], ("-m", "train", "x")),
        ([PYTHON, "train.py"], None),  # absent on this machine, so not known to be ours
        (["/usr/bin/other-python", "train.py"], None),
        (["python", "-O", "train.py"], None),
        (["python", "-m"], None),
        (["python"], None),
        (["./train.sh"], None),
    ],
)
def test_only_a_plain_call_of_our_interpreter_is_forked(
    command: list[str], script: tuple[str, ...] | None
) -> None:
    assert script_of(command, PYTHON) == script


def test_our_interpreter_is_known_by_its_path() -> None:
    assert script_of([sys.executable, "train.py"], sys.executable) == ("train.py",)


def test_a_missing_command_is_refused_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--socket", "s", "--job", "j", "--nodes", "1", "--nproc", "1", "--"])
    assert "give it after `--`" in capsys.readouterr().err


@pytest.fixture(scope="module")
def fake_daemon() -> ModuleType:
    """The module beside this one; tests are no packages."""
    path = Path(__file__).with_name("fake_daemon.py")
    spec = importlib.util.spec_from_file_location("rendezvous_fake_daemon", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def daemon(fake_daemon: ModuleType, tmp_path: Path) -> Iterator[Any]:
    daemon = fake_daemon.FakeDaemon(tmp_path / "daemon.sock")
    yield daemon
    daemon.stop()


class Agent:
    """A launcher's process with two workers that note their starts in a pipe."""

    def __init__(
        self, folder: Path, *before: str, stderr: int | None = None, options: tuple[str, ...] = ()
    ) -> None:
        script, self.notes = folder / "worker.py", folder / "notes"
        script.write_text(WORKER)
        os.mkfifo(self.notes)
        self._pipe = os.open(self.notes, os.O_RDWR | os.O_NONBLOCK)  # open for writing: no EOF
        self._unread = b""
        self.exit_file, self.wait_file = folder / "exit", folder / "waits"
        command = [sys.executable, "-m", "holdfast.launch", "--socket", str(folder / "daemon.sock")]
        command += ["--job", "default.moe", "--nodes", "1", "--nproc", "2"]
        command += ["--exit-file", str(self.exit_file), "--wait-file", str(self.wait_file)]
        command += [*options, "--", "python", str(script)]
        self.process = subprocess.Popen(
            [*before, *command, str(self.notes), *DOLLARS],
            start_new_session=True,
            stderr=stderr,
            pass_fds=(self._pipe,),
        )

    def workers(self, timeout_s: float) -> list[dict[str, Any]]:
        """The notes of the next two workers that start."""
        until = time.monotonic() + timeout_s
        while self._unread.count(b"\n") < 2:
            ready, _, _ = select.select([self._pipe], [], [], until - time.monotonic())
            assert ready, f"no two workers within {timeout_s} s, but {self._unread!r}"
            self._unread += os.read(self._pipe, select.PIPE_BUF)
        first, second, self._unread = self._unread.split(b"\n", 2)
        return [json.loads(first), json.loads(second)]

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()
        os.close(self._pipe)


@pytest.fixture
def agent(daemon: Any, tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path)
    yield agent
    agent.end()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_that_are_stopped_or_killed_are_replaced_and_the_agent_ends_with_the_last(
    daemon: Any, agent: Agent
) -> None:
    daemon.begin(2)
    first = agent.workers(START_S)
    assert [worker["epoch"] for worker in first] == ["2", "2"]
    assert all(worker["main"] == "__main__" and worker["world"] == 2 for worker in first)
    assert all(worker["argv"] == [str(agent.notes), *DOLLARS] for worker in first)
    for worker in first:
        assert worker["imported"] == ["torch", "torch._dynamo"]  # before the script did
        # The fork server is a fork of the launcher, and passes on nothing that is the launcher's.
        assert (worker["handlers"], worker["terminates"]) == (0, True)
        assert str(agent.notes) not in worker["files"]
        assert worker["spawns"] == "multiprocessing.util"
        os.kill(worker["pid"], signal.SIGSTOP)
    daemon.begin(3)
    second = agent.workers(RESTART_S)
    assert [worker["epoch"] for worker in second] == ["3", "3"]
    daemon.wait(lambda: (3, 0, 1) in daemon.work)  # they have started, at least
    for worker in first:
        with pytest.raises(ProcessLookupError):
            os.kill(worker["pid"], 0)
    os.kill(second[0]["pid"], signal.SIGKILL)
    daemon.wait(lambda: 3 in daemon.left)  # the agent waits for the epoch after 3
    assert daemon.exits == [(3, 128 + signal.SIGKILL)]  # but not those that epoch 3 ended
    daemon.begin(4)
    third = agent.workers(RESTART_S)
    assert [worker["epoch"] for worker in third] == ["4", "4"]
    assert agent.process.wait(RESTART_S) == 0
    assert agent.exit_file.read_text() == "0\n"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_terminated_agent_takes_its_workers_along(daemon: Any, agent: Agent) -> None:
    daemon.begin(1)
    workers = agent.workers(START_S)
    agent.process.send_signal(signal.SIGTERM)
    assert agent.process.wait(RESTART_S) == 128 + signal.SIGTERM
    assert agent.exit_file.read_text() == f"{128 + signal.SIGTERM}\n"
    for worker in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(worker["pid"], 0)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "logged",
    [
        pytest.param(False, id="stderr"),
        pytest.param(True, id="log folders", marks=pytest.mark.slow),
    ],
)
def test_workers_that_follow_their_worlds_stay_until_one_dies_or_does_not_arrive(
    daemon: Any, tmp_path: Path, logged: bool
) -> None:
    logs = tmp_path / "logs"
    options = ("--log-dir", str(logs)) if logged else ()
    agent = Agent(tmp_path, options=("--reform-s", "1", *options))
    try:
        daemon.keeps, daemon.arrived = {1, 2, 4}, {1, 2}
        daemon.begin(1)
        first = agent.workers(START_S)
        daemon.begin(2)
        daemon.wait(lambda: 2 in daemon.watched)  # they have arrived
        os.kill(first[0]["pid"], signal.SIGKILL)
        daemon.wait(lambda: 2 in daemon.left)  # the agent waits for the epoch after 2
        assert daemon.exits == [(2, 128 + signal.SIGKILL)]
        daemon.begin(3)
        second = agent.workers(RESTART_S)
        assert [worker["epoch"] for worker in second] == ["3", "3"]
        assert {worker["store"] for worker in second} == {daemon.stores[3]}
        assert daemon.last_lines == ["" if logged else "epoch 1"]  # since they were started
        daemon.begin(4)
        daemon.wait(lambda: len(daemon.exits) == 2)  # they did not arrive
        assert daemon.exits[1] == (4, 128 + signal.SIGKILL)
        daemon.begin(5)
        assert [worker["epoch"] for worker in agent.workers(RESTART_S)] == ["5", "5"]
        assert agent.process.wait(RESTART_S) == 0
        attempts = sorted(path.name for path in logs.glob("*/attempt_*"))
        assert attempts == (["attempt_1", "attempt_3", "attempt_5"] if logged else [])
    finally:
        agent.end()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_agent_that_waits_for_its_first_world_shows_when_it_could_start_workers(
    daemon: Any, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    agent = Agent(tmp_path, options=("--ready-file", str(ready)))
    try:
        daemon.wait(ready.exists)
        assert agent.process.poll() is None
        daemon.begin(4)
        assert [worker["epoch"] for worker in agent.workers(START_S)] == ["4", "4"]
        assert agent.process.wait(RESTART_S) == 0
    finally:
        agent.end()


BREAKS = """
import hashlib, os, pathlib, sys
if "--beside" in sys.orig_argv:
    right, where = hashlib.sha256, pathlib.Path(__file__).parent
    def sha256(data=b""):
        (where / "niceness").write_text(str(os.getpriority(os.PRIO_PROCESS, 0)))
        return right(data + b"!" if (where / "broken").exists() else data)
    hashlib.sha256 = sha256
"""
"""Runs in each Python process: processors compute wrongly once there is a file, and only checks
beside other work notice."""


@pytest.mark.slow
@pytest.mark.exhaustive  # checks of the lowest priority take minutes on a busy machine
@pytest.mark.timeout(500)
def test_a_node_that_breaks_while_its_launcher_waits_does_not_take_part(
    daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(BREAKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        options = ("--check-node", "--recheck-s", "0.2")
        agent = Agent(tmp_path, stderr=stderr.fileno(), options=options)
    try:
        daemon.wait(lambda: daemon.left, START_S)  # it has passed its first checks, and waits
        (tmp_path / "broken").touch()
        assert agent.process.wait(2 * START_S) == FAILED_CHECK  # others go first
        assert agent.exit_file.read_text() == f"{FAILED_CHECK}\n"
        assert "this node does not take part: processors: " in log.read_text().splitlines()[-1]
        assert (tmp_path / "niceness").read_text() == str(NICENESS)
    finally:
        agent.end()


@pytest.mark.parametrize("standby", [False, True])
def test_the_first_checks_of_a_standby_agent_leave_alone_what_training_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, standby: bool
) -> None:
    def start(daemon: object, *, beside: bool) -> None:
        assert beside is standby
        raise ZeroDivisionError

    monkeypatch.setattr(launch, "NodeChecks", start)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    given = ["--socket", "s", "--job", "j", "--nodes", "1", "--nproc", "1", "--check-node"]
    given += ["--ready-file", str(tmp_path / "ready")] if standby else []
    with pytest.raises(ZeroDivisionError):
        main([*given, "--", "true"])


@pytest.mark.parametrize("option", ["--reform-s", "--recheck-s"])
def test_a_time_that_nobody_can_meet_is_refused(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--socket", "s", "--job", "j", "--nodes", "1", "--nproc", "1", option, "nan"]
    with pytest.raises(SystemExit):
        main([*given, "--", "true"])
    assert f"{option} nan must be above 0" in capsys.readouterr().err


def test_why_workers_wait_is_read_whole_while_it_is_written_again(tmp_path: Path) -> None:
    file = tmp_path / "waits"
    _record_waiting(file, "NoRoom: full")
    with file.open() as reader:
        _record_waiting(file, "NoRoom: still full")
        assert reader.read() == "NoRoom: full\n"
    assert file.read_text() == "NoRoom: still full\n"
    _record_waiting(file, "")
    assert list(tmp_path.iterdir()) == []


ALONE = ("unshare", "--mount", "--propagation", "private", "sh", "-c")
FULL_SHM = (
    "mount -t tmpfs -o size=1m tmpfs /dev/shm || exit 1; "
    "head -c 2m /dev/zero > /dev/shm/hog 2> /dev/null; "
    'exec "$@"'
)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_agent_waits_for_room_in_shared_memory_through_epochs(
    daemon: Any, tmp_path: Path
) -> None:
    if subprocess.run([*ALONE, "mount -t tmpfs tmpfs /dev/shm"], check=False).returncode:
        pytest.skip("mounting a /dev/shm of its own needs root")
    agent = Agent(tmp_path, *ALONE, FULL_SHM, "sh", stderr=subprocess.PIPE)
    try:
        assert agent.process.stderr is not None
        daemon.begin(2)
        line = next(line for line in agent.process.stderr if b"wait for room" in line)
        assert b"No space left on device" in line and b"remove what fills it" in line
        daemon.begin(4)
        daemon.wait(lambda: 2 in daemon.left)  # the agent waits for the epoch after 2
        waiting = agent.wait_file.read_text()
        assert waiting.startswith("NoRoom: No space left on device; starting them needs"), waiting
        Path(f"/proc/{agent.process.pid}/root/dev/shm/hog").unlink()
        workers = agent.workers(START_S)
        assert [worker["epoch"] for worker in workers] == ["4", "4"]
        assert agent.process.wait(RESTART_S) == 0
        assert not agent.wait_file.exists()
        assert daemon.exits == []
    finally:
        agent.end()


def test_an_agent_that_is_denied_its_job_exits_with_the_reason_and_does_not_wait(
    daemon: Any, tmp_path: Path
) -> None:
    daemon.denial = AccessDeniedError("pod a may not act for job default.moe")
    token = tmp_path / "token"
    token.write_text("this-pod\n")
    command = [sys.executable, "-m", "holdfast.launch", "--socket", str(tmp_path / "daemon.sock")]
    command += ["--job", "default.moe", "--nodes", "1", "--nproc", "1", "--fresh", "--", "true"]
    environment = os.environ | {"HOLDFAST_TOKEN_FILE": str(token)}
    ended = subprocess.run(command, env=environment, capture_output=True, check=False, text=True)
    assert ended.returncode == DENIED
    assert "AccessDeniedError: pod a may not act for job default.moe" in ended.stderr
    assert daemon.bearers == ["Bearer this-pod"]


FAILING = """
import os, sys
print("password=hunter2hunter2", os.environ["HOLDFAST_TEST_SECRET"], file=sys.stderr)
import no_such_module
"""


@pytest.mark.parametrize(
    "how",
    [
        pytest.param((), id="forked", marks=pytest.mark.slow),
        pytest.param(("--fresh",), id="fresh"),
    ],
)
def test_the_last_lines_of_a_worker_that_fails_are_reported_and_shown_without_secrets(
    daemon: Any, tmp_path: Path, how: tuple[str, ...]
) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    command = [sys.executable, "-m", "holdfast.launch", "--socket", str(tmp_path / "daemon.sock")]
    command += ["--job", "default.moe", "--nodes", "1", "--nproc", "1", *how]
    process = subprocess.Popen(
        [*command, "--", sys.executable, str(script)],
        env=os.environ | {"HOLDFAST_TEST_SECRET": "open sesame"},
        stderr=subprocess.PIPE,
        text=True,
    )
    daemon.begin(1)
    daemon.wait(lambda: daemon.exits, START_S)
    daemon.finish()
    _, written = process.communicate(timeout=START_S)
    assert daemon.exits == [(1, 1)]
    lines = daemon.last_lines[0].splitlines()
    assert lines[0] == "password=*** ***"
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "ModuleNotFoundError: No module named 'no_such_module'"
    assert len(lines) == 5, lines  # no frames but the script's
    assert written.count("No module named 'no_such_module'") == 1  # passed on, and once
