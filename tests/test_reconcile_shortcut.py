"""The history of Shortcut's stories beside our inbox: what is missing is accepted, byte for byte, once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
import respx
from consumers import LABEL, arrived, from_shortcut, patching, stack, stories
from gates import until
from github_standin import StillClock

from webhooks import Consumer, Event, Gate, Pool, Shortcut, Transaction
from webhooks.db import Ready
from webhooks.delivery import Delivery
from webhooks.errors import ProviderError
from webhooks.provider_api import Clock, ProviderClient, shortcut_client
from webhooks.reconcile.scheduled import Plan, round_of
from webhooks.reconcile.shortcut import Comparison, accept, compare
from webhooks.reconcile.shortcut_api import elements, history, updated_since
from webhooks.settings import Settings

API = "https://shortcut.test/api/v3"
NOW = datetime(2026, 6, 12, 12, 0, tzinfo=UTC)
HOUR = timedelta(hours=1)
SETTINGS = Settings(shortcut_token="invented", shortcut_api=API)
SOURCE = Shortcut()


@pytest.fixture
def time() -> StillClock:
    return StillClock(NOW)


@pytest.fixture
async def shortcut() -> AsyncIterator[ProviderClient]:
    async with shortcut_client(SETTINGS) as client:
        yield client


def entry(id: str, *keys: int, ago: timedelta = HOUR, **columns: object) -> str:
    """An entry of a history as Shortcut writes it; the same text is the body of its webhook."""
    body = json.loads(stories(*keys, id=id, **columns))
    return json.dumps({**body, "changed_at": (NOW - ago).isoformat().replace("+00:00", "Z")})


def serve(mock: respx.MockRouter, histories: dict[int, list[str]], updated: list[int] | None = None) -> respx.Route:
    """Answer for Shortcut, and return the search's route."""
    for story, entries in histories.items():
        mock.get(f"{API}/stories/{story}/history").respond(200, text=f"[{', '.join(entries)}]")
    found = [{"id": story, "name": f"story {story}"} for story in (list(histories) if updated is None else updated)]
    return mock.post(f"{API}/stories/search").respond(201, json=found)


async def store(pool: Pool, text: str) -> int:
    body = text.encode()
    return (await arrived(pool, Delivery("shortcut", SOURCE.dedup_key((), body), (), body)))[0]


async def rows(pool: Pool) -> list[dict[str, Any]]:
    async with pool.transaction() as tx:
        return await (await tx.execute("SELECT * FROM deliveries ORDER BY id")).fetchall()


def opening_sessions() -> Consumer:
    """Every changed story opens a session."""
    source, sessions = Shortcut(), Gate("patch_sessions", key="sc_id")
    sessions.phase("received", claimed="clarifying", done="clarified")

    @source.on("story.update")
    async def open_session(event: Event, tx: Transaction) -> None:
        await sessions.open(tx, sc_id=event.data["story_id"], title=event.data["name"])

    return Consumer(gates=[sessions], sources=[source])


def verdicts(comparison: Comparison) -> dict[str, str]:
    return {line.entry.id: line.verdict for line in comparison.lines}


