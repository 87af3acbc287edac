"""One row of a batch that refuses holds up no other, whatever the batch does."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, LiteralString

import psycopg
import pytest
from consumers import arrival, arrived
from gates import a_gate, opened, outcomes_of, sql, status_of, until

from webhooks.claim import Claim
from webhooks.consumer import Consumer
from webhooks.db.batch import each
from webhooks.decision import retry_each
from webhooks.gate import Gate
from webhooks.pool import Pool
from webhooks.replay import Again, Limits, again
from webhooks.retention import Ages, prune
from webhooks.selection import Selection, chosen
from webhooks.sources import Shortcut

DAY = timedelta(days=1)


def a_consumer(*gates: Gate[Any]) -> Consumer:
    return Consumer(gates=gates, sources=[Shortcut()])


async def refusing(pool: Pool, table: LiteralString, condition: LiteralString, of: LiteralString = "UPDATE") -> None:
    """A trigger by which some rows refuse."""
    row = "OLD" if of == "DELETE" else "NEW"
    await sql(
        pool,
        f"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF {condition} THEN RAISE EXCEPTION 'it stays as it is'; END IF; RETURN {row}; END $$".encode(),
    )
    await sql(pool, f"CREATE TRIGGER refuse BEFORE {of} ON {table} FOR EACH ROW EXECUTE FUNCTION refuse()".encode())


# ---- the helper


async def test_a_batch_that_goes_well_is_one_statement_and_one_that_is_empty_none() -> None:
    runs: list[list[int]] = []

    async def run(some: Any) -> int:
        runs.append(list(some))
        return sum(some)

    assert await each([1, 2, 3], run, print) == [6]
    assert await each([], run, print) == []
    assert runs == [[1, 2, 3]]


@pytest.mark.parametrize(
    ("error", "alone"),
    [(psycopg.errors.CheckViolation, True), (psycopg.OperationalError, False), (psycopg.errors.UndefinedTable, False)],
)
async def test_each_is_tried_alone_only_where_the_error_is_about_a_row(error: type[psycopg.Error], alone: bool) -> None:
    runs: list[list[int]] = []
    refused: list[int] = []

    async def run(some: Any) -> list[int]:
        runs.append(list(some))
        if 2 in some:
            raise error
        return list(some)

    if alone:
        assert await each([1, 2, 3], run, lambda item, _: refused.append(item)) == [[1], [3]]
        assert (runs, refused) == ([[1, 2, 3], [1], [2], [3]], [2])
    else:
        with pytest.raises(error):
            await each([1, 2, 3], run, lambda item, _: refused.append(item))
        assert (runs, refused) == ([[1, 2, 3]], [])


# ---- leases


async def test_a_row_that_refuses_to_be_renewed_takes_the_lease_of_no_other(pool: Pool) -> None:
    gate = a_gate(lease=timedelta(seconds=1))
    await opened(pool, gate, 1, 2, 3)
    claims = await gate.take_next(pool, "drafting", 3)
    await refusing(pool, "patch_sessions", "NEW.sc_id = 2 AND NEW.lease_until > OLD.lease_until")

    async def held(claim: Claim[Any]) -> None:
        async with claim.held():
            await asyncio.sleep(60)

    tasks = [asyncio.create_task(held(claim)) for claim in sorted(claims, key=lambda claim: str(claim.key))]
    # The one that refuses is lost when its lease is over; by then the others were renewed.
    await until(tasks[1].done)
    rows = await sql(pool, "SELECT lease_until > now() AS held FROM patch_sessions WHERE sc_id <> 2")
    assert [row["held"] for row in rows] == [True, True]
    assert not tasks[0].done()
    assert not tasks[2].done()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# ---- deliveries that wait for a row


@pytest.fixture
async def parked(pool: Pool) -> list[int]:
    """Two deliveries that wait for row 1, of which the first refuses to be made due."""
    ids = await arrived(pool, arrival(b"{}"), arrival(b"{}"))
    await sql(
        pool,
        "UPDATE deliveries SET parked_on = 'patch_sessions:1', parked_since = now(),"
        " not_before = now() + interval '1 hour'",
    )
    await refusing(pool, "deliveries", f"NEW.id = {min(ids)}")  # type: ignore[arg-type]
    return sorted(ids)


async def woken(pool: Pool) -> list[int]:
    return [row["id"] for row in await sql(pool, "SELECT id FROM deliveries WHERE not_before <= now()")]


async def test_a_parked_delivery_that_refuses_keeps_no_end_from_being_written(pool: Pool, parked: list[int]) -> None:
    gate = a_gate()
    await opened(pool, gate, 1, 2, 3)
    claims = [await gate.take(pool, "drafting", key) for key in (1, 2, 3)]

    async def completed(claim: Claim[Any] | None) -> None:
        assert claim is not None
        async with claim.held():
            await claim.complete()

    await asyncio.gather(*(completed(claim) for claim in claims))
    assert [await status_of(pool, key) for key in (1, 2, 3)] == ["drafted"] * 3
    assert [await outcomes_of(pool, key) for key in (1, 2, 3)] == [["done"]] * 3
    assert await woken(pool) == [parked[1]]
    assert [moved.key for moved in claims[0].moved] == [parked[1]] if claims[0] else False


async def test_a_parked_delivery_that_refuses_keeps_no_event_from_moving_its_row(pool: Pool, parked: list[int]) -> None:
    gate = a_gate()
    async with pool.transaction() as tx:
        assert await gate.open(tx, to="clarified", sc_id=1, title="one")
        assert [moved.key for moved in tx.moved if moved.table == "deliveries"] == [parked[1]]
    assert await status_of(pool, 1) == "clarified"
    assert await woken(pool) == [parked[1]]


# ---- what is old


async def test_a_delivery_that_something_refers_to_keeps_no_other_from_being_removed(pool: Pool) -> None:
    ids = [(await arrived(pool, arrival(b"{}")))[0] for _ in range(4)]
    await sql(pool, "UPDATE deliveries SET status = 'processed', received_at = now() - interval '99 d'")
    await sql(pool, "CREATE TABLE invoices (delivery bigint CONSTRAINT booked REFERENCES deliveries (id))")
    await sql(pool, "CREATE TABLE later (delivery bigint REFERENCES deliveries (id) DEFERRABLE INITIALLY DEFERRED)")
    await sql(pool, "INSERT INTO invoices VALUES (%(id)s)", id=ids[0])
    await sql(pool, "INSERT INTO later VALUES (%(id)s)", id=ids[1])
    report = await prune(pool.transaction, a_consumer(), Ages(keys=DAY, keys_of={"shortcut": DAY}), dry=False)
    assert report.lines["keys"].count == 1
    assert [row["id"] for row in await sql(pool, "SELECT id FROM deliveries ORDER BY id")] == [ids[0], ids[1], ids[3]]
    reasons = list(report.left)
    assert len(reasons) == 2
    assert all(reason.startswith("deliveries that cannot be removed: ") for reason in reasons)
    assert any('"booked"' in reason for reason in reasons)
    # Bodies of the same deliveries go; a trigger keeps one.
    await refusing(pool, "deliveries", f"NEW.id = {ids[1]}")  # type: ignore[arg-type]
    report = await prune(pool.transaction, a_consumer(), Ages(bodies=DAY), dry=False)
    assert report.lines["bodies"].count == 2
    assert any("it stays as it is" in reason for reason in report.left)


async def test_an_attempt_an_effect_and_a_notification_that_refuse_keep_no_other(pool: Pool) -> None:
    await sql(
        pool,
        "INSERT INTO attempts (claim_seq, table_name, key, phase, visit, attempt, claimed_at, ended_at, outcome)"
        " SELECT n, 'patch_sessions', n::text, 'drafting', 1, 1, now() - interval '99 d', now() - interval '99 d',"
        " 'done' FROM generate_series(1, 6) AS n",
    )
    await sql(
        pool,
        "INSERT INTO effects (idempotency_key, claim_seq, state, input_hash, result, call_until, intended_at, ended_at)"
        " SELECT 'e' || n, n, 'done', 'x', '1', now(), now() - interval '99 d', now() - interval '99 d'"
        " FROM generate_series(1, 3) AS n",
    )
    await sql(
        pool,
        "INSERT INTO notifications (table_name, key, phase, attempts_made, escalated_at, status)"
        " SELECT 'patch_sessions', n::text, 'drafting', 1, now() - interval '99 d', 'notified'"
        " FROM generate_series(1, 3) AS n",
    )
    for number, (table, condition) in enumerate(
        (("attempts", "OLD.claim_seq = 5"), ("effects", "OLD.claim_seq = 2"), ("notifications", "OLD.key = '3'"))
    ):
        await sql(
            pool,
            f"CREATE FUNCTION keep_{number}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            f" IF {condition} THEN RAISE EXCEPTION 'it stays as it is'; END IF; RETURN OLD; END $$".encode(),
        )
        await sql(
            pool,
            f"CREATE TRIGGER keep BEFORE DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION keep_{number}()".encode(),
        )
    report = await prune(pool.transaction, a_consumer(a_gate()), Ages(attempts=DAY, effects=DAY), dry=False)
    assert {kind: line.count for kind, line in report.lines.items() if line.count} == {
        "attempts": 4,  # of six one refuses, and one has the effect that refuses
        "effects": 2,
        "notifications": 2,
    }
    assert sorted(reason.split(" that cannot")[0] for reason in report.left) == ["attempts", "effects", "notifications"]


# ---- what a person asks for


async def test_a_delivery_that_refuses_to_run_again_keeps_no_other(pool: Pool) -> None:
    ids = [(await arrived(pool, arrival(b"{}")))[0] for _ in range(3)]
    await sql(pool, "UPDATE deliveries SET status = 'processed'")
    await refusing(pool, "deliveries", f"NEW.id = {ids[1]}")  # type: ignore[arg-type]
    async with pool.transaction() as tx:
        scope = await chosen(tx, Selection(), "run")
    report = await again(pool, {}, scope, Again(decided_by="Ann"), Limits())
    assert report.counts == {"again": 2, "refused": 1}
    assert [cause for cause in report.causes if "it stays as it is" in cause]
    assert not report.well
    rows = await sql(pool, "SELECT status FROM deliveries ORDER BY id")
    assert [row["status"] for row in rows] == ["received", "processed", "received"]


async def test_a_row_that_refuses_to_be_retried_keeps_no_other(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1, 2, 3)
    await sql(pool, "UPDATE patch_sessions SET status = 'escalated', claimed_from = 'clarified', title = 'same'")
    await sql(pool, "CREATE UNIQUE INDEX one ON patch_sessions (title) WHERE status = 'clarified'")
    names = [f"patch_sessions:{key}" for key in (1, 2, 3)]
    async with pool.transaction() as tx:
        retried, refused = await retry_each(tx, a_consumer(gate), names, decided_by="Ann", reason="again")
    assert retried == names[:1]
    assert list(refused) == names[1:]
    assert all('"one"' in why for why in refused.values())
    assert [await status_of(pool, key) for key in (1, 2, 3)] == ["clarified", "escalated", "escalated"]
