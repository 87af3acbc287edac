"""The feed: what is in it, in which order, and what its followers are told."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, LiteralString

import httpx
import psutil
import pytest
from consumers import arrival, arrived, from_github, from_shortcut, stories
from feeds import Deployed, body_of, deliveries, deployed, following
from gates import backends, elsewhere, sql, until, until_blocked
from processes import empty_database, serving, webhooks
from psycopg import AsyncConnection
from psycopg.sql import SQL

from webhooks import Pool, feed
from webhooks.control import frames
from webhooks.control.followers import Seats
from webhooks.control.watch import Watch
from webhooks.db import Transaction
from webhooks.feed import (
    MOST_BYTES,
    MOST_DELIVERIES,
    PIECE_BYTES,
    START,
    Level,
    NotAPlace,
    Page,
    Place,
    read_place,
    restored,
    written,
)
from webhooks.inbox import insert
from webhooks.serve.servers import LEAVE_WITHIN_S

# What a sender may write and no serialiser would write again.
ODDLY_WRITTEN = b'{\n   "a": 2,\n  "id": 12345678901234567890, "f": 1.0, "e": "\\u00e9", "a": 3\n}'


async def level(pool: Pool) -> Level:
    async with pool.transaction() as tx:
        return await feed.level(tx)


async def page_now(pool: Pool, after: Place = START, *sources: str) -> Page:
    async with pool.transaction() as tx:
        return await feed.page(tx, after, sources)


async def page(pool: Pool, after: Place = START, *sources: str) -> Page:
    """A page, once nothing is held back: other tests may share the server."""

    async def settled() -> bool:
        return not (await level(pool)).held

    await until(settled)
    return await page_now(pool, after, *sources)


async def whole(pool: Pool, *sources: str) -> list[int]:
    """The ids of the whole feed, page after page."""
    ids: list[int] = []
    place, more = START, True
    while more:
        found = await page(pool, place, *sources)
        ids += [entry.id for entry in found.entries]
        place, more = found.place, found.more
    return ids


async def located(pool: Pool, after: Place | datetime | timedelta | Literal["now", "all"]) -> Place:
    async with pool.transaction() as tx:
        return await feed.located(tx, after)


# ---- places


@pytest.mark.parametrize("place", [START, Place(1, 1, 1), Place(2**64 - 1, 2**63 - 1, 2**63 - 1), Place(743, 12, -1)])
def test_a_place_is_read_as_it_was_written(place: Place) -> None:
    assert read_place(written(place)) == place


@pytest.mark.parametrize(
    "text",
    [
        "",
        "now",
        "1h",
        "12",
        "é",
        "AgAAAAAAAAABAAAAAAAAAAIAAAAAAAAAA",  # one too short
        "AgAAAAAAAAABAAAAAAAAAAIAAAAAAAAAAwA",  # one too long
        "AwAAAAAAAAABAAAAAAAAAAIAAAAAAAAAAw",  # another version
        "AgAAAAAAAAABAAAAAAAAAAIAAAAAAAAAAN",  # bits past the end
        "AgAAAAAAAAABAAAAAAAAAAIAAAAAAAAA/w",  # not our alphabet
        "AgAAAAAAAAABgAAAAAAAAAAAAAAAAAAAAw",  # no such id
        "AgAAAAAAAAABAAAAAAAAAAIAAAAAAAAAAw==",
    ],
)
def test_a_text_that_no_place_is_written_as_is_refused(text: str) -> None:
    with pytest.raises(NotAPlace):
        read_place(text)


# ---- order


async def test_a_commit_that_comes_late_is_missed_by_ids_and_not_by_the_feed(database_url: str, pool: Pool) -> None:
    """The earlier of two accepts is held open while the later one commits, and somebody looks."""
    async with await elsewhere(database_url) as slow, slow.transaction():
        early = (await insert(tx_of(slow), [arrival(b"early", key="early")]))["shortcut", "early"]
        [late] = await arrived(pool, arrival(b"late"))
        by_id = [row["id"] for row in await sql(pool, "SELECT id FROM deliveries ORDER BY id")]
        seen_meanwhile = await page_now(pool)
        held = await level(pool)

    by_id += [
        row["id"] for row in await sql(pool, "SELECT id FROM deliveries WHERE id > %(id)s ORDER BY id", id=by_id[-1])
    ]
    rest = await page(pool, seen_meanwhile.place)

    assert early < late
    assert by_id == [late], "whoever follows ids has passed the early one by"
    assert seen_meanwhile.entries == []
    assert (held.held, held.last) == (1, START)
    assert [entry.id for entry in rest.entries] == [early, late]


def tx_of(connection: AsyncConnection[dict[str, Any]]) -> Transaction:
    return Transaction(connection)


async def test_pages_put_together_are_the_whole_in_order(pool: Pool) -> None:
    for _ in range(5):
        await arrived(pool, *(arrival(b"x") for _ in range(MOST_DELIVERIES // 2 - 7)))
    rows = await sql(pool, "SELECT id FROM deliveries ORDER BY accepted_xid, id")

    assert await whole(pool) == [row["id"] for row in rows]
    assert len((await page(pool)).entries) == MOST_DELIVERIES


async def test_a_transaction_in_any_database_of_the_server_holds_back_what_comes_after_it_and_that_is_told(
    pool: Pool, server_url: str
) -> None:
    async with await elsewhere(server_url) as other:
        async with other.transaction():
            await other.execute("SELECT pg_current_xact_id()")
            ids = await arrived(pool, arrival(b"1", key="1"), arrival(b"2", key="2"))
            await sql(pool, "UPDATE deliveries SET received_at = received_at - interval '40 seconds'")
            held = await level(pool)
            assert (await page_now(pool)).entries == []
        assert await whole(pool) == ids

    assert held.held == 2
    assert 40 <= held.held_s < 60


# ---- what is in it


async def test_it_has_what_was_received_and_no_parts_or_replays_of_it(pool: Pool) -> None:
    received, fetched = await arrived(pool, arrival(b"{}", key="a"), arrival(b"{}", key="b"))
    await sql(pool, "UPDATE deliveries SET origin = 'reconcile' WHERE id = %(id)s", id=fetched)
    await sql(
        pool,
        "INSERT INTO deliveries (source, dedup_key, position, parent, status)"
        " VALUES ('shortcut', 'a', 1, %(id)s, 'received')",
        id=received,
    )
    await sql(
        pool,
        "INSERT INTO deliveries (source, dedup_key, replay_of, origin, body, status)"
        " VALUES ('shortcut', 'a again', %(id)s, 'replay', '{}', 'received')",
        id=received,
    )

    assert await whole(pool) == [received, fetched]


async def test_only_the_sources_asked_for_are_in_it(pool: Pool) -> None:
    a, b, c = await arrived(
        pool, arrival(b"1", key="1"), arrival(b"2", key="2", source="github"), arrival(b"3", key="3", source="mirror")
    )

    assert sorted(await whole(pool, "shortcut", "mirror")) == sorted([a, c])
    assert await whole(pool, "github") == [b]


async def test_what_others_sent_is_looked_through_once(pool: Pool) -> None:
    await arrived(pool, *(arrival(b"x") for _ in range(3)))

    found = await page(pool, START, "github")

    assert found == Page([], (await level(pool)).last, more=False)


async def test_a_page_takes_what_fits_and_of_a_longer_body_the_beginning(pool: Pool) -> None:
    sizes = [10, PIECE_BYTES * 2, MOST_BYTES // 2, MOST_BYTES // 2, MOST_BYTES * 9, 1, 0]
    bodies = [bytes([65 + place]) * size for place, size in enumerate(sizes)]
    for number, body in enumerate(bodies):
        await arrived(pool, arrival(body, key=str(number)))

    pages: list[list[bytes | None]] = []
    place, more = START, True
    while more:
        found = await page(pool, place)
        pages.append([entry.body for entry in found.entries])
        assert all(entry.body_bytes == len(bodies[entry.id - 1]) for entry in found.entries)
        place, more = found.place, found.more

    begun = [body[:PIECE_BYTES] for body in bodies]
    assert pages == [begun[:2], begun[2:4], begun[4:]]


async def test_the_rest_of_a_body_is_read_piece_by_piece_and_not_after_it_was_pruned(pool: Pool) -> None:
    body = bytes(number % 251 for number in range(PIECE_BYTES * 2 + 5))
    await arrived(pool, arrival(body))
    [entry] = (await page(pool)).entries

    async def piece(start: int) -> bytes | None:
        async with pool.transaction() as tx:
            return await feed.piece(tx, entry, start)

    xid = str(entry.place.xid)
    pieces = [entry.body, await piece(PIECE_BYTES), await piece(PIECE_BYTES * 2)]
    await sql(pool, "UPDATE deliveries SET accepted_xid = '1'")
    another = await piece(PIECE_BYTES)
    await sql(pool, "UPDATE deliveries SET accepted_xid = %(xid)s::xid8, body = NULL, pruned_at = now()", xid=xid)
    assert another is None
    assert b"".join(each or b"" for each in pieces) == body
    assert await piece(PIECE_BYTES) is None


async def test_a_page_behind_a_delivery_that_is_there_no_more_is_none(pool: Pool) -> None:
    """The database was put back to an earlier time under a follower that stayed connected."""
    await arrived(pool, arrival(b"1", key="1"), arrival(b"2", key="2"))
    place = (await page(pool)).place
    await sql(pool, "DELETE FROM deliveries WHERE id = %(id)s", id=place.id)
    await arrived(pool, arrival(b"accepted since"))

    with pytest.raises(NotAPlace, match="restored"):
        await page(pool, place)


async def test_a_page_has_a_horizon_of_its_own(pool: Pool, database_url: str) -> None:
    """Whatever was known before: after a crash numbers are given out again."""
    async with await elsewhere(database_url) as slow, slow.transaction():
        await insert(tx_of(slow), [arrival(b"early", key="early")])
        async with pool.transaction() as tx:
            [late] = await arrived(pool, arrival(b"late"))
            assert (await feed.page(tx, START)).entries == []
    assert late in await whole(pool)


async def test_a_pruned_delivery_is_in_it_without_its_body(pool: Pool) -> None:
    [id] = await arrived(pool, arrival(b"x"))
    await sql(pool, "UPDATE deliveries SET body = NULL, headers = '[]', pruned_at = now() WHERE id = %(id)s", id=id)

    [entry] = (await page(pool)).entries

    assert (entry.id, entry.body) == (id, None)
    assert entry.pruned_at is not None


# ---- where to start


async def test_a_start_now_leaves_out_what_is_there_and_a_start_at_all_does_not(pool: Pool) -> None:
    before = await arrived(pool, arrival(b"1"))
    now = await located(pool, "now")
    after = await arrived(pool, arrival(b"2"))

    assert [entry.id for entry in (await page(pool, now)).entries] == after
    assert [entry.id for entry in (await page(pool, await located(pool, "all"))).entries] == before + after


async def test_a_start_now_does_not_leave_out_what_is_being_accepted(pool: Pool, database_url: str) -> None:
    async with await elsewhere(database_url) as slow:
        async with slow.transaction():
            ids = await insert(tx_of(slow), [arrival(b"early", key="early")])
            now = await located(pool, "now")
        assert [entry.id for entry in (await page(pool, now)).entries] == list(ids.values())


@pytest.mark.parametrize("ago", [timedelta(hours=2), "at"])
async def test_a_start_at_a_time_leaves_out_what_was_received_before(pool: Pool, ago: timedelta | str) -> None:
    old, recent, newest = [(await arrived(pool, arrival(bytes([65 + number]))))[0] for number in range(3)]
    for id, hours in ((old, 3), (recent, 1)):
        await sql(
            pool,
            "UPDATE deliveries SET received_at = now() - %(hours)s * interval '1 hour' WHERE id = %(id)s",
            id=id,
            hours=hours,
        )
    when = ago if isinstance(ago, timedelta) else datetime.now(UTC) - timedelta(hours=2)

    assert [entry.id for entry in (await page(pool, await located(pool, when))).entries] == [recent, newest]


async def test_a_start_at_a_time_after_everything_is_now(pool: Pool) -> None:
    await arrived(pool, arrival(b"1"))

    assert await located(pool, datetime(2999, 1, 1, tzinfo=UTC)) == await located(pool, "now")


async def test_a_start_at_a_time_does_not_pass_by_what_is_still_open(pool: Pool, database_url: str) -> None:
    async with await elsewhere(database_url) as slow:
        async with slow.transaction():
            early = (await insert(tx_of(slow), [arrival(b"early", key="early")]))["shortcut", "early"]
            [old] = await arrived(pool, arrival(b"old"))
            await sql(pool, "UPDATE deliveries SET received_at = received_at - interval '2 h'")
            [late] = await arrived(pool, arrival(b"late"))
            place = await located(pool, timedelta(hours=1))
        assert [entry.id for entry in (await page(pool, place)).entries] == [early, old, late]


async def test_a_place_that_was_served_is_one_to_start_at(pool: Pool) -> None:
    """A start at a time too, and the one behind everything: each names a delivery that is there, or none."""
    await arrived(pool, arrival(b"1", key="1"))
    [second] = await arrived(pool, arrival(b"2"))
    await sql(pool, "UPDATE deliveries SET received_at = received_at + interval '1 h' WHERE id = %(id)s", id=second)
    served_ = [entry.place for entry in (await page(pool)).entries]

    found = [*served_, (await level(pool)).last, await located(pool, datetime.now(UTC) + timedelta(minutes=30)), START]

    assert [await located(pool, place) for place in found] == found
    assert found[3] == served_[0]


@pytest.mark.parametrize(
    "differs",
    [
        pytest.param("accepted_xid = (accepted_xid::text::bigint - 1)::text::xid8", id="its transaction"),
        pytest.param("received_at = received_at + interval '1 microsecond'", id="its receipt"),
    ],
)
async def test_a_place_behind_another_delivery_of_the_same_number_is_refused(
    pool: Pool, differs: LiteralString
) -> None:
    """Another database counts as far, or this one was restored and has counted on since."""
    [id] = await arrived(pool, arrival(b"1"))
    place = (await level(pool)).last
    await sql(pool, SQL("UPDATE deliveries SET {} WHERE id = %(id)s").format(SQL(differs)), id=id)

    with pytest.raises(NotAPlace, match=rf"delivery {id} .* restored"):
        await located(pool, place)


async def test_a_place_behind_a_delivery_that_is_not_here_is_refused(pool: Pool) -> None:
    await arrived(pool, arrival(b"1"))
    place = (await level(pool)).last
    await sql(pool, "DELETE FROM deliveries")

    with pytest.raises(NotAPlace, match="removed"):
        await located(pool, place)


AHEAD = "UPDATE deliveries SET accepted_xid = (accepted_xid::text::bigint + 1000000 - id * 10)::text::xid8"


async def test_a_place_that_this_server_has_not_come_to_yet_is_refused_though_its_delivery_is_here(pool: Pool) -> None:
    """From there on nothing would come until this server has counted so far."""
    [id] = await arrived(pool, arrival(b"1"))
    await sql(pool, AHEAD)
    [row] = await sql(pool, "SELECT accepted_xid::text AS xid, received_at FROM deliveries")

    with pytest.raises(NotAPlace, match="restored"):
        await located(pool, Place.behind(int(row["xid"]), id, row["received_at"]))


async def test_what_a_dump_of_another_server_brought_is_put_behind_in_its_order(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restored, "MOST_AT_ONCE", 2)
    ahead = [(await arrived(pool, arrival(bytes([65 + number]))))[0] for number in range(5)]
    await sql(pool, AHEAD)  # from the last to the first
    here = await arrived(pool, arrival(b"accepted here"))
    place = (await level(pool)).last

    async def put_behind() -> int:
        async with pool.transaction() as tx:
            return await feed.put_behind(tx)

    counts = [await put_behind() for _ in range(4)]
    after = await arrived(pool, arrival(b"accepted later"))

    assert counts == [2, 2, 1, 0]
    assert await whole(pool) == [*here, *(ahead[3], ahead[4]), *(ahead[1], ahead[2]), ahead[0], *after]
    assert [entry.id for entry in (await page(pool, place)).entries][-1:] == after
    assert await located(pool, place) == place


async def test_deliveries_are_put_behind_by_one_process_at_a_time(pool: Pool, database_url: str) -> None:
    """To a statement that waited, what another one has numbered meanwhile would look like another server's."""
    await arrived(pool, arrival(b"1"))
    await sql(pool, AHEAD)
    async with await elsewhere(database_url) as other, other.transaction():
        assert await feed.put_behind(tx_of(other)) == 1
        async with pool.transaction() as tx:
            assert await feed.put_behind(tx) == 0
    async with pool.transaction() as tx:
        assert await feed.put_behind(tx) == 0


