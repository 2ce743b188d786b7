"""What the test cluster takes from the machine: its folders, commands, and what must be installed.

Nothing else in this folder reads the environment.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from holdfast_core.errors import HoldfastError

ROOT = Path(__file__).resolve().parents[3]
"""The repository."""

STATE = Path("/var/lib/holdfast-cluster")
"""Where running clusters keep their files and locks. One place for the whole machine, as there is
one set of namespaces: clones with caches of their own see each other's clusters here."""

POLL_S = 0.25

_DEBIAN_PACKAGES = {
    "buildah": "buildah",
    "conntrack": "conntrack",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "iptables": "iptables",
    "mkfs.ext4": "e2fsprogs",
    "nft": "nftables",
    "nsenter": "util-linux",
    "openssl": "openssl",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
}
"""Command → the package that has it."""

Value = TypeVar("Value")


class ClusterError(HoldfastError):
    """The test cluster, or the machine below it, did not do what was asked."""

    code = "test_cluster"


def cache() -> Path:
    """Where everything that is made once is kept."""
    home = os.environ.get("HOLDFAST_CACHE") or str(Path.home() / ".cache" / "holdfast")
    return Path(home) / "cluster"


def search_path() -> str:
    """PATH with the folders of administration commands, which not every shell has."""
    return f"{os.environ.get('PATH', '/usr/bin:/bin')}:/usr/sbin:/sbin"


def environment() -> dict[str, str]:
    """The environment of commands: ours, with a complete PATH and no proxy before the cluster."""
    direct = f"{os.environ.get('NO_PROXY', '')},10.0.0.0/8".lstrip(",")
    return {**os.environ, "PATH": search_path(), "NO_PROXY": direct, "no_proxy": direct}


def require() -> None:
    """Make sure that the machine can run a cluster; installs Debian packages where it may.

    Raises:
        ClusterError: one sentence that says what is missing.
    """
    if not sys.platform.startswith("linux"):
        raise ClusterError(f"The test cluster needs Linux namespaces; this is {sys.platform}.")
    if os.geteuid() != 0:
        raise ClusterError("The test cluster makes namespaces and mounts: run it as root.")
    if not _is_there("go"):
        raise ClusterError(
            "The test cluster compiles Kubernetes: install Go 1.26 or newer (https://go.dev/dl)."
        )
    if packages := _missing_packages():
        if shutil.which("apt-get") is None:
            raise ClusterError(f"The test cluster needs these packages: {' '.join(packages)}.")
        print(f"Installing {' '.join(packages)} ...", flush=True)
        wait = ("-o", "DPkg::Lock::Timeout=600")  # `make test` may be installing something
        run("apt-get", *wait, "update", "-qq")
        quiet = ("-y", "-qq", "--no-install-recommends")
        apt = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", *wait)
        run(*apt, "install", *quiet, *packages)


def _missing_packages() -> list[str]:
    return sorted(p for command, p in _DEBIAN_PACKAGES.items() if not _is_there(command))


def _is_there(command: str) -> bool:
    return shutil.which(command, path=search_path()) is not None


def run(
    *command: str | Path,
    stdin: str | None = None,
    cwd: Path | None = None,
    timeout_s: float | None = None,
) -> str:
    """Run a command to its end; its standard output.

    Raises:
        ClusterError: with the output of the command, when it fails or takes too long.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            check=False,
            cwd=cwd,
            timeout=timeout_s,
            env=environment(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"{_shown(words)}: {error}") from error
    if done.returncode != 0:
        output = (done.stderr.strip() or done.stdout.strip())[-4000:]
        raise ClusterError(f"{_shown(words)} ended with {done.returncode}:\n{output}")
    return done.stdout


def _shown(words: Sequence[str]) -> str:
    line = " ".join(words)
    return line if len(line) < 200 else f"{line[:200]} ..."


def wait_for(what: str, probe: Callable[[], Value], timeout_s: float) -> Value:
    """The first true value of `probe`; polls, because other processes make it true.

    Raises:
        ClusterError: when it was not true within `timeout_s`.
    """
    until = time.monotonic() + timeout_s
    tick = threading.Event()
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > until:
            raise ClusterError(f"waited {timeout_s:.0f} s in vain for {what}")
        tick.wait(POLL_S)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; waits for another process that holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
