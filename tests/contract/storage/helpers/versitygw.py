"""A real S3-compatible server over a directory, built once from its Go module.

Run as a script, it builds the server and prints where it is.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ports import reserve_port
from served import Server

VERSION = "v1.8.0"
MODULE = "github.com/versity/versitygw/cmd/versitygw"
ACCESS = "tester"
SECRET = "tester-secret"
BUCKET = "tier"
BUILT_WITHIN_S = 900.0
STARTED_WITHIN_S = 20.0


def tools() -> Path:
    """Folder in the cache for what tests build once."""
    cache = Path(os.environ.get("HOLDFAST_CACHE") or Path.home() / ".cache" / "holdfast")
    return cache / "tools"


def binary() -> Path:
    """Where the server is, or will be."""
    return tools() / f"versitygw-{VERSION}" / "versitygw"


def build() -> Path:
    """Compile the server when the cache does not have it; about a minute on an idle machine.

    Raises:
        RuntimeError: there is no Go, or the compiler failed, in its words.
    """
    target = binary()
    if target.exists():
        return target
    go = shutil.which("go") or shutil.which("/usr/local/go/bin/go")
    if go is None:
        raise RuntimeError(
            "The tests of object storage need an S3 server, which is built with Go: install Go "
            "1.24 or newer (https://go.dev/dl), or leave them out with -m 'not s3'"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():  # made by another clone while this one waited
            new = target.parent / "new"
            done = subprocess.run(
                [go, "install", f"{MODULE}@{VERSION}"],
                env={**os.environ, "GOBIN": str(new), "GOFLAGS": "-mod=mod"},
                capture_output=True,
                text=True,
                timeout=BUILT_WITHIN_S,
                check=False,
            )
            if done.returncode:
                raise RuntimeError(f"versitygw {VERSION} was not built:\n{done.stderr}")
            (new / "versitygw").rename(target)
    return target


class S3Server(Server):
    """One versitygw process with one bucket, over `directory`. It may have more users than its
    tester, each with a bucket of its own."""

    def __init__(
        self,
        directory: Path,
        users: Mapping[str, str] | None = None,
        tls: tuple[Path, Path] | None = None,
    ) -> None:
        """`users`: names, which are those of their buckets, too, and their secrets. `tls`: files of
        a certificate and its key; None: plain HTTP, as users need."""
        root = directory / "buckets"
        self.bucket = root / BUCKET
        """Directory of `BUCKET`, which has a file for each object."""
        self.bucket.mkdir(parents=True)
        (directory / "users").mkdir()
        port = reserve_port()
        command = [
            *(build(), "--access", ACCESS, "--secret", SECRET, "--quiet"),
            *(("--cert", tls[0], "--key", tls[1]) if tls else ()),
            *("--port", f"127.0.0.1:{port}", "--iam-dir", directory / "users"),
            *("--iam-cache-disable", "posix", root),
        ]
        super().__init__(port, command, STARTED_WITHIN_S)
        for name, secret in (users or {}).items():
            self.set_user(name, secret, "create-user", "--role", "user")
            self._administer("create-bucket", "--owner", name, "--bucket", name)

    def set_user(self, name: str, secret: str, doing: str = "update-user", *more: str) -> None:
        """Make a user, or give it another secret."""
        self._administer(doing, "--access", name, "--secret", secret, *more)

    def _administer(self, *command: str) -> None:
        endpoint = ("--endpoint-url", f"http://127.0.0.1:{self.port}")
        subprocess.run(
            [str(binary()), "admin", "--access", ACCESS, "--secret", SECRET, *endpoint, *command],
            check=True,
            stdout=subprocess.DEVNULL,
        )


def options(port: int, *, read_timeout_s: float = 20.0) -> dict[str, object]:
    """What fsspec needs to talk to the server, or to a proxy before it."""
    return {
        "key": ACCESS,
        "secret": SECRET,
        "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{port}", "region_name": "us-east-1"},
        "config_kwargs": {"read_timeout": read_timeout_s, "connect_timeout": 5},
    }


if __name__ == "__main__":
    try:
        print(build())
    except RuntimeError as error:
        sys.exit(str(error))
