"""The ways to a heartbeat: the control plane, the command, its schedule, and the demo to try it on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import pytest
import structlog
from click.testing import CliRunner
from consumers import quick
from gates import until
from heartbeats import ROOT, agents_served, at, control_of, enter, issue_of, open_issue, outcomes_of, sql, statuses
from processes import answering

from handlers.demo import demo
from handlers.heartbeat_command import heartbeat
from handlers.heartbeat_run import stop_runs
from handlers.standin.agent import AgentStandin
from webhooks import Pool


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

        async def over() -> bool:
            return (await client.get(f"/api/heartbeat/run/{run_id}")).json()["ended_at"] is not None

        await until(over)
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


# The command


async def started(url: str, *arguments: str) -> asyncio.subprocess.Process:
    """A command in a process of its own."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "webhooks",
        *arguments,
        cwd=ROOT,
        env={**os.environ, "DATABASE_URL": url, "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
    output, errors = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, output.decode(), errors.decode()


async def test_the_demo_makes_a_company_that_a_heartbeat_then_works(
    database_url: str, pool: Pool, agents: tuple[AgentStandin, str]
) -> None:
    standin, url = agents
    made = ("demo", "issues", "--company", "acme", "--agents", "3", "--issues", "7", "--url", url)
    code, output, errors = await ended(await started(database_url, *made))
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
    code, output, errors = await ended(await started(database_url, "heartbeat", "acme"))
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
    process = await started(database_url, "heartbeat", "acme", "--every", "0.1s")
    await until(lambda: len(standin.calls) == 3, within_s=20)
    process.send_signal(signal.SIGTERM)
    assert (await ended(process))[0] == 0
    claimed = await sql(
        pool, "SELECT count(DISTINCT run_id) AS runs, count(DISTINCT issue_id) AS issues FROM heartbeat_run_items"
    )
    assert (claimed[0]["runs"], claimed[0]["issues"]) == (3, 3)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_process_that_is_stopped_gives_back_what_it_was_working_on(
    database_url: str, pool: Pool, agents: tuple[AgentStandin, str], number: signal.Signals
) -> None:
    standin, url = agents
    await enter(pool, {"coder": at(url, query="seconds=60")})
    id = await open_issue(pool)
    with answering(signal.SIGHUP, signal.SIG_DFL):
        process = await started(database_url, "heartbeat", "acme")
    await until(lambda: standin.calls, within_s=20)
    process.send_signal(number)
    code, output, errors = await ended(process)
    assert code == 128 + signal.SIGTERM, errors
    assert "total" in output
    assert await outcomes_of(pool, id) == ["interrupted"]
    assert (await issue_of(pool, id))["attempt_count"] == 0


async def test_a_body_longer_than_any_request_is_refused_unread(pool: Pool) -> None:
    async def long() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b" " * 65_536

    async with control_of(pool) as client:
        answer = await client.post("/api/heartbeat/run", content=long())
    assert answer.status_code == 413
