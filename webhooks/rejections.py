"""The table `rejections`: requests that were refused, kept so that a person can find out why, and accept them later.

What is kept is what a request was verified with, and what helps to see what went wrong with it; never a cookie or a
credential. Nothing here is a delivery.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString

from psycopg.sql import SQL, Composable

from webhooks.db import Transaction, clean, compose, table
from webhooks.delivery import Headers
from webhooks.senders import COMPANIONS, SIGNATURES, TOKENS
from webhooks.settings import Settings
from webhooks.sources import Source

MOST = 1000
MOST_BODY_BYTES = 1024 * 1024
MOST_HEADER_BYTES = 16 * 1024
MOST_VALUE_BYTES = 4096
SAME_WITHIN = timedelta(minutes=1)

NOT_KEPT = "(not kept)"
_EXPLAINING = frozenset({"content-type", "content-encoding", "content-length", "user-agent", "x-github-event"})
_FROM_OTHERS = COMPANIONS | SIGNATURES.keys() | TOKENS.keys()
_CREDENTIALS = frozenset({"authorization", "proxy-authorization", "cookie", "set-cookie"})


def composed(text: LiteralString, **parts: Composable) -> bytes:
    """Compose a statement about `{rejections}`."""
    return compose(text, rejections=table("rejections"), **parts)


STORE = composed(
    "WITH new AS MATERIALIZED (\n"
    "    SELECT * FROM unnest(%(sources)s::text[], %(causes)s::text[], %(headers)s::text[], %(whole)s::bool[],\n"
    "        %(bodies)b::bytea[], %(sizes)s::bigint[], %(digests)b::bytea[], %(first)s::timestamptz[],\n"
    "        %(last)s::timestamptz[], %(times)s::bigint[], %(proved)s::bool[], %(senders)s::text[]) WITH ORDINALITY\n"
    "        AS n (source, cause, headers, whole, body, size, digest, first, last, times, proved, sender, place)\n"
    "), again AS MATERIALIZED (\n"
    "    SELECT r.id, n.place, n.last, n.times FROM new AS n JOIN {rejections} AS r ON r.source = n.source\n"
    "        AND r.cause = n.cause AND r.body_bytes = n.size AND r.body_sha256 = n.digest\n"
    "        AND r.headers = n.headers::jsonb\n"
    "    WHERE r.last_at >= n.first - %(same_within)s::interval AND r.delivery IS NULL\n"
    "    FOR NO KEY UPDATE OF r SKIP LOCKED\n"
    "), counted AS (\n"
    "    UPDATE {rejections} AS r SET times = r.times + again.times, last_at = greatest(r.last_at, again.last)\n"
    "    FROM again WHERE r.id = again.id RETURNING again.place\n"
    ")\n"
    "INSERT INTO {rejections}\n"
    "    (source, cause, headers, body, body_bytes, body_sha256, received_at, last_at, times, proved, sender)\n"
    "SELECT source, cause, headers::jsonb, CASE WHEN whole THEN body END, size, digest, first, last, times, proved,\n"
    "    sender\n"
    "FROM new WHERE place NOT IN (SELECT place FROM counted)"
)
# What a secret of ours verifies has half of the room, which nobody can take from it by sending more. Of the rest, the
# next to go is one of the fullest group, drawn by lot: a flood thins itself and displaces nobody. A row that somebody
# is accepting just now is passed over.
TRIM = composed(
    "WITH sized AS (\n"
    "    SELECT id, source, proved, sender, last_at, cause IN ('bad_signature', 'stale_timestamp') AS well_formed,\n"
    "        date_trunc('hour', received_at) AS hour, md5(id::text) AS lot,\n"
    "        CASE WHEN body IS NULL THEN 0 ELSE body_bytes END + pg_column_size(headers) + 200 AS bytes\n"
    "    FROM {rejections}\n"
    "), own AS (\n"
    "    SELECT id, proved, last_at, bytes, lot, row_number() OVER alike AS place, sum(bytes) OVER alike AS so_far\n"
    "    FROM sized WINDOW alike AS (PARTITION BY proved, source, well_formed, sender, hour ORDER BY lot)\n"
    "), all_of_them AS (\n"
    "    SELECT id, proved, last_at, row_number() OVER (PARTITION BY proved ORDER BY place, lot) AS place,\n"
    "        sum(bytes) OVER (PARTITION BY proved ORDER BY so_far, lot) AS so_far\n"
    "    FROM own\n"
    "), room AS (\n"
    "    SELECT least(count(*), %(rows)s / 2) AS rows, least(coalesce(sum(bytes), 0), %(bytes)s / 2) AS bytes\n"
    "    FROM sized WHERE proved\n"
    "), too_many AS MATERIALIZED (\n"
    "    SELECT r.id FROM {rejections} AS r WHERE r.id = ANY(ARRAY(\n"
    "        SELECT a.id FROM all_of_them AS a, room\n"
    "        WHERE a.place > CASE WHEN a.proved THEN room.rows ELSE %(rows)s - room.rows END\n"
    "            OR a.so_far > CASE WHEN a.proved THEN room.bytes ELSE %(bytes)s - room.bytes END\n"
    "            OR a.last_at < statement_timestamp() - %(age)s::interval))\n"
    "    FOR UPDATE SKIP LOCKED\n"
    ")\n"
    "DELETE FROM {rejections} AS r USING too_many WHERE r.id = too_many.id"
)
WANTED = SQL(
    "WHERE (%(source)s::text IS NULL OR lower(source) = lower(%(source)s))\n"
    "    AND (%(cause)s::text IS NULL OR cause = lower(%(cause)s))\n"
    "    AND (%(since)s::timestamptz IS NULL OR last_at >= %(since)s)\n"
    "    AND (%(ago)s::interval IS NULL OR last_at >= statement_timestamp() - %(ago)s)\n"
    "    AND (%(before)s::bigint IS NULL OR id < %(before)s)"
)
KINDS = composed(
    "SELECT source, cause, count(*) AS kept, sum(times)::bigint AS times,\n"
    "    count(*) FILTER (WHERE delivery IS NOT NULL) AS accepted, max(last_at) AS last_at,\n"
    "    (array_agg(id ORDER BY delivery IS NOT NULL, body IS NULL, last_at DESC, id DESC))[1] AS example\n"
    "FROM {rejections}\n{wanted}\n"
    "GROUP BY source, cause ORDER BY max(last_at) DESC, source, cause LIMIT %(limit)s",
    wanted=WANTED,
)
LIST = composed(
    "SELECT id, source, cause, body_bytes, received_at, last_at, times, delivery, accepted_at\n"
    "FROM {rejections}\n{wanted}\nORDER BY id DESC LIMIT %(limit)s",
    wanted=WANTED,
)
ONE = composed(
    "SELECT id, source, cause, headers, body, body_bytes, encode(body_sha256, 'hex') AS body_sha256, received_at,\n"
    "    last_at, times, delivery, accepted_at\n"
    "FROM {rejections} WHERE id = %(id)s"
)


@dataclass(frozen=True, slots=True)
class Rejection:
    """A refused request as it is stored.

    Args:
        source: the name in its URL.
        cause: why it was refused.
        headers: the lines that `keep` left of it.
        body: the bytes as received; None where they are too many, or were not read to their end.
        body_bytes: how many came.
        body_sha256: their digest, where they were read to their end.
        received_at: unix seconds, the receiver's clock as the request was verified.
        last_at: the same of the last of several like it.
        times: how many those are.
        proved: whether a secret of ours makes its signature right, an earlier one or another source's.
        sender: the address that it came from; of one in IPv6 the network.
    """

    source: str
    cause: str
    headers: Headers
    body: bytes | None
    body_bytes: int
    body_sha256: bytes | None
    received_at: float
    last_at: float
    times: int = 1
    proved: bool = False
    sender: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """How much is kept, over all sources.

    Args:
        rows: how many rejections.
        bytes: their bodies and headers.
        age: for how long.
    """

    rows: int
    bytes: int
    age: timedelta

    @classmethod
    def of(cls, settings: Settings) -> Caps:
        """Return those of the environment."""
        return cls(
            rows=settings.rejections_kept,
            bytes=settings.rejections_mib * 1024 * 1024,
            age=timedelta(days=settings.rejections_days),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which rejections; None lets all pass.

    Args:
        source: the source's name, in any case.
        cause: the named cause, in any case.
        since: last seen at that time or later, or not longer ago than that.
        before: only ids below this one, for the next page.
        limit: how many at most, up to 1000.
    """

    source: str | None = None
    cause: str | None = None
    since: datetime | timedelta | None = None
    before: int | None = None
    limit: int = 20


