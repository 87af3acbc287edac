"""A row is not free while a thread works for it, however its function has ended, until the process is gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from consumers import Stack, from_shortcut, quick, stack, stories
from gates import a_gate, due, opened, outcomes_of, row_of, sql, status_of, until

from webhooks import Claim, Consumer, Done, Escalate, Event, Gate, Pool, Shortcut, Snooze, Transaction
from webhooks.threads import Executor, Running

LEASE = timedelta(seconds=2)


class Blocking:
    """What runs in a thread until it is let go."""

    def __init__(self) -> None:
        self.began, self.may_end, self.has_ended = threading.Event(), threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.began.set()
        self.may_end.wait(60)
        self.has_ended.set()


@pytest.fixture
def blocking() -> Iterator[Blocking]:
    call = Blocking()
    yield call
    call.may_end.set()


def working(run: Callable[[], Awaitable[Any]], timeout: timedelta = timedelta(minutes=1)) -> Consumer:
    sessions = Gate("patch_sessions", key="sc_id")

    @sessions.phase("clarified", claimed="drafting", done="drafted", lease=LEASE, timeout=timeout, max_attempts=3)
    async def draft(session: dict[str, Any], claim: Claim[Any]) -> Done:
        await run()
        return claim.done()

    return Consumer(gates=[sessions], sources=[])


@asynccontextmanager
async def begun(url: str, pool: Pool, consumer: Consumer, blocking: Blocking) -> AsyncIterator[Stack]:
    """A worker whose thread is at work for row 7."""
    await opened(pool, a_gate(), 7)
    async with stack(url, consumer, settings=quick(backoff_base_s=60, backoff_max_s=60)) as running:
        await until(blocking.began.is_set)
        yield running


async def is_renewed(pool: Pool, key: int) -> None:
    """Wait until a lease is longer than it was."""
    before = (await row_of(pool, key))["lease_until"]

    async def longer() -> bool:
        found = await row_of(pool, key)
        assert (found["status"], found["claim_seq"] is not None) == ("drafting", True)
        return bool(found["lease_until"] > before)

    await until(longer)


@pytest.mark.invariant(6)
async def test_a_drained_row_stays_claimed_and_renewed_until_its_thread_has_ended_and_goes_back_uncharged(
    pool: Pool, database_url: str, blocking: Blocking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webhooks.worker.SETTLE_S", 0.05)
    async with begun(database_url, pool, working(lambda: asyncio.to_thread(blocking)), blocking) as running:
        assert running.worker is not None
        await running.worker.stop(drain_s=0.05)
        for _ in range(4):  # past the lease that it was claimed with
            await is_renewed(pool, 7)
            assert await a_gate(lease=LEASE).sweep(pool, "drafting") == 0
        assert running.pool.threads.waiting == {"patch_sessions:7"}
        blocking.may_end.set()
        await until(lambda: not running.pool.threads.waiting)
    row = await row_of(pool, 7)
    assert (row["status"], row["attempt_count"]) == ("clarified", 0)
    assert await outcomes_of(pool, 7) == ["interrupted"]
    assert await a_gate().take(pool, "drafting", 7) is not None


async def gives_up(call: Blocking) -> None:
    async with asyncio.timeout(0.05):
        await asyncio.to_thread(call)


async def fails_beside(call: Blocking) -> None:
    async def fails() -> None:
        await until(call.began.is_set)
        raise ValueError("beside it")

    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.to_thread(call))
        group.create_task(fails())


async def leaves(call: Blocking, error: Exception) -> None:
    asyncio.get_running_loop().run_in_executor(None, call)
    raise error


@pytest.mark.parametrize(
    ("run", "timeout", "outcome", "status"),
    [
        (asyncio.to_thread, 0.5, "error", "clarified"),
        (gives_up, 60, "error", "clarified"),
        (fails_beside, 60, "error", "clarified"),
        (lambda call: leaves(call, Snooze(timedelta(hours=1))), 60, "snoozed", "clarified"),
        (lambda call: leaves(call, Escalate("a person is to look")), 60, "escalated", "escalated"),
    ],
    ids=["past its phase's timeout", "past a time-out of its own", "a group failed", "snoozed", "escalated"],
)
async def test_a_row_stays_claimed_while_a_thread_works_for_it_however_its_function_has_ended(
    pool: Pool,
    database_url: str,
    blocking: Blocking,
    run: Callable[[Blocking], Awaitable[Any]],
    timeout: float,  # noqa: ASYNC109 - the phase's
    outcome: str,
    status: str,
) -> None:
    consumer = working(lambda: run(blocking), timedelta(seconds=timeout))
    async with begun(database_url, pool, consumer, blocking) as running:
        await until(lambda: running.pool.threads.waiting == {"patch_sessions:7"})
        for _ in range(2):
            await is_renewed(pool, 7)
        blocking.may_end.set()

        async def ended() -> bool:
            return await status_of(pool, 7) == status

        await until(ended)
    assert await outcomes_of(pool, 7) == [outcome]


async def test_a_delivery_is_not_applied_again_while_a_thread_works_for_it(
    database_url: str, blocking: Blocking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webhooks.apply.HANDLER_LIMIT_S", 0.1)
    shortcut, runs = Shortcut(), 0

    @shortcut.on("story.update")
    async def handle(event: Event, tx: Transaction) -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            await asyncio.to_thread(blocking)

    async with stack(database_url, Consumer(gates=[], sources=[shortcut])) as running:
        await running.send(from_shortcut(stories(7)))
        await until(lambda: running.pool.threads.waiting == {"deliveries:1"})
        await running.send(from_shortcut(stories(7)))
        [first, *_] = await running.deliveries()
        assert (first["status"], first["id"]) == ("applying", 1)
        blocking.may_end.set()

        async def processed() -> bool:
            return {row["status"] for row in await running.deliveries()} == {"processed"}

        await until(processed)


async def test_a_thread_that_has_ended_is_not_waited_for(pool: Pool, database_url: str, blocking: Blocking) -> None:
    blocking.may_end.set()

    async def fails() -> None:
        await asyncio.to_thread(blocking)
        raise ValueError("after it")

    async with begun(database_url, pool, working(fails), blocking) as running:

        async def failed() -> bool:
            return await outcomes_of(pool, 7) == ["error"]

        await until(failed)
        assert running.pool.threads.waiting == set()


async def test_a_claim_held_in_another_one_keeps_both_rows_for_its_threads(pool: Pool, blocking: Blocking) -> None:
    asyncio.get_running_loop().set_default_executor(pool.threads.executor)
    gate = a_gate()
    await opened(pool, gate, 7, 8, 9)

    async def both() -> None:
        async with gate.claim(pool, "drafting", 7) as outer, gate.claim(pool, "drafting", 8) as inner:
            assert outer is not None
            assert inner is not None
            await asyncio.to_thread(blocking)

    working = asyncio.create_task(both())
    await until(blocking.began.is_set)
    async with gate.claim(pool, "drafting", 9) as claim:
        assert claim is not None
        await claim.complete()
    working.cancel()
    await until(lambda: pool.threads.waiting == {"patch_sessions:8"})
    blocking.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert [await status_of(pool, key) for key in (7, 8, 9)] == ["clarified", "clarified", "drafted"]


async def test_a_pool_is_closed_once_no_thread_works_for_a_claim(
    pool: Pool, database_url: str, blocking: Blocking
) -> None:
    closing = asyncio.Event()
    sessions = a_gate()
    await opened(pool, sessions, 7)

    async def use() -> None:
        async with Pool.open(database_url, settings=quick()) as own:
            asyncio.get_running_loop().set_default_executor(own.threads.executor)

            async def work() -> None:
                async with a_gate(lease=LEASE).claim(own, "drafting", 7) as claim:
                    assert claim is not None
                    await asyncio.to_thread(blocking)

            task = asyncio.create_task(work())
            await until(blocking.began.is_set)
            task.cancel()
            await until(lambda: own.threads.waiting)
            closing.set()
        await asyncio.gather(task, return_exceptions=True)

    using = asyncio.create_task(use())
    await closing.wait()
    for _ in range(2):
        await is_renewed(pool, 7)
    assert not using.done()
    blocking.may_end.set()
    await using
    # A cancellation of somebody else's is charged.
    assert (await status_of(pool, 7), await outcomes_of(pool, 7)) == ("clarified", ["error"])


async def test_rows_of_a_process_that_is_about_to_be_gone_are_let_go_for_when_it_is(
    pool: Pool, database_url: str, blocking: Blocking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webhooks.worker.SETTLE_S", 0.05)
    async with begun(database_url, pool, working(lambda: asyncio.to_thread(blocking)), blocking) as running:
        assert running.worker is not None
        await running.worker.stop(drain_s=0.05)
        assert running.pool.threads.leave() == {"patch_sessions:7"}
        await running.pool.threads.all_ended()
        [row] = await sql(
            pool,
            "SELECT status, attempt_count, extract(epoch FROM not_before - a.ended_at)::float AS rests, outcome"
            " FROM patch_sessions JOIN attempts AS a ON a.key = sc_id::text",
        )
        assert not blocking.has_ended.is_set()
    assert (row["status"], row["attempt_count"], row["outcome"]) == ("clarified", 0, "interrupted")
    assert row["rests"] == pytest.approx(5)
    await due(pool, 7)
    assert await a_gate().take(pool, "drafting", 7) is not None


def test_a_call_is_known_to_the_claim_it_was_begun_under_alone() -> None:
    executor, call, first, second = Executor(), Blocking(), Running(), Running()
    with first.noted():
        began = executor.submit(call)
        with second.noted():
            pass
    executor.submit(call)
    assert (first.calls, second.calls) == ([began], [])
    call.may_end.set()
    executor.shutdown()
    assert first.calls == []
