"""The gate: who may claim, what moves a row from outside, and what the sweep frees."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from gates import (
    ENVIRONMENT,
    Session,
    a_gate,
    attempts_of,
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
    until_blocked,
)
from psycopg.sql import SQL, Identifier
from pydantic import BaseModel

from handlers.patch_sessions import sessions
from webhooks.claim import Claim
from webhooks.db import Ready, draw
from webhooks.errors import ConfigurationError, LostClaim
from webhooks.gate import Gate
from webhooks.inbox import inbox
from webhooks.pool import Pool
from webhooks.statements import Barred


async def drafted(claim: Claim[Any]) -> None:
    async with claim.held():
        await claim.complete(patch="a patch")


async def fails(gate: Gate[Any], pool: Pool) -> None:
    """One attempt that ends in an exception."""
    with suppress(ValueError):
        async with gate.claim(pool, "drafting", 1) as claim:
            assert claim is not None
            raise ValueError("no")


# ---- one winner


@pytest.mark.invariant(4)
async def test_of_fifty_claims_of_one_row_one_wins(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1)
    ran = 0

    async def contend() -> bool:
        nonlocal ran
        async with gate.claim(pool, "drafting", 1) as claim:
            if claim is None:
                return False
            ran += 1
            await claim.complete(patch="diff")
            return True
        return False

    won = await asyncio.gather(*(contend() for _ in range(50)))
    assert (won.count(True), ran) == (1, 1)
    assert await status_of(pool, 1) == "drafted"
    assert await outcomes_of(pool, 1) == ["done"]


@pytest.mark.invariant(4)
async def test_of_fifty_claims_of_the_next_row_each_row_is_won_once(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1, 2, 3)
    claims = [
        claim
        for taken in await asyncio.gather(*(gate.take_next(pool, "drafting", 1) for _ in range(50)))
        for claim in taken
    ]
    assert sorted(int(str(claim.key)) for claim in claims) == [1, 2, 3]
    assert len({claim.claim_seq for claim in claims}) == 3


@pytest.mark.invariant(4)
async def test_zero_rows_mean_that_the_block_gets_no_claim(pool: Pool) -> None:
    """Case 30: a conditional update whose zero rows are ignored."""
    gate = a_gate()
    await opened(pool, gate, 1, to="received")
    for key in (1, 2):
        async with gate.claim(pool, "drafting", key) as claim:
            assert claim is None
    async with gate.claim_next(pool, "drafting") as claim:
        assert claim is None
    assert await attempts_of(pool, 1) == []


@pytest.mark.invariant(4)
async def test_a_row_that_somebody_locks_for_long_counts_as_zero_rows(pool: Pool, database_url: str) -> None:
    gate = a_gate()
    await opened(pool, gate, 1)
    other = await elsewhere(database_url)
    async with other, other.transaction():
        await other.execute("SELECT FROM patch_sessions WHERE sc_id = 1 FOR UPDATE")
        assert await gate.take(pool, "drafting", 1) is None
        assert await gate.take_next(pool, "drafting", 1) == []
    assert await status_of(pool, 1) == "clarified"
    assert await gate.take(pool, "drafting", 1) is not None


@pytest.mark.invariant(4)
async def test_the_next_row_is_one_that_nobody_locks(pool: Pool, database_url: str) -> None:
    gate = a_gate()
    await opened(pool, gate, 1, 2)
    other = await elsewhere(database_url)
    async with other, other.transaction():
        await other.execute("SELECT FROM patch_sessions WHERE sc_id = 1 FOR UPDATE")
        [claim] = await gate.take_next(pool, "drafting", 1)
        assert claim.key == 2


async def test_a_claim_that_waited_for_a_lock_gets_a_whole_lease(pool: Pool, database_url: str) -> None:
    """`now()` would be the time at which it began to wait."""
    gate = a_gate(lease=timedelta(seconds=1))
    await opened(pool, gate, 1)
    other = await elsewhere(database_url)
    async with other:
        async with other.transaction():
            await other.execute("SELECT FROM patch_sessions WHERE sc_id = 1 FOR UPDATE")
            waiting = asyncio.create_task(gate.take(pool, "drafting", 1))
            await until_blocked(pool)
            await other.execute("SELECT pg_sleep(0.5)")
        claim = await waiting
        assert claim is not None
        left = await sql(pool, "SELECT lease_until - claimed_at AS lease FROM patch_sessions")
    assert left == [{"lease": timedelta(seconds=1)}]


async def test_what_is_not_due_or_has_no_attempt_left_is_not_claimed(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1, 2)
    await sql(pool, "UPDATE patch_sessions SET not_before = now() + interval '1 hour' WHERE sc_id = 1")
    await sql(pool, "UPDATE patch_sessions SET attempt_count = max_attempts WHERE sc_id = 2")
    assert await gate.take(pool, "drafting", 1) is None
    assert await gate.take(pool, "drafting", 2) is None
    assert await gate.take_next(pool, "drafting", 10) == []


@pytest.mark.invariant(7)
async def test_an_attempt_is_charged_and_written_down_when_the_claim_is_made(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1, 2)
    known = await gate.take(pool, "drafting", 1)
    [following] = await gate.take_next(pool, "drafting", 5, claimed_by="an agent")
    assert known is not None
    for claim, by in ((known, pool.process), (following, "an agent")):
        row = await row_of(pool, int(str(claim.key)))
        assert (row["status"], row["claimed_from"], row["attempt_count"]) == ("drafting", "clarified", 1)
        assert (row["claim_seq"], row["claimed_by"]) == (claim.claim_seq, by)
        [attempt] = await attempts_of(pool, claim.key)
        assert (attempt["claim_seq"], attempt["table_name"], attempt["phase"]) == (
            claim.claim_seq,
            "patch_sessions",
            "drafting",
        )
        assert (attempt["visit"], attempt["attempt"], attempt["claimed_by"]) == (row["visit"], 1, by)
        assert (attempt["ended_at"], attempt["outcome"]) == (None, None)
        assert attempt["claimed_at"] == row["claimed_at"]


async def test_a_claim_takes_no_more_rows_than_were_asked_for_whatever_the_plan(pool: Pool) -> None:
    """Case 22: statistics of one row, then thirty; a plan may run the subquery again for each."""
    gate = a_gate()
    await opened(pool, gate, 1)
    other = await elsewhere(pool.url)
    async with other:
        await other.execute("ANALYZE patch_sessions")
    await opened(pool, gate, *range(2, 31))
    for taken in range(1, 9):  # past the fifth time the statement is prepared, and soon after planned for any value
        assert len(await gate.take_next(pool, "drafting", 1)) == 1
        [counted] = await sql(pool, "SELECT count(*) AS claimed FROM patch_sessions WHERE status = 'drafting'")
        assert counted["claimed"] == taken
    assert len(await gate.take_next(pool, "drafting", 5)) == 5


@pytest.mark.invariant(7)
async def test_exhausted_rows_at_the_head_do_not_starve_the_queue(pool: Pool) -> None:
    """Case 25."""
    gate = a_gate()
    await opened(pool, gate, *range(1, 11))
    await sql(
        pool, "UPDATE patch_sessions SET attempt_count = 3, not_before = now() - interval '1 day' WHERE sc_id <= 5"
    )
    claims = await gate.take_next(pool, "drafting", 5)
    assert sorted(int(str(claim.key)) for claim in claims) == [6, 7, 8, 9, 10]
    assert await gate.sweep(pool, "drafting") == 5
    rows = await sql(pool, "SELECT claimed_from, last_error FROM patch_sessions WHERE status = 'escalated'")
    assert rows == [{"claimed_from": "clarified", "last_error": "no attempt is left"}] * 5
    assert await gate.sweep(pool, "drafting") == 0


async def test_a_row_with_an_open_child_insert_is_still_found(pool: Pool, database_url: str) -> None:
    """Case 35: a foreign key locks its row, and only FOR NO KEY UPDATE does not mind."""
    gate = a_gate()
    await sql(pool, "CREATE TABLE notes (sc_id bigint REFERENCES patch_sessions)")
    await opened(pool, gate, 1, 2)
    other = await elsewhere(database_url)
    async with other, other.transaction():
        await other.execute("INSERT INTO notes VALUES (1), (2)")
        [claim] = await gate.take_next(pool, "drafting", 1)
        assert claim.key == 1
        assert await gate.take(pool, "drafting", 2) is not None
        await expire(pool, 1)
        assert await gate.sweep(pool, "drafting") == 1


async def test_rows_are_claimed_in_order_and_by_filter(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1, 2, 3)
    await sql(pool, "UPDATE patch_sessions SET not_before = now() - sc_id * interval '1 minute'")
    await sql(pool, "UPDATE patch_sessions SET note = 'mine' WHERE sc_id = 1")
    async with gate.claim_next(pool, "drafting", note="mine") as claim:
        assert claim is not None
        assert claim.key == 1
        await claim.complete()
    two_minutes_ago = datetime.now(UTC) - timedelta(minutes=2, seconds=30)
    [claim] = await gate.take_next(pool, "drafting", 5, due_by=two_minutes_ago)
    assert claim.key == 3
    assert await gate.take_next(pool, "drafting", 5, keys=[1, 3]) == []
    [claim] = await gate.take_next(pool, "drafting", 5, keys=[1, 2, 3])
    assert claim.key == 2
    with pytest.raises(ValueError, match="None never equals"):
        await gate.take_next(pool, "drafting", 1, equal={"note": None})


@pytest.mark.parametrize("limit", [0, 101])
async def test_more_rows_than_a_block_has_numbers_are_refused(pool: Pool, limit: int) -> None:
    with pytest.raises(ValueError, match="between 1 and 100"):
        await a_gate().take_next(pool, "drafting", limit)


@pytest.mark.invariant(5)
async def test_no_two_claims_ever_share_a_number(pool: Pool, database_url: str) -> None:
    gate = a_gate()
    await opened(pool, gate, *range(1, 61), to="received")
    async with Pool.open(database_url, settings=pool.settings) as second:
        takes = [gate.take_next(either, "clarifying", 7) for _ in range(5) for either in (pool, second)]
        taken = [claim for claims in await asyncio.gather(*takes) for claim in claims]
    assert len(taken) == 60
    assert len({claim.claim_seq for claim in taken}) == 60
    visits = {claim.visit for claim in taken}
    assert len(visits) == 60
    assert visits.isdisjoint(claim.claim_seq for claim in taken)


# ---- rows that kill their worker


@pytest.mark.invariant(7)
async def test_a_row_that_kills_every_worker_is_escalated_once_and_takes_no_neighbour_along(pool: Pool) -> None:
    """Case 29: a worker that ends under each of its claims, three attempts; the others progress."""
    gate = a_gate()
    await opened(pool, gate, *range(1, 51))
    claims = await gate.take_next(pool, "drafting", 50)
    assert len(claims) == 50
    for claim in claims:  # the worker dies under all of them
        await expire(pool, int(str(claim.key)))
    assert await gate.sweep(pool, "drafting") == 50
    assert await gate.take_next(pool, "drafting", 50) == []
    await sql(pool, "UPDATE patch_sessions SET not_before = now()")
    # Each is taken alone from now on: the neighbours end, the poisonous one kills its worker again.
    while taken := await gate.take_next(pool, "drafting", 50, barred="last chance"):
        [claim] = taken
        assert claim.suspect
        if claim.key == 13:
            await expire(pool, 13)
            assert await gate.sweep(pool, "drafting") == 1
            await due(pool, 13)
        else:
            await drafted(claim)
    [last] = await gate.take_next(pool, "drafting", 1)
    assert (last.key, last.attempt) == (13, 3)
    await expire(pool, 13)
    assert await gate.sweep(pool, "drafting") == 1
    assert await gate.sweep(pool, "drafting") == 0
    row = await row_of(pool, 13)
    assert (row["status"], row["claimed_from"], row["attempt_count"]) == ("escalated", "clarified", 3)
    assert await outcomes_of(pool, 13) == ["expired", "expired", "expired"]
    [others] = await sql(pool, "SELECT count(*) AS drafted FROM patch_sessions WHERE status = 'drafted'")
    assert others["drafted"] == 49


async def tried(pool: Pool, gate: Gate[Any], key: int, attempts: int, outcomes: list[str]) -> None:
    """A row with a history, due."""
    await opened(pool, gate, key)
    await sql(
        pool,
        "INSERT INTO attempts (claim_seq, table_name, key, phase, visit, attempt, claimed_at, ended_at, outcome)"
        " SELECT %(seq)s + n, 'patch_sessions', %(row)s, 'drafting', 1, 1, now() + n * interval '1 s', now(), o"
        " FROM unnest(%(outcomes)s::text[]) WITH ORDINALITY AS ended (o, n)",
        seq=key * 10,
        row=str(key),
        outcomes=outcomes,
    )
    await sql(
        pool,
        "UPDATE patch_sessions SET attempt_count = %(attempts)s, claim_seq = %(seq)s WHERE sc_id = %(key)s",
        attempts=attempts,
        seq=key * 10 + len(outcomes),
        key=key,
    )


EVERYBODY: set[Barred] = {"nothing", "last chance", "last attempt"}


@pytest.mark.parametrize(
    ("attempts", "outcomes", "suspect", "takers"),
    [
        (0, [], False, EVERYBODY),
        (1, ["error"], False, EVERYBODY),
        (1, ["expired"], True, EVERYBODY),
        (1, ["expired", "snoozed"], True, EVERYBODY),
        (2, ["expired", "error"], False, {"nothing", "last chance"}),
        (2, ["error", "snoozed", "error"], False, {"nothing", "last chance"}),
        (2, ["error", "expired"], True, {"nothing"}),
        # Put back uncharged, by a lane that was stopping for instance: what made it dangerous is so still.
        (2, ["error", "expired", "snoozed"], True, {"nothing"}),
        (2, ["error", "expired", "interrupted", "snoozed", "interrupted"], True, {"nothing"}),
        # A person gave it new attempts.
        (0, ["expired", "expired", "expired"], False, EVERYBODY),
    ],
)
async def test_who_may_take_a_row_that_was_tried_and_whether_it_may_end_its_worker(
    pool: Pool, attempts: int, outcomes: list[str], suspect: bool, takers: set[Barred]
) -> None:
    gate = a_gate()
    for key, barred in enumerate(sorted(EVERYBODY), 1):
        await tried(pool, gate, key, attempts, outcomes)
        taken = await gate.take_next(pool, "drafting", 1, barred=barred, keys=[key])
        assert bool(taken) == (barred in takers), barred
        assert all(claim.suspect is suspect for claim in taken)


@pytest.mark.parametrize("known", [True, False], ids=["known", "looked for"])
async def test_rows_are_claimed_in_their_order_and_one_that_may_end_its_worker_alone(pool: Pool, known: bool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1)
    await tried(pool, gate, 2, 2, ["error", "error"])
    await tried(pool, gate, 3, 1, ["expired"])
    await tried(pool, gate, 4, 1, ["expired"])
    await tried(pool, gate, 5, 1, ["error"])
    await opened(pool, gate, 6)
    await sql(pool, "UPDATE patch_sessions SET not_before = now() - interval '1 hour'")
    keys = [6, 5, 4, 3, 2, 1] if known else None
    batches = [await gate.take_next(pool, "drafting", 100, keys=keys) for _ in range(5)]
    assert [[claim.key for claim in batch] for batch in batches] == [[1, 2], [3], [4], [5, 6], []]
    assert [batch.more for batch in batches] == [True, True, True, False, False]
    assert [claim.key for batch in batches for claim in batch if claim.suspect] == [3, 4]
    # What was locked and left is as it was.
    assert {row["attempt_count"] for row in await sql(pool, "SELECT attempt_count FROM patch_sessions")} == {1, 2, 3}


@pytest.mark.parametrize("outcome", ["error", "expired"])
async def test_a_row_on_its_last_chance_is_known_to_wait_where_it_is_not_far_from_its_turn(
    pool: Pool, outcome: str
) -> None:
    gate = a_gate()
    await tried(pool, gate, 7, 2, [outcome])
    assert await gate.last_chance_waits(pool, "drafting") == (outcome == "expired")
    await sql(
        pool,
        "INSERT INTO patch_sessions (sc_id, title, status, not_before)"
        " SELECT n, 'a story', 'clarified', now() - interval '1 day' FROM generate_series(1001, 2000) AS n",
    )
    assert not await gate.last_chance_waits(pool, "drafting")


# ---- from outside


@pytest.mark.invariant(10)
async def test_a_row_is_opened_once_however_often_it_is_asked_for(pool: Pool) -> None:
    gate = a_gate()

    async def open_one() -> bool:
        async with pool.transaction() as tx:
            return await gate.open(tx, sc_id=1, title="a story")

    assert (await asyncio.gather(*(open_one() for _ in range(20)))).count(True) == 1
    row = await row_of(pool, 1)
    assert (row["status"], row["attempt_count"], row["max_attempts"]) == ("received", 0, 5)


async def test_what_is_moved_is_told_so_that_it_is_claimed_by_its_key(pool: Pool) -> None:
    gate = a_gate()
    async with pool.transaction() as tx:
        await gate.open(tx, sc_id=1, title="one")
        assert not await gate.open(tx, sc_id=1, title="one")
        await gate.open(tx, to="asked", sc_id=2, title="two")
        assert await gate.advance(tx, 2, "asked", "clarified", answer="yes")
        assert await gate.advance(tx, 1, ("asked", "received"), "closed")
        assert tx.moved == [Ready("patch_sessions", "clarifying", 1), Ready("patch_sessions", "drafting", 2)]


async def test_entering_a_ready_status_from_outside_starts_a_new_visit_with_its_own_attempts(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1, to="asked")
    await sql(pool, "UPDATE patch_sessions SET attempt_count = 4, max_attempts = 4, last_error = 'old'")
    before = await row_of(pool, 1)
    async with pool.transaction() as tx:
        assert await gate.advance(tx, 1, "asked", "clarified", answer="yes")
    row = await row_of(pool, 1)
    assert (row["attempt_count"], row["max_attempts"], row["answer"], row["last_error"]) == (0, 3, "yes", None)
    assert row["visit"] != before["visit"]


async def test_a_final_status_keeps_the_count_of_attempts(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1)
    await sql(pool, "UPDATE patch_sessions SET attempt_count = 1")
    claim = await gate.take(pool, "drafting", 1)
    assert claim is not None
    await drafted(claim)
    row = await row_of(pool, 1)
    assert (row["status"], row["attempt_count"]) == ("drafted", 2)


async def test_a_row_that_is_elsewhere_is_not_moved_and_says_where_it_is(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1, to="received")
    async with pool.transaction() as tx:
        moved = await gate.advance(tx, 1, "asked", "clarified", answer="yes")
        assert (bool(moved), moved.found) == (False, "received")
        moved = await gate.advance(tx, 2, "asked", "clarified")
        assert (bool(moved), moved.found) == (False, None)
    assert (await row_of(pool, 1))["answer"] is None


@pytest.mark.invariant(5)
async def test_a_person_who_moves_a_row_on_stops_its_owner(pool: Pool) -> None:
    """Case 31: the release comes after the row was moved."""
    gate = a_gate()
    await opened(pool, gate, 1)

    async def owner() -> None:
        async with gate.claim(pool, "drafting", 1) as claim:
            assert claim is not None
            async with pool.transaction() as tx:
                assert await gate.advance(tx, 1, ("drafting", "clarified"), "closed")
            await claim.complete(patch="too late")

    with pytest.raises(LostClaim):
        await owner()
    row = await row_of(pool, 1)
    assert (row["status"], row["patch"], row["claimed_by"], row["lease_until"]) == ("closed", None, None, None)
    [attempt] = await attempts_of(pool, 1)
    assert (attempt["outcome"], attempt["error"]) == ("lost", "moved to closed while it was being worked on")


@pytest.mark.invariant(5)
@pytest.mark.parametrize("ending", ["raises", "completes", "is left"])
async def test_an_owner_who_comes_late_changes_nothing(pool: Pool, ending: str) -> None:
    """Case 23: A's lease expires; B claims and exhausts it; A ends late, by whatever way."""
    gate = a_gate()
    await opened(pool, gate, 1)
    await sql(pool, "UPDATE patch_sessions SET attempt_count = 1")

    async def old() -> None:
        async with gate.claim(pool, "drafting", 1) as claim:
            assert claim is not None
            await expire(pool, 1)
            assert await gate.sweep(pool, "drafting") == 1
            await due(pool, 1)
            await fails(gate, pool)
            assert await status_of(pool, 1) == "escalated"
            if ending == "raises":
                raise ValueError("late")
            if ending == "completes":
                await claim.complete(patch="late")

    if ending == "is left":
        await old()
    else:
        with pytest.raises((ValueError, LostClaim)):
            await old()
    row = await row_of(pool, 1)
    assert (row["status"], row["patch"], row["attempt_count"], row["last_error"]) == (
        "escalated",
        None,
        3,
        "ValueError: no",
    )
    assert await outcomes_of(pool, 1) == ["expired", "error"]


