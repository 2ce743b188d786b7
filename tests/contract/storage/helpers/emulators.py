"""Emulators of Google's and Azure's object storage, each a real server that speaks their protocol.

fake-gcs-server is compiled from its Go module, Azurite comes from npm; both go into the cache,
once. They take time and hundreds of MB, and no machine needs them but that of `make test-stores`.

Run as a script, it makes both and prints where they are.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import versitygw
from ports import reserve_port
from served import Server

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


class Emulator(Server):
    """A server that keeps what it is given in memory."""

    def __init__(self, *command: str | Path) -> None:
        """`command`: with `{port}` where the port belongs."""
        port = reserve_port()
        words = [str(word).format(port=port) for word in command]
        super().__init__(port, words, STARTED_WITHIN_S, stderr=subprocess.DEVNULL)


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
