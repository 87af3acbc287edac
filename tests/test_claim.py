"""A claim, and every way it can end."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any

import psycopg
import pytest
import uvloop
from gates import (
    ENVIRONMENT,
    a_gate,
    attempts_of,
    due,
    elsewhere,
    expire,
    opened,
    outcomes_of,
    row_of,
    sql,
    status_of,
    until,
    until_blocked,
)
from psycopg.errors import LockNotAvailable, UndefinedTable
from psycopg.types.json import Jsonb
from wire import COMMIT, pool_over_a_wire

from webhooks.claim import Claim
from webhooks.db import Ready, RolledBack, finished
from webhooks.errors import ConfigurationError, Escalate, LostClaim, NotDone, Snooze
from webhooks.outcome import Stop
from webhooks.pool import Pool
from webhooks.settings import Settings


async def taken(pool: Pool, **options: Any) -> Claim[Any]:
    """Row 1, claimed to be drafted."""
    gate = a_gate(**options)
    await opened(pool, gate, 1)
    claim = await gate.take(pool, "drafting", 1)
    assert claim is not None
    return claim


async def rest_of(pool: Pool) -> float:
    """How many seconds row 1 rests."""
    [row] = await sql(pool, "SELECT extract(epoch FROM not_before - now())::float AS s FROM patch_sessions")
    return float(row["s"])


@asynccontextmanager
async def working(claim: Claim[Any], work: Any) -> AsyncIterator[asyncio.Task[Any]]:
    """A task that holds a claim and works under it, once it is at work."""
    started = asyncio.Event()

    async def run() -> Any:
        async with claim.held():
            started.set()
            return await work()

    task = asyncio.create_task(run())
    await started.wait()
    yield task
    if not task.done():
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def for_ever() -> None:
    await asyncio.Event().wait()


# ---- how a block ends


@pytest.mark.invariant(5)
async def test_a_completed_row_has_its_columns_and_no_owner(pool: Pool) -> None:
    claim = await taken(pool)
    async with claim.held() as held:
        assert held.row.title == "story 1"
        await held.complete(patch="a\x00patch \ud83d")
    row = await row_of(pool, 1)
    assert (row["status"], row["patch"]) == ("drafted", "a\ufffdpatch \ufffd")
    assert [row[name] for name in ("claimed_from", "claimed_by", "claimed_at", "lease_until", "last_error")] == [
        None
    ] * 5
    assert row["claim_seq"] == claim.claim_seq
    [attempt] = await attempts_of(pool, 1)
    assert (attempt["outcome"], attempt["error"]) == ("done", None)
    assert attempt["ended_at"] >= attempt["claimed_at"]
    assert (claim.settled, claim.outcome) == (True, "done")


async def test_completing_into_the_next_phase_starts_a_visit_there(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1, to="received")
    claim = await gate.take(pool, "clarifying", 1)
    assert claim is not None
    async with claim.held():
        await claim.complete("clarified")
    row = await row_of(pool, 1)
    assert (row["status"], row["attempt_count"], row["max_attempts"]) == ("clarified", 0, 3)
    assert row["visit"] not in (claim.visit, claim.claim_seq)
    assert claim.moved == [Ready("patch_sessions", "drafting", 1)]
    assert await gate.take(pool, "drafting", 1) is not None


@pytest.mark.invariant(6)
async def test_a_block_left_without_complete_releases_the_row_uncharged(pool: Pool) -> None:
    claim = await taken(pool)
    async with claim.held():
        pass
    row = await row_of(pool, 1)
    assert (row["status"], row["attempt_count"]) == ("clarified", 0)
    assert 0.5 < await rest_of(pool) <= 1
    assert await outcomes_of(pool, 1) == ["interrupted"]


@pytest.mark.invariant(6)
@pytest.mark.invariant(7)
async def test_an_exception_releases_the_row_with_a_wait_until_its_attempts_are_used_up(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1)
    for attempt, (shortest, longest) in enumerate([(3.5, 6), (7.5, 12)], 1):
        await due(pool, 1)
        with suppress(ValueError):
            async with gate.claim(pool, "drafting", 1) as claim:
                assert claim is not None
                raise ValueError("no\x00")
        row = await row_of(pool, 1)
        assert (row["status"], row["attempt_count"], row["last_error"]) == (
            "clarified",
            attempt,
            "ValueError: no\ufffd",
        )
        assert shortest < await rest_of(pool) < longest
    await due(pool, 1)
    with suppress(ValueError):
        async with gate.claim(pool, "drafting", 1) as claim:
            raise ValueError("no more")
    row = await row_of(pool, 1)
    assert (row["status"], row["claimed_from"], row["attempt_count"]) == ("escalated", "clarified", 3)
    assert (row["claimed_by"], row["lease_until"]) == (None, None)
    assert await outcomes_of(pool, 1) == ["error"] * 3
    await due(pool, 1)
    assert await gate.take(pool, "drafting", 1) is None


async def test_snooze_ends_the_block_quietly_and_costs_no_attempt(pool: Pool) -> None:
    claim = await taken(pool)
    async with claim.held():
        raise Snooze(timedelta(minutes=2))
    row = await row_of(pool, 1)
    assert (row["status"], row["attempt_count"], row["last_error"]) == ("clarified", 0, None)
    assert 115 < await rest_of(pool) <= 120
    assert await outcomes_of(pool, 1) == ["snoozed"]


async def test_a_call_that_is_told_to_wait_costs_no_attempt(pool: Pool) -> None:
    claim = await taken(pool)
    with suppress(NotDone):
        async with claim.held():
            raise NotDone("429", retry_after=timedelta(seconds=30))
    assert (await row_of(pool, 1))["attempt_count"] == 0
    assert 25 < await rest_of(pool) <= 30


async def test_escalate_ends_the_block_quietly_and_asks_a_person(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1)
    async with gate.claim(pool, "drafting", 1):
        raise Escalate("which repository?")
    row = await row_of(pool, 1)
    assert (row["status"], row["claimed_from"], row["last_error"]) == ("escalated", "clarified", "which repository?")
    assert row["attempt_count"] == 1
    assert await outcomes_of(pool, 1) == ["escalated"]


@pytest.mark.parametrize(
    ("errors", "status", "kept", "outcome"),
    [
        ([Snooze(timedelta(minutes=2))], "clarified", None, "snoozed"),
        ([Escalate("ask"), Snooze(timedelta(minutes=2))], "escalated", "ask; Snooze: snoozed for 0:02:00", "escalated"),
        ([NotDone("429", retry_after=timedelta(minutes=2))], "clarified", "NotDone: 429", "snoozed"),
        ([ValueError("no"), Snooze(timedelta(minutes=2))], "clarified", "ValueError: no; Snooze: snoozed for 0:02:00",
         "error"),
    ],
)  # fmt: skip
async def test_what_leaves_a_task_group_counts_as_its_most_serious_member(
    pool: Pool, errors: list[Exception], status: str, kept: str | None, outcome: str
) -> None:
    async def fails(error: Exception) -> None:
        raise error

    claim = await taken(pool)
    raised: list[BaseException] = []
    try:
        async with claim.held(), asyncio.TaskGroup() as group:
            for error in errors:
                group.create_task(fails(error))
    except BaseException as error:
        raised.append(error)
    row = await row_of(pool, 1)
    assert (row["status"], row["last_error"], row["attempt_count"]) == (
        status,
        kept,
        0 if outcome == "snoozed" else 1,
    )
    assert await outcomes_of(pool, 1) == [outcome]
    assert bool(raised) != all(isinstance(error, (Snooze, Escalate)) for error in errors)


@pytest.mark.invariant(5)
async def test_a_claim_that_a_task_of_a_group_finds_lost_is_told_as_lost(pool: Pool) -> None:
    async def post() -> int:
        raise AssertionError("the call must not be made")

    async def fails(claim: Claim[Any]) -> None:
        with suppress(LostClaim):
            await claim.once("post", post)
        raise ExceptionGroup("g", [LostClaim("gone"), ValueError("no")])

    claim = await taken(pool)
    await expire(pool, 1)
    await a_gate().sweep(pool, "drafting")
    with pytest.raises(LostClaim):
        async with claim.held(), asyncio.TaskGroup() as group:
            group.create_task(fails(claim))
    assert (await row_of(pool, 1))["last_error"].startswith("lease expired")


UNWRITABLE: list[tuple[BaseException, str]] = [
    (Escalate("a\x00b\ud83d"), "a\ufffdb\ufffd"),
    (Escalate(ValueError("who\x00?")), "ValueError: who\ufffd?"),
    (Escalate(7), "7"),  # type: ignore[arg-type]
    (Escalate("x" * 30_000_000), "x" * 3_999 + "…"),
    (NotDone("a\x00b\ud83d"), "NotDone: a\ufffdb\ufffd"),
    (NotDone("a\x00b", retry_after=timedelta(seconds=5)), "NotDone: a\ufffdb"),
    (ValueError("x" * 30_000_000), "ValueError: " + "x" * 3_987 + "…"),
    (ExceptionGroup("g", [ValueError("a\x00b"), KeyError()]), "ValueError: a\ufffdb; KeyError"),
]


@pytest.mark.invariant(6)
@pytest.mark.parametrize(("error", "kept"), UNWRITABLE, ids=lambda case: str(case)[:20].encode("ascii", "replace"))
async def test_an_end_is_written_whatever_is_in_its_text(pool: Pool, error: BaseException, kept: str) -> None:
    claim = await taken(pool)
    with suppress(Exception):
        async with claim.held():
            raise error
    row = await row_of(pool, 1)
    assert (row["status"], row["last_error"]) == ("escalated" if isinstance(error, Escalate) else "clarified", kept)
    assert [attempt["error"] for attempt in await attempts_of(pool, 1)] == [kept]


LESS: list[tuple[str, str]] = [
    ("ALTER TABLE patch_sessions ADD CHECK (note IS NULL)", "who knows Ä " + "x" * 500),
    ("ALTER TABLE patch_sessions ADD CHECK (length(last_error) < 300)", "who knows ? " + "x" * 188),
    ("ALTER TABLE patch_sessions ALTER last_error TYPE varchar(40)", "what went wrong could not be kept"),
    ("ALTER TABLE attempts ADD CHECK (error IS NULL)", ""),
]


@pytest.mark.invariant(6)
@pytest.mark.parametrize(("refusing", "kept"), LESS, ids=[case[0] for case in LESS])
async def test_a_text_that_the_database_refuses_is_written_with_less_of_it(
    pool: Pool, refusing: str, kept: str
) -> None:
    claim = await taken(pool)
    await sql(pool, refusing.encode())
    claim.noted["note"] = "for whoever looks"
    async with claim.held():
        raise Escalate("who knows Ä " + "x" * 500)
    row = await row_of(pool, 1)
    assert (row["status"], row["last_error"] or "") == ("escalated", kept)
    assert await outcomes_of(pool, 1) == ["escalated"]
    assert claim.outcome == "escalated"


async def test_a_value_too_long_for_an_index_is_written_with_less_of_it(pool: Pool) -> None:
    await sql(pool, "CREATE INDEX ON patch_sessions (last_error)")
    claim = await taken(pool)
    async with claim.held():
        raise Escalate("".join(chr(0x4E00 + place) for place in range(4_000)))  # nothing that can be compressed
    row = await row_of(pool, 1)
    assert (row["status"], row["last_error"]) == ("escalated", "?" * 200)


async def test_what_a_row_holds_is_not_kept_as_the_reason(pool: Pool) -> None:
    await sql(pool, "ALTER TABLE patch_sessions ADD CHECK (patch <> 'secret')")
    claim = await taken(pool)
    with pytest.raises(psycopg.errors.CheckViolation):
        async with claim.held():
            await claim.complete(patch="secret")
    error = (await row_of(pool, 1))["last_error"]
    assert error.startswith("CheckViolation: new row for relation")
    assert "secret" not in error


async def test_texts_within_lists_and_json_are_cleaned_on_their_way_into_columns(pool: Pool) -> None:
    await sql(pool, "ALTER TABLE patch_sessions ADD tags text[], ADD told jsonb")
    claim = await taken(pool)
    async with claim.held():
        await claim.complete(tags=["a\x00", "b"], told=Jsonb({"k\x00": ["\ud83d", {"n": 1}]}))
    row = await row_of(pool, 1)
    assert (row["tags"], row["told"]) == (["a\ufffd", "b"], {"k\ufffd": ["\ufffd", {"n": 1}]})


async def test_a_row_that_does_not_fit_its_model_is_released(pool: Pool) -> None:
    claim = await taken(pool)
    claim._columns["sc_id"] = "not a number"  # as a table altered under the consumer would give it
    with pytest.raises(ValueError, match="sc_id"):
        async with claim.held():
            raise AssertionError("the block must not run")
    assert await status_of(pool, 1) == "clarified"
    assert await outcomes_of(pool, 1) == ["error"]


async def test_a_statement_that_the_database_refuses_is_an_error_like_any_other(pool: Pool) -> None:
    claim = await taken(pool)
    with pytest.raises(psycopg.DataError):
        async with claim.held():
            await claim.complete(question_comment_id="not a number")
    assert await status_of(pool, 1) == "clarified"
    assert await outcomes_of(pool, 1) == ["error"]


async def test_a_wrong_ending_is_a_mistake_of_the_code_and_asks_a_person_at_once(pool: Pool) -> None:
    claim = await taken(pool)
    for mistake in ({"status": "merged"}, {"columns": {"attempt_count": 0}}):
        with pytest.raises(ConfigurationError):
            claim.done(mistake.get("status"), **mistake.get("columns", {}))  # type: ignore[arg-type]
    with suppress(ConfigurationError):
        async with claim.held():
            await claim.complete("merged")
    assert await outcomes_of(pool, 1) == ["escalated"]
    assert (await row_of(pool, 1))["last_error"].startswith("phase drafting ends in one of drafted")


async def test_columns_noted_on_the_way_are_written_when_the_claim_is_released(pool: Pool) -> None:
    claim = await taken(pool)
    with suppress(ValueError):
        async with claim.held():
            claim.noted["note"] = "got as far as this"
            raise ValueError("no")
    assert (await row_of(pool, 1))["note"] == "got as far as this"


@pytest.mark.invariant(5)
async def test_a_settled_claim_cannot_be_used_again(pool: Pool) -> None:
    claim = await taken(pool)
    async with claim.held():
        await claim.complete(patch="once")
        for again in (claim.complete(patch="twice"), claim.transaction().__aenter__(), claim.once("x", for_ever)):
            with pytest.raises(LostClaim):
                await again
    assert (await row_of(pool, 1))["patch"] == "once"


# ---- cancellation


@pytest.mark.invariant(6)
async def test_a_cancelled_task_releases_its_row_and_stays_cancelled(pool: Pool) -> None:
    """Case 26, and 36 of an agent's run: nobody said why, so it is an error."""
    async with working(await taken(pool), for_ever) as task:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert task.cancelled()
    row = await row_of(pool, 1)
    assert (row["status"], row["attempt_count"], row["last_error"]) == ("clarified", 1, "CancelledError")
    assert await outcomes_of(pool, 1) == ["error"]


