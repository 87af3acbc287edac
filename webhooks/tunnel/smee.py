"""Following a channel of smee.io: server-sent events, one a request that was posted to the channel.

Its stream has `ready` once, `ping` every half minute, and messages without a name, whose data is a JSON object: the
request's headers as members, and beside them `body`, `query` and `timestamp`. The body is what the channel parsed, so
the bytes that were signed are gone; it is written here as the channel wrote it, and in the few other ways in which
providers write, and the one that fits the signature, if one does, is what was sent. Nothing is kept there: what
arrives while nobody follows is lost. Source: probot/smee.io, `lib/server.js`; probot/smee-client, `index.ts`.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote_plus

import httpx
from httpx_sse import SSEError, aconnect_sse

from webhooks.delivery import Headers
from webhooks.errors import ConfigurationError, Refused, Unreadable, WebhooksError
from webhooks.sources import Source
from webhooks.sources.reading import first, is_object, sequence

# A ping comes every 30 s: after two that did not come the connection is dead, whatever the system believes.
SILENT_S = 75.0
CONNECT_WITHIN_S = 10.0
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
STEADY_S = 60.0
OURS = frozenset({"body", "query", "timestamp", "rawdata", "rawbody"})
EXACT = ("rawdata", "rawbody")
"""Members in which a channel of one's own may pass on the bytes themselves (probot/smee.io#55)."""
REWRITTEN = (
    "its signature does not fit: a smee channel passes on what it parsed, not the bytes that were signed, and wrote "
    "this body anew (or the hook has another secret than this receiver). --resign signs with the secret known here"
)

_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()
_FORM = "application/x-www-form-urlencoded"


class NotAChannel(WebhooksError):
    """An address does not serve a channel's events; trying again would not help."""


@dataclass(frozen=True, slots=True)
class Message:
    """A request as a channel tells of it.

    Args:
        headers: its header lines, in the channel's order.
        writings: its body in each way it may have been written, the channel's own first; never empty.
    """

    headers: Headers
    writings: tuple[bytes, ...]


def read(data: str) -> Message:
    """Read the data of one event.

    Raises:
        Unreadable: it is not what a channel sends.
    """
    try:
        members = dict(_members(data))
    except (ValueError, RecursionError):
        raise Unreadable("an event of the channel is not a JSON object") from None
    if "body" not in members and not any(name in members for name in EXACT):
        raise Unreadable("an event of the channel has no body")
    headers = tuple(_headers(members))
    return Message(headers, tuple(dict.fromkeys(_writings(members, headers))))


def _members(text: str) -> Iterator[tuple[str, str]]:
    """Yield each member of a JSON object with its value as written: parsed and written again it might differ.

    Raises:
        ValueError: it is no JSON object.
    """
    at = _after(text, 0, "{")
    if text[at : at + 1] == "}":
        return
    while True:
        name, end = _DECODER.raw_decode(text, at)
        if not isinstance(name, str):
            raise ValueError("a member without a name")
        start = _after(text, end, ":")
        _, end = _DECODER.raw_decode(text, start)
        yield name, text[start:end]
        at = _space(text, end)
        if text[at : at + 1] == "}":
            return
        at = _after(text, at, ",")


def _after(text: str, at: int, mark: str) -> int:
    at = _space(text, at)
    if not text.startswith(mark, at):
        raise ValueError(f"no {mark}")
    return _space(text, at + 1)


def _space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _headers(members: dict[str, str]) -> Iterator[tuple[str, str]]:
    for name, written in members.items():
        value = json.loads(written)
        if name in OURS or not name.isascii():
            continue
        if isinstance(value, str):
            yield name.lower(), value
        else:  # a header that was sent several times
            yield from ((name.lower(), one) for one in sequence(value) if isinstance(one, str))


def _writings(members: dict[str, str], headers: Headers) -> Iterator[bytes]:
    for name in EXACT:
        value = json.loads(members[name]) if name in members else None
        if isinstance(value, str):
            yield _bytes(value)
    written = members.get("body")
    if written is None:
        return
    body = json.loads(written)
    if (first(headers, "content-type") or "").partition(";")[0].strip().lower() == _FORM and is_object(body):
        yield _form(body)
        return
    if isinstance(body, str):
        yield _bytes(body)  # a text body, which is no JSON
    yield _bytes(written)
    escaped = "".join(_escaped(character) for character in written) if not written.isascii() else written
    # A slash and a character past ASCII stand in texts only, where JSON lets them be written either way.
    yield from (_bytes(text) for text in (written.replace("/", "\\/"), escaped, escaped.replace("/", "\\/")))


def _escaped(character: str) -> str:
    return character if character.isascii() else json.dumps(character)[1:-1]


def _form(body: dict[str, Any]) -> bytes:
    fields = [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in body.items()]
    return "&".join(f"{quote_plus(name)}={quote_plus(value)}" for name, value in fields).encode()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def as_sent(source: Source, message: Message, secrets: Sequence[str], now: float) -> bytes | None:
    """Return the body as it was sent: the writing that its signature fits; None when none does."""
    for body in message.writings:
        try:
            source.verify(message.headers, body, secrets, now)
        except Refused:
            continue
        return body
    return None


async def follow(
    client: httpx.AsyncClient,
    channel: str,
    tell: Callable[[str], None],
    sleep: Callable[[float], Any] = asyncio.sleep,
) -> AsyncGenerator[Message]:
    """Yield what is posted to a channel from now on, connecting again as often as it must.

    Args:
        client: whose connections are used.
        channel: its address, such as ``https://smee.io/abcdef``.
        tell: called with what a person should know.
        sleep: how to wait.

    Raises:
        NotAChannel: nothing of the kind is there.
    """
    wait_s = FIRST_WAIT_S
    while True:
        since = time.monotonic()
        try:
            async with aclosing(_events(client, channel)) as events:
                async for name, data in events:
                    if name == "ready":
                        tell(f"following {channel}; what is sent there while nobody follows is lost")
                    elif name == "message":
                        try:
                            message = read(data)
                        except Unreadable as error:
                            tell(f"passed over: {error}")
                            continue
                        yield message
            reason = "the channel ended the connection"
        except (httpx.RequestError, httpx.StreamError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
        if time.monotonic() - since > STEADY_S:
            wait_s = FIRST_WAIT_S
        pause_s = wait_s * random.uniform(0.5, 1)
        tell(f"{reason}; connecting again in {pause_s:.0f} s")
        await sleep(pause_s)
        wait_s = min(wait_s * 2, LONGEST_WAIT_S)


async def _events(client: httpx.AsyncClient, channel: str) -> AsyncGenerator[tuple[str, str]]:
    timeout = httpx.Timeout(CONNECT_WITHIN_S, read=SILENT_S)
    try:
        async with aconnect_sse(client, "GET", channel, timeout=timeout, follow_redirects=False) as stream:
            status = stream.response.status_code
            if status >= 500 or status == 429:
                raise httpx.RemoteProtocolError(f"{channel} answered {status}")
            if status != 200:
                raise NotAChannel(f"{channel} answered {status}: is it the address of a smee channel?")
            async with aclosing(stream.aiter_sse()) as events:
                async for event in events:
                    yield event.event, event.data
    except SSEError:
        raise NotAChannel(
            f"{channel} serves no events: give the address of a channel, as smee.io/new made it"
        ) from None
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ConfigurationError(f"{channel} is no address of a channel: {error}") from None
