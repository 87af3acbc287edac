"""Heartbeats: agents work their queues, overlapping runs never meet on an issue, and what a run counts is what was."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import pytest
from consumers import quick
from gates import until
from heartbeats import (
    agents_served,
    at,
    due,
    enter,
    heartbeats_process,
    issue_of,
    open_issue,
    open_many,
    outcomes_of,
    run,
    sql,
    statuses,
)
from psycopg import AsyncConnection, AsyncCursor

from handlers.abreast import Abreast
from handlers.heartbeat import Unknown, Unusable, begin
from handlers.heartbeat_run import Wanted
from handlers.issues import issues
from handlers.resolving import may_be_deadly
from handlers.standin.agent import AgentStandin
from webhooks import Pool

CLAIMED_TWICE = (
    "SELECT issue_id, COUNT(*) AS claim_count FROM heartbeat_run_items WHERE run_id = %(run)s"
    " GROUP BY issue_id HAVING COUNT(*) > 1"
)
RETRIED = "SELECT id, title, attempt_count FROM issues WHERE attempt_count > 1 AND company_id = 'acme'"
SPREAD = "SELECT attempt_count, COUNT(*) FROM issues WHERE company_id = 'acme' GROUP BY attempt_count"


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    async with Pool.open(database_url, settings=quick()) as pool:
        yield pool


@pytest.fixture
async def agents() -> AsyncIterator[tuple[AgentStandin, str]]:
    async with agents_served() as served:
        yield served


# One run


async def test_each_agent_works_its_own_queue_until_it_is_empty(pool: Pool, agents: tuple[AgentStandin, str]) -> None:
    standin, url = agents
    await enter(pool, {"coder": at(url), "writer": at(url, "writer")})
    mine = [await open_issue(pool, "coder") for _ in range(3)]
    theirs = await open_issue(pool, "writer")
    others = [await open_issue(pool, None), await open_issue(pool, "stranger"), await open_issue(pool, company="else")]
    counts = await run(pool)
    assert counts == {"claimed": 4, "resolved": 4, "failed": 0, "escalated": 0}
    assert {call.issue: call.agent for call in standin.calls} == dict.fromkeys(mine, "coder") | {theirs: "writer"}
    assert [(await issue_of(pool, id))["status"] for id in others] == ["open"] * 3
    resolved = await issue_of(pool, theirs)
    assert (resolved["status"], resolved["attempt_count"]) == ("resolved", 1)
    assert resolved["result"] == '{"summary": "writer looked into “mend it” and mended it."}'


async def test_a_run_records_when_it_was_and_what_it_did(pool: Pool, agents: tuple[AgentStandin, str]) -> None:
    _, url = agents
    await enter(pool, {"coder": at(url)})
    id = await open_issue(pool)
    await run(pool, "coder", 7)
    [row] = await sql(pool, "SELECT * FROM heartbeat_runs")
    assert (row["company_id"], row["agent_id"], row["claim_limit"], row["note"]) == ("acme", "coder", 7, None)
    assert (row["claimed"], row["resolved"], row["failed"], row["escalated"]) == (1, 1, 0, 0)
    assert row["started_at"] < row["ended_at"]
    [item] = await sql(pool, "SELECT * FROM heartbeat_run_items")
    assert (item["run_id"], item["issue_id"], item["outcome"]) == (row["id"], id, "done")


async def test_the_agents_work_side_by_side_and_each_in_sequence(pool: Pool, agents: tuple[AgentStandin, str]) -> None:
    standin, url = agents
    slow = "seconds=0.05"
    await enter(pool, {"coder": at(url, "coder", slow), "pair": at(url, "pair", slow, concurrency=2)})
    for name in ("coder", "pair"):
        for _ in range(4):
            await open_issue(pool, name)
    await run(pool)
    assert len(standin.calls) == 8

    async def at_once(agent: str) -> int:
        """How many of an agent's claims overlapped in time, at most."""
        rows = await sql(
            pool,
            "SELECT max((SELECT count(*) FROM attempts AS b JOIN issues AS j ON j.id = b.key::bigint"
            " WHERE j.assigned_agent_id = %(agent)s AND b.claimed_at <= a.claimed_at AND b.ended_at > a.claimed_at))"
            " AS most FROM attempts AS a JOIN issues AS i ON i.id = a.key::bigint"
            " WHERE i.assigned_agent_id = %(agent)s",
            agent=agent,
        )
        return int(rows[0]["most"])

    assert await at_once("coder") == 1
    assert await at_once("pair") == 2
    [beside] = await sql(
        pool,
        "SELECT count(*) AS count FROM attempts AS a JOIN issues AS i ON i.id = a.key::bigint"
        " JOIN attempts AS b ON b.claimed_at < a.ended_at AND a.claimed_at < b.ended_at"
        " JOIN issues AS j ON j.id = b.key::bigint"
        " WHERE i.assigned_agent_id = 'coder' AND j.assigned_agent_id = 'pair'",
    )
    assert beside["count"] > 0


