"""What may have been done to a body on its way: from the bytes that arrived, guesses at those that were sent. Pure.

Nothing here decides anything. A guess is only ever compared with the signature that came along, to tell a person what
stands between the provider and this receiver.
"""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, quote_plus, unquote_to_bytes

from webhooks.delivery import Headers
from webhooks.errors import Unreadable
from webhooks.sources.reading import first, read_json

MOST_WRITTEN_BYTES = 32 * 1024 * 1024
MOST_UNZIPPED_BYTES = 16 * 1024 * 1024
MOST_JSON_BYTES = 1024 * 1024
# Nobody sent what is longer than that, or than what is short anyway.
MOST_GROWTH, SHORT_BYTES = 4, 64 * 1024
REWROTE = "something between the provider and you read it and wrote it anew; have it pass the bytes on as they are"

_BOM = b"\xef\xbb\xbf"
_ASTRAL = re.compile("[\U00010000-\U0010ffff]+")
_ESCAPED_ASCII = re.compile(rb"\\u(?=00[0-7])")
_HTML = {b"<": rb"\u003c", b">": rb"\u003e", b"&": rb"\u0026"}

Guess = tuple[str, bytes]
_Edit = tuple[str, Callable[[bytes], bytes]]
_Layout = tuple[str, Callable[[bytes, Any, int], bytes]]


@dataclass(slots=True)
class Budget:
    """How much guessing may write. In bytes, not in seconds: the same body is always tried in the same ways.

    Args:
        left: how many bytes it may still write.
        left_out: whether guesses were left out, for this or another bound.
    """

    left: int = MOST_WRITTEN_BYTES
    left_out: bool = False

    def spend(self, size: int) -> bool:
        """Take what was written off, and say whether that was still allowed."""
        self.left -= size
        self.left_out |= self.left < 0
        return self.left >= 0


class TooLong(Exception):
    """A value written in another layout would be so long that it was given up."""


def guesses(headers: Headers, body: bytes, budget: Budget) -> Iterator[Guess]:
    """Yield what may have been sent, the likelier first, each with words that complete "the signature is right …".

    Nobody has vouched for the body: what is made of it ends with the budget.
    """
    kinds = _unzipped(headers, body, budget), _ends(body), _charsets(body), _forms(body), _json(body, budget)
    for guess in itertools.chain(*kinds):
        if guess[1] == body:
            continue
        if not budget.spend(len(guess[1])):
            return
        yield guess


def indented(parsed: Any, indent: int | str, most: int) -> bytes:
    """Return parsed JSON with a line for each value, in UTF-8.

    Args:
        parsed: what was read.
        indent: as `json.dumps` takes it.
        most: how many bytes it may become. What nests 900 deep becomes a thousand times as long.

    Raises:
        TooLong: it would become longer, or nests deeper than can be written.
    """
    written = bytearray()
    try:
        for chunk in json.JSONEncoder(ensure_ascii=False, indent=indent).iterencode(parsed):
            written += chunk.encode("utf-8", "surrogatepass")
            if len(written) > most:
                raise TooLong
    except RecursionError:
        raise TooLong from None
    return bytes(written)


def _unzipped(headers: Headers, body: bytes, budget: Budget) -> Iterator[Guess]:
    encoding = (first(headers, "content-encoding") or "").lower()
    if encoding in ("gzip", "x-gzip", "deflate") or body.startswith(b"\x1f\x8b"):
        for window in (zlib.MAX_WBITS | 32, -zlib.MAX_WBITS):
            with suppress(zlib.error):
                # A few kilobytes may unpack to gigabytes.
                most = min(MOST_UNZIPPED_BYTES, budget.left)
                unzipped = zlib.decompressobj(window).decompress(body, most + 1)
                if len(unzipped) > most:
                    budget.left_out = True
                    return
                yield (
                    f"over the uncompressed bytes, and the body came compressed ({encoding or 'gzip'}): have the "
                    "provider, or the proxy that does it, send it uncompressed",
                    unzipped,
                )


def _ends(body: bytes) -> Iterator[Guess]:
    added, lost = "something between the provider and you adds it", "something between the provider and you drops it"
    for end, named in ((b"\r\n", "line end (CRLF)"), (b"\n", "newline")):
        if body.endswith(end):
            yield f"when the trailing {named} is dropped: {added}", body.removesuffix(end)
        yield f"when a trailing {named} is added: {lost}", body + end
    yield f"when white space at both ends is dropped: {added}", body.strip()
    yield "when its line ends are LF instead of CRLF: something between rewrites them", body.replace(b"\r\n", b"\n")
    crlf = body.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
    yield "when its line ends are CRLF instead of LF: something between rewrites them", crlf
    if body.startswith(_BOM):
        yield f"without the byte order mark at its start: {added}", body.removeprefix(_BOM)
    else:
        yield f"with a byte order mark at its start: {lost}", _BOM + body


def _charsets(body: bytes) -> Iterator[Guess]:
    if body.isascii():
        return
    for charset in ("latin-1", "cp1252"):
        with suppress(UnicodeError):
            sent = body.decode().encode(charset)
            yield f"when what was read as {charset} and written as UTF-8 is undone: {REWROTE}", sent
        with suppress(UnicodeError):
            yield f"when its {charset} is written as UTF-8: {REWROTE}", body.decode(charset).encode()


def _forms(body: bytes) -> Iterator[Guess]:
    for field in body.split(b"&", 100):
        name, equals, value = field.partition(b"=")
        if equals and name == b"payload":
            yield (
                "over the JSON inside the form, not over the form: something between the provider and you made it one",
                unquote_to_bytes(value.replace(b"+", b" ")),
            )
    if body.startswith(b"{"):
        for encoded in (quote_plus(body), quote(body, safe="")):
            yield (
                "over the form that it came in (payload=…), and here is the JSON inside: something between the "
                "provider and you unpacked it",
                b"payload=" + encoded.encode(),
            )


