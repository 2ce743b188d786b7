"""Short checks of the node that this process runs on: does it compute rightly, keep what it is
given, and is it fast enough to train at all?

A launcher with `--check-node` runs them before it takes part (`failurePolicy.checkNodes`) and now
and then while it waits for its first world, and `holdfast preflight` runs them by hand. They run in
a process of their own, with a time limit: an instruction that ends the process, or memory that
never answers, is a result as well. They need no right that a trainer does not have.

A check fails only if the node gives wrong bytes, or is so slow that no healthy machine is. What
cannot be checked here, such as a disk that this process may not write to, is said and proves
nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from holdfast._environment import read_environment, read_token_file
from holdfast._launch.kernel_log import KernelLog
from holdfast_core.errors import InvalidJobError
from holdfast_core.kernel_messages import KernelMessage, gpu_id
from holdfast_core.node_failures import age_in_words
from holdfast_host import checks as host_checks
from holdfast_host.checks import SIZE, fast_enough, known_product, matrices
from holdfast_host.processes import KILL_S, CheckProcess, pause_s
from holdfast_host.results import (
    CheckFailedError,
    NotCheckedError,
    NoticedError,
    Outcome,
    TooSlowError,
    failures_in_words,
    run_checks,
    write_results,
)
from holdfast_protos import trainer_pb2

log = logging.getLogger(__name__)

LIMIT_S = 330.0
"""Time within which all checks must have ended: devices of a large machine take 20 s to start, and
a busy machine imports torch for a minute."""
TILES = 16
"""Times that the product is repeated in each direction on a GPU, so that all of it takes part."""
MEMORY_BYTES, SHARED_BYTES = 256 << 20, 64 << 20
"""Bytes that are copied in memory and to devices, and written to /dev/shm."""
DEVICE_BYTES_S = 1e9
"""Rate of copies in bytes per second below which something is wrong: a healthy device is more than
ten times as fast."""
PR_SET_PDEATHSIG = 1
"""Operation of prctl(2)."""
ALL_REDUCE_BYTES = 16 << 20
"""Bytes that each device contributes to the sum."""
BEGIN_S = 90.0
"""Time within which all processes begin that sum: each imports torch, which takes a busy machine a
minute."""
ALL_REDUCE_S = 60.0
"""Time for that sum once all have begun it: NCCL finds its way first."""
POLL_S = 0.05
WRONG_SUM = 3
"""Exit code of a process that has found a wrong sum."""
NICENESS = 19
"""Niceness of checks while a launcher waits. It weighs among processes of one control group, such
as those of a pod."""
UNUSED_MIB_MAX = 300
"""MiB of a GPU's memory that may be in use although nobody uses it: the driver takes some for
itself, and the least program takes more."""
RETIRED_PAGES_MAX = 64
"""Pages that GPUs without rows to remap can retire."""
RECOVERIES = {"reset", "reboot"}
"""What nvidia-smi says that a GPU needs which can compute nothing before."""
HEAT = "hw_thermal_slowdown"
SLOWDOWNS = ("hw_slowdown", HEAT)
"""Reasons of nvidia-smi why hardware halves the clock of a GPU, or worse. The first one alone may
be the power of a whole rack, or work that begins."""
CLOCK_LOOKS, CLOCK_PAUSE_S = 3, 1.0
"""How often the driver is asked for these reasons while GPUs work, and the pause before each
time."""
WORK_SIZE, WORK_PRODUCTS = 4096, 16
"""Rows of the matrices that keep a GPU at work, and their products that are queued at a time."""
ASK_AGAIN_S = 0.5
"""Pause between two questions whether a round has ended."""
LINKS_S = 60.0
"""Time for an answer about links; the daemon needs some seconds, and half a minute
if links are broken."""
SHARED = Path("/dev/shm")
YES, NO = {"1", "yes", "active"}, {"0", "no", "not active"}
"""What nvidia-smi says where something is so, and where it is not. Besides, it says in many words
that it does not know."""


# --- processors and memory ------------------------------------------------------------------------


def check_processors() -> str:
    """Multiply matrices and hash bytes on each processor that this process may use, and compare
    them with known answers."""
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)  # so that a thread's product is computed on its own processor
    one, other = (torch.from_numpy(each) for each in matrices())
    product = known_product()

    def multiply() -> str:
        for dtype in (torch.float32, torch.float64):
            found = (one.to(dtype) @ other.to(dtype)).to(torch.int32).numpy()
            if not np.array_equal(found, product):
                return f"{dtype} matrices"
        return ""

    return host_checks.check_processors(multiply)


# --- devices --------------------------------------------------------------------------------------


def check_devices() -> str:
    """Multiply matrices with a known product on each GPU, and copy to it and back."""
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        raise NotCheckedError("torch finds no GPU")
    product = torch.from_numpy(known_product())
    rates = [
        _check_device(torch.device("cuda", number), product)
        for number in range(torch.cuda.device_count())
    ]
    to, back = (min(each) for each in zip(*rates, strict=True))
    there = fast_enough(
        f"{len(rates)} GPUs gave the known answers; copies to them", to, DEVICE_BYTES_S
    )
    return f"{there}; {fast_enough('copies back', back, DEVICE_BYTES_S)}"


def _beside(check: Callable[[], str]) -> str:
    """Make a check of the GPUs, if the driver says that nobody uses them. Training that computes
    nothing for a moment holds memory."""
    rows = _ask_driver("--query-gpu=gpu_uuid,utilization.gpu,memory.used")
    if not rows:
        raise NotCheckedError("the driver does not say whether GPUs are in use")
    for gpu, busy, used_mib in rows:
        if busy != "0" or not used_mib.isdecimal() or int(used_mib) > UNUSED_MIB_MAX:
            raise NotCheckedError(f"{gpu} may be in use, and other work goes first")
    return check()


def _check_device(device: Any, product: Any) -> tuple[float, float]:
    """Bytes per second of copies to a device, and back."""
    import torch  # noqa: PLC0415

    one, other = (torch.from_numpy(each).to(device) for each in matrices())
    is_cuda = device.type == "cuda"
    expected, times = product.to(device), TILES if is_cuda else 1
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        tall, wide = one.to(dtype).repeat(times, 1), other.to(dtype).repeat(1, times)
        found = (tall @ wide).to(torch.int32).view(times, SIZE, times, SIZE)
        if not bool((found == expected[None, :, None, :]).all()):
            raise CheckFailedError(f"{_named(device)} multiplied {dtype} matrices wrongly")
    data = torch.arange(MEMORY_BYTES // 8, dtype=torch.int64, device="cpu")
    data = data.pin_memory() if is_cuda else data
    there, back = torch.empty_like(data, device=device), torch.zeros_like(data)
    back = back.pin_memory() if is_cuda else back
    to_s, back_s = (
        min(_copy_s(device, target, source) for _ in range(3))
        for target, source in ((there, data), (back, there))
    )
    if not torch.equal(data, back):
        raise CheckFailedError(f"bytes that were copied to {_named(device)} came back wrong")
    return MEMORY_BYTES / to_s, MEMORY_BYTES / back_s


def _named(device: Any) -> str:
    """The device with its UUID, which says which one to repair."""
    uuid = _uuid(device)
    return f"{device} ({uuid})" if uuid else str(device)


def _uuid(device: Any) -> str:
    """The UUID of a device as the driver writes it; empty if torch does not tell it."""
    import torch  # noqa: PLC0415

    if device.type != "cuda":
        return ""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", "")
    return f"GPU-{uuid}" if uuid else ""


def _copy_s(device: Any, target: Any, source: Any) -> float:
    """Seconds of a copy, by the clock of the device if it has one."""
    import torch  # noqa: PLC0415

    if device.type != "cuda":
        began_s = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - began_s
    with torch.cuda.device(device):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        target.copy_(source, non_blocking=True)
        ended.record()
        ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


def check_device_clocks() -> str:
    """Ask the driver whether hardware slows GPUs down, at rest and while they multiply matrices:
    heat, or too little power, makes a GPU slow that computes rightly. Heat that lasts fails."""
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        raise NotCheckedError("torch finds no GPU")
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    return clocks_at_work({device: _uuid(device) for device in devices})


def clocks_at_work(devices: Mapping[Any, str]) -> str:
    """The same, while `devices` work, each given with its UUID: the driver knows those of other
    jobs as well."""
    at_rest = _slowed_devices(devices.values())
    stop, problems = threading.Event(), list[str]()
    worker = threading.Thread(target=_keep_at_work, args=(tuple(devices), stop, problems))
    worker.start()
    try:
        looks = []
        for _ in range(CLOCK_LOOKS):
            stop.wait(CLOCK_PAUSE_S)  # nobody sets it before
            looks.append(_slowed_devices(devices.values()))
    finally:
        stop.set()
        worker.join()
    hot = [{gpu for gpu, why in look.items() if HEAT in why} for look in looks]
    always = hot[0].intersection(*hot)
    slowed = {gpu: why for look in (at_rest, *looks) for gpu, why in look.items()}
    if always and not problems:
        words = ", ".join(f"{gpu} ({HEAT})" for gpu in sorted(always))
        raise CheckFailedError(f"for as long as it works, hardware slows down {words}")
    if slowed:
        words = ", ".join(f"{gpu} ({why})" for gpu, why in sorted(slowed.items()))
        raise NoticedError(f"at times, hardware slows down {words}; look at cooling and power")
    if problems:
        raise NotCheckedError(f"GPUs could not be kept at work: {problems[0]}")
    return "hardware slows no GPU down, at rest or at work"


def _slowed_devices(gpus: Collection[str]) -> dict[str, str]:
    """Those of `gpus` that hardware slows down now → why, in words of the driver.

    Raises:
        NotCheckedError: the driver does not tell it of each.
    """
    try:
        rows = _ask_slowdowns("clocks_event_reasons")
    except NotCheckedError:  # drivers before 535
        rows = _ask_slowdowns("clocks_throttle_reasons")
    found = {
        row[0]: [why for why, says in zip(SLOWDOWNS, row[1:], strict=True) if says.lower() in YES]
        for row in rows
    }
    if unknown := set(gpus) - set(found):
        raise NotCheckedError(f"the driver does not know {', '.join(sorted(unknown)) or 'a GPU'}")
    return {gpu: ", ".join(found[gpu]) for gpu in gpus if found[gpu]}


def _ask_slowdowns(group: str) -> list[list[str]]:
    fields = ",".join(f"{group}.{reason}" for reason in SLOWDOWNS)
    return _ask_driver(f"--query-gpu=gpu_uuid,{fields}")


def _keep_at_work(devices: Sequence[Any], stop: threading.Event, problems: list[str]) -> None:
    """Multiply matrices on `devices` until `stop`. What keeps it from that goes to `problems`."""
    import torch  # noqa: PLC0415

    try:
        work = []
        for device in devices:
            is_cuda = device.type == "cuda"
            size, dtype = (WORK_SIZE, torch.float16) if is_cuda else (SIZE, torch.float32)
            one = torch.ones(size, size, device=device, dtype=dtype)
            work.append((device, one, torch.empty_like(one)))
        while not stop.is_set():
            for _, one, product in work:
                for _ in range(WORK_PRODUCTS):
                    torch.mm(one, one, out=product)
            for device, _, _ in work:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
    except RuntimeError as error:  # such as a lack of memory
        problems.append(str(error).partition("\n")[0])


def check_device_memory() -> str:
    """Ask the driver for rows that could not be remapped, which it gives wrong bytes from, for
    pages of older GPUs that could not be retired, and for errors that it could not correct."""
    remapped = retired = list[list[str]]()
    with suppress(NotCheckedError):  # each driver knows one of them at least
        remapped = _ask_driver(
            "--query-remapped-rows=gpu_uuid,remapped_rows.failure,remapped_rows.pending"
        )
    with suppress(NotCheckedError):
        retired = _ask_driver(
            "--query-gpu=gpu_uuid,retired_pages.single_bit_ecc.count,"
            "retired_pages.double_bit.count,retired_pages.pending"
        )
    failed = [row[0] for row in remapped if row[1].lower() in YES]
    if failed:
        raise CheckFailedError(f"rows of the memory of {', '.join(failed)} cannot be remapped")
    pending = [row[0] for row in remapped if row[2].lower() in YES]
    remap = {row[0] for row in remapped if row[1].lower() in NO}
    for gpu, *counts, waits in retired:
        if gpu in remap:
            continue
        if sum(int(count) for count in counts if count.isdecimal()) >= RETIRED_PAGES_MAX:
            raise CheckFailedError(f"no more pages of the memory of {gpu} can be retired")
        pending += [gpu] if waits.lower() in YES else []
    wrong = [
        row[0]
        for row in _ask_driver("--query-gpu=gpu_uuid,ecc.errors.uncorrected.volatile.total")
        if row[1].isdecimal() and int(row[1])
    ]
    if pending or wrong:
        raise NoticedError(
            f"memory errors since the driver started: {', '.join(dict.fromkeys(pending + wrong))}; "
            f"reset or replace them"
        )
    return "the driver reports no memory errors"


def _ask_driver(query: str) -> list[list[str]]:
    """Rows of what nvidia-smi answers.

    Raises:
        NotCheckedError: it is not there, or does not know the query.
    """
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20.0,
            check=True,
        )
    except FileNotFoundError:
        raise NotCheckedError("there is no nvidia-smi") from None
    except (subprocess.SubprocessError, OSError) as error:
        raise NotCheckedError(f"nvidia-smi does not answer: {error}") from error
    rows = [[field.strip() for field in row.split(",")] for row in done.stdout.splitlines()]
    width = query.count(",") + 1
    return [row for row in rows if len(row) == width]


def check_kernel_log() -> str:
    """Look in the kernel's log for faults of this container's GPUs that nothing has ended. It
    fails only if the driver says now that the GPU has to be reset, as not every driver writes down
    that it was."""
    kernel = KernelLog()
    try:
        faults = kernel.past_faults()
    finally:
        kernel.close()
    if faults is None:
        raise NotCheckedError("the kernel's log, or the folder of the driver, cannot be read")
    unusable = [fault for fault in faults if fault.unusable]
    waiting = _gpus_to_recover() if unusable else set()
    for error, found in (
        (CheckFailedError, [fault for fault in unusable if fault.gpu in waiting]),
        (NoticedError, faults),
    ):
        if found:
            raise error("; ".join(map(_fault_in_words, found)))
    return "the kernel has reported no fault of a GPU since its driver was loaded"


def _gpus_to_recover() -> set[str]:
    """GPUs, as `gpu_id` has them, that their driver wants to be reset or their node to be started
    again before anything uses them; none of drivers that do not say it."""
    with suppress(NotCheckedError):
        rows = _ask_driver("--query-gpu=pci.bus_id,gpu_recovery_action")
        return {gpu_id(pci) for pci, action in rows if action.lower() in RECOVERIES}
    return set()


def _fault_in_words(fault: KernelMessage) -> str:
    age_s = time.monotonic() - (fault.at_s or 0.0)
    return f"{age_in_words(max(0.0, age_s))} ago, the kernel wrote: {fault.text}"


# --- what connects devices and nodes --------------------------------------------------------------


def check_device_links() -> str:
    """Sum known numbers over all GPUs of the node with NCCL."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    count = torch.cuda.device_count()
    if count < 2:
        raise NotCheckedError("there are no two GPUs here")
    if not dist.is_nccl_available():
        raise NotCheckedError("torch has no NCCL")
    return all_reduce("nccl", count, BEGIN_S, ALL_REDUCE_S)


