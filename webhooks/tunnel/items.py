"""What a feed says, as values."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

from httpx_sse import ServerSentEvent
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from webhooks.errors import WebhooksError
from webhooks.sending import SOURCE_NAME
from webhooks.tunnel.bookmark import is_cursor
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


# Of the widest range that can be told in any time zone.
_Moment = Annotated[AwareDatetime, Field(ge=datetime(1970, 1, 1, tzinfo=UTC), lt=datetime(9999, 1, 1, tzinfo=UTC))]
_Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Sent(BaseModel):
    model_config = ConfigDict(strict=True)


class _Lag(_Sent):
    held_back: _Count
    seconds: float = Field(ge=0, le=1e12)  # NaN is not, either


class _Hello(_Sent):
    waiting: _Count | None = None
    waiting_since: _Moment | None = None
    lag: _Lag


class _Told(_Sent):
    id: _Count
    source: str = Field(pattern=f"^{SOURCE_NAME}$")
    event: str | None
    received_at: _Moment


class _Delivery(_Told):
    headers: tuple[tuple[str, str], ...]
    body_base64: str


def read(event: ServerSentEvent) -> Item | None:
    """Read one event of the feed; one of a kind that this version does not know is passed over.

    Raises:
        WebhooksError: it is not what the feed sends.
    """
    if event.event not in ("hello", "position", "delivery", "pruned"):
        return None
    if not is_cursor(event.id):
        raise _unreadable(event, "id: it is no cursor, which is printable ASCII of at most 1,024 characters")
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
            case _:
                hello = _Hello.model_validate_json(event.data)
                return Standing(event.id, hello.waiting, hello.waiting_since, hello.lag.held_back, hello.lag.seconds)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise _unreadable(event, f"{where}: {first['msg']}" if where else first["msg"]) from None
    except ValueError as error:  # of base64
        raise _unreadable(event, f"body_base64: {error}") from None


def _unreadable(event: ServerSentEvent, what: str) -> WebhooksError:
    which = f"a {event.event}" + (f" (cursor {event.id})" if is_cursor(event.id) else "")
    return WebhooksError(
        f"the feed sent {which} that this version cannot read: {what}; if both ends are of one version, pass it over "
        "with --since and a later time"
    )