async def test_what_was_accepted_here_keeps_its_place_while_others_are_accepting(pool: Pool, database_url: str) -> None:
    async with await elsewhere(database_url) as slow, slow.transaction():
        await insert(tx_of(slow), [arrival(b"3", key="3")])
        await arrived(pool, arrival(b"1", key="1"), arrival(b"2", key="2"))
        before = await sql(pool, "SELECT id, accepted_xid FROM deliveries ORDER BY id")
        async with pool.transaction() as tx:
            assert await feed.put_behind(tx) == 0
        assert await sql(pool, "SELECT id, accepted_xid FROM deliveries ORDER BY id") == before


async def test_waiting_counts_what_lies_behind_a_place(pool: Pool) -> None:
    first, *_ = await arrived(pool, arrival(b"1", key="1"), arrival(b"2", key="2"), arrival(b"3", source="github"))
    [entry, *_] = (await page(pool)).entries
    async with pool.transaction() as tx:
        now = await feed.level(tx)
        all_of_it = await feed.waiting(tx, START, now)
        of_one = await feed.waiting(tx, START, now, ["shortcut"])
        behind = await feed.waiting(tx, entry.place, now)
        none = await feed.waiting(tx, now.last, now)

    assert (all_of_it.count, of_one.count, behind.count, none.count) == (3, 2, 2, 0)
    rows = await sql(pool, "SELECT received_at FROM deliveries WHERE id = %(id)s", id=first)
    assert of_one.since == rows[0]["received_at"]
    assert none.since is None


