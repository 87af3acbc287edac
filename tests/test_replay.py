"""Deliveries of the inbox run again, out of files into it, and the order of what is under way."""

from __future__ import annotations

import asyncio
import getpass
import time
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from consumers import SECRET, Stack, arrival, arrived, from_github, from_shortcut, quick, served, stack, stories
from gates import elsewhere, sql, until
from psycopg_pool import PoolTimeout
from replays import Applied, ended, github, prune, pushed, row_of, settled, split
from wire import pool_over_a_wire

from webhooks import Pool, StandardWebhooks
from webhooks.captures import Capture
from webhooks.delivery import Headers
from webhooks.errors import ConfigurationError
from webhooks.inbox import MAX_ATTEMPTS
from webhooks.replay import (
    INTERRUPTED,
    Again,
    Arrival,
    Desk,
    Limits,
    Report,
    again,
    arrivals,
    imported,
    planned,
    sent,
    stored,
    weighed,
)
from webhooks.replay.pump import Halt, pump
from webhooks.replay.report import Tally
from webhooks.replay.rerunning import How, _same, numbered
from webhooks.selection import Selection, chosen
from webhooks.signatures import new_secret, sign
from webhooks.sources.reading import digest_key

WHO = "a person"


async def replayed(pool: Pool, how: How = "same", limits: Limits | None = None, **filters: Any) -> Report:
    async with pool.transaction() as tx:
        scope = await chosen(tx, Selection(**filters), "run" if how == "same" else "request")
    request = Again(how=how, decided_by=WHO, reason="the handler was wrong")
    return await again(pool, {}, scope, request, limits or Limits())


# ---- the same deliveries


async def test_an_ended_delivery_waits_again_with_a_new_visit_and_fresh_attempts(pool: Pool) -> None:
    done, ignored, dead = await github(pool, pushed(), pushed(), pushed())
    await ended(pool, done, "processed", event="push", moved_rows=["issues:1"])
    await ended(pool, ignored, "ignored", event="star.created", reason="nobody minds")
    await ended(pool, dead, "dead", event="push", last_error="ValueError")
    visits = {id: (await row_of(pool, id))["visit"] for id in (done, ignored, dead)}

    report = await replayed(pool, ids=(done, ignored, dead))

    assert report.counts == {"again": 3}
    assert report.well
    for id in (done, ignored, dead):
        row = await row_of(pool, id)
        assert (row["status"], row["attempt_count"], row["max_attempts"]) == ("received", 0, MAX_ATTEMPTS)
        assert (row["claimed_from"], row["reason"], row["last_error"], row["parked_on"]) == (None, None, None, None)
        assert row["visit"] != visits[id]
    assert (await row_of(pool, done))["event"] == "push"
    assert (await row_of(pool, done))["moved_rows"] == ["issues:1"]
    decisions = await sql(pool, "SELECT * FROM decisions ORDER BY key::bigint")
    assert [(row["table_name"], row["key"], row["decision"]) for row in decisions] == [
        ("deliveries", str(id), "replay") for id in (done, ignored, dead)
    ]
    assert {(row["decided_by"], row["reason"]) for row in decisions} == {(WHO, "the handler was wrong")}


async def test_one_that_has_not_ended_is_due_now_and_keeps_its_attempts(pool: Pool) -> None:
    waiting, parked, due = await github(pool, pushed(), pushed(), pushed())
    await ended(pool, waiting, "received", last_error="ValueError")
    await ended(pool, parked, "received", parked_on="issues:1", reason="waits")
    later = "UPDATE deliveries SET not_before = now() + interval '1 hour' WHERE id <> %(due)s"
    await sql(pool, later, due=due)
    before = {id: await row_of(pool, id) for id in (waiting, parked, due)}

    report = await replayed(pool, ids=(waiting, parked, due))

    assert report.counts == {"due": 3}
    for id, was in before.items():
        row = await row_of(pool, id)
        assert row["not_before"] <= datetime.now(UTC)
        assert {**row, "not_before": None} == {**was, "not_before": None}
    assert await sql(pool, "SELECT * FROM decisions") == []


async def test_one_that_is_being_applied_is_left_alone(pool: Pool) -> None:
    [running] = await github(pool, pushed())
    await ended(pool, running, "applying", event="push")
    before = await row_of(pool, running)

    report = await replayed(pool, ids=(running,))

    assert report.counts == {"left_alone": 1}
    assert not report.well
    assert await row_of(pool, running) == before


async def test_one_whose_row_somebody_holds_is_left_alone_without_waiting(pool: Pool, database_url: str) -> None:
    held, free = await github(pool, pushed(), pushed())
    for id in (held, free):
        await ended(pool, id, "processed", event="push")
    async with await elsewhere(database_url) as other, other.transaction():
        await other.execute("SELECT 1 FROM deliveries WHERE id = %s FOR NO KEY UPDATE", (held,))
        report = await replayed(pool, ids=(held, free))

    assert report.counts == {"again": 1, "left_alone": 1}
    assert (await row_of(pool, held))["status"] == "processed"


