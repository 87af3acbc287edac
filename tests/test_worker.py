"""What a worker claims and when, how it drains, and that nothing a handler or the database does ends it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from consumers import Stack, arrival, arrived, from_shortcut, quick, stack, stories
from gates import (
    attempts_of,
    backends,
    elsewhere,
    make_tickets,
    outcomes_of,
    row_of,
    sql,
    status_of,
    until,
    until_blocked,
)
from pydantic import BaseModel

from webhooks import Claim, Consumer, Done, Event, Gate, GitHub, Pool, Shortcut, Transaction
from webhooks.bell import TELL
from webhooks.db import Ready
from webhooks.errors import LostClaim
from webhooks.lane import AHEAD_S, KNOWN_AFTER, MOST_AHEAD, PASSED_OVER_S, Pace, Turn
from webhooks.statements import Barred
from webhooks.worker import Worker

# So long that nothing is found by polling before the test has failed.
NEVER_S = 3600

Run = Callable[[int], Awaitable[None]]


def drafting(
    run: Run, *, concurrency: int = 4, max_attempts: int = 3, lease: timedelta | None = None, row: Any = dict
) -> tuple[Consumer, Gate[Any]]:
    """Stories become sessions, which are drafted by `run`."""
    shortcut, sessions = Shortcut(), Gate("patch_sessions", key="sc_id", row=row)

    @shortcut.on("story.update")
    async def open_session(event: Event, tx: Transaction) -> None:
        await sessions.open(tx, sc_id=event.data["story_id"], title=event.data["name"])

    @sessions.phase(
        "received", claimed="drafting", done="drafted", concurrency=concurrency, max_attempts=max_attempts, lease=lease
    )
    async def draft(session: Any, claim: Claim[Any]) -> Done:
        await run(int(str(claim.key)))
        return claim.done(patch="a diff")

    return Consumer(gates=[sessions], sources=[shortcut, GitHub()]), sessions


async def nothing(key: int) -> None: ...


async def waiting(pool: Pool, *keys: int, title: str = "a story", **columns: object) -> None:
    """Sessions that wait to be drafted, without anybody being told."""
    given = {"attempt_count": 0, "max_attempts": 3, **columns}
    for key in keys:
        await sql(
            pool,
            "INSERT INTO patch_sessions (sc_id, title, status, attempt_count, max_attempts)"
            " VALUES (%(key)s, %(title)s, 'received', %(attempt_count)s, %(max_attempts)s)",
            key=key,
            title=title,
            **given,
        )


async def drafted(pool: Pool) -> set[int]:
    return {row["sc_id"] for row in await sql(pool, "SELECT sc_id FROM patch_sessions WHERE status = 'drafted'")}


async def until_drafted(pool: Pool, *keys: int, within_s: float = 30) -> None:
    async def all_are() -> bool:
        return set(keys) <= await drafted(pool)

    await until(all_are, within_s)


async def settled(running: Stack, count: int, within_s: float = 30) -> None:
    """Wait until that many deliveries have ended."""

    async def all_are() -> bool:
        done = await running.sql("SELECT id FROM deliveries WHERE status IN ('processed', 'ignored', 'dead')")
        return len(done) >= count

    await until(all_are, within_s)


class Gauge:
    """Counts what runs at once."""

    def __init__(self) -> None:
        self.now = self.most = self.runs = 0

    async def __call__(self, key: int) -> None:
        self.now, self.runs = self.now + 1, self.runs + 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.02)
        self.now -= 1


# Finding work


async def test_what_this_process_accepted_or_moved_is_claimed_without_a_look_at_the_queue(database_url: str) -> None:
    consumer, _ = drafting(nothing)
    async with stack(database_url, consumer, settings=quick(poll_s=NEVER_S)) as running:
        await until_looked(running.worker)
        await running.send(from_shortcut(stories(7)))
        await until_drafted(running.pool, 7)
        # The events of a split request, too.
        await running.send(from_shortcut(stories(8, 9)))
        await until_drafted(running.pool, 8, 9)


async def until_looked(worker: Worker | None) -> None:
    """Wait until every lane has looked through its queue and waits to be told."""
    assert worker is not None
    lanes = list(worker._lanes.values())
    await until(lambda: worker.bell._self_test and not any(lane._scan_now or lane._wake.is_set() for lane in lanes))


async def test_what_others_left_is_found_by_polling(pool: Pool, database_url: str) -> None:
    consumer, _ = drafting(nothing)
    async with stack(database_url, consumer) as running:
        await until_looked(running.worker)
        await waiting(pool, 7)
        await until_drafted(pool, 7)


async def test_another_process_wakes_the_lanes(pool: Pool, database_url: str) -> None:
    consumer, _ = drafting(nothing)
    async with stack(database_url, consumer, settings=quick(poll_s=NEVER_S)) as running:
        await until_looked(running.worker)
        await waiting(pool, 7)
        async with await elsewhere(database_url) as other:
            await other.execute(TELL, {"process": "another"})
        await until_drafted(pool, 7)


async def test_a_retry_is_found_when_its_back_off_is_over(pool: Pool, database_url: str) -> None:
    runs = 0

    async def fails_twice(key: int) -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            raise ValueError("not today")

    consumer, _ = drafting(fails_twice)
    async with stack(database_url, consumer):
        await waiting(pool, 7)
        await until_drafted(pool, 7)
    assert await outcomes_of(pool, 7) == ["error", "error", "done"]


@pytest.mark.parametrize("attempt_count", [0, 1])
async def test_more_work_than_slots_is_done_a_slotful_at_a_time_without_waiting_for_a_poll(
    pool: Pool, database_url: str, attempt_count: int
) -> None:
    gauge = Gauge()
    consumer, _ = drafting(gauge)
    await waiting(pool, *range(30), attempt_count=attempt_count)
    async with stack(database_url, consumer, settings=quick(poll_s=NEVER_S)):
        await until_drafted(pool, *range(30))
    assert 1 < gauge.most <= 4
    assert gauge.runs == 30


async def test_more_deliveries_than_slots_are_all_applied(database_url: str) -> None:
    consumer, _ = drafting(nothing)
    async with stack(database_url, consumer, settings=quick(poll_s=NEVER_S, deliveries_concurrency=2)) as running:
        await until_looked(running.worker)
        for start in range(0, 40, 20):
            await asyncio.gather(*(running.send(from_shortcut(stories(key))) for key in range(start, start + 20)))
        await settled(running, 40)
        await until_drafted(running.pool, *range(40))


@pytest.mark.invariant(4)
async def test_two_workers_on_one_queue_run_each_row_once(pool: Pool, database_url: str) -> None:
    gauge = Gauge()
    consumer, _ = drafting(gauge)
    await waiting(pool, *range(40))
    async with stack(database_url, consumer), stack(database_url, consumer):
        await until_drafted(pool, *range(40))
    assert gauge.runs == 40
    assert len(await sql(pool, "SELECT key FROM attempts")) == 40


async def test_a_row_on_its_last_attempt_after_an_expiry_runs_as_the_only_such_row(
    pool: Pool, database_url: str
) -> None:
    gauge = Gauge()
    consumer, sessions = drafting(gauge)
    await waiting(pool, *range(5), max_attempts=2)
    claims = await sessions.take_next(pool, "drafting", 5)
    assert len(claims) == 5
    await sql(pool, "UPDATE patch_sessions SET lease_until = now() - interval '1 s'")
    assert await sessions.sweep(pool, "drafting") == 5
    await sql(pool, "UPDATE patch_sessions SET not_before = now()")
    async with stack(database_url, consumer, settings=quick(poll_s=NEVER_S)):
        await until_drafted(pool, *range(5))
    assert (gauge.most, gauge.runs) == (1, 5)


async def expired_once(pool: Pool, *keys: int, max_attempts: int = 2) -> None:
    """Rows whose worker died under them, due again."""
    for key in keys:
        await attempted(pool, key, "expired")
    await waiting(pool, *keys, attempt_count=1, max_attempts=max_attempts)


async def attempted(pool: Pool, key: int, outcome: str) -> None:
    await sql(
        pool,
        "INSERT INTO attempts (table_name, key, phase, visit, attempt, ended_at, outcome)"
        " VALUES ('patch_sessions', %(key)s, 'drafting', 1, 1, now(), %(outcome)s)",
        key=str(key),
        outcome=outcome,
    )


async def test_a_row_on_its_last_chance_and_others_on_their_last_attempt_never_run_side_by_side(
    pool: Pool, database_url: str
) -> None:
    """One that kills its worker would cost the others their last attempt, though they have killed nobody."""
    chances, plain = Gauge(), Gauge()
    met: list[int] = []

    async def run(key: int) -> None:
        gauge, other = (chances, plain) if key < 100 else (plain, chances)
        if other.now:
            met.append(key)
        await gauge(key)
        if other.now:
            met.append(key)

    consumer, _ = drafting(run)
    for key in range(4):
        await waiting(pool, *range(100 + 10 * key, 106 + 10 * key), attempt_count=1, max_attempts=2)
        await expired_once(pool, key)
    async with stack(database_url, consumer):
        await until_drafted(pool, *range(4), *(100 + 10 * ten + one for ten in range(4) for one in range(6)))
    assert met == []
    assert (chances.most, chances.runs) == (1, 4)
    assert (1 < plain.most <= 4, plain.runs) == (True, 24)


async def test_a_row_on_its_last_chance_has_its_turn_though_others_on_their_last_attempt_keep_coming(
    pool: Pool, database_url: str
) -> None:
    keys = iter(range(100, 10_000))
    begun: list[int] = []
    turns: list[Turn] = []

    async def run(key: int) -> None:
        if key != 7:
            begun.append(key)
            await waiting(pool, next(keys), attempt_count=1, max_attempts=2)
            # So there is never a moment in which none runs, unless they are made to wait.
            await until(lambda: begun[-1] != key or turns[0].barred == "last attempt")

    consumer, _ = drafting(run)
    await waiting(pool, *(next(keys) for _ in range(8)), attempt_count=1, max_attempts=2)
    async with stack(database_url, consumer, settings=quick(poll_s=0.1)) as running:
        assert running.worker is not None
        turns.append(running.worker._turns["patch_sessions"])
        await until(lambda: turns[0].barred == "last chance")
        await expired_once(pool, 7)
        await until_drafted(pool, 7, within_s=10)


async def test_of_two_lanes_of_a_gate_that_claim_at_the_same_moment_one_has_the_turn(pool: Pool) -> None:
    _, sessions = drafting(nothing)
    await expired_once(pool, 1, 2)
    await waiting(pool, 3, 4, attempt_count=1, max_attempts=2)
    await waiting(pool, 5)
    chance, another, plain, beside, fresh = [
        claim for key in range(1, 6) for claim in await sessions.take_next(pool, "drafting", 1, keys=[key])
    ]
    freed: list[Barred] = []
    turn = Turn(lambda: freed.append(turn.barred))

    assert (turn.begins(fresh), turn.barred) == (True, "nothing")
    assert (turn.begins(chance), turn.barred) == (True, "last attempt")
    assert [turn.begins(claim) for claim in (another, plain)] == [False, False]
    turn.ended(fresh)
    assert freed == []
    turn.ended(chance)
    assert freed == ["nothing"]

    assert [turn.begins(claim) for claim in (plain, beside)] == [True, True]
    assert (turn.begins(another), turn.barred) == (False, "last chance")
    turn.last_chance_waits()
    assert turn.barred == "last attempt"
    turn.ended(plain)
    assert (turn.barred, freed) == ("last attempt", ["nothing"])
    turn.ended(beside)
    assert freed == ["nothing", "nothing"]
    # Whoever was told to wait asks again; what has ended meanwhile is not waited for.
    turn.last_chance_waits()
    assert (turn.barred, turn.begins(another)) == ("nothing", True)


async def test_a_long_last_chance_of_one_gate_does_not_hold_up_that_of_another(pool: Pool, database_url: str) -> None:
    began, over = asyncio.Event(), asyncio.Event()

    async def long(key: int) -> None:
        began.set()
        await over.wait()

    await make_tickets(pool)
    _, sessions = drafting(long)
    tickets = Gate("tickets", key="company, number")

    @tickets.phase("open", claimed="claimed", done="resolved", max_attempts=2)
    async def resolve(ticket: dict[str, Any], claim: Claim[Any]) -> Done:
        return claim.done()

    await expired_once(pool, 7)
    async with stack(database_url, Consumer(gates=[sessions, tickets], sources=[])) as running:
        await began.wait()
        await sql(
            pool,
            "INSERT INTO tickets (company, number, status, attempt_count, max_attempts) VALUES ('a', 1, 'open', 1, 2)",
        )
        await sql(
            pool,
            "INSERT INTO attempts (table_name, key, phase, visit, attempt, ended_at, outcome)"
            " VALUES ('tickets', 'a/1', 'claimed', 1, 1, now(), 'expired')",
        )
        assert running.worker is not None
        running.worker.look()

        async def resolved() -> bool:
            return bool(await sql(pool, "SELECT 1 FROM tickets WHERE status = 'resolved'"))

        await until(resolved)
        assert await status_of(pool, 7) == "drafting"
        over.set()
        await until_drafted(pool, 7)


async def test_while_a_row_runs_that_may_end_the_process_nothing_is_claimed_ahead_of_its_slot(
    pool: Pool, database_url: str
) -> None:
    began, over = asyncio.Event(), asyncio.Event()

    async def run(key: int) -> None:
        if key == 1000:
            began.set()
            await over.wait()

    consumer, _ = drafting(run, max_attempts=5)
    await waiting(pool, *range(2 * KNOWN_AFTER))
    async with stack(database_url, consumer) as running:
        assert running.worker is not None
        lane = running.worker._lanes["patch_sessions", "drafting"]
        await until_drafted(pool, *range(2 * KNOWN_AFTER))
        await until(lambda: lane._room > 4)
        await expired_once(pool, 1000, max_attempts=5)
        await began.wait()
        assert lane._room == 3
        over.set()
        await until_drafted(pool, 1000)
        await until(lambda: lane._room >= 4)


# The order in which rows get their turn


async def filled(pool: Pool, worker: Worker, over: asyncio.Event, *, known: bool) -> None:
    """Keep young rows waiting, more than there are slots for, in this process's own way or as others leave them."""
    first = 1000
    while not over.is_set():
        [left] = await sql(pool, "SELECT count(*) AS waiting FROM patch_sessions WHERE status = 'received'")
        if left["waiting"] < 100:
            keys = range(first, first + 100)
            await sql(
                pool,
                "INSERT INTO patch_sessions (sc_id, title, status) SELECT unnest(%(keys)s::int[]), 'young', 'received'",
                keys=list(keys),
            )
            first = keys.stop
            if known:
                worker.know(Ready("patch_sessions", "drafting", key) for key in keys)
            else:
                worker.look()
        await asyncio.sleep(0.01)


