"""Three kinds of ending, told apart: an error, a crash, and an interruption. The first two are charged.

As a script (`python test_endings.py HELD`) it is a worker in a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from consumers import CONSUMERS, ROOT, quick, work
from gates import attempts_of, opened, outcomes_of, row_of, sql, status_of, until

from webhooks import Claim, Consumer, Done, Gate, Pool
from webhooks.observe import REGISTRY
from webhooks.verify import verify
from webhooks.worker import Worker

DEADLY, FAILING, SLOW = 13, 14, 15
OTHERS = range(1, 9)
WITHIN_S = 20


def endings(held_by: Path) -> Consumer:
    """One row ends the process of whoever works on it, one fails, and one takes as long as a file is there."""
    sessions = Gate("patch_sessions", key="sc_id")

    @sessions.phase("received", claimed="clarifying", done="clarified", lease=timedelta(seconds=1), max_attempts=3)
    async def clarify(session: dict[str, Any], claim: Claim) -> Done:
        if session["sc_id"] == DEADLY:
            os._exit(7)
        if session["sc_id"] == FAILING:
            raise ValueError("no luck")
        if session["sc_id"] == SLOW:
            await until(lambda: not held_by.exists(), within_s=60)
        return claim.done()

    return Consumer(gates=[sessions], sources=[])


@contextmanager
def worker_process(url: str, held_by: Path) -> Iterator[subprocess.Popen[str]]:
    settings = {"POLL_S": "0.1", "BACKOFF_BASE_S": "0.1", "BACKOFF_MAX_S": "0.1", "DRAIN_S": "0.1"}
    process = subprocess.Popen(
        [sys.executable, __file__, str(held_by)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))),
            "DATABASE_URL": url,
            **{f"WEBHOOKS_{name}": value for name, value in settings.items()},
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


def counted(name: str, **labels: str) -> float:
    labels = {"table": "patch_sessions", "phase": "clarifying", **labels}
    return REGISTRY.get_sample_value(f"webhooks_{name}_total", labels) or 0


@pytest.mark.invariant(6)
@pytest.mark.invariant(7)
async def test_a_crash_an_error_and_an_interruption_are_told_apart_and_the_last_is_not_charged(
    pool: Pool, database_url: str, tmp_path: Path
) -> None:
    """Case 29, with a phase and real processes."""
    held_by = tmp_path / "held"
    gate = endings(held_by).gates["patch_sessions"]
    await opened(pool, gate, *OTHERS, DEADLY, FAILING, to="received")
    deaths = 0
    while await status_of(pool, DEADLY) != "escalated":
        assert deaths <= 3
        with worker_process(database_url, held_by) as worker:

            async def over(worker: subprocess.Popen[str] = worker) -> bool:
                return worker.poll() is not None or await status_of(pool, DEADLY) == "escalated"

            await until(over, WITHIN_S)
            deaths += worker.poll() == 7
    assert deaths == 3

    # The others go on, and what a later worker does is counted.
    before = {outcome: counted("outcomes", outcome=outcome) for outcome in ("error", "interrupted", "done")}
    held_by.touch()
    await opened(pool, gate, SLOW, to="received")
    with worker_process(database_url, held_by) as worker:

        async def slow_runs() -> bool:
            return await status_of(pool, SLOW) == "clarifying"

        await until(slow_runs, WITHIN_S)
        worker.send_signal(signal.SIGTERM)
        await asyncio.to_thread(worker.wait, WITHIN_S)
    assert await outcomes_of(pool, SLOW) == ["interrupted"]
    assert (await row_of(pool, SLOW))["attempt_count"] == 0
    held_by.unlink()
    async with Pool.open(database_url, settings=quick()) as here:
        last = Worker(here, endings(held_by))
        last.start()

        async def all_have_ended() -> bool:
            rows = await sql(pool, "SELECT status FROM patch_sessions")
            return {row["status"] for row in rows} == {"clarified", "escalated"}

        await until(all_have_ended, WITHIN_S)
        await last.stop()

    assert await outcomes_of(pool, DEADLY) == ["expired"] * 3
    assert "stopped answering" in (await row_of(pool, DEADLY))["last_error"]
    failed = await attempts_of(pool, FAILING)
    assert "error" in {attempt["outcome"] for attempt in failed}
    assert {attempt["error"] for attempt in failed if attempt["outcome"] == "error"} == {"ValueError: no luck"}
    assert await status_of(pool, FAILING) == "escalated"
    interrupted, done = await attempts_of(pool, SLOW)
    assert (interrupted["outcome"], interrupted["error"]) == ("interrupted", "the worker is stopping")
    # Not charged, so the next attempt has its number.
    assert (done["outcome"], done["attempt"], interrupted["attempt"]) == ("done", 1, 1)
    assert [await status_of(pool, key) for key in OTHERS] == ["clarified"] * len(OTHERS)
    assert counted("outcomes", outcome="done") > before["done"]
    async with pool.transaction() as tx:
        assert [check.name for check in await verify(tx, endings(held_by), pool.settings) if not check.holds] == []


async def test_each_kind_of_ending_is_counted_by_its_name(pool: Pool, database_url: str, tmp_path: Path) -> None:
    held_by = tmp_path / "held"
    held_by.touch()
    consumer = endings(held_by)
    gate = consumer.gates["patch_sessions"]
    before = {outcome: counted("outcomes", outcome=outcome) for outcome in ("error", "interrupted", "done")}
    swept = counted("swept")
    await opened(pool, gate, 1, FAILING, SLOW, 2, to="received")
    await gate.take(pool, "clarifying", 2, claimed_by="a process that died")
    await sql(pool, "UPDATE patch_sessions SET lease_until = now() - interval '1 s' WHERE sc_id = 2")
    async with Pool.open(database_url, settings=quick()) as here:
        worker = Worker(here, consumer)
        worker.start()

        async def failed_and_swept() -> bool:
            states = {row["sc_id"]: row["status"] for row in await sql(pool, "SELECT * FROM patch_sessions")}
            return states == {1: "clarified", 2: "clarified", FAILING: "escalated", SLOW: "clarifying"}

        await until(failed_and_swept, WITHIN_S)
        await worker.stop(drain_s=0)
    assert await outcomes_of(pool, 2) == ["expired", "done"]
    assert await outcomes_of(pool, SLOW) == ["interrupted"]
    counts = {outcome: counted("outcomes", outcome=outcome) - before[outcome] for outcome in before}
    assert counts == {"error": 3, "interrupted": 1, "done": 2}
    assert counted("swept") - swept == 1


CONSUMERS["endings"] = endings

if __name__ == "__main__":
    asyncio.run(work("endings", *sys.argv[1:]))
