"""Heartbeats: agents work their queues, overlapping runs never meet on an issue, and what a run counts is what was."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import structlog
from click.testing import CliRunner
from consumers import quick
from gates import until
from heartbeats import (
    ROOT,
    agents_served,
    control_of,
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
from handlers.demo import demo
from handlers.heartbeat import Unknown, Unusable, begin
from handlers.heartbeat_command import heartbeat
from handlers.heartbeat_run import Wanted, stop_runs
from handlers.issues import issues
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


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command configures logging for its process, which here is everybody's."""
    configured = structlog.is_configured()
    yield
    if not configured:
        structlog.reset_defaults()


def at(url: str, name: str = "coder", query: str = "seconds=0", **settings: object) -> dict[str, object]:
    return {"type": "http", "url": f"{url}/{name}?{query}", **settings}


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


async def test_a_run_that_is_stopped_answers_with_what_it_did_and_that_it_was_interrupted(
    pool: Pool, agents: tuple[AgentStandin, str]
) -> None:
    standin, url = agents
    await enter(pool, {"coder": at(url, query="seconds=60"), "writer": at(url, "writer")})
    ids = [await open_issue(pool, "coder"), await open_issue(pool, "coder"), await open_issue(pool, "writer")]
    async with control_of(pool) as client:
        answering = asyncio.create_task(client.post("/api/heartbeat/run", json={"company_id": "acme"}))

        async def waits_for_the_slow_one() -> bool:
            return len(standin.calls) == 2 and await statuses(pool) == {"open": 1, "claimed": 1, "resolved": 1}

        await until(waits_for_the_slow_one)
        await stop_runs()
        [recorded] = await sql(pool, "SELECT * FROM heartbeat_runs")
        answer = (await answering).json()
    assert answer == {
        "run_id": recorded["id"],
        "problems": ["interrupted: its process was stopped"],
        "claimed": 2,
        "resolved": 1,
        "failed": 1,
        "escalated": 0,
    }
    assert (recorded["ended_at"] is not None, recorded["note"]) == (True, "interrupted: its process was stopped")
    assert [await outcomes_of(pool, id) for id in ids] == [["interrupted"], [], ["done"]]


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