def all_reduce(backend: str, count: int, begin_s: float, limit_s: float) -> str:
    """Sum known numbers over `count` processes, each with a device of its own if the backend is
    NCCL, and compare. `limit_s` counts from when all have begun, within `begin_s`."""
    starting = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        arguments = (backend, count, directory, begin_s + limit_s + KILL_S)
        processes = [
            starting.Process(target=_reduce, args=(rank, *arguments), daemon=True)
            for rank in range(count)
        ]
        until = time.monotonic() + begin_s
        for process in processes:
            process.start()
        while (began := _begun(directory, count)) < count and time.monotonic() < until:
            if any(process.exitcode for process in processes):
                break
            time.sleep(POLL_S)
        until = time.monotonic() + (limit_s if began == count else 0.0)
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join(KILL_S)
    codes = [process.exitcode for process in processes]
    if WRONG_SUM in codes:
        raise CheckFailedError(f"the sum over {count} devices is wrong on {_those(codes)}")
    ended = [code for rank, code in enumerate(codes) if rank not in late and code]
    if ended:  # others wait for it in vain, and a signal may be the fault of a plugin of NCCL
        raise NotCheckedError(f"a process that sums over {count} devices ended with {ended[0]}")
    if began < count:
        raise NotCheckedError(f"{began} of {count} processes began within {begin_s:.0f} s")
    if late:
        raise TooSlowError(f"the sum over {count} devices did not end within {limit_s:.0f} s")
    return f"{count} devices gave the known sum"


