"""Bounded containers for data whose amount peers decide."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TypeVar

_V = TypeVar("_V")

OUTBOX_MAX = 1024
"""Messages that may wait for one daemon: more than it has jobs. A daemon with more does not read
them."""


class Recent(dict[str, _V]):
    """Mapping of the newest `size` keys; setting another drops the oldest."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def __setitem__(self, key: str, value: _V) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > self._size:
            del self[next(iter(self))]


class Outbox:
    """Messages for one stream until it ends. A full outbox ends its stream: a daemon that connects
    again receives everything again."""

    def __init__(self, size: int = OUTBOX_MAX) -> None:
        self._size = size
        self._messages: deque[bytes] = deque()
        self._ended = False
        self._news = asyncio.Event()
        self.overflowed = False

    def put(self, message: bytes) -> None:
        """Queue `message`, unless the stream has ended."""
        if len(self._messages) >= self._size:
            self._messages.clear()
            self.overflowed = True
            self.end()
        if not self._ended:
            self._messages.append(message)
            self._news.set()

    def end(self) -> None:
        """End the stream after the messages in the queue."""
        self._ended = True
        self._news.set()

    async def get(self) -> bytes | None:
        """Wait for the next message; None at the end. Only one reader may call this."""
        while not self._messages:
            if self._ended:
                return None
            self._news.clear()
            await self._news.wait()
        return self._messages.popleft()
