"""Applying a delivery: every way it can end, and that its handler's writes are there exactly when it is `processed`."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from consumers import arrival, arrived, stories
from gates import attempts_of, elsewhere, outcomes_of, row_of, sql, until_blocked
from psycopg.errors import CheckViolation, DeadlockDetected
from psycopg.sql import SQL, Literal
from pydantic import BaseModel

from webhooks import Consumer, Escalate, Event, Gate, GitHub, Ignore, Park, Pool, Shortcut, Transaction, apply, decision
from webhooks.db import Ready
from webhooks.delivery import Delivery
from webhooks.errors import ConfigurationError, LostClaim, WebhooksError
from webhooks.inbox import inbox

Handle = Callable[[Event, Transaction], Coroutine[Any, Any, None]]

sessions = Gate("patch_sessions", key="sc_id")
sessions.phase("received", claimed="clarifying", done=("clarified", "asked"))
sessions.phase("clarified", claimed="drafting", done="drafted")


def handling(handle: Handle, event: str = "story.update", bot: str | None = None) -> Consumer:
    shortcut = Shortcut(bot_member_id=bot)
    shortcut.on(event)(handle)
    return Consumer(gates=[sessions], sources=[shortcut, GitHub()])


async def open_session(event: Event, tx: Transaction) -> None:
    await sessions.open(tx, sc_id=event.data["story_id"], title=event.data["name"])


async def applied(pool: Pool, consumer: Consumer, id_: int) -> dict[str, Any]:
    """Claim one delivery and apply it, as a worker does; return its row."""
    claim = await inbox.take(pool, "applying", id_)
    assert claim is not None, "it cannot be claimed"
    with suppress(ValueError, TimeoutError, WebhooksError, psycopg.Error, ExceptionGroup):
        async with claim.held():
            await apply.apply(consumer, claim)
    [row] = await sql(pool, "SELECT *, not_before <= now() AS due FROM deliveries WHERE id = %(id)s", id=id_)
    return row


async def of(pool: Pool, consumer: Consumer, delivery: Delivery) -> dict[str, Any]:
    [id_] = await arrived(pool, delivery)
    return await applied(pool, consumer, id_)


async def titles(pool: Pool) -> list[str]:
    return [row["title"] for row in await sql(pool, "SELECT title FROM patch_sessions ORDER BY sc_id")]


async def at(pool: Pool, key: int, status: str) -> None:
    """A session in a status."""
    await sql(
        pool,
        "INSERT INTO patch_sessions (sc_id, title, status) VALUES (%(key)s, 'a story', %(status)s)"
        " ON CONFLICT (sc_id) DO UPDATE SET status = excluded.status",
        key=key,
        status=status,
    )


# Processed


@pytest.mark.invariant(8)
async def test_a_handlers_writes_and_processed_are_there_together(pool: Pool) -> None:
    row = await of(pool, handling(open_session), arrival(stories(7)))
    assert (row["status"], row["event"], row["reason"]) == ("processed", "story.update", None)
    assert await titles(pool) == ["story 7"]
    assert await outcomes_of(pool, row["id"]) == ["done"]


async def test_a_handler_is_given_what_the_event_says(pool: Pool) -> None:
    given: list[Event] = []

    async def handle(event: Event, tx: Transaction) -> None:
        given.append(event)

    body = stories(7)
    row = await of(pool, handling(handle), arrival(body))
    [event] = given
    assert (event.source, event.name, event.delivery) == ("shortcut", "story.update", row["id"])
    assert (event.body, event.received_at) == (json.loads(body), row["received_at"])
    assert event.occurred_at == datetime(2026, 6, 12, 10, tzinfo=UTC)
    assert event.data["story_id"] == 7


async def test_a_handlers_model_reads_the_data(pool: Pool) -> None:
    class Story(BaseModel):
        id: int
        name: str

    given: list[Story] = []
    shortcut = Shortcut()

    @shortcut.on("story.update", model=Story)
    async def handle(event: Event[Story], tx: Transaction) -> None:
        given.append(event.data)

    row = await of(pool, Consumer(gates=[], sources=[shortcut]), arrival(stories(7)))
    assert (row["status"], given) == ("processed", [Story(id=7, name="story 7")])


async def test_the_rows_that_a_handler_opened_are_told_to_the_worker(pool: Pool) -> None:
    [id_] = await arrived(pool, arrival(stories(7)))
    claim = await inbox.take(pool, "applying", id_)
    assert claim is not None
    async with claim.held():
        await apply.apply(handling(open_session), claim)
    assert claim.moved == [Ready("patch_sessions", "clarifying", 7)]


# Ignored


async def test_an_event_without_a_handler_is_ignored_by_its_name_as_it_is_spelled(pool: Pool) -> None:
    row = await of(pool, handling(open_session, event="Story.Update"), arrival(stories(7)))
    assert (row["status"], row["event"]) == ("ignored", "story.update")
    assert row["reason"] == "no handler for story.update"


async def test_a_body_without_an_event_is_ignored(pool: Pool) -> None:
    for body in (b"null", b"[]", b'"x"', b"{}", b'{"actions": []}'):
        row = await of(pool, handling(open_session), arrival(body))
        assert (row["status"], row["event"], row["reason"]) == ("ignored", None, "it holds no event"), body


async def test_what_our_own_bot_did_is_ignored_with_that_reason(pool: Pool) -> None:
    body = json.dumps({**json.loads(stories(7)), "member_id": "the-bot"}).encode()
    row = await of(pool, handling(open_session, bot="the-bot"), arrival(body))
    assert (row["status"], row["reason"]) == ("ignored", "made by our own bot (member the-bot)")
    assert await titles(pool) == []


@pytest.mark.parametrize(
    ("errors", "status", "told"),
    [
        ([Ignore("no")], "ignored", "no"),
        ([Ignore("no"), Park(sessions, 7, while_in=("received",))], "ignored", "no"),
        ([Ignore("no"), Escalate("ask")], "dead", "ask; Ignore: no"),
        ([Ignore("no"), ValueError("a")], "received", "ValueError: a; Ignore: no"),
    ],
)
async def test_what_leaves_a_handlers_task_group_counts_as_its_most_serious_member(
    pool: Pool, errors: list[Exception], status: str, told: str
) -> None:
    async def fails(error: Exception) -> None:
        raise error

    async def handle(event: Event, tx: Transaction) -> None:
        await open_session(event, tx)
        async with asyncio.TaskGroup() as group:
            for error in errors:
                group.create_task(fails(error))

    row = await of(pool, handling(handle), arrival(stories(7)))
    assert (row["status"], row["reason"] if status == "ignored" else row["last_error"]) == (status, told)
    assert await titles(pool) == []


@pytest.mark.parametrize(("kind", "status"), [(Ignore, "ignored"), (Escalate, "dead")])
async def test_a_delivery_ends_though_its_reason_is_an_exception_with_a_rows_values(
    pool: Pool, kind: type[Exception], status: str
) -> None:
    async def handle(event: Event, tx: Transaction) -> None:
        try:
            await tx.execute("INSERT INTO companies (id, name) VALUES ('', 'a secret')")
        except CheckViolation as error:
            raise kind(error) from None

    row = await of(pool, handling(handle), arrival(stories(7)))
    reason = row["reason"] if kind is Ignore else row["last_error"]
    assert row["status"] == status
    assert reason.startswith("CheckViolation: new row for relation")
    assert "secret" not in reason


@pytest.mark.invariant(8)
async def test_ignore_rolls_back_what_the_handler_wrote_and_keeps_its_reason(pool: Pool) -> None:
    async def handle(event: Event, tx: Transaction) -> None:
        await open_session(event, tx)
        raise Ignore("the label was not added: \x00\ud83d" + "x" * 10_000)

    row = await of(pool, handling(handle), arrival(stories(7)))
    assert (row["status"], row["event"]) == ("ignored", "story.update")
    assert row["reason"].startswith("the label was not added: \ufffd\ufffd")
    assert len(row["reason"]) == 2_000
    assert await titles(pool) == []


async def test_a_source_that_is_no_longer_there_is_named(pool: Pool) -> None:
    row = await of(pool, Consumer(gates=[], sources=[GitHub()]), arrival(stories(7)))
    assert (row["status"], row["reason"]) == ("ignored", "no source is named shortcut any more")


async def test_an_event_name_that_cannot_be_stored_is_stored_in_part(pool: Pool) -> None:
    body = json.dumps({"action": "a\x00b\ud83d" + "x" * 5_000}).encode()
    row = await of(pool, handling(open_session), arrival(body, source="github", event="issues"))
    assert row["status"] == "ignored"
    assert row["event"].startswith("issues.a\ufffdb\ufffdxxx")
    assert (len(row["event"]), len(row["reason"])) == (500, 2_000)


# Dead at once


async def test_a_body_that_cannot_be_read_is_dead_with_the_reason(pool: Pool) -> None:
    form = (("content-type", "application/x-www-form-urlencoded"), ("x-github-event", "push"))
    bodies = {
        b'{"t":"\xff"}': "not UTF-8: byte 0xff at position 6",
        b"": "the body is empty",
        b"{": "not JSON: ",
        b"[" * 100_000: "nested past reading",
        b"9" * 5_000: "holds an integer too long to read",
    }
    for body, reason in bodies.items():
        row = await of(pool, handling(open_session), arrival(body))
        assert (row["status"], row["attempt_count"]) == ("dead", 1)
        assert row["last_error"].startswith(f"the body cannot be read: {reason}")
        assert await outcomes_of(pool, row["id"]) == ["escalated"]
    row = await of(pool, handling(open_session), Delivery("github", "form", form, b"no=payload"))
    assert row["last_error"] == "the body cannot be read: a form without the field payload"


async def test_data_that_does_not_fit_the_model_is_dead_at_once_with_the_field(pool: Pool) -> None:
    class Story(BaseModel):
        id: int
        labels: list[str]

    shortcut = Shortcut()

    @shortcut.on("story.update", model=Story)
    async def handle(event: Event[Story], tx: Transaction) -> None:
        raise AssertionError("it must not run")

    row = await of(pool, Consumer(gates=[], sources=[shortcut]), arrival(stories(7)))
    assert (row["status"], row["attempt_count"], row["event"]) == ("dead", 1, "story.update")
    assert row["last_error"] == "the data of story.update does not fit Story: labels: Field required"


async def test_a_handler_may_ask_for_a_person(pool: Pool) -> None:
    async def handle(event: Event, tx: Transaction) -> None:
        await open_session(event, tx)
        raise Escalate("nobody knows this label")

    row = await of(pool, handling(handle), arrival(stories(7)))
    assert (row["status"], row["last_error"], row["event"]) == ("dead", "nobody knows this label", "story.update")
    assert await titles(pool) == []


# Tried again


@pytest.mark.invariant(8)
async def test_an_error_writes_nothing_is_charged_and_the_next_attempt_writes_once(pool: Pool) -> None:
    fails = iter([True, False])

    async def handle(event: Event, tx: Transaction) -> None:
        await open_session(event, tx)
        if next(fails):
            raise ValueError("not today")

    consumer = handling(handle)
    row = await of(pool, consumer, arrival(stories(7)))
    assert (row["status"], row["attempt_count"], row["due"]) == ("received", 1, False)
    assert (row["last_error"], row["event"]) == ("ValueError: not today", "story.update")
    assert await titles(pool) == []
    await sql(pool, "UPDATE deliveries SET not_before = now()")
    row = await applied(pool, consumer, row["id"])
    assert (row["status"], row["attempt_count"]) == ("processed", 2)
    assert await titles(pool) == ["story 7"]
    assert await outcomes_of(pool, row["id"]) == ["error", "done"]


async def test_a_handler_that_always_fails_is_dead_after_its_attempts(pool: Pool) -> None:
    async def handle(event: Event, tx: Transaction) -> None:
        raise ValueError("not today")

    row = await of(pool, handling(handle), arrival(stories(7)))
    while row["status"] == "received":
        await sql(pool, "UPDATE deliveries SET not_before = now()")
        row = await applied(pool, handling(handle), row["id"])
    assert (row["status"], row["attempt_count"], row["last_error"]) == ("dead", 5, "ValueError: not today")


@pytest.mark.invariant(8)
async def test_a_connection_killed_under_a_handler_takes_its_writes_along(pool: Pool) -> None:
    async def handle(event: Event, tx: Transaction) -> None:
        await open_session(event, tx)
        [backend] = await (await tx.execute("SELECT pg_backend_pid() AS pid")).fetchall()
        await sql(pool, "SELECT pg_terminate_backend(%(pid)s)", **backend)

    row = await of(pool, handling(handle), arrival(stories(7)))
    assert (row["status"], row["attempt_count"]) == ("received", 0)
    assert await titles(pool) == []


async def test_an_error_of_the_database_that_the_handler_swallows_is_no_success(pool: Pool) -> None:
    async def handle(event: Event, tx: Transaction) -> None:
        try:
            await tx.execute("SELECT 1 / 0")
        except psycopg.errors.DivisionByZero:
            return

    row = await of(pool, handling(handle), arrival(stories(7)))
    assert (row["status"], row["attempt_count"]) == ("received", 1)


async def test_a_handler_that_runs_past_the_limit_is_cut_off_and_charged(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply, "HANDLER_LIMIT_S", 0.05)
    for slow in (asyncio.Event().wait, lambda: sql(pool, "SELECT pg_sleep(30)")):

        async def handle(event: Event, tx: Transaction, slow: Callable[[], Any] = slow) -> None:
            await open_session(event, tx)
            await slow()

        row = await of(pool, handling(handle), arrival(stories(7)))
        assert (row["status"], row["attempt_count"]) == ("received", 1)
        assert row["last_error"].startswith("TimeoutError")
        assert await titles(pool) == []


async def test_a_cancellation_that_nobody_asked_for_is_an_error(pool: Pool) -> None:
    async def handle(event: Event, tx: Transaction) -> None:
        raise asyncio.CancelledError

    [id_] = await arrived(pool, arrival(stories(7)))
    claim = await inbox.take(pool, "applying", id_)
    assert claim is not None
    with pytest.raises(asyncio.CancelledError):
        async with claim.held():
            await apply.apply(handling(handle), claim)
    assert await outcomes_of(pool, id_) == ["error"]


def raising(code: str, times: int) -> Handle:
    """A handler whose transaction fails that often, in the database's own words."""
    left = itertools.count(times, -1)

    async def handle(event: Event, tx: Transaction) -> None:
        await open_session(event, tx)
        if next(left) > 0:
            await tx.execute(SQL("DO $$ BEGIN RAISE SQLSTATE {}; END $$").format(Literal(code)))

    return handle


