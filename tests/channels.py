"""A channel as smee.io serves it, on a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qsl

READY = b"id: 0\nevent: ready\ndata: {}\n\n"


def written(value: Any) -> str:
    """JSON as JavaScript's JSON.stringify writes it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def told(headers: Iterable[tuple[str, str]], body: str, **more: Any) -> str:
    """The data of an event, as the server makes it of a request."""
    lines = {"host": "smee.example", "connection": "close", **{name.lower(): value for name, value in headers}}
    rest = {**more, "query": {}, "timestamp": 1_780_000_000_000}
    return f"{written(lines)[:-1]},{f'{chr(34)}body{chr(34)}:{body},' if body else ''}{written(rest)[1:]}"


def event(data: str, number: int = 1) -> bytes:
    return f"id: {number}\ndata: {data}\n\n".encode()


class Server:
    """smee.io itself, on a socket: what is posted to a channel goes to whoever follows it."""

    def __init__(self) -> None:
        self.followers: set[asyncio.Queue[bytes]] = set()
        self.slow_s = 0.0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "GET":
            await self.stream(receive, send)
            return
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        body += message["body"]
        headers = [(name.decode(), value.decode()) for name, value in scope["headers"]]
        parsed = dict(parse_qsl(body.decode())) if body.startswith(b"payload=") else json.loads(body)
        for follower in self.followers:
            follower.put_nowait(event(told(headers, written(parsed))))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    async def stream(self, receive: Any, send: Any) -> None:
        await asyncio.sleep(self.slow_s)
        waiting: asyncio.Queue[bytes] = asyncio.Queue()
        self.followers.add(waiting)
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": READY, "more_body": True})
        gone = asyncio.create_task(receive_until_gone(receive))
        while not gone.done():
            next = asyncio.create_task(waiting.get())
            await asyncio.wait({gone, next}, return_when=asyncio.FIRST_COMPLETED)
            if next.done():
                await send({"type": "http.response.body", "body": next.result(), "more_body": True})
            next.cancel()
        self.followers.discard(waiting)


async def receive_until_gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
