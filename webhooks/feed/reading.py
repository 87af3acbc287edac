"""What is in the feed: how far it is, what comes next, and how much waits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg.sql import SQL

from webhooks.db import Transaction, compose
from webhooks.delivery import Headers
from webhooks.feed.place import START, Place

KEEP_ALIVE_S = 15.0
"""How long a follower hears nothing at most; after more its connection is dead, whatever its system believes."""
MOST_DELIVERIES = 200
MOST_BYTES = 4 * 1024 * 1024
"""What a page holds at most. A body that is larger comes alone."""
MOST_COUNTED = 100_000
MOST_HELD = 1_000


@dataclass(frozen=True, slots=True)
class Level:
    """How far the feed is.

    Args:
        horizon: below it nothing can appear any more.
        last: the place behind everything below it. It names a delivery, not the horizon itself: after a crash the
            numbers of transactions that left no trace are given out again.
        held: how many deliveries are stored and above it, `MOST_HELD` at most.
        held_s: how long the oldest of them has been held back, in seconds.
    """

    horizon: int
    last: Place
    held: int
    held_s: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """What lies between a place and the horizon.

    Args:
        count: how many deliveries, `MOST_COUNTED` at most.
        since: when the first of them was received.
    """

    count: int
    since: datetime | None


@dataclass(frozen=True, slots=True)
class Entry:
    """One delivery of the feed.

    Args:
        place: the place behind it.
        id: the delivery's id.
        source: the name in its URL.
        dedup_key: what copies of it have in common.
        event: what it says, where it was applied already and says one thing.
        origin: how it came: ``received``, or another word where it did not come by itself.
        received_at: when it was stored.
        headers: the header lines kept, in order.
        body: the exact bytes, None once they were pruned.
        pruned_at: when they were.
    """

    place: Place
    id: int
    source: str
    dedup_key: str
    event: str | None
    origin: str
    received_at: datetime
    headers: Headers
    body: bytes | None
    pruned_at: datetime | None


@dataclass(frozen=True, slots=True)
class Page:
    """Some deliveries in order.

    Args:
        entries: the deliveries.
        place: where the next page starts.
        more: whether there is one by now.
    """

    entries: list[Entry]
    place: Place
    more: bool


FEED = SQL("parent IS NULL AND replay_of IS NULL")
WANTED = SQL("(%(sources)s::text[] IS NULL OR source = ANY(%(sources)s))")
BETWEEN = SQL(
    "accepted_xid < %(horizon)s::xid8 AND (accepted_xid, id) > (%(xid)s::xid8, %(id)s::bigint)\n"
    "    AND {feed} AND {wanted}"
).format(feed=FEED, wanted=WANTED)

HORIZON = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text AS horizon"
LEVEL = compose(
    "SELECT held.number, held.seconds, last.xid, last.id, last.received_at FROM (\n"
    "    SELECT count(*) AS number,\n"
    "        extract(epoch FROM statement_timestamp() - min(received_at))::double precision AS seconds\n"
    "    FROM (SELECT received_at FROM {deliveries} WHERE accepted_xid >= %(horizon)s::xid8 AND {feed}\n"
    "        ORDER BY accepted_xid, id LIMIT %(most)s) AS above\n"
    ") AS held LEFT JOIN (\n"
    "    SELECT accepted_xid::text AS xid, id, received_at FROM {deliveries}\n"
    "    WHERE accepted_xid < %(horizon)s::xid8 AND {feed} ORDER BY accepted_xid DESC, id DESC LIMIT 1\n"
    ") AS last ON true",
    feed=FEED,
)
# The sizes are looked at before a body is: a page takes as many deliveries as fit, the first one whatever its size.
PAGE = compose(
    "WITH next AS MATERIALIZED (\n"
    "    SELECT id, accepted_xid, coalesce(octet_length(body), 0) AS bytes FROM {deliveries}\n"
    "    WHERE {between}\n"
    "    ORDER BY accepted_xid, id LIMIT %(most)s\n"
    "), fitting AS (\n"
    "    SELECT id, count(*) OVER () AS found,\n"
    "        row_number() OVER sofar = 1 OR sum(bytes) OVER sofar <= %(most_bytes)s AS fits\n"
    "    FROM next WINDOW sofar AS (ORDER BY accepted_xid, id)\n"
    ")\n"
    "SELECT fitting.found, d.accepted_xid::text AS xid, d.id, d.source, d.dedup_key, d.event, d.origin,\n"
    "    d.received_at, d.headers, d.body, d.pruned_at\n"
    "FROM fitting JOIN {deliveries} AS d ON d.id = fitting.id\n"
    "WHERE fitting.fits ORDER BY d.accepted_xid, d.id",
    between=BETWEEN,
)
WAITING = compose(
    "SELECT count(*) AS number, min(received_at) AS since FROM (\n"
    "    SELECT received_at FROM {deliveries} WHERE {between} ORDER BY accepted_xid, id LIMIT %(most)s\n"
    ") AS next",
    between=BETWEEN,
)


async def level(tx: Transaction) -> Level:
    """Return how far the feed is now."""
    return await level_at(tx, await horizon_now(tx))


async def page(tx: Transaction, after: Place, level: Level, sources: Collection[str] = ()) -> Page:
    """Return what comes next.

    Args:
        tx: any transaction; its statements see more than the level's did.
        after: the place to go on from.
        level: up to where.
        sources: only deliveries of these; of all where it names none.
    """
    params = {**_between(after, level, sources), "most": MOST_DELIVERIES, "most_bytes": MOST_BYTES}
    # In binary, or a body would be written as twice as many hexadecimal digits.
    rows = await (await tx.connection.execute(PAGE, params, binary=True)).fetchall()
    entries = [_entry(row) for row in rows]
    if rows and (rows[0]["found"] > len(rows) or rows[0]["found"] == MOST_DELIVERIES):
        return Page(entries, entries[-1].place, more=True)
    # Behind all that was looked through, so that what others sent is not looked through again.
    return Page(entries, max(after, level.last), more=False)


def _entry(row: dict[str, Any]) -> Entry:
    headers = tuple((name, value) for name, value in row["headers"])
    columns = ("id", "source", "dedup_key", "event", "origin", "received_at", "body", "pruned_at")
    return Entry(place=place_of(row), headers=headers, **{name: row[name] for name in columns})


async def waiting(tx: Transaction, after: Place, level: Level, sources: Collection[str] = ()) -> Waiting:
    """Count what lies between a place and the horizon."""
    params = {**_between(after, level, sources), "most": MOST_COUNTED}
    row = await (await tx.execute(WAITING, params)).fetchone()
    return Waiting(0, None) if row is None else Waiting(row["number"], row["since"])


async def horizon_now(tx: Transaction) -> int:
    """Return the lowest transaction that is still open."""
    row = await (await tx.execute(HORIZON)).fetchone()
    if row is None:
        raise RuntimeError("pg_current_snapshot() returned no row")
    return int(row["horizon"])


async def level_at(tx: Transaction, horizon: int) -> Level:
    """Return how far the feed is, with a horizon that an earlier statement read."""
    row = await (await tx.execute(LEVEL, {"horizon": str(horizon), "most": MOST_HELD})).fetchone()
    if row is None:
        raise RuntimeError("an aggregate returned no row")
    return Level(horizon, START if row["xid"] is None else place_of(row), row["number"], row["seconds"] or 0.0)


def place_of(row: dict[str, Any]) -> Place:
    """Return the place behind the delivery of a row."""
    return Place.behind(int(row["xid"]), row["id"], row["received_at"])


def _between(after: Place, level: Level, sources: Collection[str]) -> dict[str, object]:
    return {
        "xid": str(after.xid),
        "id": after.id,
        "horizon": str(level.horizon),
        "sources": sorted(sources) or None,
    }
