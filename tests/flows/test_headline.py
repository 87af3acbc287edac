"""The headline: a delivery that arrives many times, late, or while its worker is being killed, becomes its work once.

Over HTTP and with real processes: a worker here is one that can be killed, stopped and woken up again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from consumers import (
    LABEL,
    RUNS,
    Request,
    Stack,
    arrival,
    arrived,
    from_shortcut,
    patching,
    poisoned,
    quick,
    served,
    stack,
    stories,
    worker_process,
)
from gates import attempts_of, outcomes_of, row_of, sql, status_of, until
from httpx import AsyncClient

from webhooks import Pool

QUICK = {"lease_s": 1, "poll_s": 0.1, "backoff_base_s": 0.1, "backoff_max_s": 0.1}
WORKER_WITHIN_S = 20


@pytest.fixture
async def runs(pool: Pool, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table in which a consumer notes what it ran."""
    monkeypatch.setenv("DATABASE_URL", database_url)
    await sql(pool, RUNS)


async def ran(pool: Pool, what: str) -> list[int]:
    """The pids of those who ran a phase, in order."""
    return [row["pid"] for row in await sql(pool, "SELECT pid FROM runs WHERE what = %(what)s", what=what)]


async def until_ran(pool: Pool, what: str, times: int = 1) -> None:
    async def as_often() -> bool:
        return len(await ran(pool, what)) >= times

    await until(as_often, WORKER_WITHIN_S)


async def until_drafted(pool: Pool, key: int) -> None:
    async def is_drafted() -> bool:
        return bool(
            await sql(pool, "SELECT sc_id FROM patch_sessions WHERE sc_id = %(key)s AND status = 'drafted'", key=key)
        )

    await until(is_drafted, WORKER_WITHIN_S)


def labelled(key: int = 7) -> Request:
    return from_shortcut(stories(key, labels=[LABEL]))


@pytest.mark.usefixtures("runs")
@pytest.mark.invariant(3)
@pytest.mark.invariant(4)
@pytest.mark.invariant(8)
async def test_one_delivery_fifty_times_at_once_is_one_session_and_each_phase_runs_once(
    pool: Pool, database_url: str
) -> None:
    async with stack(database_url, patching(), settings=quick()) as one, stack(database_url, patching()) as two:
        async with served(one.receiver) as port, served(two.receiver) as other, AsyncClient(timeout=30) as client:
            request = labelled()
            urls = [f"http://127.0.0.1:{to}{request.path}" for to in (port, other)]
            answers = await asyncio.gather(
                *(client.post(urls[n % 2], headers=request.headers, content=request.body) for n in range(50))
            )
            assert sorted(answer.status_code for answer in answers) == [200] * 49 + [202]
            await until_drafted(pool, 7)
            # Late copies of finished work change nothing.
            assert {await post_to(client, url, request) for url in urls} == {200}
        row = await row_of(pool, 7)
        assert (row["status"], row["patch"]) == ("drafted", f"diff by {os.getpid()}")
        assert len(await one.deliveries()) == 1
    assert (len(await ran(pool, "clarify")), len(await ran(pool, "draft"))) == (1, 1)
    assert [row["outcome"] for row in await attempts_of(pool, 7)] == ["done", "done"]


async def post_to(client: AsyncClient, url: str, request: Request) -> int:
    return (await client.post(url, headers=request.headers, content=request.body)).status_code


@pytest.mark.usefixtures("runs")
@pytest.mark.invariant(10)
async def test_six_events_about_one_story_one_of_them_while_its_phase_runs_are_one_session_and_one_run(
    pool: Pool, database_url: str, tmp_path: Path
) -> None:
    held = tmp_path / "held"
    held.touch()
    async with stack(database_url, patching(held)) as running:
        answers = await asyncio.gather(*(running.send(labelled()) for _ in range(5)))
        assert {answer.status_code for answer in answers} == {202}
        await until_ran(pool, "draft")
        assert (await running.send(labelled())).status_code == 202

        async def all_are_processed() -> bool:
            return [row["status"] for row in await running.deliveries()] == ["processed"] * 6

        await until(all_are_processed)
        assert await status_of(pool, 7) == "drafting"
        held.unlink()
        await until_drafted(pool, 7)
    assert (len(await ran(pool, "clarify")), len(await ran(pool, "draft"))) == (1, 1)