@pytest.mark.invariant(5)
async def test_a_row_deleted_and_opened_again_is_not_mistaken_for_itself(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1)
    old = await gate.take(pool, "drafting", 1)
    assert old is not None
    await sql(pool, "DELETE FROM patch_sessions")
    await opened(pool, gate, 1)
    new = await gate.take(pool, "drafting", 1)
    assert new is not None
    assert new.idempotency_key("x") != old.idempotency_key("x")
    with pytest.raises(LostClaim):
        async with old.held():
            await old.complete(patch="of the old row")
    await drafted(new)
    assert (await row_of(pool, 1))["patch"] == "a patch"
    assert await outcomes_of(pool, 1) == ["lost", "done"]


async def test_the_gates_own_columns_and_claimed_statuses_are_not_written_from_outside(pool: Pool) -> None:
    gate = a_gate()
    async with pool.transaction() as tx:
        for attempt in (
            gate.open(tx, sc_id=1, title="x", attempt_count=0),
            gate.open(tx, to="drafting", sc_id=1, title="x"),
            gate.advance(tx, 1, "asked", "drafting"),
            gate.advance(tx, 1, "asked", "clarified", visit=1),
        ):
            with pytest.raises(ConfigurationError):
                await attempt
    assert await sql(pool, "SELECT * FROM patch_sessions") == []


