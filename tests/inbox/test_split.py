"""A delivery of many events: read once, stored in one statement, and others have their turns between its events."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from consumers import arrival, arrived, from_github, from_shortcut, stack, stories
from gates import outcomes_of, sql, until
from psycopg.errors import UniqueViolation

from webhooks import Consumer, Event, GitHub, Pool, Shortcut, Transaction, apply
from webhooks.db import Ready
from webhooks.delivery import Headers, RawEvent
from webhooks.inbox import DUE_APART, DUE_AT_ONCE, inbox
from webhooks.settings import Settings


class Counting(Shortcut):
    """Counts how often it reads a body."""

    reads = 0

    def read(self, headers: Headers, body: bytes) -> Any:
        self.reads += 1
        return super().read(headers, body)


class Handled:
    """A consumer that keeps what it was given."""

    def __init__(self, source: Shortcut | None = None, *, looks: bool = False) -> None:
        self.source = source or Counting()
        self.events: list[Event] = []
        self.bodies: list[Any] = []
        self.consumer = Consumer(gates=[], sources=[self.source, GitHub()])

        @self.source.on("story.update")
        async def handle(event: Event, tx: Transaction) -> None:
            self.events.append(event)
            if looks:
                self.bodies.append(event.body)

    async def apply(self, pool: Pool, id: int, most_events: int = 10_000) -> dict[str, Any]:
        claim = await inbox.take(pool, "applying", id)
        assert claim is not None
        async with claim.held():
            await apply.apply(self.consumer, claim, most_events=most_events)
        [row] = await sql(pool, "SELECT * FROM deliveries WHERE id = %(id)s", id=id)
        return row


async def children(pool: Pool, id: int) -> list[dict[str, Any]]:
    rows = "SELECT *, not_before - min(not_before) OVER () AS later FROM deliveries WHERE parent = %(id)s"
    return await sql(pool, rows + " ORDER BY id", id=id)


async def split(pool: Pool, handled: Handled, body: bytes) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    [id] = await arrived(pool, arrival(body))
    return await handled.apply(pool, id), await children(pool, id)


def several(count: int) -> bytes:
    body = json.loads(stories(*range(1, count + 1)))
    body["references"] = [{"id": 9, "entity_type": "label", "name": "patch"}]
    return json.dumps(body).encode()


async def test_a_body_is_read_once_however_many_events_it_has(pool: Pool) -> None:
    source = Counting()
    handled, body = Handled(source), several(5)
    _, rows = await split(pool, handled, body)
    for row in rows:
        assert (await handled.apply(pool, row["id"]))["status"] == "processed"
    assert source.reads == 1
    told = [(event.name, event.data, event.occurred_at) for event in handled.events]
    assert told == [(e.name, e.data, e.occurred_at) for e in Shortcut().events((), json.loads(body))]


@pytest.mark.parametrize("kept", [True, False])
async def test_the_whole_body_is_there_for_a_handler_that_reads_it_and_parsed_once(pool: Pool, kept: bool) -> None:
    source = Counting()
    handled, body = Handled(source, looks=True), several(5)
    _, rows = await split(pool, handled, body)
    if not kept:  # as in another process, or after a while
        apply.BODIES.forget()
        source.reads = 0
    for row in rows:
        await handled.apply(pool, row["id"])
    assert handled.bodies == [json.loads(body)] * 5
    assert source.reads == 1


async def test_another_deliverys_body_is_not_mistaken_for_its_own(pool: Pool) -> None:
    handled, bodies = Handled(looks=True), [several(2), several(3)]
    rows = [row for body in bodies for row in (await split(pool, handled, body))[1]]
    for row in sorted(rows, key=lambda row: row["position"]):
        await handled.apply(pool, row["id"])
        assert handled.bodies[-1]["id"] == handled.events[-1].body["id"]
    assert [len(body["actions"]) for body in handled.bodies] == [2, 3, 2, 3, 3]


async def test_a_copy_of_an_event_has_its_body_too(pool: Pool) -> None:
    handled = Handled()
    body = several(1)
    [id] = await arrived(pool, arrival(body))
    await handled.apply(pool, id)
    [event] = handled.events
    assert replace(event, name="another").body == event.body == json.loads(body)
    assert not hasattr(event, "bodies")


async def test_the_events_are_stored_in_one_statement_in_the_order_of_the_body(pool: Pool) -> None:
    await sql(pool, "CREATE TABLE statements (count integer)")
    await sql(
        pool,
        "CREATE FUNCTION counted() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN INSERT INTO statements SELECT count(*) FROM added; RETURN NULL; END $$",
    )
    await sql(
        pool,
        "CREATE TRIGGER counting AFTER INSERT ON deliveries REFERENCING NEW TABLE AS added"
        " FOR EACH STATEMENT EXECUTE FUNCTION counted()",
    )
    parent, rows = await split(pool, Handled(), several(300))
    assert await sql(pool, "SELECT count FROM statements") == [{"count": 1}, {"count": 300}]
    assert (parent["status"], parent["reason"]) == ("processed", "split into 300 events")
    assert [row["position"] for row in rows] == list(range(1, 301))


async def test_of_many_events_the_first_are_due_at_once_and_the_others_one_after_the_other(pool: Pool) -> None:
    [id] = await arrived(pool, arrival(several(DUE_AT_ONCE + 30)))
    claim = await inbox.take(pool, "applying", id)
    assert claim is not None
    async with claim.held():
        await apply.apply(Handled().consumer, claim)
    rows = await children(pool, id)
    later = [row["later"] for row in rows]
    assert later == [timedelta(0)] * DUE_AT_ONCE + [DUE_APART * place for place in range(1, 31)]
    assert claim.moved == [Ready("deliveries", "applying", row["id"]) for row in rows[:DUE_AT_ONCE]]


async def test_a_worker_applies_all_of_them_and_others_that_come_meanwhile_do_not_wait_for_the_last(
    database_url: str,
) -> None:
    handled = Handled()

    async def pushed(event: Event, tx: Transaction) -> None:
        handled.events.append(event)

    handled.consumer.sources["github"].on("push")(pushed)
    async with stack(database_url, handled.consumer) as running:
        assert (await running.send(from_shortcut(several(300)))).status_code == 202
        await until(lambda: bool(handled.events))
        assert (await running.send(from_github(b"{}"))).status_code == 202
        await until(lambda: len(handled.events) == 301, within_s=30)
    order = [event.source for event in handled.events]
    assert order.index("github") < 299


async def test_any_other_conflict_than_that_of_the_place_is_an_error_that_names_the_constraint(pool: Pool) -> None:
    await sql(pool, "CREATE UNIQUE INDEX one_each ON deliveries (event) WHERE parent IS NOT NULL")
    handled = Handled()
    [id] = await arrived(pool, arrival(several(2)))
    with pytest.raises(UniqueViolation):
        await handled.apply(pool, id)
    [row] = await sql(pool, "SELECT status, last_error FROM deliveries")
    assert row["status"] == "received"
    assert "one_each" in row["last_error"]
    assert await outcomes_of(pool, id) == ["error"]


async def test_events_that_are_there_stay_as_they_are_when_their_delivery_is_split_again(pool: Pool) -> None:
    handled = Handled()
    parent, rows = await split(pool, handled, several(3))
    await handled.apply(pool, rows[0]["id"])
    await sql(pool, "DELETE FROM deliveries WHERE id = %(id)s", id=rows[1]["id"])
    await sql(pool, "UPDATE deliveries SET status = 'received' WHERE id = %(id)s", id=parent["id"])
    await handled.apply(pool, parent["id"])
    again = await children(pool, parent["id"])
    assert [row["position"] for row in again] == [1, 3, 2]
    assert [row["status"] for row in again] == ["processed", "received", "received"]


# Too many


async def test_a_delivery_of_too_many_events_is_stored_and_dead_with_their_number(database_url: str) -> None:
    handled = Handled()
    async with stack(database_url, handled.consumer, settings=Settings(max_events=10)) as running:
        answers = [await running.send(from_shortcut(several(count))) for count in (10, 11)]
        assert [answer.status_code for answer in answers] == [202, 202]
        ids = [answer.json()["delivery"] for answer in answers]

        async def ended() -> bool:
            found = await running.sql("SELECT id FROM deliveries WHERE status IN ('received', 'applying')")
            return not found

        await until(ended)
        rows = {row["id"]: row for row in await running.deliveries()}
    assert rows[ids[0]]["reason"] == "split into 10 events"
    dead = rows[ids[1]]
    assert (dead["status"], dead["attempt_count"], len(rows)) == ("dead", 1, 12)
    assert dead["last_error"].startswith("it holds 11 events and is split into 10 at most")
    assert f"webhooks replay {ids[1]}" in dead["last_error"]


async def test_only_events_that_would_be_split_off_count(pool: Pool) -> None:
    body = json.loads(several(5))
    for entry in body["actions"][1:]:
        entry["action"] = "delete"
    [id] = await arrived(pool, arrival(json.dumps(body).encode()))
    assert (await Handled().apply(pool, id, most_events=1))["status"] == "processed"


async def test_a_delivery_that_held_too_many_is_split_once_the_limit_is_raised(pool: Pool) -> None:
    handled = Handled()
    [id] = await arrived(pool, arrival(several(3)))
    assert (await handled.apply(pool, id, most_events=2))["status"] == "dead"
    await sql(pool, "UPDATE deliveries SET status = 'received', attempt_count = 0")
    assert (await handled.apply(pool, id, most_events=3))["reason"] == "split into 3 events"


# What is kept


async def test_an_event_that_was_split_off_before_is_read_from_the_body(pool: Pool) -> None:
    """By a version that kept nothing with it."""
    handled = Handled()
    _, rows = await split(pool, handled, several(3))
    await sql(pool, "UPDATE deliveries SET part = NULL")
    assert (await handled.apply(pool, rows[1]["id"]))["status"] == "processed"
    assert [event.data["story_id"] for event in handled.events] == [2]


class Changed(Shortcut):
    """A version of a source that says something else of its events."""

    def events(self, headers: Headers, body: Any) -> list[RawEvent]:
        news = ["news"]
        return [RawEvent(e.name, {"id": e.data["id"], "news": news}) for e in super().events(headers, body)]


class NoJson(Shortcut):
    """A source whose data is no JSON."""

    def events(self, headers: Headers, body: Any) -> list[RawEvent]:
        return [RawEvent(e.name, {**e.data, "ids": {e.data["id"]}}) for e in super().events(headers, body)]


async def test_a_split_by_another_version_of_the_source_leaves_the_earlier_events_whole(pool: Pool) -> None:
    before, after = Handled(), Handled(Changed())
    parent, rows = await split(pool, before, several(3))
    await sql(pool, "DELETE FROM deliveries WHERE id = %(id)s", id=rows[1]["id"])
    await sql(pool, "UPDATE deliveries SET status = 'received' WHERE id = %(id)s", id=parent["id"])
    await after.apply(pool, parent["id"])
    for row in await children(pool, parent["id"]):
        await after.apply(pool, row["id"])
    assert [event.data.get("name", event.data.get("news")) for event in after.events] == [
        "story 1",
        "story 3",
        ["news"],
    ]
    assert after.events[0].data["references"] == json.loads(several(1))["references"]


async def test_a_source_whose_data_is_no_json_has_its_events_read_from_the_body(pool: Pool) -> None:
    handled = Handled(NoJson())
    _, rows = await split(pool, handled, several(2))
    for row in rows:
        await handled.apply(pool, row["id"])
    assert [event.data["ids"] for event in handled.events] == [{1}, {2}]


async def test_what_is_kept_of_a_pruned_body_is_not_applied(pool: Pool) -> None:
    handled = Handled()
    parent, rows = await split(pool, handled, several(2))
    await sql(pool, "UPDATE deliveries SET body = NULL, pruned_at = now() WHERE id = %(id)s", id=parent["id"])
    row = await handled.apply(pool, rows[0]["id"])
    assert (row["status"], handled.events) == ("dead", [])
    assert "its body was pruned" in row["last_error"]
