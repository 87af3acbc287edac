"""Leases are kept alive by a thread of their own, and lost ones are noticed."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from gates import (
    a_gate,
    backends,
    due,
    elsewhere,
    expire,
    make_tickets,
    opened,
    outcomes_of,
    row_of,
    sql,
    status_of,
    tickets_gate,
    until,
)
from psycopg.conninfo import make_conninfo
from wire import pool_over_a_wire

from webhooks.claim import Claim
from webhooks.db.connect import Connections
from webhooks.errors import LostClaim
from webhooks.gate import Gate
from webhooks.outcome import Stop
from webhooks.phase import Key
from webhooks.pool import Pool
from webhooks.renewer import Lease, Renewal, Renewer, boottime

SECOND = timedelta(seconds=1)


async def taken(pool: Pool, *, lease: timedelta = SECOND, **options: Any) -> Claim[Any]:
    gate = a_gate(lease=lease, **options)
    await opened(pool, gate, 1)
    claim = await gate.take(pool, "drafting", 1)
    assert claim is not None
    return claim


def lease_of(claim: Claim[Any]) -> Lease:
    return claim._lease


async def until_renewed(pool: Pool, claim: Claim[Any], times: int = 1) -> None:
    """Wait until its lease ends later than when it was claimed, some leases' thirds on."""
    later = claim.lease_until + times * lease_of(claim).renewal.lease / 4

    async def moved() -> bool:
        return bool((await row_of(pool, 1))["lease_until"] > later)

    await until(moved)


@pytest.mark.invariant(6)
async def test_a_handler_that_takes_several_leases_runs_once(pool: Pool) -> None:
    """Case 27 with renewal: nobody else claims, however often they try."""
    gate = a_gate(lease=SECOND)
    claim = await taken(pool)
    async with claim.held():

        async def two_leases_later() -> bool:
            assert await gate.sweep(pool, "drafting") == 0
            assert await gate.take(pool, "drafting", 1) is None
            [row] = await sql(pool, "SELECT now() > claimed_at + interval '2 seconds' AS over FROM patch_sessions")
            return bool(row["over"])

        await until(two_leases_later)
        # The process never believes in its lease for longer than the database does.
        [row] = await sql(pool, "SELECT lease_until - clock_timestamp() AS left FROM patch_sessions")
        assert 0 < lease_of(claim).until - boottime() <= row["left"].total_seconds() + 0.05
        await claim.complete(patch="diff")
    assert await outcomes_of(pool, 1) == ["done"]


@pytest.mark.invariant(6)
async def test_a_blocked_event_loop_does_not_lose_the_lease(pool: Pool) -> None:
    claim = await taken(pool)
    async with claim.held():
        time.sleep(2.2)  # noqa: ASYNC251 - what the handler must not do, and does
        [row] = await sql(pool, "SELECT lease_until > now() AS held FROM patch_sessions")
        assert row["held"]
        assert await a_gate(lease=SECOND).sweep(pool, "drafting") == 0
        await asyncio.sleep(0.3)  # the loop looks at its leases, and finds nothing wrong
        await claim.complete(patch="diff")
    assert await outcomes_of(pool, 1) == ["done"]


async def test_renewal_goes_on_over_a_new_connection_when_the_old_one_is_ended(pool: Pool, database_url: str) -> None:
    claim = await taken(pool, lease=timedelta(seconds=2))
    async with claim.held():
        await until_renewed(pool, claim)
        pids = backends(database_url)
        assert len(pids) >= 2
        other = await elsewhere(database_url)
        async with other:
            await other.execute("SELECT pg_terminate_backend(pid) FROM unnest(%s::int[]) AS pid", [pids])
        before = lease_of(claim).until
        await until(lambda: lease_of(claim).until > before)
        assert set(backends(database_url)).isdisjoint(pids)
        await claim.complete()
    assert await outcomes_of(pool, 1) == ["done"]


async def test_a_row_locked_by_somebody_else_is_skipped_and_not_lost(pool: Pool, database_url: str) -> None:
    claim = await taken(pool, lease=timedelta(seconds=3))
    other = await elsewhere(database_url)
    async with other, claim.held():
        first_try = lease_of(claim).renew_at
        await other.execute("BEGIN; SELECT FROM patch_sessions FOR UPDATE")
        await until(lambda: lease_of(claim).renew_at > first_try)
        assert not lease_of(claim).lost
        assert lease_of(claim).until < first_try + 2.1
        await other.execute("COMMIT")
        await until_renewed(pool, claim)
        await claim.complete()
    assert await outcomes_of(pool, 1) == ["done"]


