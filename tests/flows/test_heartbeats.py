"""Many heartbeats at once over the issues of one company: each is resolved exactly once, whatever goes wrong meanwhile.

In the suite there are hundreds of issues. `HEARTBEATS_FULL=1` runs it with five thousand each.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from consumers import quick
from gates import until
from heartbeats import agents_served, control_of, enter, open_many, run, sql, start_heartbeats, statuses

from handlers.standin.agent import AgentStandin
from webhooks import Pool

FULL = bool(os.environ.get("HEARTBEATS_FULL"))
AGENTS = 10
SETTINGS: dict[str, object] = {"lease_s": 1, "backoff_base_s": 0.05, "backoff_max_s": 0.2}


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    async with Pool.open(database_url, settings=quick()) as pool:
        yield pool


async def company(pool: Pool, url: str, issues: int, query: str, *, max_attempts: int = 5) -> None:
    """Ten agents, and so many open issues."""
    names = [f"agent-{number}" for number in range(AGENTS)]
    await enter(pool, {name: {"type": "http", "url": f"{url}/{name}?{query}"} for name in names})
    await open_many(pool, issues, AGENTS, max_attempts=max_attempts)


async def prove(pool: Pool, standin: AgentStandin, issues: int) -> None:
    """Each issue was resolved exactly once, and every call is accounted for."""
    assert await statuses(pool) == {"resolved": issues}
    done = await sql(
        pool,
        "SELECT count(*) AS done, count(DISTINCT key) AS issues FROM attempts"
        " WHERE table_name = 'issues' AND outcome = 'done'",
    )
    assert (done[0]["done"], done[0]["issues"]) == (issues, issues)
    twice = await sql(
        pool, "SELECT run_id, issue_id FROM heartbeat_run_items GROUP BY run_id, issue_id HAVING COUNT(*) > 1"
    )
    assert twice == [], "a run claimed an issue twice"
    at_once = await sql(
        pool,
        "SELECT a.key FROM attempts AS a JOIN attempts AS b ON b.table_name = a.table_name AND b.key = a.key"
        " AND b.claim_seq <> a.claim_seq AND b.claimed_at >= a.claimed_at"
        " WHERE a.table_name = 'issues' AND (a.ended_at IS NULL OR b.claimed_at < a.ended_at)",
    )
    assert at_once == [], "two claims of one issue overlapped"
    # The agents: one key an issue, accepted once; every call was made under a claim of its own, which is recorded.
    assert Counter(standin.accepted.values()) == {1: issues}
    assert len({call.key for call in standin.calls}) == len({call.issue for call in standin.calls}) == issues
    claims = {call.claim: call.issue for call in standin.calls}
    assert len(claims) == len(standin.calls), "one claim made two calls"
    recorded = await sql(
        pool,
        "SELECT claim_seq, key::bigint AS issue FROM attempts WHERE claim_seq = ANY(%(claims)s)",
        claims=list(claims),
    )
    assert {row["claim_seq"]: row["issue"] for row in recorded} == claims, "a call that no attempt records"


@pytest.mark.parametrize(("runs", "issues"), [(3, 5_000 if FULL else 300), (50, 5_000 if FULL else 500)])
async def test_runs_that_overlap_resolve_each_issue_once_with_one_call_each(runs: int, issues: int, pool: Pool) -> None:
    async with agents_served() as (standin, url), control_of(pool) as client:
        await company(pool, url, issues, "seconds=0")
        started = asyncio.get_running_loop().time()
        answers = await asyncio.gather(
            *(client.post("/api/heartbeat/run", json={"company_id": "acme"}) for _ in range(runs))
        )
        took = asyncio.get_running_loop().time() - started
    print(f"{runs} runs, {issues} issues: {took:.1f} s")
    assert {answer.status_code for answer in answers} == {200}
    counts = [answer.json() for answer in answers]
    assert len({count["run_id"] for count in counts}) == runs
    assert sum(count["claimed"] for count in counts) == issues
    assert sum(count["resolved"] for count in counts) == issues
    await prove(pool, standin, issues)
    assert len(standin.calls) == issues
    spread = await sql(pool, "SELECT attempt_count, COUNT(*) FROM issues WHERE company_id = 'acme' GROUP BY 1")
    assert [(row["attempt_count"], row["count"]) for row in spread] == [(1, issues)]
    assert took < 60


async def test_agents_that_fail_every_fifth_call_are_asked_again_until_each_issue_is_resolved_once(pool: Pool) -> None:
    issues, runs = (5_000, 50) if FULL else (300, 10)
    async with agents_served(random.Random(5)) as (standin, url):
        # So many attempts that chance escalates none.
        await company(pool, url, issues, "seconds=0&failing=20", max_attempts=20)
        claimed = 0
        started = asyncio.get_running_loop().time()
        while await statuses(pool) != {"resolved": issues}:
            claimed += sum(count["claimed"] for count in await asyncio.gather(*(run(pool) for _ in range(runs))))
            await asyncio.sleep(0.1)
        print(f"{issues} issues, a fifth of the calls failing: {asyncio.get_running_loop().time() - started:.1f} s")
        await prove(pool, standin, issues)
    assert len(standin.calls) == claimed > issues
    retried = await sql(pool, "SELECT sum(attempt_count) AS attempts FROM issues")
    assert retried[0]["attempts"] == claimed


async def test_processes_killed_at_any_moment_and_with_wrong_clocks_leave_each_issue_resolved_once(
    database_url: str, pool: Pool
) -> None:
    """Three processes, one an hour ahead and one an hour behind; one is killed as soon as they have done a bit more."""
    issues, kills = (5_000, 20) if FULL else (200, 5)
    chance = random.Random(9)
    off_s = [0, 3600, -3600]
    async with agents_served(chance) as (standin, url):
        await company(pool, url, issues, "seconds=0.02&failing=20", max_attempts=100)
        processes: list[subprocess.Popen[bytes]] = []
        try:
            processes += [start_heartbeats(database_url, clock_off_s=off, **SETTINGS) for off in off_s]
            for number in range(kills):
                enough = (number + chance.random()) * issues / kills
                await until(lambda enough=enough: len(standin.calls) > enough, within_s=60)
                victim = chance.randrange(3)
                processes[victim].kill()
                processes[victim].wait(10)
                processes[victim] = start_heartbeats(database_url, clock_off_s=off_s[victim], **SETTINGS)

            async def finished() -> bool:
                assert "escalated" not in await statuses(pool)
                return await statuses(pool) == {"resolved": issues}

            await until(finished, within_s=300 if FULL else 60)
        finally:
            for process in processes:
                process.kill()
                process.wait(10)
        await prove(pool, standin, issues)
    outcomes = await sql(pool, "SELECT outcome, count(*) FROM attempts WHERE table_name = 'issues' GROUP BY outcome")
    ended = {row["outcome"]: row["count"] for row in outcomes}
    print(ended)
    assert ended.keys() <= {"done", "error", "expired", "interrupted"}
    assert ended["expired"] >= 1
