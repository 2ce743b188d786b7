"""The store of a world: where it listens, and how much it holds."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # re-exported

from holdfast._launch.served_store import STORE_BYTES_MAX, serve_store

TIMEOUT_S = 20.0
SERVER = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from played_daemon import PlayedDaemon, Worlds
from torch.distributed import DistError
from holdfast._launch.rendezvous import HoldfastRendezvous
worlds = Worlds()
worlds.begin(1)
handler = HoldfastRendezvous(PlayedDaemon(worlds), "default.moe")
handler.kill = lambda lanes=None: None
handler.next_rendezvous()
print(worlds.stores[1], flush=True)
for line in sys.stdin:
    try:
        handler.store.add("holdfast/finished", 0)
        print("there", flush=True)
    except DistError as error:
        print(error, flush=True)
"""


def _connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), TIMEOUT_S).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "other"),
    [("127.0.0.2", "127.0.0.1"), ("127.0.0.1", "127.0.0.2"), ("localhost", "127.0.0.2")],
)
def test_a_store_listens_at_its_address_and_nowhere_else(host: str, other: str) -> None:
    store = serve_store(host, TIMEOUT_S)
    assert _connects(host, store.port)
    assert not _connects(other, store.port)
    client = TCPStore(host, store.port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    client.set("a", "b")
    assert store.get("a") == b"b"


@pytest.mark.parametrize("host", ["192.0.2.1", "host.invalid"])
def test_an_address_that_is_not_of_this_machine_is_logged(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    # torch's own client then cannot reach it from here either.
    with caplog.at_level(logging.WARNING), pytest.raises((DistError, RuntimeError)):
        serve_store(host, 0.5)
    assert "the store listens on every interface" in caplog.text


@pytest.mark.slow
def test_a_store_that_is_filled_is_closed_and_its_agent_goes_on() -> None:
    helpers = str(Path(__file__).parents[1] / "helpers")
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, helpers],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert server.stdin is not None and server.stdout is not None
    try:
        host, _, port = server.stdout.readline().strip().rpartition(":")
        before = _resident_bytes(server.pid, "VmRSS")
        server.stdin.write("\n")
        assert server.stdout.readline() == "there\n"
        stranger = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
        sent, value = 0, b"x" * (1 << 20)
        with pytest.raises(DistError):
            while sent < 64 * STORE_BYTES_MAX:
                stranger.set(f"junk-{sent}", value)  # type: ignore[arg-type]
                stranger.check([f"junk-{sent}"])  # it has come
                sent += len(value)
                time.sleep(0.01)  # so that a watch held up on a busy machine is in time
        until = time.monotonic() + 3 * TIMEOUT_S
        while _connects(host, int(port)):
            assert time.monotonic() < until
        assert STORE_BYTES_MAX // 2 < sent < 4 * STORE_BYTES_MAX
        assert _resident_bytes(server.pid, "VmHWM") - before < 4 * STORE_BYTES_MAX
        server.stdin.write("\n")
        assert server.stdout.readline() == "the store of epoch 1 is closed\n"
        while _resident_bytes(server.pid, "VmRSS") - before > STORE_BYTES_MAX // 2:
            assert time.monotonic() < until, "what the store held is not freed"
    finally:
        server.kill()
        server.wait()
        server.stdin.close()
        server.stdout.close()


def _resident_bytes(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
