"""Checks of a node: what is broken is found, and what cannot be checked proves nothing.

Faults are planted from outside: a module that Python loads in each process, programs in PATH, a
file system without room.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from waiting import wait_for

from holdfast import node_checks
from holdfast._launch.kernel_log import KernelLog
from holdfast.node_checks import (
    NICENESS,
    DaemonAddress,
    NodeChecks,
    RepeatedChecks,
    all_reduce,
    check_device_memory,
    check_devices,
    check_kernel_log,
    check_links,
    checks_of,
    clocks_at_work,
    daemon_of_environment,
)
from holdfast_core.errors import UnreachableError
from holdfast_host.results import (
    CheckFailedError,
    NotCheckedError,
    NoticedError,
    Outcome,
    Result,
    TooSlowError,
    failures_in_words,
)
from holdfast_protos import trainer_pb2, trainer_pb2_grpc

pytestmark = pytest.mark.timeout(300)  # a busy machine imports torch for a minute
EXHAUSTIVE = (pytest.mark.slow, pytest.mark.exhaustive)
HOST = ("processors", "memory", "shared memory", "disk")
Plant = Callable[[str], None]
Driver = Callable[[Mapping[str, str]], None]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Plants an `nvidia-smi`, with a command that answers each query in which some word is. It
    knows no other query."""

    def planting(answers: Mapping[str, str]) -> None:
        cases = "".join(f"*{word}*) {command};;\n" for word, command in answers.items())
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\ncase $1 in\n{cases}*) exit 2;;\nesac\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return planting


def says(rows: str) -> str:
    return f"printf '{rows}\\n'"


def outcomes(results: list[Result]) -> dict[str, Outcome]:
    return {result.check: result.outcome for result in results}


def test_a_healthy_machine_fails_no_check() -> None:
    results = NodeChecks(None).results()
    assert list(outcomes(results)) == list(checks_of(None))
    assert failures_in_words(results) == ""
    for name in HOST[:2]:
        assert outcomes(results)[name] is Outcome.PASSED


def test_a_processor_that_computes_digests_wrongly_is_found(plant: Plant) -> None:
    """In one thread of all, and seldom."""
    plant(
        "import hashlib\n"
        "right, calls = hashlib.sha256, []\n"
        "def wrong(data=b''):\n"
        "    calls.append(1)\n"
        "    return right(data + b'!' if len(calls) == 7 else data)\n"
        "hashlib.sha256 = wrong\n"
    )
    results = NodeChecks(None).results()
    assert outcomes(results)["processors"] is Outcome.FAILED
    assert "computed a wrong digest" in failures_in_words(results)


@pytest.mark.parametrize(
    ("how", "words", "outcome"),
    [
        ("os.kill(os.getpid(), signal.SIGILL)", "was ended by signal 4", Outcome.FAILED),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by signal 9", Outcome.NOT_CHECKED),
        ("os._exit(1)", "ended with code 1", Outcome.NOT_CHECKED),
    ],
)
def test_only_an_instruction_that_ends_the_process_is_a_failed_check(
    plant: Plant, how: str, words: str, outcome: Outcome
) -> None:
    plant(
        "import os, shutil, signal, sys\n"
        "def end(*_):\n"
        f"    {how}\n"
        "if sys.orig_argv[-1] == 'holdfast.node_checks':\n"
        "    shutil.disk_usage = end\n"
    )
    *others, last = NodeChecks(None).results()
    assert all(result.outcome is not Outcome.FAILED for result in others)
    assert last == Result("shared memory", outcome, f"the process that checks {words}")


