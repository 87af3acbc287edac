"""How long a claim takes however long the queue is: one agent of one company, with more and more open issues."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import psycopg
import uvloop

from handlers.issues import issues
from peers.ours import AGENTS, fill_issues, pool_on

# Four companies share the table; the agent's own queue is a sixteenth of it, of all priorities and a year's ages.
MORE = """
INSERT INTO issues (company_id, assigned_agent_id, title, priority, created_at)
SELECT (ARRAY['acme', 'bolt', 'cogs', 'dyne'])[1 + n % 4], (ARRAY['ada', 'bob', 'cyd', 'dan'])[1 + n / 4 % 4],
    'issue ' || n, (ARRAY['critical', 'high', 'medium', 'low'])[1 + n / 16 % 4],
    now() - (n * 7919 % 31536000) * interval '1 s'
FROM generate_series({first}::bigint, {last}::bigint) AS n
"""
OPEN = "SELECT count(*) FROM issues WHERE status = 'open'"


@dataclass(frozen=True, slots=True)
class Latency:
    p50_ms: float
    p99_ms: float


def at_each_size(url: str, sizes: Sequence[int], claims: int) -> Generator[tuple[int, dict[str, Latency]]]:
    """Fill the table to each size in turn, and yield how long claims took, and as a measure how long a commit does.

    Args:
        url: an empty database.
        sizes: numbers of open issues, growing.
        claims: how many are timed at each size.
    """
    uvloop.run(fill_issues(url, 0))
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE commits (n integer NOT NULL)")
        last = 0
        for size in sizes:
            row = connection.execute(OPEN).fetchone()
            assert row is not None
            first, last = last + 1, last + size - row[0]
            connection.execute(psycopg.sql.SQL(MORE).format(first=first, last=last))
            connection.execute("ANALYZE issues")
            connection.execute("CHECKPOINT")
            yield size, {"claim_next": uvloop.run(_claim(url, claims)), "commit": _commit(connection, claims)}


async def _claim(url: str, claims: int) -> Latency:
    seconds: list[float] = []
    async with pool_on(url) as pool:
        queue = {"company_id": "acme", "assigned_agent_id": AGENTS[0]}
        for _ in range(claims + claims // 10):
            started = time.perf_counter()
            async with issues.claim_next(pool, "claimed", claimed_by="run:1", **queue) as claim:
                seconds.append(time.perf_counter() - started)
                if claim is None:
                    raise RuntimeError("the agent's queue is empty: fewer claims, or more issues")
                await claim.complete()
    return latency(seconds[claims // 10 :])  # the first ones connect and prepare


def _commit(connection: psycopg.Connection, commits: int) -> Latency:
    """How long the smallest commit takes here: what no claim can be faster than."""
    seconds: list[float] = []
    for number in range(commits):
        started = time.perf_counter()
        connection.execute("INSERT INTO commits VALUES (%s)", (number,))
        seconds.append(time.perf_counter() - started)
    return latency(seconds)


def latency(seconds: Sequence[float]) -> Latency:
    ordered = sorted(seconds)
    return Latency(ordered[len(ordered) // 2] * 1000, ordered[int(len(ordered) * 0.99)] * 1000)
