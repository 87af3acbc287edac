"""The values that travel: what arrived, and what it says."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic

from typing_extensions import TypeVar

Data = TypeVar("Data", default=dict[str, Any])

Headers = tuple[tuple[str, str], ...]
"""Header lines as received, in order: names in lower case, values decoded as latin-1."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """One request whose signature was right, before it is stored.

    Args:
        source: the name in its URL.
        dedup_key: what makes a second copy recognisable; at most 200 printable characters.
        headers: the allow-listed header lines.
        body: the exact bytes received.
        origin: how it came here: ``received`` for a request, ``trigger``, ``replay``, ``reconcile`` otherwise.
    """

    source: str
    dedup_key: str
    headers: Headers
    body: bytes
    origin: str = "received"


@dataclass(frozen=True, slots=True)
class RawEvent:
    """One event of a delivery as its source reads it, before a handler's model is applied.

    Args:
        name: what handlers are registered for, such as ``story.update`` or ``pull_request.closed``.
        data: the event's own part of the body, of nothing but what JSON holds: of a delivery with several events it is
            kept as such with each of them.
        occurred_at: the event's own time, where the provider says one.
        ignored: why the source itself sets the event aside (our own bot made it), else None.
    """

    name: str
    data: dict[str, Any]
    occurred_at: datetime | None = None
    ignored: str | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What a person decided about an escalated row, so that it could go on.

    Args:
        decided_by: who.
        reason: why.
        decided_at: when.
        value: what was said to whoever asked, as JSON; None where nothing was.
    """

    decided_by: str
    reason: str
    decided_at: datetime
    value: Any = None


@dataclass(frozen=True, slots=True)
class Event(Generic[Data]):
    """What an event handler is given.

    Args:
        source: the name of its source.
        name: the event's name.
        data: the event's own data, as the handler's `model`, else a dict.
        body: the whole parsed body of the delivery. It is parsed when it is first read, once for all the events of a
            delivery, so leave it as it is.
        delivery: the delivery's id, what `webhooks deliveries` takes.
        received_at: when the delivery was stored.
        occurred_at: the event's own time, where the provider says one.
        decision: what a person decided when they had the dead delivery tried again, see `Claim.decision`.
    """

    source: str
    name: str
    data: Data
    body: Any
    delivery: int
    received_at: datetime
    occurred_at: datetime | None
    decision: Decision | None = None