@pytest.mark.invariant(6)
async def test_a_drained_task_releases_its_row_at_once_and_uncharged(pool: Pool) -> None:
    claim = await taken(pool)
    async with working(claim, for_ever) as task:
        claim.stop(Stop.DRAIN)
        with pytest.raises(asyncio.CancelledError):
            await task
    row = await row_of(pool, 1)
    assert (row["status"], row["attempt_count"]) == ("clarified", 0)
    assert await rest_of(pool) <= 0
    assert await outcomes_of(pool, 1) == ["interrupted"]


async def test_a_claim_told_to_stop_before_its_task_began_stops(pool: Pool) -> None:
    claim = await taken(pool)
    claim.stop(Stop.DRAIN)
    with pytest.raises(asyncio.CancelledError):
        async with claim.held():
            await for_ever()
    assert await outcomes_of(pool, 1) == ["interrupted"]
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()  # it was this test's


@pytest.mark.parametrize(("why", "raised"), [(Stop.LOST, LostClaim), (Stop.TIMEOUT, TimeoutError)])
async def test_a_cancellation_of_our_own_is_told_as_what_it_was_and_leaves_no_trace(
    pool: Pool, why: Stop, raised: type[Exception]
) -> None:
    claim = await taken(pool)
    counts: list[int] = []

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_soon(claim.stop, why)
        with pytest.raises(raised):
            async with claim.held():
                await for_ever()
        counts.append(task.cancelling())
        async with asyncio.timeout(5):  # goes by the count of cancellations
            await asyncio.sleep(0)

    await asyncio.create_task(run())
    assert counts == [0]
    if why is Stop.LOST:
        assert (await status_of(pool, 1), await outcomes_of(pool, 1)) == ("drafting", ["lost"])
    else:
        assert (await status_of(pool, 1), await outcomes_of(pool, 1)) == ("clarified", ["error"])
        assert (await row_of(pool, 1))["last_error"] == Stop.TIMEOUT.value


