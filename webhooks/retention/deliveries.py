"""Deliveries that have ended: their bodies and headers first, in the end the whole row.

A request and the events split from it go together: their rows in one transaction, events first; its body only when no
event needs it any more. What is received, being applied, parked or dead is left alone, and so is its request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from psycopg.sql import SQL

from webhooks.db import Transaction, compose, table
from webhooks.retention.ages import Before, old
from webhooks.retention.step import LOOK, Line, Step, Walk, batch, counted, removed

FINAL = SQL("status IN ('processed', 'ignored')")
FIRST = (datetime(1, 1, 1, tzinfo=UTC), 0)

# The last delivery of the feed. The place of every follower that has caught up names it, and is known by it.
FOLLOWED = SQL(
    "(SELECT id FROM {} WHERE parent IS NULL AND replay_of IS NULL ORDER BY accepted_xid DESC, id DESC LIMIT 1)"
).format(table("deliveries"))
# Sizes are read from where a value is stored, not from the value.
PAGE = compose(
    "SELECT d.*, parts.count AS parts, d.final AND coalesce(parts.final, true) AS finished, parts.newest,\n"
    "    d.own_bytes + parts.bytes AS body_bytes,\n"
    "    d.id = {followed} AS followed\n"
    "FROM (\n"
    "    SELECT id, source, received_at, {final} AS final,\n"
    "        octet_length(body) + coalesce(octet_length(part), 0) AS own_bytes,\n"
    "        CASE WHEN headers_pruned_at IS NULL THEN pg_column_size(headers) END AS header_bytes,\n"
    "        pg_column_size(ROW(source, dedup_key, event, reason, last_error, moved_rows)) + 100 AS row_bytes\n"
    "    FROM {deliveries}\n"
    "    WHERE parent IS NULL AND (received_at, id) > (%(at)s::timestamptz, %(id)s::bigint)\n"
    "        AND received_at < %(until)s::timestamptz\n"
    "    ORDER BY received_at, id LIMIT %(look)s\n"
    ") AS d, LATERAL (\n"
    "    SELECT count(*) AS count, bool_and({final}) AS final, max(received_at) AS newest,\n"
    "        coalesce(sum(octet_length(part)), 0) AS bytes\n"
    "    FROM {deliveries} WHERE parent = d.id\n"
    ") AS parts\n"
    "ORDER BY d.received_at, d.id",
    final=FINAL,
    followed=FOLLOWED,
)
# Whoever replays or re-arms one of these locks its row first, so what is locked here stays as it is. Nobody is waited
# for. Rows are locked in the order of their ids, as everywhere.
LOCK = compose(
    "SELECT id FROM {deliveries} WHERE id = ANY(%(ids)s) AND parent IS NULL AND {final}\n"
    "ORDER BY id FOR UPDATE SKIP LOCKED",
    final=FINAL,
)
LOCK_PARTS = compose(
    "SELECT id FROM {deliveries} WHERE parent = ANY(%(ids)s) AND {final}\nORDER BY id FOR UPDATE SKIP LOCKED",
    final=FINAL,
)
# A new statement sees the events that were split off since the page was read.
WHOLE = compose(
    "SELECT held.id FROM unnest(%(ids)s::bigint[]) AS held (id) WHERE NOT EXISTS (\n"
    "    SELECT FROM {deliveries} AS part WHERE part.parent = held.id AND part.id <> ALL(%(parts)s::bigint[])\n"
    ")"
)
REMOVE_PARTS = compose("DELETE FROM {deliveries} WHERE parent = ANY(%(ids)s) AND id = ANY(%(parts)s)")
REMOVE = compose(
    "DELETE FROM {deliveries} AS d WHERE d.id = ANY(%(ids)s)\n"
    "    AND NOT EXISTS (SELECT FROM {deliveries} AS part WHERE part.parent = d.id)\n"
    "RETURNING d.id"
)
EMPTY = compose(
    "UPDATE {deliveries} AS d SET\n"
    "    body = CASE WHEN due.body THEN NULL ELSE d.body END,\n"
    "    part = CASE WHEN due.body THEN NULL ELSE d.part END,\n"
    "    pruned_at = CASE WHEN due.body THEN statement_timestamp() ELSE d.pruned_at END,\n"
    "    headers = CASE WHEN due.headers THEN '[]' ELSE d.headers END,\n"
    "    headers_pruned_at = CASE WHEN due.headers THEN statement_timestamp() ELSE d.headers_pruned_at END\n"
    "FROM unnest(%(ids)s::bigint[], %(bodies)s::boolean[], %(headers)s::boolean[]) AS due (id, body, headers)\n"
    "WHERE d.id = due.id"
)
# What is kept of a body with each event is gone with it.
EMPTY_PARTS = compose(
    "UPDATE {deliveries} SET part = NULL WHERE parent = ANY(%(ids)s) AND id = ANY(%(parts)s) AND part IS NOT NULL"
)

Row = Mapping[str, Any]


def keys(before: Before, *, dry: bool) -> Walk:
    """Remove whole deliveries."""

    async def step(tx: Transaction, cursor: Any) -> Step:
        until = before.latest_key
        if until is None:
            return Step(cursor, more=False)
        page = await _page(tx, cursor, until)
        sizes = [_size_of_row(row) if key_goes(row, before) else None for row in page]
        taken = len(page) if dry else batch(sizes)
        rows = [row for row, size in zip(page[:taken], sizes, strict=False) if size is not None]
        left: Counter[str] = Counter()
        if not dry:

            async def remove(some: Sequence[int]) -> list[int]:
                ids, parts = await _held(tx, some)
                await tx.execute(REMOVE_PARTS, {"ids": ids, "parts": parts})
                return [row["id"] for row in await (await tx.execute(REMOVE, {"ids": ids})).fetchall()]

            gone = set(await removed(tx, [row["id"] for row in rows], remove, left))
            rows = [row for row in rows if row["id"] in gone]
        line = counted([(row["received_at"], _size_of_row(row)) for row in rows])
        line = Line(line.count + sum(row["parts"] for row in rows), line.bytes, line.oldest)
        return _step(page, taken, cursor, {"keys": line}, left)

    return step


def contents(before: Before, *, dry: bool) -> Walk:
    """Remove bodies and headers from deliveries that stay."""

    async def step(tx: Transaction, cursor: Any) -> Step:
        until = before.latest_content
        if until is None:
            return Step(cursor, more=False)
        page = await _page(tx, cursor, until)
        due = [content_goes(row, before) for row in page]
        sizes = [_size_of_content(row, *which) if any(which) else None for row, which in zip(page, due, strict=True)]
        taken = len(page) if dry else batch(sizes)
        rows = {row["id"]: (row, *which) for row, which in zip(page[:taken], due, strict=False) if any(which)}
        left: Counter[str] = Counter()
        if not dry:
            wanted = rows

            async def empty(some: Sequence[int]) -> list[int]:
                ids, parts = await _held(tx, some)
                flags = {"bodies": [wanted[id][1] for id in ids], "headers": [wanted[id][2] for id in ids]}
                await tx.execute(EMPTY, {"ids": ids, **flags})
                await tx.execute(EMPTY_PARTS, {"ids": [id for id in ids if wanted[id][1]], "parts": parts})
                return ids

            rows = {id: wanted[id] for id in await removed(tx, [*wanted], empty, left)}
        bodies = counted([(row["received_at"], row["body_bytes"]) for row, body, _ in rows.values() if body])
        headers = counted([(row["received_at"], row["header_bytes"]) for row, _, header in rows.values() if header])
        return _step(page, taken, cursor, {"bodies": bodies, "headers": headers}, left)

    return step


def key_goes(row: Row, before: Before) -> bool:
    """Say whether a delivery, with the events split from it, is removed; the youngest of them decides.

    The last one of the feed is not: its followers go on from it.
    """
    youngest = max(row["received_at"], row["newest"] or row["received_at"])
    return bool(row["finished"]) and not row["followed"] and before.key_goes(row["source"], youngest)


def content_goes(row: Row, before: Before) -> tuple[bool, bool]:
    """Say whether a delivery's body is removed, and whether its headers are. What goes as a whole is no matter here."""
    if not row["finished"] or key_goes(row, before):
        return False, False
    youngest = max(row["received_at"], row["newest"] or row["received_at"])
    body = row["body_bytes"] is not None and old(youngest, before.bodies)
    return body, row["header_bytes"] is not None and old(youngest, before.headers)