async def test_a_page_is_read_along_its_index(pool: Pool) -> None:
    """However the table grows, a page costs what is on it: with sequential scans left out, nothing is sorted."""
    await arrived(pool, *(arrival(b"x") for _ in range(50)))
    async with pool.transaction() as tx:
        await tx.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off")
        place = {"xid": "0", "id": 0, "horizon": str((await feed.level(tx)).horizon), "sources": None}
        params = {**place, "most": MOST_DELIVERIES, "most_bytes": MOST_BYTES, "piece": PIECE_BYTES}
        explained = await (
            await tx.execute(
                b"EXPLAIN " + feed.PAGE,
                {**params, "most": MOST_DELIVERIES, "most_bytes": MOST_BYTES, "piece": PIECE_BYTES},
            )
        ).fetchall()
    plan = "\n".join(row["QUERY PLAN"] for row in explained)
    inside = plan.partition("CTE next")[2].partition("CTE fitting")[0]

    assert "deliveries_feed" in inside
    assert "Sort" not in inside


# ---- followers


@pytest.fixture
async def here(database_url: str) -> AsyncIterator[Deployed]:
    """Looked at only when told: the poll is too far off to help."""
    async with deployed(database_url, poll_s=60) as running:
        yield running


@pytest.mark.invariant(12)
@pytest.mark.parametrize(
    "request_", [from_shortcut(ODDLY_WRITTEN), from_github(b"\xef\xbb\xbf{}"), from_github(b"\xff"), from_github(b"")]
)
async def test_a_follower_is_given_exactly_what_was_received(here: Deployed, request_: Any) -> None:
    number = (await here.stack.send(request_)).json()["delivery"]

    async with following(here.url) as events:
        [event] = await deliveries(events, 1)

    told = json.loads(event.data)
    [row] = await here.stack.deliveries()
    assert body_of(event) == request_.body
    assert told["headers"] == row["headers"]
    assert (told["id"], told["dedup_key"]) == (number, row["dedup_key"])
    assert datetime.fromisoformat(told["received_at"]) == row["received_at"]
    assert read_place(event.id).id == number