async def test_the_events_of_a_split_delivery_run_again_and_it_stays_processed(pool: Pool) -> None:
    parent, parts = await split(pool, 7, 8)

    assert (await replayed(pool, ids=(parent,))).counts == {"again": 2}

    assert (await row_of(pool, parent))["status"] == "processed"
    assert [(await row_of(pool, part))["status"] for part in parts] == ["received", "received"]
    assert (await row_of(pool, parts[0]))["event"] == "story.update"


async def test_a_split_delivery_itself_is_not_touched_whoever_asks(pool: Pool) -> None:
    parent, _ = await split(pool, 7, 8)
    async with pool.transaction() as tx:
        scope = await chosen(tx, Selection(), "original")

    report = await again(pool, {}, scope, Again(decided_by=WHO), Limits())

    assert report.counts == {"left_alone": 1}
    assert (await row_of(pool, parent))["status"] == "processed"


async def test_a_pruned_delivery_cannot_run_again_either_way(pool: Pool) -> None:
    gone, whole = await github(pool, pushed(), pushed())
    for id in (gone, whole):
        await ended(pool, id, "processed", event="push")
    await prune(pool, gone)

    assert (await replayed(pool, ids=(gone, whole))).counts == {"again": 1, "pruned": 1}
    assert (await replayed(pool, "new", ids=(gone, whole))).counts == {"new": 1, "pruned": 1}
    assert (await row_of(pool, gone))["status"] == "processed"


async def test_what_is_pruned_after_it_was_looked_at_does_not_run_again(pool: Pool) -> None:
    [gone] = await github(pool, pushed())
    await ended(pool, gone, "processed", event="push")
    parent, [part, _] = await split(pool, 1, 2)
    await ended(pool, part, "processed", event="story.update")
    await prune(pool, gone)
    await prune(pool, parent)
    async with pool.transaction() as tx:
        assert await _same(tx, [gone, part], Again(decided_by="Ann")) == ([], [], 2)
    assert [(await row_of(pool, id))["status"] for id in (gone, part)] == ["processed", "processed"]


async def test_what_is_pruned_until_its_row_is_locked_is_counted_as_pruned_and_stays(
    pool: Pool, database_url: str
) -> None:
    """A prune writes to the request alone, and ends after the replay began to look and before it writes."""
    parent, parts = await split(pool, 1, 2)
    async with pool_over_a_wire(database_url) as (other, wire):
        async with other.transaction() as tx:
            scope = await chosen(tx, Selection(), "run")
        wire.at("FOR NO KEY UPDATE OF d SKIP LOCKED", "hold")
        replay = asyncio.create_task(again(other, {}, scope, Again(decided_by=WHO), Limits()))
        await asyncio.wait_for(wire.held.wait(), 10)
        await prune(pool, parent)
        wire.freed.set()
        report = await replay

    assert report.counts == {"pruned": 2}
    assert [(await row_of(pool, part))["status"] for part in parts] == ["processed", "processed"]
    assert await sql(pool, "SELECT * FROM decisions") == []


