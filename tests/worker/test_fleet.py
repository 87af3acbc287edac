"""Processes that share a database and do not handle the same: what one cannot apply waits for one that can."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any, LiteralString

import pytest
from consumers import arrival, arrived, from_github, from_shortcut, quick, stack, stories
from gates import outcomes_of, sql, until

from webhooks import Claim, Consumer, Done, Event, Gate, GitHub, Pool, Shortcut, Transaction
from webhooks.apply import apply
from webhooks.inbox import inbox
from webhooks.status import applicable, as_json, processes, unknown
from webhooks.status import status as counts
from webhooks.worker import Worker, fleet
from webhooks.worker.fleet import Fleet

APPLIED = "CREATE TABLE applied (delivery bigint, event text, by text)"


def handling(*wanted: str, by: str = "") -> Consumer:
    """A consumer that handles these, each `source/event`; it knows the sources that are named, if only as `source/`."""
    sources = {"github": GitHub(), "shortcut": Shortcut()}

    async def note(event: Event, tx: Transaction) -> None:
        values = {"delivery": event.delivery, "event": event.name, "by": by}
        await tx.execute("INSERT INTO applied VALUES (%(delivery)s, %(event)s, %(by)s)", values)

    for name, _, event in (one.partition("/") for one in wanted):
        if event:
            sources[name].on(event)(note)
    return Consumer(gates=[], sources=[sources[name] for name in dict.fromkeys(one.split("/")[0] for one in wanted)])


@asynccontextmanager
async def process(url: str, consumer: Consumer, *, works: bool = True) -> AsyncIterator[tuple[Pool, Fleet]]:
    """Another process, registered."""
    async with Pool.open(url, settings=quick()) as pool:
        fleet = Fleet(pool, consumer, app="other:consumer", works=works)
        await fleet.join()
        yield pool, fleet


async def applied(pool: Pool, consumer: Consumer, id_: int, process: Pool | None = None) -> dict[str, Any]:
    """Claim a delivery and apply it, as a worker does; return its row."""
    claim = await inbox.take(pool, "applying", id_)
    assert claim is not None, "it cannot be claimed"
    async with claim.held():
        await apply(consumer, claim, (process or pool).process)
    return await delivery(pool, id_)


async def delivery(pool: Pool, id_: int) -> dict[str, Any]:
    [row] = await sql(pool, "SELECT * FROM deliveries WHERE id = %(id)s", id=id_)
    return row


async def silent(pool: Pool, seconds: int, who: Pool | None = None) -> None:
    """A process, or every one, was not heard of for so long."""
    await sql(
        pool,
        "UPDATE processes SET seen_at = seen_at - %(ago)s WHERE %(id)s::text IS NULL OR id = %(id)s",
        ago=timedelta(seconds=seconds),
        id=None if who is None else who.process,
    )


# What is wanted of whom: the handler of an event, or somebody who knows the source and so can read the event.
WANTED = [
    pytest.param("github/push", "shortcut/story.update", "shortcut/", None, id="the source is unknown here"),
    pytest.param("github/push", "shortcut/", "shortcut/", None, id="another only accepts the source"),
    pytest.param("shortcut/story.create", "shortcut/story.update", "shortcut/story.update", "story.update", id="event"),
]


@pytest.mark.parametrize("works", [True, False], ids=["a worker", "a receiver alone"])
@pytest.mark.parametrize(("mine", "theirs", "wants", "event"), WANTED)
async def test_what_another_living_process_handles_is_left_uncharged_and_not_seen_again(
    pool: Pool, database_url: str, mine: str, theirs: str, wants: str, event: str | None, works: bool
) -> None:
    [id_] = await arrived(pool, arrival(stories(7)))
    async with process(database_url, handling(theirs), works=works) as (other, _):
        row = await applied(pool, handling(mine), id_)
        assert (row["status"], row["wants"], row["event"]) == ("received", wants, event)
        assert (row["attempt_count"], row["reason"]) == (0, f"waits for a process that handles {wants}")
        assert await outcomes_of(pool, id_) == ["snoozed"]
        assert await inbox.take_next(pool, "applying", 10) == []
        [claim] = await inbox.take_next(other, "applying", 10, equal={"wants": wants})
        assert claim.key == id_


@pytest.mark.parametrize(
    ("mine", "reason"),
    [
        ("github/push", "no source is named shortcut any more"),
        ("shortcut/story.create", "no handler for story.update"),
    ],
    ids=["source", "event"],
)
@pytest.mark.parametrize("other", ["nobody", "others handle something else", "who handled it died"])
async def test_what_no_living_process_handles_is_ignored_at_once(
    pool: Pool, database_url: str, mine: str, reason: str, other: str
) -> None:
    [id_] = await arrived(pool, arrival(stories(7)))
    theirs = handling("github/release", "shortcut/story.update" if other == "who handled it died" else "github/push")
    async with process(database_url, theirs) as (died, _):
        await silent(pool, 0 if other == "others handle something else" else 31, died)
        row = await applied(pool, handling(mine), id_)
    assert (row["status"], row["wants"], row["reason"]) == ("ignored", None, reason)


async def test_the_sweep_ends_what_no_living_process_names_any_more_however_much_it_is(
    pool: Pool, database_url: str
) -> None:
    ids = await arrived(pool, *(arrival(stories(key)) for key in range(150)))
    [gone] = await arrived(pool, arrival(b"{}", source="github", event="release"))
    mine = Fleet(pool, handling("github/push"))
    await mine.join()
    async with process(database_url, handling("shortcut/story.update")) as (other, theirs):
        await sql(pool, "UPDATE deliveries SET wants = 'shortcut/' WHERE id = ANY(%(ids)s)", ids=ids[:75])
        await sql(pool, "UPDATE deliveries SET wants = 'shortcut/story.update' WHERE id = ANY(%(ids)s)", ids=ids[75:])
        await sql(pool, "UPDATE deliveries SET wants = 'github/release' WHERE id = %(id)s", id=gone)
        await mine.end_unhandled()
        assert (await delivery(pool, gone))["reason"] == "no handler for release"
        await theirs.leave()  # in order: the next one may be on its way
        await mine.end_unhandled()
        assert await sql(pool, "SELECT count(*) FROM deliveries WHERE status = 'received'") == [{"count": 150}]
        await silent(pool, 31, other)
        await mine.end_unhandled()
    counted = "SELECT reason, count(*) FROM deliveries WHERE status = 'ignored' GROUP BY reason ORDER BY reason"
    assert [tuple(row.values()) for row in await sql(pool, counted)] == [
        ("no handler for release", 1),
        ("no handler for story.update", 75),
        ("no source is named shortcut any more", 75),
    ]


async def test_a_time_without_the_database_is_nobodys_death(pool: Pool, database_url: str) -> None:
    first, second = await arrived(pool, arrival(stories(1)), arrival(stories(2)))
    mine = Fleet(pool, handling("github/push"))
    await mine.join()
    async with process(database_url, handling("shortcut/story.update")) as (other, _):
        await silent(pool, 600)
        assert (await applied(pool, handling("github/push"), first))["status"] == "received"
        await mine.end_unhandled()
        await mine.join()  # it is heard of before the other one is
        assert (await applied(pool, handling("github/push"), second))["status"] == "received"
        await mine.end_unhandled()
        assert (await delivery(pool, first))["wants"] == "shortcut/"
        await silent(pool, 31, other)
        await mine.end_unhandled()
        assert (await delivery(pool, first))["status"] == "ignored"


async def test_a_process_whose_event_loop_is_blocked_by_a_handler_lives_for_as_long_as_its_claim_is_renewed(
    pool: Pool, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "STAND_IN_AFTER_S", 0)
    [id_] = await arrived(pool, arrival(stories(7)))
    async with process(database_url, handling("shortcut/story.update")) as (other, _):
        seen = "SELECT 1 FROM processes WHERE seen_at > now() - interval '30 s'"
        await silent(pool, 31)
        claim = await inbox.take(other, "applying", id_)
        assert claim is not None
        async with claim.held():  # nothing in the loop says that this process lives
            await until(lambda: sql(pool, seen))
            await claim.complete("ignored")


async def test_events_of_one_request_that_two_processes_handle_are_each_for_the_one_that_does(
    pool: Pool, database_url: str
) -> None:
    body = json.loads(stories(1, 2, 3))
    for action, entry in zip(("update", "create", "delete"), body["actions"], strict=True):
        entry["action"] = action
    [id_] = await arrived(pool, arrival(json.dumps(body).encode()))
    async with process(database_url, handling("shortcut/story.create")):
        row = await applied(pool, handling("shortcut/story.update"), id_)
    assert (row["status"], row["event"]) == ("processed", "story.update, story.create")
    parts = await sql(pool, "SELECT event, wants FROM deliveries WHERE parent = %(id)s ORDER BY position", id=id_)
    assert [tuple(part.values()) for part in parts] == [
        ("story.update", None),
        ("story.create", "shortcut/story.create"),
    ]


async def test_the_one_event_that_counts_is_left_whole_for_the_process_that_handles_it(
    pool: Pool, database_url: str
) -> None:
    body = json.loads(stories(1, 2))
    body["actions"][1]["action"] = "create"
    [id_] = await arrived(pool, arrival(json.dumps(body).encode()))
    async with process(database_url, handling("shortcut/story.create")):
        row = await applied(pool, handling("shortcut/story.delete"), id_)
    assert (row["status"], row["wants"], row["event"]) == ("received", "shortcut/story.create", "story.create")


async def test_a_delivery_that_two_processes_read_differently_is_not_tossed_to_and_fro(
    pool: Pool, database_url: str
) -> None:
    [id_] = await arrived(pool, arrival(stories(7)))
    async with process(database_url, handling("shortcut/story.update")):
        await sql(pool, "UPDATE deliveries SET wants = 'shortcut/story.read'")
        row = await applied(pool, handling("shortcut/story.create"), id_)
    assert row["wants"] == "shortcut/story.update"
    assert await sql(pool, "SELECT 1 FROM deliveries WHERE not_before > now() + interval '3 s'")


# Copies, and what a start tells


@pytest.mark.parametrize("before", ["github/push", "shortcut/story.create"], ids=["source", "event"])
async def test_a_copy_of_what_was_ignored_for_want_of_a_handler_applies_it_and_a_start_tells_of_it(
    pool: Pool, database_url: str, before: str
) -> None:
    new, request = handling("shortcut/story.update"), from_shortcut(stories(7))
    async with stack(database_url, new, work=False) as running:
        assert (await running.send(request)).status_code == 202
        [id_] = [row["id"] for row in await running.deliveries()]
        assert (await applied(pool, handling(before), id_))["status"] == "ignored"
        async with pool.transaction() as tx:
            event = None if before == "github/push" else "story.update"
            assert await applicable(tx, new) == {("shortcut", event): 1}
            assert await applicable(tx, handling("github/push")) == {}
        assert (await running.send(request)).json()["status"] == "rearmed"
        row = await delivery(pool, id_)
    assert (row["status"], row["wants"], row["reason"]) == ("received", None, None)


async def test_a_copy_of_what_waits_for_another_process_leaves_it_waiting_and_helps_it_on(
    pool: Pool, database_url: str
) -> None:
    await sql(pool, APPLIED)
    request = from_shortcut(stories(7))
    async with process(database_url, handling("shortcut/story.update")):
        old = handling("shortcut/story.create")
        async with stack(database_url, old) as running:
            assert (await running.send(request)).status_code == 202
            await until(lambda: sql(pool, "SELECT 1 FROM deliveries WHERE wants = 'shortcut/story.update'"))
            assert (await running.send(request)).status_code == 200
        [row] = await sql(pool, "SELECT * FROM deliveries")
        assert (row["status"], row["attempt_count"]) == ("received", 0)
    async with stack(database_url, handling("shortcut/story.update")) as running:
        await sql(pool, "UPDATE deliveries SET not_before = now() + interval '1 h'")
        assert (await running.send(request)).status_code == 200
        await until(lambda: ended(pool, [row["id"]], "processed"))


async def test_a_copy_of_a_dead_delivery_is_decided_anew_by_whoever_claims_it(pool: Pool, database_url: str) -> None:
    request = from_shortcut(stories(7))
    async with stack(database_url, handling("shortcut/story.update"), work=False) as running:
        assert (await running.send(request)).status_code == 202
        await sql(
            pool, "UPDATE deliveries SET status = 'dead', claimed_from = 'received', wants = 'shortcut/story.read'"
        )
        assert (await running.send(request)).json()["status"] == "rearmed"
    assert len(await inbox.take_next(pool, "applying", 1)) == 1


async def ended(pool: Pool, ids: Sequence[int], status: str) -> bool:
    rows = await sql(pool, "SELECT status FROM deliveries WHERE id = ANY(%(ids)s)", ids=list(ids))
    return [row["status"] for row in rows] == [status] * len(ids)


# Workers side by side


async def test_neither_queue_starves_the_other(pool: Pool, database_url: str) -> None:
    await sql(pool, APPLIED)
    wanting = await arrived(pool, *(arrival(stories(key)) for key in range(150)))
    plain = await arrived(pool, *(arrival(b"{}", source="github") for _ in range(150)))
    await sql(pool, "UPDATE deliveries SET wants = 'shortcut/story.update' WHERE id = ANY(%(ids)s)", ids=wanting)
    both = handling("shortcut/story.update", "github/push")
    async with process(database_url, both), Pool.open(database_url, settings=quick(deliveries_concurrency=2)) as other:
        worker = Worker(other, both)
        worker.start()
        try:
            await until(lambda: ended(pool, wanting + plain, "processed"))
        finally:
            await worker.stop()
    rows = await sql(pool, "SELECT key::bigint AS key FROM attempts ORDER BY claim_seq LIMIT 150")
    assert len({row["key"] for row in rows} & set(wanting)) >= 50
    assert len({row["key"] for row in rows} & set(plain)) >= 50
    assert await sql(pool, "SELECT count(*) FROM applied") == [{"count": 300}]


async def test_what_is_left_by_one_worker_is_applied_by_the_other_once_and_claimed_by_no_third(
    pool: Pool, database_url: str
) -> None:
    await sql(pool, APPLIED)
    consumers = [
        handling("github/push", by="old"),
        handling("github/push", by="old"),
        handling("shortcut/story.update", "github/push", by="new"),
    ]
    async with AsyncExitStack() as stack:
        pools = [await stack.enter_async_context(Pool.open(database_url, settings=quick())) for _ in consumers]
        fleets = [Fleet(one, consumer) for one, consumer in zip(pools, consumers, strict=True)]
        for one in fleets:
            await one.join()
        ids = await arrived(pool, *(arrival(stories(key)) for key in range(40)))
        ids += await arrived(pool, *(arrival(b"{}", source="github") for _ in range(20)))
        for own, consumer in zip(pools, consumers, strict=True):
            worker = Worker(own, consumer)
            worker.start()
            stack.push_async_callback(worker.stop)
        await until(lambda: ended(pool, ids, "processed"))
    rows = await sql(pool, "SELECT event, by, count(*) FROM applied GROUP BY 1, 2")
    assert sum(row["count"] for row in rows) == 60
    assert {row["by"] for row in rows if row["event"] == "story.update"} == {"new"}
    # One that left a delivery does not see it again.
    assert await sql(pool, "SELECT 1 FROM attempts GROUP BY key HAVING count(*) > 2") == []


async def test_two_applications_share_a_database(pool: Pool, database_url: str) -> None:
    await sql(pool, APPLIED)
    one, other = handling("github/push", by="one"), handling("shortcut/story.update", by="other")
    async with stack(database_url, one) as first, stack(database_url, other) as second:
        await until(lambda: registered(pool, 2))
        for number in range(20):
            assert (await first.send(from_github(b"{}"))).status_code == 202
            assert (await second.send(from_shortcut(stories(number)))).status_code == 202
        await until(lambda: counted(pool, 40))
    rows = await sql(pool, "SELECT event, by, count(*) FROM applied GROUP BY 1, 2 ORDER BY 1")
    assert [tuple(row.values()) for row in rows] == [("push", "one", 20), ("story.update", "other", 20)]


async def registered(pool: Pool, count: int) -> bool:
    return await sql(pool, "SELECT count(*) FROM processes") == [{"count": count}]


async def counted(pool: Pool, count: int) -> bool:
    return await sql(pool, "SELECT count(*) FROM applied") == [{"count": count}]


# Two flows that disagree about what becomes of a row


def flowing(claimed: LiteralString, done: LiteralString = "drafted", *, ready: LiteralString = "clarified") -> Consumer:
    """One phase; its function does nothing."""
    sessions = Gate("patch_sessions", key="sc_id")

    @sessions.phase(ready, claimed=claimed, done=done, max_attempts=5)
    async def work(session: dict[str, Any], claim: Claim) -> Done:
        return claim.done()

    return Consumer(gates=[sessions], sources=[])


BEFORE = ("patch_sessions", "drafting")


async def test_of_two_flows_the_one_first_seen_later_is_in_force_whoever_starts_last(database_url: str) -> None:
    async with process(database_url, flowing("drafting")) as (old_pool, old):
        assert not old.outranked
        async with process(database_url, flowing("reviewing")) as (_, new):
            await old.join()
            assert not new.outranked
            [reason] = [old.outranked[BEFORE]]
            assert "other:consumer" in reason
            assert "clarified → reviewing: drafted, first seen later" in reason
            assert old_pool.health.degraded == {"patch_sessions.drafting.flow": reason}
            # One of the old version that crashed starts again: it is not newer for that.
            async with process(database_url, flowing("drafting")) as (_, again):
                await new.join()
                assert set(again.outranked) == {BEFORE}
                assert not new.outranked
            await new.leave()
            await old.join()
            assert not old.outranked
            assert not old_pool.health.degraded


async def test_a_flow_is_in_force_for_as_long_as_a_process_that_works_by_it_lives(
    pool: Pool, database_url: str
) -> None:
    async with process(database_url, flowing("drafting")) as (_, old):
        async with process(database_url, flowing("reviewing"), works=False):
            await old.join()
            assert not old.outranked  # a receiver alone claims nothing
        async with process(database_url, flowing("reviewing")) as (other, _):
            await old.join()
            assert set(old.outranked) == {BEFORE}
            await silent(pool, 31, other)
            await old.join()
            assert not old.outranked


@pytest.mark.parametrize(
    ("other", "disagrees"),
    [
        (flowing("drafting", "opened"), True),
        (flowing("drafting", "drafted"), False),
        (flowing("opening", "opened", ready="drafted"), False),
    ],
    ids=["another done status", "the same", "another ready status"],
)
async def test_flows_disagree_where_a_row_would_go_elsewhere(
    database_url: str, other: Consumer, disagrees: bool
) -> None:
    async with process(database_url, flowing("drafting")) as (_, old), process(database_url, other):
        await old.join()
        assert bool(old.outranked) is disagrees


async def test_a_worker_whose_flow_is_outranked_claims_nothing_there_and_goes_on_once_it_is_not(
    pool: Pool, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fleet.HEARTBEAT_S < 5
    monkeypatch.setattr(fleet, "HEARTBEAT_S", 0.1)
    old, gate = flowing("drafting"), Gate("patch_sessions", key="sc_id")
    async with stack(database_url, old) as running:
        await until(lambda: registered(pool, 1))
        async with process(database_url, flowing("reviewing")) as (_, new):
            await until(lambda: running.pool.health.degraded)
            async with pool.transaction() as tx:
                for key in range(5):
                    await gate.open(tx, to="clarified", sc_id=key, title="a story")
            assert running.worker is not None
            worker = running.worker
            worker.look()
            lane = worker._lanes[BEFORE]
            looked_at = lane.seen_at
            await until(lambda: lane.seen_at > looked_at + 0.2)
            assert worker.alive
            assert await sql(pool, "SELECT 1 FROM attempts") == []
            await new.leave()
        await until(lambda: all_in(pool, "drafted", 5))
    assert await sql(pool, "SELECT 1 FROM attempts WHERE phase <> 'drafting'") == []


async def all_in(pool: Pool, status: str, count: int) -> bool:
    rows = await sql(pool, "SELECT 1 FROM patch_sessions WHERE status = %(status)s", status=status)
    return len(rows) == count


# What a person is told


async def test_rows_in_a_status_that_no_phase_knows_are_counted_at_the_start_and_shown(
    pool: Pool, database_url: str
) -> None:
    await sql(pool, "ALTER TABLE patch_sessions DROP CONSTRAINT patch_sessions_status")
    rows = "INSERT INTO patch_sessions (sc_id, title, status) SELECT n, '', %(status)s FROM unnest(%(keys)s) AS n"
    for status, first, last in (("reviewing", 1, 3), ("drafted", 4, 5), ("closed", 6, 6), ("escalated", 7, 7)):
        await sql(pool, rows, status=status, keys=list(range(first, last + 1)))
    gate = Gate("patch_sessions", key="sc_id", statuses=("closed",))
    gate.phase("clarified", claimed="drafting", done="drafted")
    async with stack(database_url, Consumer(gates=[gate], sources=[])) as running:
        await until(lambda: running.pool.health.degraded)
        [reason] = [running.pool.health.degraded["patch_sessions.status"]]
        assert reason.startswith("rows in a status that no phase knows: 3 in reviewing; ")
    # Another version that runs knows it.
    async with process(database_url, flowing("reviewing")), pool.transaction() as tx:
        assert await unknown(tx, gate) == {}


async def test_status_lists_the_processes_that_live_and_what_is_at_fault_in_each(pool: Pool, database_url: str) -> None:
    async with process(database_url, handling("github/push")) as (other, its):
        other.health.report("orders.packing", "its table is gone")
        async with process(database_url, handling("github/push"), works=False) as (third, gone):
            await its.join()
            await gone.leave()
            await arrived(pool, arrival(b"{}", source="github"))
            await sql(pool, "UPDATE deliveries SET wants = 'github/release'")
            async with pool.transaction() as tx:
                found = as_json(await counts(tx, handling("github/push")), await processes(tx))
    assert third.process not in str(found)
    [one] = found["processes"]
    assert (one["id"], one["app"], one["degraded"]) == (
        other.process,
        "other:consumer",
        {"orders.packing": "its table is gone"},
    )
    assert (found["phases"][0]["backlog"], found["phases"][0]["wanting"]) == (0, 1)