@pytest.mark.invariant(13)
@pytest.mark.parametrize("known", [True, False], ids=["known", "left by others"])
@pytest.mark.parametrize("outcome", ["error", "expired"])
async def test_no_due_row_is_passed_over_for_longer_than_a_second_and_the_wait_for_a_slot(
    pool: Pool, database_url: str, known: bool, outcome: str
) -> None:
    async def run(key: int) -> None:
        await asyncio.sleep(0.005)

    old = range(1, 21)
    consumer, _ = drafting(run)
    over = asyncio.Event()
    async with stack(database_url, consumer, settings=quick(poll_s=NEVER_S)) as running:
        assert running.worker is not None
        filling = asyncio.create_task(filled(pool, running.worker, over, known=known))
        try:
            await until_drafted(pool, 1000)
            # They were tried, and become due under full slots without anybody being told.
            for key in old:
                await attempted(pool, key, outcome)
            await sql(
                pool,
                "INSERT INTO patch_sessions (sc_id, title, status, attempt_count, max_attempts)"
                " SELECT unnest(%(old)s::int[]), 'old', 'received', 1, 5",
                old=list(old),
            )
            await until_drafted(pool, *old)
        finally:
            over.set()
            await filling
        # Within a second the queue is read from its front, and from then on nothing younger is claimed before them.
        [first] = await sql(
            pool,
            "SELECT extract(epoch FROM min(a.claimed_at) - min(opened_at))::float AS waited,"
            " max(opened_at) AS due, min(a.claim_seq) AS first, max(a.claim_seq) AS last"
            " FROM attempts AS a JOIN patch_sessions ON a.key = sc_id::text"
            " WHERE sc_id = ANY(%(old)s) AND outcome = 'done'",
            old=list(old),
        )
        between = await sql(
            pool,
            "SELECT sc_id FROM attempts AS a JOIN patch_sessions ON a.key = sc_id::text"
            " WHERE a.claim_seq BETWEEN %(first)s AND %(last)s AND sc_id >= 1000 AND opened_at > %(due)s",
            **first,
        )
        assert between == []
        # The rest is for a busy machine.
        assert first["waited"] < 10 * PASSED_OVER_S
        waits = await sql(pool, "SELECT 1 FROM patch_sessions WHERE status = 'received' LIMIT 1")
        assert waits, "the slots were full to the end"