def keep(source: Source, headers: Headers) -> Headers:
    """Return the header lines of a refused request that are kept: what its source reads, and what explains.

    A credential is never among them. A header by which another provider sends its secret as it is stays visible
    without its value. Together they are at most 16 KiB; a longer value is cut, and then verifies no more.
    """
    kept: list[tuple[str, str]] = []
    left = MOST_HEADER_BYTES
    for name, value in headers:
        needed = name in source.kept_headers
        if name in _CREDENTIALS or not (needed or name in _EXPLAINING or name in _FROM_OTHERS):
            continue
        shown = NOT_KEPT if name in TOKENS and not needed else clean(value)
        if len(shown) > MOST_VALUE_BYTES:
            shown = shown[:MOST_VALUE_BYTES] + "…"
        left -= len(name) + len(shown)
        if left < 0:
            break
        kept.append((name, shown))
    return tuple(kept)


async def store(tx: Transaction, rejections: Sequence[Rejection]) -> None:
    """Add rejections; one that was the same within the last minute is only counted."""
    params: dict[str, object] = {
        "sources": [one.source for one in rejections],
        "causes": [clean(one.cause) for one in rejections],
        "headers": [json.dumps(one.headers) for one in rejections],
        "whole": [one.body is not None for one in rejections],
        "bodies": [one.body or b"" for one in rejections],
        "sizes": [one.body_bytes for one in rejections],
        "digests": [one.body_sha256 or b"" for one in rejections],
        "first": [datetime.fromtimestamp(one.received_at, UTC) for one in rejections],
        "last": [datetime.fromtimestamp(one.last_at, UTC) for one in rejections],
        "times": [one.times for one in rejections],
        "proved": [one.proved for one in rejections],
        "senders": [one.sender for one in rejections],
        "same_within": SAME_WITHIN,
    }
    await tx.execute(STORE, params)