async def test_copies_that_wait_for_others_for_too_long_end_it_and_the_report_says_how_far_it_came(
    pool: Pool, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webhooks.replay.rerunning.AT_ONCE", 1)
    monkeypatch.setattr("webhooks.replay.rerunning.MOST_WAITS", 1)
    first, second = [(await arrived(pool, arrival(pushed(), source="github", key=key)))[0] for key in ("a", "b")]
    async with await elsewhere(database_url) as other, other.transaction():
        await other.execute(
            "INSERT INTO deliveries (source, dedup_key, origin, replay_of, body, status)"
            " VALUES ('github', 'b#1', 'replay', %s, 'x', 'processed')",
            (second,),
        )
        report = await replayed(pool, "new", ids=(first, second))

    assert (report.counts, report.after) == ({"new": 1}, first)
    assert "under way" in (report.stopped or "")


@pytest.mark.parametrize("rate", [float("inf"), 1e308])
async def test_a_rate_without_an_end_is_none(pool: Pool, rate: float) -> None:
    [done] = await github(pool, pushed())
    await ended(pool, done, "processed", event="push")
    assert (await replayed(pool, limits=Limits(rate=rate))).counts == {"again": 1}


async def test_another_process_hears_of_it(pool: Pool, database_url: str) -> None:
    [done] = await github(pool, pushed())
    await ended(pool, done, "processed", event="push")
    async with await elsewhere(database_url) as other:
        await other.execute("LISTEN webhooks")
        await replayed(pool, ids=(done,))
        heard = [notify.payload async for notify in other.notifies(timeout=10, stop_after=1)]
    assert heard == [pool.process]


async def test_batches_follow_each_other_and_a_stop_between_them_says_where(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webhooks.replay.rerunning.AT_ONCE", 2)
    several = await github(pool, *[pushed()] * 5)
    for id in several:
        await ended(pool, id, "processed", event="push")
    limits = Limits()
    seen: list[Report] = []

    def progress(report: Report) -> None:
        seen.append(report)
        if report.total == 4:
            limits.stop.set()

    async with pool.transaction() as tx:
        scope = await chosen(tx, Selection(), "run")
    report = await again(pool, {}, scope, Again(decided_by=WHO), limits, progress)

    assert [each.total for each in seen] == [2, 4]
    assert (report.stopped, report.after, report.upto) == (INTERRUPTED, several[3], several[4])
    assert not report.well
    rest = await replayed(pool, after=report.after, upto=report.upto)
    assert rest.counts == {"again": 1}


async def test_a_database_that_goes_away_ends_it_and_the_report_says_how_far_it_came(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webhooks.replay.rerunning.AT_ONCE", 1)
    async with pool_over_a_wire(database_url) as (pool, wire):
        several = await github(pool, *[pushed()] * 3)
        for id in several:
            await ended(pool, id, "processed", event="push")
        async with pool.transaction() as tx:
            scope = await chosen(tx, Selection(), "run")

        def cut(_: Report) -> None:
            wire.at("WITH back AS", "cut before")

        report = await again(pool, {}, scope, Again(decided_by=WHO), Limits(), cut)

        assert (report.total, report.after) == (1, several[0])
        assert (report.stopped or "").startswith("the database does not answer: ")
        assert [(await row_of(pool, id))["status"] for id in several] == ["received", "processed", "processed"]


async def test_a_rate_is_kept_by_batches_as_by_single_ones(pool: Pool) -> None:
    several = await github(pool, *[pushed()] * 6)
    for id in several:
        await ended(pool, id, "processed", event="push")
    totals: list[int] = []
    async with pool.transaction() as tx:
        scope = await chosen(tx, Selection(), "run")
    started = time.monotonic()
    await again(pool, {}, scope, Again(decided_by=WHO), Limits(rate=20), lambda report: totals.append(report.total))
    # Twenty a second go twenty at a time, so that these go at once.
    assert totals == [6]

    limits = Limits(rate=20)
    for _ in range(5):
        assert await limits.turn(2)
    assert time.monotonic() - started >= 0.4


# ---- as new ones


async def test_a_copy_is_received_under_a_key_of_its_own_and_says_what_it_repeats(pool: Pool) -> None:
    [first] = await arrived(pool, arrival(b"\xff exact \r\n", source="github", key="101:guid"))
    await ended(pool, first, "processed", event="push", moved_rows=["issues:1"])
    was = await row_of(pool, first)

    assert (await replayed(pool, "new", ids=(first,))).counts == {"new": 1}
    assert (await replayed(pool, "new", ids=(first,))).counts == {"new": 1}

    rows = await sql(pool, "SELECT * FROM deliveries WHERE replay_of = %(of)s ORDER BY id", of=first)
    assert [row["dedup_key"] for row in rows] == ["101:guid#1", "101:guid#2"]
    for row in rows:
        assert (row["source"], row["origin"], row["status"], row["attempt_count"]) == (
            "github",
            "replay",
            "received",
            0,
        )
        assert (row["headers"], row["body"]) == (was["headers"], was["body"])
        assert (row["event"], row["moved_rows"]) == (None, None)
        assert row["received_at"] > was["received_at"]
    assert await row_of(pool, first) == was
    [decision, _] = await sql(pool, "SELECT * FROM decisions ORDER BY id")
    assert (decision["key"], decision["decision"]) == (str(rows[0]["id"]), f"replay of delivery {first}")


async def test_copies_made_at_once_get_keys_of_their_own(pool: Pool) -> None:
    [first] = await arrived(pool, arrival(pushed(), source="github", key="101:guid"))
    await ended(pool, first, "processed", event="push")

    reports = await asyncio.gather(*(replayed(pool, "new", ids=(first,)) for _ in range(10)))

    assert [report.counts for report in reports] == [{"new": 1}] * 10
    rows = await sql(pool, "SELECT dedup_key FROM deliveries WHERE replay_of IS NOT NULL")
    assert {row["dedup_key"] for row in rows} == {f"101:guid#{number}" for number in range(1, 11)}


async def test_a_number_that_was_used_is_not_used_again_though_its_copy_is_gone(pool: Pool) -> None:
    [first] = await arrived(pool, arrival(pushed(), source="github", key="k"))
    for _ in range(3):
        await replayed(pool, "new", ids=(first,))
    await sql(pool, "DELETE FROM deliveries WHERE dedup_key IN ('k#1', 'k#2')")

    await replayed(pool, "new", ids=(first,))

    rows = await sql(pool, "SELECT dedup_key FROM deliveries ORDER BY id")
    assert [row["dedup_key"] for row in rows] == ["k", "k#3", "k#4"]


async def test_a_key_that_somebody_else_has_is_passed_over(pool: Pool) -> None:
    [first] = await arrived(pool, arrival(pushed(), source="github", key="k"))
    await arrived(pool, arrival(pushed(), source="github", key="k#1"))

    assert (await replayed(pool, "new", ids=(first,))).counts == {"new": 1}
    [row] = await sql(pool, "SELECT dedup_key FROM deliveries WHERE replay_of IS NOT NULL")
    assert row["dedup_key"] == "k#2"


@pytest.mark.parametrize(("length", "digested"), [(198, False), (199, True), (200, True)])
def test_a_copys_key_fits_where_keys_fit(length: int, digested: bool) -> None:
    key = numbered("k" * length, 1)
    assert len(key) <= 200
    assert key == (digest_key(b"k" * length + b"#1") if digested else "k" * length + "#1")
    assert numbered("k" * length, 2) != key


async def test_replays_are_not_repeated_by_filters_but_by_name(pool: Pool) -> None:
    [first] = await arrived(pool, arrival(pushed(), source="github", key="k"))
    await replayed(pool, "new", ids=(first,))
    [copy] = await sql(pool, "SELECT id FROM deliveries WHERE replay_of IS NOT NULL")

    assert (await replayed(pool, "new", source="github")).counts == {"new": 1}
    assert (await replayed(pool, "new", ids=(copy["id"],))).counts == {"new": 1}
    rows = await sql(pool, "SELECT dedup_key FROM deliveries ORDER BY id")
    assert [row["dedup_key"] for row in rows] == ["k", "k#1", "k#2", "k#1#1"]


async def test_a_plan_says_how_many_events_only_the_same_way_would_run(pool: Pool) -> None:
    _, parts = await split(pool, 7, 8)
    await ended(pool, parts[0], "dead", event="story.update")

    plan = await planned(pool, {}, Selection(disposition="dead"), "request")
    assert (plan.total, plan.left_out) == (0, 1)
    assert (await planned(pool, {}, Selection(disposition="dead"), "run")).total == 1


# ---- they really run again


async def test_a_second_replay_runs_again_and_so_does_a_third_both_ways(database_url: str) -> None:
    """Case 16."""
    applied = Applied()
    async with stack(database_url, applied.consumer()) as running:
        await running.send(from_github(pushed()))
        await settled(running.pool)
        [first] = [row["id"] for row in await running.deliveries()]

        for round in range(1, 4):
            await replayed(running.pool, "same", ids=(first,))
            await settled(running.pool)
            await replayed(running.pool, "new", ids=(first,))
            await settled(running.pool)
            assert applied.deliveries.count(first) == 1 + round

        rows = await running.deliveries()
        assert [row["status"] for row in rows] == ["processed"] * 4
        assert sorted(applied.deliveries) == [first] * 4 + [row["id"] for row in rows[1:]]
        attempts = await running.sql("SELECT * FROM attempts WHERE key = %(key)s ORDER BY claimed_at", key=str(first))
        assert [(attempt["attempt"], attempt["outcome"]) for attempt in attempts] == [(1, "done")] * 4
        assert len({attempt["visit"] for attempt in attempts}) == 4
        decisions = await running.sql("SELECT decision FROM decisions ORDER BY id")
        assert [row["decision"] for row in decisions] == ["replay", f"replay of delivery {first}"] * 3


async def test_a_dead_delivery_gets_all_its_attempts_again(database_url: str) -> None:
    applied = Applied(failing={"push"})
    async with stack(database_url, applied.consumer(), settings=quick(backoff_base_s=0.01)) as running:
        await running.send(from_github(pushed()))
        await settled(running.pool)
        [row] = await running.deliveries()
        assert (row["status"], row["attempt_count"]) == ("dead", MAX_ATTEMPTS)

        await replayed(running.pool, disposition="dead")
        await settled(running.pool)
        assert len(applied.deliveries) == 2 * MAX_ATTEMPTS
        applied.failing.clear()
        await replayed(running.pool, disposition="dead")
        await settled(running.pool)

        [row] = await running.deliveries()
        assert (row["status"], row["attempt_count"], row["last_error"]) == ("processed", 1, None)


async def test_one_event_of_a_bulk_edit_runs_again_alone(database_url: str) -> None:
    applied = Applied()
    async with stack(database_url, applied.consumer()) as running:
        await running.send(from_shortcut(stories(7, 8, 9)))
        await settled(running.pool)
        parent, *parts = [row["id"] for row in await running.deliveries()]
        applied.deliveries.clear()

        await replayed(running.pool, ids=(parts[1],))
        await settled(running.pool)
        assert applied.deliveries == [parts[1]]

        await replayed(running.pool, source="shortcut")
        await settled(running.pool)
        assert sorted(applied.deliveries) == sorted([parts[1], *parts])
        assert [row["status"] for row in await running.deliveries()] == ["processed"] * 4
        rows = await running.sql("SELECT sc_id FROM patch_sessions ORDER BY sc_id")
        assert [row["sc_id"] for row in rows] == [7, 8, 9]
        assert parent not in applied.deliveries


# ---- out of files


def capture(body: bytes, headers: Headers | list[tuple[str, str]], place: int = 1, **more: Any) -> Capture:
    lines = tuple((name.lower(), value) for name, value in headers)
    return Capture(**{"place": place, "name": f"line {place}", "headers": lines, "body": body, **more})


async def of(*several: Capture) -> AsyncGenerator[Capture]:
    for each in several:
        yield each


def desk(applied: Applied, **more: Any) -> Desk:
    consumer = applied.consumer()
    return Desk(sources=consumer.sources, secrets={"github": [SECRET], "shortcut": [SECRET]}, **more)


async def stored_from(running: Stack, at: Desk, *several: Capture, after: int = 0, at_once: int = 4) -> Report:
    found = arrivals(of(*several), at, after=after)
    return await imported(running.pool, Applied().consumer(), found, at, Limits(at_once=at_once), after=after)


async def test_a_signed_delivery_out_of_a_file_is_verified_and_stored_as_a_replay(database_url: str) -> None:
    applied = Applied()
    request = from_github(b'{"a": 1}\xff\r\n', guid="one")
    async with stack(database_url, applied.consumer(), work=False) as running:
        kept = [*request.headers, ("Cookie", "private")]
        first = await stored_from(running, desk(applied), capture(request.body, kept, source="github"))
        second = await stored_from(running, desk(applied), capture(request.body, kept, source="github"))
        live = await running.send(request)
        [row] = await running.deliveries()

    assert (first.counts, first.signed) == ({"accepted": 1}, 0)
    assert (second.counts, second.well) == ({"duplicate": 1}, True)
    assert live.json() == {"delivery": row["id"], "status": "duplicate"}
    assert (row["origin"], row["dedup_key"], bytes(row["body"])) == ("replay", "101:one", request.body)
    assert row["replay_of"] is None
    assert row["headers"] == [[name.lower(), value] for name, value in request.headers]


async def test_a_dead_one_that_is_here_is_armed_again_by_its_copy(database_url: str) -> None:
    applied = Applied()
    request = from_github(pushed(), guid="one")
    async with stack(database_url, applied.consumer(), work=False) as running:
        await running.send(request)
        await running.sql("UPDATE deliveries SET status = 'dead', claimed_from = 'received'")
        report = await stored_from(running, desk(applied), capture(request.body, request.headers, source="github"))
        [row] = await running.deliveries()
    assert (report.counts, row["status"]) == ({"rearmed": 1}, "received")


async def test_one_without_a_signature_is_signed_with_the_secret_here(database_url: str) -> None:
    applied = Applied()
    plain = capture(pushed(), [("x-github-event", "push"), ("x-github-delivery", "one")], source="github")
    async with stack(database_url, applied.consumer(), work=False) as running:
        report = await stored_from(running, desk(applied), plain)
        [row] = await running.deliveries()
    assert (report.counts, report.signed) == ({"accepted": 1}, 1)
    applied.consumer().sources["github"].verify(
        tuple((name, value) for name, value in row["headers"]), pushed(), [SECRET], 0
    )


async def test_without_a_secret_to_sign_with_nothing_is_done(database_url: str) -> None:
    applied = Applied()
    plain = capture(pushed(), [("x-github-event", "push")], source="github")
    async with stack(database_url, applied.consumer(), work=False) as running:
        for secrets in ({}, {"github": ()}):
            at = Desk(sources=applied.consumer().sources, secrets=secrets)
            with pytest.raises(ConfigurationError, match="WEBHOOKS_SECRET_GITHUB"):
                await stored_from(running, at, plain)
        assert await running.deliveries() == []


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"body": b"changed"}, "bad_signature"),
        ({"source": "nobody"}, "unknown_source"),
        ({"source": ""}, "unknown_source"),
        ({"headers": (("x-hub-signature-256", "sha256="),)}, "malformed_header"),
        ({"body": b"x" * 2000}, "body_too_large"),
    ],
)
async def test_what_is_refused_is_told_with_its_cause_and_stored_nowhere(
    database_url: str, changes: dict[str, Any], cause: str
) -> None:
    applied = Applied()
    request = from_github(pushed())
    lines = tuple((name.lower(), value) for name, value in request.headers)
    given = {"body": request.body, "headers": lines, "source": "github", **changes}
    async with stack(database_url, applied.consumer(), work=False) as running:
        report = await stored_from(running, desk(applied, most_bytes=1000), Capture(place=1, name="line 1", **given))
        assert await running.deliveries() == []
        assert await running.sql("SELECT * FROM rejections") == []
    assert (report.counts, report.causes, report.well) == ({"refused": 1}, {cause: 1}, False)


