"""A network of a process's own, whose links `tc` makes slow. Needs root, and `ip` and `tc`."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

import psutil

_P = ParamSpec("_P")
_R = TypeVar("_R")
_CLONE_NEWNET = 0x4000_0000


def why_not() -> str:
    """Why there can be no such network here; empty if there can."""
    if missing := [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]:
        return f"{missing[0]} is not installed"
    shape = "ip link set lo up && tc qdisc add dev lo root handle 1: htb default 1"
    command = ["unshare", "--net", "sh", "-c", shape]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else f"no network can be made: {tried.stderr.strip()}"


def run_in_private_network(function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Call `function` in a new process that has a network of its own, with a loopback device."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_enter) as pool:
        return pool.submit(function, *args, **kwargs).result()


def _enter() -> None:
    """Take a new network for this process. It has one thread yet."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no network can be made")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def slow_down(host: str, rate: str, pids: Iterable[int], pids_rate: str) -> None:
    """Limit what an address, and the processes `pids`, send over the loopback device from now on.

    Args:
        rate, pids_rate: as `tc` reads them, such as `40mbit`.
    """
    ports = {
        each.laddr.port
        for pid in pids
        for each in psutil.Process(pid).net_connections("tcp4")
        if each.laddr
    }
    _tc("qdisc add dev lo root handle 1: htb default 1")
    for number, each in ((1, "100gbit"), (2, rate), (3, pids_rate)):
        _tc(f"class add dev lo parent 1: classid 1:{number} htb rate {each} quantum 60000")
    matches = [(f"ip src {host}/32", 2), *((f"ip sport {port} 0xffff", 3) for port in ports)]
    for match, number in matches:
        _tc(f"filter add dev lo parent 1: protocol ip u32 match {match} flowid 1:{number}")


def _tc(arguments: str) -> None:
    environment = {**os.environ, "LC_ALL": "C"}
    subprocess.run(["tc", *arguments.split()], check=True, env=environment)