async def test_a_process_that_is_stopped_gives_back_what_it_was_working_on(
    database_url: str, pool: Pool, agents: tuple[AgentStandin, str], tmp_path: Path
) -> None:
    standin, url = agents
    await enter(pool, {"coder": at(url, query="seconds=60")})
    id = await open_issue(pool)
    command = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "webhooks",
        "heartbeat",
        "acme",
        cwd=ROOT,
        env={**os.environ, "DATABASE_URL": database_url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    await until(lambda: standin.calls, within_s=20)
    command.send_signal(signal.SIGTERM)
    output, errors = await asyncio.wait_for(command.communicate(), 20)
    assert command.returncode == 128 + signal.SIGTERM, errors
    assert b"total" in output
    assert await outcomes_of(pool, id) == ["interrupted"]
    assert (await issue_of(pool, id))["attempt_count"] == 0


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
    assert await outcomes_of(pool, deadly) == ["expired", "expired", "expired"]
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


# The control plane


async def test_the_api_waits_for_the_end_and_tells_what_was_done(pool: Pool, agents: tuple[AgentStandin, str]) -> None:
    _, url = agents
    await enter(pool, {"coder": at(url)})
    await open_issue(pool)
    async with control_of(pool) as client:
        answer = await client.post("/api/heartbeat/run", json={"company_id": "acme"})
        [row] = await sql(pool, "SELECT id FROM heartbeat_runs")
        assert (answer.status_code, answer.json()) == (
            200,
            {"run_id": row["id"], "claimed": 1, "resolved": 1, "failed": 0, "escalated": 0},
        )
        shown = (await client.get(f"/api/heartbeat/run/{row['id']}")).json()
        assert (shown["company_id"], shown["resolved"]) == ("acme", 1)
        assert shown["ended_at"] > shown["started_at"]


async def test_the_api_need_not_wait(pool: Pool, agents: tuple[AgentStandin, str]) -> None:
    standin, url = agents
    await enter(pool, {"coder": at(url, query="seconds=0.2")})
    await open_issue(pool)
    async with control_of(pool) as client:
        answer = await client.post("/api/heartbeat/run", json={"company_id": "acme", "wait": False})
        assert answer.status_code == 202
        run_id = answer.json()["run_id"]
        assert answer.json() == {"run_id": run_id}
        shown = (await client.get(f"/api/heartbeat/run/{run_id}")).json()
        assert (shown["ended_at"], shown["claimed"]) == (None, 0)

        async def ended() -> bool:
            return (await client.get(f"/api/heartbeat/run/{run_id}")).json()["ended_at"] is not None

        await until(ended)
    assert len(standin.calls) == 1
    assert await statuses(pool) == {"resolved": 1}


async def test_a_run_in_the_background_is_given_back_uncharged_when_the_server_stops(
    pool: Pool, agents: tuple[AgentStandin, str]
) -> None:
    standin, url = agents
    await enter(pool, {"coder": at(url, query="seconds=60")})
    id = await open_issue(pool)
    async with control_of(pool) as client:
        await client.post("/api/heartbeat/run", json={"company_id": "acme", "wait": False})
        await until(lambda: standin.calls)

    async def given_back() -> bool:
        return await outcomes_of(pool, id) == ["interrupted"]

    await until(given_back)
    assert (await issue_of(pool, id))["attempt_count"] == 0


NOT_FITTING = {
    b"": "the body: Invalid JSON",
    b"{": "the body: Invalid JSON",
    b"[]": "the body: Input should be an object",
    b"{}": "company_id: Field required",
    b'{"company_id": 7}': "company_id: Input should be a valid string",
    b'{"company_id": ""}': "company_id: String should have at least 1 character",
    b'{"company_id": "a\\u0000b"}': "company_id: String should match pattern",
    b'{"company_id": "\\ud83d"}': "the body: Invalid JSON",
    b'{"company_id": "\xff"}': "the body: Invalid JSON",
    b'{"company_id": "acme", "limit": 0}': "limit: Input should be greater than or equal to 1",
    b'{"company_id": "acme", "limit": "3"}': "limit: Input should be a valid integer",
    b'{"company_id": "acme", "wait": "no"}': "wait: Input should be a valid boolean",
    b'{"company_id": "acme", "agent": "coder"}': "agent: Extra inputs are not permitted",
}


async def test_a_body_that_does_not_fit_is_refused_with_the_field_and_the_reason(pool: Pool) -> None:
    await enter(pool)
    async with control_of(pool) as client:
        for body, complaint in NOT_FITTING.items():
            answer = await client.post("/api/heartbeat/run", content=body)
            assert answer.status_code == 400, body
            assert answer.json()["error"].startswith(complaint)
    assert await sql(pool, "SELECT * FROM heartbeat_runs") == []


async def test_the_api_names_what_it_does_not_know_or_cannot_use(pool: Pool) -> None:
    await enter(pool, {"coder": {"type": "carrier pigeon"}})
    async with control_of(pool) as client:
        unknown = await client.post("/api/heartbeat/run", json={"company_id": "nobody"})
        agent = await client.post("/api/heartbeat/run", json={"company_id": "acme", "agent_id": "nobody"})
        unusable = await client.post("/api/heartbeat/run", json={"company_id": "acme", "agent_id": "coder"})
        others = await client.post("/api/heartbeat/run", json={"company_id": "acme"})
        missing = await client.get("/api/heartbeat/run/4711")
        past_all_numbers = await client.get(f"/api/heartbeat/run/{2**64}")
        wrong = await client.get("/api/heartbeat/run")
    assert (unknown.status_code, unknown.json()) == (404, {"error": "there is no company 'nobody'"})
    assert (agent.status_code, agent.json()) == (404, {"error": "company 'acme' has no agent 'nobody'"})
    assert unusable.status_code == 422
    assert "agent coder: its adapter cannot be read" in unusable.json()["error"]
    assert others.status_code == 200
    assert [problem.split(":")[0] for problem in others.json()["problems"]] == ["agent coder"]
    assert (missing.status_code, past_all_numbers.status_code, wrong.status_code) == (404, 404, 405)


async def test_the_heartbeats_stand_behind_the_checks_of_the_control_plane(pool: Pool) -> None:
    await enter(pool)
    async with control_of(pool) as client:
        body = {"company_id": "acme"}
        for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"X-Forwarded-For": "1.2.3.4"}):
            answer = await client.post("/api/heartbeat/run", json=body, headers=headers)
            assert answer.status_code in (403, 421)
    assert await sql(pool, "SELECT * FROM heartbeat_runs") == []


