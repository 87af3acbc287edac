"""The feed's events as the bytes of a server-sent event stream."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from webhooks import feed
from webhooks.feed import Entry, Level, Place

KEEP_ALIVE = b": keep-alive\n\n"
PIECE_BYTES = 3 * 64 * 1024  # base64 writes three bytes as four characters, so that pieces can be joined


def written(entries: list[Entry]) -> Iterator[bytes]:
    """Write deliveries as events, in pieces of a bounded size whatever the size of a body."""
    waiting = bytearray()
    for entry in entries:
        for part in _parts(entry):
            waiting += part
            if len(waiting) >= PIECE_BYTES:
                yield bytes(waiting)
                waiting.clear()
    if waiting:
        yield bytes(waiting)


def _parts(entry: Entry) -> Iterator[bytes]:
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
    for start in range(0, len(entry.body), PIECE_BYTES):
        yield base64.b64encode(entry.body[start : start + PIECE_BYTES])
    yield b'"' + end


def event(name: str, place: Place, data: Mapping[str, object]) -> bytes:
    return f"id: {feed.written(place)}\nevent: {name}\ndata: {json.dumps(data)}\n\n".encode("ascii")


def lag(level: Level) -> dict[str, Any]:
    """Say what is held back by a transaction that stays open somewhere on the database server."""
    return {"lag": {"held_back": level.held, "seconds": round(level.held_s, 3)}}


def time_of(moment: datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(UTC).isoformat()
