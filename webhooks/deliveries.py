"""What a person sees of the inbox: its deliveries, each with its disposition and the reason for it."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, get_args

from psycopg.sql import SQL

from webhooks.db import Transaction, clean, compose
from webhooks.delivery import Headers
from webhooks.errors import Unreadable
from webhooks.rewriting import MOST_GROWTH, SHORT_BYTES, TooLong, indented
from webhooks.sources import GitHub
from webhooks.sources.reading import is_array, is_object

Disposition = Literal["received", "applying", "parked", "processed", "ignored", "dead"]
"""A delivery's status, where one that waits for its row to move on counts as parked."""
DISPOSITIONS: tuple[Disposition, ...] = get_args(Disposition)
MOST = 1000

SUMMARY = SQL(
    "id, source, event, received_at, attempt_count, max_attempts, not_before, parked_on, parent, position,\n"
    "    CASE WHEN status = 'received' AND parked_on IS NOT NULL THEN 'parked' ELSE status END AS disposition,\n"
    "    CASE WHEN status = 'dead' THEN last_error WHEN status IN ('processed', 'ignored') THEN reason\n"
    "        ELSE coalesce(reason, last_error) END AS reason"
)
LIST = compose(
    "SELECT * FROM (SELECT {summary}\nFROM {deliveries}) AS d\n"
    "WHERE (%(source)s::text IS NULL OR lower(source) = lower(%(source)s))\n"
    "    AND (%(event)s::text IS NULL OR strpos(lower(event), lower(%(event)s)) > 0)\n"
    "    AND (%(disposition)s::text IS NULL OR disposition = %(disposition)s)\n"
    "    AND (%(since)s::timestamptz IS NULL OR received_at >= %(since)s)\n"
    "    AND (%(ago)s::interval IS NULL OR received_at >= statement_timestamp() - %(ago)s)\n"
    "    AND (%(before)s::bigint IS NULL OR id < %(before)s)\n"
    "ORDER BY id DESC LIMIT %(limit)s",
    summary=SUMMARY,
)
ONE = compose(
    "SELECT d.*, held.headers, held.body, held.pruned_at, held.headers_pruned_at FROM (\n"
    "    SELECT {summary},\n"
    "        dedup_key, origin, replay_of, claimed_by, claimed_at, lease_until, parked_since, last_error\n"
    "    FROM {deliveries}\n"
    ") AS d JOIN {deliveries} AS held ON held.id = coalesce(d.parent, d.id)\n"
    "WHERE d.id = %(id)s",
    summary=SUMMARY,
)
ATTEMPTS = compose(
    "SELECT attempt, claimed_by, claimed_at, ended_at, outcome, error FROM {attempts}\n"
    "WHERE table_name = 'deliveries' AND key = %(id)s::text ORDER BY claimed_at, claim_seq"
)
PARTS = compose("SELECT id FROM {deliveries} WHERE parent = %(id)s ORDER BY position")


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which deliveries to list; None lets all pass.

    Args:
        source: the source's name, in any case.
        event: a part of the event's name, in any case. An event is known once its delivery was applied.
        disposition: what became of it.
        since: received at that time or later, or not longer ago than that.
        before: only ids below this one, for the next page.
        limit: how many at most, up to 1000.
    """

    source: str | None = None
    event: str | None = None
    disposition: Disposition | None = None
    since: datetime | timedelta | None = None
    before: int | None = None
    limit: int = 20


async def listed(tx: Transaction, wanted: Filter) -> list[dict[str, Any]]:
    """Return deliveries, the newest first, without headers and bodies."""
    params = {
        "source": None if wanted.source is None else clean(wanted.source),
        "event": None if wanted.event is None else clean(wanted.event),
        "disposition": wanted.disposition,
        "since": wanted.since if isinstance(wanted.since, datetime) else None,
        "ago": wanted.since if isinstance(wanted.since, timedelta) else None,
        "before": wanted.before,
        "limit": min(wanted.limit, MOST),
    }
    return await (await tx.execute(LIST, params)).fetchall()


async def one(tx: Transaction, id: int) -> dict[str, Any] | None:
    """Return a delivery with its headers, the exact bytes of its body, its attempts and the events split from it.

    A body that was pruned is None, and `pruned_at` says when; pruned headers are empty (`headers_pruned_at`).
    """
    row = await (await tx.execute(ONE, {"id": id})).fetchone()
    if row is None:
        return None
    row["body"] = None if row["body"] is None else bytes(row["body"])
    row["attempts"] = await (await tx.execute(ATTEMPTS, {"id": id})).fetchall()
    row["events"] = [part["id"] for part in await (await tx.execute(PARTS, {"id": id})).fetchall()]
    return row


def as_json(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as plain values. A body that is UTF-8 is text, any other is `body_base64`."""
    plain: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, bytes):
            try:
                plain[name] = value.decode()
            except UnicodeDecodeError:
                plain[f"{name}_base64"] = base64.b64encode(value).decode("ascii")
        elif is_array(value):
            plain[name] = [_plain(part) for part in value]
        else:
            plain[name] = _plain(value)
    return plain


def _plain(value: Any) -> Any:
    if is_object(value):
        return as_json(value)
    return value.isoformat() if isinstance(value, datetime) else value


def readable(headers: Headers, body: bytes) -> str:
    """Return a body for a person: JSON indented, also where it came in a form; any other text as it is.

    JSON that nests so deep that indenting makes it many times as long stays as it is too.
    """
    try:
        read = GitHub().read(headers, body)
        return indented(read, 2, max(MOST_GROWTH * len(body), SHORT_BYTES)).decode("utf-8", "surrogatepass")
    except (Unreadable, TooLong):
        return body.decode("utf-8", "replace")


_AGO = re.compile(r"([0-9]{1,8})\s*([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_LONGEST_AGO = timedelta(days=36_500)


def since(text: str) -> datetime | timedelta:
    """Read a time: `90s`, `30m`, `2h`, `3d`, `1w` ago, or a date or time in ISO 8601, local where it says no zone.

    Raises:
        ValueError: with the forms that are understood.
    """
    ago = _AGO.fullmatch(text.strip().lower())
    try:
        if ago:
            return min(timedelta(**{_UNITS[ago[2]]: int(ago[1])}), _LONGEST_AGO)
        return datetime.fromisoformat(text.strip()).astimezone()
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is no time: write 30m, 2h, 3d, or 2026-01-31T12:00") from None