@pytest.mark.parametrize("at_once", [1, 8])
async def test_a_line_that_cannot_be_read_ends_it_with_all_before_done_and_nothing_after(
    database_url: str, at_once: int
) -> None:
    applied = Applied()
    several = [from_github(pushed(), guid=str(number)) for number in range(5)]
    given = [capture(each.body, each.headers, place, source="github") for place, each in enumerate(several, 1)]
    given[3] = Capture(place=4, name="line 4 of x", fault="it is cut short")
    async with stack(database_url, applied.consumer(), work=False) as running:
        report = await stored_from(running, desk(applied), *given, at_once=at_once)
        assert len(await running.deliveries()) == 3
        rest = await stored_from(running, desk(applied), *given, after=report.after)
    assert report.counts == {"accepted": 3, "failed": 1}
    assert (report.stopped, report.broken, report.after) == ("line 4 of x: it is cut short", True, 4)
    assert not report.well
    assert (rest.counts, rest.stopped, rest.broken) == ({"accepted": 1}, None, False)


async def test_one_that_cannot_be_signed_ends_it_and_what_was_done_before_is_told(database_url: str) -> None:
    applied = Applied()
    request = from_github(pushed())
    signed = capture(request.body, request.headers, 1, source="github")
    plain = capture(b"{}", (), 2, source="shop")
    async with stack(database_url, applied.consumer(), work=False) as running:
        report = await stored_from(running, desk(applied), signed, plain)
    assert (report.counts, report.after, report.broken) == ({"accepted": 1}, 1, False)
    assert (report.stopped or "").startswith("no secret to sign with for shop: set WEBHOOKS_SECRET_SHOP")