@pytest.mark.parametrize("limit", [1, 3])
async def test_a_limit_counts_claims_and_an_empty_queue_takes_nothing_of_it(
    limit: int, pool: Pool, agents: tuple[AgentStandin, str]
) -> None:
    standin, url = agents
    await enter(pool, {"a-idle": at(url, "idle"), "coder": at(url), "z-idle": at(url, "idle")})
    for _ in range(5):
        await open_issue(pool)
    assert (await run(pool, limit=limit))["claimed"] == limit
    assert len(standin.calls) == limit
    assert await statuses(pool) == {"resolved": limit, "open": 5 - limit}


async def test_a_paused_agent_is_skipped(pool: Pool, agents: tuple[AgentStandin, str]) -> None:
    standin, url = agents
    await enter(pool, {"coder": at(url), "writer": at(url, "writer")})
    await sql(pool, "UPDATE agents SET paused = true WHERE id = 'coder'")
    await open_issue(pool, "coder")
    await open_issue(pool, "writer")
    assert (await run(pool))["claimed"] == 1
    assert [call.agent for call in standin.calls] == ["writer"]
    paused = await begin(pool, Wanted("acme", "coder"))
    assert paused.problems == ("agent coder is paused",)
    assert (await paused.work()).claimed == 0


async def test_an_agent_with_wrong_settings_is_named_and_its_issues_stay_while_the_others_go_on(
    pool: Pool, agents: tuple[AgentStandin, str]
) -> None:
    _, url = agents
    await enter(pool, {"coder": {"type": "http", "url": "no address"}, "writer": at(url, "writer")})
    id = await open_issue(pool, "coder")
    await open_issue(pool, "writer")
    beat = await begin(pool, Wanted("acme"))
    assert len(beat.problems) == 1
    assert beat.problems[0].startswith("agent coder: its adapter cannot be read: url: ")
    assert (await beat.work()).counts() == {"claimed": 1, "resolved": 1, "failed": 0, "escalated": 0}
    assert (await issue_of(pool, id))["attempt_count"] == 0
    [row] = await sql(pool, "SELECT note FROM heartbeat_runs")
    assert row["note"] == beat.problems[0]
    with pytest.raises(Unusable, match="agent coder"):
        await begin(pool, Wanted("acme", "coder"))


async def test_an_unknown_company_or_agent_is_said_to_be_unknown(pool: Pool) -> None:
    with pytest.raises(Unknown, match="there is no company 'acme'"):
        await begin(pool, Wanted("acme"))
    await enter(pool)
    with pytest.raises(Unknown, match="company 'acme' has no agent 'nobody'"):
        await begin(pool, Wanted("acme", "nobody"))
    assert await sql(pool, "SELECT * FROM heartbeat_runs") == []


# What a run gives back


async def test_a_run_never_claims_one_issue_twice_and_a_later_run_tries_again(
    pool: Pool, agents: tuple[AgentStandin, str]
) -> None:
    standin, url = agents
    await enter(pool, {"coder": at(url, query="failing=100&seconds=0", concurrency=3)})
    for _ in range(10):
        await open_issue(pool)
    # The back-off of an instant: what is given back is due again long before the run ends.
    await sql(
        pool,
        "CREATE FUNCTION at_once() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN IF NEW.status = ''open'' THEN NEW.not_before = statement_timestamp(); END IF; RETURN NEW; END'",
    )
    await sql(pool, "CREATE TRIGGER at_once BEFORE UPDATE ON issues FOR EACH ROW EXECUTE FUNCTION at_once()")
    first = await begin(pool, Wanted("acme"))
    assert (await first.work()).counts() == {"claimed": 10, "resolved": 0, "failed": 10, "escalated": 0}
    assert await sql(pool, CLAIMED_TWICE, run=first.id) == []
    assert (await run(pool))["claimed"] == 10
    retried = await sql(pool, RETRIED)
    assert len(retried) == 10
    [spread] = await sql(pool, SPREAD)
    assert (spread["attempt_count"], spread["count"]) == (2, 10)
    assert len(standin.calls) == 20