async def _page(tx: Transaction, cursor: tuple[datetime, int] | None, until: datetime) -> list[dict[str, Any]]:
    at, id = cursor or FIRST
    return await (await tx.execute(PAGE, {"at": at, "id": id, "until": until, "look": LOOK})).fetchall()


async def _held(tx: Transaction, ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Lock deliveries with all their events, and return those that could be had whole, and the events."""
    wanted = {"ids": sorted(ids)}
    locked = {"ids": [row["id"] for row in await (await tx.execute(LOCK, wanted)).fetchall()]}
    parts = [row["id"] for row in await (await tx.execute(LOCK_PARTS, locked)).fetchall()]
    whole = await (await tx.execute(WHOLE, {**locked, "parts": parts})).fetchall()
    return [row["id"] for row in whole], parts


def _size_of_row(row: Row) -> int:
    return int(row["row_bytes"] + (row["body_bytes"] or 0) + (row["header_bytes"] or 0))


def _size_of_content(row: Row, body: bool, headers: bool) -> int:
    return int((row["body_bytes"] if body else 0) + (row["header_bytes"] if headers else 0))


def _step(page: Sequence[Row], taken: int, cursor: Any, lines: Mapping[Any, Line], left: Mapping[str, int]) -> Step:
    last = (page[taken - 1]["received_at"], page[taken - 1]["id"]) if taken else cursor
    deliveries = {f"deliveries {reason}": count for reason, count in left.items()}
    return Step(last, more=taken < len(page) or len(page) == LOOK, removed=lines, left=deliveries)