def _begun(directory: str, count: int) -> int:
    return sum((Path(directory) / str(rank)).exists() for rank in range(count))


def _those(codes: Sequence[int | None]) -> str:
    return ", ".join(str(rank) for rank, code in enumerate(codes) if code == WRONG_SUM)


def _reduce(rank: int, backend: str, count: int, directory: str, limit_s: float) -> None:
    """Take part in the sum as one of `count` processes, and make a file of this name in `directory`
    when it begins; ends with `WRONG_SUM` if it is wrong."""
    _end_with_parent()  # before it holds a device
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=limit_s),
    )
    # Sums of integers that float32 holds exactly, so the order of additions does not matter.
    numbers = torch.arange(ALL_REDUCE_BYTES // 4, device=device) % 1024
    found = (numbers + rank).to(torch.float32)
    (Path(directory) / str(rank)).touch()
    dist.all_reduce(found)
    right = numbers * count + count * (count - 1) // 2
    wrong = not bool((found.to(torch.int64) == right).all())
    dist.destroy_process_group()
    if wrong:
        sys.exit(WRONG_SUM)


def _end_with_parent() -> None:
    """Have the kernel kill this process when the one that has started it ends, however that
    ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a child of `all_reduce` runs this"
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it has ended before
        os._exit(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class DaemonAddress:
    """The daemon of this node, and the job that is asked about."""

    socket: Path
    job: str


def daemon_of_environment() -> DaemonAddress | None:
    """The daemon that the environment of this process names, as that of a trainer's pod does; None
    if it names none."""
    try:
        found = read_environment()
    except InvalidJobError:
        return None
    return None if found.socket is None else DaemonAddress(socket=found.socket, job=found.job)


def check_links(daemon: DaemonAddress | None) -> str:
    """Have the node's daemon compare the links of this node with those of the job's others."""
    from holdfast._daemon.calls import JobCalls  # noqa: PLC0415

    if daemon is None:
        raise NotCheckedError("no daemon and job are named")
    calls = JobCalls(daemon.socket, read_token_file())
    try:
        request = trainer_pb2.CheckLinksRequest(job=daemon.job)
        found = calls.ask(calls.stub.CheckLinks, request, LINKS_S)
    finally:
        calls.close()
    if found.failure:
        raise CheckFailedError(found.failure)
    if found.notice:
        raise NoticedError(found.notice)
    if found.not_checked:
        raise NotCheckedError(found.not_checked)
    return str(found.found)


def checks_of(
    daemon: DaemonAddress | None, *, beside: bool = False
) -> dict[str, Callable[[], str]]:
    """All checks by their names, in order; `beside` other work, GPUs in use are left alone."""

    def of_devices(check: Callable[[], str]) -> Callable[[], str]:
        return partial(_beside, check) if beside else check

    return {
        "processors": check_processors,
        "memory": partial(host_checks.check_memory, MEMORY_BYTES),
        "shared memory": partial(host_checks.check_shared_memory, SHARED, SHARED_BYTES),
        "disk": host_checks.check_disk,
        "clock": host_checks.check_clock,
        "GPUs": of_devices(check_devices),
        "GPU clocks": of_devices(check_device_clocks),
        "GPU memory": check_device_memory,
        "kernel log": check_kernel_log,
        "GPU links": of_devices(check_device_links),
        "links": partial(check_links, daemon),
    }


# --- all of them ----------------------------------------------------------------------------------


class NodeChecks(CheckProcess):
    """Checks that run in a process of their own, from the construction on.

    Args:
        daemon: what is asked about links; None for nothing.
        beside: whether there is other work, which goes first. The checks then leave GPUs alone
            that are in use, and what is too slow has not failed.
        niceness: how much they give way to other processes.
    """

    def __init__(
        self, daemon: DaemonAddress | None, *, beside: bool = False, niceness: int = 0
    ) -> None:
        named = () if daemon is None else ("--socket", str(daemon.socket), "--job", daemon.job)
        options = (
            *named,
            *(("--beside",) if beside else ()),
            *(("--niceness", str(niceness)) if niceness else ()),
        )
        names = list(checks_of(None))
        super().__init__("holdfast.node_checks", options, names, limit_s=LIMIT_S, beside=beside)

    def require(self) -> None:
        """Wait for the results, as `results` does, and log them.

        Raises:
            CheckFailedError: this node must not take part; the message names what has failed.
        """
        results = self.results()
        for result in results:
            level = logging.WARNING if result.outcome is Outcome.NOTICED else logging.INFO
            log.log(level, "check of %s: %s: %s", result.check, result.outcome, result.text)
        if failures := failures_in_words(results):
            log.error("this node does not take part: %s", failures)
            raise CheckFailedError(failures)


class RepeatedChecks:
    """Rounds of checks of a node that waits for its first world, beside other work: what breaks
    meanwhile is found before training depends on it.

    Has no thread: whoever waits calls `look`.

    Args:
        daemon: what is asked about links.
        period_s: time from one round to the next, more or less (`pause_s`).
    """

    def __init__(self, daemon: DaemonAddress, period_s: float) -> None:
        self._daemon, self._period_s = daemon, period_s
        self._round: NodeChecks | None = None
        self._due = self._next_due()

    def look(self) -> float:
        """Start a round that is due, or judge one that has ended. Does not wait, except a few
        seconds for the end of a process that has taken too long.

        Returns:
            Seconds after which to call this again.

        Raises:
            CheckFailedError: this node must not take part; the message names what has failed.
        """
        if self._round is None:
            if (left_s := self._due - time.monotonic()) > 0:
                return left_s
            self._round = NodeChecks(self._daemon, beside=True, niceness=NICENESS)
        if not self._round.is_over():
            return ASK_AGAIN_S
        self._round.require()
        self._round, self._due = None, self._next_due()
        return self._due - time.monotonic()

    def stop(self) -> None:
        """End the round that runs, if there is one. The next one is due after a pause."""
        if self._round is not None:
            self._round.stop()
        self._round, self._due = None, self._next_due()

    def _next_due(self) -> float:
        return time.monotonic() + pause_s(self._period_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all checks, and write each result as a line of JSON once it is there. Returns 1 if one
    has failed."""
    parser = argparse.ArgumentParser(
        prog="python -m holdfast.node_checks",
        description="Check the node that this process runs on; writes a line of JSON for each "
        "check. `holdfast preflight` shows the same as a table. Links to other nodes are compared "
        "by the node's daemon; a trainer's pod names it and the job.",
    )
    parser.add_argument("--socket", type=Path, help="the daemon's socket (daemon.sock)")
    parser.add_argument("--job", help="key of the job")
    parser.add_argument(
        "--beside",
        action="store_true",
        help="other work goes first: use no GPU that is in use, and fail nothing for being slow",
    )
    parser.add_argument(
        "--niceness",
        type=int,
        choices=range(NICENESS + 1),
        default=0,
        metavar="N",
        help="how much to give way to other processes (default: 0, at most 19)",
    )
    args = parser.parse_args(argv)
    if (args.socket is None) != (args.job is None):
        parser.error("--socket and --job go together: give both, or none")
    named = args.socket is not None
    daemon = DaemonAddress(socket=args.socket, job=args.job) if named else daemon_of_environment()
    if args.niceness:
        os.setpriority(os.PRIO_PROCESS, 0, args.niceness)
    checks = checks_of(daemon, beside=args.beside)
    return int(write_results(run_checks(checks, beside=args.beside)))


if __name__ == "__main__":
    sys.exit(main())
