"""How parts go to object storage: from where they lie, two at a time, and not after a stop.

Against a client that only remembers; what real servers do is in tests/contract/storage.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import fsspec.asyn
import pytest
from botocore.exceptions import ClientError

from holdfast_core.errors import CorruptError, StorageError
from holdfast_storage.failing import WriteStoppedError
from holdfast_storage.retrying import Retry
from holdfast_storage.s3 import IN_FLIGHT, S3Root
from holdfast_storage.s3_calls import SENT_BYTES, PartBody

PART = 100
SIZE = 1050
QUICK = Retry(attempts=3, first_s=0.0, longest_s=0.0)


class Client:
    """Remembers requests; `hold` keeps parts and aborts waiting, as a server that hangs does."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.parts: dict[int, bytes] = {}
        self.objects: list[int] = []
        self.flying = self.most = 0
        self.hold = False
        self.pairs = False
        """The first part is answered when a second one is there."""
        self.second = asyncio.Event()
        self.began = threading.Event()
        self.failing: dict[int, list[ClientError]] = {}

    async def create_multipart_upload(self, **_: Any) -> dict[str, str]:
        self.calls.append("create")
        return {"UploadId": "one"}

    async def upload_part(self, *, PartNumber: int, Body: PartBody, **_: Any) -> dict[str, str]:
        self.flying += 1
        self.most = max(self.most, self.flying)
        self.began.set()
        if self.flying == 2:
            self.second.set()
        try:
            views = [view async for view in Body]
            if self.pairs:
                await self.second.wait()
            await asyncio.sleep(3600 if self.hold else 0)
            if self.failing.get(PartNumber):
                raise self.failing[PartNumber].pop()
            self.objects += [id(view.obj) for view in views]
            self.parts[PartNumber] = b"".join(views)
        finally:
            self.flying -= 1
        return {"ETag": str(PartNumber)}

    async def complete_multipart_upload(self, **arguments: Any) -> None:
        numbers = [part["PartNumber"] for part in arguments["MultipartUpload"]["Parts"]]
        assert numbers == sorted(self.parts)
        self.calls.append("complete")

    async def abort_multipart_upload(self, **_: Any) -> None:
        self.calls.append("abort")

    async def put_object(self, *, Body: PartBody, **_: Any) -> None:
        self.calls.append(f"put {Body.read().decode()}")


class FileSystem:
    """As much of s3fs as is used."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.loop = fsspec.asyn.get_loop()

    async def set_session(self) -> None:
        return None

    async def get_s3(self, bucket: str) -> Client:
        assert bucket == "bucket"
        return self._client


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def root(client: Client) -> S3Root:
    return S3Root(FileSystem(client), "bucket", "/prefix/", retry=QUICK, part_bytes=PART)


def _error(status: int, code: str) -> ClientError:
    response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response, "upload_part")


def _views(data: bytes) -> Iterator[memoryview]:
    for at in range(0, len(data), 77):
        yield memoryview(data)[at : at + 77]


DATA = bytes(index % 251 for index in range(SIZE))


def test_parts_go_from_where_they_lie_two_at_a_time(client: Client, root: S3Root) -> None:
    client.pairs = True
    root.write("job/file", SIZE, _views(DATA), threading.Event())
    assert b"".join(client.parts[number] for number in sorted(client.parts)) == DATA
    assert [len(client.parts[n]) for n in sorted(client.parts)] == [PART] * 10 + [50]
    assert set(client.objects) == {id(DATA)}
    assert client.most == IN_FLIGHT == 2
    assert client.calls == ["create", "complete"]


async def _sent(body: PartBody) -> list[memoryview]:
    return [view async for view in body]


def test_no_more_is_sent_at_once_than_a_socket_takes() -> None:
    data = bytes(index % 251 for index in range(2 * SENT_BYTES + 1))
    sent = asyncio.run(_sent(PartBody([memoryview(data)[:9], memoryview(data)[9:]])))
    assert b"".join(sent) == data
    assert [len(view) for view in sent] == [9, SENT_BYTES, SENT_BYTES - 8]
    assert {id(view.obj) for view in sent} == {id(data)}


def test_what_fits_into_a_part_is_one_request(client: Client, root: S3Root) -> None:
    root.write("job/file", 5, [memoryview(b"he"), memoryview(b"llo")], threading.Event())
    assert client.calls == ["put hello"]


def test_a_part_is_sent_again_and_then_given_up(client: Client, root: S3Root) -> None:
    client.failing = {2: [_error(503, "SlowDown")] * 2}
    root.write("job/file", SIZE, _views(DATA), threading.Event())
    assert client.calls == ["create", "complete"]
    client.failing = {2: [_error(503, "SlowDown")] * 3}
    with pytest.raises(StorageError, match="503 SlowDown; after 3 attempts"):
        root.write("job/file", SIZE, _views(DATA), threading.Event())
    assert client.calls[2:] == ["create", "abort"]


def test_what_cannot_pass_is_not_sent_again(client: Client, root: S3Root) -> None:
    client.failing = {1: [_error(403, "AccessDenied")]}
    with pytest.raises(StorageError, match="403 AccessDenied; check the daemon's credentials"):
        root.write("job/file", SIZE, _views(DATA), threading.Event())
    assert client.calls == ["create", "abort"]


def test_a_source_that_fails_aborts_the_upload(client: Client, root: S3Root) -> None:
    def breaks() -> Iterator[memoryview]:
        yield memoryview(DATA)[:500]
        raise CorruptError("piece 1")

    with pytest.raises(CorruptError, match="piece 1"):
        root.write("job/file", SIZE, breaks(), threading.Event())
    assert client.calls == ["create", "abort"]
    assert client.flying == 0


@pytest.mark.parametrize("parts", [1, 5], ids=["the last", "a part"])
def test_a_stop_does_not_wait_for_a_server_that_hangs(
    client: Client, root: S3Root, parts: int
) -> None:
    client.hold = True
    stop = threading.Event()

    def stop_once_it_began() -> None:
        client.began.wait(20)
        stop.set()

    threading.Thread(target=stop_once_it_began).start()
    nbytes = PART + parts
    with pytest.raises(WriteStoppedError):
        root.write("job/file", nbytes, _views(DATA[:nbytes]), stop)
    assert client.calls == ["create", "abort"]
