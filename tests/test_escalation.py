"""Escalated rows: once however they get there, with what a person needs, and the person's decisions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import psycopg
import pytest
from click.testing import CliRunner, Result
from consumers import arrival, arrived, quick
from gates import a_gate, due, expire, opened, outcomes_of, row_of, sql, status_of

from webhooks import Consumer, Escalate, GitHub, NotDone, Pool
from webhooks.apply import apply
from webhooks.cli.main import cli
from webhooks.control import Control
from webhooks.control.ask import Asker
from webhooks.control.health import Process
from webhooks.decision import NotEscalated, Told, resolve, retry, retry_each, told
from webhooks.errors import ConfigurationError
from webhooks.escalation import Escalated, as_json, escalated, matching
from webhooks.inbox import inbox
from webhooks.settings import Settings

GATE = a_gate()
CONSUMER = Consumer(gates=[GATE], sources=[GitHub()])


async def packets(pool: Pool, **options: Any) -> list[Escalated]:
    async with pool.transaction() as tx:
        return await escalated(tx, CONSUMER, **options)


async def retried(pool: Pool, name: str, **options: Any) -> str:
    async with pool.transaction() as tx:
        return await retry(tx, CONSUMER, name, decided_by="Ann", reason="looked at it", **options)


async def resolved(pool: Pool, name: str, to: str) -> None:
    async with pool.transaction() as tx:
        await resolve(tx, CONSUMER, name, to=to, decided_by="Ann", reason="by hand")


async def decisions(pool: Pool) -> list[tuple[str, str, str, str]]:
    rows = await sql(pool, "SELECT * FROM decisions ORDER BY id")
    return [(f"{row['table_name']}:{row['key']}", row["decision"], row["decided_by"], row["reason"]) for row in rows]


async def escalate(pool: Pool, key: int = 1, reason: str = "look at it") -> None:
    await opened(pool, GATE, key)
    async with GATE.claim(pool, "drafting", key) as claim:
        assert claim is not None
        raise Escalate(reason)


async def ambiguous(pool: Pool, key: int = 1) -> None:
    """A call whose answer nobody knows, and which may not be repeated."""
    await opened(pool, GATE, key)

    async def breaks() -> dict[str, int]:
        raise OSError("connection reset")

    for _ in range(2):
        with suppress(OSError):
            async with GATE.claim(pool, "drafting", key) as claim:
                assert claim is not None
                await claim.once("charge", breaks)
        await sql(pool, "UPDATE effects SET call_until = now() - interval '1 s'")
        await due(pool, key)
    assert await status_of(pool, key) == "escalated"


async def dead(pool: Pool) -> int:
    [delivery] = await arrived(pool, arrival(b"not json", source="github"))
    claim = await inbox.take(pool, "applying", delivery)
    assert claim is not None
    async with claim.held():
        await apply(CONSUMER, claim)
    return delivery


# ---- once, whichever path finds it


async def by_a_release(pool: Pool) -> None:
    for _ in range(3):
        await due(pool, 1)
        with suppress(ValueError):
            async with GATE.claim(pool, "drafting", 1) as claim:
                if claim is not None:
                    raise ValueError("no luck")


async def by_asking_for_it(pool: Pool) -> None:
    async with GATE.claim(pool, "drafting", 1) as claim:
        if claim is not None:
            raise Escalate("look at it")


async def by_an_expiry(pool: Pool) -> None:
    await sql(pool, "UPDATE patch_sessions SET max_attempts = 1 WHERE status = 'clarified'")
    await GATE.take(pool, "drafting", 1)
    await expire(pool, 1)


async def by_a_lowered_limit(pool: Pool) -> None:
    with suppress(ValueError):
        async with GATE.claim(pool, "drafting", 1) as claim:
            if claim is not None:
                raise ValueError("no luck")
    await sql(pool, "UPDATE patch_sessions SET max_attempts = 1 WHERE status = 'clarified'")


@pytest.mark.invariant(7)
@pytest.mark.parametrize("path", [by_a_release, by_asking_for_it, by_an_expiry, by_a_lowered_limit])
async def test_a_row_escalates_exactly_once_is_told_of_once_and_runs_no_more(
    database_url: str, path: Callable[[Pool], Awaitable[None]]
) -> None:
    telling = Settings(notify_url="https://example.com/", notify_secret="whsec_c2VjcmV0")
    async with Pool.open(database_url, settings=telling) as pool:
        await opened(pool, GATE, 1)
        await path(pool)
        await asyncio.gather(*(GATE.sweep(pool, "drafting") for _ in range(8)))
        assert await status_of(pool, 1) == "escalated"
        attempts = len(await outcomes_of(pool, 1))
        for _ in range(2):  # whatever comes later finds nothing to do
            await due(pool, 1)
            await path(pool)
            await GATE.sweep(pool, "drafting")
        assert len(await outcomes_of(pool, 1)) == attempts
        assert [packet.row for packet in await packets(pool)] == ["patch_sessions:1"]
        # Written by the statement that escalates, so there is one for each time that happened.
        [line] = await sql(pool, "SELECT * FROM notifications")
        row = await row_of(pool, 1)
    assert (line["table_name"], line["key"], line["phase"], line["status"]) == (
        "patch_sessions",
        "1",
        "drafting",
        "pending",
    )
    assert (line["reason"], line["attempts_made"]) == (row["last_error"], row["attempt_count"])


# ---- what a person needs


async def test_a_packet_holds_attempts_with_their_errors_effects_and_the_last_error(pool: Pool) -> None:
    await opened(pool, GATE, 1)

    async def seven() -> int:
        return 7

    async def busy() -> int:
        raise NotDone("busy")

    for name, fn in (("seven", seven), ("busy", busy), ("busy", busy)):
        await due(pool, 1)
        with suppress(ValueError, NotDone):
            async with GATE.claim(pool, "drafting", 1) as claim:
                assert claim is not None
                await claim.once(name, fn)
                raise ValueError(f"no luck after {name}")
    [packet] = await packets(pool)
    assert (packet.row, packet.phase, packet.attempt_count, packet.max_attempts) == (
        "patch_sessions:1",
        "drafting",
        3,
        3,
    )
    assert packet.last_error == "NotDone: busy"
    assert [(attempt["attempt"], attempt["outcome"], attempt["error"]) for attempt in packet.attempts] == [
        (1, "error", "ValueError: no luck after seven"),
        (2, "error", "NotDone: busy"),
        (3, "error", "NotDone: busy"),
    ]
    assert packet.since == packet.attempts[-1]["ended_at"]
    assert [(effect["name"], effect["state"], effect["result"]) for effect in packet.effects] == [
        ("seven", "done", "7"),
        ("busy", "failed", None),
    ]
    [plain] = json.loads(json.dumps(as_json([packet])))
    assert plain["attempts"][0]["error"] == "ValueError: no luck after seven"


async def test_dead_deliveries_are_listed_and_a_table_can_be_chosen(pool: Pool) -> None:
    delivery = await dead(pool)
    await escalate(pool)
    assert [packet.row for packet in await packets(pool)] == [f"deliveries:{delivery}", "patch_sessions:1"]
    [packet] = await packets(pool, of="deliveries")
    assert packet.phase == "applying"
    assert "not JSON" in (packet.last_error or "")
    with pytest.raises(ConfigurationError, match="deliveries, notifications, patch_sessions"):
        await packets(pool, of="issues")


async def test_only_the_visit_that_escalated_is_in_the_packet(pool: Pool) -> None:
    await escalate(pool)
    await resolved(pool, "patch_sessions:1", "received")
    async with GATE.claim(pool, "clarifying", 1) as claim:
        assert claim is not None
        raise Escalate("again")
    [packet] = await packets(pool)
    assert [attempt["error"] for attempt in packet.attempts] == ["again"]


async def test_a_list_is_cut_where_it_was_asked_to_be(pool: Pool) -> None:
    for key in (1, 2, 3):
        await escalate(pool, key)
    assert [packet.row for packet in await packets(pool, limit=2)] == ["patch_sessions:1", "patch_sessions:2"]


# ---- retry


async def test_a_retry_gives_new_attempts_and_writes_down_who_and_why(pool: Pool) -> None:
    await escalate(pool)
    assert await retried(pool, "patch_sessions:1") == "clarified"
    row = await row_of(pool, 1)
    assert (row["attempt_count"], row["max_attempts"], row["claimed_from"]) == (0, 3, None)
    assert await decisions(pool) == [("patch_sessions:1", "retry", "Ann", "looked at it")]


async def test_a_dead_delivery_is_retried_by_its_number(pool: Pool) -> None:
    delivery = await dead(pool)
    assert await retried(pool, str(delivery)) == "received"
    assert await inbox.take(pool, "applying", delivery) is not None


async def test_what_is_not_escalated_is_left_alone(pool: Pool) -> None:
    await opened(pool, GATE, 1)
    for name, said in (
        ("patch_sessions:1", "is not escalated but clarified"),
        ("patch_sessions:2", "there is no row patch_sessions:2"),
    ):
        with pytest.raises(NotEscalated, match=said):
            await retried(pool, name)
        with pytest.raises(NotEscalated, match=said):
            await resolved(pool, name, "drafted")
    assert await status_of(pool, 1) == "clarified"
    assert await decisions(pool) == []


async def test_a_row_that_was_moved_to_escalated_has_no_phase_to_go_back_to(pool: Pool) -> None:
    await opened(pool, GATE, 1)
    async with pool.transaction() as tx:
        await GATE.advance(tx, 1, "clarified", "escalated")
    with pytest.raises(NotEscalated, match="webhooks resolve patch_sessions:1"):
        await retried(pool, "patch_sessions:1")
    await sql(pool, "UPDATE patch_sessions SET claimed_from = 'drafted'")
    with pytest.raises(NotEscalated, match="where no phase waits any more"):
        await retried(pool, "patch_sessions:1")
    assert await status_of(pool, 1) == "escalated"
    assert [packet.phase for packet in await packets(pool)] == [None]


async def test_of_two_people_one_decides(pool: Pool) -> None:
    await escalate(pool)
    answers = await asyncio.gather(
        *(retried(pool, "patch_sessions:1") for _ in range(6)),
        *(resolved(pool, "patch_sessions:1", "closed") for _ in range(6)),
        return_exceptions=True,
    )
    refused = [answer for answer in answers if isinstance(answer, Exception)]
    assert len(refused) == 11
    assert {type(error) for error in refused} <= {NotEscalated, psycopg.errors.LockNotAvailable}
    assert len(await decisions(pool)) == 1


# ---- an effect that nobody knows about


@pytest.mark.invariant(9)
async def test_an_ambiguous_effect_escalates_again_unless_the_person_says_what_happened(pool: Pool) -> None:
    await ambiguous(pool)
    await retried(pool, "patch_sessions:1")
    await retry_once(pool)
    row = await row_of(pool, 1)
    assert row["status"] == "escalated"
    assert "ambiguous" in row["last_error"]


async def retry_once(pool: Pool, calls: list[int] | None = None) -> Any:
    """One more attempt; it says what `once` returned."""

    async def charge() -> dict[str, int]:
        assert calls is not None, "it was called again"
        calls.append(1)
        return {"id": 9}

    returned: Any = None
    async with GATE.claim(pool, "drafting", 1) as claim:
        assert claim is not None
        returned = await claim.once("charge", charge)
        await claim.complete(patch="diff")
    return returned


@pytest.mark.invariant(9)
async def test_an_effect_told_as_done_is_not_called_again_and_gives_the_result(pool: Pool) -> None:
    await ambiguous(pool)
    name, said = told('charge=done:{"id": 5}')
    await retried(pool, "patch_sessions:1", effects={name: said})
    assert await retry_once(pool) == {"id": 5}
    assert await decisions(pool) == [
        ("patch_sessions:1", "retry", "Ann", "looked at it"),
        ("patch_sessions:1", 'effect charge: done, {"id": 5}', "Ann", "looked at it"),
    ]
    [effect] = await sql(pool, "SELECT * FROM effects")
    assert (effect["calls"], effect["not_done"], effect["told_by"]) == (1, 0, "Ann")


@pytest.mark.invariant(9)
async def test_an_effect_told_as_not_done_is_called_by_the_next_attempt(pool: Pool) -> None:
    await ambiguous(pool)
    await retried(pool, "patch_sessions:1", effects=dict([told("charge=not-done")]))
    calls: list[int] = []
    assert await retry_once(pool, calls) == {"id": 9}
    assert calls == [1]
    [effect] = await sql(pool, "SELECT * FROM effects")
    assert (effect["state"], effect["calls"], effect["not_done"], effect["told_by"]) == ("done", 2, 1, None)


async def test_what_a_person_told_can_be_told_again(pool: Pool) -> None:
    """A result of the wrong shape would otherwise keep the row for ever."""
    await ambiguous(pool)
    await retried(pool, "patch_sessions:1", effects={"charge": Told('"no object"')})
    for _ in range(3):
        await due(pool, 1)
        with suppress(ValueError):
            await retry_once(pool)
    assert await status_of(pool, 1) == "escalated"
    await retried(pool, "patch_sessions:1", effects={"charge": Told(None)})
    calls: list[int] = []
    assert await retry_once(pool, calls) == {"id": 9}


async def test_only_an_effect_whose_answer_is_missing_can_be_told(pool: Pool) -> None:
    await opened(pool, GATE, 1)

    async def seven() -> int:
        return 7

    async with GATE.claim(pool, "drafting", 1) as claim:
        assert claim is not None
        await claim.once("seven", seven)
        raise Escalate("look at it")
    for name, said in (("seven", "it is done"), ("other", "there is none")):
        with pytest.raises(ConfigurationError, match=said):
            await retried(pool, "patch_sessions:1", effects={name: Told(None)})
    # All or nothing: the retry did not happen either.
    assert await status_of(pool, 1) == "escalated"
    assert await decisions(pool) == []


@pytest.mark.parametrize(
    "text", ["charge", "charge=done", "=done:1", "charge=done:{", "charge=done:NaN", "charge=failed"]
)
def test_what_is_no_word_about_an_effect_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not-done|is not JSON"):
        told(text)


# ---- all at once


async def test_rows_are_chosen_by_the_values_of_their_columns(pool: Pool) -> None:
    for key in (1, 2, 3):
        await escalate(pool, key, reason="no token" if key < 3 else "other")
    delivery = await dead(pool)
    await opened(pool, GATE, 4)
    async with pool.transaction() as tx:
        assert await matching(tx, CONSUMER, {}, of=None) == [
            f"deliveries:{delivery}",
            *(f"patch_sessions:{key}" for key in (1, 2, 3)),
        ]
        where = {"last_error": "no token", "claimed_from": "clarified", "sc_id": "2"}
        assert await matching(tx, CONSUMER, where, of="patch_sessions") == ["patch_sessions:2"]
        injected = {"title": "x' OR true --"}
        assert await matching(tx, CONSUMER, injected, of="patch_sessions") == []
        with pytest.raises(ConfigurationError, match="deliveries has no column 'sc_id'"):
            await matching(tx, CONSUMER, {"sc_id": "2"}, of=None)
        with pytest.raises(ConfigurationError, match="has no column"):
            await matching(tx, CONSUMER, {"sc_id = 1 OR true; --": "2"}, of="patch_sessions")
    with pytest.raises(psycopg.DataError):
        async with pool.transaction() as tx:
            await matching(tx, CONSUMER, {"sc_id": "two"}, of="patch_sessions")


async def test_rows_that_are_no_longer_escalated_are_passed_over(pool: Pool) -> None:
    for key in (1, 2):
        await escalate(pool, key)
    await resolved(pool, "patch_sessions:1", "closed")
    async with pool.transaction() as tx:
        names = ["patch_sessions:1", "patch_sessions:2"]
        retried = await retry_each(tx, CONSUMER, names, decided_by="Ann", reason="again")
        assert retried == (["patch_sessions:2"], {})
    assert await status_of(pool, 2) == "clarified"


# ---- resolve


async def test_a_row_is_closed_by_hand(pool: Pool) -> None:
    await escalate(pool)
    await resolved(pool, "patch_sessions:1", "closed")
    row = await row_of(pool, 1)
    assert (row["status"], row["claimed_from"], row["last_error"]) == ("closed", None, None)
    assert await decisions(pool) == [("patch_sessions:1", "resolve as closed", "Ann", "by hand")]


async def test_a_row_may_be_resolved_into_the_next_phase_with_a_visit_of_its_own(pool: Pool) -> None:
    await opened(pool, GATE, 1, to="received")
    async with GATE.claim(pool, "clarifying", 1) as claim:
        assert claim is not None
        raise Escalate("look at it")
    before = (await row_of(pool, 1))["visit"]
    await resolved(pool, "patch_sessions:1", "clarified")
    row = await row_of(pool, 1)
    assert (row["attempt_count"], row["max_attempts"]) == (0, 3)
    assert row["visit"] != before


async def test_where_a_row_cannot_be_resolved_to_is_said(pool: Pool) -> None:
    await escalate(pool)
    for to, said in (
        ("drafting", "only a claim moves a row there"),
        ("nowhere", "patch_sessions knows no status 'nowhere'"),
        ("escalated", "not to stay escalated"),
        ("clarified", "webhooks retry patch_sessions:1"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            await resolved(pool, "patch_sessions:1", to)
    assert await status_of(pool, 1) == "escalated"


async def test_a_dead_delivery_is_resolved_with_the_reason_in_the_list(pool: Pool) -> None:
    delivery = await dead(pool)
    await resolved(pool, f"deliveries:{delivery}", "ignored")
    [row] = await sql(pool, "SELECT status, reason FROM deliveries")
    assert (row["status"], row["reason"]) == ("ignored", "Ann: by hand")


# ---- the commands


def command(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def test_the_commands_apply_a_parked_delivery_now_or_drop_it(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    with psycopg.connect(database_url, autocommit=True) as connection:
        row = connection.execute(
            "INSERT INTO deliveries (source, dedup_key, body, status, not_before, parked_on, parked_since)"
            " VALUES ('github', 'one', '', 'received', now() + interval '1 minute', 'patch_sessions:1', now())"
            " RETURNING id"
        ).fetchone()
        assert row is not None
        number = str(row[0])
        assert f"webhooks retry deliveries:{number} --reason" in command("why", number).output
        assert command("retry", number, "--reason", "now").output == f"{number} waits in received\n"
        due = "SELECT not_before <= now(), parked_on FROM deliveries"
        assert connection.execute(due).fetchone() == (True, "patch_sessions:1")
        done = command("resolve", number, "--to", "ignored", "--reason", "it never comes")
        assert done.output == f"{number} is ignored\n"
        ended = "SELECT status, parked_on FROM deliveries"
        assert connection.execute(ended).fetchone() == ("ignored", None)
        assert command("retry", number, "--reason", "now").exit_code == 1


def test_the_commands_list_retry_and_resolve(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("LOGNAME", "ann")

    async def during(work: Callable[[Pool], Awaitable[Any]]) -> Any:
        async with Pool.open(database_url, settings=Settings()) as pool:
            return await work(pool)

    assert command("escalations").output == "nothing waits for a person\n"

    async def three(pool: Pool) -> None:
        await ambiguous(pool, 1)
        for key in (2, 3):
            await escalate(pool, key, reason="a\x1b[2J")

    asyncio.run(during(three))
    listed = command("escalations")
    assert "patch_sessions:1  drafting, 2 of 3 attempts, since " in listed.output
    assert "effect charge: nobody knows whether it happened" in listed.output
    assert "last error: a\\x1b[2J" in listed.output
    assert [row["row"] for row in json.loads(command("escalations", "--json").output)] == [
        f"patch_sessions:{key}" for key in (1, 2, 3)
    ]
    once = command("retry", "patch_sessions:1", "--reason", "looked", "--effect", 'charge=done:{"id": 5}')
    assert (once.exit_code, once.output) == (0, "patch_sessions:1 waits in clarified\n")
    dry = command("retry", "--all", "--table", "patch_sessions", "--where", "sc_id=3")
    assert dry.output == "patch_sessions:3\n1 rows would be tried again; do it with --yes\n"
    done = command("retry", "--all", "--where", "claimed_from=clarified", "--reason", "again", "--yes", "--by", "Bob")
    assert (done.exit_code, done.output) == (0, "2 rows are tried again\n")
    assert command("retry", "--all").output == "0 rows would be tried again\n"
    assert [row[2] for row in asyncio.run(during(decisions))] == ["ann", "ann", "Bob", "Bob"]
    asyncio.run(during(lambda pool: escalate(pool, 4)))
    end = command("resolve", "patch_sessions:4", "--to", "closed", "--reason", "by hand")
    assert (end.exit_code, end.output) == (0, "patch_sessions:4 is closed\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["retry"], "name one row, or use --all"),
        (["retry", "a:1", "--all"], "name one row, or use --all"),
        (["retry", "a:1"], "say why"),
        (["retry", "--all", "--yes"], "say why"),
        (["retry", "a:1", "--reason", "x", "--yes"], "go with --all"),
        (["retry", "a:1", "--reason", "x", "--where", "a=b"], "go with --all"),
        (["retry", "--all", "--effect", "a=not-done"], "--effect goes with one row"),
        (["retry", "--all", "--where", "a"], "write COLUMN=VALUE"),
        (["retry", "--all", "--where", "a=1", "--where", "a=2"], "each column once"),
        (["retry", "a:1", "--reason", "x", "--effect", "a=maybe"], "write NAME=not-done"),
        (["resolve", "a:1", "--to", "b"], "--reason"),
    ],
)
def test_a_command_that_makes_no_sense_says_why(arguments: list[str], said: str) -> None:
    result = command(*arguments)
    assert result.exit_code == 2
    assert said in result.output


# ---- the control plane


@asynccontextmanager
async def control(pool: Pool, **settings: Any) -> AsyncGenerator[httpx.AsyncClient]:
    asker = Asker(pool)
    app = Control(Process(asker, quick(**settings), None, None), CONSUMER).app()
    try:
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 40_000))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:3100") as client:
            yield client
    finally:
        await asker.close()


async def test_the_control_plane_tells_lists_and_takes_decisions(pool: Pool) -> None:
    await ambiguous(pool, 1)
    await escalate(pool, 2)
    async with control(pool) as client:
        listed = (await client.get("/api/escalations")).json()["escalations"]
        assert [packet["row"] for packet in listed] == ["patch_sessions:1", "patch_sessions:2"]
        assert (await client.get("/api/escalations?table=deliveries")).json() == {"escalations": []}
        told = (await client.get("/api/why/patch_sessions/1")).json()
        assert (told["claim"]["reason"], told["row"]) == ("escalated", "patch_sessions:1")
        answer = await client.post(
            "/api/retry",
            json={
                "row": "patch_sessions:1",
                "reason": "looked",
                "by": "Ann",
                "effects": {"charge": {"done": {"id": 5}}},
            },
        )
        assert (answer.status_code, answer.json()) == (200, {"row": "patch_sessions:1", "status": "clarified"})
        again = await client.post("/api/retry", json={"row": "patch_sessions:1", "reason": "looked"})
        assert again.status_code == 409
        assert "not escalated but clarified" in again.json()["error"]
        closed = await client.post(
            "/api/resolve", json={"row": "patch_sessions:2", "to": "closed", "reason": "by hand", "by": "Ann"}
        )
        assert closed.json() == {"row": "patch_sessions:2", "status": "closed"}
    assert await retry_once(pool) == {"id": 5}
    assert [row[:3] for row in await decisions(pool)] == [
        ("patch_sessions:1", "retry", "Ann"),
        ("patch_sessions:1", 'effect charge: done, {"id": 5}', "Ann"),
        ("patch_sessions:2", "resolve as closed", "Ann"),
    ]


REFUSED = (
    ("/api/retry", b"", 400, "the body"),
    ("/api/retry", b"{}", 400, "row: "),
    ("/api/retry", b'{"row": "patch_sessions:1", "reason": ""}', 400, "reason: "),
    ("/api/retry", b'{"row": "patch_sessions:1", "reason": "x", "yes": 1}', 400, "yes: "),
    ("/api/retry", b'{"row": "x:1", "reason": "x"}', 400, "no gate over a table 'x'"),
    ("/api/retry", b'{"row": "patch_sessions:1", "reason": "x", "effects": {"a": "maybe"}}', 400, "effects.a"),
    ("/api/retry", b'{"row": "patch_sessions:9", "reason": "x"}', 409, "there is no row patch_sessions:9"),
    ("/api/resolve", b'{"row": "patch_sessions:1", "to": "nowhere", "reason": "x"}', 400, "no status 'nowhere'"),
    ("/api/retry", b" " * 1_048_577, 413, "more than"),
)


async def test_a_decision_that_cannot_be_read_is_refused_by_name(pool: Pool) -> None:
    await escalate(pool)
    async with control(pool) as client:
        for path, body, status, said in REFUSED:
            answer = await client.post(path, content=body)
            assert answer.status_code == status, body
            assert said in answer.json()["error"]
    assert await decisions(pool) == []


async def test_what_is_not_there_is_answered_404_and_a_wrong_query_400(pool: Pool) -> None:
    async with control(pool) as client:
        for path, status in (
            ("/api/why/patch_sessions/1", 404),
            ("/api/why/x/1", 404),
            ("/api/escalations?table=x", 404),
            ("/api/escalations?limit=0", 400),
            ("/api/escalations?since=1h", 400),
        ):
            assert (await client.get(path)).status_code == status


async def test_a_decision_is_behind_the_same_checks(pool: Pool) -> None:
    await escalate(pool)
    body = {"row": "patch_sessions:1", "reason": "looked"}
    async with control(pool, control_token="t") as client:
        assert (await client.post("/api/retry", json=body)).status_code == 401
    async with control(pool) as client:
        elsewhere = {"origin": "https://evil.example"}
        assert (await client.post("/api/retry", json=body, headers=elsewhere)).status_code == 403
        assert (await client.get("/api/retry")).status_code == 405
    assert await status_of(pool, 1) == "escalated"


async def test_a_claim_of_an_escalated_row_is_refused(pool: Pool) -> None:
    await escalate(pool)
    assert await GATE.take(pool, "drafting", 1) is None
    assert await GATE.take_next(pool, "drafting", 5) == []
