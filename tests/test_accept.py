"""Storing deliveries in groups, what a second copy does, and what is answered when the database does not."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
from consumers import arrival, quick, stories
from gates import elsewhere, sql, until_blocked
from structlog.testing import capture_logs
from wire import How, wired

from webhooks import Consumer, Event, Gate, GitHub, Pool, Shortcut, Transaction, accept
from webhooks.accept import Accepter
from webhooks.db import Ready
from webhooks.delivery import Delivery
from webhooks.errors import Unavailable
from webhooks.inbox import Accepted, Status, inbox


def consumer() -> Consumer:
    return Consumer(gates=[Gate("patch_sessions", key="sc_id")], sources=[Shortcut(), GitHub()])


def with_a_handler() -> Consumer:
    shortcut = Shortcut()

    @shortcut.on("story.update")
    async def handle(event: Event, tx: Transaction) -> None: ...

    return Consumer(gates=[], sources=[shortcut])


class Inbox:
    """A pool, an accepter over it, and what the accepter told the worker."""

    def __init__(self, pool: Pool, uses: Consumer) -> None:
        self.pool = pool
        self.told: list[object] = []
        self.accepter = Accepter(pool, uses, self._tell)

    def _tell(self, ready: Any) -> None:
        self.told += [row.key for row in ready]

    async def all(self, *deliveries: Delivery) -> list[Accepted]:
        return list(await asyncio.gather(*(self.accepter.accept(delivery) for delivery in deliveries)))

    async def sql(self, text: Any, **params: object) -> list[dict[str, Any]]:
        return await sql(self.pool, text, **params)

    async def rows(self) -> list[dict[str, Any]]:
        return await self.sql("SELECT * FROM deliveries ORDER BY id")


@pytest.fixture
async def here(database_url: str) -> AsyncIterator[Inbox]:
    async with Pool.open(database_url, settings=quick()) as pool:
        found = Inbox(pool, consumer())
        await found.accepter.start()
        yield found
        await found.accepter.stop()


async def applied(here: Inbox, id: int, status: str, **columns: object) -> None:
    """Move a delivery to where applying it would have brought it."""
    columns = {"claimed_from": None, "attempt_count": 0, "last_error": None, "reason": None, **columns}
    await here.sql(
        "UPDATE deliveries SET status = %(status)s, claimed_from = %(claimed_from)s, reason = %(reason)s,"
        " attempt_count = %(attempt_count)s, last_error = %(last_error)s WHERE id = %(id)s",
        id=id,
        status=status,
        **columns,
    )


# Groups and copies


@pytest.mark.invariant(3)
async def test_copies_in_one_flush_are_one_row_and_the_first_is_the_new_one(here: Inbox) -> None:
    answers = await here.all(*(arrival(b"%d" % number, key="one") for number in range(20)))
    [row] = await here.rows()
    assert [answer.status for answer in answers] == ["accepted"] + ["duplicate"] * 19
    assert {answer.delivery for answer in answers} == {row["id"]}
    assert row["body"] == b"0"


@pytest.mark.invariant(3)
async def test_copies_across_flushes_are_one_row(here: Inbox) -> None:
    answers = [(await here.all(arrival(b"x", key="one")))[0] for _ in range(3)]
    assert [answer.status for answer in answers] == ["accepted", "duplicate", "duplicate"]
    assert len(await here.rows()) == 1


@pytest.mark.invariant(3)
async def test_copies_across_two_receivers_are_one_row_each_and_do_not_deadlock(here: Inbox) -> None:
    other = Inbox(here.pool, consumer())
    await other.accepter.start()
    keys = [f"key-{number:03}" for number in range(200)]
    for _ in range(3):
        one, two = await asyncio.gather(
            here.all(*(arrival(b"x", key=key) for key in keys)),
            other.all(*(arrival(b"x", key=key) for key in reversed(keys))),
        )
        assert [answer.delivery for answer in one] == [answer.delivery for answer in reversed(two)]
        keys = [key + "+" for key in keys]
    await other.accepter.stop()
    assert len(await here.rows()) == 600


async def test_many_deliveries_are_stored_by_few_transactions_of_at_most_200(here: Inbox) -> None:
    answers = await here.all(*(arrival(b"x") for _ in range(450)))
    assert {answer.status for answer in answers} == {"accepted"}
    groups = await here.sql("SELECT count(*) FROM deliveries GROUP BY accepted_xid ORDER BY 1")
    assert [group["count"] for group in groups] == [50, 200, 200]


async def test_a_group_holds_at_most_8_mib(here: Inbox) -> None:
    await here.all(*(arrival(bytes(3 << 20)) for _ in range(5)))
    groups = await here.sql("SELECT count(*) FROM deliveries GROUP BY accepted_xid ORDER BY 1")
    assert [group["count"] for group in groups] == [1, 2, 2]


async def test_a_body_larger_than_a_group_goes_by_itself(here: Inbox) -> None:
    await here.all(arrival(b"x"), arrival(bytes(9 << 20)), arrival(b"x"))
    groups = await here.sql("SELECT count(*) FROM deliveries GROUP BY accepted_xid")
    assert [group["count"] for group in groups] == [1, 1, 1]


async def test_the_worker_is_told_what_is_new_once_it_is_committed(here: Inbox) -> None:
    [answer] = await here.all(arrival(b"x"))
    assert here.told == [answer.delivery]


async def test_what_arrives_out_of_order_is_stored_in_the_order_of_source_and_key(here: Inbox) -> None:
    pairs = list(itertools.product(["shortcut", "github"], ["b", "a", "c"]))
    await here.all(*(arrival(b"x", source=source, key=key) for source, key in pairs))
    assert [(row["source"], row["dedup_key"]) for row in await here.rows()] == sorted(pairs)


# Redelivery


@pytest.mark.invariant(11)
async def test_a_copy_of_a_dead_delivery_gives_it_a_new_set_of_attempts(here: Inbox) -> None:
    [first] = await here.all(arrival(b"x", key="one"))
    [visit] = await here.sql("SELECT visit FROM deliveries")
    await applied(here, first.delivery, "dead", claimed_from="received", attempt_count=5, last_error="e", reason="r")
    [again] = await here.all(arrival(b"x", key="one"))
    [row] = await here.rows()
    assert again == Accepted(first.delivery, "rearmed")
    assert (row["status"], row["attempt_count"], row["claimed_from"]) == ("received", 0, None)
    assert (row["last_error"], row["reason"]) == (None, None)
    assert row["visit"] != visit["visit"]
    assert here.told == [first.delivery, first.delivery]


@pytest.mark.invariant(11)
async def test_a_copy_gives_dead_events_of_a_split_delivery_a_new_set_and_leaves_the_others(here: Inbox) -> None:
    [first] = await here.all(arrival(stories(1, 2), key="one"))
    async with here.pool.transaction() as tx:
        for position in (1, 2):
            await inbox.open(tx, source="shortcut", dedup_key="one", position=position, parent=first.delivery)
    _, one, two = (row["id"] for row in await here.rows())
    await applied(here, first.delivery, "processed")
    await applied(here, one, "processed")
    await applied(here, two, "dead", claimed_from="received", attempt_count=5)
    here.told.clear()
    [again] = await here.all(arrival(stories(1, 2), key="one"))
    assert again == Accepted(first.delivery, "rearmed")
    assert [row["status"] for row in await here.rows()] == ["processed", "processed", "received"]
    assert here.told == [two]


@pytest.mark.invariant(11)
async def test_a_copy_of_an_unfinished_delivery_makes_it_due_and_leaves_its_attempts(here: Inbox) -> None:
    [first] = await here.all(arrival(b"x", key="one"))
    await here.sql("UPDATE deliveries SET attempt_count = 3, not_before = now() + interval '1 hour'")
    here.told.clear()
    [again] = await here.all(arrival(b"x", key="one"))
    [row] = await here.sql("SELECT attempt_count, not_before <= now() AS due FROM deliveries")
    assert again == Accepted(first.delivery, "duplicate")
    assert row == {"attempt_count": 3, "due": True}
    assert here.told == [first.delivery]


@pytest.mark.invariant(11)
async def test_a_sender_that_repeats_a_poisonous_delivery_cannot_keep_it_alive(here: Inbox) -> None:
    await here.all(arrival(b"x", key="one"))
    for _ in range(5):
        [claim] = await inbox.take_next(here.pool, "applying", 1)
        with pytest.raises(ValueError, match="poison"):
            async with claim.held():
                raise ValueError("poison")
        status = (await here.rows())[0]["status"]
        if status == "received":
            [again] = await here.all(arrival(b"x", key="one"))
            assert again.status == "duplicate"
    assert status == "dead"


@pytest.mark.invariant(11)
@pytest.mark.parametrize(("status", "reason"), [("processed", None), ("ignored", "the label was not added")])
async def test_a_copy_of_finished_work_changes_nothing(here: Inbox, status: str, reason: str | None) -> None:
    [first] = await here.all(arrival(stories(1), key="one"))
    await applied(here, first.delivery, status, reason=reason)
    before = await here.rows()
    later = Inbox(here.pool, with_a_handler())
    await later.accepter.start()
    [again] = await later.all(arrival(stories(1), key="one"))
    await later.accepter.stop()
    assert again == Accepted(first.delivery, "duplicate")
    assert await here.rows() == before
    assert later.told == []


@pytest.mark.invariant(11)
async def test_a_copy_of_one_ignored_for_want_of_a_handler_is_applied_once_there_is_one(here: Inbox) -> None:
    [first] = await here.all(arrival(stories(1), key="one"))
    await applied(here, first.delivery, "ignored", reason="no handler for story.update")
    assert (await here.all(arrival(stories(1), key="one")))[0].status == "duplicate"

    later = Inbox(here.pool, with_a_handler())
    await later.accepter.start()
    [again] = await later.all(arrival(stories(1), key="one"))
    await later.accepter.stop()
    assert again == Accepted(first.delivery, "rearmed")
    assert [row["status"] for row in await here.rows()] == ["received"]


async def test_an_accept_never_waits_for_a_handler_that_holds_the_row(here: Inbox) -> None:
    deliveries = {status: arrival(b"x", key=status) for status in ("dead", "received", "applying")}
    ids = {answer: (await here.all(delivery))[0].delivery for answer, delivery in deliveries.items()}
    await applied(here, ids["dead"], "dead", claimed_from="received")
    await here.sql("UPDATE deliveries SET not_before = now() + interval '1 hour' WHERE status = 'received'")
    await applied(here, ids["applying"], "applying", claimed_from="received")
    async with await elsewhere(here.pool.url) as holder, holder.transaction():
        await holder.execute("SELECT FROM deliveries FOR UPDATE")
        # Well below the second that a statement would wait for a lock.
        async with asyncio.timeout(0.8):
            answers = await here.all(*deliveries.values())
    assert [answer.status for answer in answers] == ["duplicate"] * 3


# Another copy under way


@pytest.mark.invariant(3)
@pytest.mark.parametrize(("ending", "status"), [("ROLLBACK", "accepted"), ("COMMIT", "duplicate")])
async def test_a_copy_waits_for_the_first_one_and_wins_where_that_was_rolled_back(
    here: Inbox, ending: bytes, status: str
) -> None:
    async with await elsewhere(here.pool.url) as first:
        await first.execute("BEGIN")
        await first.execute(
            "INSERT INTO deliveries (source, dedup_key, body, status) VALUES ('shortcut', 'one', 'x', 'received')"
        )
        second = asyncio.create_task(here.accepter.accept(arrival(b"y", key="one")))
        await until_blocked(here.pool)
        await first.execute(ending)
        assert (await second).status == status
    assert [row["body"] for row in await here.rows()] == [b"y" if status == "accepted" else b"x"]


async def test_a_copy_that_is_held_for_long_is_refused_alone_and_its_neighbours_are_stored(here: Inbox) -> None:
    async with await elsewhere(here.pool.url) as first:
        await first.execute("BEGIN")
        await first.execute(
            "INSERT INTO deliveries (source, dedup_key, body, status) VALUES ('shortcut', 'one', 'x', 'received')"
        )
        neighbours = [asyncio.create_task(here.accepter.accept(arrival(b"x"))) for _ in range(100)]
        blocked = asyncio.create_task(here.accepter.accept(arrival(b"x", key="one")))
        async with asyncio.timeout(3):
            assert {(await neighbour).status for neighbour in neighbours} == {"accepted"}
            with pytest.raises(Unavailable):
                await blocked
        await first.execute("ROLLBACK")
    assert not here.accepter.away
    assert (await here.all(arrival(b"x", key="one")))[0].status == "accepted"


async def test_many_copies_that_are_held_for_long_do_not_hold_up_the_receiver(
    here: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept, "WITHIN_S", 1.5)
    async with await elsewhere(here.pool.url) as first:
        await first.execute("BEGIN")
        await first.execute(
            "INSERT INTO deliveries (source, dedup_key, body, status)"
            " SELECT 'shortcut', 'held-' || n, 'x', 'received' FROM generate_series(1, 100) AS n"
        )
        held = [asyncio.create_task(here.accepter.accept(arrival(b"x", key=f"held-{n}"))) for n in range(1, 101)]
        async with asyncio.timeout(2.5):
            answers = await asyncio.gather(*held, return_exceptions=True)
        await first.execute("ROLLBACK")
    assert all(isinstance(answer, Unavailable) for answer in answers)
    assert not here.accepter.away


async def test_a_delivery_that_the_database_refuses_takes_no_neighbour_with_it(here: Inbox) -> None:
    refused = Delivery("shortcut", "one", (("user-agent", "a NUL: \x00"),), b"x")
    answers = await asyncio.gather(
        *(here.accepter.accept(delivery) for delivery in (arrival(b"x"), refused, arrival(b"x"))),
        return_exceptions=True,
    )
    assert [getattr(answer, "status", None) for answer in answers] == ["accepted", None, "accepted"]
    assert isinstance(answers[1], Unavailable)
    assert not here.accepter.away


async def behind_its_data(here: Inbox) -> None:
    """As in a logical replica: the rows are there, and the sequence begins again."""
    await here.all(*(arrival(b"x", key=f"before-{number}") for number in range(3)))
    await here.sql("SELECT setval(pg_get_serial_sequence('deliveries', 'id'), 1, false)")


async def test_a_number_that_is_taken_is_no_copy_but_an_error_that_says_what_to_run(here: Inbox) -> None:
    await behind_its_data(here)
    with capture_logs() as logs, pytest.raises(Unavailable):
        await here.all(arrival(b"y", key="new"))
    [told] = [line for line in logs if line["event"] == "a delivery was refused"]
    assert told["log_level"] == "error"
    assert "deliveries_pkey" in told["error"]
    reason = here.pool.health.degraded["deliveries"]
    assert told["error"] in reason
    remedy = reason[reason.index("SELECT setval") :]
    await here.sql(remedy)
    assert [answer.status for answer in await here.all(arrival(b"y", key="new"))] == ["accepted"]
    assert here.pool.health.degraded == {}


async def test_a_copy_is_found_by_its_key_though_the_next_number_is_taken(here: Inbox) -> None:
    await behind_its_data(here)
    assert [answer.status for answer in await here.all(arrival(b"x", key="before-1"))] == ["duplicate"]


@pytest.mark.parametrize(
    "forbidding",
    [
        "CREATE UNIQUE INDEX one_body ON deliveries (md5(body))",
        "ALTER TABLE deliveries ADD CONSTRAINT one_body EXCLUDE (source WITH =)",
        "ALTER TABLE deliveries ADD CONSTRAINT one_body CHECK (length(body) > 1) NOT VALID",
    ],
)
async def test_whatever_else_a_table_forbids_is_an_error_with_its_name(here: Inbox, forbidding: str) -> None:
    await here.all(arrival(b"x", key="first"))
    await here.sql(forbidding)
    with capture_logs() as logs, pytest.raises(Unavailable):
        await here.all(arrival(b"x", key="second"))
    assert any("one_body" in line.get("error", "") for line in logs if line["event"] == "a delivery was refused")
    assert "one_body" in here.pool.health.degraded["deliveries"]
    assert [row["dedup_key"] for row in await here.rows()] == ["first"]


# Away


async def accepting_through(url: str) -> Accepter:
    accepter = Accepter(Pool(url, quick()), consumer(), lambda _: None)
    await accepter.start()
    return accepter


@pytest.mark.invariant(2)
@pytest.mark.parametrize(("how", "status"), [("cut after", "duplicate"), ("cut before", "accepted")])
async def test_an_answer_to_commit_that_is_lost_is_found_out_and_told_once(
    database_url: str, here: Inbox, how: How, status: Status
) -> None:
    async with wired(database_url) as wire:
        accepter = await accepting_through(wire.url)
        wire.at("COMMIT\0", how)
        answer = await accepter.accept(arrival(b"x", key="one"))
        await accepter.stop()
    assert wire.cuts == 1
    assert answer == Accepted((await here.rows())[0]["id"], status)
    assert len(await here.rows()) == 1


@pytest.mark.invariant(2)
async def test_an_insert_whose_connection_is_killed_before_its_commit_is_stored_by_the_next(here: Inbox) -> None:
    async with await elsewhere(here.pool.url) as first:
        await first.execute("BEGIN")
        await first.execute(
            "INSERT INTO deliveries (source, dedup_key, body, status) VALUES ('shortcut', 'held', 'x', 'received')"
        )
        # Sorted behind the others, it stops the flush when they are inserted and not yet committed.
        keys = ["a", "b", "held"]
        waiting = [asyncio.create_task(here.accepter.accept(arrival(b"y", key=key))) for key in keys]
        await until_blocked(here.pool)
        killed = await first.execute(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        assert (await killed.fetchone()) == {"count": 1}
        await first.execute("ROLLBACK")
        assert {(await answer).status for answer in waiting} == {"accepted"}
    assert [row["dedup_key"] for row in await here.rows()] == keys


async def test_what_waits_for_the_database_is_bounded(
    database_url: str, here: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept, "MOST_WAITING_BYTES", 1 << 20)
    waiting = [asyncio.create_task(here.accepter.accept(arrival(bytes(1 << 19)))) for _ in range(6)]
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert [isinstance(answer, Unavailable) for answer in answers] == [False] * 3 + [True] * 3
    # What was stored waits no longer.
    assert (await here.all(arrival(bytes(1 << 19))))[0].status == "accepted"


# Stopping


async def test_stopping_answers_what_waits(here: Inbox) -> None:
    waiting = [asyncio.create_task(here.accepter.accept(arrival(b"x"))) for _ in range(300)]
    await asyncio.sleep(0)
    await here.accepter.stop()
    assert {(await answer).status for answer in waiting} == {"accepted"}
    with pytest.raises(Unavailable):
        await here.accepter.accept(arrival(b"x"))


async def test_stopping_says_nothing_of_a_database_that_does_not_answer(
    here: Inbox, capsys: pytest.CaptureFixture[str]
) -> None:
    await here.all(arrival(b"x"))
    await here.accepter.stop()
    assert "does not answer" not in "".join(capsys.readouterr())


async def test_stopping_does_not_wait_long_for_a_database_that_says_nothing_and_answers_who_waits(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with wired(database_url) as wire:
        accepter = await accepting_through(wire.url)
        wire.at("INSERT", "hold")
        waiting = [asyncio.create_task(accepter.accept(arrival(b"x"))) for _ in range(300)]
        await wire.held.wait()
        monkeypatch.setattr(accept, "WITHIN_S", 0.2)
        async with asyncio.timeout(2):
            await accepter.stop()
            answers = await asyncio.gather(*waiting, return_exceptions=True)
    # The other connection may have stored what came behind the group that hangs.
    assert {type(answer) for answer in answers} in ({Unavailable}, {Unavailable, Accepted})


async def test_a_request_that_is_gone_is_stored_all_the_same_and_disturbs_nobody(here: Inbox) -> None:
    gone = asyncio.create_task(here.accepter.accept(arrival(b"x", key="gone")))
    here_still = asyncio.create_task(here.accepter.accept(arrival(b"x", key="here")))
    await asyncio.sleep(0)
    gone.cancel()
    assert (await here_still).status == "accepted"
    assert {row["dedup_key"] for row in await here.rows()} == {"gone", "here"}


def test_the_rows_told_of_are_those_of_the_inbox() -> None:
    assert Ready(inbox.table, "applying", 1).phase in inbox.phases