async def test_what_is_accepted_here_comes_at_once(here: Deployed) -> None:
    here.stack.accepter._on_moved = lambda rows: here.control.feed.look()  # as serve does
    async with following(here.url, "after=now") as events:
        assert (await anext(events)).event == "hello"
        await here.stack.send(from_shortcut(stories(1)))
        await deliveries(events, 1)


async def test_what_another_process_accepts_is_heard_of(here: Deployed, database_url: str) -> None:
    async with following(here.url, "after=now") as events, deployed(database_url) as other:
        assert (await anext(events)).event == "hello"
        bell = other.control.feed._watch._bell
        bell.start(listen=False)
        await other.stack.send(from_shortcut(stories(1)))
        bell.ring()
        await deliveries(events, 1)
        await bell.stop()


async def test_what_nobody_tells_of_is_found_by_polling(database_url: str) -> None:
    async with deployed(database_url, poll_s=0.1) as here, following(here.url, "after=now") as events:
        assert (await anext(events)).event == "hello"
        await here.stack.send(from_shortcut(stories(1)))
        await deliveries(events, 1)


async def settled(here: Deployed) -> Watch:
    """Wait until nothing but the next accept or poll makes the watch of a new follower look."""
    watch = here.control.feed._watch
    bell = watch._bell
    await until(lambda: bell._self_test and not bell.heard.is_set() and not watch._called.is_set())
    return watch