def _json(body: bytes, budget: Budget) -> Iterator[Guess]:
    """Write JSON in other ways, those with the fewest differences first."""
    if len(body) > MOST_JSON_BYTES:
        budget.left_out = True
        return
    try:
        parsed = read_json(body)
    except Unreadable:
        return
    text = _guarded(body.removeprefix(_BOM))
    most = max(MOST_GROWTH * len(text), SHORT_BYTES)
    laid_out: dict[str, bytes | None] = {"": text}
    idle: set[tuple[str, str]] = set()
    for (layout, lay_out), edits in _WAYS:
        if any((layout, words) in idle for words, _ in edits):
            continue
        if layout not in laid_out:
            try:
                written = lay_out(text, parsed, min(most, budget.left))
            except (TooLong, RecursionError):
                laid_out[layout], budget.left_out = None, True
                continue
            laid_out[layout] = None if written in laid_out.values() else written
        sent = laid_out[layout]
        if sent is None:
            continue
        for words, edit in edits:
            before, sent = sent, edit(sent)
            if words and sent == before:
                # It finds nothing to do here, whatever else is done.
                idle.add((layout, words))
                break
        else:
            how = ", ".join(words for words in (layout, *(words for words, _ in edits)) if words)
            yield f"if the body is re-serialised {how}: {REWROTE}", _unguarded(sent)


# In JSON no byte below a space stands inside a string. So two of them can stand for what else would hide where a string
# ends and an escape begins; all that follows can then split and replace, which is quick whatever the body is made of.
def _guarded(text: bytes) -> bytes:
    return text.replace(rb"\\", b"\0").replace(rb"\"", b"\1")


def _unguarded(text: bytes) -> bytes:
    return text.replace(b"\1", rb"\"").replace(b"\0", rb"\\")


def _as_it_is(text: bytes, parsed: Any, most: int) -> bytes:
    return text


def _spaced(comma: bytes, colon: bytes) -> Callable[[bytes, Any, int], bytes]:
    """Change only what is between the tokens: numbers and repeated keys stay as they are."""

    def lay_out(text: bytes, parsed: Any, most: int) -> bytes:
        pieces = text.split(b'"')
        pieces[::2] = [b"".join(one.split()).replace(b",", comma).replace(b":", colon) for one in pieces[::2]]
        return b'"'.join(pieces)

    return lay_out


def _sorted(comma: str, colon: str) -> Callable[[bytes, Any, int], bytes]:
    def lay_out(text: bytes, parsed: Any, most: int) -> bytes:
        written = json.dumps(parsed, ensure_ascii=False, sort_keys=True, separators=(comma, colon))
        return _guarded(written.encode("utf-8", "surrogatepass"))

    return lay_out


def _indented(indent: int | str) -> Callable[[bytes, Any, int], bytes]:
    return lambda text, parsed, most: _guarded(indented(parsed, indent, most))


def _escaped(text: bytes) -> bytes:
    plain = text.decode("utf-8", "surrogatepass")
    paired = _ASTRAL.sub(lambda some: json.dumps(some[0])[1:-1], plain)
    return paired.encode("ascii", "backslashreplace").replace(rb"\x", rb"\u00")


def _unescaped(text: bytes) -> bytes:
    kept = _ESCAPED_ASCII.sub(b"\2", text).decode("utf-8", "surrogatepass")
    plain = kept.encode("raw_unicode_escape").decode("raw_unicode_escape")
    # Two escapes may have been the halves of one character.
    paired = plain.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    return paired.encode("utf-8", "surrogatepass").replace(b"\2", rb"\u")


def _with_slashes(text: bytes) -> bytes:
    return _without_slashes(text).replace(b"/", rb"\/")


def _without_slashes(text: bytes) -> bytes:
    return text.replace(rb"\/", b"/")


def _with_html(text: bytes) -> bytes:
    for character, escape in _HTML.items():
        text = text.replace(character, escape)
    return text


def _without_html(text: bytes) -> bytes:
    for character, escape in _HTML.items():
        text = text.replace(escape, character).replace(escape[:2] + escape[2:].upper(), character)
    return text


def _differences(way: tuple[_Layout, tuple[_Edit, ...]]) -> int:
    (layout, _), edits = way
    return bool(layout) + sum(bool(words) for words, _ in edits)


_LAYOUTS: tuple[_Layout, ...] = (
    ("", _as_it_is),
    ("compactly", _spaced(b",", b":")),
    ("with spaces", _spaced(b", ", b": ")),
    ("with colon spaces", _spaced(b",", b": ")),
    ("with sorted keys", _sorted(",", ":")),
    ("with sorted keys and spaces", _sorted(", ", ": ")),
    ("indented by two", _indented(2)),
    ("indented by four", _indented(4)),
    ("indented by tabs", _indented("\t")),
)
_UNEDITED: _Edit = ("", bytes)
# One of each is done to a text, in this order; none of them touches what another one does.
_EDITS: tuple[tuple[_Edit, ...], ...] = (
    (_UNEDITED, ("with non-ASCII escaped", _escaped), ("with non-ASCII unescaped", _unescaped)),
    (_UNEDITED, ("with / escaped", _with_slashes), ("with / unescaped", _without_slashes)),
    (_UNEDITED, ("with <, > and & escaped", _with_html), ("with <, > and & unescaped", _without_html)),
)
# Without the first, which changes nothing.
_WAYS = sorted(itertools.product(_LAYOUTS, itertools.product(*_EDITS)), key=_differences)[1:]
