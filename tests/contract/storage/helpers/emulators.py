"""Emulators of Google's and Azure's object storage, each a real server that speaks their protocol.

fake-gcs-server is compiled from its Go module, Azurite comes from npm; both go into the cache,
once. They take time and hundreds of MB, and no machine needs them but that of `make test-stores`.

Run as a script, it makes both and prints where they are.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import versitygw
from ports import reserve_port

AZURITE = "3.37.0"
FAKE_GCS = "v1.56.1"
FAKE_GCS_MODULE = "github.com/fsouza/fake-gcs-server"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Published by Azurite, the same everywhere."""
MADE_WITHIN_S = 900.0
STARTED_WITHIN_S = 120.0


def azurite() -> Path:
    """Azurite's command, which is installed when the cache does not have it."""
    tree = versitygw.tools() / f"azurite-{AZURITE}"
    return _made(
        tree / "node_modules" / ".bin" / "azurite-blob",
        ["npm", "install", "--prefix", str(tree), "--no-audit", "--no-fund", f"azurite@{AZURITE}"],
    )


def fake_gcs() -> Path:
    """The command of fake-gcs-server, which is compiled when the cache does not have it."""
    tree = versitygw.tools() / f"fake-gcs-server-{FAKE_GCS}"
    return _made(
        tree / "fake-gcs-server",
        ["go", "install", f"{FAKE_GCS_MODULE}@{FAKE_GCS}"],
        GOBIN=str(tree),
        GOFLAGS="-mod=mod",
    )


def _made(command: Path, making: list[str], **variables: str) -> Path:
    """`command`, after `making` it where it is not there.

    Raises:
        RuntimeError: it cannot be made, in the words of what makes it.
    """
    if command.exists():
        return command
    tool = shutil.which(making[0], path=f"{os.environ['PATH']}:/usr/local/go/bin")
    if tool is None:
        raise RuntimeError(f"The emulators of object storage need {making[0]}: install it")
    versitygw.tools().mkdir(parents=True, exist_ok=True)
    with (versitygw.tools() / "emulators.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not command.exists():  # made by another clone while this one waited
            done = subprocess.run(
                [tool, *making[1:]],
                env={**os.environ, **variables},
                capture_output=True,
                text=True,
                timeout=MADE_WITHIN_S,
                check=False,
            )
            if done.returncode:
                raise RuntimeError(f"{' '.join(making)} failed:\n{done.stderr}")
    return command


class Emulator:
    """A server on a port of 127.0.0.1 that keeps what it is given in memory."""

    def __init__(self, *command: str | Path) -> None:
        """`command`: with `{port}` where the port belongs."""
        self.port = reserve_port()
        words = [str(word).format(port=self.port) for word in command]
        self._process = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until = time.monotonic() + STARTED_WITHIN_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                self.stop()
                raise RuntimeError(f"{words[0]} did not start on port {self.port}")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        """Waits for up to 50 ms."""
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=0.05).close()
        except OSError:
            return False
        return True


class Azure(Emulator):
    """Azurite."""

    def __init__(self) -> None:
        super().__init__(
            *(azurite(), "--inMemoryPersistence", "--silent", "--skipApiVersionCheck"),
            *("--disableTelemetry", "--blobHost", "127.0.0.1", "--blobPort", "{port}"),
        )

    @property
    def options(self) -> dict[str, object]:
        endpoint = f"http://127.0.0.1:{self.port}/{ACCOUNT}"
        parts = {
            "DefaultEndpointsProtocol": "http",
            "AccountName": ACCOUNT,
            "AccountKey": KEY,
            "BlobEndpoint": endpoint,
        }
        return {"connection_string": ";".join(f"{name}={text}" for name, text in parts.items())}


class Google(Emulator):
    """fake-gcs-server."""

    def __init__(self) -> None:
        super().__init__(
            *(fake_gcs(), "-scheme", "http", "-host", "127.0.0.1", "-port", "{port}"),
            *("-public-host", "127.0.0.1:{port}", "-external-url", "http://127.0.0.1:{port}"),
            *("-backend", "memory", "-data", ""),
        )

    @property
    def options(self) -> dict[str, object]:
        return {"token": "anon", "endpoint_url": f"http://127.0.0.1:{self.port}"}


if __name__ == "__main__":
    try:
        print(azurite(), fake_gcs(), sep="\n")
    except RuntimeError as error:
        sys.exit(str(error))
