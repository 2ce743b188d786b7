"""Containers with an end."""

from __future__ import annotations

import asyncio

from holdfast_operator.control.bounded import Outbox, Recent


def test_the_newest_keys_are_kept() -> None:
    recent = Recent[int](2)
    for key in "aba":
        recent[key] = 1
    recent["c"] = 1
    assert list(recent) == ["a", "c"]


def test_a_stream_that_is_not_read_ends_and_keeps_nothing() -> None:
    async def main() -> None:
        outbox = Outbox(3)
        for number in range(100):
            outbox.put(bytes([number]))
        assert outbox.overflowed
        assert await outbox.get() is None

    asyncio.run(main())


def test_messages_before_the_end_are_sent_and_those_after_it_are_not() -> None:
    async def main() -> None:
        outbox = Outbox(3)
        waiting = asyncio.ensure_future(outbox.get())
        await asyncio.sleep(0)
        outbox.put(b"a")
        outbox.put(b"b")
        outbox.end()
        outbox.put(b"c")
        assert [await waiting, await outbox.get(), await outbox.get()] == [b"a", b"b", None]

    asyncio.run(main())