async def test_a_signed_time_is_judged_as_of_the_receipt_however_long_ago_that_was(database_url: str) -> None:
    """Case 12."""
    source = StandardWebhooks("shop")
    secret = new_secret(source.recipe)
    received_at = datetime.now(UTC) - timedelta(days=3)
    body = b'{"type": "order.paid"}'

    def signed(number: int, at: datetime) -> Headers:
        return sign(source.recipe, body, secret, now=at.timestamp(), id=f"msg_{number}")

    applied = Applied()
    at = Desk(sources=applied.consumer().sources, secrets={"shop": [secret]})
    hours = timedelta(hours=4)
    async with stack(database_url, applied.consumer(), secrets={"shop": [secret]}, work=False) as running:
        on_time = await stored_from(
            running, at, capture(body, signed(1, received_at), source="shop", received_at=received_at)
        )
        late = await stored_from(
            running, at, capture(body, signed(2, received_at - hours), source="shop", received_at=received_at)
        )
        early = await stored_from(
            running, at, capture(body, signed(3, received_at + hours), source="shop", received_at=received_at)
        )
        unknown = await stored_from(running, at, capture(body, signed(4, received_at), source="shop"))
        wrong = await stored_from(running, at, capture(body + b" ", signed(5, received_at), source="shop"))
        live = await running.client.post("/webhooks/shop", headers=list(signed(6, received_at)), content=body)

    assert [report.counts for report in (on_time, unknown)] == [{"accepted": 1}] * 2
    assert [report.causes for report in (late, early)] == [{"stale_timestamp": 1}] * 2
    assert wrong.causes == {"bad_signature": 1}
    assert (live.status_code, live.json()) == (401, {"error": "stale_timestamp"})


