"""What a delivery wants: the event, as `source/event`, whose handler the process that claimed it did not have.

A process that cannot apply a delivery looks whether another living one can, writes down what the delivery wants, and
gives it back uncharged. From then on only a process that has the handler claims it, through an index of its own, and
nothing waits behind it. Once no living process has the handler any more, the sweep ends it as ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from psycopg.sql import SQL

from webhooks.db import Transaction, clean, compose, named
from webhooks.sources import Source

NO_HANDLER = "no handler for "
NO_SOURCE = "no source is named "
"""How the reasons of a delivery start that no process had any use for; a later one may have."""

LIVING_FOR = timedelta(seconds=30)
MOST_ENDED = 100

# Others' silence is held against one's own: after a time without the database nobody was heard of.
_LIVING = named(
    "(p.seen_at > coalesce((SELECT me.seen_at FROM {processes} AS me WHERE me.id = %(process)s), now()) - %(living)s)"
)
_KNOWS = SQL("(w.wants = ANY(p.handles) OR w.wants IN (SELECT s.name || '/' FROM unnest(p.accepts) AS s (name)))")
# Value by value through the index, so that it costs as little for a million lines as for one.
_WANTED = named(
    "RECURSIVE named AS (\n"
    "    (SELECT wants FROM {deliveries} WHERE status = 'received' AND wants IS NOT NULL ORDER BY wants LIMIT 1)\n"
    "    UNION ALL\n"
    "    SELECT (SELECT d.wants FROM {deliveries} AS d WHERE d.status = 'received' AND d.wants > n.wants\n"
    "        ORDER BY d.wants LIMIT 1)\n"
    "    FROM named AS n WHERE n.wants IS NOT NULL\n"
    ")"
)
WANTED = compose("WITH {wanted} SELECT wants FROM named WHERE wants IS NOT NULL", wanted=_WANTED)
HANDLED = compose(
    "SELECT w.wants FROM unnest(%(wants)s::text[]) AS w (wants)\n"
    "WHERE EXISTS (SELECT FROM {processes} AS p WHERE {living} AND {knows})",
    living=_LIVING,
    knows=_KNOWS,
)
END_UNHANDLED = compose(
    "WITH {wanted}, unhandled AS MATERIALIZED (\n"
    "    SELECT w.wants FROM named AS w WHERE w.wants IS NOT NULL\n"
    "        AND NOT EXISTS (SELECT FROM {processes} AS p WHERE {living} AND {knows})\n"
    "), ended AS MATERIALIZED (\n"
    "    SELECT d.id FROM unhandled AS u JOIN {deliveries} AS d ON d.wants = u.wants\n"
    "    WHERE d.status = 'received' ORDER BY d.id LIMIT %(limit)s FOR NO KEY UPDATE OF d SKIP LOCKED\n"
    ")\n"
    "UPDATE {deliveries} AS t SET status = 'ignored', wants = NULL, parked_on = NULL, parked_since = NULL,\n"
    "    reason = CASE WHEN t.wants = t.source || '/' THEN %(no_source)s || t.source || ' any more'\n"
    "        ELSE %(no_handler)s || substr(t.wants, length(t.source) + 2) END\n"
    "FROM ended WHERE t.id = ended.id AND t.status = 'received' RETURNING t.id, t.reason",
    wanted=_WANTED,
    living=_LIVING,
    knows=_KNOWS,
)


def want(source: str, event: str | None) -> str:
    """Return what a delivery of a source wants; None: its event cannot be read by who does not know the source."""
    return f"{source}/{'' if event is None else clean(event)}"


def wants_of(sources: Mapping[str, Source]) -> set[str]:
    """Return all that a delivery may want of a process which knows these sources."""
    return {want(name, event) for name, source in sources.items() for event in (None, *source.handlers)}


async def handled_elsewhere(
    tx: Transaction, process: str, source: str, events: Iterable[str | None]
) -> set[str | None]:
    """Return which of a source's events a living process has a handler for; None stands for the source itself."""
    wanted = {want(source, event): event for event in events}
    rows = await (await tx.execute(HANDLED, {**_living(process), "wants": list(wanted)})).fetchall()
    return {wanted[row["wants"]] for row in rows}


async def end_unhandled(tx: Transaction, process: str) -> list[dict[str, Any]]:
    """End, as ignored, a hundred deliveries that want what no living process has; return their ids and reasons."""
    params = {**_living(process), "no_source": NO_SOURCE, "no_handler": NO_HANDLER, "limit": MOST_ENDED}
    return await (await tx.execute(END_UNHANDLED, params)).fetchall()


def _living(process: str) -> dict[str, object]:
    return {"process": process, "living": LIVING_FOR}