@pytest.mark.invariant(5)
async def test_a_claim_whose_row_was_taken_is_cancelled_and_writes_nothing(pool: Pool) -> None:
    """Case 27 with the lease lost: two runs, the first one fenced and its task cancelled."""
    gate = a_gate(lease=SECOND)
    claim = await taken(pool)
    second: Claim[Any] | None = None
    cancelled = False
    with pytest.raises(LostClaim):
        async with claim.held():
            await expire(pool, 1)
            assert await gate.sweep(pool, "drafting") == 1
            await due(pool, 1)
            second = await gate.take(pool, "drafting", 1)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled = True
                raise
    assert cancelled
    assert second is not None
    # Nobody renews the second claim yet, least of all the first.
    assert (await row_of(pool, 1))["lease_until"] == second.lease_until
    async with second.held():
        await second.complete(patch="of the second")
    assert (await row_of(pool, 1))["patch"] == "of the second"
    assert await outcomes_of(pool, 1) == ["expired", "done"]


@pytest.mark.invariant(5)
@pytest.mark.parametrize("by_hand", ["claimed", "moved on"])
async def test_a_row_that_somebody_changed_by_hand_is_not_renewed(pool: Pool, by_hand: str) -> None:
    """The number of the claim is still in the row, and with the one its status, with the other its lease."""
    claim = await taken(pool, lease=9 * SECOND)
    with pytest.raises(LostClaim):
        async with claim.held():
            if by_hand == "claimed":
                await expire(pool, 1)
                assert await a_gate().sweep(pool, "drafting") == 1
                await sql(pool, "UPDATE patch_sessions SET status = 'drafting' WHERE status = 'clarified'")
            else:
                await sql(pool, "UPDATE patch_sessions SET status = 'closed'")
            before = await row_of(pool, 1)
            lease_of(claim).renew_at = boottime()
            pool.renewer.add(lease_of(claim))
            await until(lambda: lease_of(claim).lost, within_s=5)  # by the first renewal, not by the clock
            await asyncio.Event().wait()
    assert await row_of(pool, 1) == before
    assert before["claim_seq"] == claim.claim_seq


async def test_a_locked_row_does_not_cost_its_neighbours_their_leases(pool: Pool, database_url: str) -> None:
    gate = a_gate(lease=SECOND)
    await opened(pool, gate, 1, 2)
    locked, free = await gate.take_next(pool, "drafting", 2)
    other = await elsewhere(database_url)

    async def renewed() -> bool:
        row = await row_of(pool, 2)
        return bool(row["lease_until"] - row["claimed_at"] > 2 * SECOND)

    async def hold(claim: Claim[Any]) -> None:
        with pytest.raises(LostClaim):
            async with claim.held():
                await asyncio.Event().wait()

    async with other, free.held():
        await other.execute("BEGIN; SELECT FROM patch_sessions WHERE sc_id = 1 FOR UPDATE")
        holding = asyncio.create_task(hold(locked))
        await until(renewed)
        await holding
        await free.complete()


@pytest.mark.invariant(5)
@pytest.mark.parametrize("frozen", ["by a lock", "by the server"])
async def test_a_lease_that_cannot_be_renewed_is_given_up_by_the_clock_of_the_process(
    pool: Pool, database_url: str, frozen: str
) -> None:
    gate = a_gate(lease=SECOND)
    await opened(pool, gate, 1)
    other = await elsewhere(database_url)
    async with other, pool_over_a_wire(database_url) as (wired_pool, wire):
        began = boottime()
        with pytest.raises(LostClaim):
            async with gate.claim(wired_pool, "drafting", 1) as claim:
                assert claim is not None
                if frozen == "by a lock":
                    await other.execute("BEGIN; SELECT FROM patch_sessions FOR UPDATE")
                else:
                    wire.at('UPDATE "patch_sessions" AS t SET lease_until', "hold", times=10)
                try:
                    await asyncio.Event().wait()
                finally:
                    gone = boottime() - began
                    wire.freed.set()
        assert 0.9 < gone < 2
        await other.execute("ROLLBACK" if frozen == "by a lock" else "SELECT 1")
    assert await status_of(pool, 1) == "drafting"
    await expire(pool, 1)
    assert await gate.sweep(pool, "drafting") == 1