async def test_deliveries_that_wait_for_a_row_are_due_once_it_moves(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1, to="asked")
    await sql(
        pool,
        "INSERT INTO deliveries (source, dedup_key, body, status, not_before, parked_on, parked_since)"
        " SELECT 'shortcut', n::text, '', 'received', now() + interval '1 hour', 'patch_sessions:' || n, now()"
        " FROM generate_series(1, 2) AS n",
    )
    async with pool.transaction() as tx:
        await gate.advance(tx, 1, "asked", "clarified")
        [woken] = await sql(pool, "SELECT count(*) AS due FROM deliveries WHERE not_before <= now()")
        assert woken["due"] == 0
        assert [ready[:2] for ready in tx.moved] == [("patch_sessions", "drafting"), ("deliveries", "applying")]
    assert await sql(pool, "SELECT dedup_key FROM deliveries WHERE not_before <= now()") == [{"dedup_key": "1"}]
    async with gate.claim(pool, "drafting", 1) as claim:
        assert claim is not None
        await sql(pool, "UPDATE deliveries SET not_before = now() + interval '1 hour'")
        await claim.complete()
    assert await sql(pool, "SELECT dedup_key FROM deliveries WHERE not_before <= now()") == [{"dedup_key": "1"}]


# ---- retry


@pytest.mark.invariant(7)
async def test_a_person_gives_an_escalated_row_new_attempts_and_the_same_visit(pool: Pool) -> None:
    """Case 16, of a row: what was decided is recorded."""
    gate = a_gate()
    await opened(pool, gate, 1)
    visit = (await row_of(pool, 1))["visit"]
    await sql(pool, "UPDATE patch_sessions SET attempt_count = 6, max_attempts = 7")
    await fails(gate, pool)
    assert await status_of(pool, 1) == "escalated"
    async with pool.transaction() as tx:
        assert await gate.retry(tx, 1, decided_by="Ann", reason="the token was renewed")
        assert tx.moved == [Ready("patch_sessions", "drafting", 1)]
        assert not await gate.retry(tx, 1, decided_by="Ann", reason="twice")
    row = await row_of(pool, 1)
    assert (row["status"], row["attempt_count"], row["max_attempts"]) == ("clarified", 0, 3)
    assert (row["visit"], row["claimed_from"]) == (visit, None)
    [decision] = await sql(pool, "SELECT table_name, key, decision, decided_by, reason FROM decisions")
    assert list(decision.values()) == ["patch_sessions", "1", "retry", "Ann", "the token was renewed"]
    claim = await gate.take(pool, "drafting", 1)
    assert claim is not None
    assert (claim.attempt, claim.visit) == (1, visit)


