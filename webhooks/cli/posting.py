"""Posting what `webhooks trigger` made: several at once, whole, in chunks, or cut off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import urlsplit

import httpx

from webhooks.errors import Unavailable
from webhooks.nesting import loads
from webhooks.samples.faults import Sending, pieces
from webhooks.sources.reading import is_object
from webhooks.tunnel.reasons import why

TIMEOUT_S = 15
CUT_WITHIN_S = 5


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back.

    Args:
        sending: for what.
        status: the HTTP status; None where the connection ended without one.
        word: the receiver's one word for it: `accepted`, `duplicate`, `bad_signature`, …
        said: all that it said, on one line.
    """

    sending: Sending
    status: int | None
    word: str
    said: str


async def post(
    target: str, sendings: Sequence[Sending], at_once: int, answered: Callable[[int, Answer], None] | None = None
) -> list[Answer]:
    """Post deliveries in their order, so many at once, and return the answers in the same order.

    Args:
        target: where.
        sendings: what.
        at_once: how many at a time.
        answered: called with each answer as it comes, and its place: what came is known though the rest never does.

    Raises:
        Unavailable: nobody answers there.
    """
    turn = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)

    async def one(http: httpx.AsyncClient, place: int, sending: Sending) -> Answer:
        async with turn:
            try:
                answer = await (_cut(target, sending) if sending.wire == "truncated" else _post(http, target, sending))
            except (httpx.TransportError, httpx.InvalidURL, OSError) as error:
                _nobody(target, error)
        if answered is not None:
            answered(place, answer)
        return answer

    # The receiver is on this machine: a proxy of the environment is not for it.
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits, trust_env=False) as http:
        tasks = [asyncio.create_task(one(http, place, sending)) for place, sending in enumerate(sendings)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _post(http: httpx.AsyncClient, target: str, sending: Sending) -> Answer:
    content = _chunks(sending.request.body) if sending.wire == "chunked" else sending.request.body
    response = await http.post(target, content=content, headers=list(sending.request.headers))
    return _answer(sending, response.status_code, response.content)


async def _chunks(body: bytes) -> AsyncIterator[bytes]:
    for piece in pieces(body):
        yield piece


async def _cut(target: str, sending: Sending) -> Answer:
    """Announce a whole body, send half of it, and end the connection's way out."""
    url = urlsplit(target)
    secure = url.scheme == "https"
    request = sending.request
    lines = [f"POST {url.path} HTTP/1.1", f"host: {url.netloc}", f"content-length: {len(request.body)}"]
    lines += [f"{name}: {value}" for name, value in request.headers]
    reader, writer = await asyncio.open_connection(url.hostname, url.port or (443 if secure else 80), ssl=secure)
    try:
        half = request.body[: len(request.body) // 2]
        writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + half)
        await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(CUT_WITHIN_S):
                return _raw(sending, await reader.read())
        return _raw(sending, b"")
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def _raw(sending: Sending, answer: bytes) -> Answer:
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    if not status or not status[0].isdigit():
        half, whole = len(sending.request.body) // 2, len(sending.request.body)
        return Answer(sending, None, "cut off", f"no answer: cut off after {half} of {whole} bytes")
    return _answer(sending, int(status[0]), body)


def _answer(sending: Sending, status: int, content: bytes) -> Answer:
    text = content.decode("utf-8", "replace")
    try:
        said = loads(text)
    except ValueError:
        return Answer(sending, status, "", " ".join(text[:200].split()))
    if not is_object(said):
        return Answer(sending, status, "", str(said)[:200])
    word = said.get("status") or said.get("error") or ""
    return Answer(sending, status, str(word), "  ".join(f"{name}: {value}" for name, value in said.items()))


def _nobody(target: str, error: Exception) -> NoReturn:
    raise Unavailable(
        f"no answer from {target}: {why(error)}; is webhooks serve running? --url names another receiver"
    ) from error