async def test_our_own_cancellation_does_not_hide_somebody_elses(pool: Pool) -> None:
    claim = await taken(pool)
    async with working(claim, for_ever) as task:
        claim.stop(Stop.TIMEOUT)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert task.cancelled()
    assert await outcomes_of(pool, 1) == ["error"]


async def test_a_task_that_was_cancelled_before_and_went_on_is_still_told_of_its_timeout(pool: Pool) -> None:
    claim = await taken(pool)

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(1)
        asyncio.get_running_loop().call_soon(claim.stop, Stop.TIMEOUT)
        async with claim.held():
            await for_ever()

    with pytest.raises(TimeoutError):
        await asyncio.create_task(run())


async def test_a_handler_that_swallows_its_cancellation_leaves_no_trace_of_it_either(pool: Pool) -> None:
    claim = await taken(pool)

    async def run() -> int:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_soon(claim.stop, Stop.TIMEOUT)
        async with claim.held():
            with suppress(asyncio.CancelledError):
                await for_ever()
            await claim.complete(patch="after all")
        return task.cancelling()

    assert await asyncio.create_task(run()) == 0
    assert await status_of(pool, 1) == "drafted"


@pytest.mark.invariant(5)
async def test_a_handler_that_swallows_the_loss_of_its_lease_writes_nothing(pool: Pool) -> None:
    claim = await taken(pool)

    async def run() -> None:
        asyncio.get_running_loop().call_soon(claim.stop, Stop.LOST)
        async with claim.held():
            with suppress(asyncio.CancelledError):
                await for_ever()
            await claim.complete(patch="all the same")

    with pytest.raises(LostClaim):
        await asyncio.create_task(run())
    assert (await row_of(pool, 1))["patch"] is None


