"""A place in the feed, and the text that followers keep for it.

A place names the delivery that it lies behind, with the moment of its receipt. So it can be held against the database
that it is shown to: two databases may count to the same numbers, and one that was restored counts them again, but
neither received the same delivery in the same microsecond. That needs no id of the database, which a dump would carry
along and a promoted copy share.
"""

from __future__ import annotations

import base64
import binascii
import struct
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from webhooks.errors import ConfigurationError

_PLACE = struct.Struct(">BQQq")
_VERSION = 2
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Place(NamedTuple):
    """A place in the feed: behind one delivery, and before the next.

    Args:
        xid: the transaction in which the delivery was accepted.
        id: its id.
        received_us: when it was received, in microseconds since 1970.
    """

    xid: int
    id: int
    received_us: int

    @classmethod
    def behind(cls, xid: int, id: int, received_at: datetime) -> Place:
        return cls(xid, id, (received_at - _EPOCH) // timedelta(microseconds=1))


START = Place(0, 0, 0)


class NotAPlace(ConfigurationError):
    """A cursor is not one of this feed's, or belongs to another database."""


def written(place: Place) -> str:
    """Return a place as followers are given it: a text that they keep and hand back, and need not understand."""
    return base64.urlsafe_b64encode(_PLACE.pack(_VERSION, *place)).decode("ascii").rstrip("=")


def read_place(text: str) -> Place:
    """Read what `written` wrote.

    Raises:
        NotAPlace: it wrote no such text.
    """
    try:
        content = base64.b64decode(text.encode("ascii") + b"==", altchars=b"-_", validate=True)
        version, xid, id, received_us = _PLACE.unpack(content)
    except (ValueError, binascii.Error, struct.error):
        raise NotAPlace(f"{text[:100]!r} is no cursor of the feed") from None
    place = Place(xid, id, received_us)
    if version != _VERSION or written(place) != text or id >= 2**63:
        raise NotAPlace(f"{text!r} is no cursor that this version understands")
    return place