# ---- the sweep


@pytest.mark.invariant(6)
async def test_a_row_whose_lease_is_over_is_claimable_again_after_a_wait(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1, 2)
    first = await gate.take(pool, "drafting", 1)
    assert first is not None
    assert await gate.take(pool, "drafting", 2) is not None
    await expire(pool, 1)
    assert await gate.sweep(pool, "drafting") == 1
    row = await row_of(pool, 1)
    assert (row["status"], row["attempt_count"], row["claimed_from"], row["claimed_by"]) == ("clarified", 1, None, None)
    assert "stopped answering" in row["last_error"]
    [waits] = await sql(
        pool, "SELECT extract(epoch FROM not_before - now())::float AS s FROM patch_sessions WHERE sc_id = 1"
    )
    assert 3.9 < waits["s"] < 6.1
    assert await status_of(pool, 2) == "drafting"
    assert await gate.take(pool, "drafting", 1) is None
    await due(pool, 1)
    second = await gate.take(pool, "drafting", 1)
    assert second is not None
    assert (second.attempt, second.visit) == (2, first.visit)


@pytest.mark.invariant(5)
async def test_a_sweep_that_meets_a_completing_row_leaves_it_alone(pool: Pool) -> None:
    """Case 24: the lease is over, and the row is being completed just now."""
    gate = a_gate()
    await opened(pool, gate, 1)
    claim = await gate.take(pool, "drafting", 1)
    assert claim is not None
    async with claim.held():
        await expire(pool, 1)
        async with claim.transaction() as tx:
            await tx.execute("UPDATE patch_sessions SET lease_until = now() - interval '1 second'")
            assert await gate.sweep(pool, "drafting") == 0
            await tx.done(patch="in time")
    assert await gate.sweep(pool, "drafting") == 0
    assert (await row_of(pool, 1))["patch"] == "in time"
    assert await outcomes_of(pool, 1) == ["done"]


