"""What the tests of issues, agents and heartbeats share: a company with agents, its issues, and the agents themselves.

As a script (`python tests/heartbeats.py COMPANY`) it is a process that starts one run after the other until it is
killed, as `webhooks heartbeat --every` does.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
from consumers import served
from psycopg.types.json import Jsonb
from starlette.applications import Starlette
from starlette.routing import Mount

from handlers import consumer
from handlers.heartbeat import begin
from handlers.heartbeat_run import Wanted
from handlers.issues import issues
from handlers.standin.agent import AgentStandin
from webhooks import Pool, Transaction
from webhooks.control import Control
from webhooks.control.ask import Asker
from webhooks.control.health import Process

ROOT = Path(__file__).parent.parent
NOBODY = "http://127.0.0.1:9/"
"""Where no agent answers."""

Rows = list[dict[str, Any]]


async def sql(pool: Pool, text: Any, **params: object) -> Rows:
    async with pool.transaction() as tx:
        cursor = await tx.execute(text, params)
        return await cursor.fetchall() if cursor.description else []


def at(url: str, name: str = "coder", query: str = "seconds=0", **settings: object) -> dict[str, object]:
    return {"type": "http", "url": f"{url}/{name}?{query}", **settings}


async def enter(
    pool: Pool, agents: Mapping[str, Mapping[str, object]] | Sequence[str] = ("coder",), *, company: str = "acme"
) -> None:
    """A company and its agents; an agent is given by its adapter, or by its name alone where nobody calls it."""
    adapters = agents if isinstance(agents, Mapping) else {name: {"type": "http", "url": NOBODY} for name in agents}
    async with pool.transaction() as tx:
        await tx.execute(
            "INSERT INTO companies (id, name) VALUES (%(id)s, %(id)s) ON CONFLICT DO NOTHING", {"id": company}
        )
        for name, adapter in adapters.items():
            await tx.execute(
                "INSERT INTO agents (company_id, id, name, adapter) VALUES (%(company)s, %(id)s, %(id)s, %(adapter)s)",
                {"company": company, "id": name, "adapter": Jsonb(adapter)},
            )


async def open_issue(pool: Pool, agent: str | None = "coder", *, company: str = "acme", **columns: object) -> int:
    """One open issue; its id."""
    columns = {"company_id": company, "assigned_agent_id": agent, "title": "mend it", **columns}
    async with pool.transaction() as tx:
        assert await issues.open(tx, **columns)
        return await _newest(tx)


async def _newest(tx: Transaction) -> int:
    row = await (await tx.execute("SELECT max(id) AS id FROM issues")).fetchone()
    assert row is not None
    return int(row["id"])


async def open_many(pool: Pool, count: int, agents: int, *, company: str = "acme", max_attempts: int = 5) -> None:
    """Open issues of the agents `agent-0`, `agent-1`, …, of all priorities and ages; and the planner knows them."""
    await sql(
        pool,
        "INSERT INTO issues (company_id, assigned_agent_id, title, priority, created_at, max_attempts)"
        " SELECT %(company)s, 'agent-' || i %% %(agents)s, 'issue ' || i,"
        " (ARRAY['critical', 'high', 'medium', 'low'])[1 + i %% 4], now() - i * interval '1 minute', %(most)s"
        " FROM generate_series(1, %(count)s) AS i",
        company=company,
        agents=agents,
        count=count,
        most=max_attempts,
    )
    await sql(pool, "ANALYZE issues")


async def issue_of(pool: Pool, id: int) -> dict[str, Any]:
    [row] = await sql(pool, "SELECT * FROM issues WHERE id = %(id)s", id=id)
    return row


async def statuses(pool: Pool) -> dict[str, int]:
    """How many issues are in each status."""
    rows = await sql(pool, "SELECT status, count(*) AS count FROM issues GROUP BY status")
    return {row["status"]: row["count"] for row in rows}


async def attempts_of(pool: Pool, id: int) -> Rows:
    return await sql(
        pool,
        "SELECT * FROM attempts WHERE table_name = 'issues' AND key = %(key)s ORDER BY claimed_at, claim_seq",
        key=str(id),
    )


async def outcomes_of(pool: Pool, id: int) -> list[str | None]:
    return [attempt["outcome"] for attempt in await attempts_of(pool, id)]


async def due(pool: Pool) -> None:
    """Every back-off is over."""
    await sql(pool, "UPDATE issues SET not_before = now() WHERE status = 'open'")


async def run(
    pool: Pool, agent: str | None = None, limit: int | None = None, *, company: str = "acme"
) -> dict[str, int]:
    """One heartbeat from its beginning to its end: what it counted."""
    return (await (await begin(pool, Wanted(company, agent, limit))).work()).counts()


@asynccontextmanager
async def agents_served(chance: random.Random | None = None) -> AsyncIterator[tuple[AgentStandin, str]]:
    """The stand-in's agents on a socket, and where they are."""
    standin = AgentStandin(chance)
    async with served(Starlette(routes=[Mount("/", routes=standin.routes())])) as port:
        try:
            yield standin, f"http://127.0.0.1:{port}"
        finally:
            await standin.close()


@asynccontextmanager
async def control_of(pool: Pool) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the control plane of a process with this pool; over a socket, so that work may outlive its answer."""
    asker = Asker(pool)
    app = Control(Process(asker, pool.settings, None, None), consumer).app()
    try:
        async with (
            served(app) as port,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False) as client,
        ):
            yield client
    finally:
        await asker.close()


@contextmanager
def heartbeats_process(url: str, company: str = "acme", **variables: object) -> Iterator[subprocess.Popen[bytes]]:
    """Heartbeats one after the other in a process of its own; it is killed at the end if it still lives."""
    process = start_heartbeats(url, company, **variables)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


def start_heartbeats(
    url: str, company: str = "acme", *, clock_off_s: float = 0, **variables: object
) -> subprocess.Popen[bytes]:
    settings = {f"WEBHOOKS_{name.upper()}": str(value) for name, value in variables.items()}
    return subprocess.Popen(
        [sys.executable, __file__, company],
        env={**os.environ, "PYTHONPATH": str(ROOT), "DATABASE_URL": url, "CLOCK_OFF_S": str(clock_off_s), **settings},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def turn_clock(by_s: float) -> None:
    """Set the clocks of this process wrong: the time of day, and the time since the machine started."""
    for name in ("time", "clock_gettime"):
        right = getattr(time, name)
        setattr(time, name, lambda *of, right=right: right(*of) + by_s)


async def beat(company: str) -> None:
    turn_clock(float(os.environ.get("CLOCK_OFF_S", "0")))
    async with Pool.open() as pool:
        while True:
            await (await begin(pool, Wanted(company))).work()
            await asyncio.sleep(0.05)


if __name__ == "__main__":
    asyncio.run(beat(sys.argv[1]))
