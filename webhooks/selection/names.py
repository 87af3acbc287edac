"""Names in a filter that nothing has: without a word they would look like an empty answer.

Looked for only where nothing was found, so that a filter that finds something costs nothing more. Sources and causes
are known beforehand: another name is a mistake. Events and rows come as they come: that nothing has one yet is a note.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from webhooks.consumer import Consumer
from webhooks.db import Transaction, clean, compose, table
from webhooks.errors import UnknownName
from webhooks.near import there_are
from webhooks.rows import gates_of, named

CAUSES = (
    "missing_signature",
    "malformed_header",
    "duplicate_header",
    "bad_signature",
    "stale_timestamp",
    "no_secret",
    "body_too_large",
    "body_too_slow",
)
"""What a request is refused for; a source of the user's own may have others."""
NEWEST = 10_000

# From one source to the next in the index of the keys: there are few, and many deliveries of each.
SOURCES = compose(
    "WITH RECURSIVE stored AS (\n"
    "    (SELECT source FROM {deliveries} ORDER BY source LIMIT 1)\n"
    "    UNION ALL\n"
    "    SELECT (SELECT d.source FROM {deliveries} AS d WHERE d.source > stored.source ORDER BY d.source LIMIT 1)\n"
    "    FROM stored WHERE stored.source IS NOT NULL\n"
    ")\n"
    "SELECT source AS name FROM stored WHERE source IS NOT NULL UNION SELECT source FROM {rejections}",
    rejections=table("rejections"),
)
STORED_CAUSES = compose("SELECT DISTINCT cause AS name FROM {rejections}", rejections=table("rejections"))
HAS_EVENT = compose("SELECT 1 FROM {deliveries} WHERE strpos(lower(event), lower(%(event)s)) > 0 LIMIT 1")
EVENTS = compose(
    "SELECT DISTINCT event AS name FROM (SELECT event FROM {deliveries} ORDER BY id DESC LIMIT %(newest)s) AS d\n"
    "WHERE event IS NOT NULL"
)
HAS_ROW = compose("SELECT 1 FROM {deliveries} WHERE moved_rows @> ARRAY[%(row)s::text] OR parked_on = %(row)s LIMIT 1")
ROWS = compose(
    "SELECT DISTINCT moved AS name\n"
    "FROM (SELECT moved_rows FROM {deliveries} ORDER BY id DESC LIMIT %(newest)s) AS d, unnest(moved_rows) AS moved\n"
    "WHERE starts_with(moved, %(of)s)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names that somebody filtered by, as they were given; None: not by that."""

    source: str | None = None
    event: str | None = None
    row: str | None = None
    cause: str | None = None


async def unknown(tx: Transaction, consumer: Consumer | None, names: Names) -> list[str]:
    """Return a note about each event and row that neither the consumer nor anything stored has.

    Args:
        tx: to look in.
        consumer: whose sources, handlers and gates; None where it cannot be loaded, and then a source that nothing
            stored is of is only noted.
        names: what to look for.

    Raises:
        UnknownName: neither of them has the source, or the cause.
    """
    notes: list[str] = []
    if names.source is not None and (told := await _source(tx, consumer, names.source)):
        if consumer is not None:
            raise UnknownName(told)
        notes.append(told)
    if names.cause is not None:
        causes = {*CAUSES, *await _names(tx, STORED_CAUSES)}
        if names.cause.lower() not in causes:
            raise UnknownName(f"no request is refused for {names.cause!r}; {there_are(names.cause, causes)}")
    if names.event is not None and (told := await _event(tx, consumer, names.event)):
        notes.append(told)
    if names.row is not None and (told := await _row(tx, consumer, names.row)):
        notes.append(told)
    return notes


async def _source(tx: Transaction, consumer: Consumer | None, given: str) -> str | None:
    ours = () if consumer is None else consumer.sources
    known = {*ours, *await _names(tx, SOURCES)}
    if given.lower() in known:
        return None
    return f"there is no source {given!r}, neither in this consumer nor in what is stored; {there_are(given, known)}"


async def _event(tx: Transaction, consumer: Consumer | None, given: str) -> str | None:
    handled = [] if consumer is None else [event for each in consumer.sources.values() for event in each.handlers]
    if any(given.lower() in event.lower() for event in handled):
        return None
    if await (await tx.execute(HAS_EVENT, {"event": clean(given)})).fetchone() is not None:
        return None
    stored = (event for names in await _names(tx, EVENTS, newest=NEWEST) for event in names.split(", "))
    there = there_are(given, (*handled, *stored))
    return f"no stored delivery has {given!r} in its event's name, and no handler is for one; {there}"


async def _row(tx: Transaction, consumer: Consumer | None, given: str) -> str | None:
    if await (await tx.execute(HAS_ROW, {"row": clean(given)})).fetchone() is not None:
        return None
    of = given.partition(":")[0]
    told = f"no stored delivery moved {given} or waits for it"
    if consumer is not None:
        gates = gates_of(consumer)
        if of not in gates:
            return f"{told}, and there is no gate over a table {of!r}; {there_are(of, gates)}"
        found = await named(tx, consumer, given)
        if found.row is not None:
            return None if found.label == given else f"{told}: that row is written {found.label}"
        told += ", and there is no such row"
    stored = await _names(tx, ROWS, newest=NEWEST, of=clean(f"{of}:"))
    return f"{told}; {there_are(given, stored)}"


async def _names(tx: Transaction, query: bytes, **params: object) -> Iterable[str]:
    return [row["name"] for row in await (await tx.execute(query, params)).fetchall()]