@pytest.mark.invariant(5)
async def test_a_recovery_that_comes_after_a_person_moved_the_row_leaves_it_there(pool: Pool) -> None:
    """Case 31: moved by hand, with what the claim had left in the row."""
    gate = a_gate()
    await opened(pool, gate, 1)
    assert await gate.take(pool, "drafting", 1) is not None
    await sql(pool, "UPDATE patch_sessions SET status = 'closed'")
    await expire(pool, 1)
    assert await gate.sweep(pool, "drafting") == 0
    assert await status_of(pool, 1) == "closed"


@pytest.mark.invariant(6)
async def test_a_row_claimed_by_hand_gets_a_lease_and_comes_back(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1)
    await sql(pool, "UPDATE patch_sessions SET status = 'drafting' WHERE sc_id = 1 AND status = 'clarified'")
    assert await gate.sweep(pool, "drafting") == 1
    row = await row_of(pool, 1)
    assert (row["status"], row["claimed_from"], row["claimed_by"]) == ("drafting", "clarified", "somebody by hand")
    assert row["lease_until"] - row["claimed_at"] == timedelta(seconds=60)
    assert await gate.sweep(pool, "drafting") == 0
    await expire(pool, 1)
    assert await gate.sweep(pool, "drafting") == 1
    assert await status_of(pool, 1) == "clarified"
    assert await attempts_of(pool, 1) == []


@pytest.mark.invariant(5)
@pytest.mark.parametrize("adopted", [False, True], ids=["before the sweep saw it", "after"])
async def test_an_old_owner_does_not_write_into_a_row_claimed_by_hand(pool: Pool, adopted: bool) -> None:
    """Its number is still in the row, as that of the last claim; the status is the same again."""
    gate = a_gate()
    await opened(pool, gate, 1)
    claim = await gate.take(pool, "drafting", 1)
    assert claim is not None
    await expire(pool, 1)
    assert await gate.sweep(pool, "drafting") == 1
    await sql(pool, "UPDATE patch_sessions SET status = 'drafting' WHERE sc_id = 1 AND status = 'clarified'")
    if adopted:
        assert await gate.sweep(pool, "drafting") == 1
    with pytest.raises(LostClaim):
        async with claim.held():
            await claim.complete(patch="too late")
    row = await row_of(pool, 1)
    assert (row["status"], row["patch"]) == ("drafting", None)


async def test_a_locked_row_keeps_no_exhausted_one_from_escalating(pool: Pool, database_url: str) -> None:
    gate = a_gate()
    await opened(pool, gate, 1, 2)
    await sql(pool, "UPDATE patch_sessions SET attempt_count = 3")
    other = await elsewhere(database_url)
    async with other, other.transaction():
        await other.execute("SELECT FROM patch_sessions WHERE sc_id = 1 FOR UPDATE")
        assert await gate.sweep(pool, "drafting") == 1
    assert [await status_of(pool, key) for key in (1, 2)] == ["clarified", "escalated"]


