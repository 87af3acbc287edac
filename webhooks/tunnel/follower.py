"""Following the feed of a deployed consumer: `GET /api/feed` of its control plane, for as long as it takes.

A connection that breaks, or is silent for longer than the feed ever is, is made anew from where the last delivery that
is done with left off. What waiting does not mend ends the following: a token that is refused, a source or a place that
there is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from urllib.parse import urlsplit

import httpx

from webhooks.errors import ConfigurationError, WebhooksError
from webhooks.feed import KEEP_ALIVE_S
from webhooks.nesting import loads
from webhooks.sending import led_to
from webhooks.sources.reading import mapping
from webhooks.tunnel.items import Arrived, Item, Pruned, Standing, read
from webhooks.tunnel.reasons import why
from webhooks.tunnel.relay import Sleep, Tell
from webhooks.tunnel.stream import MOST_OF_A_VALUE, TooLong, Tries, connected, events, packed

SILENT_S = KEEP_ALIVE_S + 10
GROWTH = 4 / 3
"""How much longer a body is in base64."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
MOST_OF_AN_ERROR = 64 * 1024
SETTLED = frozenset({400, 401, 403, 404, 409, 421})


class Refused(ConfigurationError):
    """The other side does not serve us its feed, and waiting will not change that."""


class _Away(Exception):
    """The other side is not there, or not ready, just now."""


class Follower:
    """Follows one feed.

    Args:
        client: whose connections are used.
        url: the base address of the control plane.
        sources: which sources to follow; none stands for all.
        after: where to start: a cursor, `now`, `all`, or a time.
        token: what the control plane wants to be shown.
        tell: called with what a person should know.
        most_body_bytes: the longest body that the receiver here takes.
        silent_s: after how many seconds without a word a connection counts as dead.
        sleep: how to wait.

    Attributes:
        connections: how many there have been.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        url: str,
        sources: Sequence[str],
        after: str,
        *,
        token: str | None,
        tell: Tell,
        most_body_bytes: int,
        silent_s: float = SILENT_S,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.connections = 0
        self._client = client
        self._url = _base(url)
        self._sources = list(sources)
        self._after = after
        self._headers = _authorization(token)
        self._tell = tell
        self._most_body_bytes = most_body_bytes
        self._silent_s = silent_s
        self._tries = Tries(FIRST_WAIT_S, LONGEST_WAIT_S)
        self._sleep = sleep

    async def items(self) -> AsyncGenerator[Item]:
        """Yield what comes, in the feed's order. Whoever asks for the next item is done with the one before.

        Raises:
            Refused: the other side does not serve its feed to us.
            WebhooksError: what it sends cannot be read, or was not asked for.
        """
        while True:
            try:
                async with aclosing(self._connection()) as connection:
                    async for item in connection:
                        if not isinstance(item, Standing):
                            self._tries.worked()
                        yield item
                        self._after = item.cursor
                reason = "it ended the connection"
            except (httpx.RequestError, httpx.StreamError, _Away) as error:
                reason = why(error)
            except TooLong as error:
                raise WebhooksError(f"{self._url}: {error}; to pass it over: --since and a later time") from None
            pause_s = self._tries.pause_s()
            self._tell(f"not connected to {self._url} ({reason}): trying again in {pause_s:.1f} s")
            await self._sleep(pause_s)

    async def _connection(self) -> AsyncGenerator[Item]:
        params = httpx.QueryParams([*(("source", source) for source in self._sources), ("after", self._after)])
        url = f"{self._url}/api/feed"
        async with connected(
            self._client, url, silent_s=self._silent_s, params=params, headers=self._headers
        ) as response:
            await self._check(response)
            self.connections += 1
            self._tries.connected()
            async with aclosing(events(response, self._most_body_bytes, GROWTH)) as found:
                async for event in found:
                    item = read(event)
                    if item is not None:
                        self._check_source(item)
                        yield item

    def _check_source(self, item: Item) -> None:
        match item:
            case Arrived():
                source = item.delivery.source
            case Pruned():
                source = item.source
            case Standing():
                return
        if self._sources and source not in self._sources:
            raise WebhooksError(
                f"{self._url} sent a delivery of {source}, and only {', '.join(self._sources)} was asked for: is it "
                "the address of a control plane?"
            )

    async def _check(self, response: httpx.Response) -> None:
        """Return if it is the feed that answers."""
        status = response.status_code
        how = packed(response)
        kind = response.headers.get("content-type", "").partition(";")[0]
        if status == 200 and kind == "text/event-stream" and how is None:
            return
        error = mapping(_json(await _beginning(response))).get("error")
        ours = isinstance(error, str)
        if 300 <= status < 400:
            said = f"redirects to {led_to(response) or 'somewhere'}, which is not followed: name that"
        elif status == 200 and kind == "text/event-stream":
            said = (
                f"sends its feed packed ({how}), which was not asked for: what stands in between must pass it as it is"
            )
        elif status == 200:
            kind = kind[:MOST_OF_A_VALUE] or "something"
            said = f"answers with {kind} and not with a feed: is it the address of a control plane?"
        else:
            said = f"answers {status}" + (f": {error[:MOST_OF_A_VALUE]}" if isinstance(error, str) else "")
        if status == 404 and "no source" not in said:
            said += "; is it the address of a control plane, and not that of a receiver?"
        if status == 401:
            said += "; the token is that of WEBHOOKS_TUNNEL_TOKEN, or --token"
        # Once it has worked, somebody else who answers in between (a proxy, a hotel's login page) will go away again.
        if (status in SETTLED and ours) or (status < 500 and status != 429 and self.connections == 0):
            raise Refused(f"{self._url} {said}")
        raise _Away(said)


def _base(url: str) -> str:
    """Return the base address of a control plane.

    Raises:
        ConfigurationError: it is none; what may be a password is not repeated.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConfigurationError("the address cannot be read: write https://HOST or http://HOST:PORT") from None
    if parts.username is not None or parts.password is not None:
        raise ConfigurationError("leave out what stands before the @: a token goes into WEBHOOKS_TUNNEL_TOKEN")
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise ConfigurationError(f"{url} is no address of a control plane: write https://HOST or http://HOST:PORT")
    try:
        httpx.URL(url)  # which reads less than urlsplit does
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigurationError(f"{url} is no address of a control plane: {error}") from None
    return url.rstrip("/")


def _authorization(token: str | None) -> dict[str, str]:
    if token is None:
        return {}
    if not (token.isascii() and token.isprintable()):  # the client's own complaint would show it
        raise ConfigurationError("the token of the control plane has characters that cannot be sent")
    return {"authorization": f"Bearer {token}"}


async def _beginning(response: httpx.Response) -> bytes:
    content = bytearray()
    if packed(response) is not None:  # unpacked it could be of any size
        return b""
    async for part in response.aiter_bytes():
        content += part
        if len(content) >= MOST_OF_AN_ERROR:
            break
    return bytes(content)


def _json(content: bytes) -> object:
    try:
        return loads(content)
    except ValueError:
        return None
