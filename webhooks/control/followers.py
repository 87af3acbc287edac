"""The seats of the feed's followers in this process: so many, and no more.

A follower that reads nothing costs a seat, a page and a piece of a body. One that takes nothing for minutes is ended
and gives its seat back; it may come again with its cursor.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import structlog
from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from webhooks.db import ended

log = structlog.get_logger(__name__)

MOST_FOLLOWERS = 100
# One piece of less than a mebibyte has so long to be taken: a slow line needs its time, a dead one is noticed.
PATIENCE_S = 180.0
COME_AGAIN_S = 30
GRACE_S = 1.0


class NoSeat(Exception):
    """So many follow already that no more may; the message says how many."""


class Seats:
    """How many follow, and how many may.

    Args:
        most: how many may.
        patience_s: how long a part may wait to be taken.

    Attributes:
        taken: how many do.
    """

    def __init__(self, most: int = MOST_FOLLOWERS, patience_s: float = PATIENCE_S) -> None:
        self.most = most
        self.patience_s = patience_s
        self.taken = 0

    def take(self) -> None:
        """Take one.

        Raises:
            NoSeat: there is none.
        """
        if self.taken >= self.most:
            raise NoSeat(f"{self.taken} follow the feed of this process already, and no more may: come again later")
        self.taken += 1

    def give(self) -> None:
        """Give one back."""
        self.taken -= 1


class Seated(EventSourceResponse):
    """A response that has a seat, and gives it back when it is over.

    With our own keep-alives, because theirs may come in the middle of a long event; and our own end, because theirs
    waits for the signal of a uvicorn that owns the process.

    Args:
        events: what is written.
        seats: those of this process; one of them is taken.
        stopping: set when the process stops.
    """

    def __init__(self, events: AsyncGenerator[bytes], seats: Seats, stopping: asyncio.Event) -> None:
        super().__init__(events, ping=0, send_timeout=seats.patience_s)  # pyright: ignore[reportUnknownMemberType]
        self._seats = seats
        self._stopping = stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        abort: Callable[[], None] = scope.get("webhooks.abort", lambda: None)
        cutting = asyncio.create_task(self._cut(abort), name="webhooks-feed-cut")
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            log.warning(
                "a follower of the feed took nothing for too long and was ended", after_s=self._seats.patience_s
            )
            abort()
        finally:
            self._seats.give()
            await ended([cutting])

    async def _cut(self, abort: Callable[[], None]) -> None:
        """Cut the connection of a follower that does not take the end when the process stops."""
        await self._stopping.wait()
        await asyncio.sleep(GRACE_S)
        abort()