async def trim(tx: Transaction, caps: Caps) -> int:
    """Remove what is past the caps, and return how many those were."""
    return (await tx.execute(TRIM, {"rows": caps.rows, "bytes": caps.bytes, "age": caps.age})).rowcount


async def kinds(tx: Transaction, wanted: Filter) -> list[dict[str, Any]]:
    """Return what was refused by source and cause, the latest first: how often, and the id of one to look at."""
    return await (await tx.execute(KINDS, wanted_params(wanted))).fetchall()


async def listed(tx: Transaction, wanted: Filter) -> list[dict[str, Any]]:
    """Return rejections, the newest first, without headers and bodies."""
    return await (await tx.execute(LIST, wanted_params(wanted))).fetchall()


async def one(tx: Transaction, id: int) -> dict[str, Any] | None:
    """Return a rejection with its headers and the exact bytes of its body, None for it where they were not kept."""
    row = await (await tx.execute(ONE, {"id": id})).fetchone()
    if row is None:
        return None
    row["headers"] = tuple((name, value) for name, value in row["headers"])
    row["body"] = None if row["body"] is None else bytes(row["body"])
    row["body_sha256"] = row["body_sha256"] or None
    return row


def wanted_params(wanted: Filter) -> dict[str, object]:
    return {
        "source": None if wanted.source is None else clean(wanted.source),
        "cause": None if wanted.cause is None else clean(wanted.cause),
        "since": wanted.since if isinstance(wanted.since, datetime) else None,
        "ago": wanted.since if isinstance(wanted.since, timedelta) else None,
        "before": wanted.before,
        "limit": min(wanted.limit, MOST),
    }