@pytest.mark.parametrize("code", ["40P01", "40001"])
@pytest.mark.invariant(8)
async def test_a_deadlock_and_a_serialization_failure_run_again_at_once_without_charge(pool: Pool, code: str) -> None:
    row = await of(pool, handling(raising(code, 5)), arrival(stories(7)))
    assert (row["status"], row["attempt_count"]) == ("processed", 1)
    assert await titles(pool) == ["story 7"]
    assert await outcomes_of(pool, row["id"]) == ["done"]


@pytest.mark.invariant(8)
async def test_a_deadlock_in_a_task_group_runs_again_too(pool: Pool) -> None:
    refused = raising("40P01", 1)

    async def handle(event: Event, tx: Transaction) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(refused(event, tx))

    row = await of(pool, handling(handle), arrival(stories(7)))
    assert (row["status"], row["attempt_count"]) == ("processed", 1)


async def test_a_sixth_deadlock_is_an_error(pool: Pool) -> None:
    row = await of(pool, handling(raising("40P01", 6)), arrival(stories(7)))
    assert (row["status"], row["attempt_count"]) == ("received", 1)
    assert row["last_error"].startswith(DeadlockDetected.__name__)


@pytest.mark.invariant(5)
async def test_a_claim_that_was_lost_before_the_handler_runs_runs_no_line_of_it(pool: Pool) -> None:
    async def handle(event: Event, tx: Transaction) -> None:
        raise AssertionError("it must not run")

    [id_] = await arrived(pool, arrival(stories(7)))
    claim = await inbox.take(pool, "applying", id_)
    assert claim is not None
    await sql(pool, "UPDATE deliveries SET lease_until = now() - interval '1 s'")
    assert await inbox.sweep(pool, "applying") == 1
    with pytest.raises(LostClaim):
        async with claim.held():
            await apply.apply(handling(handle), claim)
    assert await outcomes_of(pool, id_) == ["expired"]