async def test_what_was_opened_after_a_run_began_is_left_to_the_next(
    pool: Pool, agents: tuple[AgentStandin, str]
) -> None:
    _, url = agents
    await enter(pool, {"coder": at(url)})
    beat = await begin(pool, Wanted("acme"))
    await open_issue(pool)
    assert (await beat.work()).claimed == 0
    assert (await run(pool))["claimed"] == 1


async def test_an_issue_whose_attempts_are_used_up_is_counted_as_escalated_once(
    pool: Pool, agents: tuple[AgentStandin, str]
) -> None:
    standin, url = agents
    await enter(pool, {"coder": at(url, query="failing=100&seconds=0")})
    id = await open_issue(pool)
    await sql(pool, "UPDATE issues SET max_attempts = 2")
    assert (await run(pool)) == {"claimed": 1, "resolved": 0, "failed": 1, "escalated": 0}
    await due(pool)
    assert (await run(pool)) == {"claimed": 1, "resolved": 0, "failed": 0, "escalated": 1}
    assert (await run(pool))["claimed"] == 0
    row = await issue_of(pool, id)
    assert (row["status"], row["attempt_count"], row["claimed_from"]) == ("escalated", 2, "open")
    assert len(standin.calls) == 2


async def test_exhausted_issues_at_the_head_of_a_queue_keep_nobody_from_the_others_and_escalate(
    pool: Pool, agents: tuple[AgentStandin, str]
) -> None:
    standin, url = agents
    await enter(pool, {"coder": at(url)})
    exhausted = [await open_issue(pool, priority="critical") for _ in range(5)]
    eligible = [await open_issue(pool, priority="low") for _ in range(5)]
    await sql(pool, "UPDATE issues SET max_attempts = 0 WHERE priority = 'critical'")
    assert (await run(pool, limit=5))["resolved"] == 5
    assert sorted(call.issue for call in standin.calls) == eligible
    assert {(await issue_of(pool, id))["status"] for id in exhausted} == {"escalated"}


async def test_one_claim_takes_one_issue_though_the_planner_knows_of_one_row_only(pool: Pool) -> None:
    await enter(pool)
    await open_issue(pool)
    await sql(pool, "ANALYZE issues")
    for _ in range(29):
        await open_issue(pool)
    async with issues.claim_next(pool, "claimed", company_id="acme", assigned_agent_id="coder") as claim:
        assert claim is not None
        assert await statuses(pool) == {"claimed": 1, "open": 29}
        await claim.complete(result="{}")


async def test_a_run_begins_by_freeing_what_a_dead_one_left(pool: Pool, agents: tuple[AgentStandin, str]) -> None:
    _, url = agents
    await enter(pool, {"coder": at(url)})
    id = await open_issue(pool)
    await issues.take_next(pool, "claimed", 1, claimed_by="run:99")
    await sql(pool, "UPDATE issues SET lease_until = now() - interval '1 second'")
    assert (await run(pool))["claimed"] == 0
    assert await outcomes_of(pool, id) == ["expired"]
    await due(pool)
    assert (await run(pool))["resolved"] == 1


# Endings


async def test_a_run_that_is_cancelled_gives_its_work_back_uncharged_and_says_so(
    pool: Pool, agents: tuple[AgentStandin, str]
) -> None:
    standin, url = agents
    await enter(pool, {"coder": at(url, query="seconds=60"), "writer": at(url, "writer", "seconds=60")})
    ids = [await open_issue(pool, "coder"), await open_issue(pool, "writer")]
    working = asyncio.create_task((await begin(pool, Wanted("acme"))).work())
    await until(lambda: len(standin.calls) == 2)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    for id in ids:
        assert await outcomes_of(pool, id) == ["interrupted"]
        row = await issue_of(pool, id)
        assert (row["status"], row["attempt_count"]) == ("open", 0)
    [recorded] = await sql(pool, "SELECT * FROM heartbeat_runs")
    assert recorded["note"] == "interrupted: its process was stopped"
    assert (recorded["claimed"], recorded["failed"]) == (2, 2)
    assert recorded["ended_at"] is not None


async def test_an_interrupted_call_is_made_again_with_the_same_key(
    pool: Pool, agents: tuple[AgentStandin, str]
) -> None:
    standin, url = agents
    await enter(pool, {"coder": at(url, query="seconds=0.3")})
    id = await open_issue(pool)
    working = asyncio.create_task((await begin(pool, Wanted("acme"))).work())
    await until(lambda: standin.calls)
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    await due(pool)
    assert (await run(pool))["resolved"] == 1
    assert len(standin.calls) == 2
    assert list(standin.accepted.values()) == [1]
    assert await outcomes_of(pool, id) == ["interrupted", "done"]


