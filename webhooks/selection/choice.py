"""Filters, and what they mean when a selection starts: times fixed, names looked up, the end known."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from webhooks.db import Transaction, clean, compose, database_time
from webhooks.deliveries import Disposition
from webhooks.errors import ConfigurationError
from webhooks.selection.paths import JsonFilter

Unit = Literal["run", "request", "part", "original"]
"""What is selected.

`run`: what a worker applies: a delivery that was not split, or each event that was split off. `request`: a delivery as
it came in, unless it repeats another. `part`: an event that was split off. `original`: a request less those that came
out of a file, and one of its events alone may fit the filters.
"""

DEEPEST = 100

NEWEST = compose("SELECT coalesce(max(id), 0) AS id FROM {deliveries}")
# Without OFFSET the planner would walk the ids, to find the first one of that time at the end of the table.
BOUNDS = compose(
    "SELECT min(id) AS first, max(id) AS last FROM (\n"
    "    SELECT id FROM {deliveries}\n"
    "    WHERE (%(since)s::timestamptz IS NULL OR received_at >= %(since)s)\n"
    "        AND (%(until)s::timestamptz IS NULL OR received_at < %(until)s)\n"
    "    OFFSET 0\n"
    ") AS d"
)
NAMED = compose("SELECT id, parent, position, replay_of FROM {deliveries} WHERE id = ANY(%(ids)s) ORDER BY id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which deliveries; each filter left out lets all pass, and one must pass every filter.

    Args:
        ids: only these; a delivery that was split stands for its events.
        source: the source's name, in any case.
        event: a part of the event's name, in any case. An event is known once its delivery was applied.
        disposition: what became of it.
        since: received at that time or later, or not longer ago than that.
        until: received before that time, or longer ago than that.
        where_json: what its parsed body must hold.
        row: it moved this row, or waits for it, as `table:key`.
        limit: the oldest so many at most.
        after: only ids above this one.
        upto: only ids up to this one; None: what is there when the selection starts.
    """

    ids: tuple[int, ...] = ()
    source: str | None = None
    event: str | None = None
    disposition: Disposition | None = None
    since: datetime | timedelta | None = None
    until: datetime | timedelta | None = None
    where_json: tuple[JsonFilter, ...] = ()
    row: str | None = None
    limit: int | None = None
    after: int = 0
    upto: int | None = None


@dataclass(frozen=True, slots=True)
class Scope:
    """A selection that has started: it means the same deliveries whenever it is read again.

    Args:
        unit: what is selected.
        params: the filters, as the statements take them.
        where_json: the filters that no statement can apply.
        limit: how many at most.
        after: only ids above this one.
        upto: only ids up to this one.
    """

    unit: Unit
    params: dict[str, Any]
    where_json: tuple[JsonFilter, ...]
    limit: int | None
    after: int
    upto: int


async def chosen(tx: Transaction, wanted: Selection, unit: Unit) -> Scope:
    """Start a selection.

    Raises:
        ConfigurationError: there is no delivery of an id, or it is not such a unit; `row` is no `table:key`.
    """
    if wanted.row is not None and not all(wanted.row.partition(":")):
        raise ConfigurationError(f"{wanted.row!r} names no row: write TABLE:KEY, such as patch_sessions:123")
    now = await database_time(tx)
    upto = wanted.upto
    if upto is None:
        newest = await (await tx.execute(NEWEST)).fetchone()
        upto = 0 if newest is None else int(newest["id"])
    disposition = wanted.disposition
    params: dict[str, Any] = {
        "ids": await _ids(tx, wanted.ids, unit) if wanted.ids else None,
        "source": None if wanted.source is None else clean(wanted.source).lower(),
        "event": None if wanted.event is None else clean(wanted.event),
        "status": "received" if disposition == "parked" else disposition,
        "parked": disposition == "parked" if disposition in ("received", "parked") else None,
        "since": now - wanted.since if isinstance(wanted.since, timedelta) else wanted.since,
        "until": now - wanted.until if isinstance(wanted.until, timedelta) else wanted.until,
        "row": None if wanted.row is None else clean(wanted.row),
    }
    after = wanted.after
    if params["since"] is not None or params["until"] is not None:
        # The ids of that time, so that only these are walked through.
        bounds = await (await tx.connection.execute(BOUNDS, params, prepare=False)).fetchone()
        if bounds is None or bounds["first"] is None:
            upto = after
        else:
            after, upto = max(after, bounds["first"] - 1), min(upto, bounds["last"])
    return Scope(unit, params, wanted.where_json, wanted.limit, after, upto)


async def _ids(tx: Transaction, ids: tuple[int, ...], unit: Unit) -> list[int]:
    """Look up deliveries that somebody named, and return the ids of what is meant."""
    rows = {row["id"]: row for row in await _named(tx, ids)}
    missing = [str(id) for id in ids if id not in rows]
    if missing:
        raise ConfigurationError(f"there is no delivery {', '.join(missing)}")
    parts = [row for row in rows.values() if row["parent"] is not None]
    if unit == "request" and parts:
        part = parts[0]
        raise ConfigurationError(
            f"delivery {part['id']} is event {part['position']} of delivery {part['parent']}, and only a whole request "
            f"can be repeated as new: webhooks replay {part['id']} runs the event again, "
            f"webhooks replay {part['parent']} --as new repeats all of it"
        )
    if unit != "original":
        return list(ids)
    # What came in: not the event split off, nor the one that repeats it.
    for _ in range(DEEPEST):
        above = {id: row["parent"] or row["replay_of"] for id, row in rows.items() if row["parent"] or row["replay_of"]}
        if not above:
            break
        found = {row["id"]: row for row in await _named(tx, tuple(above.values()))}
        gone = [(id, of) for id, of in above.items() if of not in found]
        if gone:
            raise ConfigurationError(f"delivery {gone[0][1]} is gone, which delivery {gone[0][0]} repeats")
        rows = {id: row for id, row in rows.items() if id not in above} | found
    return list(rows)


async def _named(tx: Transaction, ids: tuple[int, ...]) -> list[dict[str, Any]]:
    return await (await tx.execute(NAMED, {"ids": list(ids)})).fetchall()