@pytest.mark.parametrize("why", [Stop.LOST, Stop.TIMEOUT, Stop.DRAIN])
async def test_a_stop_that_comes_while_the_row_is_completed_comes_too_late(
    pool: Pool, database_url: str, why: Stop
) -> None:
    """Otherwise a claim could be told as lost whose row says that it is done."""
    claim = await taken(pool)
    other = await elsewhere(database_url)
    async with other:
        await other.execute("BEGIN; SELECT FROM patch_sessions FOR UPDATE")
        async with working(claim, lambda: claim.complete(patch="in time")) as task:
            await until_blocked(pool)
            claim.stop(why)
            # Longer than one wait for a lock: it is tried again as long as the lease lasts.
            await until(lambda: nobody_waits(pool))
            await until_blocked(pool)
            await other.execute("COMMIT")
            await task
    assert (claim.outcome, await status_of(pool, 1)) == ("done", "drafted")


async def nobody_waits(pool: Pool) -> bool:
    rows = await sql(
        pool,
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
    )
    return not rows


async def test_a_stop_while_the_row_is_released_changes_nothing(pool: Pool, database_url: str) -> None:
    claim = await taken(pool)

    async def fail() -> None:
        raise ValueError("no")

    other = await elsewhere(database_url)
    async with other:
        await other.execute("BEGIN; SELECT FROM patch_sessions FOR UPDATE")
        async with working(claim, fail) as task:
            await until_blocked(pool)
            claim.stop(Stop.TIMEOUT)
            await other.execute("COMMIT")
            with pytest.raises(ValueError, match="no"):
                await task
    assert await outcomes_of(pool, 1) == ["error"]


@pytest.mark.invariant(6)
async def test_a_cancellation_while_the_row_is_completed_waits_for_it(pool: Pool, database_url: str) -> None:
    claim = await taken(pool)
    other = await elsewhere(database_url)
    async with other:
        await other.execute("BEGIN; SELECT FROM patch_sessions FOR UPDATE")
        async with working(claim, lambda: claim.complete(patch="in time")) as task:
            await until_blocked(pool)
            task.cancel()
            await asyncio.sleep(0)
            await other.execute("COMMIT")
            with pytest.raises(asyncio.CancelledError):
                await task
    assert (await row_of(pool, 1))["patch"] == "in time"
    assert await outcomes_of(pool, 1) == ["done"]


@pytest.mark.invariant(6)
async def test_a_cancellation_during_the_release_waits_for_it(pool: Pool, database_url: str) -> None:
    claim = await taken(pool)

    async def fail() -> None:
        raise ValueError("no")

    other = await elsewhere(database_url)
    async with other:
        await other.execute("BEGIN; SELECT FROM patch_sessions FOR UPDATE")
        async with working(claim, fail) as task:
            await until_blocked(pool)
            for _ in range(3):
                task.cancel()
                await asyncio.sleep(0)
            await other.execute("COMMIT")
            with pytest.raises(asyncio.CancelledError):
                await task
    assert (await row_of(pool, 1))["last_error"] == "ValueError: no"
    assert await outcomes_of(pool, 1) == ["error"]


@pytest.mark.invariant(6)
async def test_a_release_that_fails_leaves_the_row_to_its_lease_and_hides_no_error(
    pool: Pool, database_url: str
) -> None:
    """Case 26: the release itself fails."""
    gate = a_gate()
    claim = await taken(pool)
    other = await elsewhere(database_url)
    async with other:
        with pytest.raises(ValueError, match="the real reason"):
            async with claim.held():
                await other.execute("ALTER TABLE patch_sessions RENAME TO away")
                raise ValueError("the real reason")
        await other.execute("ALTER TABLE away RENAME TO patch_sessions")
    assert await status_of(pool, 1) == "drafting"
    await expire(pool, 1)
    assert await gate.sweep(pool, "drafting") == 1
    await due(pool, 1)
    assert await gate.take(pool, "drafting", 1) is not None