# Split


async def children(pool: Pool, parent: int) -> list[dict[str, Any]]:
    return await sql(pool, "SELECT * FROM deliveries WHERE parent = %(id)s ORDER BY position", id=parent)


async def test_several_events_become_a_row_each_and_the_request_is_processed(pool: Pool) -> None:
    consumer = handling(open_session)
    [id_] = await arrived(pool, arrival(stories(1, 2, 3), key="one"))
    claim = await inbox.take(pool, "applying", id_)
    assert claim is not None
    async with claim.held():
        await apply.apply(consumer, claim)
    [parent] = await sql(pool, "SELECT * FROM deliveries WHERE position = 0")
    rows = await children(pool, id_)
    assert (parent["status"], parent["reason"]) == ("processed", "split into 3 events")
    assert [(row["position"], row["dedup_key"], row["event"]) for row in rows] == [
        (place, "one", "story.update") for place in (1, 2, 3)
    ]
    assert {(row["body"], row["received_at"]) for row in rows} == {(None, parent["received_at"])}
    assert claim.moved == [Ready("deliveries", "applying", row["id"]) for row in rows]
    assert await titles(pool) == []
    for row in rows:
        assert (await applied(pool, consumer, row["id"]))["status"] == "processed"
    assert await titles(pool) == ["story 1", "story 2", "story 3"]