async def test_past_its_timeout_a_phase_is_cancelled_and_renewed_no_more(pool: Pool) -> None:
    claim = await taken(pool, timeout=timedelta(milliseconds=300))
    with pytest.raises(TimeoutError):
        async with claim.held():
            await asyncio.Event().wait()
    row = await row_of(pool, 1)
    assert (row["status"], row["attempt_count"], row["last_error"]) == ("clarified", 1, Stop.TIMEOUT.value)


@pytest.mark.invariant(5)
async def test_a_handler_that_goes_on_past_its_timeout_loses_its_lease_and_is_told_so(pool: Pool) -> None:
    claim = await taken(pool, timeout=timedelta(milliseconds=200))
    with pytest.raises(LostClaim):
        async with claim.held():
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            await asyncio.Event().wait()
    assert (await row_of(pool, 1))["lease_until"] == claim.lease_until


@pytest.mark.invariant(6)
async def test_renewal_goes_on_while_a_drained_handler_ends(pool: Pool) -> None:
    """Case 28: a drain longer than the lease."""
    gate = a_gate(lease=SECOND)
    claim = await taken(pool)
    at_work = asyncio.Event()

    async def run() -> None:
        async with claim.held():
            try:
                at_work.set()
                await asyncio.Event().wait()
            finally:
                await until_renewed(pool, claim, times=5)  # it takes its time
                assert await gate.sweep(pool, "drafting") == 0

    task = asyncio.create_task(run())
    await at_work.wait()
    claim.stop(Stop.DRAIN)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await outcomes_of(pool, 1) == ["interrupted"]


async def test_a_table_that_cannot_be_renewed_does_not_cost_the_others_their_leases(
    pool: Pool, database_url: str
) -> None:
    await sql(pool, "CREATE TABLE jobs (id bigint PRIMARY KEY, LIKE gated INCLUDING ALL)")
    jobs = Gate("jobs", key="id")
    jobs.phase("open", claimed="claimed", done="done", lease=3 * SECOND)
    async with pool.transaction() as tx:
        await jobs.open(tx, id=1)
    job = await jobs.take(pool, "claimed", 1)
    assert job is not None
    claim = await taken(pool, lease=3 * SECOND)
    other = await elsewhere(database_url)

    async def hold_the_job() -> None:
        with pytest.raises(LostClaim):
            async with job.held():
                await asyncio.Event().wait()

    async with other:
        await other.execute("BEGIN; LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE")
        with pool.renewer._changed:  # both are due at once, the job's table first
            for lease in (lease_of(job), lease_of(claim)):
                lease.renew_at = boottime()
                pool.renewer.add(lease)
        holding = asyncio.create_task(hold_the_job())
        async with claim.held():
            await holding
            await until_renewed(pool, claim, times=4)
            await other.execute("ROLLBACK")
            await claim.complete()
    assert await status_of(pool, 1) == "drafted"


async def test_a_key_of_several_columns_is_renewed(pool: Pool) -> None:
    gate = tickets_gate(lease=SECOND)
    await make_tickets(pool)
    async with pool.transaction() as tx:
        for number in (1, 2):
            await gate.open(tx, company="acme", number=number)
    claims = await gate.take_next(pool, "claimed", 2)

    async def renewed() -> bool:
        rows = await sql(pool, "SELECT lease_until - claimed_at AS lease FROM tickets")
        return all(row["lease"] > 1.5 * SECOND for row in rows)

    async with claims[0].held(), claims[1].held():
        await until(renewed, within_s=3)
        for claim in claims:
            await claim.complete()


async def test_all_claims_of_a_process_are_renewed_and_forgotten_when_they_end(pool: Pool) -> None:
    gate = a_gate(lease=SECOND)
    await opened(pool, gate, *range(1, 41))
    claims = await gate.take_next(pool, "drafting", 40)
    ended = asyncio.Event()

    async def hold(claim: Claim[Any]) -> None:
        async with claim.held():
            await ended.wait()
            await claim.complete()

    async def renewed() -> bool:
        rows = await sql(pool, "SELECT lease_until - claimed_at AS lease FROM patch_sessions")
        return all(row["lease"] > 1.2 * SECOND for row in rows)

    tasks = [asyncio.create_task(hold(claim)) for claim in claims]
    await until(renewed, within_s=5)
    assert len(pool.renewer) == 40
    ended.set()
    await asyncio.gather(*tasks)
    assert len(pool.renewer) == 0