async def test_one_signed_elsewhere_is_taken_when_it_is_signed_anew(database_url: str) -> None:
    applied = Applied()
    elsewhere = from_github(pushed(), guid="one", signature="sha256=" + "0" * 64)
    given = capture(elsewhere.body, elsewhere.headers, source="github")
    async with stack(database_url, applied.consumer(), work=False) as running:
        assert (await stored_from(running, desk(applied), given)).causes == {"bad_signature": 1}
        report = await stored_from(running, desk(applied, resign=True), given)
        [row] = await running.deliveries()
    assert (report.counts, report.signed, row["dedup_key"]) == ({"accepted": 1}, 1, "101:one")


async def test_a_test_of_the_url_is_answered_and_not_stored(database_url: str) -> None:
    applied = Applied()
    ping = from_shortcut(b'{"type": "validation"}')
    async with stack(database_url, applied.consumer(), work=False) as running:
        report = await stored_from(running, desk(applied), capture(ping.body, ping.headers, source="shortcut"))
        assert await running.deliveries() == []
    assert report.counts == {"answered": 1}


async def test_what_would_become_of_a_file_is_what_becomes_of_it(database_url: str) -> None:
    applied = Applied()
    here, new = from_github(pushed(), guid="here"), from_github(pushed(), guid="new")
    ping = from_shortcut(b'{"type": "validation"}')
    several = (
        capture(here.body, here.headers, 1, source="github"),
        capture(new.body, new.headers, 2, source="github"),
        capture(new.body, new.headers, 3, source="github"),
        capture(b"changed", new.headers, 4, source="github"),
        capture(ping.body, ping.headers, 5, source="shortcut"),
        Capture(place=6, name="line 6", fault="cut short"),
    )
    at = desk(applied)
    async with stack(database_url, applied.consumer(), work=False) as running:
        await running.send(here)
        plan = await weighed(running.pool, arrivals(of(*several), at), at)
        assert len(await running.deliveries()) == 1
        report = await stored_from(running, at, *several)

    fates: dict[str, int] = {}
    for fate in plan.fates:
        fates[fate.result] = fates.get(fate.result, 0) + fate.count
    assert fates == report.counts == {"duplicate": 2, "accepted": 1, "refused": 1, "answered": 1, "failed": 1}
    assert plan.total == 6
    assert plan.sample[0] == (1, "github", "push")
    elsewhere = await weighed(None, arrivals(of(*several), at), at)
    assert {fate.result for fate in elsewhere.fates} == {"accepted", "failed"}