JOBS = """
CREATE TABLE jobs (id bigint PRIMARY KEY, priority int NOT NULL, LIKE gated INCLUDING ALL) WITH (fillfactor = 80);
CREATE INDEX jobs_waiting ON jobs (priority DESC, id) WHERE status = 'waiting';
CREATE INDEX jobs_working ON jobs (id) WHERE status = 'working';
"""


@pytest.mark.parametrize("known", [True, False], ids=["known", "left by others"])
async def test_a_priority_holds_for_rows_that_were_tried_and_for_known_ones(
    pool: Pool, database_url: str, known: bool
) -> None:
    for statement in JOBS.split(";"):
        await sql(pool, statement)
    jobs = Gate("jobs", key="id", order_by="priority DESC, id")
    began: list[int] = []
    may_run = asyncio.Semaphore(0)

    @jobs.phase("waiting", claimed="working", done="finished", concurrency=1)
    async def work(job: dict[str, Any], claim: Claim[Any]) -> Done:
        began.append(job["id"])
        await may_run.acquire()
        return claim.done()

    async with stack(database_url, Consumer(gates=[jobs], sources=[]), settings=quick(poll_s=NEVER_S)) as running:
        worker = running.worker
        assert worker is not None

        async def come(keys: range, priority: int, attempts: int = 0) -> None:
            async with pool.transaction() as tx:
                for key in keys:
                    await jobs.open(tx, id=key, priority=priority)
                await tx.execute(
                    "UPDATE jobs SET attempt_count = %(attempts)s WHERE id = ANY(%(keys)s)",
                    {"attempts": attempts, "keys": list(keys)},
                )
            if known:
                worker.know(tx.moved)
            else:
                worker.look()

        await come(range(1, 11), 1)
        await until(lambda: began == [1])
        await come(range(11, 13), 1, attempts=1)
        await come(range(101, 104), 9, attempts=1)
        await come(range(104, 107), 9)
        for _ in range(18):
            may_run.release()
        await until(lambda: len(began) == 18)
    assert began == [1, *range(101, 107), *range(2, 13)]


