"""One byte changes: at rest in every kind of file, and on the wire. It is found and never used."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from combinations import Combination
from daemons import DaemonProcess
from harness import RawCluster, RawJob
from raw_trainer import PIECE_BYTES
from waiting import wait_for

MEMBERS = 4
VICTIM = 2


@pytest.fixture
def job(cluster: RawCluster, combination: Combination) -> RawJob:
    job = combination.job(cluster, cluster.start_nodes(MEMBERS))
    job.form()
    job.start_trainers()
    job.train(2)
    return job


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def _files(job: RawJob, member: int) -> Path:
    return job.daemon(member).root / "jobs" / job.name


def _sealed_slot(job: RawJob, member: int) -> int:
    """The slot that holds the newest generation."""
    slots = job.daemon(member).job(job.name)["slots"]
    return next(int(s["slot"]) for s in slots if s["generation"] == str(job.generation))


def _flip_snapshot(job: RawJob, member: int) -> None:
    (arena,) = _files(job, member).glob("arenas/*/arena")
    slot_bytes = arena.stat().st_size // 3
    # What is carried over may lie in another slot.
    piece = next(p for p in itertools.count(30) if p not in job.trainers[member].carried)
    _flip(arena, _sealed_slot(job, member) * slot_bytes + piece * PIECE_BYTES + 576)


def _flip_parity(job: RawJob, member: int) -> None:
    blocks = job.daemon(member).job(job.name)["parity"]
    newest = str(job.generation)
    (slot,) = (b["slot"] for b in blocks if (b["lane"], b["generation"]) == (0, newest))
    _flip(_files(job, member) / "parity" / f"0-{slot}.block", 54_321)


def _corrupt(daemon: DaemonProcess, job: RawJob, kind: str) -> float:
    namespace, name = job.name.split(".")
    labels = f'kind="{kind}",moejob="{name}",namespace="{namespace}"'
    return daemon.metric(f"holdfast_corrupt_total{{{labels}}}")


def _lose(cluster: RawCluster, job: RawJob, member: int) -> None:
    job.daemon(member).lose()
    (job.nodes[member],) = cluster.start_nodes(1)


def test_a_byte_flipped_in_a_sealed_slot_is_repaired_from_parity(job: RawJob) -> None:
    newest = job.generation
    _flip_snapshot(job, VICTIM)
    job.form()
    restored = job.start_trainers()
    assert job.check_restored(restored, newest) == newest
    assert [source for _, _, source in restored] == ["local", "local", "parity", "local"]
    assert _corrupt(job.daemon(VICTIM), job, "arena") == 1
    job.train(2)


def test_the_scrub_finds_and_repairs_a_flipped_byte_while_training_goes_on(
    cluster: RawCluster, combination: Combination
) -> None:
    job = combination.job(cluster, cluster.start_nodes(MEMBERS, "--scrub-interval", "0.1"))
    job.form()
    job.start_trainers()
    job.train(2)
    newest = job.generation
    _flip_snapshot(job, VICTIM)
    wait_for("the scrub to find it", lambda: _corrupt(job.daemon(VICTIM), job, "arena") == 1)
    wait_for(
        "the slot to be rebuilt",
        lambda: any(
            s["generation"] == str(newest) and s["state"] == "sealed" and s["verified"]
            for s in job.daemon(VICTIM).job(job.name)["slots"]
        ),
    )
    _flip_parity(job, VICTIM)
    wait_for("the scrub to find it", lambda: _corrupt(job.daemon(VICTIM), job, "parity") == 1)
    wait_for(
        "the parity to be built again",
        lambda: any(
            p["generation"] == str(newest) and p["state"] == "ready"
            for p in job.daemon(VICTIM).job(job.name)["parity"]
        ),
    )
    _lose(cluster, job, 0)
    job.form()
    assert job.check_restored(job.start_trainers(), newest) == newest
    job.train(2)


def test_a_byte_flipped_in_a_parity_block_is_found_before_the_block_is_needed(
    cluster: RawCluster, job: RawJob
) -> None:
    newest = job.generation
    _flip_parity(job, VICTIM)
    job.form()
    assert job.check_restored(job.start_trainers(), newest) == newest
    assert _corrupt(job.daemon(VICTIM), job, "parity") == 1
    newest = job.train()
    _lose(cluster, job, 0)
    job.form()
    assert job.check_restored(job.start_trainers(), newest) == newest


def test_a_byte_flipped_in_a_manifest_of_a_daemon_that_restarts_costs_only_a_rebuild(
    cluster: RawCluster, job: RawJob
) -> None:
    newest = job.generation
    slot = _sealed_slot(job, VICTIM)
    job.daemon(VICTIM).kill()
    (manifest,) = _files(job, VICTIM).glob(f"arenas/*/slot-{slot}.manifest")
    _flip(manifest, manifest.stat().st_size // 2)
    cluster.restart(job.nodes[VICTIM])
    job.form()
    restored = job.start_trainers()
    assert job.check_restored(restored, newest) == newest
    assert restored[VICTIM][2] == "parity"
    assert _corrupt(job.daemon(VICTIM), job, "manifest") == 1
    job.train(2)


def test_a_byte_flipped_in_a_manifest_file_is_found_by_the_next_verification(job: RawJob) -> None:
    newest = job.generation
    slot = _sealed_slot(job, VICTIM)
    (manifest,) = _files(job, VICTIM).glob(f"arenas/*/slot-{slot}.manifest")
    _flip(manifest, manifest.stat().st_size // 2)
    job.form()
    restored = job.start_trainers()
    assert job.check_restored(restored, newest) == newest
    assert restored[VICTIM][2] == "parity"
    job.train(2)


def test_a_byte_flipped_in_the_entry_of_a_parity_block_costs_only_the_block(
    cluster: RawCluster, job: RawJob
) -> None:
    newest = job.generation
    job.daemon(VICTIM).kill()
    for entry in _files(job, VICTIM).glob("parity/*.entry"):
        _flip(entry, entry.stat().st_size // 2)
    cluster.restart(job.nodes[VICTIM])
    job.form()
    assert job.check_restored(job.start_trainers(), newest) == newest
    newest = job.train()
    _lose(cluster, job, 0)
    job.form()
    assert job.check_restored(job.start_trainers(), newest) == newest


@pytest.mark.parametrize("member", [0, VICTIM])
def test_a_byte_flipped_in_the_saved_epoch_is_made_good_by_the_control_loop(
    cluster: RawCluster, job: RawJob, member: int
) -> None:
    newest = job.generation
    daemon = job.daemon(member)
    daemon.kill()
    saved = _files(job, member) / "epoch.json"
    _flip(saved, saved.stat().st_size // 2)
    cluster.restart(daemon.node)
    assert _corrupt(daemon, job, "manifest") == 1
    state = cluster.control.state(daemon.node, job.name)
    assert state is None or state.epoch == 0
    job.readdress()
    job.trainers[member].reopen()
    newest = job.train()
    job.form()
    assert job.check_restored(job.start_trainers(), newest) == newest


class FlippingProxy:
    """A TCP proxy to bulk services; flips a byte of every large enough block while `flips` > 0."""

    def __init__(self) -> None:
        self._listeners: list[socket.socket] = []
        self.flips = 0
        self.flipped = 0
        self._lock = threading.Lock()

    def address_for(self, target: str) -> str:
        """Where the proxy takes connections to a bulk service."""
        host, _, port = target.rpartition(":")
        listener = socket.create_server(("127.0.0.1", 0))
        self._listeners.append(listener)
        threading.Thread(
            target=self._accept, args=(listener, (host, int(port))), daemon=True
        ).start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    def _accept(self, listener: socket.socket, target: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                try:
                    far = socket.create_connection(target)
                except ConnectionRefusedError:  # the daemon is lost
                    near.close()
                    continue
                for source, sink, damages in ((near, far, False), (far, near, True)):
                    threading.Thread(
                        target=self._pump, args=(source, sink, damages), daemon=True
                    ).start()

    def _pump(self, source: socket.socket, sink: socket.socket, damages: bool) -> None:
        with contextlib.suppress(OSError), source, sink:
            while data := source.recv(1 << 20):
                sink.sendall(self._damaged(data) if damages else data)
            sink.shutdown(socket.SHUT_WR)

    def _damaged(self, data: bytes) -> bytes:
        with self._lock:
            if len(data) < 1024 or not self.flips:
                return data
            self.flips -= 1
            self.flipped += 1
        at = len(data) // 2
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()


@pytest.fixture
def proxy(cluster: RawCluster, job: RawJob) -> Iterator[FlippingProxy]:
    """All bytes that members send each other pass through it: any that holds a copy may send it."""
    proxy = FlippingProxy()
    for node in job.nodes:
        job.bulk_addresses[node] = proxy.address_for(cluster.wait_beat(node).bulk_address)
    job.form()
    job.start_trainers()
    yield proxy
    proxy.close()


def test_a_byte_flipped_on_the_wire_is_fetched_again(job: RawJob, proxy: FlippingProxy) -> None:
    proxy.flips = 2
    newest = job.train(2)
    assert proxy.flipped == 2
    _lose(job.cluster, job, 0)
    proxy.flips = 1
    job.form()
    assert job.check_restored(job.start_trainers(), newest) == newest
    assert proxy.flipped == 3


def test_a_wire_that_keeps_flipping_bytes_stops_protection_and_not_training(
    job: RawJob, proxy: FlippingProxy
) -> None:
    newest = job.train()
    proxy.flips = 1_000_000
    job.step += 1
    job.save(job.step)
    wait_for(
        "the damage to be counted",
        lambda: sum(_corrupt(job.daemon(m), job, "wire") for m in range(MEMBERS)) >= 2,
    )
    assert job.protected() == newest
    for member in range(MEMBERS):
        assert _corrupt(job.daemon(member), job, "arena") == 0
    proxy.flips = 0
    job.wait_protected(job.step)
    newest = job.generation
    _lose(job.cluster, job, 0)
    job.form()
    assert job.check_restored(job.start_trainers(), newest) == newest
