"""What is in the feed: how far it is, what comes next, and how much waits.

A page is read with a horizon of its own transaction. One that is kept, even for a moment, may be from before a crash,
after which PostgreSQL hands out again the numbers that left no trace. For the same reason each page looks first whether
the place it goes on from is still there: the database may have been put back to an earlier time meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg.sql import SQL

from webhooks.db import Transaction, compose, table
from webhooks.delivery import Headers
from webhooks.feed.place import START, NotAPlace, Place

KEEP_ALIVE_S = 15.0
"""How long a follower hears nothing at most; after more its connection is dead, whatever its system believes."""
MOST_DELIVERIES = 200
MOST_BYTES = 256 * 1024
"""What a page holds of bodies at most, and one piece more."""
PIECE_BYTES = 3 * 64 * 1024
"""How much of a body is read at once, so that a follower costs no more however long bodies are; base64 writes three
bytes as four characters, so pieces can be joined."""
MOST_COUNTED = 10_000
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
        body: its first bytes, `PIECE_BYTES` at most; None once they were pruned.
        body_bytes: how many it has; `piece` reads the others.
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
    body_bytes: int
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
LAST_ROW = SQL(
    "SELECT accepted_xid::text AS xid, id, received_at FROM {deliveries}\n"
    "    WHERE accepted_xid < %(horizon)s::xid8 AND {feed} ORDER BY accepted_xid DESC, id DESC LIMIT 1"
).format(deliveries=table("deliveries"), feed=FEED)
LAST = compose("{last}", last=LAST_ROW)
LEVEL = compose(
    "SELECT held.number, held.seconds, last.xid, last.id, last.received_at FROM (\n"
    "    SELECT count(*) AS number,\n"
    "        extract(epoch FROM statement_timestamp() - min(received_at))::double precision AS seconds\n"
    "    FROM (SELECT received_at FROM {deliveries} WHERE accepted_xid >= %(horizon)s::xid8 AND {feed}\n"
    "        ORDER BY accepted_xid, id LIMIT %(most)s) AS above\n"
    ") AS held LEFT JOIN (\n    {last}\n) AS last ON true",
    feed=FEED,
    last=LAST_ROW,
)
# A number that this server has not come to yet is one of another server's, though the delivery came along with a dump.
NAMED = compose(
    "SELECT accepted_xid::text AS xid, id, received_at FROM {deliveries}\n"
    "WHERE id = %(id)s AND accepted_xid < pg_snapshot_xmax(pg_current_snapshot())"
)
# The sizes are looked at before a body is: a page takes as many deliveries as fit, the first one whatever its size.
PAGE = compose(
    "WITH next AS MATERIALIZED (\n"
    "    SELECT id, accepted_xid, coalesce(octet_length(body), 0) AS bytes FROM {deliveries}\n"
    "    WHERE {between}\n"
    "    ORDER BY accepted_xid, id LIMIT %(most)s\n"
    "), fitting AS (\n"
    "    SELECT id, bytes, count(*) OVER () AS found,\n"
    "        row_number() OVER sofar = 1 OR sum(least(bytes, %(piece)s)) OVER sofar <= %(most_bytes)s AS fits\n"
    "    FROM next WINDOW sofar AS (ORDER BY accepted_xid, id)\n"
    ")\n"
    "SELECT fitting.found, fitting.bytes AS body_bytes, d.accepted_xid::text AS xid, d.id, d.source, d.dedup_key,\n"
    "    d.event, d.origin, d.received_at, d.headers, substring(d.body FROM 1 FOR %(piece)s) AS body, d.pruned_at\n"
    "FROM fitting JOIN {deliveries} AS d ON d.id = fitting.id\n"
    "WHERE fitting.fits ORDER BY d.accepted_xid, d.id",
    between=BETWEEN,
)
PIECE = compose(
    "SELECT substring(body FROM %(start)s + 1 FOR %(piece)s) AS body FROM {deliveries}\n"
    "WHERE id = %(id)s AND accepted_xid = %(xid)s::xid8"
)
WAITING = compose(
    "SELECT count(*) AS number, min(received_at) AS since FROM (\n"
    "    SELECT received_at FROM {deliveries} WHERE {between} ORDER BY accepted_xid, id LIMIT %(most)s\n"
    ") AS next",
    between=BETWEEN,
)


async def level(tx: Transaction) -> Level:
    """Return how far the feed is now."""
    horizon = await horizon_now(tx)
    row = await (await tx.execute(LEVEL, {"horizon": str(horizon), "most": MOST_HELD})).fetchone()
    if row is None:
        raise RuntimeError("an aggregate returned no row")
    return Level(horizon, START if row["xid"] is None else place_of(row), row["number"], row["seconds"] or 0.0)


async def found(tx: Transaction, place: Place) -> None:
    """Return if the delivery that a place lies behind is here.

    Raises:
        NotAPlace: it is not: the place is one of another database, or of this one before it was restored, or nobody
            can tell, because the delivery was removed.
    """
    if place == START:
        return
    row = await (await tx.execute(NAMED, {"id": place.id})).fetchone()
    if row is None or place_of(row) != place:
        raise NotAPlace(
            f"the delivery {place.id} that the cursor names is not here: it is of another database, or of this one "
            "before it was restored, or so old that it was removed, and others after it; start with a time, or all"
        )


async def page(tx: Transaction, after: Place, sources: Collection[str] = ()) -> Page:
    """Return what comes next.

    Args:
        tx: a transaction in which nothing was read.
        after: the place to go on from.
        sources: only deliveries of these; of all where it names none.

    Raises:
        NotAPlace: the place is not one of this database, any more.
    """
    await found(tx, after)
    horizon = await horizon_now(tx)
    params = {
        **_between(after, horizon, sources),
        "most": MOST_DELIVERIES,
        "most_bytes": MOST_BYTES,
        "piece": PIECE_BYTES,
    }
    # In binary, or a body would be written as twice as many hexadecimal digits.
    rows = await (await tx.connection.execute(PAGE, params, binary=True)).fetchall()
    entries = [_entry(row) for row in rows]
    if rows and (rows[0]["found"] > len(rows) or rows[0]["found"] == MOST_DELIVERIES):
        return Page(entries, entries[-1].place, more=True)
    # Behind all that was looked through, so that what others sent is not looked through again.
    return Page(entries, max(after, await last_below(tx, horizon)), more=False)


async def piece(tx: Transaction, entry: Entry, start: int) -> bytes | None:
    """Return the next bytes of a body, `PIECE_BYTES` at most; None where they are not kept any more.

    Args:
        tx: a transaction.
        entry: whose body.
        start: how many bytes come before.
    """
    params = {"id": entry.id, "xid": str(entry.place.xid), "start": start, "piece": PIECE_BYTES}
    row = await (await tx.connection.execute(PIECE, params, binary=True)).fetchone()
    return None if row is None else row["body"]


def _entry(row: dict[str, Any]) -> Entry:
    headers = tuple((name, value) for name, value in row["headers"])
    columns = ("id", "source", "dedup_key", "event", "origin", "received_at", "body", "body_bytes", "pruned_at")
    return Entry(place=place_of(row), headers=headers, **{name: row[name] for name in columns})


async def waiting(tx: Transaction, after: Place, level: Level, sources: Collection[str] = ()) -> Waiting:
    """Count what lies between a place and the horizon."""
    params = {**_between(after, level.horizon, sources), "most": MOST_COUNTED}
    row = await (await tx.execute(WAITING, params)).fetchone()
    return Waiting(0, None) if row is None else Waiting(row["number"], row["since"])


async def horizon_now(tx: Transaction) -> int:
    """Return the lowest transaction that is still open."""
    row = await (await tx.execute(HORIZON)).fetchone()
    if row is None:
        raise RuntimeError("pg_current_snapshot() returned no row")
    return int(row["horizon"])


async def last_below(tx: Transaction, horizon: int) -> Place:
    """Return the place behind everything below a horizon that an earlier statement read."""
    row = await (await tx.execute(LAST, {"horizon": str(horizon)})).fetchone()
    return START if row is None else place_of(row)


def place_of(row: dict[str, Any]) -> Place:
    """Return the place behind the delivery of a row."""
    return Place.behind(int(row["xid"]), row["id"], row["received_at"])


def _between(after: Place, horizon: int, sources: Collection[str]) -> dict[str, object]:
    return {
        "xid": str(after.xid),
        "id": after.id,
        "horizon": str(horizon),
        "sources": sorted(sources) or None,
    }