@pytest.mark.invariant(6)
async def test_the_sweep_frees_what_a_dead_worker_held(pool: Pool, database_url: str) -> None:
    consumer, sessions = drafting(nothing, lease=timedelta(seconds=1))
    await waiting(pool, 7)
    # Claimed by somebody who renews nothing and never ends it.
    assert await sessions.take(pool, "drafting", 7) is not None
    async with stack(database_url, consumer):
        await until_drafted(pool, 7)
    assert await outcomes_of(pool, 7) == ["expired", "done"]


@pytest.mark.invariant(6)
async def test_the_sweep_frees_deliveries_too(database_url: str, pool: Pool) -> None:
    consumer, _ = drafting(nothing)
    [id_] = await arrived(pool, arrival(stories(7)))
    await sql(
        pool,
        "UPDATE deliveries SET status = 'applying', claimed_from = 'received', attempt_count = 1,"
        " lease_until = now() - interval '1 s'",
    )
    async with stack(database_url, consumer) as running:
        await settled(running, 1)
    assert (await sql(pool, "SELECT id, status FROM deliveries")) == [{"id": id_, "status": "processed"}]


async def test_a_row_that_an_open_transaction_refers_to_is_still_found(pool: Pool, database_url: str) -> None:
    await sql(pool, "CREATE TABLE notes (sc_id bigint REFERENCES patch_sessions)")
    await waiting(pool, 7)
    consumer, _ = drafting(nothing)
    async with await elsewhere(database_url) as other:
        await other.execute("BEGIN")
        await other.execute("INSERT INTO notes VALUES (7)")
        async with stack(database_url, consumer):
            await until_drafted(pool, 7)


