"""The proof: it holds after a real run, and each of its checks fails on tables that break it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from click.testing import CliRunner
from gates import a_gate, attempts_of, due, expire, opened, row_of, sql, until
from wire import COMMIT, pool_over_a_wire

from webhooks import Claim, Consumer, Done, Escalate, Gate, NotDone, Pool, Snooze
from webhooks.cli.main import cli
from webhooks.db import Ready
from webhooks.outcome import Release
from webhooks.settings import Settings
from webhooks.statements import GIVEN_BACK
from webhooks.verify import Check, as_json, tries, verify
from webhooks.worker import Worker

START = datetime(2026, 6, 12, 10, tzinfo=UTC)
CONSUMER = Consumer(gates=[a_gate()], sources=[])
OVERLAP = "no two claims of one row overlap"
BACKWARDS = "no claim ended before it began"
TWICE = "no visit was done twice"
RUN = "no run claimed a row twice"
CALLED = "no effect was called twice"
SWEPT = "no row is past its lease without having been swept"
NO_ROW = "every open attempt has its claimed row"
NO_ATTEMPT = "every claimed row has its open attempt"


async def checked(pool: Pool, **options: Any) -> dict[str, Check]:
    async with pool.transaction() as tx:
        return {check.name: check for check in await verify(tx, CONSUMER, pool.settings, **options)}


async def broken(pool: Pool, **options: Any) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """The checks that fail, each with the rows and claims that break it."""
    return {
        name: [(offence.row, offence.claim_seqs) for offence in check.offences]
        for name, check in (await checked(pool, **options)).items()
        if not check.holds
    }


async def attempt(
    pool: Pool,
    seq: int,
    began: float,
    ended: float | None,
    outcome: str | None = "error",
    *,
    key: int = 1,
    table: str = "patch_sessions",
    phase: str = "drafting",
    visit: int | None = None,
    by: str = "somebody",
    error: str | None = None,
) -> None:
    """A line in `attempts`; times in seconds after START."""
    await sql(
        pool,
        "INSERT INTO attempts (claim_seq, table_name, key, phase, visit, attempt, claimed_by, claimed_at, ended_at,"
        " outcome, error) VALUES (%(seq)s, %(table)s, %(key)s, %(phase)s, %(visit)s, 1, %(by)s, %(began)s, %(ended)s,"
        " %(outcome)s, %(error)s)",
        seq=seq,
        table=table,
        key=str(key),
        phase=phase,
        visit=seq if visit is None else visit,
        by=by,
        began=START + timedelta(seconds=began),
        ended=None if ended is None else START + timedelta(seconds=ended),
        outcome=None if ended is None else outcome,
        error=error,
    )


# ---- overlapping claims


async def test_a_claim_that_began_before_the_earlier_one_ended_is_found(pool: Pool) -> None:
    for key, outcome in enumerate(("done", "error", "interrupted", "snoozed", "escalated"), 1):
        await attempt(pool, 10 * key, 0, 10, outcome, key=key)
        await attempt(pool, 10 * key + 1, 9.999999, 20, key=key)
    found = (await broken(pool))[OVERLAP]
    assert sorted(found) == [(f"patch_sessions:{key}", (10 * key, 10 * key + 1)) for key in range(1, 6)]


async def test_a_claim_made_while_the_earlier_one_is_open_is_found(pool: Pool) -> None:
    await attempt(pool, 11, 0, None)
    await attempt(pool, 12, 3_600, 3_601)
    assert (await broken(pool))[OVERLAP] == [("patch_sessions:1", (11, 12))]


async def test_a_long_claim_is_held_against_every_later_one(pool: Pool) -> None:
    await attempt(pool, 11, 0, 100)
    await attempt(pool, 12, 10, 20)
    await attempt(pool, 13, 30, 40)
    await attempt(pool, 14, 101, 102)
    assert await broken(pool) == {OVERLAP: [("patch_sessions:1", (11, 12)), ("patch_sessions:1", (11, 13))]}


async def test_two_claims_of_one_moment_overlap(pool: Pool) -> None:
    await attempt(pool, 11, 0, 1)
    await attempt(pool, 12, 0, 2)
    [(row, claims)] = (await broken(pool))[OVERLAP]
    assert (row, set(claims)) == ("patch_sessions:1", {11, 12})


async def test_claims_of_one_row_for_different_phases_overlap_too(pool: Pool) -> None:
    await attempt(pool, 11, 0, 10, phase="clarifying")
    await attempt(pool, 12, 5, 20)
    assert await broken(pool) == {OVERLAP: [("patch_sessions:1", (11, 12))]}


async def test_the_order_is_the_databases_time_and_not_the_number(pool: Pool) -> None:
    await attempt(pool, 12, 0, 10)
    await attempt(pool, 11, 10, 20)
    assert await broken(pool) == {}
    await attempt(pool, 5, 15, 16)
    assert await broken(pool) == {OVERLAP: [("patch_sessions:1", (11, 5))]}


async def test_a_claim_that_was_taken_away_or_given_back_binds_nobody(pool: Pool) -> None:
    await attempt(pool, 11, 0, 10, "expired", key=1)
    await attempt(pool, 21, 0, 10, "lost", key=2)
    await attempt(pool, 31, 0, 10, "interrupted", key=3, error=GIVEN_BACK)
    for key in (1, 2, 3):
        await attempt(pool, 10 * key + 2, 5, 20, key=key)
    assert await broken(pool) == {}


async def test_claims_of_other_rows_and_claims_that_only_touch_do_not_overlap(pool: Pool) -> None:
    await attempt(pool, 11, 0, 10)
    await attempt(pool, 12, 5, 20, key=2)
    await attempt(pool, 13, 5, 20, table="deliveries", phase="applying")
    await attempt(pool, 14, 10, 20)
    assert await broken(pool) == {}
    assert (await checked(pool))[OVERLAP].looked_at == 4


async def test_what_ended_before_since_is_left_out(pool: Pool) -> None:
    await attempt(pool, 11, 0, 10)
    await attempt(pool, 12, 5, 20)
    await attempt(pool, 13, 30, 40)
    for since in (START + timedelta(seconds=25), datetime.now(UTC) - START - timedelta(seconds=25)):
        assert await broken(pool, since=since) == {}
        assert (await checked(pool, since=since))[OVERLAP].looked_at == 1
    assert OVERLAP in await broken(pool, since=START + timedelta(seconds=10))


# ---- the other claims


async def test_a_claim_that_ended_before_it_began_tells_of_a_clock_set_back(pool: Pool) -> None:
    await attempt(pool, 11, 10, 9)
    assert await broken(pool) == {BACKWARDS: [("patch_sessions:1", (11,))]}


async def test_a_visit_that_was_done_twice_is_found(pool: Pool) -> None:
    await attempt(pool, 11, 0, 10, "done", visit=7)
    await attempt(pool, 12, 20, 30, "done", visit=7)
    await attempt(pool, 13, 40, 50, "done", visit=8)
    await attempt(pool, 14, 0, 10, "done", visit=7, key=2)
    await attempt(pool, 15, 60, 70, "error", visit=7)
    assert await broken(pool) == {TWICE: [("patch_sessions:1", (11, 12))]}
    assert (await checked(pool))[TWICE].looked_at == 4


async def test_a_run_that_claimed_a_row_twice_is_found(pool: Pool) -> None:
    await attempt(pool, 11, 0, 10, by="run:1")
    await attempt(pool, 12, 20, 30, by="run:1")
    await attempt(pool, 13, 40, 50, by="run:2")
    await attempt(pool, 14, 60, 70, "interrupted", by="run:2", error=GIVEN_BACK)
    await attempt(pool, 15, 60, 70, by="run:1", key=2)
    await attempt(pool, 16, 80, 90, by="host:1:abc")
    await attempt(pool, 17, 100, 110, by="host:1:abc")
    assert await broken(pool) == {RUN: [("patch_sessions:1", (11, 12))]}


# ---- effects


async def test_an_effect_that_may_have_happened_twice_is_found(pool: Pool) -> None:
    await sql(
        pool,
        "INSERT INTO effects (idempotency_key, claim_seq, state, input_hash, result, call_until, calls, not_done,"
        " retry_safe) VALUES ('twice', 11, 'done', '', '1', now(), 2, 0, false),"
        " ('once failed', 12, 'done', '', '1', now(), 2, 1, false), ('safe', 13, 'done', '', '1', now(), 5, 0, true),"
        " ('once', 14, 'done', '', '1', now(), 1, 0, false), ('again', 15, 'intended', '', NULL, now(), 3, 1, false)",
    )
    assert await broken(pool) == {CALLED: [("twice", (11,)), ("again", (15,))]}
    assert (await checked(pool))[CALLED].looked_at == 5


CALLS: list[tuple[list[Exception | None], bool, int, int]] = [
    ([None], False, 1, 0),
    ([NotDone("busy"), None], False, 2, 1),
    ([NotDone("busy"), NotDone("busy"), None], False, 3, 2),
    ([OSError("reset"), None], True, 2, 0),
    ([OSError("reset"), NotDone("busy"), None], True, 3, 1),
    ([OSError("reset"), None], False, 1, 0),
]


@pytest.mark.invariant(9)
async def test_every_call_is_counted_with_what_is_known_of_it(pool: Pool) -> None:
    gate = a_gate()
    for key, (answers, retry_safe, calls, not_done) in enumerate(CALLS):
        await opened(pool, gate, key)
        left = list(answers)

        async def call(left: list[Exception | None]) -> int:
            if (failure := left.pop(0)) is not None:
                raise failure
            return 1

        for _ in answers:
            await due(pool, key)
            with suppress(OSError, NotDone):
                async with gate.claim(pool, "drafting", key) as claim:
                    assert claim is not None
                    await claim.once("call", no_arguments(call, left), retry_safe=retry_safe)
                    await claim.complete()
        [effect] = await sql(
            pool, "SELECT * FROM effects WHERE starts_with(idempotency_key, %(label)s)", label=f"patch_sessions:{key}:"
        )
        assert (effect["calls"], effect["not_done"], effect["retry_safe"]) == (calls, not_done, retry_safe)
    assert CALLED not in await broken(pool)


def no_arguments(call: Callable[[list[Exception | None]], Awaitable[int]], left: list[Exception | None]) -> Any:
    """A call whose input is the same every time, whatever it is about to answer."""

    async def called() -> int:
        return await call(left)

    return called


@pytest.mark.invariant(9)
@pytest.mark.parametrize("how", ["cut before", "cut after"])
async def test_an_intention_whose_answer_was_lost_is_no_call(pool: Pool, database_url: str, how: Any) -> None:
    gate = a_gate()
    await opened(pool, gate, 1)

    async def call() -> int:
        return 1

    async with pool_over_a_wire(database_url) as (wired, wire), gate.claim(wired, "drafting", 1) as claim:
        assert claim is not None
        wire.at(COMMIT, how)
        await claim.once("call", call)
        await claim.complete()
    assert wire.cuts == 1
    [effect] = await sql(pool, "SELECT calls, not_done FROM effects")
    assert (effect["calls"], effect["not_done"]) == (1, 0)


# ---- rows


async def test_a_claim_ends_at_the_moment_its_row_is_let_go(pool: Pool) -> None:
    """Otherwise the next claim might begin before this one has ended."""
    gate = a_gate()
    await opened(pool, gate, 1, to="received")
    async with gate.claim(pool, "clarifying", 1) as claim:
        assert claim is not None
        await claim.complete("clarified")
    [attempt] = await attempts_of(pool, 1)
    assert attempt["ended_at"] == (await row_of(pool, 1))["not_before"]
    released = await gate.take(pool, "drafting", 1)
    assert released is not None
    await released.settle(Release("snoozed", charged=False, escalate=False, delay=timedelta(0), error=None))
    [_, attempt] = await attempts_of(pool, 1)
    assert attempt["ended_at"] == (await row_of(pool, 1))["not_before"]


async def test_a_lease_that_no_sweep_looked_at_is_found(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1, 2)
    [late, fresh] = [await gate.take(pool, "drafting", key) for key in (1, 2)]
    assert late is not None
    assert fresh is not None
    await sql(pool, "UPDATE patch_sessions SET lease_until = now() - interval '40 s'")
    assert await broken(pool) == {}
    await sql(pool, "UPDATE patch_sessions SET lease_until = now() - interval '46 s' WHERE sc_id = 1")
    assert await broken(pool) == {SWEPT: [("patch_sessions:1", (late.claim_seq,))]}
    await gate.sweep(pool, "drafting")
    assert await broken(pool) == {}


async def test_an_open_attempt_whose_row_was_moved_by_hand_is_found(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1, 2, 3, 4)
    seqs = {claim.key: claim.claim_seq for claim in await gate.take_next(pool, "drafting", 4)}
    assert await broken(pool) == {}
    await sql(pool, "DELETE FROM patch_sessions WHERE sc_id = 1")
    await sql(pool, "UPDATE patch_sessions SET status = 'clarified' WHERE sc_id = 2")
    await sql(pool, "UPDATE patch_sessions SET status = 'clarifying' WHERE sc_id = 3")
    await sql(pool, "UPDATE patch_sessions SET claim_seq = 1 WHERE sc_id = 4")
    found = (await broken(pool))[NO_ROW]
    assert sorted(found) == [(f"patch_sessions:{key}", (seqs[key],)) for key in (1, 2, 3, 4)]


async def test_a_claimed_row_whose_attempt_is_not_written_down_is_found(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1)
    claim = await gate.take(pool, "drafting", 1)
    assert claim is not None
    await sql(pool, "DELETE FROM attempts")
    assert await broken(pool) == {NO_ATTEMPT: [("patch_sessions:1", (claim.claim_seq,))]}


async def test_a_row_claimed_by_hand_breaks_nothing(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1)
    async with gate.claim(pool, "drafting", 1):
        pass
    await sql(pool, "UPDATE patch_sessions SET status = 'drafting' WHERE sc_id = 1 AND status = 'clarified'")
    assert await broken(pool) == {}
    await gate.sweep(pool, "drafting")
    assert await broken(pool) == {}


async def test_a_claim_set_back_by_hand_and_won_by_another_is_found(pool: Pool) -> None:
    """The most dangerous line: guarded by the status alone it frees somebody else's live claim."""
    gate = a_gate()
    await opened(pool, gate, 1)
    first = await gate.take(pool, "drafting", 1)
    await sql(pool, "UPDATE patch_sessions SET status = 'clarified' WHERE sc_id = 1 AND status = 'drafting'")
    second = await gate.take(pool, "drafting", 1)
    assert first is not None
    assert second is not None
    row = "patch_sessions:1"
    assert await broken(pool) == {
        OVERLAP: [(row, (first.claim_seq, second.claim_seq))],
        NO_ROW: [(row, (first.claim_seq,))],
    }


