"""Where a follower starts: at a place that it kept, at a time, now, or with everything there is."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Literal

from webhooks.db import Transaction, compose
from webhooks.feed.place import START, Place
from webhooks.feed.reading import FEED, found, horizon_now, last_below, place_of

# The last place before a time. MATERIALIZED, or the planner may look for the time along the feed, from its beginning.
BEFORE = compose(
    "WITH recent AS MATERIALIZED (\n"
    "    SELECT accepted_xid, id FROM {deliveries}\n"
    "    WHERE received_at >= coalesce(%(at)s::timestamptz, statement_timestamp() - %(ago)s::interval) AND {feed}\n"
    "), first AS (\n"
    "    SELECT accepted_xid, id FROM recent ORDER BY accepted_xid, id LIMIT 1\n"
    ")\n"
    "SELECT before.xid, before.id, before.received_at FROM first LEFT JOIN LATERAL (\n"
    "    SELECT accepted_xid::text AS xid, id, received_at FROM {deliveries}\n"
    "    WHERE (accepted_xid, id) < (first.accepted_xid, first.id) AND {feed}\n"
    "    ORDER BY accepted_xid DESC, id DESC LIMIT 1\n"
    ") AS before ON true",
    feed=FEED,
)


async def located(tx: Transaction, after: Place | datetime | timedelta | Literal["now", "all"]) -> Place:
    """Return where a follower starts.

    Args:
        tx: a transaction.
        after: a place, a time or how long ago, ``now``, or ``all``. From a time on nothing received since is missed; a
            few deliveries from just before it may come along, where accepts overlapped.

    Raises:
        NotAPlace: the place is one of another database, or of this one before it was restored, or nobody can tell.
    """
    if after == "all":
        return START
    if isinstance(after, Place):
        await found(tx, after)
        return after
    last = await last_below(tx, await horizon_now(tx))
    if after == "now":
        return last
    at, ago = (after, None) if isinstance(after, datetime) else (None, after)
    row = await (await tx.execute(BEFORE, {"at": at, "ago": ago})).fetchone()
    if row is None:
        return last
    # Not past the horizon: a transaction that is still open may bring what was received meanwhile.
    return START if row["xid"] is None else min(place_of(row), last)