# The sweep and who completes


@pytest.mark.invariant(5)
async def test_a_sweep_that_meets_a_row_being_completed_writes_nothing(pool: Pool, database_url: str) -> None:
    _, sessions = drafting(nothing)
    await waiting(pool, 7)
    claim = await sessions.take(pool, "drafting", 7)
    assert claim is not None
    await sql(pool, "UPDATE patch_sessions SET lease_until = now() - interval '1 s'")
    async with await elsewhere(database_url) as holder:
        # The completion has written the row, and waits before its commit.
        await holder.execute("BEGIN")
        await holder.execute("SELECT FROM attempts FOR UPDATE")
        completing = asyncio.create_task(claim.complete(patch="a diff"))
        await until_blocked(pool)
        assert await sessions.sweep(pool, "drafting") == 0
        await holder.execute("ROLLBACK")
        await completing
    assert await sessions.sweep(pool, "drafting") == 0
    assert (await row_of(pool, 7))["status"] == "drafted"


@pytest.mark.invariant(5)
async def test_a_completion_that_meets_a_row_being_swept_writes_nothing(pool: Pool, database_url: str) -> None:
    _, sessions = drafting(nothing)
    await waiting(pool, 7)
    claim = await sessions.take(pool, "drafting", 7)
    assert claim is not None
    await sql(pool, "UPDATE patch_sessions SET lease_until = now() - interval '1 s'")
    async with await elsewhere(database_url) as holder:
        await holder.execute("BEGIN")
        await holder.execute("SELECT FROM attempts FOR UPDATE")
        sweeping = asyncio.create_task(sessions.sweep(pool, "drafting"))
        await until_blocked(pool)
        completing = asyncio.create_task(claim.complete(patch="a diff"))
        await until_blocked(pool, 2)
        await holder.execute("ROLLBACK")
        assert await sweeping == 1
        with pytest.raises(LostClaim):
            await completing
    row = await row_of(pool, 7)
    assert (row["status"], row["patch"]) == ("received", None)


# Whatever a handler does


@pytest.mark.invariant(6)
async def test_nothing_that_a_phase_raises_ends_the_worker(pool: Pool, database_url: str) -> None:
    errors = {1: SystemExit(3), 2: KeyboardInterrupt(), 3: BaseException("odd"), 4: ValueError("usual")}

    async def raises(key: int) -> None:
        if key in errors:
            raise errors[key]

    consumer, _ = drafting(raises)
    await waiting(pool, *errors, max_attempts=2)
    async with stack(database_url, consumer) as running:

        async def all_escalated() -> bool:
            return len(await sql(pool, "SELECT sc_id FROM patch_sessions WHERE status = 'escalated'")) == len(errors)

        await until(all_escalated)
        await waiting(pool, 8)
        await until_drafted(pool, 8)
        assert running.worker is not None
        assert running.worker.alive
    assert [await outcomes_of(pool, key) for key in errors] == [["error", "error"]] * len(errors)


@pytest.mark.invariant(6)
async def test_an_event_handler_that_exits_is_charged_and_writes_nothing(database_url: str) -> None:
    shortcut = Shortcut()

    @shortcut.on("story.update")
    async def handle(event: Event, tx: Transaction) -> None:
        await tx.execute("INSERT INTO decisions (table_name, key, decision, decided_by, reason) SELECT '','','','',''")
        raise SystemExit("leaving")

    settings = quick(poll_s=0.05, backoff_max_s=0.05)
    async with stack(database_url, Consumer(gates=[], sources=[shortcut]), settings=settings) as running:
        await running.send(from_shortcut(stories(7)))
        await settled(running, 1)
        [row] = await running.deliveries()
        assert (row["status"], row["attempt_count"]) == ("dead", 5)
        assert "SystemExit" in row["last_error"]
        assert await running.sql("SELECT id FROM decisions") == []


async def test_a_row_that_does_not_fit_its_model_is_released_and_the_others_run(pool: Pool, database_url: str) -> None:
    class Row(BaseModel):
        sc_id: int
        title: str
        note: int | None

    consumer, _ = drafting(nothing, row=Row)
    await waiting(pool, *range(5))
    await sql(pool, "UPDATE patch_sessions SET note = 'no number' WHERE sc_id = 1")
    async with stack(database_url, consumer):

        async def escalated() -> bool:
            return await status_of(pool, 1) == "escalated"

        await until(escalated)
        await until_drafted(pool, 0, 2, 3, 4)
    row = await row_of(pool, 1)
    assert (row["attempt_count"], "note" in row["last_error"]) == (3, True)


@pytest.mark.invariant(6)
async def test_a_phase_that_blocks_the_loop_for_longer_than_its_lease_keeps_its_row(
    pool: Pool, database_url: str
) -> None:
    async def blocks(key: int) -> None:
        time.sleep(2.2)  # noqa: ASYNC251 - what it is about

    consumer, _ = drafting(blocks, lease=timedelta(seconds=1))
    await waiting(pool, 7)
    async with stack(database_url, consumer), stack(database_url, consumer):
        await until_drafted(pool, 7)
    assert await outcomes_of(pool, 7) == ["done"]


