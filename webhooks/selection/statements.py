"""The statements that count and read a selection.

Every status but `processed` and `ignored` has a partial index, and nearly all deliveries are one of these two; the time
has an index, and so has the name of a row. The source and the event have none: it would cost every delivery that is
accepted or applied, to save a scan that reads no body and takes well under a second for a hundred thousand.
"""

from __future__ import annotations

from collections.abc import Mapping

from psycopg.sql import SQL, Composed

from webhooks.db import compose, named
from webhooks.selection.choice import Unit

_COMMON = SQL(
    "d.id > %(after)s AND d.id <= %(upto)s\n"
    "        AND (%(source)s::text IS NULL OR d.source = %(source)s)\n"
    "        AND (%(event)s::text IS NULL OR strpos(lower(d.event), lower(%(event)s)) > 0)\n"
    "        AND (%(since)s::timestamptz IS NULL OR d.received_at >= %(since)s)\n"
    "        AND (%(until)s::timestamptz IS NULL OR d.received_at < %(until)s)"
)
_STATUS = SQL(
    "(%(status)s::text IS NULL OR d.status = %(status)s)\n"
    "        AND (%(parked)s::boolean IS NULL OR (d.parked_on IS NOT NULL) = %(parked)s)"
)
_ROW = SQL("(%(row)s::text IS NULL OR d.moved_rows @> ARRAY[%(row)s::text] OR d.parked_on = %(row)s)")
_RUN = named(
    "{common}\n        AND {status}\n        AND {row}\n"
    "        AND (%(ids)s::bigint[] IS NULL OR d.id = ANY(%(ids)s) OR d.parent = ANY(%(ids)s))\n"
    "        AND NOT EXISTS (SELECT 1 FROM {deliveries} AS e WHERE e.parent = d.id)",
    common=_COMMON,
    status=_STATUS,
    row=_ROW,
)
_REQUEST = named(
    "{common}\n        AND {status}\n        AND {row}\n"
    "        AND (%(ids)s::bigint[] IS NULL OR d.id = ANY(%(ids)s))\n"
    "        AND d.parent IS NULL AND (d.replay_of IS NULL OR d.id = ANY(%(ids)s))",
    common=_COMMON,
    status=_STATUS,
    row=_ROW,
)
_PART = named(
    "{common}\n        AND {status}\n        AND {row}\n        AND d.parent IS NOT NULL AND %(ids)s::bigint[] IS NULL",
    common=_COMMON,
    status=_STATUS,
    row=_ROW,
)
# The event of a delivery that was split names those of all its parts, so that it need not be looked for in them.
_ORIGINAL = named(
    "{common}\n"
    "        AND ({status} OR EXISTS (\n"
    "            SELECT 1 FROM {deliveries} AS e WHERE e.parent = d.id AND e.status = %(status)s\n"
    "                AND (%(parked)s::boolean IS NULL OR (e.parked_on IS NOT NULL) = %(parked)s)))\n"
    "        AND (%(row)s::text IS NULL OR d.id = ANY(ARRAY(\n"
    "            SELECT coalesce(e.parent, e.id) FROM {deliveries} AS e\n"
    "            WHERE e.moved_rows @> ARRAY[%(row)s::text] OR e.parked_on = %(row)s)))\n"
    "        AND (%(ids)s::bigint[] IS NULL OR d.id = ANY(%(ids)s))\n"
    "        AND d.parent IS NULL AND (d.replay_of IS NULL AND d.origin <> 'replay' OR d.id = ANY(%(ids)s))",
    common=_COMMON,
    status=_STATUS,
)
_FITS: Mapping[Unit, Composed] = {"run": _RUN, "request": _REQUEST, "part": _PART, "original": _ORIGINAL}

# A delivery whose headers alone are gone says no more which event it was.
_PRUNED = SQL("num_nonnulls(d.pruned_at, d.headers_pruned_at, p.pruned_at, p.headers_pruned_at) > 0 AS pruned")

COUNT: Mapping[Unit, bytes] = {
    unit: compose(
        "SELECT d.source, d.event, d.disposition, {pruned},\n"
        "    count(*) AS count\n"
        "FROM (\n"
        "    SELECT d.id, d.source, d.event, d.parent, d.pruned_at, d.headers_pruned_at,\n"
        "        CASE WHEN d.status = 'received' AND d.parked_on IS NOT NULL THEN 'parked' ELSE d.status END\n"
        "            AS disposition\n"
        "    FROM {deliveries} AS d\n"
        "    WHERE {fits}\n"
        "    ORDER BY d.id LIMIT %(limit)s\n"
        ") AS d LEFT JOIN {deliveries} AS p ON p.id = d.parent\n"
        "GROUP BY 1, 2, 3, 4 ORDER BY count(*) DESC, 1, 2, 3, 4",
        fits=fits,
        pruned=_PRUNED,
    )
    for unit, fits in _FITS.items()
}
BATCH: Mapping[Unit, bytes] = {
    unit: compose(
        "SELECT d.*, {pruned},\n"
        "    coalesce(octet_length(p.body), d.own_bytes, 0) AS size\n"
        "FROM (\n"
        "    SELECT d.id, d.source, d.event, d.received_at, d.origin, d.dedup_key, d.parent, d.pruned_at,\n"
        "        d.headers_pruned_at,\n"
        "        CASE WHEN d.status = 'received' AND d.parked_on IS NOT NULL THEN 'parked' ELSE d.status END\n"
        "            AS disposition,\n"
        "        octet_length(d.body) AS own_bytes\n"
        "    FROM {deliveries} AS d\n"
        "    WHERE {fits}\n"
        "    ORDER BY d.id LIMIT %(limit)s\n"
        ") AS d LEFT JOIN {deliveries} AS p ON p.id = d.parent\n"
        "ORDER BY d.id",
        fits=fits,
        pruned=_PRUNED,
    )
    for unit, fits in _FITS.items()
}
BODIES = compose("SELECT id, headers, body FROM {deliveries} WHERE id = ANY(%(ids)s)")
