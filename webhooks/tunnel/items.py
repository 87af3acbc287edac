"""What a feed says, as values."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from datetime import datetime

from httpx_sse import ServerSentEvent
from pydantic import BaseModel

from webhooks.errors import WebhooksError
from webhooks.tunnel.relay import Incoming


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the follower is.

    Args:
        cursor: its place.
        waiting: how many deliveries wait; None where nobody counted.
        since: when the first of them was received.
        held_back: how many more are held back by a transaction that stays open at the deployed consumer's database.
        held_s: for how many seconds.
    """

    cursor: str
    waiting: int | None
    since: datetime | None
    held_back: int
    held_s: float


@dataclass(frozen=True, slots=True)
class Arrived:
    """A delivery, and the place behind it."""

    cursor: str
    delivery: Incoming


@dataclass(frozen=True, slots=True)
class Pruned:
    """A delivery whose body is not kept any more, and the place behind it."""

    cursor: str
    id: int
    source: str
    received_at: datetime


Item = Standing | Arrived | Pruned


class _Lag(BaseModel):
    held_back: int
    seconds: float


class _Hello(BaseModel):
    waiting: int | None = None
    waiting_since: datetime | None = None
    lag: _Lag


class _Told(BaseModel):
    id: int
    source: str
    event: str | None
    received_at: datetime


class _Delivery(_Told):
    headers: tuple[tuple[str, str], ...]
    body_base64: str


def read(event: ServerSentEvent) -> Item | None:
    """Read one event of the feed; one of a kind that this version does not know is passed over.

    Raises:
        WebhooksError: it is not what the feed sends.
    """
    try:
        match event.event:
            case "delivery":
                told = _Delivery.model_validate_json(event.data)
                delivery = Incoming(
                    source=told.source,
                    headers=told.headers,
                    body=base64.b64decode(told.body_base64, validate=True),
                    id=told.id,
                    event=told.event,
                    received_at=told.received_at,
                )
                return Arrived(event.id, delivery)
            case "pruned":
                pruned = _Told.model_validate_json(event.data)
                return Pruned(event.id, pruned.id, pruned.source, pruned.received_at)
            case "hello" | "position":
                hello = _Hello.model_validate_json(event.data)
                return Standing(event.id, hello.waiting, hello.waiting_since, hello.lag.held_back, hello.lag.seconds)
            case _:
                return None
    except ValueError:  # pydantic's is one
        raise WebhooksError(f"the feed sent a {event.event} that this version cannot read") from None