@pytest.mark.invariant(6)
async def test_an_event_handler_that_runs_for_longer_than_the_lease_keeps_its_delivery(database_url: str) -> None:
    shortcut = Shortcut()

    @shortcut.on("story.update")
    async def handle(event: Event, tx: Transaction) -> None:
        await asyncio.sleep(1.5)

    consumer, settings = Consumer(gates=[], sources=[shortcut]), quick(lease_s=1)
    async with stack(database_url, consumer, settings=settings) as running, stack(database_url, consumer):
        await running.send(from_shortcut(stories(7)))
        await settled(running, 1)
        [row] = await running.deliveries()
        assert (row["status"], await outcomes_of(running.pool, row["id"])) == ("processed", ["done"])


# Drain


@pytest.mark.invariant(6)
async def test_what_runs_ends_before_a_worker_stops_and_nothing_more_is_claimed(pool: Pool, database_url: str) -> None:
    started, may_end = asyncio.Event(), asyncio.Event()

    async def waits(key: int) -> None:
        started.set()
        await may_end.wait()

    consumer, _ = drafting(waits, concurrency=1)
    await waiting(pool, 7, 8)
    async with stack(database_url, consumer) as running:
        assert running.worker is not None
        await started.wait()
        stopping = asyncio.create_task(running.worker.stop())
        await until(lambda: not running.worker or not running.worker._tasks)
        may_end.set()
        await stopping
        assert [await status_of(pool, key) for key in (7, 8)] == ["drafted", "received"]
    assert await outcomes_of(pool, 8) == []


@pytest.mark.invariant(6)
async def test_what_runs_for_longer_than_the_drain_is_interrupted_uncharged_and_can_be_claimed_at_once(
    pool: Pool, database_url: str
) -> None:
    started = asyncio.Event()

    async def waits(key: int) -> None:
        started.set()
        await asyncio.Event().wait()

    consumer, sessions = drafting(waits)
    await waiting(pool, 7)
    async with stack(database_url, consumer) as running:
        assert running.worker is not None
        await started.wait()
        await running.worker.stop(drain_s=0.05)
    row = await row_of(pool, 7)
    assert (row["status"], row["attempt_count"]) == ("received", 0)
    assert await outcomes_of(pool, 7) == ["interrupted"]
    assert await sessions.take(pool, "drafting", 7) is not None


@pytest.mark.invariant(6)
async def test_leases_are_renewed_while_a_worker_drains(pool: Pool, database_url: str) -> None:
    started = asyncio.Event()

    async def takes_long(key: int) -> None:
        started.set()
        await asyncio.sleep(2.2)

    consumer, sessions = drafting(takes_long, lease=timedelta(seconds=1))
    await waiting(pool, 7)
    async with stack(database_url, consumer) as running:
        assert running.worker is not None
        await started.wait()
        stopping = asyncio.create_task(running.worker.stop(drain_s=10))
        while not stopping.done():
            assert await sessions.sweep(pool, "drafting") == 0
            await asyncio.sleep(0.2)
        await stopping
    assert await outcomes_of(pool, 7) == ["done"]