async def test_the_worker_of_another_process_applies_what_came_out_of_a_file(database_url: str) -> None:
    applied = Applied()
    request = from_github(pushed())
    async with (
        stack(database_url, applied.consumer(), settings=quick(poll_s=60)) as running,
        Pool.open(database_url, settings=quick()) as other,
    ):
        # Not known to this worker, and it would not look for a minute.
        await until(lambda: running.worker is not None)
        at = desk(applied)
        found = arrivals(of(capture(request.body, request.headers, source="github")), at)
        await imported(other, applied.consumer(), found, at, Limits())
        await until(lambda: len(applied.deliveries) == 1, within_s=20)


# ---- to a receiver


async def test_a_signed_time_is_stale_at_a_receiver_until_it_is_signed_anew_and_the_id_stays(database_url: str) -> None:
    source = StandardWebhooks("shop")
    secret = new_secret(source.recipe)
    yesterday = time.time() - 86_400
    body = b'{"type": "order.paid"}\r\n'
    headers = (("content-type", "application/json"), *sign(source.recipe, body, secret, now=yesterday, id="msg_1"))
    consumer = Applied().consumer()
    clock = [yesterday]
    async with stack(database_url, consumer, secrets={"shop": [secret]}, work=False, now=lambda: clock[0]) as running:
        assert (await running.client.post("/webhooks/shop", headers=list(headers), content=body)).status_code == 202
        clock[0] = time.time()
        async with running.pool.transaction() as tx:
            scope = await chosen(tx, Selection(), "original")
        async with served(running.receiver) as port:
            base = f"http://127.0.0.1:{port}"
            reports: list[Report] = []
            for resign in (False, True):
                at = Desk(sources=consumer.sources, secrets={"shop": [secret]}, resign=resign)
                reports.append(await sent(base, stored(running.pool, scope, at), Limits()))
        [row] = await running.deliveries()

    assert (reports[0].counts, reports[0].causes) == ({"refused": 1}, {"stale_timestamp": 1})
    assert (reports[1].counts, reports[1].signed) == ({"duplicate": 1}, 1)
    assert row["dedup_key"] == "msg_1"


def test_the_first_secret_that_can_sign_does() -> None:
    source = StandardWebhooks("shop")
    secret = new_secret(source.recipe)
    at = Desk(sources={"shop": source}, secrets={"shop": ["whpk_" + "A" * 43 + "=", secret]})

    signed = at.signed(Arrival(place=1, source="shop", body=b"{}"))

    source.verify(signed.headers, b"{}", [secret], time.time())
    with pytest.raises(ConfigurationError, match="no secret to sign with for shop: set WEBHOOKS_SECRET_SHOP"):
        Desk(sources={"shop": source}, secrets={"shop": ["whpk_" + "A" * 43 + "="]}).signed(
            Arrival(place=1, source="shop", body=b"{}")
        )


# ---- order, limits, stopping


def numbers(*places: int, size: int = 0) -> AsyncGenerator[Arrival]:
    async def every() -> AsyncGenerator[Arrival]:
        for place in places:
            yield Arrival(place=place, source="github", body=b"x" * size)

    return every()