async def test_what_is_held_back_comes_when_the_transaction_ends_that_holds_it(
    here: Deployed, database_url: str
) -> None:
    """Nobody rings when it ends; it is looked for until it comes, long before the poll."""
    here.stack.accepter._on_moved = lambda rows: here.control.feed.look()
    async with following(here.url, "after=now") as events, await elsewhere(database_url) as slow:
        assert (await anext(events)).event == "hello"
        watch = await settled(here)
        async with slow.transaction():
            early = await insert(tx_of(slow), [arrival(b"early", key="early")])
            late = (await here.stack.send(from_shortcut(stories(1)))).json()["delivery"]
            await until(lambda: watch.level.held == 1)
        found = await deliveries(events, 2)

    assert [json.loads(event.data)["id"] for event in found] == [*early.values(), late]


async def test_each_follower_has_its_own_place(here: Deployed) -> None:
    for number in range(4):
        await here.stack.send(from_shortcut(stories(number)))
    async with following(here.url) as events:
        everything = await deliveries(events, 4)

    async with (
        following(here.url, f"after={everything[0].id}") as one,
        following(here.url, "after=all", **{"last-event-id": everything[2].id}) as other,
        following(here.url, "source=github&after=all") as third,
    ):
        assert [event.data for event in await deliveries(one, 3)] == [event.data for event in everything[1:]]
        assert [event.data for event in await deliveries(other, 1)] == [everything[3].data]
        assert json.loads((await anext(third)).data)["waiting"] == 0


