"""The inbox as a feed: received deliveries in the order in which they became final, from any place on.

Ids become visible out of order: of two accepts the one with the lower id may commit last, and whoever follows ids has
passed it by then. So a place in the feed is `(accepted_xid, id)`, and only what is below the *horizon* is served, the
lowest transaction that was still open: all below it have ended, so nothing can appear there any more. The horizon is
read first, in a statement of its own, and passed on as a parameter, so that later statements see all that is below it.

The horizon stands still while any transaction of the database server stays open, in whatever database: what was
accepted since is then *held back*, and comes later, in order.

The feed has what was received, what was fetched by way of the provider's log included. It has neither the further
events of one request nor replays: the request that they came from is in it. A delivery whose body was pruned is in it
without one.
"""

from webhooks.feed.place import START, NotAPlace, Place, read_place, written
from webhooks.feed.reading import (
    KEEP_ALIVE_S,
    MOST_BYTES,
    MOST_COUNTED,
    MOST_DELIVERIES,
    PAGE,
    PIECE_BYTES,
    Entry,
    Level,
    Page,
    Waiting,
    level,
    page,
    piece,
    waiting,
)
from webhooks.feed.restored import put_behind
from webhooks.feed.starting import located

__all__ = [
    "KEEP_ALIVE_S",
    "MOST_BYTES",
    "MOST_COUNTED",
    "MOST_DELIVERIES",
    "PAGE",
    "PIECE_BYTES",
    "START",
    "Entry",
    "Level",
    "NotAPlace",
    "Page",
    "Place",
    "Waiting",
    "level",
    "located",
    "page",
    "piece",
    "put_behind",
    "read_place",
    "waiting",
    "written",
]
