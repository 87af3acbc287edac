"""What a person decided reaches the phase that asked, and a row is moved by hand only to a status that is known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from click.testing import CliRunner, Result
from consumers import arrival, arrived, quick
from gates import due, make_tickets, opened, row_of, sql, status_of, tickets_gate
from pydantic import JsonValue
from test_escalation import control

from webhooks import Claim, Consumer, Escalate, Event, Gate, GitHub, Pool, Transaction
from webhooks.apply import apply
from webhooks.cli.main import cli
from webhooks.decision import resolve, retry, retry_each
from webhooks.delivery import Decision
from webhooks.errors import ConfigurationError
from webhooks.inbox import inbox
from webhooks.settings import Settings
from webhooks.why import why

sessions = Gate("patch_sessions", key="sc_id")
sessions.phase("received", claimed="clarifying", done="clarified")
sessions.phase("clarified", claimed="drafting", done="drafted", max_attempts=2)
tickets = tickets_gate()
github = GitHub()
CONSUMER = Consumer(gates=[sessions, tickets], sources=[github])


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    async with Pool.open(database_url, settings=quick()) as pool:
        yield pool


async def approve(pool: Pool, name: str = "patch_sessions:1", **more: Any) -> None:
    told = {"decided_by": "Ann", "reason": "looks right", "value": {"approved": True}, **more}
    async with pool.transaction() as tx:
        await retry(tx, CONSUMER, name, **told)


async def work(claim: Claim[Any] | None) -> None:
    """A phase that goes on only when somebody has approved."""
    assert claim is not None
    said = claim.decision
    if said is None or said.value != {"approved": True}:
        raise Escalate("somebody has to approve")
    await claim.complete()


async def run(pool: Pool, phase: str = "drafting", key: int = 1) -> str:
    async with sessions.claim(pool, phase, key) as claim:
        await work(claim)
    return await status_of(pool, key)


async def seen(pool: Pool, phase: str = "drafting", key: int = 1) -> Decision | None:
    """What an attempt is told; it is given back."""
    await due(pool, key)
    async with sessions.claim(pool, phase, key) as claim:
        assert claim is not None
    return claim.decision


async def test_an_approval_lets_the_phase_go_on(pool: Pool) -> None:
    await opened(pool, sessions, 1)
    assert await run(pool) == "escalated"
    await approve(pool)
    said = await seen(pool)
    assert said is not None
    [line] = await sql(pool, "SELECT decided_at, visit FROM decisions")
    assert said == Decision("Ann", "looks right", line["decided_at"], {"approved": True})
    assert line["visit"] == (await row_of(pool, 1))["visit"]
    await due(pool, 1)
    assert await run(pool) == "drafted"


async def test_without_a_value_the_phase_is_told_who_and_why(pool: Pool) -> None:
    await opened(pool, sessions, 1)
    assert await run(pool) == "escalated"
    await approve(pool, value=None)
    said = await seen(pool)
    assert said is not None
    assert (said.decided_by, said.reason, said.value) == ("Ann", "looks right", None)
    await due(pool, 1)
    assert await run(pool) == "escalated"


@pytest.mark.parametrize("value", [False, 0, "", "ja\0 \ud800", 1.5, [], {"a": [None]}, "ö" * 100_000], ids=repr)
async def test_any_json_is_a_value(pool: Pool, value: JsonValue) -> None:
    await opened(pool, sessions, 1)
    await run(pool)
    await approve(pool, value=value)
    said = await seen(pool)
    assert said is not None
    assert said.value == (value if value != "ja\0 \ud800" else "ja\0 \ufffd")


async def test_a_decision_holds_through_failures_and_later_decisions_without_a_value(pool: Pool) -> None:
    await opened(pool, sessions, 1)
    await run(pool)
    await approve(pool)
    for _ in range(2):
        await due(pool, 1)
        with suppress(ValueError):
            async with sessions.claim(pool, "drafting", 1) as claim:
                assert claim is not None
                assert claim.decision is not None
                raise ValueError("another thing went wrong")
    assert await status_of(pool, 1) == "escalated"
    await approve(pool, value=None, decided_by="Bob", reason="that is mended")
    said = await seen(pool)
    assert said is not None
    assert (said.decided_by, said.value) == ("Ann", {"approved": True})
    await sql(pool, "UPDATE patch_sessions SET status = 'escalated', claimed_from = 'clarified'")
    await approve(pool, value={"approved": False}, decided_by="Bob")
    said = await seen(pool)
    assert said is not None
    assert (said.decided_by, said.value) == ("Bob", {"approved": False})


async def test_a_decision_belongs_to_the_visit(pool: Pool) -> None:
    await opened(pool, sessions, 1, to="received")
    assert await run(pool, "clarifying") == "escalated"
    await approve(pool)
    assert await run(pool, "clarifying") == "clarified"
    assert await seen(pool) is None  # another phase
    async with pool.transaction() as tx:
        assert await sessions.advance(tx, 1, "clarified", "received")
    assert await seen(pool, "clarifying") is None  # the same phase, once more
    await due(pool, 1)
    assert await run(pool, "clarifying") == "escalated"


async def test_of_a_row_that_was_escalated_by_hand_the_decision_is_told_too(pool: Pool) -> None:
    await opened(pool, sessions, 1)
    await sql(pool, "UPDATE patch_sessions SET status = 'escalated', claimed_from = 'clarified'")
    await approve(pool)
    assert await run(pool) == "drafted"


async def test_a_row_of_several_key_columns_and_one_that_is_claimed_as_what_is_next(pool: Pool) -> None:
    await make_tickets(pool)
    for number in (1, 2):
        async with pool.transaction() as tx:
            await tickets.open(tx, company="a", number=number)
        async with tickets.claim(pool, "claimed", ("a", number)) as claim:
            await work(claim)
    await approve(pool, "tickets:a/2")
    async with tickets.claim_next(pool, "claimed") as claim:
        await work(claim)
    rows = await sql(pool, "SELECT number, status FROM tickets ORDER BY number")
    assert [(row["number"], row["status"]) for row in rows] == [(1, "escalated"), (2, "resolved")]


async def test_many_are_decided_alike(pool: Pool) -> None:
    await opened(pool, sessions, 1, 2)
    for key in (1, 2):
        await run(pool, key=key)
    async with pool.transaction() as tx:
        names = ["patch_sessions:1", "patch_sessions:2"]
        told = {"decided_by": "Ann", "reason": "all of them"}
        assert await retry_each(tx, CONSUMER, names, **told, value={"approved": True}) == (names, {})
    assert [await run(pool, key=key) for key in (1, 2)] == ["drafted", "drafted"]


async def test_a_fresh_row_is_not_looked_up(pool: Pool) -> None:
    """Its claim tells that nothing ever went wrong, so there is nothing to read."""
    await opened(pool, sessions, 1)
    row = await row_of(pool, 1)
    await sql(
        pool,
        "INSERT INTO decisions (table_name, key, visit, decision, decided_by, reason)"
        " VALUES ('patch_sessions', '1', %(visit)s, 'retry', 'a', 'b')",
        visit=row["visit"],
    )
    assert await seen(pool) is None


async def test_a_dead_delivery_s_handler_is_told_too(pool: Pool) -> None:
    source = GitHub()
    told: list[Decision | None] = []

    @source.on("push")
    async def take(event: Event, tx: Transaction) -> None:
        told.append(event.decision)
        if event.decision is None:
            raise Escalate("a push to a protected branch")

    consumer = Consumer(gates=[], sources=[source])
    [delivery] = await arrived(pool, arrival(b"{}", source="github"))

    async def once() -> None:
        claim = await inbox.take(pool, "applying", delivery)
        assert claim is not None
        async with claim.held():
            await apply(consumer, claim)

    await once()
    async with pool.transaction() as tx:
        await retry(tx, consumer, str(delivery), decided_by="Ann", reason="meant so", value=7)
    await once()
    assert told[0] is None
    assert told[1] is not None
    assert (told[1].decided_by, told[1].value) == ("Ann", 7)
    [row] = await sql(pool, "SELECT status FROM deliveries")
    assert row["status"] == "processed"


async def test_why_tells_the_value(pool: Pool) -> None:
    await opened(pool, sessions, 1)
    await run(pool)
    await approve(pool)
    async with pool.transaction() as tx:
        found = await why(tx, CONSUMER, "patch_sessions:1", Settings())
    [line] = [moment.told for moment in found.timeline if moment.what == "decision"]
    assert line == 'Ann decided: retry, with {"approved": true} (looks right)'


async def test_a_value_is_taken_over_the_api(pool: Pool) -> None:
    await opened(pool, sessions, 1, 2)
    for key in (1, 2):
        await run(pool, key=key)
    async with control(pool) as client:
        for key, value in ((1, {"approved": True}), (2, None)):
            body = {"row": f"patch_sessions:{key}", "reason": "looked", "by": "Ann", "value": value}
            assert (await client.post("/api/retry", json=body)).status_code == 200
    assert [await run(pool, key=key) for key in (1, 2)] == ["drafted", "escalated"]


def command(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def test_a_value_is_taken_by_the_command(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)

    async def escalate() -> None:
        async with Pool.open(database_url, settings=Settings()) as pool:
            await opened(pool, sessions, 1, 2)
            for key in (1, 2):
                await run(pool, key=key)

    async def values() -> list[Any]:
        async with Pool.open(database_url, settings=Settings()) as pool:
            return [said and said.value for said in [await seen(pool, key=key) for key in (1, 2)]]

    asyncio.run(escalate())
    done = command("retry", "patch_sessions:1", "--reason", "fine", "--value", '{"approved": true}')
    assert (done.exit_code, done.output) == (0, "patch_sessions:1 waits in clarified\n")
    assert command("retry", "--all", "--reason", "fine", "--value", "[1]", "--yes").exit_code == 0
    assert asyncio.run(values()) == [{"approved": True}, [1]]
    for wrong in ("yes", "NaN", "{", "", "nul"):
        refused = command("retry", "patch_sessions:1", "--reason", "x", "--value", wrong)
        assert refused.exit_code == 2
        assert "is not JSON" in refused.output


# Moving by hand


async def resolved(pool: Pool, to: str, name: str = "patch_sessions:1", *, force: bool = False) -> None:
    async with pool.transaction() as tx:
        await resolve(tx, CONSUMER, name, to=to, decided_by="Ann", reason="by hand", force=force)


@pytest.mark.parametrize("to", ["drafted", "received", "closed"])
async def test_a_row_is_moved_to_what_the_gate_or_a_check_of_the_table_names(pool: Pool, to: str) -> None:
    await opened(pool, sessions, 1)
    await run(pool)
    await resolved(pool, to)
    assert await status_of(pool, 1) == to


async def ticket(pool: Pool) -> None:
    await make_tickets(pool)
    async with pool.transaction() as tx:
        await tickets.open(tx, company="a", number=1)
    async with tickets.claim(pool, "claimed", ("a", 1)) as claim:
        await work(claim)


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("resolvd", "tickets knows no status 'resolvd'; did you mean resolved? There are: resolved, open; to mean it"),
        ("closed", "tickets knows no status 'closed'"),
        ("", "tickets knows no status ''"),
        ("claimed", "claimed is a claimed status"),
        ("escalated", "not to stay escalated"),
        ("open", "webhooks retry tickets:a/1"),
    ],
)
async def test_any_other_status_is_refused_with_what_there_is(pool: Pool, to: str, said: str) -> None:
    await ticket(pool)
    with pytest.raises(ConfigurationError) as refusal:
        await resolved(pool, to, "tickets:a/1")
    assert said.replace("'; did", "': did") in str(refusal.value)
    [row] = await sql(pool, "SELECT status FROM tickets")
    assert row["status"] == "escalated"


@pytest.mark.parametrize(
    ("condition", "named"),
    [
        ("status IN ('open', 'claimed', 'resolved', 'escalated', 'closed')", True),
        ("status <> ''", False),  # it takes just any
        ("status <> 'closed'", False),
        ("status <> 'closed' OR number > 0", False),  # it reads more than the status
    ],
)
async def test_what_a_check_of_the_table_says_of_a_status(pool: Pool, condition: str, named: bool) -> None:
    await ticket(pool)
    await sql(pool, f"ALTER TABLE tickets ADD CHECK ({condition})")
    if named:
        await resolved(pool, "closed", "tickets:a/1")
    else:
        with pytest.raises(ConfigurationError, match="knows no status 'closed'"):
            await resolved(pool, "closed", "tickets:a/1")


async def test_force_takes_what_nobody_names_but_no_claimed_status_and_nothing_that_the_table_refuses(
    pool: Pool,
) -> None:
    await ticket(pool)
    await sql(pool, "ALTER TABLE tickets ADD CHECK (status <> 'gone')")
    with pytest.raises(ConfigurationError, match="takes no status 'gone'"):
        await resolved(pool, "gone", "tickets:a/1", force=True)
    with pytest.raises(ConfigurationError, match="claimed is a claimed status"):
        await resolved(pool, "claimed", "tickets:a/1", force=True)
    await resolved(pool, "closed", "tickets:a/1", force=True)
    [row] = await sql(pool, "SELECT status FROM tickets")
    assert row["status"] == "closed"


async def test_the_api_and_the_command_say_how_to_mean_it_all_the_same(
    pool: Pool, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await opened(pool, sessions, 1, 2)
    for key in (1, 2):
        await run(pool, key=key)
    await sql(pool, "ALTER TABLE patch_sessions DROP CONSTRAINT patch_sessions_status")
    body: dict[str, Any] = {"row": "patch_sessions:1", "to": "parked", "reason": "x"}
    async with control(pool) as client:
        refused = await client.post("/api/resolve", json=body)
        assert (refused.status_code, '"force": true' in refused.json()["error"]) == (400, True)
        assert (await client.post("/api/resolve", json={**body, "force": True})).status_code == 200
    monkeypatch.setenv("DATABASE_URL", database_url)
    options = ("resolve", "patch_sessions:2", "--to", "parked", "--reason", "x")
    refused_too = await asyncio.to_thread(command, *options)
    assert refused_too.exit_code != 0
    assert "--force" in str(refused_too.exception)
    assert (await asyncio.to_thread(command, *options, "--force")).output == "patch_sessions:2 is parked\n"
    assert json.loads((await asyncio.to_thread(command, "escalations", "--json")).output) == []
