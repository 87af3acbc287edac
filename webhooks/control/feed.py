"""`GET /api/feed`: the inbox as server-sent events, to many followers, each from a place of its own.

    id: <cursor>                 where to go on: give it back as `after=`, or as `Last-Event-ID`
    event: hello                 first: how many deliveries wait, since when, and how many are held back
    event: delivery              one delivery: `body_base64` are its exact bytes, `headers` its lines in order
    event: pruned                one whose body is not kept any more
    event: position              now and then, while nothing comes: how far the feed is
    : keep-alive                 every fifteen seconds at least

A response is written as fast as its follower reads, a page and a piece of a body at a time, so that no follower costs
more memory than these, however long bodies are and however slowly it reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Literal, TypeVar

import psycopg
import structlog
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from webhooks import deliveries, feed
from webhooks.consumer import Consumer
from webhooks.control.answers import Answer
from webhooks.control.ask import Asker
from webhooks.control.followers import COME_AGAIN_S, NoSeat, Seated, Seats
from webhooks.control.frames import END, KEEP_ALIVE, event, lag, time_of, written
from webhooks.control.operations import Operation, read_query
from webhooks.control.watch import Watch
from webhooks.db import Transaction, ended, finished
from webhooks.errors import Unavailable
from webhooks.feed import Entry, Level, NotAPlace, Page, Place
from webhooks.pool import Pool

T = TypeVar("T")

log = structlog.get_logger(__name__)

WORTH_TELLING_S = 5.0
AGAIN_AFTER_S = 1.0
# All followers ask over one connection, one after the other.
WITHIN_S = 30.0
LIMIT = "SET LOCAL statement_timeout = '10s'"

After = Place | datetime | timedelta | Literal["now", "all"]


class FeedQuery(BaseModel):
    """What to follow, and from where."""

    model_config = ConfigDict(extra="forbid")

    source: list[str] = Field(default_factory=list[str], description="only of these; of all where none is named")
    after: str = Field(default="now", description="a cursor of the feed, `now`, `all`, `2h`, or a time in ISO 8601")


class FeedLag(Answer):
    """What is held back, because a transaction stays open somewhere on the database server."""

    held_back: int
    seconds: float


class FeedWaiting(Answer):
    """What lies between a place and the end of the feed; 10,000 deliveries are counted at most."""

    sources: list[str]
    waiting: int
    waiting_since: datetime | None
    lag: FeedLag


class Feed:
    """Serves the feed of one database.

    Args:
        pool: whose address is used; the feed has a connection of its own.
        consumer: whose sources may be asked for.
        keep_alive_s: after how many seconds of silence a follower is told that there is nothing to tell.
        seats: how many may follow.
        room: what they may hold together.
    """

    def __init__(
        self,
        pool: Pool,
        consumer: Consumer,
        *,
        keep_alive_s: float = feed.KEEP_ALIVE_S,
        seats: Seats | None = None,
    ) -> None:
        self._asker = Asker(pool, WITHIN_S, LIMIT)
        self._watch = Watch(self._asker)
        self._sources = consumer.sources
        self._keep_alive_s = keep_alive_s
        self._seats = seats or Seats()
        self._stopping = asyncio.Event()

    def operations(self) -> list[Operation]:
        return [
            Operation(
                path="/api/feed",
                endpoint=self.follow,
                summary="Follow what is received, as server-sent events",
                query=FeedQuery,
                answers={200: "text/event-stream"},
            ),
            Operation(
                path="/api/feed/waiting",
                endpoint=self.waiting,
                summary="Count what a follower would be given at once",
                query=FeedQuery,
                answers={200: FeedWaiting},
            ),
        ]

    def look(self) -> None:
        """Say that something was accepted in this process."""
        self._watch.look()

    def stop(self) -> None:
        """End every response, before the server is stopped: it waits for them, and they have no end of their own."""
        self._stopping.set()

    async def close(self) -> None:
        """Leave the database, when no response can ask it any more."""
        await self._watch.stop()
        await self._asker.close()

    async def follow(self, request: Request) -> Response:
        try:
            self._seats.take()  # before anything is asked: whoever gets none costs nothing
        except NoSeat as full:
            return JSONResponse({"error": str(full)}, 503, {"retry-after": str(COME_AGAIN_S)})
        try:
            place, sources = await self._asked(request)
            level = await self._watch.fresh()
            hello = event("hello", place, {"version": 1, **await self._standing(place, level, sources)})
        except BaseException:
            self._seats.give()
            raise
        events = _kept_alive(self._events(hello, place, level, sources), self._keep_alive_s, self._stopping)
        return Seated(events, self._seats, self._stopping)

    async def waiting(self, request: Request) -> Response:
        place, sources = await self._asked(request)
        level = await self._watch.fresh()
        return JSONResponse(await self._standing(place, level, sources))

    async def _asked(self, request: Request) -> tuple[Place, frozenset[str]]:
        """Read a query, and find the place it names.

        Raises:
            HTTPException: it cannot be read, names a source that there is not, or a place of another database.
        """
        query = read_query(request, FeedQuery)
        sources = frozenset(query.source)
        if missing := sorted(sources - set(self._sources)):
            there = ", ".join(self._sources) or "none"
            raise HTTPException(404, f"there is no source {', '.join(missing)}; there are: {there}")
        try:
            after = _after(request.headers.get("last-event-id") or query.after)
            return await self._asker.ask(partial(feed.located, after=after)), sources
        except NotAPlace as error:
            raise HTTPException(409, str(error)) from None
        except ValueError as error:
            raise HTTPException(400, str(error)) from None

    async def _events(self, hello: bytes, place: Place, level: Level, sources: frozenset[str]) -> AsyncGenerator[bytes]:
        loop = asyncio.get_running_loop()
        with self._watch.following():
            yield hello
            told, told_at = place, loop.time()
            while True:
                try:
                    page = await self._page(place, sources)
                    async for part in written(page.entries, self._piece):
                        yield part
                except (NotAPlace, _Gone) as reason:
                    # Whoever comes again with its cursor is told, or given the delivery as one without a body.
                    log.warning("a follower of the feed was ended", reason=str(reason))
                    return
                if page.entries:
                    told, told_at = page.entries[-1].place, loop.time()
                place, more = page.place, page.more
                del page  # which need not be kept while nothing comes
                if more:
                    continue
                level = await self._watch.beyond(place, self._keep_alive_s)
                if loop.time() - told_at < self._keep_alive_s:
                    continue
                if place != told or level.held_s >= WORTH_TELLING_S:
                    yield event("position", place, lag(level))
                    told, told_at = place, loop.time()

    async def _page(self, place: Place, sources: frozenset[str]) -> Page:
        return await self._answer(partial(feed.page, after=place, sources=sources))

    async def _piece(self, entry: Entry, start: int) -> bytes:
        """Read the next bytes of a body, whose beginning is with the follower already."""
        content = await self._answer(partial(feed.piece, entry=entry, start=start))
        if not content:
            raise _Gone(f"the rest of delivery {entry.id} is not kept any more")
        return content

    async def _answer(self, question: Callable[[Transaction], Awaitable[T]]) -> T:
        """Ask until the database answers."""
        while True:
            try:
                return await self._asker.ask(question)
            except (Unavailable, psycopg.Error):
                await asyncio.sleep(AGAIN_AFTER_S)

    async def _standing(self, place: Place, level: Level, sources: frozenset[str]) -> dict[str, object]:
        waiting = await self._asker.ask(partial(feed.waiting, after=place, level=level, sources=sources))
        return {
            "sources": sorted(sources or self._sources),
            "waiting": waiting.count,
            "waiting_since": time_of(waiting.since),
            **lag(level),
        }


class _Gone(Exception):
    """The rest of a body cannot be had; the message says of which delivery."""


async def _kept_alive(events: AsyncGenerator[bytes], every_s: float, stopping: asyncio.Event) -> AsyncGenerator[bytes]:
    """Pass events on, say something between two whenever none comes for long, and end when the process does."""
    stop = asyncio.create_task(stopping.wait())
    step: asyncio.Task[bytes] | None = None
    whole = True
    try:
        while not stopping.is_set():
            step = step or asyncio.create_task(_next(events))
            await asyncio.wait({step, stop}, timeout=every_s, return_when=asyncio.FIRST_COMPLETED)
            if step.done():
                try:
                    part, step = step.result(), None
                except StopAsyncIteration:
                    return
                whole = part.endswith(END)
                yield part
            elif whole and not stop.done():
                yield KEEP_ALIVE
    finally:
        stop.cancel()
        # To its end, though whoever cancels this task goes on cancelling it.
        await finished(_closed(events, step))


async def _next(events: AsyncGenerator[bytes]) -> bytes:
    return await anext(events)


async def _closed(events: AsyncGenerator[bytes], step: asyncio.Task[bytes] | None) -> None:
    if step is not None:
        await ended([step])
    await events.aclose()


def _after(text: str) -> After:
    """Read where to start: `now`, `all`, a time, or a cursor.

    Raises:
        ValueError: it is none of these.
    """
    if text == "now":
        return "now"
    if text == "all":
        return "all"
    try:
        return feed.read_place(text)
    except NotAPlace:
        pass
    try:
        return deliveries.since(text)
    except ValueError:
        known = "now, all, a time such as 1h or 2026-01-31T12:00, or a cursor that it gave you"
        raise ValueError(f"after: {text[:100]!r} is no place in the feed: write {known}") from None
