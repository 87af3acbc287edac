"""What all followers of the feed in this process may take together: seats, and memory for large bodies.

A follower that reads nothing costs a seat and the page that it was about to be given. So there are so many seats and no
more, all large pages together have a bound, and whoever takes nothing for minutes is ended and gives back both; it may
come again with its cursor.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import structlog
from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

log = structlog.get_logger(__name__)

MOST_FOLLOWERS = 100
MOST_BYTES = 128 * 1024 * 1024
SMALL_BYTES = 256 * 1024
"""A page up to this size is not counted: with every seat taken these are less than a few large bodies."""
# One piece of less than a mebibyte has so long to be taken: a slow line needs its time, a dead one is noticed.
PATIENCE_S = 180.0
COME_AGAIN_S = 30


class Room:
    """Bytes that several may hold at once, given out in the order in which they are asked for.

    Args:
        most: how many; a single holder may have more.

    Attributes:
        held: how many are given out.
    """

    def __init__(self, most: int = MOST_BYTES) -> None:
        self.held = 0
        self._most = most
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    def take_now(self, size: int) -> bool:
        """Take so many if they are there and nobody waits for them."""
        if self._turn.locked() or not self._fits(size):
            return False
        self.held += size
        return True

    async def take(self, size: int) -> None:
        """Wait for so many, and take them."""
        async with self._turn:
            while not self._fits(size):
                self._freed.clear()
                await self._freed.wait()
            self.held += size

    def give(self, size: int) -> None:
        """Give back what was taken."""
        self.held -= size
        self._freed.set()

    def _fits(self, size: int) -> bool:
        return not self.held or self.held + size <= self._most


class Seats:
    """How many follow, and how many may.

    Args:
        most: how many may.
        patience_s: how long a piece may wait to be taken.

    Attributes:
        taken: how many do.
    """

    def __init__(self, most: int = MOST_FOLLOWERS, patience_s: float = PATIENCE_S) -> None:
        self.most = most
        self.patience_s = patience_s
        self.taken = 0


class Seated(EventSourceResponse):
    """A response that has a seat while it lasts, or says that there is none.

    With our own keep-alives, because theirs may come in the middle of a long event; and our own end, because theirs
    waits for the signal of a uvicorn that owns the process.

    Args:
        events: what is written.
        seats: those of this process.
    """

    def __init__(self, events: AsyncGenerator[bytes], seats: Seats) -> None:
        super().__init__(events, ping=0, send_timeout=seats.patience_s)  # pyright: ignore[reportUnknownMemberType]
        self._seats = seats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        seats = self._seats
        if seats.taken >= seats.most:
            reason = f"{seats.taken} follow the feed of this process already, and no more may: come again later"
            full = JSONResponse({"error": reason}, 503, {"retry-after": str(COME_AGAIN_S)})
            await full(scope, receive, send)
            return
        seats.taken += 1
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            log.warning("a follower of the feed took nothing for too long and was ended", after_s=seats.patience_s)
        finally:
            seats.taken -= 1