async def test_many_followers_share_one_connection_to_the_database(here: Deployed, database_url: str) -> None:
    async with following(here.url) as one:
        await anext(one)
        await until(lambda: len(backends(database_url)) >= 5)  # the accepter's two, the pool's, the feed's, its LISTEN
        before = len(backends(database_url))
        async with following(here.url) as other, following(here.url) as third:
            await here.stack.send(from_shortcut(stories(1)))
            here.control.feed.look()
            for events in (one, other, third):
                await deliveries(events, 1)
            assert len(backends(database_url)) == before


async def test_it_says_at_the_start_what_waits_and_when_asked(here: Deployed) -> None:
    for number in range(3):
        await here.stack.send(from_shortcut(stories(number)))
    [first, *_] = await here.stack.deliveries()
    async with following(here.url) as events:
        hello = await anext(events)
        rest = await deliveries(events, 3)
    async with httpx.AsyncClient(trust_env=False) as client:
        asked = (await client.get(f"{here.url}/api/feed/waiting?after={rest[0].id}&source=shortcut")).json()

    told = json.loads(hello.data)
    assert (hello.event, told["waiting"]) == ("hello", 3)
    assert datetime.fromisoformat(told["waiting_since"]) == first["received_at"]
    assert told["lag"] == {"held_back": 0, "seconds": 0.0}
    assert (asked["waiting"], asked["sources"]) == (2, ["shortcut"])


async def test_a_pruned_body_is_said_to_be_pruned_and_not_passed_over(here: Deployed) -> None:
    number = (await here.stack.send(from_shortcut(stories(1)))).json()["delivery"]
    await here.stack.sql("UPDATE deliveries SET body = NULL, headers = '[]', pruned_at = now()")

    async with following(here.url) as events:
        await anext(events)
        event = await anext(events)

    told = json.loads(event.data)
    assert (event.event, told["id"], read_place(event.id).id) == ("pruned", number, number)
    assert told["pruned_at"]
    assert "body_base64" not in told


async def test_a_large_body_comes_whole_and_is_written_in_pieces(database_url: str) -> None:
    body = b'{"a": "' + b"0123456789abcdef" * (25 << 16) + b'"}'
    async with deployed(database_url, most_bytes=26 << 20) as here:
        await here.stack.send(from_github(body))
        await here.stack.send(from_github(b"{}"))
        async with following(here.url) as events:
            large, small = await deliveries(events, 2)

        found = await page_now(here.stack.pool)
        parts = [len(part) async for part in frames.written(found.entries, here.control.feed._piece)]

    assert hashlib.sha256(body_of(large)).digest() == hashlib.sha256(body).digest()
    assert body_of(small) == b"{}"
    assert max(parts) <= 3 * PIECE_BYTES
    assert sum(len(entry.body or b"") for entry in found.entries) <= MOST_BYTES + PIECE_BYTES


async def test_a_follower_that_does_not_read_holds_up_neither_others_nor_the_end(database_url: str) -> None:
    """Sixty-four MiB wait for somebody who connects and reads nothing, not even when the server stops."""
    async with deployed(database_url, most_bytes=26 << 20) as here:
        body = b"x" * (1 << 20)
        for _ in range(16):
            await arrived(here.stack.pool, *(arrival(body) for _ in range(4)))
        reader, writer = await asyncio.open_connection("127.0.0.1", here.port, limit=1024)
        writer.write(b"GET /api/feed?after=all HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"hello")
        async with following(here.url) as events:
            await deliveries(events, 64)
        started = time.monotonic()
    assert time.monotonic() - started < LEAVE_WITHIN_S - 1, "it was waited for, and not cut"
    writer.transport.abort()


@asynccontextmanager
async def deaf(here: Deployed, *, takes: int | None = 4096) -> AsyncIterator[asyncio.StreamReader]:
    """Somebody who connects, and reads nothing but the beginning; its system takes so much for it."""
    raw = socket.socket()
    if takes is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, takes)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", here.port))
    reader, writer = await asyncio.open_connection(sock=raw, limit=1024)
    writer.write(b"GET /api/feed?after=all HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await reader.readuntil(b"hello")
    try:
        yield reader
    finally:
        writer.transport.abort()


async def test_one_follower_too_many_is_asked_to_come_again_and_may_once_another_left(database_url: str) -> None:
    seats = Seats(most=2)
    async with deployed(database_url, seats=seats) as here, httpx.AsyncClient(trust_env=False) as client:
        async with following(here.url) as one, following(here.url) as two:
            await anext(one)
            await anext(two)
            full = await client.get(f"{here.url}/api/feed")
        await until(lambda: not seats.taken)
        async with following(here.url) as again:
            assert (await anext(again)).event == "hello"

    assert (full.status_code, full.headers["retry-after"]) == (503, "30")
    assert "2 follow the feed" in full.json()["error"]


async def test_whoever_gets_no_seat_asks_the_database_nothing(database_url: str) -> None:
    async with deployed(database_url, seats=Seats(most=0)) as here, httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"{here.url}/api/feed")).status_code == 503
        assert not here.control.feed._asker._wire.up