async def test_a_claim_that_is_lost_is_not_completed_and_the_run_goes_on(
    pool: Pool, agents: tuple[AgentStandin, str]
) -> None:
    standin, url = agents
    await enter(pool, {"coder": at(url, query="seconds=0.2")})
    first = await open_issue(pool, priority="high")
    second = await open_issue(pool, priority="low")
    working = asyncio.create_task(run(pool))
    await until(lambda: standin.calls)
    async with pool.transaction() as tx:
        assert await issues.advance(tx, first, "claimed", "resolved", result='"by hand"')
    assert await working == {"claimed": 2, "resolved": 1, "failed": 1, "escalated": 0}
    assert (await issue_of(pool, first))["result"] == '"by hand"'
    assert await outcomes_of(pool, first) == ["lost"]
    assert await outcomes_of(pool, second) == ["done"]


@pytest.mark.parametrize(
    ("outcomes", "alone"),
    [
        (["expired", "expired"], True),
        # Put back uncharged because another ran alone, it is on its last chance still.
        (["expired", "expired", "snoozed"], True),
        (["expired", "expired", "interrupted", "snoozed"], True),
        (["expired", "error"], False),
        (["expired", "error", "snoozed"], False),
    ],
)
async def test_a_last_attempt_after_one_that_died_runs_alone_however_often_it_was_put_back_meanwhile(
    pool: Pool, outcomes: list[str], alone: bool
) -> None:
    await enter(pool, {"coder": {"type": "process", "command": ["true"]}})
    id = await open_issue(pool)
    await sql(pool, "UPDATE issues SET attempt_count = 2, max_attempts = 3")
    for number, outcome in enumerate(outcomes):
        await sql(
            pool,
            "INSERT INTO attempts (table_name, key, phase, visit, attempt, claimed_at, ended_at, outcome)"
            " VALUES ('issues', %(key)s, 'claimed', 1, 1, now() - interval '1 hour' + %(number)s * interval '1 minute',"
            " now(), %(outcome)s)",
            key=str(id),
            number=number,
            outcome=outcome,
        )
    async with issues.claim(pool, "claimed", id) as claim:
        assert claim is not None
        assert await may_be_deadly(pool, claim) is alone
        await claim.complete()


async def test_an_issue_that_kills_its_process_every_time_escalates_and_takes_no_other_with_it(
    database_url: str, pool: Pool, agents: tuple[AgentStandin, str]
) -> None:
    _, url = agents
    kill = [sys.executable, "-c", "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"]
    slow = "seconds=0.3"
    await enter(
        pool,
        {
            "deadly": {"type": "process", "command": kill},
            "coder": at(url, "coder", slow),
            "writer": at(url, "writer", slow),
        },
    )
    deadly = await open_issue(pool, "deadly")
    for name in ("coder", "writer"):
        for _ in range(3):
            await open_issue(pool, name)
    await sql(pool, "UPDATE issues SET max_attempts = 3")
    for _ in range(3):
        with heartbeats_process(database_url, lease_s=1, backoff_base_s=0.05, backoff_max_s=0.1) as process:
            await until(lambda process=process: process.poll() is not None, within_s=30)
            assert process.returncode == -signal.SIGKILL
    with heartbeats_process(database_url, lease_s=1, backoff_base_s=0.05, backoff_max_s=0.1):
        await until(lambda: _all(pool, {"escalated": 1, "resolved": 6}), within_s=30)
    # Where another one of last chance ran alone first, it was put back uncharged.
    assert [outcome for outcome in await outcomes_of(pool, deadly) if outcome != "snoozed"] == ["expired"] * 3
    row = await issue_of(pool, deadly)
    assert (row["status"], row["attempt_count"]) == ("escalated", 3)


async def _all(pool: Pool, wanted: dict[str, int]) -> bool:
    return await statuses(pool) == wanted


async def test_one_may_run_alone_once_the_others_have_ended_and_nobody_begins_meanwhile() -> None:
    abreast = Abreast()
    order: list[str] = []
    let_go, ask = asyncio.Event(), asyncio.Event()

    async def plain(name: str) -> None:
        async with abreast.seat():
            order.append(f"{name} begins")
            await let_go.wait()
        order.append(f"{name} has ended")

    async def deadly(name: str) -> None:
        async with abreast.seat() as alone:
            await ask.wait()
            order.append(f"{name} is alone" if await alone() else f"{name} is refused")

    beside, first, second = (asyncio.create_task(work) for work in (plain("a"), deadly("b"), deadly("c")))
    await asyncio.sleep(0)
    ask.set()
    await asyncio.wait({second})
    late = asyncio.create_task(plain("d"))
    await asyncio.sleep(0)
    let_go.set()
    await asyncio.gather(beside, first, late)
    assert order == ["a begins", "c is refused", "a has ended", "b is alone", "d begins", "d has ended"]