@pytest.mark.invariant(6)
@pytest.mark.parametrize("steps", [*range(12), 15, 20, 30, 50, 100, 200, 400])
async def test_a_task_cancelled_anywhere_leaves_its_row_claimable_or_done(pool: Pool, steps: int) -> None:
    gate = a_gate()
    await opened(pool, gate, 1)

    async def five() -> int:
        return 5

    async def run() -> None:
        async with gate.claim(pool, "drafting", 1) as claim:
            if claim is not None:
                async with claim.transaction() as tx:
                    await tx.execute("UPDATE patch_sessions SET note = 'written' WHERE sc_id = 1")
                await claim.once("five", five, retry_safe=True)
                await claim.complete(patch="diff")

    task = asyncio.create_task(run())
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await status_of(pool, 1) in ("clarified", "drafted")
    assert None not in await outcomes_of(pool, 1)
    assert len(pool.renewer) == 0
    # Every connection came back: as many as there may be can be had at once.
    async with asyncio.timeout(10):
        await asyncio.gather(*(sql(pool, "SELECT pg_sleep(0.01)") for _ in range(20)))


# ---- a claim whose answer is lost


@pytest.mark.invariant(6)
@pytest.mark.parametrize("known", [True, False])
async def test_a_claim_whose_answer_is_lost_is_given_back(pool: Pool, database_url: str, known: bool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1, 2)
    async with pool_over_a_wire(database_url) as (wired_pool, wire):
        await wired_pool.fences()  # so that no block of numbers is drawn on the way
        wire.at(COMMIT, "cut after")
        with pytest.raises(psycopg.OperationalError):
            if known:
                await gate.take(wired_pool, "drafting", 1)
            else:
                await gate.take_next(wired_pool, "drafting", 5)
        assert wire.cuts == 1
    for key in [1] if known else [1, 2]:
        row = await row_of(pool, key)
        assert (row["status"], row["attempt_count"], row["claimed_by"]) == ("clarified", 0, None)
        [attempt] = await attempts_of(pool, key)
        assert (attempt["outcome"], attempt["error"]) == ("interrupted", "the answer to the claim was lost")


@pytest.mark.invariant(6)
async def test_a_claim_cancelled_after_its_commit_is_given_back(pool: Pool, database_url: str) -> None:
    gate = a_gate()
    await opened(pool, gate, 1)
    async with pool_over_a_wire(database_url) as (wired_pool, wire):
        await sql(wired_pool, "SELECT 1")
        wire.at(COMMIT, "hold")
        task = asyncio.create_task(gate.take(wired_pool, "drafting", 1))
        await wire.held.wait()
        assert await status_of(pool, 1) == "drafting"
        task.cancel()
        await asyncio.sleep(0)
        wire.freed.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (await row_of(pool, 1))["attempt_count"] == 0
    assert await status_of(pool, 1) == "clarified"
    assert await outcomes_of(pool, 1) == ["interrupted"]


@pytest.mark.invariant(6)
async def test_a_claim_cancelled_twice_is_given_back_all_the_same(pool: Pool, database_url: str) -> None:
    gate = a_gate()
    await opened(pool, gate, 1)
    other = await elsewhere(database_url)
    async with other, pool_over_a_wire(database_url) as (wired_pool, wire):
        await sql(wired_pool, "SELECT 1")
        wire.at(COMMIT, "hold")
        task = asyncio.create_task(gate.take(wired_pool, "drafting", 1))
        await wire.held.wait()
        await other.execute("BEGIN; SELECT FROM patch_sessions FOR UPDATE")
        task.cancel()
        wire.freed.set()
        await until_blocked(pool)
        task.cancel()
        await asyncio.sleep(0)
        await other.execute("COMMIT")
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (await row_of(pool, 1))["attempt_count"] == 0
    assert await outcomes_of(pool, 1) == ["interrupted"]


async def test_a_claim_cancelled_while_it_waits_for_the_row_claims_nothing(pool: Pool, database_url: str) -> None:
    gate = a_gate()
    await opened(pool, gate, 1)
    other = await elsewhere(database_url)
    async with other, other.transaction():
        await other.execute("SELECT FROM patch_sessions FOR UPDATE")
        task = asyncio.create_task(gate.take(pool, "drafting", 1))
        await until_blocked(pool)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (await row_of(pool, 1))["attempt_count"] == 0
    assert await attempts_of(pool, 1) == []


# ---- an ending whose answer is lost


@pytest.mark.parametrize("how", ["cut after", "cut before"])
async def test_a_completion_whose_answer_is_lost_is_found_to_be_done(pool: Pool, database_url: str, how: Any) -> None:
    gate = a_gate()
    await opened(pool, gate, 1, to="received")
    async with pool_over_a_wire(database_url) as (wired_pool, wire):
        async with gate.claim(wired_pool, "clarifying", 1) as claim:
            assert claim is not None
            wire.at(COMMIT, how, times=2)
            await claim.complete("clarified")
            assert wire.cuts == 2
        assert claim is not None
        assert claim.outcome == "done"
        assert claim.moved == [Ready("patch_sessions", "drafting", 1)]
    assert await status_of(pool, 1) == "clarified"
    assert await outcomes_of(pool, 1) == ["done"]


async def test_a_release_whose_answer_is_lost_is_made_once(pool: Pool, database_url: str) -> None:
    gate = a_gate()
    await opened(pool, gate, 1)
    async with pool_over_a_wire(database_url) as (wired_pool, wire):
        with pytest.raises(ValueError, match="no"):
            async with gate.claim(wired_pool, "drafting", 1) as claim:
                assert claim is not None
                wire.at(COMMIT, "cut after")
                raise ValueError("no")
        assert claim is not None
        assert claim.outcome == "error"
    assert (await row_of(pool, 1))["attempt_count"] == 1
    assert await outcomes_of(pool, 1) == ["error"]