async def test_what_is_missing_is_accepted_as_it_stands_and_marked_as_reconciled(
    pool: Pool, time: StillClock, shortcut: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    odd = '{"id":"odd", "version":"v1","changed_at":"2026-06-12T11:30:00.123Z",  "n":12345678901234567890,'
    odd += '"f":1.0,"e":"\\u00e9 \\ud83d é","url":"a\\/b","n":1,'
    odd += '"actions":[{"id":8,"entity_type":"story","action":"create"}]}'
    here, missing = entry("here", 7), entry("missing", 7)
    serve(respx_mock, {7: [here, missing], 8: [odd]})
    id = await store(pool, here)

    comparison = await compare(pool.transaction, shortcut, SOURCE, 6 * HOUR, clock=time.clock)

    assert verdicts(comparison) == {"here": "here", "missing": "missing", "odd": "missing"}
    assert [line.delivery for line in comparison.lines if line.verdict == "here"] == [id]
    assert len(await rows(pool)) == 1  # comparing changes nothing
    accepted = await accept(pool.transaction, comparison)

    stored = {row["id"]: row for row in await rows(pool)}
    assert set(accepted) == {"missing", "odd"}
    for name, body in (("missing", missing), ("odd", odd)):
        row = stored[accepted[name]]
        assert bytes(row["body"]) == body.encode()
        assert (row["origin"], row["dedup_key"], row["status"]) == ("reconcile", name, "received")
        assert row["headers"] == [["content-type", "application/json"]]
    assert stored[id]["origin"] == "received"
    assert not (await compare(pool.transaction, shortcut, SOURCE, 6 * HOUR, clock=time.clock)).missing


async def test_a_webhook_and_its_entry_in_the_history_are_one_delivery(
    database_url: str, time: StillClock, shortcut: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    opening = entry("opening", 7, labels=[LABEL])
    serve(respx_mock, {7: [opening]})
    async with stack(database_url, patching(), work=False) as here:
        comparison = await compare(here.pool.transaction, shortcut, SOURCE, 6 * HOUR, clock=time.clock)
        late = await here.send(from_shortcut(opening.encode()))
        assert late.status_code == 202

        assert await accept(here.pool.transaction, comparison) == {}
        assert len(await here.deliveries()) == 1

        await here.sql("DELETE FROM deliveries")
        assert set(await accept(here.pool.transaction, comparison)) == {"opening"}
        assert (await here.send(from_shortcut(opening.encode()))).status_code == 200
        assert len(await here.deliveries()) == 1


async def test_what_is_accepted_does_its_work(
    database_url: str, time: StillClock, shortcut: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    serve(respx_mock, {7: [entry("opening", 7, labels=[LABEL])]})
    async with stack(database_url, patching(), work=False) as here:
        comparison = await compare(here.pool.transaction, shortcut, SOURCE, 6 * HOUR, clock=time.clock)
        await accept(here.pool.transaction, comparison)
    async with stack(database_url, opening_sessions()) as here:

        async def opened() -> bool:
            return bool(await here.sql("SELECT sc_id FROM patch_sessions WHERE sc_id = 7"))

        await until(opened)
        assert [(row["status"], row["event"]) for row in await here.deliveries()] == [("processed", "story.update")]


async def test_what_just_happened_is_not_missed_yet(
    pool: Pool, time: StillClock, shortcut: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    young, old = entry("young", 7, ago=timedelta(seconds=90)), entry("old", 7, ago=timedelta(seconds=150))
    serve(respx_mock, {7: [young, old, entry("too old", 7, ago=7 * HOUR)]})

    comparison = await compare(pool.transaction, shortcut, SOURCE, 6 * HOUR, clock=time.clock)

    assert verdicts(comparison) == {"young": "on its way", "old": "missing"}
    assert set(await accept(pool.transaction, comparison)) == {"old"}


async def test_the_stories_concerned_are_those_of_deliveries_those_updated_and_those_named(
    pool: Pool, time: StillClock, shortcut: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    await store(pool, entry("a", 1, 2))
    await store(pool, "not json")
    await store(pool, entry("b", 3))
    async with pool.transaction() as tx:
        await tx.execute("UPDATE deliveries SET received_at = %(at)s", {"at": NOW - HOUR})
        await tx.execute("UPDATE deliveries SET received_at = %(at)s WHERE dedup_key = 'b'", {"at": NOW - 7 * HOUR})
    await arrived(pool, Delivery("another", "c", (), entry("c", 4).encode()))
    search = serve(respx_mock, {1: [], 2: [], 5: [], 6: []}, updated=[2, 5])

    comparison = await compare(pool.transaction, shortcut, SOURCE, 6 * HOUR, stories=[6], clock=time.clock)

    assert comparison.stories == [1, 2, 5, 6]
    assert json.loads(search.calls.last.request.content) == {"updated_at_start": "2026-06-12T06:00:00Z"}


async def test_stories_are_found_in_many_deliveries_page_by_page(
    pool: Pool,
    time: StillClock,
    shortcut: ProviderClient,
    respx_mock: respx.MockRouter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("webhooks.reconcile.shortcut.PAGE", 3)
    for number in range(1, 9):
        await store(pool, entry(f"e{number}", number))
    async with pool.transaction() as tx:  # all at one moment: only the id tells them apart
        await tx.execute("UPDATE deliveries SET received_at = %(at)s", {"at": NOW - HOUR})
    serve(respx_mock, {number: [] for number in range(1, 9)}, updated=[])

    comparison = await compare(pool.transaction, shortcut, SOURCE, 6 * HOUR, clock=time.clock)

    assert comparison.stories == list(range(1, 9))


async def test_a_bulk_edit_is_one_delivery_though_it_is_in_many_histories(
    pool: Pool, time: StillClock, shortcut: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    bulk = entry("bulk", 1, 2, 3)
    serve(respx_mock, {1: [bulk], 2: [bulk], 3: [bulk]})

    comparison = await compare(pool.transaction, shortcut, SOURCE, 6 * HOUR, clock=time.clock)

    assert set(await accept(pool.transaction, comparison)) == {"bulk"}
    assert [line.events for line in comparison.lines] == [("story.update",) * 3]


async def test_two_runs_at_once_accept_each_entry_once(
    pool: Pool, time: StillClock, shortcut: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    serve(respx_mock, {7: [entry(f"e{number}", 7) for number in range(250)]})
    comparison = await compare(pool.transaction, shortcut, SOURCE, 6 * HOUR, clock=time.clock)

    results = await asyncio.gather(*(accept(pool.transaction, comparison) for _ in range(3)))

    assert sum(map(len, results)) == 250
    assert len(await rows(pool)) == 250


async def test_a_story_that_is_gone_is_named_and_the_others_are_looked_at(
    pool: Pool, time: StillClock, shortcut: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    respx_mock.get(f"{API}/stories/6/history").respond(404, json={"message": "Resource not found."})
    serve(respx_mock, {7: [entry("there", 7)]})

    comparison = await compare(pool.transaction, shortcut, SOURCE, 6 * HOUR, stories=[6], clock=time.clock)

    assert comparison.gone == [6]
    assert verdicts(comparison) == {"there": "missing"}


async def test_the_rate_of_shortcut_is_kept(
    pool: Pool, time: StillClock, shortcut: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    serve(respx_mock, {7: [entry("there", 7)]})
    respx_mock.get(f"{API}/stories/7/history").side_effect = [
        httpx.Response(429),
        httpx.Response(200, text=f"[{entry('there', 7)}]"),
    ]

    comparison = await compare(pool.transaction, shortcut, SOURCE, 6 * HOUR, clock=time.clock)

    assert verdicts(comparison) == {"there": "missing"}
    assert time.waits == [60]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("[]", []),
        (" [ ] ", []),
        ('[{"id":"a","changed_at":"2026-06-12T10:00:00Z"}]', ["a"]),
        ('[1,"x",null,{"id":7,"changed_at":"2026-06-12T10:00:00Z"},{"id":"b"},{"id":"","changed_at":1}]', []),
        (
            '[\n{"id":"a","changed_at":1781258400} ,\r\n\t{"id":"b","changed_at":1781258400}\n]',
            ["a", "b"],
        ),
    ],
)
async def test_a_history_is_read_as_far_as_it_can_be(
    shortcut: ProviderClient, respx_mock: respx.MockRouter, text: str, ids: list[str]
) -> None:
    respx_mock.get(f"{API}/stories/7/history").respond(200, text=text)

    assert [found.id for found in await history(shortcut, 7, clock=Clock())] == ids


@pytest.mark.parametrize("content", [b"{}", b"[", b"[1", b"[1 2]", b"[1,]", b"", b"[\xff]", b"[" * 100_000, b"[NaNo]"])
async def test_a_history_that_cannot_be_read_is_an_error_that_names_the_story(
    shortcut: ProviderClient, respx_mock: respx.MockRouter, content: bytes
) -> None:
    respx_mock.get(f"{API}/stories/7/history").respond(200, content=content)

    with pytest.raises(ProviderError, match="history of story 7 that cannot be read"):
        await history(shortcut, 7, clock=Clock())


async def test_a_search_that_answers_with_something_else_is_an_error(
    shortcut: ProviderClient, respx_mock: respx.MockRouter
) -> None:
    respx_mock.post(f"{API}/stories/search").respond(json={"data": []})

    with pytest.raises(ProviderError, match="no list"):
        await updated_since(shortcut, NOW, clock=Clock())


def test_the_elements_of_an_array_are_given_as_they_are_written() -> None:
    texts = ['{"a": 1.0, "a":2}', "[1,[2]]", '"\\u00e9,]"', "-0", "null"]

    found = list(elements(f" [{' , '.join(texts)}]"))

    assert [text for _, text in found] == texts
    assert [value for value, _ in found] == [{"a": 2}, [1, [2]], "é,]", 0, None]


async def test_a_scheduled_round_accepts_what_is_missing_and_wakes_the_worker(
    pool: Pool, respx_mock: respx.MockRouter
) -> None:
    told: list[Ready] = []
    missing = json.loads(entry("missing", 7))
    missing["changed_at"] = (datetime.now(UTC) - HOUR).isoformat()
    search = serve(respx_mock, {7: [json.dumps(missing)]})
    plan = Plan([], SOURCE)

    await round_of(pool, SETTINGS, plan, HOUR, told.extend)
    await round_of(pool, SETTINGS, plan, HOUR, told.extend)

    [row] = await rows(pool)
    assert told == [Ready("deliveries", "applying", row["id"])]
    assert search.call_count == 1
    async with pool.transaction() as tx:
        turn = await (await tx.execute("SELECT scope, whole_until = taken_at AS whole FROM reconcile_turns")).fetchone()
    assert turn == {"scope": "shortcut:shortcut", "whole": True}