async def test_one_that_is_cancelled_while_it_waits_to_be_alone_leaves_the_way_open() -> None:
    abreast = Abreast()
    async with abreast.seat():
        async with abreast.seat() as alone:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await alone()
        async with asyncio.timeout(5), abreast.seat() as alone:
            pass


# The clock


@pytest.mark.parametrize("wrong_s", [-3600, 3600])
async def test_no_clock_but_the_database_s_decides_anything(
    wrong_s: int, pool: Pool, agents: tuple[AgentStandin, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clocks are an hour wrong, and every moment that is sent to the database is one that it had said before."""
    _, url = agents
    await enter(pool, {"coder": at(url)})
    await open_issue(pool)
    sent: set[datetime] = set()
    heard: set[datetime] = set()
    execute, fetchone, fetchall = AsyncConnection.execute, AsyncCursor.fetchone, AsyncCursor.fetchall

    async def sending(self: Any, query: Any, params: Any = None, **more: Any) -> Any:
        sent.update(value for value in (params or {}).values() if isinstance(value, datetime))
        return await execute(self, query, params, **more)

    async def hearing_one(self: Any) -> Any:
        row = await fetchone(self)
        heard.update(value for value in (row or {}).values() if isinstance(value, datetime))
        return row

    async def hearing_all(self: Any) -> Any:
        rows = await fetchall(self)
        heard.update(value for row in rows for value in row.values() if isinstance(value, datetime))
        return rows

    monkeypatch.setattr(AsyncConnection, "execute", sending)
    monkeypatch.setattr(AsyncCursor, "fetchone", hearing_one)
    monkeypatch.setattr(AsyncCursor, "fetchall", hearing_all)
    for name in ("time", "clock_gettime"):
        right = getattr(time, name)
        monkeypatch.setattr(time, name, lambda *of, right=right: right(*of) + wrong_s)
    beat = await begin(pool, Wanted("acme"))
    assert (await beat.work()).resolved == 1
    monkeypatch.undo()
    assert sent <= heard
    [recorded] = await sql(
        pool,
        "SELECT started_at, now() - claimed_at < interval '1 minute' AS lately"
        " FROM heartbeat_runs AS r JOIN heartbeat_run_items AS i ON i.run_id = r.id",
    )
    assert recorded["started_at"] in sent
    assert recorded["lately"]


# Overlap


async def test_runs_that_overlap_share_the_work_and_ask_about_each_issue_once(
    pool: Pool, agents: tuple[AgentStandin, str]
) -> None:
    standin, url = agents
    await enter(pool, {f"agent-{number}": at(url, f"agent-{number}", "seconds=0.01") for number in range(3)})
    await open_many(pool, 60, 3)
    runs = [await begin(pool, Wanted("acme")) for _ in range(3)]
    tallies = await asyncio.gather(*(beat.work() for beat in runs))
    assert sum(tally.resolved for tally in tallies) == 60
    assert all(tally.resolved for tally in tallies)
    assert sorted(call.issue for call in standin.calls) == list(range(1, 61))
    [spread] = await sql(pool, SPREAD)
    assert (spread["attempt_count"], spread["count"]) == (1, 60)


async def test_the_claims_of_one_run_are_found_without_reading_all_attempts(pool: Pool) -> None:
    async with pool.transaction() as tx:
        await tx.execute("SET LOCAL enable_seqscan = off")
        cursor = await tx.execute("EXPLAIN SELECT issue_id FROM heartbeat_run_items WHERE run_id = 7")
        plan = "\n".join(row["QUERY PLAN"] for row in await cursor.fetchall())
    assert "attempts_run" in plan


async def test_claims_of_others_than_runs_are_no_items(pool: Pool) -> None:
    await enter(pool)
    for name in ("host:1:abcd", "run:", "run:x", "run:1 or so", "run:12345678901234567890", "run:7"):
        id = await open_issue(pool)
        async with issues.claim_next(pool, "claimed", claimed_by=name) as claim:
            assert claim is not None
            assert claim.row.id == id
            await claim.complete()
    assert [item["run_id"] for item in await sql(pool, "SELECT run_id FROM heartbeat_run_items")] == [7]