async def test_a_sweep_frees_more_than_a_hundred_rows_and_skips_what_is_locked(pool: Pool, database_url: str) -> None:
    gate = a_gate()
    await opened(pool, gate, *range(1, 152))
    for _ in range(2):
        await gate.take_next(pool, "drafting", 100)
    await sql(pool, "UPDATE patch_sessions SET lease_until = now() - interval '1 second'")
    other = await elsewhere(database_url)
    async with other, other.transaction():
        await other.execute("SELECT FROM patch_sessions WHERE sc_id = 7 FOR UPDATE")
        assert await gate.sweep(pool, "drafting") == 150
    assert await status_of(pool, 7) == "drafting"


async def test_a_sweep_of_a_locked_table_frees_nothing_and_does_not_fail(pool: Pool, database_url: str) -> None:
    gate = a_gate()
    other = await elsewhere(database_url)
    async with other, other.transaction():
        await other.execute("LOCK TABLE patch_sessions IN ACCESS EXCLUSIVE MODE")
        assert await gate.sweep(pool, "drafting") == 0


# ---- several at once


@pytest.mark.invariant(6)
async def test_one_of_five_claimed_rows_that_cannot_start_is_released_and_the_others_run(pool: Pool) -> None:
    """Case 32."""

    class Short(BaseModel):
        sc_id: int
        title: str

        def model_post_init(self, context: Any) -> None:
            if self.sc_id == 2:
                raise RuntimeError("cannot be started")

    gate = Gate("patch_sessions", key="sc_id", row=Short)
    gate.phase("clarified", claimed="drafting", done="drafted")
    await opened(pool, gate, *range(1, 6))
    claims = await gate.take_next(pool, "drafting", 5)
    results = await asyncio.gather(*(drafted(claim) for claim in claims), return_exceptions=True)
    assert [type(result) for result in results].count(RuntimeError) == 1
    rows = await sql(pool, "SELECT sc_id, status FROM patch_sessions ORDER BY sc_id")
    assert [row["status"] for row in rows] == ["drafted", "clarified", "drafted", "drafted", "drafted"]
    assert await outcomes_of(pool, 2) == ["error"]


# ---- several key columns


async def test_a_key_of_several_columns_goes_all_the_way(pool: Pool) -> None:
    gate = tickets_gate()
    await make_tickets(pool)
    async with pool.transaction() as tx:
        for company, number in (("acme", 1), ("acme", 2), ("blue/1", 1), ("blue", 2)):
            assert await gate.open(tx, company=company, number=number)
        assert not await gate.open(tx, company="acme", number=1)
        assert tx.moved[0] == Ready("tickets", "claimed", ("acme", 1))
    async with gate.claim(pool, "claimed", ("acme", 1)) as claim:
        assert claim is not None
        assert (claim.key, claim.label) == (("acme", 1), "tickets:acme/1")
        assert claim.row == {"company": "acme", "number": 1, "agent": None}
        await claim.complete(agent="A")
    # Not the combinations nobody named.
    taken = await gate.take_next(pool, "claimed", 5, keys=[("acme", 2), ("blue/1", 1), ("blue", 1)])
    assert sorted(str(claim.label) for claim in taken) == ["tickets:acme/2", "tickets:blue%2F1/1"]
    async with gate.claim_next(pool, "claimed", company="blue") as claim:
        assert claim is not None
        assert claim.key == ("blue", 2)
        async with pool.transaction() as tx:
            assert await gate.advance(tx, ("blue", 2), "claimed", "open")
    for _ in range(2):
        await sql(pool, "UPDATE tickets SET lease_until = now() - interval '1 second' WHERE status = 'claimed'")
        await gate.sweep(pool, "claimed")
        await sql(pool, "UPDATE tickets SET not_before = now() WHERE status = 'open'")
        await gate.take_next(pool, "claimed", 1, keys=[("blue/1", 1)])
    async with pool.transaction() as tx:
        assert not await gate.retry(tx, ("blue", 2), decided_by="Ann", reason="why not")
        assert await gate.retry(tx, ("blue/1", 1), decided_by="Ann", reason="why not")
    assert [attempt["outcome"] for attempt in await attempts_of(pool, "blue%2F1/1")] == ["expired", "expired"]
    assert (await sql(pool, "SELECT key FROM decisions")) == [{"key": "blue%2F1/1"}]


# ---- another schema

IN_A_SCHEMA = """
import asyncio, sys
import psycopg
from datetime import timedelta
from gates import a_gate, opened
from webhooks.inbox import inbox
from webhooks.migrate import migrate
from webhooks.pool import Pool

async def seven() -> int:
    return 7

async def main() -> None:
    async with await psycopg.AsyncConnection.connect(sys.argv[1], autocommit=True) as connection:
        await migrate(connection, schema="tenant_a")
    gate = a_gate()
    async with Pool.open(sys.argv[1]) as pool:
        await opened(pool, gate, 1, 2, 3)
        async with gate.claim(pool, "drafting", 1) as claim:
            assert await claim.once("seven", seven) == 7
            await claim.complete(patch="diff")
        [claim] = await gate.take_next(pool, "drafting", 1, keys=[2])
        async with pool.transaction() as tx:
            await tx.execute("UPDATE tenant_a.patch_sessions SET attempt_count = 3 WHERE sc_id > 1")
            await tx.execute("UPDATE tenant_a.patch_sessions SET lease_until = now() - interval '1 s' WHERE sc_id = 2")
        assert await gate.sweep(pool, "drafting") == 2
        async with pool.transaction() as tx:
            assert await gate.retry(tx, 2, decided_by="Ann", reason="why not")
            assert await gate.advance(tx, 3, "escalated", "closed")
            assert await gate.check(tx) == []
            assert await inbox.check(tx) == []
            await tx.execute("DROP INDEX tenant_a.patch_sessions_clarified")
            print(*await gate.check(tx))

asyncio.run(main())
"""


