"""JSON of others, read with a limit of ours on how deep it nests.

The interpreter's own limit differs by its version and by how deep the call itself stands, so it decides nothing here.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from itertools import accumulate
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")

MOST_NESTED = 950
"""So many arrays and objects may stand inside one another: Python 3.11 reads and writes a thousand and no more."""
_NEEDS_NO_ROOM = 200

_BRACKETS = b"[]{}"
_OTHERS = bytes(set(range(256)) - set(_BRACKETS) - set(b'"'))
_STEPS = bytes.maketrans(b"[]{}", b"\x01\xff\x01\xff")  # one deeper, one less, as signed bytes


class TooDeep(ValueError):
    """JSON nests deeper than is read here."""


def loads(text: str | bytes) -> Any:
    """Parse JSON, as `json.loads` does.

    Raises:
        TooDeep: it nests deeper than `MOST_NESTED`. Found by counting, before anything recurses.
        ValueError: it is no JSON.
    """
    return with_room(check(text), lambda: json.loads(text))


def check(text: str | bytes) -> int:
    """Return how deep JSON nests, 0 for any text that need not be looked at.

    Raises:
        TooDeep: it nests deeper than `MOST_NESTED`.
    """
    depth = _depth(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    if depth > MOST_NESTED:
        raise TooDeep(f"nested deeper than {MOST_NESTED} arrays and objects")
    return depth


def _depth(text: bytes) -> int:
    """Return how deep a text nests; for what is no JSON, at least as deep as a parser comes.

    Without a loop of ours, since it may be 25 MiB: it costs less than parsing, whatever the text is.
    """
    if text.count(b"[") + text.count(b"{") <= _NEEDS_NO_ROOM:
        return 0
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Two quotes without a bracket between them say nothing, whether a string begins or ends at the first.
    text = text.translate(None, _OTHERS).replace(b'""', b"")
    if b'"' in text:
        text = b"".join(text.split(b'"')[::2])
    return max(accumulate(array("b", text.translate(_STEPS))), default=0)


def with_room(depth: int, read: Callable[[], T]) -> T:
    """Read what nests so deep: where that takes room, in a thread, whose stack is empty, whoever asks.

    Args:
        depth: what `check` returned.
        read: what recurses.

    Raises:
        Exception: what `read` raises.
    """
    if depth <= _NEEDS_NO_ROOM:
        return read()
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(read())
        except BaseException as error:
            failed.append(error)

    thread = Thread(target=run, name="nested JSON")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]
