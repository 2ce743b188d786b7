"""A tier in S3-compatible object storage.

A file is a multipart upload. Parts are sent straight from the views that hold them, two at a time;
a part that fails is sent again by itself, and the object appears when the last one is confirmed. If
anything goes wrong before that, the upload is aborted. Each part carries a CRC32, which the server
verifies.
"""

from __future__ import annotations

import asyncio
import base64
import threading
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from botocore.exceptions import ClientError

from holdfast_core.errors import CorruptError, StorageError
from holdfast_core.snapshots.layouts import round_up
from holdfast_storage.retrying import Retry
from holdfast_storage.roots import StoredFile, Unfinished
from holdfast_storage.s3_calls import Calls, PartBody, code_of, wait_for
from holdfast_storage.s3_session import S3Session, file_system

MEBIBYTE = 1024 * 1024
PART_BYTES = 16 * MEBIBYTE
PARTS_MAX = 10_000
IN_FLIGHT = 2
READ_BYTES = 16 * MEBIBYTE
READS_IN_FLIGHT = 4
ABORT_WITHIN_S = 5.0
_DELETED_AT_ONCE = 1000


def open_s3(
    uri: str,
    options: Mapping[str, Any],
    retry: Retry,
    *,
    part_bytes: int = PART_BYTES,
    session: S3Session | None = None,
) -> S3Root:
    """The root at `s3://bucket/prefix`, with `options` for s3fs, or in a `session` that has its own
    options."""
    bucket, _, prefix = uri.partition("://")[2].partition("/")
    fs = session or file_system(options)
    return S3Root(fs, bucket, prefix, retry=retry, part_bytes=part_bytes)


