"""Deliveries of the inbox run again: the same ones, or copies that are new.

Both are statements of the gate's kind, some hundreds of deliveries a transaction, and the answer is what they return.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple

import psycopg
import structlog
from psycopg.errors import LockNotAvailable

from webhooks.bell import TELL
from webhooks.db import Ready, Transaction, clean, compose, draw
from webhooks.db.batch import each
from webhooks.db.sqlstate import is_about_the_work
from webhooks.errors import Unavailable
from webhooks.inbox import MAX_ATTEMPTS, inbox
from webhooks.pool import Pool
from webhooks.replay.report import INTERRUPTED, Limits, Progress, Report, Tally, unanswered, unheard
from webhooks.selection import Found, Reader, Scope
from webhooks.sources import Source
from webhooks.sources.reading import digest_key
from webhooks.text import message_of

log = structlog.get_logger(__name__)

How = Literal["same", "new"]
AT_ONCE = 500
MOST_TRIES = 50
MOST_WAITS = 5
LONGEST_KEY = 200

# Never one that is being applied, and never one that was split: its events are deliveries of their own.
ENDED = compose(
    "SELECT d.id FROM {deliveries} AS d\n"
    "WHERE d.id = ANY(%(ids)s) AND d.status IN ('processed', 'ignored', 'dead')\n"
    "    AND NOT EXISTS (SELECT 1 FROM {deliveries} AS e WHERE e.parent = d.id)\n"
    "ORDER BY d.id FOR NO KEY UPDATE OF d SKIP LOCKED"
)
# A statement of its own, after the rows are locked: whoever prunes a request locks its events as well, but writes only
# to the request, so that a statement that began before would lock an event and not see that its body is gone.
AGAIN = compose(
    "WITH back AS (\n"
    "    UPDATE {deliveries} AS t SET status = 'received', claimed_from = NULL, visit = %(visit)s, attempt_count = 0,\n"
    "        max_attempts = %(max_attempts)s, not_before = statement_timestamp(), last_error = NULL, reason = NULL,\n"
    "        parked_on = NULL, parked_since = NULL, wants = NULL\n"
    "    WHERE t.id = ANY(%(ids)s) AND t.pruned_at IS NULL AND t.headers_pruned_at IS NULL\n"
    "        AND NOT EXISTS (SELECT 1 FROM {deliveries} AS p WHERE p.id = t.parent\n"
    "            AND num_nonnulls(p.pruned_at, p.headers_pruned_at) > 0)\n"
    "    RETURNING t.id\n"
    "), decided AS (\n"
    "    INSERT INTO {decisions} (table_name, key, decision, decided_by, reason)\n"
    "    SELECT 'deliveries', id::text, 'replay', %(decided_by)s, %(reason)s FROM back\n"
    ")\n"
    "SELECT id FROM back ORDER BY id"
)
DUE = compose(
    "WITH waiting AS MATERIALIZED (\n"
    "    SELECT id FROM {deliveries} WHERE id = ANY(%(ids)s) AND status = 'received'\n"
    "    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED\n"
    ")\n"
    "UPDATE {deliveries} AS t SET not_before = least(t.not_before, statement_timestamp())\n"
    "FROM waiting WHERE t.id = waiting.id RETURNING t.id"
)
# The number of the newest copy, and not less than how many there are: a long key is a digest and shows none.
COPIES = compose(
    "SELECT d.id, d.dedup_key, greatest(count(r.id),\n"
    "    max((regexp_match(r.dedup_key, '#([0-9]{{1,9}})$'))[1]::bigint)) AS copies\n"
    "FROM {deliveries} AS d LEFT JOIN {deliveries} AS r ON r.replay_of = d.id\n"
    "WHERE d.id = ANY(%(ids)s) AND d.body IS NOT NULL AND d.headers_pruned_at IS NULL\n"
    "GROUP BY d.id, d.dedup_key ORDER BY d.id"
)
COPY = compose(
    "WITH copies AS (\n"
    "    INSERT INTO {deliveries} (source, dedup_key, origin, replay_of, headers, body, status, max_attempts)\n"
    "    SELECT d.source, new.key, 'replay', d.id, d.headers, d.body, 'received', %(max_attempts)s\n"
    "    FROM unnest(%(ids)s::bigint[], %(keys)s::text[]) AS new (id, key)\n"
    "    JOIN {deliveries} AS d ON d.id = new.id\n"
    "    WHERE d.body IS NOT NULL AND d.headers_pruned_at IS NULL ORDER BY d.source, new.key\n"
    "    ON CONFLICT (source, dedup_key, position) DO NOTHING\n"
    "    RETURNING id, replay_of\n"
    "), decided AS (\n"
    "    INSERT INTO {decisions} (table_name, key, decision, decided_by, reason)\n"
    "    SELECT 'deliveries', id::text, 'replay of delivery ' || replay_of, %(decided_by)s, %(reason)s FROM copies\n"
    ")\n"
    "SELECT id, replay_of FROM copies ORDER BY id"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """A replay within the inbox.

    Args:
        how: `same`: each delivery goes back to where it waits, with a new visit and a fresh set of attempts. `new`:
            it stays as it is, and a copy of it, under a key of its own, is received.
        decided_by: who wants it.
        reason: why.
    """

    how: How = "same"
    decided_by: str
    reason: str = "replay"


class _Written(NamedTuple):
    """What became of a batch: the ids that run again or were copied, those made due, and how many were pruned."""

    done: list[int]
    due: list[int]
    pruned: int


async def again(
    pool: Pool,
    sources: Mapping[str, Source],
    scope: Scope,
    request: Again,
    limits: Limits,
    progress: Progress = unheard,
) -> Report:
    """Run deliveries of the inbox again. A worker, wherever it runs, is told of them.

    Args:
        pool: the connections.
        sources: by name, who reads the bodies that `where_json` looks into.
        scope: which; of the unit `run` for `same`, `request` for `new`.
        request: how.
        limits: how fast, and when to stop.
        progress: told after each batch.
    """
    tally = Tally(scope.after, scope.upto)
    reader = Reader(pool, sources, scope)
    at_once = AT_ONCE if limits.rate is None else max(1, int(min(AT_ONCE, limits.rate)))
    try:
        async for batch in reader.batches(at_once=at_once):
            if not await limits.turn(len(batch)):
                tally.stopped = INTERRUPTED
                break
            await _batch(pool, batch, request, tally)
            tally.after = reader.after
            progress(tally.report())
    except Unavailable as error:
        tally.stopped = str(error)
    except psycopg.Error as error:
        if is_about_the_work(error):
            raise
        tally.stopped = unanswered(error)
    return tally.report()


async def _batch(pool: Pool, batch: Sequence[Found], request: Again, tally: Tally) -> None:
    whole = [found.id for found in batch if not found.pruned]
    if whole:
        left: list[int] = []

        def refused(id: int, error: psycopg.Error) -> None:
            left.append(id)
            tally.count("refused", cause=message_of(error))
            log.warning("this delivery cannot be run again", delivery=id, error=message_of(error))

        async def run(ids: Sequence[int]) -> _Written:
            return await _written(pool, list(ids), request)

        answers = await each(whole, run, refused)
        done = [id for answer in answers for id in answer.done]
        due = [id for answer in answers for id in answer.due]
        pruned = sum(answer.pruned for answer in answers)
        await tell(pool)
        tally.count("again" if request.how == "same" else "new", len(done))
        tally.count("due", len(due))
        # Since it was looked at; and what is left somebody else has, who applies it or runs it again.
        tally.count("pruned", pruned)
        tally.count("left_alone", len(whole) - len(left) - len(done) - len(due) - pruned)
    tally.count("pruned", len(batch) - len(whole))


async def _written(pool: Pool, ids: list[int], request: Again) -> _Written:
    for _ in range(MOST_WAITS):
        try:
            async with pool.transaction() as tx:
                if request.how == "same":
                    return await _same(tx, ids, request)
                copied = await _new(tx, ids, request)
                return _Written(copied, [], len(ids) - len(copied))
        except LockNotAvailable:  # somebody else copies the same deliveries just now
            continue
    raise Unavailable("other replays of the same deliveries are under way: try again in a moment")


async def _same(tx: Transaction, ids: list[int], request: Again) -> _Written:
    ended = [row["id"] for row in await (await tx.execute(ENDED, {"ids": ids})).fetchall()]
    params = {
        "ids": ended,
        "visit": await draw(tx),
        "max_attempts": MAX_ATTEMPTS,
        "decided_by": clean(request.decided_by),
        "reason": clean(request.reason),
    }
    done = [row["id"] for row in await (await tx.execute(AGAIN, params)).fetchall()] if ended else []
    left = {"ids": sorted({*ids}.difference(ended))}
    due = [row["id"] for row in await (await tx.execute(DUE, left)).fetchall()] if left["ids"] else []
    tx.moved += [Ready(inbox.table, "applying", id) for id in (*done, *due)]
    return _Written(done, due, len(ended) - len(done))


async def _new(tx: Transaction, ids: list[int], request: Again) -> list[int]:
    """Copy each, under the first key that nobody has; somebody else may be doing the same."""
    rows = await (await tx.execute(COPIES, {"ids": ids})).fetchall()
    made: list[int] = []
    left = {row["id"]: (str(row["dedup_key"]), int(row["copies"])) for row in rows}
    for number in range(1, MOST_TRIES + 1):
        if not left:
            break
        params = {
            "ids": list(left),
            "keys": [numbered(key, copies + number) for key, copies in left.values()],
            "max_attempts": MAX_ATTEMPTS,
            "decided_by": clean(request.decided_by),
            "reason": clean(request.reason),
        }
        copies = await (await tx.execute(COPY, params)).fetchall()
        for copy in copies:
            del left[copy["replay_of"]]
            made.append(copy["id"])
    tx.moved += [Ready(inbox.table, "applying", id) for id in made]
    return made


def numbered(key: str, number: int) -> str:
    """Return the key of a copy: `<key>#<number>`, or its digest where that is too long to be a key."""
    whole = f"{key}#{number}"
    return whole if len(whole) <= LONGEST_KEY else digest_key(whole.encode())


async def tell(pool: Pool) -> None:
    """Wake the workers of other processes: outside a transaction, as `Bell` does, and only a hint, as there."""
    with suppress(psycopg.Error):
        async with pool.connection() as connection:
            await connection.execute(TELL, {"process": pool.process})
