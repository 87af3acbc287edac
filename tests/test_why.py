"""One timeline of what happened to a row, from whatever was recorded about it."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from consumers import arrival, arrived, stories
from gates import a_gate, due, expire, opened, sql
from processes import SECRETS, eventually, serving, started, webhooks

from webhooks import Claim, Consumer, Escalate, Event, Gate, NotDone, Park, Pool, Shortcut, Transaction
from webhooks.apply import apply
from webhooks.cli.main import cli
from webhooks.errors import ConfigurationError
from webhooks.inbox import inbox
from webhooks.settings import Settings
from webhooks.why import Why, as_json, why

CONSUMER = Consumer(gates=[a_gate()], sources=[])


async def told(pool: Pool, name: str, consumer: Consumer = CONSUMER) -> Why:
    async with pool.transaction() as tx:
        return await why(tx, consumer, name, pool.settings)


def lines(answer: Why) -> list[str]:
    return [moment.told for moment in answer.timeline]


async def test_the_timeline_tells_attempts_effects_decisions_and_the_escalation_in_order(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1)

    async def busy() -> int:
        raise NotDone("busy")

    async def five() -> int:
        return 5

    with suppress(NotDone):
        async with gate.claim(pool, "drafting", 1, claimed_by="A") as claim:
            assert claim is not None
            await claim.once("call", busy)
    await due(pool, 1)
    await gate.take(pool, "drafting", 1, claimed_by="B")
    await expire(pool, 1)
    await gate.sweep(pool, "drafting")
    await due(pool, 1)
    async with gate.claim(pool, "drafting", 1, claimed_by="C") as claim:
        assert claim is not None
        assert await claim.once("call", five) == 5
        raise Escalate("look at it")
    answer = await told(pool, "patch_sessions:1")
    assert lines(answer) == [
        "attempt 1 at drafting: claimed by A",
        "attempt 1 at drafting: error: NotDone: busy",
        "attempt 2 at drafting: claimed by B",
        "attempt 2 at drafting: expired: lease expired: B stopped answering",
        "attempt 3 at drafting: claimed by C",
        "effect 'call': about to be called, call number 2 (1 before it certainly did not happen)",
        "effect 'call': done, 5",
        "attempt 3 at drafting: escalated: look at it",
    ]
    assert (answer.standing.reason, answer.label) == ("escalated", "patch_sessions:1")
    async with pool.transaction() as tx:
        await gate.retry(tx, 1, decided_by="Ann", reason="looked at it")
    answer = await told(pool, "patch_sessions:1")
    assert lines(answer)[-1] == "Ann decided: retry (looked at it)"
    assert answer.standing.claimable
    assert [moment.at for moment in answer.timeline] == sorted(moment.at for moment in answer.timeline)
    assert json.loads(json.dumps(as_json(answer)))["claim"]["reason"] == "claimable"


async def test_a_call_that_nobody_answered_is_told_as_such(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1)

    async def breaks() -> int:
        raise OSError("connection reset")

    with suppress(OSError):
        async with gate.claim(pool, "drafting", 1) as claim:
            assert claim is not None
            await claim.once("call", breaks)
    [line] = [line for line in lines(await told(pool, "patch_sessions:1")) if line.startswith("effect")]
    assert line.startswith("effect 'call': about to be called; no answer is recorded, and after ")


async def test_an_open_claim_says_who_holds_it(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1)
    await gate.take(pool, "drafting", 1, claimed_by="box:7:ab")
    answer = await told(pool, "patch_sessions:1")
    assert lines(answer) == ["attempt 1 at drafting: claimed by box:7:ab"]
    assert answer.standing.reason == "held"
    assert answer.standing.told.startswith("box:7:ab has held it in drafting since ")
    assert "was not renewed yet" in answer.standing.told


async def test_a_row_that_is_gone_has_left_its_attempts_behind(pool: Pool) -> None:
    gate = a_gate()
    await opened(pool, gate, 1)
    await gate.take(pool, "drafting", 1, claimed_by="A")
    await sql(pool, "DELETE FROM patch_sessions")
    answer = await told(pool, "patch_sessions:1")
    assert (answer.row, answer.standing.reason) == (None, "missing")
    assert lines(answer) == ["attempt 1 at drafting: claimed by A"]


async def test_a_row_that_never_was_is_missing_and_what_is_no_name_is_refused(pool: Pool) -> None:
    for name in ("patch_sessions:2", "patch_sessions:abc", "patch_sessions:9999999999999999999", "77"):
        answer = await told(pool, name)
        assert (answer.row, answer.standing.reason, answer.timeline) == (None, "missing", ())
    for name, said in (
        ("patch_sessions", "TABLE:KEY"),
        ("", "TABLE:KEY"),
        ("x:1", "deliveries, notifications, patch_sessions"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            await told(pool, name)


async def test_a_key_of_several_columns_is_found_though_its_parts_hold_slashes(pool: Pool) -> None:
    tickets = Gate("tickets", key="company, number")
    tickets.phase("open", claimed="claimed", done="resolved")
    await sql(
        pool,
        "CREATE TABLE tickets (company text, number bigint, PRIMARY KEY (company, number), LIKE gated INCLUDING ALL)",
    )
    async with pool.transaction() as tx:
        await tickets.open(tx, company="blue/1", number=2)
    await tickets.take(pool, "claimed", ("blue/1", 2), claimed_by="A")
    answer = await told(pool, "tickets:blue%2F1/2", Consumer(gates=[tickets], sources=[]))
    assert answer.row is not None
    assert (answer.row["company"], answer.row["number"], answer.label) == ("blue/1", 2, "tickets:blue%2F1/2")
    assert lines(answer) == ["attempt 1 at claimed: claimed by A"]


# ---- deliveries


def consumer(gate: Gate[Any]) -> Consumer:
    """Stories open sessions; a comment waits until its session was asked."""
    shortcut = Shortcut()

    @shortcut.on("story.update")
    async def open_session(event: Event, tx: Transaction) -> None:
        await gate.open(tx, sc_id=event.data["story_id"], title=event.data["name"])

    @shortcut.on("story.delete")
    async def close(event: Event, tx: Transaction) -> None:
        if not await gate.advance(tx, event.data["story_id"], ("received", "asked"), "closed"):
            raise Park(gate, event.data["story_id"], while_in=("clarifying",))

    return Consumer(gates=[gate], sources=[shortcut])


async def applied(pool: Pool, consumer: Consumer, delivery: int) -> None:
    claim: Claim[Any] | None = await inbox.take(pool, "applying", delivery, claimed_by="A")
    assert claim is not None
    async with claim.held():
        await apply(consumer, claim)


async def test_a_row_names_the_deliveries_that_moved_it_and_those_that_wait_for_it(pool: Pool) -> None:
    gate = a_gate()
    ours = consumer(gate)
    opens, again, closes, parks = await arrived(
        pool,
        arrival(stories(1), key="1"),
        arrival(stories(1), key="2"),
        arrival(stories(1, action="delete"), key="3"),
        arrival(stories(2, action="delete"), key="4"),
    )
    for delivery in (opens, again, closes):
        await applied(pool, ours, delivery)
    await opened(pool, gate, 2, to="received")
    await gate.take(pool, "clarifying", 2, claimed_by="B")
    await applied(pool, ours, parks)
    answer = await told(pool, "patch_sessions:1", ours)
    assert lines(answer) == [
        f"delivery {opens} (shortcut story.update) moved it",
        f"delivery {closes} (shortcut story.delete) moved it",
    ]
    assert answer.standing.reason == "wrong status"
    assert lines(await told(pool, "patch_sessions:2", ours)) == [
        "attempt 1 at clarifying: claimed by B",
        f"delivery {parks} (shortcut story.delete) waits for it",
    ]
    parked = await told(pool, str(parks), ours)
    assert parked.standing.reason == "parked"
    assert lines(parked) == [
        "received from shortcut story.delete",
        "attempt 1 at applying: claimed by A",
        "parked on patch_sessions:2: waits while patch_sessions:2 is clarifying",
        "attempt 1 at applying: snoozed",
    ]
    closed = await told(pool, f"deliveries:{closes}", ours)
    assert closed.row is not None
    assert closed.row["moved_rows"] == ["patch_sessions:1"]
    assert (await told(pool, str(again), ours)).row["moved_rows"] is None  # type: ignore[index]


async def test_a_delivery_that_was_split_names_its_events_and_they_name_it(pool: Pool) -> None:
    ours = consumer(a_gate())
    [bulk] = await arrived(pool, arrival(stories(1, 2)))
    await applied(pool, ours, bulk)
    answer = await told(pool, str(bulk), ours)
    parts = await sql(pool, "SELECT id FROM deliveries WHERE parent IS NOT NULL ORDER BY position")
    assert [line for line in lines(answer) if line.startswith("split")] == [
        f"split: delivery {part['id']} is its story.update" for part in parts
    ]
    assert f"received from shortcut story.update, event 2 of delivery {bulk}" in lines(
        await told(pool, str(parts[1]["id"]), ours)
    )


# ---- a worker that was killed

CALLS = """
import asyncio
from datetime import timedelta
from pathlib import Path