@pytest.mark.parametrize(
    ("forbidding", "constraint"),
    [
        ("SELECT setval(pg_get_serial_sequence('deliveries', 'id'), 1, false)", "deliveries_pkey"),
        ("CREATE UNIQUE INDEX one_a_request ON deliveries (parent)", "one_a_request"),
    ],
)
async def test_events_that_cannot_be_stored_leave_their_request_unsplit(
    pool: Pool, forbidding: str, constraint: str
) -> None:
    consumer = handling(open_session)
    [id_] = await arrived(pool, arrival(stories(1, 2, 3)))
    await sql(pool, forbidding)
    row = await applied(pool, consumer, id_)
    assert (row["status"], row["attempt_count"]) == ("received", 1)
    assert constraint in row["last_error"]
    assert await children(pool, id_) == []


async def test_one_event_that_fails_and_one_that_parks_hold_nobody_up(pool: Pool) -> None:
    async def handle(event: Event, tx: Transaction) -> None:
        if event.data["story_id"] == 1:
            raise ValueError("not today")
        if event.data["story_id"] == 2:
            raise Park(sessions, 2, while_in=("received",))
        await open_session(event, tx)

    await at(pool, 2, "received")
    consumer = handling(handle)
    parent = await of(pool, consumer, arrival(stories(1, 2, 3)))
    rows = [await applied(pool, consumer, row["id"]) for row in await children(pool, parent["id"])]
    assert [row["status"] for row in rows] == ["received", "received", "processed"]
    assert [row["attempt_count"] for row in rows] == [1, 0, 1]
    assert [row["parked_on"] for row in rows] == [None, "patch_sessions:2", None]
    assert await titles(pool) == ["a story", "story 3"]