async def test_whoever_is_refused_keeps_no_seat(database_url: str) -> None:
    seats = Seats(most=1)
    async with deployed(database_url, seats=seats) as here, httpx.AsyncClient(trust_env=False) as client:
        for _ in range(3):
            assert (await client.get(f"{here.url}/api/feed?after=AQAA")).status_code == 400
    assert seats.taken == 0


async def test_followers_that_read_nothing_hold_up_nobody_however_large_what_waits_for_them_is(
    database_url: str,
) -> None:
    size = 16 << 20
    async with deployed(database_url, most_bytes=26 << 20) as here, AsyncExitStack() as stack:
        await arrived(here.stack.pool, arrival(b"x" * size))
        for _ in range(6):
            await stack.enter_async_context(deaf(here))
        async with following(here.url) as events:
            [large] = await deliveries(events, 1)
            here.stack.accepter._on_moved = lambda rows: here.control.feed.look()
            await here.stack.send(from_shortcut(stories(1)))
            await deliveries(events, 1)
    assert len(body_of(large)) == size


async def test_a_follower_that_takes_nothing_is_ended(database_url: str) -> None:
    seats = Seats(patience_s=0.5)
    async with deployed(database_url, most_bytes=26 << 20, seats=seats) as here:
        await arrived(here.stack.pool, arrival(b"x" * (16 << 20)))
        async with deaf(here):
            await until(lambda: seats.taken)
            await until(lambda: not seats.taken)
            # Cut, and not closed, which would wait until it has taken what was written.
            await until(lambda: not connected(here.port))


def connected(port: int) -> list[Any]:
    """The connections to a port of this process that its side still has."""
    there = psutil.Process().net_connections("tcp")
    return [one for one in there if one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED]


async def test_a_body_that_is_pruned_while_it_is_sent_comes_as_a_pruned_one(here: Deployed) -> None:
    """The event that was begun is cut off, so that nobody takes it for whole."""
    await arrived(here.stack.pool, arrival(b"x" * (26 << 20)))
    async with deaf(here, takes=None) as raw:
        await raw.readuntil(b"body_base64")
        await here.stack.sql("UPDATE deliveries SET body = NULL, headers = '[]', pruned_at = now()")
        rest = await asyncio.wait_for(raw.read(), 60)
    assert not rest.endswith(b'"}\n\n0\r\n\r\n')
    assert len(rest) < 26 << 20
    async with following(here.url) as events:
        await anext(events)
        assert (await anext(events)).event == "pruned"


async def test_a_follower_is_ended_when_the_database_is_put_back_to_an_earlier_time(here: Deployed) -> None:
    here.stack.accepter._on_moved = lambda rows: here.control.feed.look()
    for number in range(3):
        await here.stack.send(from_shortcut(stories(number)))
    async with following(here.url) as events:
        seen = await deliveries(events, 3)
        await here.stack.sql("DELETE FROM deliveries WHERE id = (SELECT max(id) FROM deliveries)")
        await here.stack.send(from_shortcut(stories(7)))
        assert [event async for event in events] == []
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"{here.url}/api/feed?after={seen[-1].id}")).status_code == 409


async def test_silence_is_filled_with_keep_alives_and_now_and_then_a_place(database_url: str) -> None:
    async with deployed(database_url, keep_alive_s=0.1) as here:
        async with (
            httpx.AsyncClient(timeout=10, trust_env=False) as client,
            client.stream("GET", f"{here.url}/api/feed?source=github&after=all") as response,
        ):
            lines = response.aiter_lines()

            async def until_line(start: str) -> str:
                async with asyncio.timeout(10):
                    while not (line := await anext(lines)).startswith(start):
                        pass
                return line

            await until_line(": keep-alive")
            # Somebody else's deliveries move the place of a follower who is not given them.
            await here.stack.send(from_shortcut(stories(1)))
            await until_line("event: position")
            await until_line(": keep-alive")
        found = await level(here.stack.pool)
        async with following(here.url, f"source=github&after={written(found.last)}") as events:
            assert (await anext(events)).id == written(found.last)


async def test_a_follower_is_told_of_what_is_held_back(database_url: str) -> None:
    async with (
        deployed(database_url, keep_alive_s=0.1) as here,
        await elsewhere(database_url) as other,
        other.transaction(),
    ):
        await other.execute("SELECT pg_current_xact_id()")
        await here.stack.send(from_shortcut(stories(1)))
        await here.stack.sql("UPDATE deliveries SET received_at = received_at - interval '1 minute'")
        async with following(here.url, "after=now") as events, asyncio.timeout(10):
            while (event := await anext(events)).event != "position":
                pass

    lag = json.loads(event.data)["lag"]
    assert lag["held_back"] == 1
    assert lag["seconds"] >= 60