from webhooks import Consumer, Done, Event, Gate, Shortcut, Transaction

shortcut, sessions = Shortcut(), Gate("patch_sessions", key="sc_id")


@shortcut.on("story.update")
async def opens(event: Event, tx: Transaction) -> None:
    await sessions.open(tx, sc_id=event.data["id"], title="x")


async def charge() -> int:
    Path("calling").touch()
    while not Path("answering").exists():
        await asyncio.sleep(0.05)
    return 5


@sessions.phase("received", claimed="clarifying", done="clarified")
async def clarify(row, claim) -> Done:
    await claim.once("charge", charge, retry_safe=True, timeout=timedelta(minutes=5))
    return claim.done()


consumer = Consumer(gates=[sessions], sources=[shortcut])
"""


def test_an_attempt_and_a_call_that_a_kill_ended_stay_in_the_timeline(database_url: str, tmp_path: Path) -> None:
    (tmp_path / "calls.py").write_text(CALLS)
    # The row rests longer than a command takes on a busy machine, until the test says so.
    app = {"WEBHOOKS_APP": "calls:consumer", "WEBHOOKS_LEASE_S": "2", "WEBHOOKS_BACKOFF_BASE_S": "120"}
    send = ("trigger", "shortcut", "story.update", "--set", "actions.0.id=7", "--url")
    with psycopg.connect(database_url, autocommit=True) as connection:

        def status() -> Any:
            row = connection.execute("SELECT status FROM patch_sessions").fetchone()
            return row and row[0]

        with serving(tmp_path, database_url, **app) as process:
            assert webhooks(tmp_path, *send, process.receiver, **SECRETS, **app).returncode == 0
            eventually((tmp_path / "calling").exists)
            process.signal(signal.SIGKILL)
            process.ends()
        killed = webhooks(tmp_path, "why", "patch_sessions:7", DATABASE_URL=database_url, **app).stdout
        (tmp_path / "answering").touch()
        with started(tmp_path, "work", name="work", DATABASE_URL=database_url, WEBHOOKS_POLL_S="0.2", **app):
            eventually(lambda: status() == "received")
            freed = webhooks(tmp_path, "why", "patch_sessions:7", DATABASE_URL=database_url, **app).stdout
            connection.execute("UPDATE patch_sessions SET not_before = now()")
            eventually(lambda: status() == "clarified")
        done = webhooks(tmp_path, "why", "patch_sessions:7", DATABASE_URL=database_url, **app).stdout

    first = ("attempt 1 at clarifying: claimed by ", "effect 'charge': about to be called; no answer is recorded")
    assert [line in killed for line in first] == [True, True]
    expired = "attempt 1 at clarifying: expired: lease expired: "
    assert [line in freed for line in (*first, expired)] == [True] * 3
    at = [done.index(line) for line in (first[0], expired, "attempt 2 at clarifying: claimed", ", call number 2")]
    assert at == sorted(at)
    assert "effect 'charge': about to be called, call number 2 (of 1 before it no answer was recorded)" in done
    assert "effect 'charge': done, 5" in done


# ---- the command


def test_the_command_tells_the_story_of_a_row(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)

    async def happens() -> None:
        gate = a_gate()
        async with Pool.open(database_url, settings=Settings()) as pool:
            await opened(pool, gate, 1)
            with suppress(ValueError):
                async with gate.claim(pool, "drafting", 1):
                    raise ValueError("first line\nsecond line \x1b[2J")

    asyncio.run(happens())
    shown = CliRunner().invoke(cli, ["why", "patch_sessions:1"])
    assert shown.exit_code == 0, shown.output
    assert "attempts  1 of 3" in shown.output
    assert "claim now?  it is not due until " in shown.output
    assert "error: ValueError: first line\n                         second line \\x1b[2J" in shown.output
    found = json.loads(CliRunner().invoke(cli, ["why", "patch_sessions:1", "--json"]).output)
    assert (found["claim"]["reason"], len(found["timeline"])) == ("not due", 2)
    missing = CliRunner().invoke(cli, ["why", "patch_sessions:2"])
    assert missing.exit_code == 1
    assert "there is no such row" in missing.output