async def test_only_events_that_have_a_handler_count(pool: Pool) -> None:
    body = json.loads(stories(1, 2))
    body["actions"][0]["action"] = "delete"
    row = await of(pool, handling(open_session), arrival(json.dumps(body).encode()))
    assert (row["status"], row["event"], row["reason"]) == ("processed", "story.update", None)
    assert await titles(pool) == ["story 2"]
    assert await children(pool, row["id"]) == []


async def test_splitting_again_after_a_redelivery_makes_no_second_row(pool: Pool) -> None:
    consumer = handling(open_session)
    parent = await of(pool, consumer, arrival(stories(1, 2)))
    await sql(pool, "UPDATE deliveries SET status = 'received' WHERE id = %(id)s", id=parent["id"])
    await applied(pool, consumer, parent["id"])
    assert len(await children(pool, parent["id"])) == 2


# Park


def answering(**park: Any) -> Handle:
    """A handler for an answer: it parks while nobody has asked yet."""

    async def handle(event: Event, tx: Transaction) -> None:
        moved = await sessions.advance(tx, event.data["story_id"], "asked", "clarified", answer="green")
        if not moved:
            raise Park(sessions, event.data["story_id"], while_in=("received", "clarifying"), **park)

    return handle


async def moved(pool: Pool, key: int, from_: str, to: str) -> list[Ready]:
    async with pool.transaction() as tx:
        assert await sessions.advance(tx, key, from_, to)
    return tx.moved


@pytest.mark.invariant(11)
async def test_a_parked_delivery_waits_uncharged_and_is_due_at_once_when_its_row_moves(pool: Pool) -> None:
    await at(pool, 7, "received")
    consumer = handling(answering())
    row = await of(pool, consumer, arrival(stories(7)))
    assert (row["status"], row["attempt_count"], row["due"]) == ("received", 0, False)
    assert (row["parked_on"], row["event"]) == ("patch_sessions:7", "story.update")
    assert row["reason"] == "waits while patch_sessions:7 is clarifying, received"
    assert await moved(pool, 7, "received", "asked") == [Ready("deliveries", "applying", row["id"])]
    row = await applied(pool, consumer, row["id"])
    assert (row["status"], row["parked_on"], row["parked_since"], row["reason"]) == ("processed", None, None, None)
    assert (await row_of(pool, 7))["answer"] == "green"


async def test_a_parked_delivery_is_looked_at_again_without_a_move(pool: Pool) -> None:
    await at(pool, 7, "received")
    consumer = handling(answering())
    first = await of(pool, consumer, arrival(stories(7)))
    [wait] = await sql(pool, "SELECT not_before - now() AS left FROM deliveries")
    assert timedelta(seconds=10) < wait["left"] <= timedelta(seconds=15)
    await sql(pool, "UPDATE deliveries SET not_before = now()")
    again = await applied(pool, consumer, first["id"])
    assert (again["parked_since"], again["attempt_count"]) == (first["parked_since"], 0)