async def test_a_named_schema_is_used_for_everything(database_url: str, pool: Pool) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-W",
        "error",
        "-c",
        IN_A_SCHEMA,
        database_url,
        env={**ENVIRONMENT, "WEBHOOKS_SCHEMA": "tenant_a"},
        stdout=PIPE,
    )
    async with asyncio.timeout(30):
        output, _ = await process.communicate()
    assert process.returncode == 0
    assert output.decode().splitlines()[-1] == (
        "tenant_a.patch_sessions: no index finds the rows in clarified: CREATE INDEX CONCURRENTLY"
        " patch_sessions_clarified ON tenant_a.patch_sessions (not_before, sc_id)"
        " WHERE status = 'clarified';"
    )
    rows = await sql(pool, "SELECT sc_id, status FROM tenant_a.patch_sessions ORDER BY sc_id")
    assert [row["status"] for row in rows] == ["drafted", "clarified", "closed"]
    for table in ("patch_sessions", "attempts", "effects", "decisions"):
        assert await sql(pool, SQL("SELECT * FROM {}").format(Identifier(table))) == []
        assert await sql(pool, SQL("SELECT * FROM tenant_a.{}").format(Identifier(table))) != []


# ---- declarations


def test_a_contradiction_is_refused_when_it_is_declared() -> None:
    gate = a_gate()
    for options in (
        {"ready": "drafted", "claimed": "drafting", "done": "x"},
        {"ready": "clarified", "claimed": "y", "done": "x"},
        {"ready": "x", "claimed": "clarified", "done": "y"},
        {"ready": "drafting", "claimed": "y", "done": "x"},
        {"ready": "x", "claimed": "y", "done": "clarifying"},
        {"ready": "x", "claimed": "y", "done": "y"},
        {"ready": "x", "claimed": "escalated", "done": "y"},
        {"ready": "x", "claimed": "y", "done": ()},
        {"ready": "x", "claimed": "y", "done": "z", "max_attempts": 0},
        {"ready": "x", "claimed": "y", "done": "z", "concurrency": 0},
        {"ready": "x", "claimed": "y", "done": "z", "lease": timedelta(milliseconds=200)},
    ):
        with pytest.raises(ConfigurationError):
            gate.phase(**options)
    assert list(gate.phases) == ["clarifying", "drafting"]


def test_a_row_may_not_read_what_changes_from_attempt_to_attempt() -> None:
    class Wrong(BaseModel):
        sc_id: int
        attempt_count: int

    with pytest.raises(ConfigurationError, match="attempt_count"):
        Gate("patch_sessions", key="sc_id", row=Wrong)
    with pytest.raises(ConfigurationError, match="pydantic model or a dataclass"):
        Gate("patch_sessions", key="sc_id", row=int)


async def test_an_unknown_phase_is_named_with_the_known_ones(pool: Pool) -> None:
    with pytest.raises(ConfigurationError, match="clarifying, drafting"):
        await a_gate().take(pool, "clarified", 1)


# ---- check


async def test_the_tables_of_the_project_lack_nothing(pool: Pool) -> None:
    async with pool.transaction() as tx:
        assert await sessions.check(tx) == []
        assert await inbox.check(tx) == []
        assert await a_gate().check(tx) == []


@pytest.mark.parametrize(
    ("broken_by", "told"),
    [
        ("ALTER TABLE patch_sessions DROP COLUMN last_error", "column last_error is missing"),
        ("ALTER TABLE patch_sessions DROP COLUMN not_before", "column not_before is missing"),
        ("ALTER TABLE patch_sessions DROP COLUMN visit", "column visit is missing"),
        ("ALTER TABLE patch_sessions DROP COLUMN status CASCADE", "column status is missing"),
        ("ALTER TABLE patch_sessions ALTER COLUMN claim_seq TYPE integer", "column claim_seq is integer, not bigint"),
        ("ALTER TABLE patch_sessions ALTER COLUMN attempt_count DROP NOT NULL", "column attempt_count may be NULL"),
        ("ALTER TABLE patch_sessions ALTER COLUMN claimed_by SET NOT NULL", "column claimed_by may not be NULL"),
        ("ALTER TABLE patch_sessions ALTER COLUMN not_before DROP DEFAULT", "column not_before has another default"),
        ("ALTER TABLE patch_sessions ALTER COLUMN visit SET DEFAULT 0", "column visit has another default"),
        ("DROP INDEX patch_sessions_clarified", "no index finds the rows in clarified"),
        ("DROP INDEX patch_sessions_claimed", "no index finds the rows in clarifying, drafting"),
        (
            "DROP INDEX patch_sessions_claimed; CREATE INDEX patch_sessions_claimed ON patch_sessions (sc_id)"
            " WHERE status IN ('clarifying', 'opening')",
            "no index finds the rows in drafting",
        ),
        (
            "DROP INDEX patch_sessions_clarified; CREATE INDEX patch_sessions_clarified ON patch_sessions (sc_id)"
            " WHERE status = 'clarified' AND note IS NULL",
            "no index finds the rows in clarified",
        ),
        (
            "DROP INDEX patch_sessions_clarified; CREATE INDEX patch_sessions_clarified ON patch_sessions (sc_id)"
            " WHERE status <> 'clarified'",
            "no index finds the rows in clarified",
        ),
        (
            "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'patch_sessions_clarified'::regclass",
            "index patch_sessions_clarified was never finished",
        ),
        ("CREATE INDEX slow ON patch_sessions (lease_until)", "index slow makes every renewal slow"),
        ("ALTER TABLE patch_sessions DROP CONSTRAINT patch_sessions_pkey", "(sc_id) is not unique"),
    ],
)
async def test_a_table_that_lacks_something_is_told_the_statement_that_mends_it(
    pool: Pool, database_url: str, broken_by: str, told: str
) -> None:
    gate = a_gate()
    other = await elsewhere(database_url)
    async with other:
        await other.execute(broken_by.encode())
        async with pool.transaction() as tx:
            faults = await gate.check(tx)
        assert any(told in fault for fault in faults), faults
        assert len(faults) == 1 or "DROP COLUMN" in broken_by  # which drops its indexes as well
        for fault in faults:
            for statement in fault.split(": ", 2)[2].split(";"):
                if statement.strip():
                    await other.execute(statement.encode())
        async with pool.transaction() as tx:
            assert await gate.check(tx) == []
    await opened(pool, gate, 1)
    assert await gate.take(pool, "drafting", 1) is not None


