"""A network of a process's own, whose links `tc` makes slow. Needs root, and `ip` and `tc`."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
_CLONE_NEWNET = 0x4000_0000


def why_not() -> str:
    """Why there can be no such network here; empty if there can."""
    if missing := [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]:
        return f"{missing[0]} is not installed"
    shape = " && ".join(["ip link set lo up", *_commands("127.0.0.1", "1mbit")])
    command = ["unshare", "--net", "sh", "-ec", shape]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else f"`unshare` or `tc` fails: {tried.stderr.strip()}"


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


def slow_down(host: str, rate: str) -> None:
    """Limit what the address `host` sends over the loopback device from now on.

    Args:
        rate: as `tc` reads it, such as `40mbit`.
    """
    for command in _commands(host, rate):
        subprocess.run(command.split(), check=True, env={**os.environ, "LC_ALL": "C"})


def _commands(host: str, rate: str) -> list[str]:
    root = "dev lo parent 1:"
    return [
        "tc qdisc add dev lo root handle 1: htb default 1",
        f"tc class add {root} classid 1:1 htb rate 100gbit quantum 60000",
        f"tc class add {root} classid 1:2 htb rate {rate} quantum 60000",
        f"tc filter add {root} protocol ip u32 match ip src {host}/32 flowid 1:2",
    ]