async def test_what_a_handler_wrote_before_it_parks_is_rolled_back(pool: Pool) -> None:
    async def handle(event: Event, tx: Transaction) -> None:
        await sessions.open(tx, sc_id=8, title="another")
        raise Park(sessions, 7, while_in=("received",))

    await at(pool, 7, "received")
    row = await of(pool, handling(handle), arrival(stories(7)))
    assert row["parked_on"] == "patch_sessions:7"
    assert await titles(pool) == ["a story"]


@pytest.mark.parametrize(("status", "found"), [("drafted", "drafted"), (None, "missing")])
async def test_a_row_that_nobody_waits_for_is_said_and_the_delivery_ignored(
    pool: Pool, status: str | None, found: str
) -> None:
    if status is not None:
        await at(pool, 7, status)
    row = await of(pool, handling(answering(missing="ignore")), arrival(stories(7)))
    assert (row["status"], row["event"]) == ("ignored", "story.update")
    assert row["reason"] == f"patch_sessions:7 is {found}: nothing there waits for story.update"


async def test_a_delivery_whose_row_does_not_move_for_long_is_dead(pool: Pool) -> None:
    await at(pool, 7, "received")
    consumer = handling(answering(for_=timedelta(minutes=10)))
    row = await of(pool, consumer, arrival(stories(7)))
    await sql(pool, "UPDATE deliveries SET parked_since = now() - interval '9 minutes', not_before = now()")
    assert (await applied(pool, consumer, row["id"]))["status"] == "received"
    await sql(pool, "UPDATE deliveries SET parked_since = now() - interval '10 minutes', not_before = now()")
    row = await applied(pool, consumer, row["id"])
    assert row["status"] == "dead"
    assert row["last_error"] == "parked too long: patch_sessions:7 did not leave clarifying, received within 0:10:00"


@pytest.mark.invariant(10)
async def test_a_delivery_whose_row_is_not_there_yet_waits_for_it(pool: Pool) -> None:
    consumer = handling(answering())
    row = await of(pool, consumer, arrival(stories(7)))
    assert (row["status"], row["attempt_count"], row["due"]) == ("received", 0, False)
    assert (row["parked_on"], row["reason"]) == (
        "patch_sessions:7",
        "waits for patch_sessions:7, which is not there yet",
    )
    async with pool.transaction() as tx:
        assert await sessions.open(tx, sc_id=7, title="x", to="asked")
    assert tx.moved == [Ready("deliveries", "applying", row["id"])]
    row = await applied(pool, consumer, row["id"])
    assert (row["status"], row["parked_on"], row["reason"]) == ("processed", None, None)
    assert (await row_of(pool, 7))["answer"] == "green"


async def test_a_delivery_whose_row_does_not_come_is_dead_and_names_it(pool: Pool) -> None:
    consumer = handling(answering(for_=timedelta(minutes=10)))
    row = await of(pool, consumer, arrival(stories(7)))
    await sql(pool, "UPDATE deliveries SET parked_since = now() - interval '10 minutes', not_before = now()")
    row = await applied(pool, consumer, row["id"])
    assert (row["status"], row["last_error"]) == (
        "dead",
        "parked too long: patch_sessions:7 did not come within 0:10:00",
    )
    # Tried again by a person, it may wait as long again.
    async with pool.transaction() as tx:
        await decision.retry(tx, consumer, str(row["id"]), decided_by="ann", reason="it comes now")
    row = await applied(pool, consumer, row["id"])
    assert (row["status"], row["parked_on"]) == ("received", "patch_sessions:7")


async def test_a_row_that_came_late_has_its_own_time_to_move(pool: Pool) -> None:
    consumer = handling(answering())
    row = await of(pool, consumer, arrival(stories(7)))
    await at(pool, 7, "received")
    await sql(pool, "UPDATE deliveries SET parked_since = now() - interval '2 hours', not_before = now()")
    row = await applied(pool, consumer, row["id"])
    assert (row["status"], row["reason"]) == ("received", "waits while patch_sessions:7 is clarifying, received")
    [left] = await sql(pool, "SELECT now() - parked_since AS waited FROM deliveries")
    assert left["waited"] < timedelta(minutes=1)


