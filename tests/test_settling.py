"""Ends of claims are written in groups; each keeps its own fence and its own answer."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest
from consumers import arrival, arrived
from gates import a_gate, due, elsewhere, expire, opened, outcomes_of, row_of, sql, status_of, until_blocked

from webhooks.claim import Claim
from webhooks.db import Ready
from webhooks.errors import LostClaim
from webhooks.gate import Gate
from webhooks.pool import Pool
from webhooks.settling import MOST, alike

KEYS = range(1, 21)


async def taken(pool: Pool, gate: Gate[Any], *keys: int, phase: str = "drafting") -> list[Claim[Any]]:
    claims = [await gate.take(pool, phase, key) for key in keys]
    assert None not in claims
    return [claim for claim in claims if claim is not None]


async def completed(claim: Claim[Any], *status: str, **columns: object) -> None:
    async with claim.held():
        await claim.complete(*status, **columns)


async def test_claims_that_end_together_are_written_in_few_transactions(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, *KEYS)
    claims = await taken(pool, gate, *KEYS)
    await asyncio.gather(*(completed(claim, patch=f"patch {claim.key}") for claim in claims))
    rows = await sql(pool, "SELECT sc_id, status, patch, xmin::text FROM patch_sessions")
    assert {row["sc_id"]: (row["status"], row["patch"]) for row in rows} == {
        key: ("drafted", f"patch {key}") for key in KEYS
    }
    assert len({row["xmin"] for row in rows}) <= 3
    assert [await outcomes_of(pool, key) for key in KEYS] == [["done"]] * len(KEYS)


async def test_more_ends_than_a_group_holds_are_all_written(pool: Pool) -> None:
    gate = a_gate()
    keys = range(1, 2 * MOST + 11)
    await opened(pool, gate, *keys)
    claims = [claim for _ in range(3) for claim in await gate.take_next(pool, "drafting", 100)]
    assert len(claims) == len(keys)
    await asyncio.gather(*(completed(claim) for claim in claims))
    [row] = await sql(pool, "SELECT count(*) AS drafted FROM patch_sessions WHERE status = 'drafted'")
    assert row["drafted"] == len(keys)


@pytest.mark.invariant(5)
async def test_of_a_group_only_the_claim_whose_row_was_taken_is_lost(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, *KEYS)
    claims = await taken(pool, gate, *KEYS)
    await expire(pool, 7)
    await gate.sweep(pool, "drafting")
    await due(pool, 7)
    [after] = await taken(pool, gate, 7)
    # As one statement writes them, and each by itself.
    ends = [completed(claim, **({"patch": "ours"} if claim.key == 1 else {})) for claim in claims]
    answers = await asyncio.gather(*ends, return_exceptions=True)
    assert [type(answer) for answer in answers] == [LostClaim if key == 7 else type(None) for key in KEYS]
    row = await row_of(pool, 7)
    assert (row["status"], row["claim_seq"], row["patch"]) == ("drafting", after.claim_seq, None)
    assert await outcomes_of(pool, 7) == ["expired", None]
    assert [await status_of(pool, key) for key in KEYS if key != 7] == ["drafted"] * (len(KEYS) - 1)


async def test_a_row_that_somebody_locks_does_not_hold_up_the_others_of_its_group(
    pool: Pool, database_url: str
) -> None:
    gate = a_gate()
    await opened(pool, gate, 1, 2, 3)
    claims = await taken(pool, gate, 1, 2, 3)
    async with await elsewhere(database_url) as holder, holder.transaction():
        await holder.execute("SELECT 1 FROM patch_sessions WHERE sc_id = 1 FOR UPDATE")
        ends = [asyncio.create_task(completed(claim)) for claim in claims]
        await asyncio.wait_for(asyncio.gather(*ends[1:]), 5)
        await until_blocked(pool)
        assert not ends[0].done()
    await ends[0]
    assert [await status_of(pool, key) for key in (1, 2, 3)] == ["drafted"] * 3


async def test_an_end_that_the_database_refuses_takes_no_other_with_it(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1, 2, 3)
    await sql(pool, "ALTER TABLE patch_sessions ADD CONSTRAINT short CHECK (length(patch) < 10)")
    claims = await taken(pool, gate, 1, 2, 3)
    patches = ["fine", "longer than is allowed", "fine too"]
    ends = [completed(claim, patch=patch) for claim, patch in zip(claims, patches, strict=True)]
    answers = await asyncio.gather(*ends, return_exceptions=True)
    assert [type(answer) for answer in answers] == [type(None), psycopg.errors.CheckViolation, type(None)]
    assert [await status_of(pool, key) for key in (1, 2, 3)] == ["drafted", "clarified", "drafted"]
    assert await outcomes_of(pool, 2) == ["error"]


async def test_completions_and_releases_share_a_group_and_each_visit_is_new(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1, 2, 3, to="received")
    claims = await taken(pool, gate, 1, 2, 3, phase="clarifying")
    visits = {claim.visit for claim in claims}

    async def failed(claim: Claim[Any]) -> None:
        async with claim.held():
            raise ValueError("no")

    ends = [completed(claims[0], "clarified"), failed(claims[1]), completed(claims[2], "clarified")]
    answers = await asyncio.gather(*ends, return_exceptions=True)
    assert [type(answer) for answer in answers] == [type(None), ValueError, type(None)]
    rows = [await row_of(pool, key) for key in (1, 2, 3)]
    assert [row["status"] for row in rows] == ["clarified", "received", "clarified"]
    assert len({rows[0]["visit"], rows[2]["visit"]} | visits) == 5
    assert rows[1]["visit"] == claims[1].visit


async def test_each_claim_is_told_of_the_deliveries_that_waited_for_its_own_row(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1, 2)
    claims = await taken(pool, gate, 1, 2)
    ids = await arrived(pool, arrival(b"{}"), arrival(b"{}"))
    for id_, key in zip(ids, (1, 2), strict=True):
        await sql(
            pool,
            "UPDATE deliveries SET parked_on = %(row)s, parked_since = now(), not_before = now() + interval '1 hour'"
            " WHERE id = %(id)s",
            id=id_,
            row=f"patch_sessions:{key}",
        )
    await asyncio.gather(*(completed(claim) for claim in claims))
    assert [claim.moved for claim in claims] == [[Ready("deliveries", "applying", id_)] for id_ in ids]
    due = await sql(pool, "SELECT id FROM deliveries WHERE not_before <= now() ORDER BY id")
    assert [row["id"] for row in due] == sorted(ids)


async def test_an_end_is_written_though_its_task_is_cancelled_while_it_waits(pool: Pool, database_url: str) -> None:
    gate = a_gate()
    await opened(pool, gate, 1)
    [claim] = await taken(pool, gate, 1)
    async with await elsewhere(database_url) as holder, holder.transaction():
        await holder.execute("SELECT 1 FROM patch_sessions WHERE sc_id = 1 FOR UPDATE")
        writing = asyncio.create_task(completed(claim, patch="ours"))
        await until_blocked(pool)
        writing.cancel()
        await asyncio.sleep(0)
        assert not writing.done()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert (await status_of(pool, 1), claim.outcome) == ("drafted", "done")


async def test_ends_that_write_nothing_of_their_own_are_one_statement_and_others_stand_alone(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, *KEYS)
    claims = await taken(pool, gate, *KEYS)
    plain = [claim._written(claim.done()) for claim in claims[:5]]
    written = [claim._written(claim.done(patch=str(claim.key))) for claim in claims[5:7]]
    assert [len(endings) for endings in alike([*plain, *written])] == [5, 1, 1]
    await asyncio.gather(
        *(completed(claim) for claim in claims[:10]), *(completed(claim, patch=str(claim.key)) for claim in claims[10:])
    )
    rows = await sql(pool, "SELECT sc_id, status, patch FROM patch_sessions ORDER BY sc_id")
    assert [(row["status"], row["patch"]) for row in rows] == [
        ("drafted", None if key <= 10 else str(key)) for key in KEYS
    ]


async def test_a_value_that_the_driver_cannot_send_takes_no_other_end_with_it(pool: Pool) -> None:
    class Unspeakable:
        pass

    class Dumper(psycopg.adapt.Dumper):
        def dump(self, obj: Any) -> bytes:
            raise ValueError("it cannot be written down")

    psycopg.adapters.register_dumper(Unspeakable, Dumper)
    gate = a_gate()
    await opened(pool, gate, 1, 2, 3)
    async with Pool.open(pool.url, settings=pool.settings) as fresh:
        claims = await taken(fresh, gate, 1, 2, 3)
        patches = ["fine", Unspeakable(), "fine too"]
        ends = [completed(claim, patch=patch) for claim, patch in zip(claims, patches, strict=True)]
        async with asyncio.timeout(10):
            answers = await asyncio.gather(*ends, return_exceptions=True)
    assert [type(answer) for answer in answers] == [type(None), ValueError, type(None)]
    assert [await status_of(pool, key) for key in (1, 2, 3)] == ["drafted", "clarified", "drafted"]


async def test_whoever_waits_when_the_writing_is_stopped_is_answered(pool: Pool, database_url: str) -> None:
    gate = a_gate()
    await opened(pool, gate, 1, 2)
    first, second = await taken(pool, gate, 1, 2)
    async with await elsewhere(database_url) as holder, holder.transaction():
        await holder.execute("SELECT 1 FROM patch_sessions WHERE sc_id = 1 FOR UPDATE")
        under_way = pool.settling.submit(first._written(first.done()))
        await until_blocked(pool)
        waiting = pool.settling.submit(second._written(second.done()))
        await pool.settling.stop()
        assert (under_way.result(), waiting.result()) == (False, False)