async def test_a_handler_that_ignores_its_cancellation_does_not_hold_up_the_stop(
    pool: Pool, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webhooks.worker.SETTLE_S", 0.1)
    started, over = asyncio.Event(), asyncio.Event()

    async def stubborn(key: int) -> None:
        started.set()
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue

    consumer, _ = drafting(stubborn)
    await waiting(pool, 7)
    async with stack(database_url, consumer) as running:
        assert running.worker is not None
        await started.wait()
        async with asyncio.timeout(2):
            await running.worker.stop(drain_s=0)
        over.set()
        await until_drafted(pool, 7)


# Connections


async def test_a_worker_outlives_the_loss_of_every_connection(database_url: str) -> None:
    started, lost = asyncio.Event(), asyncio.Event()

    async def waits(key: int) -> None:
        if key == 7:
            started.set()
            await lost.wait()

    consumer, _ = drafting(waits)
    async with stack(database_url, consumer) as running, await elsewhere(database_url) as other:
        assert running.worker is not None
        await running.send(from_shortcut(stories(7)))
        await started.wait()
        await other.execute("SELECT count(pg_terminate_backend(pid)) FROM unnest(%s) AS pid", (backends(database_url),))
        lost.set()

        async def ended() -> bool:
            outcomes = await other.execute("SELECT key, outcome FROM attempts WHERE table_name = 'patch_sessions'")
            return await outcomes.fetchall() == [{"key": "7", "outcome": "done"}]

        # What was running is not charged for the loss.
        await until(ended)
        assert (await running.send(from_shortcut(stories(8)))).status_code == 202
        await until_drafted(running.pool, 7, 8)
        assert running.worker.alive


LISTENING = (
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'webhooks'"
    " AND query IN ('LISTEN webhooks', 'SELECT 1')"
)


async def test_a_lost_listen_connection_is_made_again_and_what_was_told_meanwhile_is_looked_for(
    database_url: str, pool: Pool
) -> None:
    consumer, _ = drafting(nothing)
    async with stack(database_url, consumer, settings=quick(poll_s=NEVER_S)) as running:
        await until_looked(running.worker)
        [listening] = await sql(pool, LISTENING)
        await sql(pool, "SELECT pg_terminate_backend(%(pid)s)", **listening)
        await waiting(pool, 7)
        await until_drafted(pool, 7)
        await until_looked(running.worker)
        await waiting(pool, 8)
        async with await elsewhere(database_url) as other:
            await other.execute(TELL, {"process": "another"})
        await until_drafted(pool, 8)


async def test_while_nobody_listens_work_is_found_by_polling(
    database_url: str, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer, _ = drafting(nothing)
    async with stack(database_url, consumer) as running:
        await until_looked(running.worker)
        monkeypatch.setattr("webhooks.bell.LISTEN_AGAIN_AFTER_S", NEVER_S)
        [listening] = await sql(pool, LISTENING)
        await sql(pool, "SELECT pg_terminate_backend(%(pid)s)", **listening)
        await waiting(pool, 7)
        await until_drafted(pool, 7)


# Life


async def test_a_worker_is_alive_from_start_to_stop(pool: Pool) -> None:
    consumer, _ = drafting(nothing)
    worker = Worker(pool, consumer)
    assert not worker.alive
    worker.start()
    await until(lambda: worker.alive)
    await worker.stop()
    assert not worker.alive


async def test_a_worker_stops_at_whatever_moment_it_is_told_to(database_url: str) -> None:
    consumer, _ = drafting(nothing)
    for steps in range(10):
        async with Pool.open(database_url, settings=quick()) as pool:
            worker = Worker(pool, consumer)
            worker.start()
            for _ in range(steps):
                await asyncio.sleep(0)
            async with asyncio.timeout(5):
                await worker.stop()


async def test_a_cancellation_that_comes_with_a_connection_is_not_lost(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webhooks.pool.MOST_CONNECTIONS", 1)
    async with Pool.open(database_url, settings=quick()) as pool:

        async def holds(until_: asyncio.Event) -> None:
            async with pool.connection():
                await until_.wait()

        for steps in range(12):
            free, never = asyncio.Event(), asyncio.Event()
            first = asyncio.create_task(holds(free))
            await until(lambda: pool.connections.get_stats()["pool_available"] == 0)
            second = asyncio.create_task(holds(never))
            await until(lambda: pool.connections.get_stats()["requests_waiting"] == 1)
            free.set()
            for _ in range(steps):
                await asyncio.sleep(0)
            second.cancel()
            await asyncio.wait({first, second}, timeout=1)
            assert second.cancelled(), f"lost after {steps} steps"


async def test_a_row_of_a_table_that_nobody_drives_is_passed_over(pool: Pool) -> None:
    consumer, _ = drafting(nothing)
    Worker(pool, consumer).know([Ready("issues", "claimed", 1), Ready("patch_sessions", "opening", 1)])


async def test_a_phase_without_a_function_is_swept_and_not_run(pool: Pool, database_url: str) -> None:
    sessions = Gate("patch_sessions", key="sc_id")
    sessions.phase("received", claimed="drafting", done="drafted", lease=timedelta(seconds=1))
    await waiting(pool, 7, 8)
    assert await sessions.take(pool, "drafting", 7) is not None
    async with stack(database_url, Consumer(gates=[sessions], sources=[])):

        async def freed() -> bool:
            return await status_of(pool, 7) == "received"

        await until(freed)
    assert await outcomes_of(pool, 7) == ["expired"]
    assert await attempts_of(pool, 8) == []


async def test_who_waits_in_vain_for_a_connection_is_not_charged(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webhooks.pool.MOST_CONNECTIONS", 2)
    free = asyncio.Event()
    shortcut = Shortcut()

    @shortcut.on("story.update")
    async def handle(event: Event, tx: Transaction) -> None:
        await free.wait()  # with its connection

    consumer, settings = Consumer(gates=[], sources=[shortcut]), quick(deliveries_concurrency=8)
    async with stack(database_url, consumer, settings=settings) as running:
        connections = running.pool.connections
        await asyncio.gather(*(running.send(from_shortcut(stories(key))) for key in range(8)))
        connections.timeout = 0.1
        await until(lambda: connections.get_stats().get("requests_errors", 0) >= 6)
        free.set()
        connections.timeout = 3
        await settled(running, 8)
        assert {row["status"] for row in await running.deliveries()} == {"processed"}
        attempts = await running.sql("SELECT outcome, error FROM attempts")
    assert {attempt["outcome"] for attempt in attempts} == {"done", "snoozed"}
    assert any("PoolTimeout" in (attempt["error"] or "") for attempt in attempts)


# ---- rows claimed ahead of their slot


def test_rows_are_claimed_ahead_only_where_functions_have_been_quick_for_a_while() -> None:
    pace = Pace()
    for _ in range(KNOWN_AFTER - 1):
        pace.ran(0.0001)
    assert pace.ahead(4) == 0
    pace.ran(0.0001)
    assert pace.ahead(4) == MOST_AHEAD
    pace.ran(0.02)
    assert pace.ahead(4) == 10
    pace.ran(600)
    assert pace.ahead(4) == 0
    for _ in range(60):
        pace.ran(0.0001)
    assert pace.ahead(4) == 0  # one slow run is not forgotten soon


async def test_a_row_claimed_ahead_goes_back_uncharged_when_no_slot_comes_free(pool: Pool, database_url: str) -> None:
    slow = asyncio.Event()
    stuck: list[int] = []

    async def work(key: int) -> None:
        if key >= 1000:
            stuck.append(key)
            await slow.wait()

    consumer, _ = drafting(work)
    # Quick ones first, so that the lane dares to claim ahead; then four that take every slot.
    await waiting(pool, *range(100))
    async with stack(database_url, consumer, settings=quick()) as running:
        await until_drafted(pool, *range(100))
        await waiting(pool, *range(1000, 1020))
        assert running.worker is not None
        running.worker.look()

        async def gave_back() -> bool:
            rows = await sql(pool, "SELECT 1 FROM attempts WHERE outcome = 'snoozed' AND key::int >= 1000")
            return len(stuck) == 4 and bool(rows)

        await until(gave_back)
        rows = await sql(pool, "SELECT attempt_count FROM patch_sessions WHERE status = 'received'")
        assert {row["attempt_count"] for row in rows} == {0}
        assert len(stuck) == 4
        slow.set()
        await until_drafted(pool, *range(1000, 1020))


async def test_a_lane_that_claimed_ahead_and_then_meets_slow_work_rests_until_a_slot_is_free(
    pool: Pool, database_url: str
) -> None:
    slow = asyncio.Event()

    async def work(key: int) -> None:
        if key >= 1000:
            await slow.wait()

    consumer, _ = drafting(work)
    await waiting(pool, *range(100))
    async with stack(database_url, consumer, settings=quick()) as running:
        await until_drafted(pool, *range(100))
        await waiting(pool, *range(1000, 1020))
        assert running.worker is not None
        running.worker.know(Ready("patch_sessions", "drafting", key) for key in range(1000, 1020))
        lane = running.worker._lanes["patch_sessions", "drafting"]
        await until(lambda: len(lane._working) > 4)
        # What runs now is slow, so there is less than no room; rows that are known wait all the same.
        await asyncio.sleep(2 * AHEAD_S)
        assert lane._room == 0
        running.worker.know([Ready("patch_sessions", "drafting", 1)])
        looks = lane.seen_at
        async with asyncio.timeout(5):
            await asyncio.sleep(0.2)  # the loop of the process still turns
        assert lane.seen_at - looks < 0.2
        slow.set()
        await until_drafted(pool, *range(1000, 1020))


async def test_a_queue_is_not_asked_over_and_over_while_every_slot_is_taken(pool: Pool, database_url: str) -> None:
    slow = asyncio.Event()

    async def work(key: int) -> None:
        if key >= 1000:
            await slow.wait()

    consumer, _ = drafting(work)
    await waiting(pool, *range(100))
    async with stack(database_url, consumer, settings=quick(poll_s=NEVER_S)) as running:
        await until_drafted(pool, *range(100))
        await waiting(pool, *range(1000, 1004))
        assert running.worker is not None
        lane = running.worker._lanes["patch_sessions", "drafting"]
        running.worker.look()
        await until(lambda: len(lane._working) == 4)
        await asyncio.sleep(2 * AHEAD_S)
        before = lane.seen_at
        await asyncio.sleep(0.3)
        assert lane.seen_at == before
        slow.set()
        await until_drafted(pool, *range(1000, 1004))


class Jumping:
    """A clock that stands still, and once told to, is an hour later at every second look."""

    def __init__(self) -> None:
        self.jumps = False
        self.looks = 0

    def __call__(self) -> float:
        self.looks += self.jumps
        return 3600.0 * (self.jumps and self.looks % 2 == 0)


@pytest.mark.parametrize("known", [True, False], ids=["known", "looked for"])
async def test_room_that_goes_between_two_looks_at_it_does_not_stop_a_lane(
    pool: Pool, database_url: str, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    monkeypatch.setattr("webhooks.lane.AFTER_A_FAILURE_S", NEVER_S)
    slow, clock = asyncio.Event(), Jumping()

    async def work(key: int) -> None:
        if key >= 1000:
            await slow.wait()

    consumer, _ = drafting(work)
    await waiting(pool, *range(KNOWN_AFTER), 1000, 1001, 1002, 1003)
    async with Pool.open(database_url, settings=quick(poll_s=NEVER_S)) as own:
        worker = Worker(own, consumer)
        lane = worker._lanes["patch_sessions", "drafting"]
        lane._pace = Pace(clock)
        worker.start()
        await until(lambda: len(lane._working) == 4)
        await until_drafted(pool, *range(KNOWN_AFTER))
        # Four run for no time, so that more rows may be claimed ahead; at the second look they have run for an hour.
        await waiting(pool, 1004)
        clock.jumps = True

        async def claimed() -> bool:
            if known:
                lane.know(1004)
            else:
                lane.look()
            return bool(await attempts_of(pool, 1004))

        await until(claimed, within_s=10)
        clock.jumps = False
        slow.set()
        await until_drafted(pool, *range(1000, 1005))
        await worker.stop()
