"""The events split from one delivery, each as the bytes that are kept with it.

What the events of a delivery have in common (the references of a Shortcut body) is kept once, with the delivery itself:
kept with each of them, it would grow with the square of their number. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from webhooks.delivery import RawEvent
from webhooks.nesting import loads

_MISSING = object()
_WRITTEN = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class Parts:
    """Events as bytes.

    Args:
        shared: what they have in common, a JSON object; None where they cannot be written as JSON.
        own: by event, the rest of it; None where it cannot be written, so that it is read from the delivery's body.
    """

    shared: bytes | None
    own: list[bytes | None]


def written(events: Sequence[RawEvent]) -> Parts:
    """Write the events of one delivery. Values that are one and the same object in all of them are in common."""
    first, others = events[0].data, events[1:]
    names = [name for name, value in first.items() if all(o.data.get(name, _MISSING) is value for o in others)]
    common = frozenset(names)
    try:
        shared = _bytes({name: first[name] for name in names})
        return Parts(shared, [_own(event, names, common) for event in events])
    except (TypeError, ValueError, RecursionError):  # a source of somebody's own, whose data is no JSON
        return Parts(None, [None] * len(events))


def read(own: bytes, shared: bytes | None) -> RawEvent:
    """Read an event again as it was written."""
    kept = loads(own)
    data: dict[str, Any] = kept["data"]
    if kept["shared"]:
        together = loads(shared or b"{}")
        data |= {name: together[name] for name in kept["shared"]}
    at = kept["occurred_at"]
    return RawEvent(kept["name"], data, None if at is None else datetime.fromisoformat(at))


def _own(event: RawEvent, names: Sequence[str], common: frozenset[str]) -> bytes:
    return _bytes(
        {
            "name": event.name,
            "occurred_at": None if event.occurred_at is None else event.occurred_at.isoformat(),
            "data": {name: value for name, value in event.data.items() if name not in common},
            "shared": names,
        }
    )


def _bytes(value: object) -> bytes:
    return _WRITTEN(value).encode("ascii")