@pytest.mark.invariant(8)
async def test_a_completing_transaction_whose_answer_is_lost_is_found_to_be_done(pool: Pool, database_url: str) -> None:
    gate = a_gate()
    await opened(pool, gate, 1)
    async with pool_over_a_wire(database_url) as (wired_pool, wire):
        async with gate.claim(wired_pool, "drafting", 1) as claim:
            assert claim is not None
            async with claim.transaction() as tx:
                wire.at(COMMIT, "cut after")
                await tx.execute("UPDATE patch_sessions SET note = 'ours' WHERE sc_id = 1")
                await tx.done(patch="diff")
        assert claim is not None
        assert (wire.cuts, claim.outcome) == (1, "done")
    row = await row_of(pool, 1)
    assert (row["status"], row["note"], row["patch"]) == ("drafted", "ours", "diff")


@pytest.mark.invariant(8)
async def test_a_completing_transaction_that_was_cut_before_its_commit_is_an_error(
    pool: Pool, database_url: str
) -> None:
    gate = a_gate()
    await opened(pool, gate, 1)
    async with pool_over_a_wire(database_url) as (wired_pool, wire):
        with pytest.raises(psycopg.OperationalError):
            async with gate.claim(wired_pool, "drafting", 1) as claim:
                assert claim is not None
                async with claim.transaction() as tx:
                    wire.at(COMMIT, "cut before")
                    await tx.execute("UPDATE patch_sessions SET note = 'ours' WHERE sc_id = 1")
                    await tx.done(patch="diff")
    row = await row_of(pool, 1)
    assert (row["status"], row["note"], row["patch"]) == ("clarified", None, None)
    assert await outcomes_of(pool, 1) == ["error"]


@pytest.mark.invariant(6)
async def test_a_claim_whose_pool_was_closed_under_it_ends_at_once(pool: Pool, database_url: str) -> None:
    gate = a_gate()
    await opened(pool, gate, 1)
    async with Pool.open(database_url, settings=Settings()) as closing:
        claim = await gate.take(closing, "drafting", 1)
        assert claim is not None
    async with asyncio.timeout(1):
        with pytest.raises(psycopg.OperationalError):
            async with claim.held():
                await claim.complete(patch="too late")
    assert await status_of(pool, 1) == "drafting"


# ---- writes of your own


@pytest.mark.invariant(5)
@pytest.mark.invariant(8)
async def test_all_of_a_transaction_commits_with_done(pool: Pool) -> None:
    claim = await taken(pool)
    async with claim.held():
        async with claim.transaction() as tx:
            await tx.execute("UPDATE patch_sessions SET note = 'ours' WHERE sc_id = 1")
            done = await tx.done(patch="diff")
            assert await status_of(pool, 1) == "drafting"
        assert (done.status, claim.settled) == ("drafted", True)
    row = await row_of(pool, 1)
    assert (row["status"], row["note"], row["patch"]) == ("drafted", "ours", "diff")
    assert await outcomes_of(pool, 1) == ["done"]


@pytest.mark.invariant(5)
@pytest.mark.invariant(8)
async def test_none_of_a_transaction_commits_when_something_fails_after_done(pool: Pool) -> None:
    claim = await taken(pool)
    with suppress(ValueError):
        async with claim.held(), claim.transaction() as tx:
            await tx.execute("UPDATE patch_sessions SET note = 'ours' WHERE sc_id = 1")
            await tx.done(patch="diff")
            raise ValueError("no")
    row = await row_of(pool, 1)
    assert (row["status"], row["note"], row["patch"]) == ("clarified", None, None)
    assert await outcomes_of(pool, 1) == ["error"]


@pytest.mark.invariant(5)
async def test_a_lost_claim_writes_nothing_through_its_transaction(pool: Pool) -> None:
    claim = await taken(pool)
    ran = False
    with pytest.raises(LostClaim):
        async with claim.held():
            await expire(pool, 1)
            await a_gate().sweep(pool, "drafting")
            async with claim.transaction() as tx:
                ran = True
                await tx.execute("UPDATE patch_sessions SET note = 'ours'")
    assert not ran
    assert (await row_of(pool, 1))["note"] is None


@pytest.mark.invariant(5)
@pytest.mark.parametrize("ending", ["raises", "completes", "writes"])
async def test_a_row_that_somebody_moved_by_hand_stays_where_it_is(pool: Pool, ending: str) -> None:
    """Case 31: by hand, with all that the claim has written still in the row."""
    claim = await taken(pool)
    with pytest.raises((ValueError, LostClaim)):
        async with claim.held():
            await sql(pool, "UPDATE patch_sessions SET status = 'closed' WHERE sc_id = 1")
            if ending == "raises":
                raise ValueError("no")
            if ending == "completes":
                await claim.complete(patch="too late")
            async with claim.transaction() as tx:
                await tx.execute("UPDATE patch_sessions SET patch = 'too late'")
    row = await row_of(pool, 1)
    assert (row["status"], row["patch"], row["last_error"]) == ("closed", None, None)
    assert await outcomes_of(pool, 1) == ["lost"]


async def taken_over(pool: Pool) -> Claim[Any]:
    """The lease of row 1 is over, and somebody else claimed it: the status is the same again."""
    gate = a_gate()
    await expire(pool, 1)
    assert await gate.sweep(pool, "drafting") == 1
    await due(pool, 1)
    second = await gate.take(pool, "drafting", 1)
    assert second is not None
    return second


@pytest.mark.invariant(5)
async def test_an_old_owner_opens_no_transaction_on_a_row_that_another_works_on(pool: Pool) -> None:
    claim = await taken(pool)
    with pytest.raises(LostClaim):
        async with claim.held():
            second = await taken_over(pool)
            async with claim.transaction() as tx:
                await tx.execute("UPDATE patch_sessions SET note = 'of the old owner'")
    assert (await row_of(pool, 1))["note"] is None
    async with second.held():
        await second.complete(patch="of the second")


