"""What only tells of something that is over: notifications that were sent, and heartbeat runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from webhooks.db import Transaction, compose, table
from webhooks.retention.ages import Before, Kind
from webhooks.retention.step import MOST, Line, Step, Walk, counted, removed

NOTIFICATIONS = compose(
    "SELECT id, escalated_at AS at, 250 + coalesce(pg_column_size(reason), 0) AS bytes FROM {notifications}\n"
    "WHERE id > %(id)s AND status IN ('notified', 'dropped') AND escalated_at < %(before)s ORDER BY id LIMIT %(most)s"
)
REMOVE_NOTIFICATIONS = compose(
    "WITH going AS MATERIALIZED (\n"
    "    SELECT id FROM {notifications} WHERE id = ANY(%(ids)s) AND status IN ('notified', 'dropped')\n"
    "    ORDER BY id FOR UPDATE SKIP LOCKED\n"
    ")\n"
    "DELETE FROM {notifications} AS n USING going WHERE n.id = going.id RETURNING n.id"
)
RUNS = compose(
    "SELECT id, ended_at AS at, 150 + coalesce(pg_column_size(note), 0) AS bytes FROM {runs}\n"
    "WHERE id > %(id)s AND ended_at < %(before)s ORDER BY id LIMIT %(most)s",
    runs=table("heartbeat_runs"),
)
REMOVE_RUNS = compose(
    "WITH going AS MATERIALIZED (\n"
    "    SELECT id FROM {runs} WHERE id = ANY(%(ids)s) AND ended_at IS NOT NULL ORDER BY id FOR UPDATE SKIP LOCKED\n"
    ")\n"
    "DELETE FROM {runs} AS r USING going WHERE r.id = going.id RETURNING r.id",
    runs=table("heartbeat_runs"),
)


def notifications(before: Before, *, dry: bool) -> Walk:
    """Remove notifications that were sent, or dropped."""
    return _walk("notifications", NOTIFICATIONS, REMOVE_NOTIFICATIONS, before, dry)


def runs(before: Before, *, dry: bool) -> Walk:
    """Remove heartbeat runs that have ended; their claims are attempts, and go as those do."""
    return _walk("runs", RUNS, REMOVE_RUNS, before, dry)


def _walk(kind: Kind, page: bytes, remove: bytes, before: Before, dry: bool) -> Walk:
    async def step(tx: Transaction, cursor: Any) -> Step:
        if before.attempts is None:
            return Step(cursor, more=False)
        params = {"id": -1 if cursor is None else cursor, "before": before.attempts, "most": MOST}
        found = await (await tx.execute(page, params)).fetchall()
        going, left = found, Counter[str]()
        if not dry:

            async def some(ids: Sequence[int]) -> list[int]:
                return [line["id"] for line in await (await tx.execute(remove, {"ids": list(ids)})).fetchall()]

            gone = set(await removed(tx, [line["id"] for line in found], some, left))
            going = [line for line in found if line["id"] in gone]
        last = found[-1]["id"] if found else cursor
        lines: dict[Kind, Line] = {kind: counted([(line["at"], line["bytes"]) for line in going])}
        return Step(last, len(found) == MOST, lines, {f"{kind} {reason}": count for reason, count in left.items()})

    return step
