"""Server-sent events of a server that is not trusted: of whatever it sends, no more than one event is held at a time.

An event has a longest length, and what is packed is refused: unpacked it could be of any size.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager

import httpx
from httpx_sse import EventSource, ServerSentEvent

from webhooks.errors import WebhooksError
from webhooks.tunnel.relay import wait_s

CONNECT_WITHIN_S = 10.0
LASTED_S = 10.0
MOST_OF_A_VALUE = 300
MIB = 1024 * 1024
REST_BYTES = MIB
"""What an event holds besides a body, at most: header lines, and what the other side adds."""
ASKED = {"accept": "text/event-stream", "cache-control": "no-store", "accept-encoding": "identity"}


class TooLong(WebhooksError):
    """An event is longer than any that can be passed on."""


@asynccontextmanager
async def connected(
    client: httpx.AsyncClient,
    url: str,
    *,
    silent_s: float,
    params: httpx.QueryParams | None = None,
    headers: Mapping[str, str] | None = None,
) -> AsyncGenerator[httpx.Response]:
    """Ask for a stream of events, unpacked. A redirect is not followed.

    Args:
        client: whose connections are used.
        url: where it is.
        silent_s: after how many seconds without a word it counts as dead.
        params: the query, where `url` has none.
        headers: what is sent besides.
    """
    timeout = httpx.Timeout(CONNECT_WITHIN_S, read=silent_s)
    lines = {**ASKED, **(headers or {})}
    async with client.stream(
        "GET", url, params=params, headers=lines, timeout=timeout, follow_redirects=False
    ) as response:
        yield response


def packed(response: httpx.Response) -> str | None:
    """Return how an answer is packed, None where it is not."""
    how = str(response.headers.get("content-encoding", "")).strip().lower()
    return None if how in ("", "identity") else how[:MOST_OF_A_VALUE]


async def events(response: httpx.Response, most_body_bytes: int, growth: float) -> AsyncGenerator[ServerSentEvent]:
    """Yield the events of an answer that is not packed.

    Args:
        response: the answer.
        most_body_bytes: the longest body that the receiver here takes.
        growth: how much longer a body is where it stands in an event, at most.

    Raises:
        TooLong: an event is longer than such a body makes it.
        SSEError: the answer is no stream of events.
    """
    assert isinstance(response.stream, httpx.AsyncByteStream)
    counted = _Counted(response.stream, int(most_body_bytes * growth) + REST_BYTES)
    response.stream = counted
    response.encoding = "utf-8"  # it is never another, whatever the answer says
    async with aclosing(EventSource(response).aiter_sse()) as found:
        async for event in found:
            counted.held = 0
            yield event


class _Counted(httpx.AsyncByteStream):
    """A stream that breaks off once too much of it has come without an event."""

    def __init__(self, stream: httpx.AsyncByteStream, most: int) -> None:
        self.held = 0
        self._stream = stream
        self._most = most

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self.held += len(part)
            if self.held > self._most:
                raise TooLong(
                    f"it sent an event of more than {self._most // MIB} MiB, too long for any delivery that is taken "
                    "here: if it is one all the same, set WEBHOOKS_MAX_BODY_MIB higher, for tunnel and receiver"
                )
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


class Tries:
    """How long to wait before the next connection: longer each time, until one was good for something.

    Args:
        first_s: the first wait, in seconds.
        longest_s: the longest.
        now: seconds, of a clock that only goes forward.
    """

    def __init__(self, first_s: float, longest_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._now = now
        self._failures = 0
        self._since: float | None = None

    def connected(self) -> None:
        """Take note of a connection. That alone is worth nothing: it may end at once."""
        self._since = self._now()

    def worked(self) -> None:
        """Take note of something that a connection brought."""
        self._failures = 0

    def pause_s(self) -> float:
        """Return how long to wait, now that a connection ended or was not made."""
        if self._since is not None and self._now() - self._since >= LASTED_S:
            self._failures = 0
        self._since = None
        self._failures += 1
        return wait_s(self._failures, self._first_s, self._longest_s)
