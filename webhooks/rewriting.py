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
from urllib.parse import quote, quote_plus, unquote_to_bytes

from webhooks.delivery import Headers
from webhooks.errors import Unreadable
from webhooks.sources.reading import first, read_json

MOST_UNZIPPED_BYTES = 32 * 1024 * 1024
# Longer ones are tried with fewer differences at once: a person waits for the answer.
LONG_BYTES = 64 * 1024
REWROTE = "something between the provider and you read it and wrote it anew; have it pass the bytes on as they are"

_BOM = b"\xef\xbb\xbf"
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}:,]|[^][{}:,"\s]+', re.DOTALL)
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_HTML = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}

Guess = tuple[str, bytes]
_Edit = tuple[str, Callable[[str], str]]


def guesses(headers: Headers, body: bytes) -> Iterator[Guess]:
    """Yield what may have been sent, the likelier first, each with words that complete "the signature is right …"."""
    yield from _unzipped(headers, body)
    yield from _ends(body)
    yield from _charsets(body)
    yield from _forms(body)
    yield from _json(body)


def _unzipped(headers: Headers, body: bytes) -> Iterator[Guess]:
    encoding = (first(headers, "content-encoding") or "").lower()
    if encoding in ("gzip", "x-gzip", "deflate") or body.startswith(b"\x1f\x8b"):
        for window in (zlib.MAX_WBITS | 32, -zlib.MAX_WBITS):
            with suppress(zlib.error):
                # A few kilobytes may unpack to gigabytes.
                unzipped = zlib.decompressobj(window).decompress(body, MOST_UNZIPPED_BYTES)
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


def _json(body: bytes) -> Iterator[Guess]:
    """Write JSON in other ways, those with the fewest differences first."""
    try:
        parsed = read_json(body)
        text = body.decode("utf-8-sig", "surrogatepass")
    except (Unreadable, UnicodeDecodeError):
        return
    layouts: list[tuple[str, str]] = [("", text)]
    tokens: list[str] = _TOKEN.findall(text)
    for words, comma, colon in (("compactly", ",", ":"), ("with spaces", ", ", ": "), ("with colon spaces", ",", ": ")):
        marks = {",": comma, ":": colon}
        layouts.append((words, "".join(marks.get(token, token) for token in tokens)))
    with suppress(RecursionError, ValueError):
        for words, comma, colon in (("with sorted keys", ",", ":"), ("with sorted keys and spaces", ", ", ": ")):
            sorted_ = json.dumps(parsed, ensure_ascii=False, sort_keys=True, separators=(comma, colon))
            layouts.append((words, sorted_))
        for words, indent in (("indented by two", 2), ("indented by four", 4), ("indented by tabs", "\t")):
            layouts.append((words, json.dumps(parsed, ensure_ascii=False, indent=indent)))
    seen = {body}
    ways = [(layout, edits) for layout in layouts for edits in itertools.product(*_EDITS)]
    most = 4 if len(body) <= LONG_BYTES else 2
    for (layout, written), edits in sorted((way for way in ways if _differences(way) <= most), key=_differences):
        for _, edit in edits:
            written = edit(written)
        sent = written.encode("utf-8", "surrogatepass")
        if sent not in seen:
            seen.add(sent)
            how = ", ".join(words for words in (layout, *(words for words, _ in edits)) if words)
            yield f"if the body is re-serialised {how}: {REWROTE}", sent


def _differences(way: tuple[tuple[str, str], tuple[_Edit, ...]]) -> int:
    (layout, _), edits = way
    return bool(layout) + sum(bool(words) for words, _ in edits)


def _escaped(text: str) -> str:
    return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text)


def _unescaped(text: str) -> str:
    plain = _ESCAPE.sub(lambda e: chr(int(e[1], 16)) if e[1] and int(e[1], 16) > 127 else e[0], text)
    # Two escapes may have been the halves of one character.
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def _with_slashes(text: str) -> str:
    return _without_slashes(text).replace("/", "\\/")


def _without_slashes(text: str) -> str:
    return _ESCAPE.sub(lambda escape: "/" if escape[2] == "/" else escape[0], text)


def _with_html(text: str) -> str:
    for character, escape in _HTML.items():
        text = text.replace(character, escape)
    return text


def _without_html(text: str) -> str:
    back = {escape: character for character, escape in _HTML.items()}
    return _ESCAPE.sub(lambda escape: back.get(escape[0].lower(), escape[0]), text)


_AS_IT_IS: _Edit = ("", str)
# One of each is done to a text, in this order; none of them touches what another one does.
_EDITS: tuple[tuple[_Edit, ...], ...] = (
    (_AS_IT_IS, ("with non-ASCII escaped", _escaped), ("with non-ASCII unescaped", _unescaped)),
    (_AS_IT_IS, ("with / escaped", _with_slashes), ("with / unescaped", _without_slashes)),
    (_AS_IT_IS, ("with <, > and & escaped", _with_html), ("with <, > and & unescaped", _without_html)),
)