@pytest.mark.invariant(5)
@pytest.mark.parametrize("error", [ValueError("late"), Snooze(timedelta(hours=1)), Escalate("late"), None], ids=repr)
async def test_an_old_owner_does_not_free_a_row_that_another_works_on(pool: Pool, error: Exception | None) -> None:
    """The most dangerous line: guarded by the status alone it would set somebody else's live claim free."""
    claim = await taken(pool)
    with suppress(ValueError):
        async with claim.held():
            second = await taken_over(pool)
            if error is not None:
                raise error
    row = await row_of(pool, 1)
    assert (row["status"], row["claim_seq"], row["attempt_count"]) == ("drafting", second.claim_seq, 2)
    assert row["lease_until"] is not None
    async with second.held():
        await second.complete(patch="of the second")
    assert await outcomes_of(pool, 1) == ["expired", "done"]


@pytest.mark.invariant(5)
async def test_a_row_that_is_moved_away_inside_the_transaction_takes_its_writes_with_it(pool: Pool) -> None:
    gate = a_gate()
    claim = await taken(pool)
    with pytest.raises(LostClaim):
        async with claim.held(), claim.transaction() as tx:
            await tx.execute("UPDATE patch_sessions SET note = 'ours' WHERE sc_id = 1")
            await gate.advance(tx, 1, "drafting", "closed")
            await tx.done(patch="diff")
    row = await row_of(pool, 1)
    assert (row["status"], row["note"]) == ("drafting", None)
    assert await outcomes_of(pool, 1) == ["lost"]


async def test_a_transaction_holds_the_row_and_lengthens_its_lease(pool: Pool) -> None:
    claim = await taken(pool)
    async with claim.held():
        await sql(pool, "UPDATE patch_sessions SET lease_until = now() + interval '1 second'")
        async with claim.transaction():
            assert await a_gate().sweep(pool, "drafting") == 0
        [left] = await sql(pool, "SELECT lease_until - now() AS lease FROM patch_sessions")
        assert left["lease"] > timedelta(seconds=50)
        await claim.complete()


@pytest.mark.invariant(5)
async def test_an_error_swallowed_by_a_savepoint_does_not_break_the_rest(pool: Pool) -> None:
    claim = await taken(pool)
    async with claim.held(), claim.transaction() as tx:
        await tx.execute("UPDATE patch_sessions SET note = 'kept' WHERE sc_id = 1")
        await tx.execute("SAVEPOINT attempt")
        with pytest.raises(UndefinedTable):
            await tx.execute("SELECT FROM nothing")
        await tx.execute("ROLLBACK TO attempt")
        await tx.done(patch="diff")
    row = await row_of(pool, 1)
    assert (row["status"], row["note"]) == ("drafted", "kept")


@pytest.mark.invariant(5)
async def test_a_savepoint_cannot_swallow_that_the_row_is_gone(pool: Pool) -> None:
    gate = a_gate()
    claim = await taken(pool)
    with pytest.raises(LostClaim):
        async with claim.held(), claim.transaction() as tx:
            await gate.advance(tx, 1, "drafting", "closed")
            await tx.execute("SAVEPOINT attempt")
            with suppress(Exception):
                await tx.done(patch="diff")
            await tx.execute("ROLLBACK TO attempt")
    assert await status_of(pool, 1) == "drafting"


@pytest.mark.invariant(5)
async def test_an_error_swallowed_without_a_savepoint_is_raised_at_the_end(pool: Pool) -> None:
    claim = await taken(pool)
    with pytest.raises(RolledBack):
        async with claim.held(), claim.transaction() as tx:
            await tx.execute("UPDATE patch_sessions SET note = 'ours' WHERE sc_id = 1")
            with suppress(UndefinedTable):
                await tx.execute("SELECT FROM nothing")
    assert (await row_of(pool, 1))["note"] is None


async def test_what_would_wait_for_itself_raises_at_once(pool: Pool) -> None:
    claim = await taken(pool)
    async with claim.held():
        async with claim.transaction():
            for waits in (claim.once("x", for_ever), claim.complete(), claim.transaction().__aenter__()):
                with pytest.raises(RuntimeError, match="would wait for itself"):
                    await waits
        await claim.complete()


async def test_a_row_that_another_transaction_locks_for_long_is_snoozed(pool: Pool, database_url: str) -> None:
    claim = await taken(pool)

    async def write() -> None:
        async with claim.transaction():
            raise AssertionError("the block must not run")

    other = await elsewhere(database_url)
    async with other:
        await other.execute("BEGIN; SELECT FROM patch_sessions FOR UPDATE")
        async with working(claim, write) as task:
            await until_blocked(pool)
            await until(lambda: nobody_waits(pool))
            await other.execute("COMMIT")
            with pytest.raises(LockNotAvailable):
                await task
    assert (await row_of(pool, 1))["attempt_count"] == 0
    assert await outcomes_of(pool, 1) == ["snoozed"]


async def test_a_completion_waits_for_a_connection_as_long_as_its_lease_lasts(pool: Pool) -> None:
    claim = await taken(pool)
    pool.connections.timeout = 0.1
    freed = asyncio.Event()
    busy = 0

    async def occupy() -> None:
        nonlocal busy
        async with pool.connections.connection(timeout=10):
            busy += 1
            await freed.wait()

    others = [asyncio.create_task(occupy()) for _ in range(pool.connections.max_size)]
    await until(lambda: busy == len(others))
    async with working(claim, lambda: claim.complete(patch="diff")) as task:
        before = pool.connections.get_stats().get("requests_errors", 0)
        await until(lambda: pool.connections.get_stats().get("requests_errors", 0) > before)
        freed.set()
        await asyncio.gather(task, *others)
    assert await status_of(pool, 1) == "drafted"


async def test_two_tasks_of_one_claim_may_each_open_a_transaction(pool: Pool) -> None:
    claim = await taken(pool)
    inside = asyncio.Event()

    async def first() -> None:
        async with claim.transaction() as tx:
            await tx.execute("UPDATE patch_sessions SET note = 'first' WHERE sc_id = 1")
            inside.set()
            await until_blocked(pool)

    async def second() -> None:
        await inside.wait()
        async with claim.transaction() as tx:
            await tx.execute("UPDATE patch_sessions SET note = note || ' second' WHERE sc_id = 1")

    async with claim.held():
        await asyncio.gather(first(), second())
        await claim.complete()
    assert (await row_of(pool, 1))["note"] == "first second"