@pytest.mark.invariant(10)
async def test_a_row_that_comes_while_its_delivery_is_being_parked_is_seen(pool: Pool) -> None:
    [id_] = await arrived(pool, arrival(stories(7)))
    consumer = handling(answering())
    async with await elsewhere(pool.url) as holder:
        # Parking ends by closing its line in `attempts`: held there, it has looked for the row and not yet committed.
        claim = await inbox.take(pool, "applying", id_)
        assert claim is not None
        await holder.execute("BEGIN")
        await holder.execute("SELECT FROM attempts FOR UPDATE")

        async def parking() -> None:
            async with claim.held():
                await apply.apply(consumer, claim)

        parks = asyncio.create_task(parking())
        await until_blocked(pool)
        async with pool.transaction() as tx:
            await sessions.open(tx, sc_id=7, title="x", to="asked")
        assert tx.moved == [], "the delivery is not parked yet for whoever opens the row"
        await holder.execute("ROLLBACK")
        await parks
    assert claim.moved == [Ready("deliveries", "applying", id_)]
    assert (await applied(pool, consumer, id_))["status"] == "processed"


@pytest.mark.parametrize("with_row", [True, False])
async def test_a_person_has_a_parked_delivery_applied_now_or_dropped(pool: Pool, with_row: bool) -> None:
    if with_row:
        await at(pool, 7, "received")
    consumer = handling(answering())
    row = await of(pool, consumer, arrival(stories(7)))
    name = str(row["id"])
    async with pool.transaction() as tx:
        said = {"decided_by": "ann", "reason": "now"}
        assert await decision.retry(tx, consumer, name, **said) == "received"
        assert tx.moved == [Ready("deliveries", "applying", row["id"])]
    again = await applied(pool, consumer, row["id"])
    assert (again["status"], again["parked_since"]) == ("received", row["parked_since"])
    for to in ("received", "dead", "nonsense"):
        with pytest.raises((decision.NotEscalated, ConfigurationError)):
            async with pool.transaction() as tx:
                await decision.resolve(tx, consumer, name, to=to, decided_by="ann", reason="no")
    async with pool.transaction() as tx:
        await decision.resolve(tx, consumer, name, to="ignored", decided_by="ann", reason="it never comes")
    [ended] = await sql(pool, "SELECT status, reason, parked_on, parked_since FROM deliveries")
    assert list(ended.values()) == ["ignored", "ann: it never comes", None, None]
    decided = await sql(pool, "SELECT decision, decided_by, reason FROM decisions ORDER BY id")
    assert [tuple(one.values()) for one in decided] == [
        ("retry", "ann", "now"),
        ("resolve as ignored", "ann", "it never comes"),
    ]
    async with pool.transaction() as tx:
        with pytest.raises(decision.NotEscalated, match="is not dead but ignored"):
            await decision.retry(tx, consumer, name, **said)
        with pytest.raises(decision.NotEscalated, match="is not dead but ignored"):
            await decision.resolve(tx, consumer, name, to="ignored", **said)


async def test_a_row_that_moves_between_the_look_and_the_park_is_applied_again_and_not_lost(pool: Pool) -> None:
    """However long it waited: what counts is that the row moved."""
    looks = 0

    async def handle(event: Event, tx: Transaction) -> None:
        nonlocal looks
        looks += 1
        try:
            await answering()(event, tx)
        except Park:
            await moved(pool, 7, "received", "asked")
            raise

    await at(pool, 7, "received")
    [id_] = await arrived(pool, arrival(stories(7)))
    await sql(pool, "UPDATE deliveries SET parked_on = 'patch_sessions:7', parked_since = now() - interval '2 hours'")
    row = await applied(pool, handling(handle), id_)
    assert (row["status"], row["attempt_count"], looks) == ("processed", 1, 2)
    assert (await row_of(pool, 7))["status"] == "clarified"


async def test_a_park_waits_for_a_move_under_way_and_applies_again(pool: Pool) -> None:
    await at(pool, 7, "received")
    [id_] = await arrived(pool, arrival(stories(7)))
    async with await elsewhere(pool.url) as mover:
        await mover.execute("BEGIN")
        await mover.execute("UPDATE patch_sessions SET status = 'asked' WHERE sc_id = 7")
        applying = asyncio.create_task(applied(pool, handling(answering()), id_))
        # `advance` does not wait, since the row it sees is not in `asked`; the park does.
        await until_blocked(pool)
        await mover.execute("COMMIT")
        assert (await applying)["status"] == "processed"