async def test_a_lost_connection_to_the_database_does_not_end_a_response(here: Deployed, database_url: str) -> None:
    async with following(here.url, "after=now") as events, await elsewhere(database_url) as other:
        await anext(events)
        await other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )

        async def accepted() -> bool:
            return (await here.stack.send(from_shortcut(stories(1)))).status_code == 202

        await until(accepted)
        here.control.feed.look()
        await deliveries(events, 1)


async def test_what_the_database_refuses_is_asked_for_again_and_nothing_comes_into_the_middle_of_an_event(
    database_url: str,
) -> None:
    """Somebody locks the table between two pieces of a body, for longer than a statement waits."""
    async with (
        deployed(database_url, poll_s=60, keep_alive_s=0.05) as here,
        following(here.url) as events,
        await elsewhere(database_url) as other,
    ):
        for _ in range(12):
            await arrived(here.stack.pool, *(arrival(b"x" * (1 << 20)) for _ in range(4)))
        here.control.feed.look()
        await deliveries(events, 1)
        await settled(here)
        async with other.transaction():
            await other.execute("LOCK TABLE deliveries IN ACCESS EXCLUSIVE MODE")
            rest = asyncio.create_task(deliveries(events, 47))
            await until_blocked(here.stack.pool)

            async def refused() -> bool:
                [row] = await sql(
                    here.stack.pool,
                    "SELECT count(*) AS waiting FROM pg_stat_activity"
                    " WHERE datname = current_database() AND wait_event_type = 'Lock'",
                )
                return row["waiting"] == 0

            await until(refused)
        assert {body_of(event) for event in await rest} == {b"x" * (1 << 20)}


@pytest.mark.parametrize(
    ("query", "status", "named"),
    [
        ("after=yesterday", 400, "yesterday"),
        ("after=AQAAAAAAAAAA", 400, "cursor"),
        ("since=1h", 400, "since"),
        ("source=gitlab", 404, "shortcut, github, mirror"),
        (f"after={written(Place(2**40, 1, 1))}", 409, "restored"),
    ],
)
@pytest.mark.parametrize("path", ["/api/feed", "/api/feed/waiting"])
async def test_what_cannot_be_served_is_refused_by_name(
    here: Deployed, path: str, query: str, status: int, named: str
) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.get(f"{here.url}{path}?{query}")

    assert answer.status_code == status
    assert named in answer.json()["error"]


async def test_the_feed_is_behind_the_token_like_all_else(database_url: str) -> None:
    async with deployed(database_url, control_token="right") as here:
        await here.stack.send(from_shortcut(stories(1)))
        async with httpx.AsyncClient(trust_env=False) as client:
            without = await client.get(f"{here.url}/api/feed")
            wrong = await client.get(f"{here.url}/api/feed", headers={"authorization": "Bearer wrong"})
            counted = await client.get(f"{here.url}/api/feed/waiting")
        async with following(here.url, authorization="Bearer right") as events:
            await deliveries(events, 1)

    assert {answer.status_code for answer in (without, wrong, counted)} == {401}


async def test_a_head_request_opens_no_stream(here: Deployed) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
        answer = await client.head(f"{here.url}/api/feed")

    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")


async def test_followers_that_left_are_looked_for_no_more(here: Deployed) -> None:
    async with following(here.url) as events:
        await anext(events)
        assert here.control.feed._watch._followed.is_set()

    await until(lambda: not here.control.feed._watch._followed.is_set())


async def test_stopping_ends_every_response_in_order(here: Deployed) -> None:
    async with following(here.url) as one, following(here.url, "after=now") as other:
        await anext(one)
        await anext(other)
        here.control.feed.stop()
        async with asyncio.timeout(2):
            assert [event async for event in one] == []
            assert [event async for event in other] == []


def test_a_follower_does_not_keep_serve_from_ending(tmp_path: Path, server_url: str) -> None:
    with empty_database(server_url) as url:
        assert webhooks(tmp_path, "migrate", DATABASE_URL=url).returncode == 0
        with (
            serving(tmp_path, url, "--no-worker") as process,
            httpx.stream("GET", f"{process.control}/api/feed", timeout=20, trust_env=False) as response,
        ):
            lines = response.iter_lines()
            while next(lines) != "event: hello":
                pass
            started = time.monotonic()
            process.signal(signal.SIGTERM)
            rest = list(lines)
            assert process.ends(10) == 0
            assert time.monotonic() - started < 4
            assert not [line for line in rest if line.startswith("event:")]
            assert "Traceback" not in process.log
