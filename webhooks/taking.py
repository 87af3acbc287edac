"""Taking rows: the claim of a known one, and the claim of the next ones."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Hashable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from typing import Any

import psycopg
import structlog
from psycopg.errors import LockNotAvailable
from psycopg_pool import PoolTimeout

from webhooks.claim import Claim
from webhooks.db import finished
from webhooks.db.sqlstate import is_about_the_row
from webhooks.marks import Mark
from webhooks.owned import Owned
from webhooks.phase import Phase
from webhooks.pool import Pool
from webhooks.renewer import boottime
from webhooks.statements import DUE, IS_SUSPECT, KEY_TEXT, RECORD_ATTEMPT, Barred, mark_name
from webhooks.stuck import MOST, What, record, review
from webhooks.text import message_of

log = structlog.get_logger(__name__)

GIVE_BACK_WITHIN_S = 5.0


class Batch(list[Claim[Any]]):
    """Claims that were made at once, in the order of their rows.

    Attributes:
        more: whether others may be due, so that it is worth asking again at once.
        from_front: whether the queue was read from its front, so that nothing due lies before these.
    """

    def __init__(self, claims: Iterable[Claim[Any]] = (), *, more: bool = False, from_front: bool = True) -> None:
        super().__init__(claims)
        self.more = more
        self.from_front = from_front


async def take(pool: Pool, owned: Owned, key: object, claimed_by: str | None) -> Claim[Any] | None:
    """Claim a known row: one conditional UPDATE, and `rowcount` is the answer. None: not ours, back off."""
    async with _given_back(pool, owned, 1) as given_back, pool.transaction() as tx:
        fence = given_back.fence = await pool.fences(tx=tx)
        params = {"fence": fence, "claimed_by": claimed_by or pool.process, "lease": owned.lease}
        asked_at = boottime()
        cursor = await tx.execute(owned.claim, {**owned.key.params(key), **params})
        if cursor.rowcount != 1:
            return None
        columns = await cursor.fetchone()
        if columns is None:
            raise RuntimeError("the claim's UPDATE returned no row")
        attempt = {
            "claim_seq": fence,
            "table": owned.table,
            "key": columns[KEY_TEXT],
            "phase": owned.phase.claimed,
            "visit": columns["visit"],
            "attempt": columns["attempt_count"],
            "claimed_by": columns["claimed_by"],
            "claimed_at": columns["claimed_at"],
        }
        await tx.finish(RECORD_ATTEMPT, attempt)
        return Claim[Any](pool, owned, columns, asked_at)
    return None


async def take_next(
    pool: Pool,
    owned: Owned,
    limit: int,
    barred: Barred,
    keys: Sequence[object] | None,
    claimed_by: str | None,
    due_by: datetime | None,
    equal: Mapping[str, object],
) -> Batch:
    """Claim up to `limit` (at most 100) of the rows that wait, in their order; see `Gate.take_next`."""
    if None in equal.values():
        raise ValueError("claim_next compares with =, which None never equals")
    refusing = pool.stuck.left_out(owned.table, owned.phase.claimed, "claimed")
    wanted = (owned.phase, barred, tuple(equal), due_by is not None, keys is not None)
    params: dict[str, object] = {
        "table": owned.table,
        "claimed_by": claimed_by or pool.process,
        "lease": owned.lease,
        "due_by": due_by,
        "refusing": refusing,
        **{f"equal_{column}": value for column, value in equal.items()},
        **({} if keys is None else owned.key.lists(list(keys))),
    }
    queue = None if keys is not None else (owned.table, owned.phase.claimed, barred, due_by, *equal.items())
    mark = None if queue is None else pool.marks.of(queue)
    try:
        batch = Batch()
        if mark is not None:
            batch = await _claim_next(pool, owned, wanted, params, limit, queue, mark)
            if batch and not batch.more:
                pool.marks.set(queue, None)  # what lies before the mark comes next
                batch.more = True
        batch = batch or await _claim_next(pool, owned, wanted, params, limit, queue, None)
    except psycopg.Error as error:
        if not is_about_the_row(error):
            raise
        log.warning("a row refuses to be claimed, each is tried by itself", table=owned.table, error=message_of(error))
        waiting = owned.statements.waiting(*wanted)
        batch = await _take_singly(pool, owned, limit, waiting, params, claimed_by)
    if went := pool.stuck.went(owned.table, owned.phase.claimed, "claimed", map(_key_text, batch)):
        await well(pool, owned, went)
    return batch


async def _claim_next(
    pool: Pool,
    owned: Owned,
    wanted: tuple[Phase, Barred, tuple[str, ...], bool, bool],
    params: Mapping[str, object],
    limit: int,
    queue: Hashable | None,
    mark: Mark | None,
) -> Batch:
    """Claim up to `limit` rows in one statement, beginning at the mark, and remember where it ended."""
    statement = owned.statements.claim_next(*wanted, left_out=bool(params["refusing"]), marked=mark is not None)
    marks = {f"mark_{place}": value for place, value in enumerate(mark or ())}
    fence = await pool.fences(limit)
    async with _given_back(pool, owned, limit) as given_back:
        given_back.fence = fence
        asked_at = boottime()
        [cursor] = await pool.at_once([(statement, {**params, **marks, "limit": limit, "fence": fence})])
        rows = sorted(await cursor.fetchall(), key=lambda row: row["claim_seq"])
        ended_at = [[row.pop(mark_name(place)) for place in range(len(owned.statements.marks))] for row in rows]
        due = [row.pop(DUE) for row in rows]
        suspect = [row.pop(IS_SUSPECT) for row in rows]
        if queue is not None and rows and ended_at[-1] and None not in ended_at[-1]:
            pool.marks.set(queue, tuple(ended_at[-1]))
        batch = Batch((Claim[Any](pool, owned, row, asked_at) for row in rows), from_front=mark is None)
        if batch:
            batch[0].suspect = suspect[0]
            # All of the known rows that were to be had are no sign that there are more.
            batch.more = due[0] > len(batch) or (queue is not None and len(batch) == limit)
        return batch
    return Batch()


async def _take_singly(
    pool: Pool, owned: Owned, limit: int, waiting: bytes, params: Mapping[str, object], claimed_by: str | None
) -> Batch:
    """Claim rows one by one: a value that cannot be read, or a trigger that refuses, must not hold up the others.

    Where all of a hundred refuse, those behind them are looked at.
    """
    while True:
        refusing = pool.stuck.left_out(owned.table, owned.phase.claimed, "claimed")
        async with pool.transaction() as tx:
            rows = await (await tx.execute(waiting, {**params, "refusing": refusing})).fetchall()
        claims, refused = Batch(more=len(rows) > 1), 0
        try:
            for row in rows:
                if len(claims) == limit or (claims and (row[IS_SUSPECT] or claims[-1].suspect)):
                    break
                try:
                    claim = await take(pool, owned, owned.key.value(row), claimed_by)
                except psycopg.Error as error:
                    if not is_about_the_row(error):
                        raise
                    refused += 1
                    await refuses(pool, owned, "claimed", row[KEY_TEXT], error)
                    continue
                if claim is not None:
                    claim.suspect = row[IS_SUSPECT]
                    claims.append(claim)
        except BaseException:
            await _give_all_back(pool, owned, claims)
            raise
        if claims or not refused or len(refusing) >= MOST:
            claims.more = claims.more and bool(claims)
            return claims


async def refuses(pool: Pool, owned: Owned, what: What, key: str, error: psycopg.Error) -> None:
    """Write down that a row refuses, and leave it out of batches for a while."""
    pool.stuck.refused(owned.table, owned.phase.claimed, what, key)
    async with pool.transaction() as tx:
        await record(tx, owned.table, key, owned.phase.claimed, what, error)


async def well(pool: Pool, owned: Owned, went: Sequence[str]) -> None:
    """Remove the lines of rows that went, and report what is the matter with others of their phase."""
    table, phase = owned.table, owned.phase.claimed
    async with pool.transaction() as tx:
        reason = await review(tx, table, phase, went)
    pool.health.report(f"{table}.{phase}.stuck", reason)


def _key_text(claim: Claim[Any]) -> str:
    return claim.label.partition(":")[2]


async def last_chance_waits(pool: Pool, owned: Owned, equal: Mapping[str, object]) -> bool:
    """Whether a row on its last chance is due, and not far from its turn; see `Barred`."""
    async with pool.transaction() as tx:
        statement = owned.statements.last_chance_waits(owned.phase, tuple(equal))
        values = {f"equal_{column}": value for column, value in equal.items()}
        refusing = pool.stuck.left_out(owned.table, owned.phase.claimed, "claimed")
        cursor = await tx.execute(statement, {"table": owned.table, "refusing": refusing, **values})
        return await cursor.fetchone() is not None
    return False


async def _give_all_back(pool: Pool, owned: Owned, claims: Sequence[Claim[Any]]) -> None:
    for claim in claims:
        with suppress(psycopg.Error, TimeoutError):
            await finished(_give_back(pool, owned, claim.claim_seq, 1), GIVE_BACK_WITHIN_S)


@asynccontextmanager
async def _given_back(pool: Pool, owned: Owned, count: int) -> AsyncGenerator[_Asked]:
    """Give back what a claim may have taken when its answer is lost: the fences are known all the same."""
    asked = _Asked()
    try:
        yield asked
    except LockNotAvailable:
        return
    except BaseException:
        if asked.fence is not None:
            with suppress(psycopg.Error, PoolTimeout, TimeoutError):
                await finished(_give_back(pool, owned, asked.fence, count), GIVE_BACK_WITHIN_S)
        raise


async def _give_back(pool: Pool, owned: Owned, fence: int, count: int) -> None:
    async with pool.transaction() as tx:
        await tx.execute(owned.give_back, {"fence": fence, "count": count})


class _Asked:
    """The first fence of a claim that was sent, once it was."""

    fence: int | None = None