async def test_rows_moved_in_the_transaction_are_told_once_it_is_committed(pool: Pool) -> None:
    gate = a_gate()
    claim = await taken(pool)
    async with claim.held():
        with suppress(ValueError):
            async with claim.transaction() as tx:
                await gate.open(tx, sc_id=7, title="rolled back")
                raise ValueError("no")
        assert claim.moved == []
        async with claim.transaction() as tx:
            await gate.open(tx, sc_id=8, title="committed")
            await tx.done()
    assert claim.moved == [Ready("patch_sessions", "clarifying", 8)]


async def test_a_transaction_of_ours_is_limited_and_leaves_nothing_on_its_session(pool: Pool) -> None:
    """The last of them ends a transaction whose process froze, so that its locks do not outlive its lease."""
    names = ("transaction_isolation", "lock_timeout", "synchronous_commit", "idle_in_transaction_session_timeout")
    async with pool.transaction() as tx:
        limits = [(await (await tx.execute(f"SHOW {name}".encode())).fetchone() or {}).get(name) for name in names]
    assert limits == ["read committed", "1s", "on", "1min"]
    async with pool.connections.connection() as connection:
        row = await (await connection.execute("SHOW lock_timeout")).fetchone()
    assert row == {"lock_timeout": "0"}


# ---- processes


async def holder(url: str, lease_s: float) -> Process:
    """Another process that holds row 1."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "holder", url, "1", str(lease_s), env=ENVIRONMENT, stdin=PIPE, stdout=PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(20):
        assert (await process.stdout.readline()).startswith(b"holds patch_sessions:1")
    return process


@pytest.mark.invariant(6)
async def test_the_row_of_a_killed_process_is_done_by_another_after_the_lease(pool: Pool, database_url: str) -> None:
    gate = a_gate(lease=timedelta(seconds=1))
    await opened(pool, gate, 1)
    process = await holder(database_url, 1)
    assert await gate.take(pool, "drafting", 1) is None
    assert await gate.sweep(pool, "drafting") == 0
    process.kill()
    assert await process.wait() == -signal.SIGKILL

    async def swept() -> bool:
        return await gate.sweep(pool, "drafting") == 1

    await until(swept)
    await due(pool, 1)
    async with gate.claim(pool, "drafting", 1) as claim:
        assert claim is not None
        assert claim.attempt == 2
        await claim.complete(patch="from another")
    assert await outcomes_of(pool, 1) == ["expired", "done"]


@pytest.mark.invariant(5)
async def test_a_process_that_slept_past_its_lease_writes_nothing_when_it_wakes(pool: Pool, database_url: str) -> None:
    """Case 27 with renewal blocked, of a whole process: SIGSTOP, another finishes the row, SIGCONT."""
    gate = a_gate(lease=timedelta(seconds=1))
    await opened(pool, gate, 1)
    process = await holder(database_url, 1)
    process.send_signal(signal.SIGSTOP)

    async def swept() -> bool:
        return await gate.sweep(pool, "drafting") == 1

    await until(swept)
    await due(pool, 1)
    async with gate.claim(pool, "drafting", 1) as claim:
        assert claim is not None
        await claim.complete(patch="from another")
    process.send_signal(signal.SIGCONT)
    assert process.stdin is not None
    process.stdin.write(b"go on\n")
    with suppress(ConnectionError):
        await process.stdin.drain()
    async with asyncio.timeout(20):
        assert await process.wait() != 0
    assert (await row_of(pool, 1))["patch"] == "from another"
    assert await outcomes_of(pool, 1) == ["expired", "done"]


# ---- finished


async def test_what_must_be_finished_is_finished_before_the_cancellation_is_raised() -> None:
    went_on = asyncio.Event()
    ended: list[str] = []

    async def work() -> str:
        await went_on.wait()
        ended.append("work")
        return "result"

    task = asyncio.create_task(finished(work()))
    await asyncio.sleep(0)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    went_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["work"]


async def test_what_is_finished_gives_its_result_or_its_error() -> None:
    async def work(fails: bool) -> str:
        if fails:
            raise ValueError("no")
        return "result"

    assert await finished(work(False)) == "result"
    with pytest.raises(ValueError, match="no"):
        await finished(work(True))


async def test_what_takes_too_long_to_finish_is_left() -> None:
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(TimeoutError):
        await finished(work(), within_s=0.01)
    await cancelled.wait()


# ---- another event loop


def test_claims_end_the_same_under_uvloop(database_url: str) -> None:
    async def story() -> list[str | None]:
        gate = a_gate(lease=timedelta(seconds=1))
        async with Pool.open(database_url, settings=Settings()) as pool:
            await opened(pool, gate, 1)
            claim = await gate.take(pool, "drafting", 1)
            assert claim is not None
            async with working(claim, for_ever) as task:
                claim.stop(Stop.DRAIN)
                with pytest.raises(asyncio.CancelledError):
                    await task
            claim = await gate.take(pool, "drafting", 1)
            assert claim is not None
            async with working(claim, for_ever) as task:
                claim.stop(Stop.TIMEOUT)
                with pytest.raises(TimeoutError):
                    await task
            await due(pool, 1)
            won = await asyncio.gather(*(gate.take(pool, "drafting", 1) for _ in range(30)))
            [claim] = [claim for claim in won if claim is not None]
            with pytest.raises(LostClaim):
                async with claim.held():
                    await expire(pool, 1)
                    assert await gate.sweep(pool, "drafting") == 1
                    await for_ever()
            return await outcomes_of(pool, 1)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(story()) == ["interrupted", "error", "expired"]
