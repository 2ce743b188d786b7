"""A process that overloads a daemon: `hostile.py WAY ARGUMENT...` until it is killed.

It prints a line when it is at full speed. It speaks the protocol without any of its restraint.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import grpc

from holdfast_protos import peer_pb2, peer_pb2_grpc, trainer_pb2, trainer_pb2_grpc

CONNECTIONS = 1000
ELSEWHERE = "127.99.99.99"
"""Another host than those of the daemons."""
THREADS = 8
CALLS_BEFORE_READY = 1000


def _hammer(call: Callable[[int], object]) -> None:
    """Call from several threads, without ever waiting."""
    count, lock = 0, threading.Lock()

    def run() -> None:
        nonlocal count
        while True:
            with lock:
                count += 1
                number = count
            with suppress(grpc.RpcError):
                call(number)
            if number == CALLS_BEFORE_READY:
                print("ready", flush=True)

    for _ in range(THREADS):
        threading.Thread(target=run, daemon=True).start()
    threading.Event().wait()


def saves(path: str, session: str, epoch: str) -> None:
    """Save as a trainer in a tight loop."""
    stub = trainer_pb2_grpc.TrainerStub(grpc.insecure_channel(f"unix:{path}"))

    def grant(step: int) -> None:
        stub.Grant(trainer_pb2.GrantRequest(session=session, epoch=int(epoch), step=10**6 + step))
        stub.Abort(trainer_pb2.AbortRequest(session=session, epoch=int(epoch), step=10**6 + step))

    _hammer(grant)


def reports(address: str, job: str, epoch: str) -> None:
    """Report as a daemon as fast as possible, as one member and as members that do not exist."""
    stub = peer_pb2_grpc.PeerStub(grpc.insecure_channel(address))

    def report(number: int) -> None:
        member = 1 if number % 2 else number
        stub.Report(peer_pb2.ReportMessage(job=job, epoch=int(epoch), member=member))

    _hammer(report)


def silent(kind: str, address: str, beginning: str) -> None:
    """Keep a thousand connections open that send the beginning of a request and nothing more;
    reopen those that are closed."""
    family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
    host, _, port = address.rpartition(":")
    target = address if kind == "unix" else (host, int(port))
    crowd: list[socket.socket] = []
    while True:
        for _ in range(CONNECTIONS):
            one = socket.socket(family, socket.SOCK_STREAM)
            one.settimeout(5)
            with suppress(OSError):
                if kind != "unix":
                    one.bind((ELSEWHERE, 0))
                one.connect(target)
                one.sendall(beginning.encode())
            crowd.append(one)
        print("ready", flush=True)
        threading.Event().wait(1.0)
        for one in crowd[:-CONNECTIONS]:
            one.close()
        del crowd[:-CONNECTIONS]


def grows(descriptor: str) -> None:
    """Take all memory there is through the file of a trainer's arena, again and again."""
    held = int(descriptor)
    ready = False
    while True:
        for nbytes in (1 << 20, 1 << 16, 1 << 12):
            with suppress(OSError):
                while True:
                    os.posix_fallocate(held, os.fstat(held).st_size, nbytes)
        if not ready:
            ready = True
            print("ready", flush=True)


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    ways: dict[str, Callable[..., None]] = {
        "saves": saves,
        "reports": reports,
        "silent": silent,
        "grows": grows,
    }
    ways[sys.argv[1]](*sys.argv[2:])