class S3Root:
    """`TierRoot` below a prefix of a bucket."""

    def __init__(self, fs: Any, bucket: str, prefix: str, *, retry: Retry, part_bytes: int) -> None:
        """`fs` is an s3fs file system made with the configuration in `s3_calls`."""
        self._calls = Calls(fs, bucket, retry)
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._part_bytes = part_bytes

    def write(
        self, path: str, nbytes: int, parts: Iterable[memoryview], stop: threading.Event
    ) -> None:
        batches = _batches(parts, self._part_size(nbytes))
        if nbytes <= self._part_size(nbytes):
            views = [view for batch in batches for view in batch]
            wait_for(self._calls.start(self._put(path, views)), stop)
            return
        upload = _Upload(self._calls, self._key(path), nbytes)
        upload.send(batches, stop)

    def create(self, path: str, data: bytes) -> bool:
        views = [memoryview(data)]
        try:
            self._calls.run(self._put(path, views, IfNoneMatch="*"))
        except ClientError as error:
            if code_of(error)[0] == 412:
                return False
            # A store without conditional puts: two writers that create the same object at the same
            # instant both succeed, and each sees one whole object.
            if self.size(path) is not None:
                return False
            self._calls.run(self._put(path, views))
        return True

    def size(self, path: str) -> int | None:
        sending = self._calls.send("head_object", _is_missing, Key=self._key(path))
        try:
            return int(self._calls.run(sending)["ContentLength"])
        except ClientError:
            return None

    def read(self, path: str, start: int, buffer: memoryview) -> None:
        got = self._calls.run(self._read(self._key(path), start, buffer))
        if got != len(buffer):
            raise CorruptError(f"{path} ends too early: {len(buffer) - got} bytes are missing")

    def files(self, path: str) -> list[StoredFile]:
        files = []
        arguments: dict[str, Any] = {"Prefix": f"{self._key(path)}/"}
        while True:
            answer = self._calls.run(self._calls.send("list_objects_v2", **arguments))
            for each in answer.get("Contents", ()):
                name = each["Key"][len(self._prefix) :]
                at = each["LastModified"].timestamp()
                files.append(StoredFile(path=name, bytes=int(each["Size"]), modified_s=at))
            if not answer.get("IsTruncated"):
                return files
            arguments["ContinuationToken"] = answer["NextContinuationToken"]

    def unfinished(self, path: str) -> list[Unfinished]:
        uploads = []
        arguments: dict[str, Any] = {"Prefix": f"{self._key(path)}/"}
        while True:
            sending = self._calls.send("list_multipart_uploads", _is_not_there, **arguments)
            try:
                answer = self._calls.run(sending)
            except ClientError:
                return []  # the store ends uploads by itself, or has none
            for each in answer.get("Uploads", ()):
                name = each["Key"][len(self._prefix) :]
                at = each["Initiated"].timestamp()
                uploads.append(Unfinished(path=name, token=each["UploadId"], modified_s=at))
            if not answer.get("IsTruncated"):
                return uploads
            arguments["KeyMarker"] = answer["NextKeyMarker"]
            arguments["UploadIdMarker"] = answer["NextUploadIdMarker"]

    def discard(self, unfinished: Unfinished) -> None:
        self._calls.run(_abort(self._calls, self._key(unfinished.path), unfinished.token))

    def delete(self, paths: Sequence[str]) -> None:
        for at in range(0, len(paths), _DELETED_AT_ONCE):
            keys = [{"Key": self._key(path)} for path in paths[at : at + _DELETED_AT_ONCE]]
            sending = self._calls.send("delete_objects", Delete={"Objects": keys, "Quiet": True})
            if failed := self._calls.run(sending).get("Errors"):
                raise StorageError(
                    f"removing {failed[0].get('Key')}: {failed[0].get('Code')}; check what the "
                    f"daemon's credentials may do in this bucket"
                )

    def _key(self, path: str) -> str:
        return f"{self._prefix}{path}"

    def _part_size(self, nbytes: int) -> int:
        least = -(-nbytes // PARTS_MAX)
        return self._part_bytes if least <= self._part_bytes else round_up(least, MEBIBYTE)

    async def _put(self, path: str, views: Sequence[memoryview], **condition: str) -> None:
        await self._calls.send(
            "put_object",
            _is_refused if condition else None,
            Key=self._key(path),
            Body=PartBody(views),
            ChecksumCRC32=_crc32(views),
            **condition,
        )

    async def _read(self, key: str, start: int, buffer: memoryview) -> int:
        room = asyncio.Semaphore(READS_IN_FLIGHT)

        async def one(at: int) -> int:
            async with room:
                return await self._calls.read(key, start + at, buffer[at : at + READ_BYTES])

        return sum(await asyncio.gather(*map(one, range(0, len(buffer), READ_BYTES))))


class _Upload:
    """One multipart upload."""

    def __init__(self, calls: Calls, key: str, nbytes: int) -> None:
        self._calls = calls
        self._key = key
        self._nbytes = nbytes
        self._id = ""
        self._sent: list[Mapping[str, Any]] = []
        self._flying: deque[Future[Mapping[str, Any]]] = deque()
        self._beginning = b""

    def send(self, batches: Iterator[list[memoryview]], stop: threading.Event) -> None:
        """Send all parts and make the object appear; abort the upload when that fails."""
        creating = self._calls.send(
            "create_multipart_upload", Key=self._key, ChecksumAlgorithm="CRC32"
        )
        self._id = wait_for(self._calls.start(creating), stop)["UploadId"]
        try:
            for number, views in enumerate(batches, start=1):
                if number == 1:
                    self._beginning = bytes(views[0])
                if len(self._flying) == IN_FLIGHT:
                    self._sent.append(wait_for(self._flying.popleft(), stop))
                self._flying.append(self._calls.start(self._part(number, views)))
            while self._flying:
                self._sent.append(wait_for(self._flying[0], stop))
                self._flying.popleft()
            wait_for(self._calls.start(self._finish()), stop)
        except BaseException:
            for future in self._flying:
                future.cancel()
            # No longer than this: a stopped write must return soon. `clean` removes what is left.
            with suppress(StorageError, TimeoutError):
                self._calls.start(_abort(self._calls, self._key, self._id)).result(ABORT_WITHIN_S)
            raise

    async def _part(self, number: int, views: Sequence[memoryview]) -> Mapping[str, Any]:
        checksum = await asyncio.to_thread(_crc32, views)
        answer = await self._calls.send(
            "upload_part",
            Key=self._key,
            UploadId=self._id,
            PartNumber=number,
            Body=PartBody(views),
            ChecksumCRC32=checksum,
        )
        return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumCRC32": checksum}

    async def _finish(self) -> None:
        try:
            await self._calls.send(
                "complete_multipart_upload",
                _is_missing,
                Key=self._key,
                UploadId=self._id,
                MultipartUpload={"Parts": self._sent},
            )
        except ClientError as error:
            # The second attempt also gets this when the answer to the first was lost.
            if not await self._is_there():
                raise StorageError(
                    f"the upload of {self._key} is gone: {code_of(error)[1]}; a lifecycle rule may "
                    f"abort uploads too early; the next copy tries again"
                ) from error

    async def _is_there(self) -> bool:
        try:
            head = await self._calls.send("head_object", _is_missing, Key=self._key)
        except ClientError:
            return False
        beginning = bytearray(len(self._beginning))
        await self._calls.read(self._key, 0, memoryview(beginning))
        return int(head["ContentLength"]) == self._nbytes and beginning == self._beginning


async def _abort(calls: Calls, key: str, upload: str) -> None:
    with suppress(ClientError):
        await calls.send("abort_multipart_upload", _is_missing, Key=key, UploadId=upload)


def _batches(parts: Iterable[memoryview], size: int) -> Iterator[list[memoryview]]:
    """Lists of views, each list of exactly `size` bytes in total; the last may be shorter."""
    batch: list[memoryview] = []
    room = size
    for part in parts:
        left = part
        while len(left):
            batch.append(left[:room])
            left = left[room:]
            room -= len(batch[-1])
            if room == 0:
                yield batch
                batch, room = [], size
    if batch:
        yield batch


def _crc32(views: Sequence[memoryview]) -> str:
    value = 0
    for view in views:
        value = zlib.crc32(view, value)
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def _is_missing(error: Exception) -> bool:
    status, code = code_of(error)
    return status == 404 and code != "NoSuchBucket"


def _is_not_there(error: Exception) -> bool:
    return code_of(error)[0] in (404, 405, 501)


def _is_refused(error: Exception) -> bool:
    """Whether a conditional put was refused: the object exists, or the store has no conditions."""
    status, code = code_of(error)
    return status in (412, 501) or code == "NotImplemented"
