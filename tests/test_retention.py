"""Retention: what goes, what must stay, and that nobody has to wait for it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result
from consumers import arrival, arrived, from_github, from_shortcut, quick, stack, stories
from gates import a_gate, elsewhere, make_tickets, sql, tickets_gate, until, until_blocked
from processes import eventually, serving

from webhooks import Claim, Consumer, Done, Event, Gate, GitHub, Pool, Shortcut, StandardWebhooks, Transaction
from webhooks.apply import apply
from webhooks.cli.deliveries import deliveries as deliveries_command
from webhooks.cli.prune import prune as prune_command
from webhooks.deliveries import one
from webhooks.errors import ConfigurationError, Unreadable
from webhooks.inbox import Stored, inbox, load, rearm
from webhooks.notify import notifications
from webhooks.retention import KINDS, Ages, Before, Kind, Report, as_json, prune, records
from webhooks.retention import deliveries as walks
from webhooks.retention.ages import told
from webhooks.retention.rows import Row, attempt_is_over, effect_is_over
from webhooks.retention.step import MOST, MOST_BYTES, batch
from webhooks.settings import Settings
from webhooks.why import why

DAY = timedelta(days=1)
ALL = Ages(bodies=30 * DAY, headers=30 * DAY, keys=90 * DAY, attempts=90 * DAY, effects=90 * DAY)


def a_consumer() -> Consumer:
    return Consumer(gates=[a_gate()], sources=[Shortcut(), GitHub()])


@pytest.fixture(autouse=True)
def newest(request: pytest.FixtureRequest) -> None:
    """A delivery that is behind all others in the feed: that one stays, and is seen to in a test of its own."""
    if "database_url" in request.fixturenames:
        with psycopg.connect(request.getfixturevalue("database_url"), autocommit=True) as connection:
            connection.execute(
                "INSERT INTO deliveries (source, dedup_key, body, accepted_xid, status)"
                " VALUES ('shortcut', 'the newest', '', '9000000000000', 'processed')"
            )


async def pruned(pool: Pool, ages: Ages = ALL, *, dry: bool = False, consumer: Consumer | None = None) -> Report:
    return await prune(pool.transaction, consumer or a_consumer(), ages, dry=dry)


async def foretold(pool: Pool, ages: Ages = ALL, *, consumer: Consumer | None = None) -> Report:
    """Prune, and hold a dry run before it to what is then removed."""
    dry = await pruned(pool, ages, dry=True, consumer=consumer)
    real = await pruned(pool, ages, consumer=consumer)
    assert (dry.lines, dry.left) == (real.lines, real.left)
    return real


def counts(report: Report) -> dict[str, int]:
    return {kind: line.count for kind, line in report.lines.items() if line.count}


async def delivery(
    pool: Pool,
    days: float,
    *,
    status: str = "processed",
    body: bytes = b"{}",
    source: str = "shortcut",
    key: str | None = None,
    parent: int | None = None,
    position: int = 0,
) -> int:
    """A delivery that was received so many days ago."""
    if parent is None:
        [id] = await arrived(pool, arrival(body, source=source, key=key, event="push"))
    else:
        async with pool.transaction() as tx:
            key = (await sql(pool, "SELECT dedup_key FROM deliveries WHERE id = %(id)s", id=parent))[0]["dedup_key"]
            await inbox.open(tx, source=source, dedup_key=key, position=position, parent=parent)
            [row] = await (await tx.execute("SELECT max(id) AS id FROM deliveries")).fetchall()
            id = row["id"]
    parked = "deliveries:1" if status == "parked" else None
    await sql(
        pool,
        "UPDATE deliveries SET received_at = now() - %(age)s, status = %(status)s, parked_on = %(parked)s,"
        " parked_since = CASE WHEN %(parked)s::text IS NOT NULL THEN now() END,"
        " claimed_from = CASE WHEN %(status)s IN ('applying', 'dead') THEN 'received' END WHERE id = %(id)s",
        id=id,
        age=days * DAY,
        status="received" if status == "parked" else status,
        parked=parked,
    )
    return id


async def left(pool: Pool) -> dict[int, tuple[bool, bool]]:
    """The deliveries there are: whether each has its body, and its headers."""
    rows = await sql(pool, "SELECT * FROM deliveries WHERE dedup_key <> 'the newest' ORDER BY id")
    return {row["id"]: (row["body"] is not None, row["headers_pruned_at"] is None) for row in rows}


# ---- deliveries


async def test_bodies_headers_and_keys_each_have_an_age_of_their_own(pool: Pool) -> None:
    ids = [await delivery(pool, days) for days in (1, 8, 31, 91)]
    report = await foretold(pool, Ages(bodies=30 * DAY, headers=7 * DAY, keys=90 * DAY))

    assert await left(pool) == {ids[0]: (True, True), ids[1]: (True, False), ids[2]: (False, False)}
    assert counts(report) == {"keys": 1, "bodies": 1, "headers": 2}
    oldest = report.lines["keys"].oldest
    assert oldest is not None
    assert timedelta(days=90, hours=23) < report.now - oldest < timedelta(days=91, hours=1)
    assert counts(await pruned(pool, Ages(bodies=30 * DAY, headers=7 * DAY, keys=90 * DAY))) == {}


async def test_what_is_kept_for_ever_stays(pool: Pool) -> None:
    id = await delivery(pool, 10_000)
    assert counts(await pruned(pool, Ages())) == {}
    assert await left(pool) == {id: (True, True)}
    assert counts(await pruned(pool, ALL.only(["bodies"]))) == {"bodies": 1}
    assert await left(pool) == {id: (False, True)}


async def test_the_last_delivery_of_the_feed_stays_though_its_body_goes(pool: Pool) -> None:
    """The place of whoever follows the feed names it, and holds nothing else against the database."""
    await sql(pool, "DELETE FROM deliveries")
    ids = [await delivery(pool, days) for days in (500, 300, 400)]
    part = await delivery(pool, 400, parent=ids[-1], position=1)

    report = await foretold(pool)

    assert await left(pool) == {ids[-1]: (False, False), part: (False, True)}
    assert counts(report) == {"keys": 2, "bodies": 1, "headers": 1}


@pytest.mark.parametrize("status", ["received", "applying", "parked", "dead"])
async def test_unfinished_and_dead_deliveries_are_never_touched(pool: Pool, status: str) -> None:
    id = await delivery(pool, 1000, status=status)
    assert counts(await pruned(pool)) == {}
    assert await left(pool) == {id: (True, True)}


@pytest.mark.parametrize("status", ["received", "applying", "parked", "dead"])
async def test_a_request_keeps_its_body_while_an_event_split_from_it_needs_it(pool: Pool, status: str) -> None:
    parent = await delivery(pool, 1000)
    done = await delivery(pool, 1000, parent=parent, position=1)
    open_ = await delivery(pool, 1000, parent=parent, position=2, status=status)
    assert counts(await pruned(pool, dry=True)) == counts(await pruned(pool)) == {}
    assert await left(pool) == {parent: (True, True), done: (False, True), open_: (False, True)}

    await sql(pool, "UPDATE deliveries SET status = 'ignored', claimed_from = NULL WHERE id = %(id)s", id=open_)
    assert counts(await pruned(pool, ALL.only(["bodies"]))) == {"bodies": 1}
    assert counts(await pruned(pool)) == {"keys": 3}
    assert await left(pool) == {}


async def test_an_event_that_is_younger_than_its_request_holds_it(pool: Pool) -> None:
    parent = await delivery(pool, 1000)
    await delivery(pool, 5, parent=parent, position=1)
    assert counts(await pruned(pool)) == {}


async def test_a_key_stays_while_its_provider_may_send_it_again(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBHOOKS_KEEP_KEYS", "1h")
    sources = {"github": GitHub(), "shortcut": Shortcut(), "acme": StandardWebhooks("acme")}
    consumer = Consumer(gates=[], sources=list(sources.values()))
    ages = Ages.of(Settings.load(), sources).only(["keys"])
    kept = [
        await delivery(pool, 2.9, source="github"),  # its provider may send it again
        await delivery(pool, 6.9, source="github"),  # refused at first, it could be accepted from the rejections
        await delivery(pool, 29, source="shortcut"),
        await delivery(pool, 29, source="acme"),
        await delivery(pool, 29, source="no source of this consumer"),
    ]
    for days, source in ((7.1, "github"), (31, "shortcut"), (31, "acme"), (31, "no source of this consumer")):
        await delivery(pool, days, source=source)

    assert counts(await pruned(pool, ages, consumer=consumer)) == {"keys": 4}
    assert list(await left(pool)) == kept
    assert [note.partition(":")[0] for note in ages.notes] == [
        "keys of github are kept 7d and not 1h",
        "keys of shortcut are kept 30d and not 1h",
        "keys of acme are kept 30d and not 1h",
    ]


def test_a_key_stays_as_long_as_a_refused_request_may_be_verified_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBHOOKS_KEEP_KEYS", "1d")
    for days, kept in ((1, 3), (7, 7), (20, 20)):
        monkeypatch.setenv("WEBHOOKS_REJECTIONS_DAYS", str(days))
        assert Ages.of(Settings.load(), {"github": GitHub()}).keys_of == {"github": kept * DAY}


def test_a_source_may_keep_its_keys_longer_or_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {"github": GitHub(), "git-hub": GitHub("git-hub"), "shortcut": Shortcut()}
    monkeypatch.setenv("WEBHOOKS_KEEP_KEYS_GITHUB", "7d")
    monkeypatch.setenv("WEBHOOKS_KEEP_KEYS_GIT_HUB", "off")
    ages = Ages.of(Settings.load(), sources)

    assert dict(ages.keys_of) == {"github": 7 * DAY, "git-hub": None, "shortcut": 90 * DAY}
    assert ages.notes == ()
    now = datetime(2026, 6, 1, tzinfo=UTC)
    before = Before.at(ages, now)
    assert before.key_goes("github", now - 8 * DAY)
    assert not before.key_goes("git-hub", now - 10_000 * DAY)
    assert before.latest_key == now - 7 * DAY


@pytest.mark.parametrize("given", ["30", "soon", "0d", "-1d", "999999w"])
def test_an_age_that_cannot_be_read_is_refused_with_what_to_write(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBHOOKS_KEEP_BODIES", given)
    with pytest.raises(
        ConfigurationError, match=r"WEBHOOKS_KEEP_BODIES: write 90m, 12h, 30d, 2w, or off for ever, not"
    ):
        Settings.load()
    monkeypatch.delenv("WEBHOOKS_KEEP_BODIES")
    monkeypatch.setenv("WEBHOOKS_KEEP_KEYS_GITHUB", given)
    with pytest.raises(ConfigurationError, match="WEBHOOKS_KEEP_KEYS_GITHUB: write 90m"):
        Ages.of(Settings.load(), {"github": GitHub()})


def test_ages_are_told_as_they_are_written() -> None:
    for text in ("45s", "90m", "12h", "30d"):
        unit = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}[text[-1]]
        assert told(timedelta(**{unit: int(text[:-1])})) == text
    assert told(None) == "off"


# ---- what a pruned delivery says


async def test_a_body_that_was_pruned_is_said_to_be_gone_wherever_it_is_read(
    pool: Pool, database_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parent = await delivery(pool, 40)
    part = await delivery(pool, 40, parent=parent, position=1)
    await pruned(pool)

    async with pool.transaction() as tx:
        for id in (parent, part):
            row = await one(tx, id)
            assert row is not None
            assert (row["body"], row["headers"]) == (None, [])
            assert row["pruned_at"] is not None
            assert row["headers_pruned_at"] is not None
        told = [moment.told for moment in (await why(tx, a_consumer(), str(parent), quick())).timeline]
        assert "its body was pruned, so it cannot be run again" in told
        assert "its headers were pruned, so it cannot be run again" in told
        stored = Stored(part, "shortcut", "x", 1, parent, "received", datetime.now(UTC), None)
        with pytest.raises(Unreadable, match=f"delivery {parent} cannot be run again: its body was pruned on 2"):
            await load(tx, stored)

    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.chdir(tmp_path)
    shown = await ran(deliveries_command, str(part))
    assert "headers were pruned on 2" in shown.output
    assert "the body was pruned on 2" in shown.output
    assert json.loads((await ran(deliveries_command, str(part), "--json")).output)["body"] is None
    refused = await asyncio.to_thread(CliRunner().invoke, deliveries_command, [str(part), "--body"])
    assert refused.exit_code == 1
    assert f"the body of delivery {part} was pruned on 2" in refused.output


async def test_what_is_kept_of_a_body_with_each_of_its_events_goes_with_it_and_counts(pool: Pool) -> None:
    ids = await arrived(pool, arrival(stories(1, 2)), arrival(stories(3, 4)))
    consumer = a_consumer()

    @consumer.sources["shortcut"].on("story.update")
    async def handle(event: Event, tx: Transaction) -> None:
        pass

    for id in ids:
        claim = await inbox.take(pool, "applying", id)
        assert claim is not None
        async with claim.held():
            await apply(consumer, claim)
    # The first one's headers alone are old enough, and so is all of the second one's content.
    age = "UPDATE deliveries SET status = 'processed', received_at = now() - %(age)s WHERE %(id)s IN (id, parent)"
    for id, days in zip(ids, (20, 40), strict=True):
        await sql(pool, age, id=id, age=days * DAY)
    [size] = await sql(
        pool,
        "SELECT sum(octet_length(body)) + sum(octet_length(part)) AS all FROM deliveries WHERE %(id)s IN (id, parent)",
        id=ids[1],
    )
    report = await foretold(pool, replace(ALL, headers=10 * DAY))
    assert report.lines["bodies"].bytes == size["all"]
    counted = "SELECT count(part) AS kept, count(*) AS all FROM deliveries WHERE %(id)s IN (id, parent)"
    assert [await sql(pool, counted, id=id) for id in ids] == [[{"kept": 3, "all": 3}], [{"kept": 0, "all": 3}]]


async def test_a_pruned_delivery_that_is_run_again_is_dead_at_once_with_the_reason(database_url: str) -> None:
    async with stack(database_url, a_consumer()) as running:
        await many(running.pool, 1)
        [id] = await left(running.pool)
        await pruned(running.pool)
        await running.sql("UPDATE deliveries SET status = 'received', not_before = now() WHERE id = %(id)s", id=id)

        async def dead() -> bool:
            return [row["status"] for row in await running.deliveries() if row["id"] == id] == ["dead"]

        await until(dead)
        [row] = [row for row in await running.deliveries() if row["id"] == id]

    assert row["attempt_count"] == 1
    assert row["last_error"].startswith(
        f"the body cannot be read: delivery {id} cannot be run again: its body was pruned"
    )


async def test_a_copy_of_a_pruned_delivery_is_a_duplicate_and_is_not_applied_again(database_url: str) -> None:
    consumer, applied = a_counting_consumer()
    requests = [from_shortcut(stories(7, id="one")), from_github(b'{"action": "opened"}', event="issues", guid="two")]
    async with stack(database_url, consumer) as running:
        for request in requests:
            assert (await running.send(request)).status_code == 202

        async def done() -> bool:
            return all(row["status"] in ("processed", "ignored") for row in await running.deliveries())

        await until(done)
        await running.sql(
            "UPDATE deliveries SET received_at = now() - interval '40 days' WHERE dedup_key <> 'the newest'"
        )
        assert counts(await pruned(running.pool, consumer=consumer)) == {"bodies": 2, "headers": 2}
        for request in requests:
            answer = await running.send(request)
            assert (answer.status_code, answer.json()["status"]) == (200, "duplicate")
        await until(done)

    assert applied == {"story 7": 1, "issue": 1}


async def test_a_copy_does_not_rearm_what_was_ignored_and_pruned(pool: Pool) -> None:
    ids = [await delivery(pool, 40, status="ignored", key="one"), await delivery(pool, 4, status="ignored", key="two")]
    await pruned(pool)
    async with pool.transaction() as tx:
        again = await rearm(tx, [("shortcut", "one"), ("shortcut", "two")], ids)
    assert again == {("shortcut", "two")}


def a_counting_consumer() -> tuple[Consumer, Counter[str]]:
    """A consumer, and how often each of its handlers was committed."""
    shortcut, github = Shortcut(), GitHub()
    applied: Counter[str] = Counter()

    @shortcut.on("story.update")
    async def story(event: Event, tx: Transaction) -> None:
        applied[f"story {event.data['id']}"] += 1

    @github.on("issues.opened")
    async def issue(event: Event, tx: Transaction) -> None:
        applied["issue"] += 1

    return Consumer(gates=[], sources=[shortcut, github]), applied


# ---- effects and attempts


@pytest.mark.parametrize(
    ("row", "effect", "attempt"),
    [
        (None, True, True),
        (Row(True, 5, 9, None, None), False, False),
        (Row(False, 5, 9, None, None), True, True),
        (Row(True, 6, 9, None, None), True, False),
        (Row(False, 6, 9, None, None), True, True),
        (Row(False, 5, 1, None, None), True, False),
        (Row(False, 5, None, None, None), True, True),
    ],
)
def test_an_effect_needs_its_visit_and_an_attempt_its_row(row: Row | None, effect: bool, attempt: bool) -> None:
    assert effect_is_over(row, 5) is effect
    assert attempt_is_over(row, 1) is attempt


async def session(pool: Pool, key: int, status: str, *, visit: int = 1, claim_seq: int | None = None) -> None:
    await sql(
        pool,
        "INSERT INTO patch_sessions (sc_id, title, status, visit, claim_seq, claimed_from, opened_at)"
        " VALUES (%(key)s, 'x', %(status)s, %(visit)s, %(claim_seq)s,"
        " CASE WHEN %(status)s IN ('drafting', 'escalated') THEN 'clarified' END, now() - interval '200 days')",
        key=key,
        status=status,
        visit=visit,
        claim_seq=claim_seq,
    )


async def attempt(
    pool: Pool,
    seq: int,
    key: object,
    *,
    table: str = "patch_sessions",
    visit: int = 1,
    days: float = 100,
    ended: bool = True,
    effect: float | None = None,
) -> None:
    """An attempt that ended so many days ago, and an effect of it as many days old."""
    await sql(
        pool,
        "INSERT INTO attempts (claim_seq, table_name, key, phase, visit, attempt, claimed_at, ended_at, outcome)"
        " VALUES (%(seq)s, %(table)s, %(key)s, 'drafting', %(visit)s, 1, now() - %(age)s, %(ended)s,"
        " CASE WHEN %(ended)s::timestamptz IS NOT NULL THEN 'done' END)",
        seq=seq,
        table=table,
        key=str(key),
        visit=visit,
        age=days * DAY,
        ended=datetime.now(UTC) - days * DAY if ended else None,
    )
    if effect is not None:
        await sql(
            pool,
            "INSERT INTO effects"
            " (idempotency_key, claim_seq, state, input_hash, result, call_until, intended_at, ended_at)"
            " VALUES (%(name)s, %(seq)s, 'done', 'x', '1', now(), now() - %(age)s, now() - %(age)s)",
            name=f"{table}:{key}:drafting:{visit}:draft {seq}",
            seq=seq,
            age=effect * DAY,
        )


async def recorded(pool: Pool) -> tuple[list[int], list[int]]:
    """The claims whose attempts, and those whose effects, are still there."""
    found = [
        [row["claim_seq"] for row in await sql(pool, f"SELECT claim_seq FROM {name} ORDER BY claim_seq")]  # noqa: S608
        for name in ("attempts", "effects")
    ]
    return found[0], found[1]


async def test_an_effect_goes_once_its_row_is_in_another_visit_or_final(pool: Pool) -> None:
    for key, status, visit in ((1, "clarified", 1), (2, "drafting", 1), (3, "escalated", 1), (4, "finished", 1)):
        await session(pool, key, status, visit=visit)
        await attempt(pool, 10 + key, key, effect=100)
    await session(pool, 5, "drafting", visit=2)
    await attempt(pool, 15, 5, effect=100)
    await attempt(pool, 16, 6, effect=100)  # its row is gone
    await session(pool, 7, "finished")
    await attempt(pool, 17, 7, effect=10)

    assert counts(await foretold(pool, ALL.only(["effects"]))) == {"effects": 3}
    assert (await recorded(pool))[1] == [11, 12, 13, 17]


async def test_an_attempt_stays_for_unfinished_rows_last_claims_and_effects(pool: Pool) -> None:
    for key, status in ((1, "clarified"), (2, "drafting"), (3, "escalated")):
        await session(pool, key, status)
        await attempt(pool, 10 + key, key)
    await session(pool, 4, "finished", claim_seq=15)
    await attempt(pool, 14, 4)
    await attempt(pool, 15, 4)  # the last claim of its row
    await attempt(pool, 16, 5)  # its row is gone
    await attempt(pool, 17, 6, ended=False)
    await attempt(pool, 18, 7, days=10)
    await session(pool, 8, "finished")
    await attempt(pool, 19, 8, effect=10)

    assert counts(await foretold(pool)) == {"attempts": 2}
    assert (await recorded(pool))[0] == [11, 12, 13, 15, 17, 18, 19]


async def test_effects_and_attempts_of_a_table_without_a_gate_are_left_and_named(pool: Pool) -> None:
    await attempt(pool, 10, 1, table="tickets", effect=100)
    await attempt(pool, 11, 2, table="tickets", days=1, effect=1)
    await sql(
        pool,
        "INSERT INTO effects (idempotency_key, claim_seq, state, input_hash, result, call_until, ended_at)"
        " VALUES ('x', 99, 'done', 'x', '1', now() - interval '1 year', now() - interval '1 year')",
    )
    report = await foretold(pool)

    assert counts(report) == {}
    assert report.left == {
        "effects of tickets, over which this consumer has no gate": 1,
        "attempts of tickets, over which this consumer has no gate": 1,
        "effects whose attempt is not recorded": 1,
    }


async def test_rows_are_found_by_keys_of_several_columns_and_whatever_those_hold(pool: Pool) -> None:
    await make_tickets(pool)
    consumer = Consumer(gates=[tickets_gate()], sources=[])
    odd = 'a "quoted" \\ {name}, with/slashes and 100%'
    for company, number, status in ((odd, 1, "open"), ("acme", 2, "resolved"), ("acme", 3, "open")):
        await sql(
            pool,
            "INSERT INTO tickets (company, number, status, visit) VALUES (%(company)s, %(number)s, %(status)s, 1)",
            company=company,
            number=number,
            status=status,
        )
        key = consumer.gates["tickets"].key.text((company, number))
        await attempt(pool, 10 + number, key, table="tickets", effect=100)
    assert counts(await pruned(pool, consumer=consumer)) == {"effects": 1, "attempts": 1}
    assert await recorded(pool) == ([11, 13], [11, 13])

    # A key that no row can have, from a time when the column had another type, names a row that is gone.
    await attempt(pool, 20, "acme/x", table="tickets", effect=100)
    assert counts(await pruned(pool, consumer=consumer)) == {"effects": 1, "attempts": 1}
    assert await recorded(pool) == ([11, 13], [11, 13])


async def test_sent_notifications_and_ended_runs_age_with_attempts_and_decisions_stay(pool: Pool) -> None:
    await sql(pool, "INSERT INTO companies (id, name) VALUES ('acme', 'acme')")
    for days, status in ((100, "notified"), (100, "dropped"), (100, "pending"), (100, "escalated"), (1, "notified")):
        await sql(
            pool,
            "INSERT INTO notifications (table_name, key, phase, attempts_made, escalated_at, status, claimed_from)"
            " VALUES ('issues', '1', 'claimed', 5, now() - %(age)s, %(status)s,"
            " CASE WHEN %(status)s = 'escalated' THEN 'pending' END)",
            age=days * DAY,
            status=status,
        )
    for days, ended in ((100, True), (100, False), (1, True)):
        await sql(
            pool,
            "INSERT INTO heartbeat_runs (company_id, started_at, ended_at)"
            " VALUES ('acme', now() - %(age)s, CASE WHEN %(ended)s THEN now() - %(age)s END)",
            age=days * DAY,
            ended=ended,
        )
    await sql(
        pool,
        "INSERT INTO decisions (table_name, key, decision, decided_by, reason, decided_at)"
        " VALUES ('issues', '1', 'retry', 'me', 'why', now() - interval '10 years')",
    )

    assert counts(await foretold(pool)) == {"notifications": 2, "runs": 1}
    assert len(await sql(pool, "SELECT 1 AS found FROM notifications")) == 3
    assert len(await sql(pool, "SELECT 1 AS found FROM heartbeat_runs")) == 2
    assert len(await sql(pool, "SELECT 1 AS found FROM decisions")) == 1


async def test_a_dry_run_removes_nothing_and_says_exactly_what_the_real_one_removes(pool: Pool) -> None:
    for days in (1, 40, 100, 100):
        id = await delivery(pool, days)
        await attempt(pool, 1000 + id, id, table="deliveries", days=days)
        await sql(pool, "UPDATE deliveries SET claim_seq = %(seq)s WHERE id = %(id)s", seq=1000 + id, id=id)
    parent = await delivery(pool, 100)
    for position in (1, 2):
        part = await delivery(pool, 100, parent=parent, position=position)
        await attempt(pool, 1000 + part, part, table="deliveries")
    dead = await delivery(pool, 100, status="dead")
    await attempt(pool, 1000 + dead, dead, table="deliveries")
    await sql(
        pool,
        "INSERT INTO notifications (id, table_name, key, phase, attempts_made, escalated_at, status, claim_seq)"
        " OVERRIDING SYSTEM VALUE VALUES (1, 'issues', '1', 'claimed', 5, now() - interval '1 year', 'notified', 500)",
    )
    await attempt(pool, 500, 1, table=notifications.table, effect=100)
    await session(pool, 1, "finished", claim_seq=601)
    await attempt(pool, 600, 1, effect=100)
    await attempt(pool, 601, 1, effect=100)
    before = await left(pool), await recorded(pool)

    dry = await pruned(pool, dry=True)
    assert (await left(pool), await recorded(pool)) == before
    real = await pruned(pool)

    assert dry.lines == real.lines
    assert counts(real) == {"keys": 5, "bodies": 1, "headers": 1, "notifications": 1, "effects": 3, "attempts": 6}
    assert as_json(dry)["dry"] is True
    assert {kind["kind"]: kind["count"] for kind in as_json(dry)["kinds"]} == {
        kind: line.count for kind, line in real.lines.items()
    }


# ---- nobody waits


def test_a_batch_is_limited_by_lines_and_by_bytes() -> None:
    assert batch([]) == 0
    assert batch([None, None]) == 2
    assert batch([1] * (MOST + 5)) == MOST
    assert batch([None] * 3 + [1] * MOST + [None, 1]) == MOST + 4
    assert batch([MOST_BYTES, 1]) == 1
    assert batch([MOST_BYTES * 2, 1]) == 1
    assert batch([MOST_BYTES // 2, None, MOST_BYTES // 2, None, 1]) == 4


async def test_more_than_a_batch_is_removed_in_several_transactions(pool: Pool) -> None:
    await many(pool, MOST * 2 + 1)
    report = await pruned(pool, Ages(keys=DAY))
    assert counts(report) == {"keys": MOST * 2 + 1}
    assert report.transactions >= 3
    assert await left(pool) == {}


async def many(pool: Pool, count: int, *, days: float = 40, source: str = "shortcut") -> None:
    """Old deliveries that were applied: `key 1`, `key 2`, …"""
    await sql(
        pool,
        "INSERT INTO deliveries (source, dedup_key, body, headers, received_at, status, event)"
        " SELECT %(source)s, 'key ' || n, convert_to(repeat('x', 1000), 'UTF8'), '[[\"a\", \"b\"]]',"
        " now() - %(age)s + n * interval '1 millisecond', 'processed', 'story.update'"
        " FROM generate_series(1, %(count)s) AS n",
        count=count,
        age=days * DAY,
        source=source,
    )


async def test_what_somebody_has_locked_is_passed_over_with_all_that_belongs_to_it(
    pool: Pool, database_url: str
) -> None:
    alone, parent = await delivery(pool, 100), await delivery(pool, 100)
    part = await delivery(pool, 100, parent=parent, position=1)
    free = await delivery(pool, 100)
    await session(pool, 1, "finished")
    await attempt(pool, 10, 1, effect=100)
    other = await elsewhere(database_url)
    async with other, other.transaction():
        await other.execute("SELECT 1 AS found FROM deliveries WHERE id = ANY(%s) FOR UPDATE", ([alone, part],))
        await other.execute("SELECT 1 AS found FROM effects FOR UPDATE")
        report = await pruned(pool)
        assert (counts(report), report.left) == ({"keys": 1}, {})
        assert list(await left(pool)) == [alone, parent, part]
        assert await recorded(pool) == ([10], [10])
    assert free not in await left(pool)
    assert counts(await pruned(pool)) == {"keys": 3, "effects": 1, "attempts": 1}


async def test_what_is_unfinished_by_the_time_of_the_lock_is_not_removed(pool: Pool) -> None:
    """What the page said may be over: whoever replays or splits a delivery commits before it is locked."""
    ids = [await delivery(pool, 100) for _ in range(3)]
    await sql(pool, "UPDATE deliveries SET status = 'received' WHERE id = %(id)s", id=ids[0])
    await delivery(pool, 100, parent=ids[1], position=1, status="received")
    async with pool.transaction() as tx:
        held, parts = await walks._held(tx, ids)  # pyright: ignore[reportPrivateUsage]
    assert (held, parts) == ([ids[2]], [])


async def test_what_changed_since_the_page_was_read_is_not_removed(pool: Pool) -> None:
    """An effect that another claim has taken over, and an attempt that has not ended."""
    await attempt(pool, 10, 1, effect=100)
    await attempt(pool, 11, 2, ended=False)
    key = {"keys": ["patch_sessions:1:drafting:1:draft 10"]}
    async with pool.transaction() as tx:
        taken_over = await tx.execute(records.REMOVE_EFFECTS, {**key, "claim_seqs": [9]})
        assert await taken_over.fetchall() == []
        open_ = await tx.execute(records.REMOVE_ATTEMPTS, {"claim_seqs": [10, 11]})
        assert await open_.fetchall() == []
        assert len(await (await tx.execute(records.REMOVE_EFFECTS, {**key, "claim_seqs": [10]})).fetchall()) == 1
    assert await recorded(pool) == ([10, 11], [])


async def test_a_locked_table_is_waited_for_without_holding_up_and_pruning_goes_on(
    pool: Pool, database_url: str
) -> None:
    await many(pool, 10)
    other = await elsewhere(database_url)
    async with other:
        await other.execute("BEGIN")
        await other.execute("LOCK TABLE deliveries IN ACCESS EXCLUSIVE MODE")
        running = asyncio.create_task(pruned(pool, Ages(keys=DAY)))
        await until_blocked(pool)

        async def gave_up() -> bool:
            rows = await sql(
                pool,
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
            )
            return not rows

        await until(gave_up)
        assert not running.done()
        await until_blocked(pool)  # it tries again
        await other.execute("COMMIT")
    report = await running
    assert counts(report) == {"keys": 10}
    assert report.left == {}


async def test_what_stays_locked_is_given_up_and_named(
    pool: Pool, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webhooks.retention.run.TRIES", 1)
    await many(pool, 10)
    await session(pool, 1, "finished")
    await attempt(pool, 10, 1, effect=100)
    other = await elsewhere(database_url)
    async with other, other.transaction():
        await other.execute("LOCK TABLE deliveries IN ACCESS EXCLUSIVE MODE")
        report = await pruned(pool)
    assert counts(report) == {"effects": 1, "attempts": 1}
    [reason] = report.left
    assert reason.startswith("what could not be locked (")


async def test_deliveries_are_accepted_while_others_are_pruned(database_url: str) -> None:
    consumer, _ = a_counting_consumer()
    async with stack(database_url, consumer, work=False) as running:
        await many(running.pool, 6000)
        during = 0
        pruning = asyncio.create_task(pruned(running.pool, Ages(bodies=DAY, headers=DAY), consumer=consumer))
        bodies = iter(range(1, 100_000))

        async def sender() -> None:
            nonlocal during
            while not pruning.done():
                number = next(bodies)
                copy = from_shortcut(stories(1, id=f"key {number * 37 % 6000 + 1}"))
                new = from_shortcut(stories(1, id=f"new {number}"))
                answers = await asyncio.gather(running.send(copy), running.send(new))
                assert [answer.json()["status"] for answer in answers] == ["duplicate", "accepted"]
                during += not pruning.done()

        await asyncio.gather(*(sender() for _ in range(4)))
        report = await pruning

    assert during > 20
    assert counts(report) == {"bodies": 6000, "headers": 6000}
    assert report.longest_s < 2


@pytest.mark.invariant(3)
async def test_case_18_what_is_pruned_while_it_is_redelivered_is_applied_once_within_the_window(
    database_url: str,
) -> None:
    consumer, applied = a_counting_consumer()
    inside, outside = 1500, 1500
    async with stack(database_url, consumer) as running:
        await many(running.pool, inside, days=29, source="shortcut")
        await sql(running.pool, "UPDATE deliveries SET dedup_key = 'in ' || dedup_key")
        await many(running.pool, outside, days=40, source="shortcut")
        ages = Ages.of(Settings(keep_bodies=DAY, keep_headers=DAY, keep_keys=DAY), consumer.sources)
        pruning = asyncio.create_task(pruned(running.pool, ages, consumer=consumer))
        statuses: Counter[str] = Counter()

        async def redeliver(key: str) -> None:
            statuses[(await running.send(from_shortcut(stories(7, id=key)))).json()["status"]] += 1

        for first in range(1, inside, 50):
            await asyncio.gather(*(redeliver(f"in key {number}") for number in range(first, first + 50)))
        report = await pruning
        late = [f"key {number}" for number in range(1, 11)]
        await asyncio.gather(*map(redeliver, late * 5))

        async def settled() -> bool:
            return not await running.sql("SELECT 1 AS found FROM deliveries WHERE status IN ('received', 'applying')")

        await until(settled)

    assert counts(report) == {"keys": outside, "bodies": inside, "headers": inside}
    # Inside the window each is known by its key; past it the first copy is a new delivery, once.
    assert statuses == {"duplicate": inside + 40, "accepted": 10}
    assert applied == {"story 7": 10}


async def test_two_prunings_at_once_remove_everything_once(pool: Pool) -> None:
    await many(pool, 3000)
    reports = await asyncio.gather(*(pruned(pool, Ages(keys=DAY)) for _ in range(2)))
    assert sum(report.lines["keys"].count for report in reports) == 3000
    assert await left(pool) == {}


async def test_an_effect_is_not_called_again_by_work_that_pruning_met_in_the_middle(database_url: str) -> None:
    calls: Counter[int] = Counter()
    shortcut, sessions = Shortcut(), Gate("patch_sessions", key="sc_id")

    async def draft(key: int) -> str:
        calls[key] += 1
        return "diff"

    @sessions.phase("clarified", claimed="drafting", done="drafted")
    async def drafting(row: dict[str, Any], claim: Claim) -> Done:
        patch = await claim.once("draft", draft, row["sc_id"])
        if claim.attempt == 1:
            raise RuntimeError("the first attempt fails after its effect")
        return claim.done(patch=patch)

    consumer = Consumer(gates=[sessions], sources=[shortcut])
    async with stack(database_url, consumer, settings=quick(backoff_base_s=3600, backoff_max_s=3600)) as running:
        async with running.pool.transaction() as tx:
            await sessions.open(tx, sc_id=7, title="x")
        await until(lambda: calls[7])

        async def failed() -> bool:
            return bool(await running.sql("SELECT 1 AS found FROM attempts WHERE outcome = 'error'"))

        await until(failed)
        await running.sql(
            "UPDATE attempts SET claimed_at = now() - interval '1 year', ended_at = now() - interval '1 year'"
        )
        await running.sql("UPDATE effects SET ended_at = now() - interval '1 year'")
        assert counts(await pruned(running.pool, consumer=consumer)) == {}
        await running.sql("UPDATE patch_sessions SET not_before = now()")

        async def drafted() -> bool:
            return bool(await running.sql("SELECT 1 AS found FROM patch_sessions WHERE status = 'drafted'"))

        await until(drafted)
        await running.sql("UPDATE effects SET ended_at = now() - interval '1 year'")
        assert counts(await pruned(running.pool, ALL.only(["effects"]), consumer=consumer)) == {"effects": 1}

    assert calls == {7: 1}


# ---- the command, and the schedule


async def ran(command: Any, *arguments: str) -> Result:
    return await asyncio.to_thread(
        CliRunner().invoke, command, arguments, catch_exceptions=False, standalone_mode=False
    )


@pytest.fixture
def _here(database_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("WEBHOOKS_APP", "shop:consumer")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_here")
async def test_the_command_says_what_it_would_remove_and_removes_it_with_yes(pool: Pool) -> None:
    await delivery(pool, 40, body=b"x" * 2048)
    await delivery(pool, 100)
    dry = (await ran(prune_command)).output
    assert len(await left(pool)) == 2
    done = (await ran(prune_command, "--yes")).output
    again = (await ran(prune_command)).output

    bodies = next(line for line in dry.splitlines() if line.startswith("bodies"))
    assert bodies.split()[1:5] == ["30d", "1", "2.0", "KiB"]
    assert "keys (whole deliveries)" in dry
    assert dry.endswith("nothing was removed; do it with --yes\n")
    assert list((await left(pool)).values()) == [(False, False)]
    assert next(line for line in done.splitlines() if line.startswith("bodies")).split()[2] == "1"
    assert "transactions, the longest 0." in done
    assert again.endswith("nothing was removed, and nothing is old enough\n")


@pytest.mark.usefixtures("_here")
async def test_the_command_speaks_json_and_may_be_narrowed(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBHOOKS_KEEP_KEYS", "1d")
    await delivery(pool, 100)
    await attempt(pool, 10, 1, table="tickets")
    told = json.loads((await ran(prune_command, "--json")).output)
    assert [kind["kind"] for kind in told["kinds"]] == list(KINDS)
    keys: dict[str, Any] = next(kind for kind in told["kinds"] if kind["kind"] == "keys")
    assert (keys["count"], keys["keep"]) == (1, ["7d", "30d"])
    assert told["keep_keys"] == {"github": "7d", "shortcut": "30d"}
    assert told["left"] == {"attempts of tickets, over which this consumer has no gate": 1}
    assert len(told["notes"]) == 2
    shown = (await ran(prune_command)).output
    assert "left alone: 1 attempts of tickets, over which this consumer has no gate" in shown
    assert "note: keys of github are kept 7d and not 1d" in shown

    only = json.loads((await ran(prune_command, "--json", "--yes", "--only", "bodies")).output)
    assert {kind["kind"]: kind["count"] for kind in only["kinds"] if kind["count"]} == {"bodies": 1}
    assert [kind["kind"] for kind in only["kinds"]] == ["bodies"]
    assert (only["notes"], "keep_keys" in only) == ([], False)
    assert list((await left(pool)).values()) == [(False, True)]
    shown = (await ran(prune_command, "--only", "bodies", "--only", "attempts")).stdout
    assert [line.split()[0] for line in shown.splitlines()[1:-2]] == [
        "bodies",
        "notifications",
        "heartbeat",
        "attempts",
    ]
    assert "off" not in shown


def test_every_kind_has_an_age() -> None:
    kinds: list[Kind] = list(KINDS)
    assert all(ALL.of_kind(kind) != (None,) for kind in kinds)
    assert all(Ages().of_kind(kind) == (None,) for kind in kinds)


def test_serve_prunes_on_its_schedule(tmp_path: Path, database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO deliveries (source, dedup_key, body, received_at, status)"
            " VALUES ('shortcut', 'one', 'x', now() - interval '40 days', 'processed')"
        )
        with serving(tmp_path, database_url, "--prune-every", "1h") as process:
            process.says("pruned")
            eventually(
                lambda: (
                    connection.execute("SELECT 1 AS found FROM deliveries WHERE pruned_at IS NOT NULL").fetchone()
                    is not None
                )
            )
            process.signal()
            assert process.ends() == 0