# The command


async def command(url: str, *arguments: str, home: Path | None = None) -> tuple[int, str, str]:
    variables = {"DATABASE_URL": url} | ({} if home is None else {"WEBHOOKS_HOME": str(home)})
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "webhooks",
        *arguments,
        cwd=ROOT,
        env={**os.environ, **variables, "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    output, errors = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, output.decode(), errors.decode()


async def test_the_demo_makes_a_company_that_a_heartbeat_then_works(
    database_url: str, pool: Pool, agents: tuple[AgentStandin, str], tmp_path: Path
) -> None:
    standin, url = agents
    made = ("demo", "issues", "--company", "acme", "--agents", "3", "--issues", "7", "--url", url)
    code, output, errors = await command(database_url, *made)
    assert (code, errors) == (0, "")
    assert "7 more open issues" in output
    rows = await sql(pool, "SELECT assigned_agent_id, count(*) AS count FROM issues GROUP BY 1 ORDER BY 1")
    assert [(row["assigned_agent_id"], row["count"]) for row in rows] == [
        ("agent-1", 3),
        ("agent-2", 2),
        ("agent-3", 2),
    ]
    assert {row["priority"] for row in await sql(pool, "SELECT DISTINCT priority FROM issues")} == {
        "critical",
        "high",
        "medium",
    }
    code, output, errors = await command(database_url, "heartbeat", "acme")
    assert (code, errors) == (0, "")
    table = [line.split() for line in output.splitlines() if line.strip()]
    assert table[1:] == [
        ["agent", "claimed", "resolved", "failed", "escalated"],
        ["agent-1", "3", "3", "0", "0"],
        ["agent-2", "2", "2", "0", "0"],
        ["agent-3", "2", "2", "0", "0"],
        ["total", "7", "7", "0", "0"],
    ]
    assert len(standin.calls) == 7


def test_the_command_says_what_is_wrong(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def prepare() -> None:
        async with Pool.open(database_url) as pool:
            await enter(pool, {"coder": {"type": "http"}})

    asyncio.run(prepare())
    monkeypatch.setenv("DATABASE_URL", database_url)
    for command, arguments, complaint in (
        (heartbeat, ["nobody"], "there is no company 'nobody'"),
        (heartbeat, ["acme", "--agent", "x"], "company 'acme' has no agent 'x'"),
        (heartbeat, ["acme", "--agent", "coder"], "agent coder: its adapter cannot be read: url: Field required"),
        (heartbeat, ["acme", "--every", "5"], "Invalid value for '--every': '5': write it as 30s, 5m or 1h"),
        (heartbeat, ["acme", "--every", "0s"], "Invalid value for '--every': '0s': write it as 30s, 5m or 1h"),
        (heartbeat, ["acme", "--limit", "0"], "Invalid value for '--limit'"),
        (demo, ["issues", "--url", "ftp://x"], "Invalid value for --url: URL scheme should be 'http' or 'https'"),
    ):
        result = CliRunner().invoke(command, arguments)
        assert result.exit_code > 0
        assert complaint in result.output


def test_a_database_without_the_tables_is_said_to_need_migrating(
    server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", server_url)
    result = CliRunner().invoke(demo, ["issues"])
    assert (result.exit_code, result.output) == (
        1,
        'Error: relation "companies" does not exist: run webhooks migrate\n',
    )


async def test_a_schedule_starts_runs_that_may_overlap_until_it_is_stopped(
    database_url: str, pool: Pool, agents: tuple[AgentStandin, str]
) -> None:
    standin, url = agents
    await enter(pool, {"coder": at(url, query="seconds=1")})
    for _ in range(3):
        await open_issue(pool)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "webhooks",
        "heartbeat",
        "acme",
        "--every",
        "0.1s",
        cwd=ROOT,
        env={**os.environ, "DATABASE_URL": database_url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    await until(lambda: len(standin.calls) == 3, within_s=20)
    process.send_signal(signal.SIGTERM)
    await asyncio.wait_for(process.communicate(), 20)
    claimed = await sql(
        pool, "SELECT count(DISTINCT run_id) AS runs, count(DISTINCT issue_id) AS issues FROM heartbeat_run_items"
    )
    assert (claimed[0]["runs"], claimed[0]["issues"]) == (3, 3)


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
