"""What a channel sent and the receiver has not taken yet: held here, since the channel holds nothing."""

from __future__ import annotations

import asyncio
import sys
from collections import deque

from webhooks.tunnel.message import Message
from webhooks.tunnel.relay import Tell

MOST_HELD = 10_000
MOST_BYTES = 64 * 1024 * 1024


class Held:
    """Messages in their order, up to so many of them and to so many bytes of memory.

    Args:
        tell: called once when there is no more room, until all that is held was taken.
        most_bytes: of memory. A message that is larger is held alone.
    """

    def __init__(self, tell: Tell, most_bytes: int = MOST_BYTES) -> None:
        self._tell = tell
        self._most_bytes = most_bytes
        self._messages: deque[tuple[Message, int]] = deque()
        self._bytes = 0
        self._full = self._ended = False
        self._came, self._room = asyncio.Event(), asyncio.Event()

    async def put(self, message: Message) -> None:
        """Add a message, once there is room for it."""
        size = _size(message)
        while self._messages and (len(self._messages) >= MOST_HELD or self._bytes + size > self._most_bytes):
            if not self._full:
                self._full = True
                self._tell(
                    f"{len(self._messages)} messages are held here, and there is room for no more: the channel is read "
                    "on when the receiver has taken some, and what it does not hold until then is lost"
                )
            self._room.clear()
            await self._room.wait()
        self._messages.append((message, size))
        self._bytes += size
        self._came.set()

    def end(self) -> None:
        """Say that nothing more comes."""
        self._ended = True
        self._came.set()

    async def next(self) -> Message | None:
        """Return the next message, as soon as there is one; None when all were returned and no more come."""
        while not self._messages:
            if self._ended:
                return None
            self._came.clear()
            await self._came.wait()
        message, size = self._messages.popleft()
        self._bytes -= size
        self._full = self._full and bool(self._messages)
        self._room.set()
        return message


def _size(message: Message) -> int:
    """Return how much memory a message takes. Many short header lines take much more than their characters."""
    lines = sum(sys.getsizeof(line) + sum(map(sys.getsizeof, line)) for line in message.headers)
    return lines + sum(map(sys.getsizeof, message.writings))
