"""What the tests of feed and tunnel share: a deployed consumer whose feed is followed, and a line that can fail."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from consumers import Stack, quick, served, stack
from httpx_sse import ServerSentEvent, aconnect_sse

from webhooks import Consumer, GitHub, Shortcut
from webhooks.control import Control
from webhooks.control.ask import Asker
from webhooks.control.feed import Feed
from webhooks.control.followers import Seats
from webhooks.control.health import Process
from webhooks.serve.process import CONTROL_LIMITS


def senders() -> Consumer:
    return Consumer(gates=[], sources=[Shortcut(), GitHub(), GitHub("mirror")])


@dataclass
class Deployed:
    """A consumer whose control plane is on a socket; its receiver is spoken to without one.

    Attributes:
        stack: receiver and inbox.
        control: the control plane's application.
        port: where it is.
    """

    stack: Stack
    control: Control
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def deployed(
    database_url: str,
    *,
    keep_alive_s: float = 15.0,
    most_bytes: int = 1 << 20,
    seats: Seats | None = None,
    **settings: Any,
) -> AsyncIterator[Deployed]:
    consumer = senders()
    async with stack(database_url, consumer, work=False, most_bytes=most_bytes, settings=quick(**settings)) as running:
        asker = Asker(running.pool)
        control = Control(Process(asker, quick(**settings), None, running.accepter), consumer)
        control.feed = Feed(running.pool, consumer, keep_alive_s=keep_alive_s, seats=seats)
        try:
            async with served(control.app(), CONTROL_LIMITS) as port:
                try:
                    yield Deployed(running, control, port)
                finally:
                    control.feed.stop()
        finally:
            await control.feed.close()
            await asker.close()


@asynccontextmanager
async def following(url: str, query: str = "after=all", **headers: str) -> AsyncIterator[AsyncGenerator[Any]]:
    """The events of a feed as somebody sees them who knows nothing of our own follower."""
    async with (
        httpx.AsyncClient(timeout=20, trust_env=False) as client,
        aconnect_sse(client, "GET", f"{url}/api/feed?{query}", headers=headers) as stream,
    ):
        assert stream.response.status_code == 200, (await stream.response.aread()).decode()
        async with aclosing(stream.aiter_sse()) as events:
            yield events


async def deliveries(events: AsyncGenerator[ServerSentEvent], count: int) -> list[ServerSentEvent]:
    """The next events that are deliveries."""
    found: list[ServerSentEvent] = []
    async with asyncio.timeout(20):
        while len(found) < count:
            event = await anext(events)
            if event.event == "delivery":
                found.append(event)
    return found


def body_of(event: ServerSentEvent) -> bytes:
    return base64.b64decode(json.loads(event.data)["body_base64"], validate=True)


class Line:
    """Forwards connections to a port, and fails on request.

    Attributes:
        target: the port at the other end; it may change.
        opened: how many connections there were.
        passed: how many bytes came back.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.opened = 0
        self.passed = 0
        self._ends: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._cut_at: int | None = None

    def cut(self) -> None:
        """End every connection at once."""
        for end in self._ends:
            end.transport.abort()

    def cut_after(self, count: int) -> None:
        """End the connection that carries the so-manieth byte from now on, right behind it."""
        self._cut_at = self.passed + count

    def freeze(self) -> None:
        """Pass nothing on, and tell nobody: what a laptop that slept finds."""
        self._flows.clear()

    def thaw(self) -> None:
        self._flows.set()

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.opened += 1
        self._ends.add(writer)
        try:
            from_target, to_target = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            self._ends.discard(writer)
            return
        self._ends.add(to_target)
        ways = {
            asyncio.create_task(self._pass(reader, to_target, counted=False)),
            asyncio.create_task(self._pass(from_target, writer, counted=True)),
        }
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for end in (writer, to_target):
            end.transport.abort()
            self._ends.discard(end)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counted: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(16_384):
                await self._flows.wait()
                last = counted and self._cut_at is not None and self.passed + len(data) >= self._cut_at
                if last and self._cut_at is not None:
                    data, self._cut_at = data[: self._cut_at - self.passed], None
                self.passed += len(data) if counted else 0
                writer.write(data)
                await writer.drain()
                if last:
                    return
            # As a proxy does: what was read is passed on before the end is.
            writer.write_eof()

    async def close(self) -> None:
        self.thaw()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def lined(target: int) -> AsyncIterator[tuple[Line, str]]:
    """A line to a port, and its address."""
    line = Line(target)
    server = await asyncio.start_server(line.forward, "127.0.0.1", 0)
    try:
        yield line, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await line.close()
