"""Replays over the control plane: they run in the process that was asked, are followed, and are stopped."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from consumers import Stack, arrival, arrived, stack, stories
from gates import until
from test_control import asking

from webhooks import Consumer, Event, Gate, Shortcut, Transaction
from webhooks.control.replays import MOST_AT_ONCE


def counting() -> Consumer:
    """A consumer whose handler opens a row, once, and counts its runs in its title."""
    shortcut, sessions = Shortcut(), Gate("patch_sessions", key="sc_id")
    sessions.phase("received", claimed="clarifying", done="clarified")

    @shortcut.on("story.update")
    async def count(event: Event, tx: Transaction) -> None:
        if not await sessions.open(tx, sc_id=event.data["id"], title="x"):
            await tx.execute("UPDATE patch_sessions SET title = title || 'x' WHERE sc_id = %(id)s", event.data)

    return Consumer(gates=[sessions], sources=[shortcut])


async def processed(running: Stack, count: int) -> None:
    async def all_of_them() -> bool:
        rows = await running.sql("SELECT count(*) AS count FROM deliveries WHERE status = 'processed'")
        return bool(rows[0]["count"] == count)

    await until(all_of_them)


async def runs_of(running: Stack) -> list[int]:
    rows = await running.sql("SELECT length(title) AS runs FROM patch_sessions ORDER BY sc_id")
    return [row["runs"] for row in rows]


async def replay(client: httpx.AsyncClient, **asked: object) -> dict[str, Any]:
    answer = await client.post("/api/replays", json=asked)
    assert answer.status_code in (200, 202), answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_a_replay_runs_the_handler_again_without_waiting_for_a_poll_and_says_who_wanted_it(
    database_url: str,
) -> None:
    consumer = counting()
    async with stack(database_url, consumer) as running, asking(running, consumer) as client:
        await arrived(running.pool, *(arrival(stories(key)) for key in (1, 2)))
        await processed(running, 2)
        plan = (await replay(client, source="shortcut"))["plan"]
        assert plan["total"] == 2
        assert await runs_of(running) == [1, 1]
        done = await replay(client, source="shortcut", yes=True, by="Ann", reason="the handler was wrong")
        assert done["report"]["counts"] == {"again": 2}
        await processed(running, 2)
        assert await runs_of(running) == [2, 2]
        decided = await running.sql("SELECT DISTINCT decided_by, reason FROM decisions")
        assert decided == [{"decided_by": "Ann", "reason": "the handler was wrong"}]


async def test_a_replay_that_moves_nothing_leaves_it_known_what_the_delivery_moved(database_url: str) -> None:
    consumer = counting()
    async with stack(database_url, consumer) as running, asking(running, consumer) as client:
        [id] = await arrived(running.pool, arrival(stories(1)))
        await processed(running, 1)
        await replay(client, ids=[id], yes=True)
        await processed(running, 1)
        assert await runs_of(running) == [2]
        [row] = await running.sql("SELECT moved_rows FROM deliveries")
        assert row["moved_rows"] == ["patch_sessions:1"]
        assert (await replay(client, row="patch_sessions:1"))["plan"]["total"] == 1


async def test_a_replay_is_stopped_after_the_batch_under_way_and_says_where_to_go_on(database_url: str) -> None:
    consumer = counting()
    async with stack(database_url, consumer, work=False) as running, asking(running, consumer) as client:
        ids = sorted(await arrived(running.pool, *(arrival(stories(key)) for key in range(1, 5))))
        await running.sql("UPDATE deliveries SET status = 'processed'")
        begun = await replay(client, all=True, yes=True, wait=False, rate=1)

        async def first_is_done() -> bool:
            return bool((await client.get(f"/api/replays/{begun['id']}")).json()["report"]["total"])

        await until(first_is_done)
        await client.post(f"/api/replays/{begun['id']}/stop")

        async def has_ended() -> bool:
            return (await client.get(f"/api/replays/{begun['id']}")).json()["ended_at"] is not None

        await until(has_ended)
        report = (await client.get(f"/api/replays/{begun['id']}")).json()["report"]
        assert report["stopped"] == "interrupted"
        assert report["total"] < 4
        assert report["after"] == ids[report["total"] - 1]
        rest = await replay(client, all=True, after=report["after"], yes=True)
        assert rest["report"]["total"] == 4 - report["total"]


async def test_no_more_than_some_run_at_once_and_all_end_with_the_process(database_url: str) -> None:
    consumer = counting()
    async with stack(database_url, consumer, work=False) as running:
        await arrived(running.pool, *(arrival(stories(key)) for key in (1, 2, 3)))
        async with asyncio.timeout(30), asking(running, consumer) as client:
            for _ in range(MOST_AT_ONCE):
                await replay(client, all=True, yes=True, wait=False, rate=0.01)
            answer = await client.post("/api/replays", json={"all": True, "yes": True})
            assert answer.status_code == 409
    # A slow replay would go on for minutes: leaving the block has ended all of them.


@pytest.mark.parametrize("path", ["$[?match(@, '(a+)+b')]", "$.a[?@.c[?search(@.b, 'x')]]=1"])
async def test_a_filter_that_may_take_for_ever_is_left_to_the_command(database_url: str, path: str) -> None:
    consumer = counting()
    async with stack(database_url, consumer, work=False) as running, asking(running, consumer) as client:
        answer = await client.post("/api/replays", json={"where_json": [path]})
        assert answer.status_code == 400
        assert "webhooks replay" in answer.json()["error"]


async def test_a_filter_whose_value_only_looks_like_one_is_taken(database_url: str) -> None:
    consumer = counting()
    async with stack(database_url, consumer, work=False) as running, asking(running, consumer) as client:
        assert (await replay(client, where_json=["$.title=match(x)"]))["plan"]["total"] == 0


@pytest.mark.parametrize(
    "asked",
    [
        '{"all": true, "rate": Infinity}',
        '{"all": true, "rate": 1e999}',
        '{"limit": 18446744073709551616}',
        '{"after": 18446744073709551616}',
        '{"ids": [18446744073709551616]}',
        '{"ids": [0]}',
    ],
)
async def test_a_number_that_cannot_be_is_a_mistake_of_who_asks(database_url: str, asked: str) -> None:
    consumer = counting()
    async with stack(database_url, consumer, work=False) as running, asking(running, consumer) as client:
        answer = await client.post("/api/replays", content=asked, headers={"content-type": "application/json"})
        assert 400 <= answer.status_code < 500
        assert answer.status_code != 404


@pytest.mark.parametrize("body", [{}, {"yes": True}, {"as": "new", "yes": True}])
async def test_a_replay_of_everything_has_to_be_asked_for(database_url: str, body: dict[str, object]) -> None:
    consumer = counting()
    async with stack(database_url, consumer, work=False) as running, asking(running, consumer) as client:
        answer = await client.post("/api/replays", json=body)
        assert answer.status_code == 400
        assert "all" in answer.json()["error"]
