"""What a network and a busy server do to a writer and a reader of object storage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import interrupted_writer
import pytest
from fault_proxy import Fault, FaultProxy, Request, silent_parts
from interrupted_writer import LARGE, NEW, OLD, s3_store
from stored_snapshots import check_set, snapshot
from tiers import QUICK, TierUnderTest
from versitygw import S3Server

from holdfast_core.durable.choice import MARK_FILE
from holdfast_core.errors import StorageError
from holdfast_storage.failing import WriteStoppedError
from holdfast_storage.sets import SetStore

pytestmark = pytest.mark.s3

PASSING = [fault for fault in Fault if fault is not Fault.NONE]
EVERY = ["PUT partNumber", "POST uploads", "POST uploadId", "PUT object", "HEAD object", "GET list"]


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    proxy = FaultProxy(s3_server.port)
    yield proxy
    proxy.close()


@pytest.fixture
def store(s3_tier: TierUnderTest, proxy: FaultProxy) -> SetStore:
    return s3_store(s3_tier.uri, proxy.port)


def _store_all(store: SetStore) -> None:
    store.commit(NEW, [snapshot(0, NEW, world_size=1, nbytes=LARGE).store(store)])
    (found,) = store.complete()
    check_set(store, found, nbytes=LARGE)


@pytest.mark.parametrize("fault", PASSING, ids=lambda fault: fault.name)
def test_every_request_is_sent_again_when_it_fails_once(
    s3_tier: TierUnderTest, proxy: FaultProxy, fault: Fault
) -> None:
    store = s3_store(s3_tier.uri, proxy.port)
    if fault is Fault.SILENCE:  # which may be the machine's as well, and for longer
        often = replace(QUICK, attempts=100)
        store = s3_store(s3_tier.uri, proxy.port, often, read_timeout_s=0.5)
    failed: set[str] = set()

    def once_of_each(request: Request) -> Fault:
        if request.what in failed:
            return Fault.NONE
        failed.add(request.what)
        return fault

    proxy.play(once_of_each)
    _store_all(store)
    assert failed >= set(EVERY)
    assert store.clean(keep=1, keep_every=0).files == 0


def test_a_part_that_failed_is_sent_again_and_not_the_rank(
    store: SetStore, proxy: FaultProxy
) -> None:
    def second_part_twice(request: Request) -> Fault:
        sent = [r for r in proxy.requests if "partNumber=2" in r.target]
        return Fault.DROPPED if "partNumber=2" in request.target and len(sent) < 3 else Fault.NONE

    proxy.play(second_part_twice)
    _store_all(store)
    parts = [r.target.partition("partNumber=")[2][0] for r in proxy.requests if "part" in r.target]
    assert sorted(parts) == ["1", "2", "2", "2"]


@pytest.mark.parametrize("what", [what for what in EVERY if what != "GET list"])
def test_a_write_that_is_given_up_leaves_nothing(
    store: SetStore, proxy: FaultProxy, what: str, s3_tier: TierUnderTest
) -> None:
    proxy.play(lambda request: Fault.ERROR_503 if request.what == what else Fault.NONE)
    with pytest.raises(StorageError, match=r"503 \w+; after 6 attempts"):
        _store_all(store)
    proxy.play(lambda request: Fault.NONE)
    assert store.complete() == []
    assert s3_tier.root().unfinished("job") == []
    _store_all(store)


def test_a_stopped_write_does_not_wait_for_the_server(
    store: SetStore, proxy: FaultProxy, s3_tier: TierUnderTest
) -> None:
    stop = threading.Event()
    one = snapshot(0, NEW, world_size=1, nbytes=LARGE)
    proxy.play(silent_parts(stop))
    with pytest.raises(WriteStoppedError):
        store.write_rank(NEW, 0, layout=one.layout, manifest=one.manifest, read=one.read, stop=stop)
    assert s3_tier.files() == {}
    assert s3_tier.root().unfinished("job") == []


def test_a_set_whose_manifest_cannot_be_read_now_is_named_and_kept(
    store: SetStore, proxy: FaultProxy, s3_tier: TierUnderTest
) -> None:
    direct = s3_tier.store()
    for generation in (OLD, NEW):
        direct.commit(generation, [snapshot(0, generation, world_size=1).store(direct)])
    before = s3_tier.files()
    bad = "00000001.000000000001/manifest.json"
    proxy.play(
        lambda request: (
            Fault.ERROR_503 if request.method == "GET" and bad in request.target else Fault.NONE
        )
    )
    found = store.complete()
    assert [s.generation for s in found] == [NEW]
    assert [(r.generation, "503" in r.reason) for r in found.rejected] == [(OLD, True)]
    assert store.clean(keep=1, keep_every=0).files == 0
    assert s3_tier.files() == before


class _Killer:
    """Kills a process at one request: before the server receives it, or when it was served."""

    def __init__(self, proxy: FaultProxy, number: int, *, after: bool) -> None:
        self._number = number
        self._after = after
        self._victim = 0
        self._known = threading.Event()
        proxy.play(self._before, self._served)

    def aim(self, victim: int) -> None:
        self._victim = victim
        self._known.set()

    def _before(self, request: Request) -> Fault:
        if request.number != self._number or self._after:
            return Fault.NONE
        self._kill()
        return Fault.DROPPED

    def _served(self, request: Request) -> None:
        if request.number == self._number and self._after:
            self._kill()

    def _kill(self) -> None:
        assert self._known.wait(20)  # 0 would be this process and all beside it
        os.kill(self._victim, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_writer_may_be_killed_at_every_request(
    s3_tier: TierUnderTest, proxy: FaultProxy, after: bool
) -> None:
    direct = s3_tier.store()
    with subprocess.Popen(
        [sys.executable, interrupted_writer.__file__, "fork", s3_tier.uri, str(proxy.port)],
        env={**os.environ, "PYTHONPATH": str(Path(interrupted_writer.__file__).parent)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writers:
        assert writers.stdin is not None and writers.stdout is not None
        for number in range(1, 100):
            killer = _Killer(proxy, number, after=after)
            writers.stdin.write("\n")
            writers.stdin.flush()
            killer.aim(int(writers.stdout.readline()))
            status = int(writers.stdout.readline())
            found = direct.complete()
            assert found.rejected == ()
            for stored in found:
                check_set(direct, stored, nbytes=LARGE)
            if status == 0:
                assert [stored.generation for stored in found] == [NEW]
                break
            _forget(s3_tier, direct)
        assert number > 8
        writers.stdin.close()


def _forget(tier: TierUnderTest, store: SetStore) -> None:
    """What a later, complete generation makes of what the dead writer left."""
    later = OLD.__class__(2, 1)
    store.commit(later, [snapshot(0, later, world_size=1).store(store)])
    store.clean(keep=1, keep_every=0)
    left = {path.partition("/")[0] for path in tier.files()}
    assert left == {"00000002.000000000001", "latest.json", MARK_FILE}
    assert tier.root().unfinished("job") == []
    for path in tier.files():
        tier.remove(path)
