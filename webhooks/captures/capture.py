"""One delivery out of a file, and the two plain forms of one: a captured request, a payload alone."""

from __future__ import annotations

import hashlib
import re
import uuid
from dataclasses import dataclass
from datetime import datetime

from webhooks.delivery import Headers
from webhooks.errors import Unreadable
from webhooks.sources import GitHub, Source

_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # a header's (RFC 9110, 5.6.2)
_REQUEST_LINE = re.compile(rb"[A-Z]{3,10} (\S+)(?: HTTP/[0-9.]+)?")
_PATH = re.compile(rb"/webhooks/([a-z][a-z0-9_-]*)(?:[?#].*)?$")
_LINE = re.compile(rb"(.*?)\r?\n")
_MOST_DIGITS = 18  # of a length; Python refuses to read very many


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """One delivery out of a file.

    Args:
        place: which one it is in there, from 1.
        name: where it is, for a person.
        source: whose it is; empty where nothing says so.
        event: what it says, where that is written beside it.
        headers: its header lines; without a signature it is one that was never sent.
        body: its exact bytes.
        received_at: when it was received; None where nothing says so.
        fault: why it cannot be read; then it has nothing but a place and a name.
    """

    place: int
    name: str
    source: str = ""
    event: str | None = None
    headers: Headers = ()
    body: bytes = b""
    received_at: datetime | None = None
    fault: str | None = None


def request(content: bytes, *, place: int, name: str, source: str | None) -> Capture:
    """Read a captured request: a request line, which may be missing, header lines, an empty line, the body.

    The lines end in CRLF or LF. Line ends that an editor added to the body are left out where `Content-Length` says so.

    Args:
        content: the whole of it.
        place: its place.
        name: its name.
        source: whose it is; None: what the request line's path says.
    """

    def faulty(fault: str) -> Capture:
        if not headers and not said:  # perhaps it was never meant as one
            fault = f"it is neither JSON nor a line of webhooks export, and as a captured request {fault}"
        return Capture(place=place, name=name, fault=fault)

    headers: list[tuple[str, str]] = []
    at, number = 0, 0
    said = ""
    while True:
        line = _LINE.match(content, at)
        if line is None:
            return faulty("it has no empty line between headers and body")
        number, at = number + 1, line.end()
        if not line[1]:
            break
        first = _REQUEST_LINE.fullmatch(line[1]) if number == 1 else None
        if first is not None:
            path = _PATH.search(first[1])
            said = "" if path is None else path[1].decode("ascii")
            continue
        given, colon, value = line[1].partition(b":")
        if not colon or not _NAME.fullmatch(given):
            return faulty(f"line {number} is no header: write NAME: VALUE, and an empty line before the body")
        headers.append((given.decode("ascii").lower(), value.strip(b" \t").decode("latin-1")))
    body = content[at:]
    lengths = {value for given, value in headers if given == "content-length"}
    said_length = lengths.pop() if len(lengths) == 1 else ""
    if said_length.isdecimal() and len(said_length) > _MOST_DIGITS:
        return faulty(f"its Content-Length has {len(said_length)} digits: no body is that long")
    length = int(said_length) if said_length.isdecimal() else None
    if length is not None and len(body) < length:
        return faulty(f"its body is cut short: {len(body)} of {length} bytes")
    if length is not None and not body[length:].strip(b"\r\n"):
        body = body[:length]
    return Capture(place=place, name=name, source=source or said, headers=tuple(headers), body=body)


def payload(content: bytes, *, place: int, name: str, stem: str, source: Source, event: str | None) -> Capture:
    """Make a delivery of a body alone, with the headers that its provider would send besides a signature.

    It has no id but what is in the body. GitHub's gets one made of event and body, so that a second copy is known.

    Args:
        content: the body.
        place: its place.
        name: its name.
        stem: its file's name less the ending; GitHub's event is what stands before `__`.
        source: whose it is.
        event: what it says, instead of the file's name.

    One that its source could not read has a `fault`: it would only be stored to end `dead`.
    """
    headers: list[tuple[str, str]] = [("content-type", "application/json")]
    if isinstance(source, GitHub):
        event = (event or stem.partition("__")[0]).partition(".")[0]
        if not event:
            return Capture(place=place, name=name, fault="nothing says what it tells of: say it with --event")
        made = uuid.uuid5(uuid.NAMESPACE_OID, f"{event}:{hashlib.sha256(content).hexdigest()}")
        headers += [("x-github-event", event), ("x-github-delivery", str(made))]
    try:
        source.read(tuple(headers), content)
    except Unreadable as error:
        return Capture(place=place, name=name, fault=f"it cannot be read as a payload: {error}")
    return Capture(place=place, name=name, source=source.name, event=event, headers=tuple(headers), body=content)
