"""Sending a delivery through the front door of a receiver, as it came: the same bytes, the same header lines."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from webhooks.delivery import Headers
from webhooks.errors import ConfigurationError
from webhooks.nesting import loads
from webhooks.signatures import sign
from webhooks.sources import Source
from webhooks.sources.reading import first, mapping

Outcome = Literal["accepted", "duplicate", "rearmed", "answered", "refused", "unavailable", "failed"]
"""What became of a delivery that was sent.

`accepted`, `duplicate`, `rearmed` and `answered` are the receiver's own words; `refused`: it does not want this one;
`unavailable`: try again later; `failed`: it could not be sent, or what came back is no answer, and trying again is of
no use.
"""
# What our own receivers say of a delivery that they have.
_WORDS: Mapping[str, Outcome] = {
    "accepted": "accepted",
    "duplicate": "duplicate",
    "rearmed": "rearmed",
    "answered": "answered",
}

WITHIN_S = 120.0
CONNECT_WITHIN_S = 10.0
MOST_OF_AN_ANSWER = 64 * 1024
MOST_OF_A_CAUSE = 300
LONGEST_RETRY_AFTER_S = 86_400
_AGAIN = frozenset({408, 425, 429})
SOURCE_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}"
"""A source's name, as a pattern: a part of a path that no library reads as anything else."""
# What the library below us says of a connection that ended; all else it says of the protocol is about an answer.
_NO_ANSWER = "Server disconnected without sending a response."