# ---- a real run


def flaky(gate: Gate[Any]) -> Consumer:
    """Rows that fail, wait, escalate and call out, each in its own way."""
    seen: set[tuple[str, int]] = set()

    def first(what: str, key: int) -> bool:
        new = (what, key) not in seen
        seen.add((what, key))
        return new

    async def call(key: int) -> int:
        if key % 3 == 0 and first("call", key):
            raise NotDone("busy")
        return 1

    @gate.phase("received", claimed="clarifying", done=("clarified", "asked"))
    async def clarify(row: dict[str, Any], claim: Claim) -> Done:
        await claim.once("call", call, row["sc_id"])
        return claim.done("clarified")

    @gate.phase("clarified", claimed="drafting", done="drafted", max_attempts=3)
    async def draft(row: dict[str, Any], claim: Claim) -> Done:
        key = row["sc_id"]
        if key % 4 == 1 and (key % 8 == 1 or first("failed", key)):
            raise ValueError("no luck")
        if key % 8 == 2:
            raise Escalate("a person has to look")
        if key % 8 == 3 and first("waited", key):
            raise Snooze(timedelta(0))
        return claim.done(patch="diff")

    return Consumer(gates=[gate], sources=[])


async def test_a_real_run_with_failures_retries_and_expired_leases_passes(pool: Pool, database_url: str) -> None:
    gate = Gate("patch_sessions", key="sc_id")
    consumer = flaky(gate)
    quick = Settings(poll_s=0.05, backoff_base_s=0.05, backoff_max_s=0.1, sweep_s=0.1)
    async with Pool.open(database_url, settings=quick) as one, Pool.open(database_url, settings=quick) as other:
        await opened(pool, gate, *range(1, 25), to="received")
        dead = await gate.take_next(pool, "clarifying", 5, claimed_by="a process that died")
        await sql(pool, "UPDATE patch_sessions SET lease_until = now() - interval '1 s' WHERE claim_seq IS NOT NULL")
        workers = [Worker(one, consumer), Worker(other, consumer)]
        for worker in workers:
            worker.start()
            worker.know([Ready("patch_sessions", "clarifying", key) for key in range(1, 25)])

        async def ended() -> bool:
            rows = await sql(
                pool, "SELECT count(*) AS n FROM patch_sessions WHERE status NOT IN ('drafted', 'escalated')"
            )
            return bool(rows[0]["n"] == 0)

        await until(ended, within_s=30)
        await asyncio.gather(*(worker.stop() for worker in workers))
    checks = await checked(pool)
    assert [check.name for check in checks.values() if not check.holds] == []
    assert len(dead) == 5
    outcomes = await sql(pool, "SELECT DISTINCT outcome FROM attempts")
    assert {row["outcome"] for row in outcomes} == {"done", "error", "escalated", "expired", "snoozed"}
    assert checks[OVERLAP].looked_at > 48
    assert checks[CALLED].looked_at >= 19


