"""What a smee channel tells of a request, and the bytes that were signed. Pure.

The data of an event is a JSON object: the request's headers as members, and beside them `body`, `query` and
`timestamp`. The body is what the channel parsed, so the bytes that were signed are gone. What it wrote itself is tried
first, then other ways to write the same; the one that fits the signature, if one does, is what was sent. Source:
probot/smee.io, `lib/server.js`; probot/smee-client, `index.ts`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote_plus

from webhooks.delivery import Headers
from webhooks.errors import Refused, Unreadable
from webhooks.nesting import check, with_room
from webhooks.rewriting import Budget, guesses
from webhooks.sources import Source
from webhooks.sources.reading import first, is_object, sequence

MOST_GUESSED = 256 * 1024
# What is posted to a channel is nobody's in particular, and is read where the tunnel's loop waits for it.
MOST_WRITTEN_BYTES = 8 * 1024 * 1024
OURS = frozenset({"body", "query", "timestamp", "rawdata", "rawbody"})
EXACT = ("rawdata", "rawbody")
"""Members in which a channel of one's own may pass on the bytes themselves (probot/smee.io#55)."""

_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()
_FORM = "application/x-www-form-urlencoded"


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
        headers, writings = with_room(check(data), lambda: _parts(data))
    except (ValueError, RecursionError):
        raise Unreadable("an event of the channel is not a JSON object that can be read") from None
    if not writings:
        raise Unreadable("an event of the channel has no body")
    return Message(headers, writings)


def _parts(data: str) -> tuple[Headers, tuple[bytes, ...]]:
    members = dict(_members(data))
    headers = tuple(_headers(members))
    return headers, tuple(dict.fromkeys(_writings(members, headers)))


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


def _form(body: dict[str, Any]) -> bytes:
    fields = [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in body.items()]
    return "&".join(f"{quote_plus(name)}={quote_plus(value)}" for name, value in fields).encode()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class Sent:
    """A body whose signature is right.

    Args:
        body: the bytes.
        rewritten: whether the channel had written them another way.
    """

    body: bytes
    rewritten: bool


def as_sent(source: Source, message: Message, secrets: Sequence[str], now: float) -> Sent | None:
    """Return the body as it was signed, None where no way to write it fits the signature.

    Args:
        source: whose recipe is followed.
        message: what came.
        secrets: those known here.
        now: unix seconds.
    """
    for place, body in enumerate(_candidates(message)):
        try:
            source.verify(message.headers, body, secrets, now)
        except Refused as refused:
            if refused.cause == "bad_signature":
                continue
            if refused.cause != "stale_timestamp":  # which is found only after the signature was
                return None
        return Sent(body, rewritten=place > 0)
    return None


def _candidates(message: Message) -> Iterator[bytes]:
    yield from message.writings
    if len(message.writings[0]) <= MOST_GUESSED:
        for _, body in guesses(message.headers, message.writings[0], Budget(MOST_WRITTEN_BYTES)):
            yield body