async def test_a_move_waits_for_a_park_under_way_and_makes_it_due(pool: Pool) -> None:
    await at(pool, 7, "received")
    [id_] = await arrived(pool, arrival(stories(7)))
    async with await elsewhere(pool.url) as holder:
        # Parking ends by closing its line in `attempts`: held there, it has read its row and not yet committed.
        claim = await inbox.take(pool, "applying", id_)
        assert claim is not None
        await holder.execute("BEGIN")
        await holder.execute("SELECT FROM attempts FOR UPDATE")
        consumer = handling(answering())

        async def parking() -> None:
            async with claim.held():
                await apply.apply(consumer, claim)

        parks = asyncio.create_task(parking())
        await until_blocked(pool, 1)
        moves = asyncio.create_task(moved(pool, 7, "received", "asked"))
        await until_blocked(pool, 2)
        await holder.execute("ROLLBACK")
        await parks
        assert await moves == [Ready("deliveries", "applying", id_)]
    assert (await applied(pool, consumer, id_))["status"] == "processed"


async def test_parked_on_a_row_with_a_key_of_several_columns(pool: Pool) -> None:
    await sql(
        pool,
        "CREATE TABLE tickets (company_id bigint, id bigint, LIKE gated INCLUDING ALL, PRIMARY KEY (company_id, id))",
    )
    tickets = Gate("tickets", key="company_id, id")
    tickets.phase("open", claimed="claimed", done="resolved")

    async def handle(event: Event, tx: Transaction) -> None:
        if not await tickets.advance(tx, (1, 2), "blocked", "open"):
            raise Park(tickets, (1, 2), while_in=("open",))

    async with pool.transaction() as tx:
        await tickets.open(tx, company_id=1, id=2)
    row = await of(pool, handling(handle), arrival(stories(7)))
    assert row["parked_on"] == "tickets:1/2"
    async with pool.transaction() as tx:
        assert await tickets.advance(tx, (1, 2), "open", "blocked")
    assert (await applied(pool, handling(handle), row["id"]))["status"] == "processed"


# Order


def pull_requests() -> Consumer:
    """Guards on the status, and the event's own time, instead of an order of arrival."""
    github = GitHub()

    @github.on("pull_request.opened")
    async def opened(event: Event, tx: Transaction) -> None:
        await sessions.advance(tx, event.data["number"], "drafted", "in_review")

    @github.on("pull_request.synchronize")
    async def synchronized(event: Event, tx: Transaction) -> None:
        await tx.execute(
            "UPDATE patch_sessions SET base_commit = %(commit)s, asked_at = %(at)s"
            " WHERE sc_id = %(key)s AND (asked_at IS NULL OR asked_at < %(at)s)",
            {"key": event.data["number"], "commit": event.data["commit"], "at": event.occurred_at},
        )

    @github.on("pull_request.closed")
    async def closed(event: Event, tx: Transaction) -> None:
        if not await sessions.advance(tx, event.data["number"], "in_review", "closed"):
            raise Park(sessions, event.data["number"], while_in=("drafted",))

    return Consumer(gates=[sessions], sources=[github])


@pytest.mark.invariant(10)
async def test_every_order_and_number_of_deliveries_leads_to_the_same_end(pool: Pool) -> None:
    consumer = pull_requests()
    orders = [*itertools.permutations(["opened", "synchronize", "closed"])]
    orders += [(*order, *order) for order in orders]
    for key, order in enumerate(orders):
        await at(pool, key, "drafted")
        for action in order:
            changed = {"updated_at": f"2026-06-12T10:0{['opened', 'synchronize', 'closed'].index(action)}:00Z"}
            body = {"action": action, "number": key, "commit": action, "pull_request": changed}
            [id_] = await arrived(pool, arrival(json.dumps(body).encode(), source="github", event="pull_request"))
            await applied(pool, consumer, id_)
        # What was parked is due since its row moved.
        for row in await sql(pool, "SELECT id FROM deliveries WHERE status = 'received' AND not_before <= now()"):
            await applied(pool, consumer, row["id"])
    ends = await sql(pool, "SELECT DISTINCT status, base_commit, asked_at FROM patch_sessions")
    assert ends == [
        {"status": "closed", "base_commit": "synchronize", "asked_at": datetime(2026, 6, 12, 10, 1, tzinfo=UTC)}
    ]
    assert await sql(pool, "SELECT id FROM deliveries WHERE status NOT IN ('processed', 'ignored')") == []


@pytest.mark.invariant(3)
async def test_five_events_about_one_story_open_one_session(pool: Pool) -> None:
    consumer = handling(open_session)
    ids = await arrived(pool, *(arrival(stories(7)) for _ in range(5)))
    rows = await asyncio.gather(*(applied(pool, consumer, id_) for id_ in ids))
    assert {row["status"] for row in rows} == {"processed"}
    assert await titles(pool) == ["story 7"]
    assert len(await attempts_of(pool, 7)) == 0
