"""While work ends, the database only reads for a while, or cannot be reached: nothing that was finished is done again,
no call is in doubt, and nobody is charged for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from consumers import arrival, arrived, stories
from gates import a_gate, attempts_of, opened, outcomes_of, row_of, sql, until
from psycopg.sql import SQL, Literal
from switchover import read_only

from webhooks import Claim, Consumer, Event, Shortcut, Transaction
from webhooks.apply import apply
from webhooks.inbox import inbox
from webhooks.pool import Pool

Work = Callable[[Claim[Any]], Awaitable[Any]]


async def through(pool: Pool, url: str, work: Work, *, lease_s: float = 60) -> None:
    """Do some work under a claim of row 1, which begins while the server takes no writes and has to wait."""
    gate = a_gate(lease=timedelta(seconds=lease_s))
    await opened(pool, gate, 1)
    claim = await gate.take(pool, "drafting", 1)
    assert claim is not None

    async def held() -> None:
        async with claim.held():
            await work(claim)

    async with read_only(url):
        task = asyncio.create_task(held())
        await until(lambda: pool.pulse.away)
        if lease_s < 60:
            await until(claim.is_over)
        assert not task.done()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_phase_that_ends_meanwhile_is_done_once(pool: Pool, database_url: str) -> None:
    await through(pool, database_url, lambda claim: claim.complete(patch="diff"))
    row = await row_of(pool, 1)
    assert (row["status"], row["patch"]) == ("drafted", "diff")
    assert await outcomes_of(pool, 1) == ["done"]


async def test_an_end_that_comes_late_is_written_where_nobody_else_has_claimed(pool: Pool, database_url: str) -> None:
    await through(pool, database_url, lambda claim: claim.complete(patch="diff"), lease_s=1)
    assert (await row_of(pool, 1))["status"] == "drafted"
    assert await outcomes_of(pool, 1) == ["done"]


async def test_a_phase_that_fails_meanwhile_is_released_with_its_own_error(pool: Pool, database_url: str) -> None:
    async def fail(claim: Claim[Any]) -> None:
        raise ValueError("no")

    await through(pool, database_url, fail)
    row = await row_of(pool, 1)
    assert (row["status"], row["attempt_count"], row["last_error"]) == ("clarified", 1, "ValueError: no")
    assert await outcomes_of(pool, 1) == ["error"]


async def test_the_result_of_a_call_is_kept_and_the_call_is_not_made_again(pool: Pool, database_url: str) -> None:
    calls = 0
    ready, told = asyncio.Event(), asyncio.Event()

    async def call() -> str:
        nonlocal calls
        calls += 1
        ready.set()
        await told.wait()
        return "made"

    gate = a_gate()
    await opened(pool, gate, 1)
    claim = await gate.take(pool, "drafting", 1)
    assert claim is not None

    async def work() -> None:
        async with claim.held():
            await claim.complete(patch=await claim.once("call", call))

    task = asyncio.create_task(work())
    await ready.wait()
    async with read_only(database_url):
        told.set()
        await until(lambda: pool.pulse.away)
        assert not task.done()
    await task
    assert [row["state"] for row in await sql(pool, "SELECT state FROM effects")] == ["done"]
    assert (await row_of(pool, 1))["patch"] == "made"
    assert calls == 1


async def test_a_call_that_cannot_be_intended_waits_and_is_made_once(pool: Pool, database_url: str) -> None:
    calls = 0

    async def call() -> str:
        nonlocal calls
        calls += 1
        return "made"

    async def work(claim: Claim[Any]) -> None:
        await claim.complete(patch=await claim.once("call", call))

    await through(pool, database_url, work)
    assert (await row_of(pool, 1))["patch"] == "made"
    assert await outcomes_of(pool, 1) == ["done"]
    assert calls == 1


def raising(code: str) -> Consumer:
    shortcut = Shortcut()

    @shortcut.on("story.update")
    async def handle(event: Event, tx: Transaction) -> None:
        await tx.execute(SQL("DO $$ BEGIN RAISE SQLSTATE {}; END $$").format(Literal(code)))

    return Consumer(gates=[], sources=[shortcut])


async def applied(pool: Pool, consumer: Consumer, id_: int) -> dict[str, Any]:
    claim = await inbox.take(pool, "applying", id_)
    assert claim is not None
    try:
        async with claim.held():
            await apply(consumer, claim)
    except Exception:  # it is in the row
        await asyncio.sleep(0)
    [row] = await sql(pool, "SELECT *, not_before - now() AS rest FROM deliveries WHERE id = %(id)s", id=id_)
    return row


@pytest.mark.parametrize(
    ("code", "charged"),
    [(code, False) for code in ("25006", "53100", "53200", "57P01", "57P03", "58030", "3D000", "08006", "55P03")]
    + [(code, True) for code in ("22012", "23505", "42P01", "P0001", "57014", "25P02", "0A000", "XX000", "40001")],
)
async def test_what_lies_with_the_server_is_not_charged_to_a_delivery(pool: Pool, code: str, charged: bool) -> None:
    [id_] = await arrived(pool, arrival(stories(7)))
    row = await applied(pool, raising(code), id_)
    assert (row["status"], row["attempt_count"]) == ("received", int(charged))
    assert row["last_error"]
    assert await outcomes_of(pool, id_) == ["error" if charged else "snoozed"]


async def test_a_delivery_that_ends_its_connection_each_time_waits_longer_each_time(pool: Pool) -> None:
    [id_] = await arrived(pool, arrival(stories(7)))
    rests: list[timedelta] = []
    for _ in range(5):
        rests.append((await applied(pool, raising("57P01"), id_))["rest"])
        await sql(pool, "UPDATE deliveries SET not_before = now()")
    assert rests == sorted(rests)
    assert rests[-1] > timedelta(seconds=10)
    assert len(await attempts_of(pool, id_)) == 5
    [row] = await sql(pool, "SELECT attempt_count FROM deliveries")
    assert row == {"attempt_count": 0}