async def accepted(running: Stack, request: Request) -> None:
    assert (await running.send(request)).status_code == 202


@pytest.mark.usefixtures("runs")
@pytest.mark.invariant(6)
async def test_a_worker_killed_inside_a_phase_is_followed_by_another_after_the_lease(
    pool: Pool, database_url: str, tmp_path: Path
) -> None:
    held = tmp_path / "held"
    held.touch()
    async with stack(database_url, patching(), work=False) as receiving:
        await accepted(receiving, labelled())
    with worker_process(database_url, "patching", held, **QUICK) as first:
        await until_ran(pool, "draft")
        first.send_signal(signal.SIGKILL)
        first.wait(10)
    async with stack(database_url, patching(), settings=quick()):
        await until_drafted(pool, 7)
    assert await ran(pool, "draft") == [first.pid, os.getpid()]
    assert await outcomes_of(pool, 7) == ["done", "expired", "done"]
    assert (await row_of(pool, 7))["patch"] == f"diff by {os.getpid()}"
    assert len(await ran(pool, "clarify")) == 1


@pytest.mark.usefixtures("runs")
@pytest.mark.invariant(5)
@pytest.mark.invariant(6)
async def test_a_worker_that_was_stopped_and_comes_back_after_its_lease_writes_nothing(
    pool: Pool, database_url: str, tmp_path: Path
) -> None:
    held = tmp_path / "held"
    held.touch()
    async with stack(database_url, patching(), work=False) as receiving:
        await accepted(receiving, labelled())
    with worker_process(database_url, "patching", held, **QUICK) as first:
        await until_ran(pool, "draft")
        first.send_signal(signal.SIGSTOP)
        async with stack(database_url, patching(), settings=quick()):
            await until_drafted(pool, 7)
        before = await everything(pool)
        assert (await row_of(pool, 7))["patch"] == f"diff by {os.getpid()}"
        # Its draft can end now: it is about to write its own.
        held.unlink()
        first.send_signal(signal.SIGCONT)
        assert await asyncio.to_thread(said, first, "lost") is not None
        first.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(first.wait, 20) == 0
    assert await everything(pool) == before
    assert await outcomes_of(pool, 7) == ["done", "expired", "done"]


async def everything(pool: Pool) -> list[list[dict[str, Any]]]:
    return [
        await sql(pool, "SELECT * FROM patch_sessions ORDER BY sc_id"),
        await sql(pool, "SELECT * FROM attempts ORDER BY claim_seq"),
        await sql(pool, "SELECT * FROM effects ORDER BY idempotency_key"),
        await sql(pool, "SELECT * FROM deliveries ORDER BY id"),
    ]


def said(process: subprocess.Popen[str], word: str) -> str | None:
    """Read what a process says until it says a word; None when it ended without."""
    assert process.stdout is not None
    return next((line for line in process.stdout if word in line), None)


@pytest.mark.invariant(6)
@pytest.mark.invariant(7)
@pytest.mark.invariant(8)
async def test_a_delivery_that_ends_every_worker_is_dead_and_its_neighbours_are_processed(
    pool: Pool, database_url: str
) -> None:
    ids = await arrived(pool, *(arrival(stories(key)) for key in range(50)))
    await sql(pool, "UPDATE deliveries SET max_attempts = 3")
    for _ in range(3):
        with worker_process(database_url, "poisoned", **QUICK) as worker:
            assert await asyncio.to_thread(ended, worker, 60) == 7
    async with stack(database_url, poisoned(), settings=quick()) as running:

        async def all_have_ended() -> bool:
            rows = await running.deliveries()
            return {row["status"] for row in rows} == {"dead", "processed"}

        await until(all_have_ended, WORKER_WITHIN_S)
    dead = await sql(pool, "SELECT id, attempt_count FROM deliveries WHERE status = 'dead'")
    assert dead == [{"id": ids[13], "attempt_count": 3}]
    assert await outcomes_of(pool, ids[13]) == ["expired"] * 3
    # What it wrote before it died was never there, and what the others wrote is there once.
    sessions = await sql(pool, "SELECT sc_id FROM patch_sessions ORDER BY sc_id")
    assert [row["sc_id"] for row in sessions] == [key for key in range(50) if key != 13]


def ended(process: subprocess.Popen[str], within_s: float) -> int | None:
    try:
        return process.wait(within_s)
    except subprocess.TimeoutExpired:
        return None