async def test_the_thread_outlives_a_failure_of_any_kind(database_url: str, pool: Pool) -> None:
    connect = Connections(database_url, prepare=False).connect_in_thread
    failures: list[Exception] = [OSError("no route"), ValueError("odd"), psycopg.OperationalError("refused")]

    def sometimes() -> psycopg.Connection[dict[str, Any]]:
        if failures:
            raise failures.pop()
        return connect()

    claim = await taken(pool, lease=timedelta(seconds=6))
    lease = lease_of(claim)
    renewer = Renewer(sometimes)
    renewer.start()
    try:
        lease.renew_at = boottime()
        before = lease.until
        renewer.add(lease)
        await until(lambda: lease.until > before)
    finally:
        await renewer.stop()
    assert failures == []


async def test_a_renewer_that_is_stopped_leaves_no_thread_and_no_connection(pool: Pool, database_url: str) -> None:
    connect = Connections(make_conninfo(database_url, application_name="alone"), prepare=False).connect_in_thread
    renewer = Renewer(connect)
    renewer.start()
    claim = await taken(pool)
    lease_of(claim).renew_at = boottime()
    renewer.add(lease_of(claim))
    await until(lambda: backends(database_url, "alone"))
    await renewer.stop()
    assert not renewer._thread.is_alive()
    await until(lambda: not backends(database_url, "alone"))


# ---- what the loop is told


@pytest.mark.parametrize(
    ("happens", "told"),
    [
        ([{}], []),
        ([{"until": 5}], [Stop.LOST]),
        ([{"lost": True}], [Stop.LOST]),
        ([{"stop_at": 5}], [Stop.TIMEOUT]),
        ([{"stop_at": 5}, {"until": 5}], [Stop.TIMEOUT, Stop.LOST]),
        ([{"until": 5}, {"stop_at": 5}], [Stop.LOST]),
        ([{"lost": True}, {"lost": False}], [Stop.LOST]),
    ],
)
def test_a_claim_is_told_of_its_timeout_once_and_of_its_loss_once(
    happens: list[dict[str, Any]], told: list[Stop]
) -> None:
    heard: list[Stop] = []
    renewal = Renewal("patch_sessions", "drafting", Key.of("sc_id"), b"", b"", SECOND)
    lease = Lease(renewal, 1, 1, until=20, stop_at=20, cancel=heard.append)
    for change in happens:
        for name, value in change.items():
            setattr(lease, name, value)
        for _ in range(3):
            lease.tell(10)
    assert heard == told


async def test_a_transaction_longer_than_the_lease_keeps_the_claim_for_nobody_can_take_a_locked_row(pool: Pool) -> None:
    gate = a_gate(lease=SECOND)
    await opened(pool, gate, 1)
    async with gate.claim(pool, "drafting", 1) as claim:
        assert claim is not None
        async with claim.transaction() as tx:
            taken_at = boottime()
            await until(lambda: boottime() > taken_at + 2.5)
            assert await gate.sweep(pool, "drafting") == 0
            await tx.done()
    assert await status_of(pool, 1) == "drafted"


@pytest.mark.parametrize("ending", ["commits", "rolls back"])
async def test_what_a_transaction_of_our_own_kept_from_being_renewed_is_renewed_after_it(
    pool: Pool, ending: str
) -> None:
    """The lease that the database knows of was over before the transaction was."""
    claim = await taken(pool)
    async with claim.held():
        with suppress(ValueError):
            async with claim.transaction():
                began = boottime()
                await until(lambda: boottime() > began + 1.2)
                if ending == "rolls back":
                    raise ValueError("no")

        async def renewed() -> bool:
            [row] = await sql(
                pool, "SELECT lease_until > now() + interval '0.7 seconds' AS renewed FROM patch_sessions"
            )
            return bool(row["renewed"])

        await until(renewed, within_s=0.3)
        await claim.complete()
    assert await status_of(pool, 1) == "drafted"