def test_a_check_that_never_ends_has_failed(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant("import signal\nsignal.pause()\n")
    monkeypatch.setattr(node_checks, "LIMIT_S", 0.5)
    [result] = NodeChecks(None).results()
    assert (result.check, result.outcome) == ("processors", Outcome.FAILED)
    assert "did not end within" in result.text


def test_what_else_is_written_is_passed_over(plant: Plant) -> None:
    """And does not hold up the checks, though nobody reads before their end."""
    plant(
        "print('x' * 10**6)\nprint('{\"check\": 1}')\n"
        "import sys\nsys.stdout.buffer.write(b'\\xff welcome\\n')\n"
    )
    checks = NodeChecks(None)
    wait_for("the end of the checks", checks.is_over, 250.0)
    results = checks.results()
    assert list(outcomes(results)) == list(checks_of(None))


@pytest.mark.parametrize("beside", [False, True])
def test_beside_other_work_checks_that_need_longer_prove_nothing(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    """They may have had too little of the processors; also while they wait for children."""
    plant("import signal; signal.pause()")
    monkeypatch.setattr(node_checks, "LIMIT_S", 0.5)
    checks = NodeChecks(None, beside=beside)
    wait_for("its end", checks.is_over)
    [result] = checks.results()
    assert result.outcome is (Outcome.NOT_CHECKED if beside else Outcome.FAILED)
    assert "did not end within" in result.text


@pytest.fixture
def virtual_now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that checks see, in seconds."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_rounds_begin_after_their_pause_more_or_less_and_a_failed_one_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, virtual_now: list[float]
) -> None:
    made: list[dict[str, Any]] = []
    results = [Result("disk", Outcome.PASSED, "all is well")]
    over = [False]

    class Round(NodeChecks):
        def __init__(
            self, daemon: DaemonAddress | None, *, beside: bool = False, niceness: int = 0
        ) -> None:
            made.append({"daemon": daemon, "beside": beside, "niceness": niceness})

        def is_over(self) -> bool:
            return over[0]

        def results(self) -> list[Result]:
            return results

    monkeypatch.setattr(node_checks, "NodeChecks", Round)
    daemon = DaemonAddress(socket=tmp_path, job="team.moe")
    checks = RepeatedChecks(daemon, 1800.0)
    pauses = set()
    for number in range(4):
        over[0] = False
        pause_s = checks.look()
        assert 1350 <= pause_s <= 2250 and len(made) == number
        pauses.add(pause_s)
        virtual_now[0] += pause_s
        assert 0 < checks.look() <= 1.0 and 0 < checks.look() <= 1.0  # it runs
        expected = {"daemon": daemon, "beside": True, "niceness": NICENESS}
        assert made == [expected] * (number + 1)
        over[0] = True
        assert checks.look() > 1.0
    assert len(pauses) > 1
    results = [Result("disk", Outcome.FAILED, "it is broken")]
    virtual_now[0] += 2250.0
    with pytest.raises(CheckFailedError, match="disk: it is broken"):
        checks.look()


def test_a_round_ends_at_once_when_work_begins(plant: Plant, tmp_path: Path) -> None:
    plant("import signal\nsignal.pause()\n")
    checks = RepeatedChecks(DaemonAddress(socket=tmp_path, job="team.moe"), 1e-9)
    wait_for("a round", lambda: checks._round is not None or not checks.look())
    assert checks._round is not None
    process = checks._round._process
    assert process.poll() is None
    checks._period_s = 1000.0
    checks.stop()
    assert process.wait(60.0) == -signal.SIGKILL
    # A world that cannot be entered, such as one without a store, is waited for again.
    assert checks.look() > 100.0 and checks._round is None


@pytest.mark.parametrize(
    ("used", "words"),
    [
        ("0, 4", ""),
        ("37, 4", "GPU-2 may be in use"),
        ("[N/A], 4", "GPU-2 may be in use"),
        ("0, 61440", "GPU-2 may be in use"),  # it waits for data, or is at a checkpoint
        ("0, [N/A]", "GPU-2 may be in use"),
    ],
)
def test_beside_other_work_devices_that_somebody_uses_are_left_alone(
    driver: Driver, used: str, words: str
) -> None:
    driver({"utilization": says(f"GPU-1, 0, 0\nGPU-2, {used}")})
    check = checks_of(None, beside=True)["GPU links"]
    with pytest.raises(NotCheckedError, match=words or "there are no two GPUs here"):
        check()


def test_beside_other_work_a_driver_that_names_no_device_proves_nothing(driver: Driver) -> None:
    driver({"utilization": "true"})
    with pytest.raises(NotCheckedError, match="does not say whether GPUs are in use"):
        checks_of(None, beside=True)["GPU links"]()


def test_where_no_process_can_be_started_nothing_is_proved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    unstarted = NodeChecks(None)

    def refuse(name: str) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", refuse)
    for checks in (unstarted, NodeChecks(None)):
        assert checks.is_over()
        results = checks.results()
        assert [result.outcome for result in results] == [Outcome.NOT_CHECKED]
        assert failures_in_words(results) == ""
        checks.stop()


@pytest.mark.parametrize(
    ("rows", "ecc", "expected"),
    [
        ("GPU-1, 0, 0", "GPU-1, 0", None),
        ("GPU-1, No, No", "GPU-1, [N/A]", None),
        ("GPU-1, [N/A], [N/A]", "GPU-1, 0", None),
        ("GPU-1, [Not Supported], [Unknown Error]", "GPU-1, [Insufficient Permissions]", None),
        ("GPU-1, Yes, No", "GPU-1, 0", CheckFailedError),
        ("GPU-1, 0, 0\nGPU-2, 1, 0", "GPU-1, 0", CheckFailedError),
        ("GPU-1, No, Yes", "GPU-1, 0", NoticedError),
        ("GPU-1, 0, 0", "GPU-1, 3", NoticedError),
        ("", "", None),
    ],
)
def test_the_driver_is_asked_for_worn_memory(
    driver: Driver, rows: str, ecc: str, expected: type[Exception] | None
) -> None:
    driver({"remapped": says(rows), "ecc.errors": says(ecc)})
    if expected is None:
        check_device_memory()
    else:
        with pytest.raises(expected, match=r"GPU-\d"):
            check_device_memory()


@pytest.mark.parametrize(
    ("remapped", "retired", "expected"),
    [
        ("GPU-1, [N/A], [N/A]", "GPU-1, 3, 2, No", None),
        ("GPU-1, [N/A], [N/A]", "GPU-1, 60, 4, No", CheckFailedError),
        ("GPU-1, [N/A], [N/A]", "GPU-1, 1, 0, Yes", NoticedError),
        ("GPU-1, 0, 0", "GPU-1, 60, 4, Yes", None),  # it remaps rows, so nobody counts pages
        (None, "GPU-1, 64, 0, No", CheckFailedError),
        ("GPU-1, 0, 0\nGPU-2, [N/A], [N/A]", "GPU-1, 0, 0, No\nGPU-2, 0, 0, Yes", NoticedError),
        ("GPU-1, 0, 0", "GPU-1, [N/A], [N/A], [N/A]", None),
    ],
)
def test_the_driver_is_asked_for_retired_pages_of_devices_that_remap_no_rows(
    driver: Driver, remapped: str | None, retired: str, expected: type[Exception] | None
) -> None:
    answers = {} if remapped is None else {"remapped": says(remapped)}
    driver({**answers, "retired": says(retired), "ecc.errors": says("GPU-1, 0")})
    if expected is None:
        check_device_memory()
    else:
        with pytest.raises(expected, match=r"GPU-\d"):
            check_device_memory()


# --- clocks of devices ----------------------------------------------------------------------------

NO, HOT, SLOW = "Not Active, Not Active", "Active, Active", "Active, Not Active"
HOST_AS_GPU = {torch.device("cpu"): "GPU-1"}


@pytest.mark.parametrize(
    ("looks", "error", "words"),
    [
        ([NO, NO, NO, NO], None, "no GPU down"),
        (["[N/A], [N/A]"] * 4, None, "no GPU down"),
        ([HOT, NO, NO, NO], NoticedError, r"GPU-1 \(hw_slowdown, hw_thermal_slowdown\)"),
        ([NO, NO, SLOW, NO], NoticedError, r"GPU-1 \(hw_slowdown\)"),
        ([NO, HOT, SLOW, HOT], NoticedError, r"slows down GPU-1 \(hw_slowdown"),
        ([NO, SLOW, SLOW, SLOW], NoticedError, r"GPU-1 \(hw_slowdown\)"),  # power of a rack
        ([SLOW, HOT, HOT, HOT], CheckFailedError, r"works, .* GPU-1 \(hw_thermal_slowdown\)$"),
    ],
)
@pytest.mark.parametrize("group", ["clocks_event_reasons", "clocks_throttle_reasons"])
def test_a_device_that_heat_slows_down_as_long_as_it_works_fails(
    driver: Driver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    looks: list[str],
    error: type[Exception] | None,
    words: str,
    group: str,
) -> None:
    """Each look takes another line; the host stands in for a device, beside one of another job."""
    lines = tmp_path / "looks"
    lines.write_text("".join(f"GPU-1, {look}\n" for look in looks))
    fields = f"{group}.hw_slowdown,{group}.hw_thermal_slowdown"
    driver({fields: f"head -n 1 {lines}; sed -i 1d {lines}; {says(f'GPU-2, {HOT}')}"})
    monkeypatch.setattr(node_checks, "CLOCK_PAUSE_S", 0.01)
    if error is None:
        assert words in clocks_at_work(HOST_AS_GPU)
    else:
        with pytest.raises(error, match=words):
            clocks_at_work(HOST_AS_GPU)
    assert lines.read_text() == ""


@pytest.mark.parametrize("uuid", ["GPU-7", ""])
def test_clocks_of_a_device_that_the_driver_does_not_name_prove_nothing(
    driver: Driver, uuid: str
) -> None:
    driver({"clocks_event": says(f"GPU-1, {HOT}")})
    with pytest.raises(NotCheckedError, match=f"does not know {uuid or 'a GPU'}"):
        clocks_at_work({torch.device("cpu"): uuid})


def test_without_work_on_them_clocks_of_devices_prove_nothing(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory\nat length")

    driver({"clocks_event": says(f"GPU-1, {NO}")})
    monkeypatch.setattr(torch, "ones", full)
    monkeypatch.setattr(node_checks, "CLOCK_PAUSE_S", 0.01)
    with pytest.raises(NotCheckedError, match=r"be kept at work: out of memory$"):
        clocks_at_work(HOST_AS_GPU)
    driver({"clocks_event": says(f"GPU-1, {HOT}")})
    with pytest.raises(NoticedError, match="at times"):
        clocks_at_work(HOST_AS_GPU)


@pytest.mark.parametrize(("rates", "words"), [((5e9, 5e8), "back reach"), ((5e8, 5e9), "to them")])
def test_copies_that_are_slow_in_one_direction_fail(
    monkeypatch: pytest.MonkeyPatch, rates: tuple[float, float], words: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = iter([(5e9, 5e9), rates])
    monkeypatch.setattr(node_checks, "_check_device", lambda *_: next(found))
    with pytest.raises(CheckFailedError, match=f"{words}.* 0.5 GB/s, and should reach at least 1$"):
        check_devices()


# --- what the kernel has written ------------------------------------------------------------------


OURS, OTHERS = "00000000:3B:00.0", "00000000:3C:00.0"


@pytest.mark.parametrize(
    ("xids", "recovery", "error"),
    [
        ([], f"{OURS}, Reset", None),
        ([13], f"{OURS}, Reset", None),
        ([48], f"{OURS}, Reset", NoticedError),
        ([48, 79], f"{OURS}, Reset", CheckFailedError),
        ([119], f"{OTHERS}, None\n{OURS}, Reboot", CheckFailedError),
        ([119], f"{OTHERS}, Reset\n{OURS}, None", NoticedError),  # it was reset
        ([119], f"{OURS}, Drain and Reset", NoticedError),  # what runs there may go on
        ([119], f"{OURS}, [N/A]", NoticedError),
        ([119], None, NoticedError),  # a driver that does not know the question
    ],
)
def test_a_fault_that_the_kernel_has_reported_fails_if_the_driver_still_wants_a_reset(
    driver: Driver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    xids: list[int],
    recovery: str | None,
    error: type[Exception] | None,
) -> None:
    driver({} if recovery is None else {"gpu_recovery_action": says(recovery)})
    (tmp_path / "gpus" / "0000:3b:00.0").mkdir(parents=True)
    record = "4,1,{},-;NVRM: Xid (PCI:0000:3b:00): {}, pid='<unknown>'\n"
    (tmp_path / "kmsg").write_text("".join(record.format(10**6, xid) for xid in xids))
    log = partial(KernelLog, tmp_path / "kmsg", tmp_path / "gpus")
    monkeypatch.setattr(node_checks, "KernelLog", log)
    monkeypatch.setattr(time, "monotonic", lambda: 7200.0)
    if error is None:
        check_kernel_log()
        return
    with pytest.raises(error, match=rf"^2 hours ago, the kernel wrote: NVRM: Xid .*: {xids[-1]},"):
        check_kernel_log()


def test_a_kernel_that_shows_nothing_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = partial(KernelLog, tmp_path / "kmsg", tmp_path / "gpus")
    monkeypatch.setattr(node_checks, "KernelLog", log)
    with pytest.raises(NotCheckedError):
        check_kernel_log()


# --- the driver, and all of them ------------------------------------------------------------------


@pytest.mark.parametrize("text", ["exit 6", "echo Unknown field; exit 2"])
def test_a_driver_that_does_not_answer_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(NotCheckedError, match="does not answer"):
        check_device_memory()


def test_results_are_lines_of_json_and_need_no_more_than_a_trainer_has() -> None:
    command = [sys.executable, "-m", "holdfast.node_checks"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["check"] for each in found] == list(checks_of(None))


def test_by_hand_a_check_that_fails_is_an_exit_code(plant: Plant) -> None:
    plant(
        "import os, errno\ndef fail(_):\n    raise OSError(errno.EIO, 'broken')\nos.fsync = fail\n"
    )
    command = [sys.executable, "-m", "holdfast.node_checks"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1


# --- sums over devices ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.exhaustive
def test_devices_that_sum_rightly_pass() -> None:
    assert all_reduce("gloo", 2, 60.0, 60.0) == "2 devices gave the known sum"


@pytest.mark.parametrize(
    ("fault", "words", "error"),
    [
        ("found[7] += 1", "the sum over 2 devices is wrong on 0", CheckFailedError),
        pytest.param(
            *("os.kill(os.getpid(), signal.SIGSEGV)", "ended with -11", NotCheckedError),
            marks=EXHAUSTIVE,
        ),
        pytest.param("os._exit(1)", "ended with 1", NotCheckedError, marks=EXHAUSTIVE),
        pytest.param("signal.pause()", "did not end within 30 s", TooSlowError, marks=EXHAUSTIVE),
    ],
)
def test_a_fault_in_a_sum_is_found_and_an_error_proves_nothing(
    plant: Plant, fault: str, words: str, error: type[Exception]
) -> None:
    plant(
        "import os, signal, sys\n"
        "class Planting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        module = sys.modules.get('torch.distributed')\n"
        "        if getattr(module, 'all_reduce', None) and not hasattr(module, 'planted'):\n"
        "            right, module.planted = module.all_reduce, True\n"
        "            def faulty(found):\n"
        "                right(found)\n"
        "                if module.get_rank() == 0:\n"
        f"                    {fault}\n"
        "            module.all_reduce = faulty\n"
        "sys.meta_path.insert(0, Planting())\n"
    )
    with pytest.raises(error, match=words):
        all_reduce("gloo", 2, 100.0, 30.0)


def test_processes_that_do_not_begin_in_time_prove_nothing(plant: Plant) -> None:
    plant("import sys, signal\nif '--multiprocessing-fork' in sys.argv:\n    signal.pause()\n")
    with pytest.raises(NotCheckedError, match="0 of 2 processes began within 1 s"):
        all_reduce("gloo", 2, 1.0, 60.0)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_time_that_processes_take_to_begin_is_no_part_of_the_sum(plant: Plant) -> None:
    plant("import sys, time\nif '--multiprocessing-fork' in sys.argv:\n    time.sleep(31.0)\n")
    assert all_reduce("gloo", 2, 120.0, 30.0) == "2 devices gave the known sum"


# --- links to other nodes -------------------------------------------------------------------------


class Daemon(trainer_pb2_grpc.TrainerServicer):
    """A daemon that has compared the links of its node."""

    def __init__(self, reply: trainer_pb2.CheckLinksReply) -> None:
        self.reply, self.asked = reply, ""

    def CheckLinks(self, request: trainer_pb2.CheckLinksRequest, context: Any) -> Any:
        self.asked = request.job
        return self.reply


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ({"found": "all is fast"}, None),
        ({"failure": "all is slow", "notice": "one, too"}, CheckFailedError),
        ({"notice": "all is fast, but one", "found": "x"}, NoticedError),
        ({"not_checked": "all is new"}, NotCheckedError),
    ],
)
def test_the_daemon_is_asked_about_links(
    tmp_path: Path, reply: dict[str, str], error: type[Exception] | None
) -> None:
    daemon = Daemon(trainer_pb2.CheckLinksReply(**reply))  # type: ignore[abstract]
    server = grpc.server(ThreadPoolExecutor(1))
    trainer_pb2_grpc.add_TrainerServicer_to_server(daemon, server)
    server.add_insecure_port(f"unix:{tmp_path}/daemon.sock")
    server.start()
    address = DaemonAddress(socket=tmp_path / "daemon.sock", job="team.moe")
    try:
        if error is None:
            assert check_links(address) == "all is fast"
        else:
            with pytest.raises(error, match="all is"):
                check_links(address)
    finally:
        server.stop(None).wait()
    assert daemon.asked == "team.moe"


def test_without_a_daemon_links_are_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotCheckedError):
        check_links(None)
    with pytest.raises(UnreachableError):
        check_links(DaemonAddress(socket=tmp_path / "no.sock", job="team.moe"))
    assert daemon_of_environment() is None
    monkeypatch.setenv("HOLDFAST_SOCKET", "/run/daemon.sock")
    assert daemon_of_environment() is None, "no job"
    monkeypatch.setenv("HOLDFAST_JOB", "team.moe")
    expected = DaemonAddress(socket=Path("/run/daemon.sock"), job="team.moe")
    assert daemon_of_environment() == expected