@pytest.mark.parametrize(
    ("index", "covers"),
    [
        ("status = 'clarified'", True),
        ("status IN ('clarified', 'received')", True),
        ("status = 'clarified' OR status = 'x'", True),
        ("status = ANY ('{clarified,received}'::text[])", True),
        ("status = 'clarified' AND sc_id > 5", False),
        ("status <> 'clarified'", False),
        ("status > 'clarified'", False),
        ("NOT status = 'clarified'", False),
        ("note = 'clarified'", False),
    ],
)
async def test_an_index_counts_when_it_holds_all_rows_of_the_status(pool: Pool, index: str, covers: bool) -> None:
    await sql(pool, "DROP INDEX patch_sessions_clarified")
    await sql(pool, f"CREATE INDEX other ON patch_sessions (sc_id) WHERE {index}".encode())
    async with pool.transaction() as tx:
        assert (await a_gate().check(tx) == []) == covers


async def test_a_status_column_that_is_varchar_has_its_indexes_recognised(pool: Pool) -> None:
    gate = Gate("jobs", key="id")
    gate.phase("open", claimed="claimed", done="done")
    await sql(pool, "CREATE TABLE jobs (id int PRIMARY KEY, LIKE gated INCLUDING ALL)")
    await sql(pool, "ALTER TABLE jobs ALTER COLUMN status TYPE character varying")
    await sql(pool, "CREATE INDEX ON jobs (id) WHERE status = 'open'")
    await sql(pool, "CREATE INDEX ON jobs (id) WHERE status IN ('claimed', 'other')")
    async with pool.transaction() as tx:
        assert await gate.check(tx) == [
            "jobs: column status is character varying, not text: ALTER TABLE jobs ALTER COLUMN status TYPE text;"
        ]


async def test_a_table_that_is_not_there_is_told_how_to_make_it(pool: Pool) -> None:
    gate = tickets_gate()
    async with pool.transaction() as tx:
        [fault] = await gate.check(tx)
    assert fault == (
        "the table tickets does not exist: CREATE TABLE tickets (company …, number …, …, "
        "PRIMARY KEY (company, number), LIKE gated INCLUDING ALL) WITH (fillfactor = 80);"
    )
    await sql(pool, "DROP TABLE gated")
    async with pool.transaction() as tx:
        assert await gate.check(tx) == ["the table gated does not exist; run: webhooks migrate"]


async def test_a_key_column_that_is_not_there_is_named(pool: Pool) -> None:
    gate = Gate("patch_sessions", key="company, sc_id", row=Session)
    gate.phase("clarified", claimed="drafting", done="drafted")
    async with pool.transaction() as tx:
        assert await gate.check(tx) == ["patch_sessions has no column company, which is its gate's key"]


async def test_numbers_are_drawn_a_hundred_at_a_time(pool: Pool) -> None:
    async with pool.transaction() as tx:
        first = await draw(tx)
        assert await draw(tx) == first + 100
        drawn = [await pool.fences(40, tx) for _ in range(4)]
    assert drawn == [first + 200, first + 240, first + 300, first + 340]


def test_a_phase_that_names_none_takes_its_attempts_and_its_concurrency_from_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WEBHOOKS_MAX_ATTEMPTS", "7")
    monkeypatch.setenv("WEBHOOKS_CONCURRENCY", "2")
    gate = Gate("jobs", key="id")
    gate.phase("open", claimed="claimed", done="done")
    gate.phase("done", claimed="checking", done="checked", max_attempts=1, concurrency=1)
    assert [(phase.max_attempts, phase.concurrency) for phase in gate.phases.values()] == [(7, 2), (1, 1)]


async def test_a_row_that_cannot_be_claimed_holds_up_no_other(pool: Pool) -> None:
    gate = Gate("patch_sessions", key="sc_id")
    gate.phase("clarified", claimed="drafting", done="drafted", max_attempts=3)
    await opened(pool, gate, 1, 2, 3)
    await sql(pool, "UPDATE patch_sessions SET merged_at = 'infinity', not_before = '2000-01-01' WHERE sc_id = 1")
    await sql(pool, "UPDATE patch_sessions SET attempt_count = 1 WHERE sc_id = 3")
    assert [claim.key for claim in await gate.take_next(pool, "drafting", 1)] == [2]
    assert [claim.key for claim in await gate.take_next(pool, "drafting", 2)] == [3]
    [left] = await sql(pool, "SELECT status, attempt_count FROM patch_sessions WHERE sc_id = 1")
    assert (left["status"], left["attempt_count"]) == ("clarified", 0)


async def test_beside_a_row_that_cannot_be_claimed_one_that_may_end_its_worker_is_claimed_alone_all_the_same(
    pool: Pool,
) -> None:
    gate = Gate("patch_sessions", key="sc_id")
    gate.phase("clarified", claimed="drafting", done="drafted", max_attempts=3)
    await opened(pool, gate, 1, 2)
    await tried(pool, gate, 3, 1, ["expired"])
    await opened(pool, gate, 4, 5)
    await sql(pool, "UPDATE patch_sessions SET merged_at = 'infinity', not_before = '2000-01-01' WHERE sc_id = 1")
    batches = [await gate.take_next(pool, "drafting", 10) for _ in range(4)]
    assert [[claim.key for claim in batch] for batch in batches] == [[2], [3], [4, 5], []]
    assert [batches[place].more for place in (0, 1, 3)] == [True, True, False]