# What belongs to one connection (RFC 9110, 7.6.1), or is made anew from the address and the body.
_NOT_COPIED = frozenset(
    ("connection", "content-length", "expect", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade")
) | {"proxy-authenticate", "proxy-authorization", "proxy-connection"}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a receiver said.

    Args:
        outcome: what became of the delivery.
        status: the answer's HTTP status; None where there was no answer.
        delivery: the delivery's id there, where the receiver is one of ours.
        cause: why not: the receiver's `error`, or why there was no answer.
        retry_after: how long the receiver asked to be left alone.
        seconds: how long it took.
        unread: why the rest of its answer could not be read. What its status says holds all the same.
    """

    outcome: Outcome
    status: int | None
    delivery: int | None
    cause: str | None
    retry_after: timedelta | None
    seconds: float
    unread: str | None = None


_DELIVERY_PATH = re.compile(rf"/webhooks/{SOURCE_NAME}$")


def target(base: str, source: str) -> str:
    """Return where a source's deliveries go.

    Args:
        base: the receiver's base address, such as ``http://127.0.0.1:8000``; a path before `/webhooks` may follow.
        source: the source's name.

    Raises:
        ConfigurationError: it is no address a delivery can be sent to, or no name.
    """
    if not re.fullmatch(SOURCE_NAME, source):
        raise ConfigurationError(f"{source[:100]!r} is no name of a source: use letters, digits, - and _")
    try:
        parts = urlsplit(base)
        port = parts.port
    except ValueError as error:
        raise ConfigurationError(f"{base} is no address: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigurationError(f"{base} is no address to send to: write http://HOST:PORT or https://HOST")
    path = parts.path.rstrip("/")
    if parts.query or parts.fragment or _DELIVERY_PATH.search(path):
        raise ConfigurationError(f"{base} is not a base address: leave out what follows the host, /webhooks/… is added")
    return f"{parts.scheme}://{parts.netloc}{path}/webhooks/{source}"


def opened(base: str, at_once: int = 1) -> httpx.AsyncClient:
    """Open a client for a receiver, with as many connections as deliveries are sent at once.

    The environment's proxy is not asked for a receiver on this machine.
    """
    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)
    timeout = httpx.Timeout(WITHIN_S, connect=CONNECT_WITHIN_S)
    return httpx.AsyncClient(
        limits=limits,
        timeout=timeout,
        trust_env=not on_this_machine(base),
        event_hooks={"response": [_not_followed]},
    )


async def _not_followed(response: httpx.Response) -> None:
    """Take away where a redirect leads: the client reads it though it follows none, and fails where it cannot."""
    response.extensions["led_to"] = response.headers.pop("location", None)


def led_to(response: httpx.Response) -> str | None:
    """Return where a redirect leads, the beginning of it; None where it does not say."""
    where = response.extensions.get("led_to") or response.headers.get("location")
    return None if where is None else str(where)[:MOST_OF_A_CAUSE]


def on_this_machine(base: str) -> bool:
    """Say whether an address is one of this machine's own loopback."""
    try:
        host = (urlsplit(base).hostname or "").rstrip(".")
    except ValueError:
        return False
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


async def send(client: httpx.AsyncClient, base: str, source: str, headers: Headers, body: bytes) -> Answer:
    """Post a delivery to `/webhooks/{source}` of a receiver. A redirect is never followed.

    Args:
        client: whose connections are used; its own headers and cookies are not sent.
        base: the receiver's base address.
        source: whose delivery it is.
        headers: its header lines; they go out in this order, repeated ones too, less what belongs to a connection.
        body: its exact bytes.

    Raises:
        ConfigurationError: `base` is no address, or `source` no name; everything else is told by the answer.
    """
    url = target(base, source)
    started = time.perf_counter()
    try:
        # Not the client's own way to make a request: that adds headers of the client's.
        request = httpx.Request("POST", url, headers=_lines(headers), content=body)
        answer = await _answered(client, request, asyncio.get_running_loop().time() + WITHIN_S)
    except TimeoutError:
        answer = _none("unavailable", f"no answer within {WITHIN_S:.0f} s")
    except httpx.RemoteProtocolError as error:
        if str(error) == _NO_ANSWER:
            answer = _none("unavailable", _NO_ANSWER)
        else:
            answer = _none("failed", f"what it answered is no answer to a POST: {_told(error)}")
    except (httpx.LocalProtocolError, httpx.UnsupportedProtocol, httpx.InvalidURL, ValueError) as error:
        answer = _none("failed", f"it cannot be sent: {_told(error)}")
    except httpx.HTTPError as error:
        answer = _none("unavailable", _told(error))
    return replace(answer, seconds=time.perf_counter() - started)


def _none(outcome: Outcome, cause: str) -> Answer:
    return Answer(outcome, None, None, cause, None, 0.0)


async def _answered(client: httpx.AsyncClient, request: httpx.Request, until: float) -> Answer:
    async with asyncio.timeout_at(until):
        response = await client.send(request, stream=True, follow_redirects=False)
    try:
        content, unread = await _beginning(response, until)
    finally:
        await response.aclose()
    status, found = response.status_code, _json(content)
    outcome: Outcome
    cause: str | None
    number = found.get("delivery")
    delivery = number if isinstance(number, int) and not isinstance(number, bool) else None
    retry_after = read_retry_after(response.headers.get("retry-after"))
    if 200 <= status < 300:
        outcome, cause = _word(found.get("status")), None
    elif 300 <= status < 400:
        outcome, cause = "refused", f"redirected to {led_to(response) or 'somewhere else'}, which is not followed"
    elif 400 <= status < 500 and status not in _AGAIN:
        outcome, cause = "refused", _cause(found, content, status)
    elif status >= 400:
        outcome, cause = "unavailable", _cause(found, content, status)
    else:
        outcome, cause = "failed", f"answered {status}, which is no answer to a POST"
    return Answer(outcome, status, delivery, cause, retry_after, 0.0, unread)


async def _beginning(response: httpx.Response, until: float) -> tuple[bytes, str | None]:
    """Read an answer, of a long one only the beginning; beside it why no more of it could be read."""
    content = bytearray()
    if response.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        return b"", "it is packed, which was not asked for"
    try:
        async with asyncio.timeout_at(until):
            async for part in response.aiter_bytes():
                content += part
                if len(content) >= MOST_OF_AN_ANSWER:
                    break
    except TimeoutError:
        return bytes(content), f"it did not come whole within {WITHIN_S:.0f} s"
    except httpx.HTTPError as error:
        return bytes(content), _told(error)
    return bytes(content), None


def _json(content: bytes) -> dict[str, Any]:
    try:
        return mapping(loads(content))
    except ValueError:
        return {}


def _word(status: object) -> Outcome:
    """Return the outcome that a receiver names; whoever answers with a 2xx and names none has taken the delivery."""
    return _WORDS.get(status, "accepted") if isinstance(status, str) else "accepted"


def _cause(found: dict[str, Any], content: bytes, status: int) -> str:
    error = found.get("error")
    if isinstance(error, str) and error:
        reason = found.get("reason")
        return f"{error}: {reason}"[:MOST_OF_A_CAUSE] if isinstance(reason, str) else error[:MOST_OF_A_CAUSE]
    text = " ".join(content[:MOST_OF_A_CAUSE].decode("utf-8", "replace").split())
    return f"answered {status}" + (f": {text}" if text else "")


def read_retry_after(value: str | None) -> timedelta | None:
    """Read `Retry-After`: whole seconds, or a date; a day at most. None for anything else."""
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        seconds = float(text)
    else:
        try:
            until = parsedate_to_datetime(text)
        except (TypeError, ValueError):
            return None
        until = until if until.tzinfo is not None else until.replace(tzinfo=UTC)
        seconds = (until - datetime.now(UTC)).total_seconds()
    return timedelta(seconds=min(max(seconds, 0.0), LONGEST_RETRY_AFTER_S))


def _lines(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Return the lines that go out, as bytes: a value is the latin-1 view of what was on the wire."""
    dropped = _NOT_COPIED | {
        name.strip().lower() for given, value in headers if given.lower() == "connection" for name in value.split(",")
    }
    return [(name.encode("ascii"), value.encode("latin-1")) for name, value in headers if name.lower() not in dropped]


def _told(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:MOST_OF_A_CAUSE]


def resigned(source: Source, headers: Headers, body: bytes, secret: str, now: float) -> Headers:
    """Replace the signature of a delivery by one made with another secret. The delivery keeps its id.

    Args:
        source: whose recipe is followed.
        headers: the delivery's header lines.
        body: its exact bytes.
        secret: one of the receiver's.
        now: unix seconds, the time of the new signature where the recipe has one.

    Raises:
        ConfigurationError: the secret cannot sign, because it is a public key or malformed.
    """
    recipe = source.recipe
    # Without an id of its own it gets one that the same body gets again, so that a second copy is known as one.
    given = first(headers, recipe.id_header) if recipe.id_header is not None else None
    id = given or "body_" + hashlib.sha256(body).hexdigest()
    ours = (recipe.header, recipe.timestamp_header, recipe.id_header)
    kept = tuple((name, value) for name, value in headers if name not in ours)
    return kept + sign(recipe, body, secret, now=now, id=id)