async def test_claims_that_follow_each_other_at_once_do_not_overlap(pool: Pool) -> None:
    """A row that is released without a wait is claimed again while that release is hardly written."""
    gate = a_gate()
    await opened(pool, gate, 1)
    at_once = Release("interrupted", charged=False, escalate=False, delay=timedelta(0), error=None)
    won = 0

    async def contend() -> None:
        nonlocal won
        while won < 60:
            claim = await gate.take(pool, "drafting", 1)
            if claim is not None:
                won += 1
                await claim.settle(at_once)

    async with asyncio.timeout(30):
        await asyncio.gather(*(contend() for _ in range(8)))
    checks = await checked(pool)
    assert checks[OVERLAP].looked_at >= 60
    assert [check.name for check in checks.values() if not check.holds] == []


# ---- the command


def test_the_command_tells_each_check_and_fails_when_one_does_not_hold(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    held = CliRunner().invoke(cli, ["verify"])
    assert held.exit_code == 0, held.output
    for name in (OVERLAP, BACKWARDS, TWICE, RUN, CALLED, SWEPT, NO_ROW, NO_ATTEMPT):
        assert name in held.output
    assert held.output.count("holds") == 8

    async def break_it() -> None:
        async with Pool.open(database_url, settings=Settings()) as pool:
            await attempt(pool, 11, 0, 10, "done")
            await attempt(pool, 12, 5, 20, "done", phase="drafting\x1b[2J")

    asyncio.run(break_it())
    failed = CliRunner().invoke(cli, ["verify"])
    assert failed.exit_code == 1
    assert "1 offences" in failed.output
    assert "patch_sessions:1: claimed for drafting\\x1b[2J at " in failed.output
    assert "(claim_seq 11, 12)" in failed.output
    told = json.loads(CliRunner().invoke(cli, ["verify", "--json"]).output)
    assert told["holds"] is False
    assert [check["check"] for check in told["checks"] if not check["holds"]] == [OVERLAP]
    assert told["checks"][0]["offences"][0]["claim_seqs"] == [11, 12]
    assert CliRunner().invoke(cli, ["verify", "--since", "1h"]).exit_code == 0
    assert CliRunner().invoke(cli, ["verify", "--since", "soon"]).exit_code == 2


async def test_the_checks_as_plain_values_are_json(pool: Pool) -> None:
    await attempt(pool, 11, 10, 9)
    async with pool.transaction() as tx:
        checks, rows = await verify(tx, CONSUMER, pool.settings), await tries(tx, CONSUMER)
    told = json.loads(json.dumps(as_json(checks, rows)))
    assert (told["holds"], len(told["checks"])) == (False, 8)
    assert told["rows_by_attempts"] == {"deliveries": {}, "notifications": {}, "patch_sessions": {}}


async def test_rows_are_counted_by_their_attempts(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1, 2, 3)
    for key, times in ((1, 2), (2, 1)):
        for _ in range(times):
            await due(pool, key)
            with suppress(ValueError):
                async with gate.claim(pool, "drafting", key):
                    raise ValueError("no luck")
    async with pool.transaction() as tx:
        assert (await tries(tx, CONSUMER))["patch_sessions"] == {0: 1, 1: 1, 2: 1}


async def test_a_gate_without_a_phase_and_one_of_several_key_columns_are_looked_at(pool: Pool) -> None:
    tickets = Gate("tickets", key="company, number")
    bare = Gate("bare", key="id")
    tickets.phase("open", claimed="claimed", done="resolved")
    await sql(
        pool,
        "CREATE TABLE tickets (company text, number bigint, PRIMARY KEY (company, number), LIKE gated INCLUDING ALL)",
    )
    async with pool.transaction() as tx:
        await tickets.open(tx, company="acme", number=1)
    [claim] = await tickets.take_next(pool, "claimed", 1)
    await sql(pool, "UPDATE tickets SET lease_until = now() - interval '1 h'")
    async with pool.transaction() as tx:
        checks = await verify(tx, Consumer(gates=[tickets, bare], sources=[]), pool.settings)
    assert [(check.name, offence.row) for check in checks for offence in check.offences] == [(SWEPT, "tickets:acme/1")]
    await due(pool, 1)
    await expire(pool, 1)
    assert claim.attempt == 1
