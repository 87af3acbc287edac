"""The feed's events as the bytes of a server-sent event stream."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from webhooks import feed
from webhooks.feed import PIECE_BYTES, Entry, Level, Place

END = b"\n\n"
KEEP_ALIVE = b": keep-alive" + END


async def written(
    entries: Sequence[Entry], piece: Callable[[Entry, int], Awaitable[bytes]], most: int = PIECE_BYTES
) -> AsyncGenerator[bytes]:
    """Write deliveries as events, in parts of a bounded size whatever the size of a body.

    Args:
        entries: the deliveries, each with the beginning of its body.
        piece: reads the next bytes of a body, behind so many.
        most: what a part may have before it is written, in bytes.
    """
    waiting = bytearray()
    for entry in entries:
        async for part in _parts(entry, piece):
            waiting += part
            if len(waiting) >= most:
                yield bytes(waiting)
                waiting.clear()
    if waiting:
        yield bytes(waiting)


async def _parts(entry: Entry, piece: Callable[[Entry, int], Awaitable[bytes]]) -> AsyncGenerator[bytes]:
    told: dict[str, object] = {
        "id": entry.id,
        "source": entry.source,
        "dedup_key": entry.dedup_key,
        "event": entry.event,
        "origin": entry.origin,
        "received_at": time_of(entry.received_at),
        "headers": entry.headers,
    }
    if entry.body is None:
        yield event("pruned", entry.place, {**told, "pruned_at": time_of(entry.pruned_at)})
        return
    # The body comes last, so that it can be written piece by piece into the one line that an event's data is.
    head, end = event("delivery", entry.place, {**told, "body_base64": ""}).rsplit(b'"', 1)
    yield head
    yield base64.b64encode(entry.body)
    start = len(entry.body)
    while start < entry.body_bytes:
        content = await piece(entry, start)
        yield base64.b64encode(content)
        start += len(content)
    yield b'"' + end


def event(name: str, place: Place, data: Mapping[str, object]) -> bytes:
    return f"id: {feed.written(place)}\nevent: {name}\ndata: {json.dumps(data)}\n\n".encode("ascii")


def lag(level: Level) -> dict[str, Any]:
    """Say what is held back by a transaction that stays open somewhere on the database server."""
    return {"lag": {"held_back": level.held, "seconds": round(level.held_s, 3)}}


def time_of(moment: datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(UTC).isoformat()