@pytest.mark.parametrize(("at_once", "size", "under_way"), [(4, 1, 4), (8, 6, 1), (8, 3, 3), (8, 50, 1)])
async def test_so_many_are_under_way_and_so_many_bytes_and_no_more(
    monkeypatch: pytest.MonkeyPatch, at_once: int, size: int, under_way: int
) -> None:
    monkeypatch.setattr("webhooks.replay.pump.MOST_BYTES_AT_ONCE", 10)
    now, most = 0, 0
    free = asyncio.Event()

    async def each(arrival: Arrival) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await free.wait()
        now -= 1

    tally = Tally()
    task = asyncio.create_task(
        pump(numbers(*range(1, 21), size=size), each, Limits(at_once=at_once), tally, lambda _: None)
    )
    await until(lambda: now == under_way)
    for _ in range(100):
        await asyncio.sleep(0)
    free.set()
    await task
    assert (most, tally.after, tally.stopped) == (under_way, 20, None)


async def test_how_far_it_came_is_the_last_place_before_which_nothing_is_missing() -> None:
    """The third is slow; while it is under way the later ones are done, and do not count."""
    slow, limits, tally = asyncio.Event(), Limits(at_once=3), Tally()
    seen: list[int] = []

    async def each(arrival: Arrival) -> None:
        if arrival.place == 3:
            await slow.wait()
        if arrival.place == 6:
            limits.stop.set()
            slow.set()

    def progress(report: Report) -> None:
        seen.append(report.after)

    await pump(numbers(*range(1, 21)), each, limits, tally, progress)

    assert set(seen[: seen.index(max(seen))]) <= {0, 1, 2}
    assert tally.stopped == INTERRUPTED
    assert 6 <= tally.after < 20


async def test_whoever_cannot_go_on_ends_it_and_is_not_counted_as_done() -> None:
    async def each(arrival: Arrival) -> None:
        if arrival.place == 2:
            raise Halt("away")

    tally = Tally()
    await pump(numbers(1, 2, 3, 4), each, Limits(), tally, lambda _: None)
    assert (tally.after, tally.stopped) == (1, "away")


@pytest.mark.parametrize(
    "error", [ConfigurationError("no secret"), psycopg.OperationalError("gone"), PoolTimeout("gone")]
)
async def test_a_reader_that_fails_ends_it_with_what_was_read_done_and_the_report_kept(error: Exception) -> None:
    async def breaks(*places: int) -> AsyncGenerator[Arrival]:
        for place in places:
            yield Arrival(place=place, source="github")
        raise error

    async def each(arrival: Arrival) -> None:
        await asyncio.sleep(0)
        tally.count("accepted")

    tally = Tally()
    await pump(breaks(1, 2, 3), each, Limits(at_once=8), tally, lambda _: None)
    assert (tally.report().counts, tally.after) == ({"accepted": 3}, 3)
    assert tally.stopped == (
        "no secret" if isinstance(error, ConfigurationError) else "the database does not answer: gone"
    )
    with pytest.raises(type(error)):
        await pump(breaks(), each, Limits(), Tally(), lambda _: None)


async def test_a_halt_before_a_broken_place_is_what_is_told() -> None:
    async def each(arrival: Arrival) -> None:
        raise Halt("away")

    async def two() -> AsyncGenerator[Arrival]:
        yield Arrival(place=1, source="github")
        yield Arrival(place=2, source="", broken="line 2: it is not JSON")

    tally = Tally()
    await pump(two(), each, Limits(at_once=8), tally, lambda _: None)
    assert (tally.stopped, tally.broken, tally.after) == ("away", False, 0)


async def test_a_stop_is_heard_while_nothing_comes() -> None:
    limits, tally = Limits(), Tally()
    closed = asyncio.Event()

    async def silent() -> AsyncGenerator[Arrival]:
        try:
            yield Arrival(place=1, source="github")
            limits.stop.set()
            await asyncio.Event().wait()
        finally:
            closed.set()

    async def each(arrival: Arrival) -> None: ...

    await asyncio.wait_for(pump(silent(), each, limits, tally, lambda _: None), 10)
    assert (tally.after, tally.stopped, closed.is_set()) == (1, INTERRUPTED, True)


async def test_what_breaks_is_raised_and_what_was_under_way_is_ended() -> None:
    cancelled: list[int] = []

    async def each(arrival: Arrival) -> None:
        if arrival.place == 1:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(1)
                raise
        raise KeyError("a mistake of ours")

    with pytest.raises(KeyError):
        await pump(numbers(1, 2, 3), each, Limits(at_once=2), Tally(), lambda _: None)
    assert cancelled == [1]


def test_who_replays_is_the_user_of_the_system() -> None:
    from webhooks.cli.selecting import somebody

    assert somebody() == getpass.getuser()
