"""Replaying out of a large inbox: how long a dry run takes by each filter, how fast each way goes, how much memory.

An inbox of 100,000 deliveries with bodies of 3 kB, some of them split, on an embedded server of its own:

    .venv/bin/python bench/replay.py --count 100000 --json bench/replay.json

Memory is what the process holds beyond what it held before, sampled after every batch: it must not grow with the number
of deliveries. What the indexes of a selection cost the accept path is measured by inserting with them and without.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import multiprocessing
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import psutil
import psycopg
import uvloop
from rich.console import Console
from rich.table import Table

from webhooks import Consumer, GitHub, Pool, Shortcut
from webhooks.accept import Accepter
from webhooks.captures import captures
from webhooks.delivery import Delivery
from webhooks.embedded import embedded
from webhooks.inbox import insert
from webhooks.migrate import migrate
from webhooks.observe import configure_logging
from webhooks.receiver import Receiver
from webhooks.replay import (
    Again,
    Desk,
    Export,
    Limits,
    Redaction,
    Report,
    again,
    arrivals,
    export,
    imported,
    planned,
    sent,
    stored,
)
from webhooks.replay.rerunning import How
from webhooks.selection import JsonFilter, Selection, Unit, chosen
from webhooks.serve.servers import serving
from webhooks.settings import Settings

SECRET = "bench-secret"  # noqa: S105 - of this run only
HEADERS = [
    ["content-type", "application/json"],
    ["user-agent", "GitHub-Hookshot/bench"],
    ["x-github-event", "issues"],
    ["x-github-hook-id", "101"],
    ["x-hub-signature-256", "sha256=" + "0" * 64],
]
# Five of six are GitHub's; some of the others were split into five events each.
FILL = """
INSERT INTO deliveries (source, dedup_key, headers, body, received_at, event, reason, status, moved_rows)
SELECT CASE WHEN n % 6 = 0 THEN 'shortcut' ELSE 'github' END, '101:' || md5(n::text), %(headers)s::jsonb,
    convert_to('{"action":"opened","repository":{"full_name":"acme/' || n % 1000 || '"},"padding":"'
        || repeat(md5(n::text), 92) || '"}', 'UTF8'),
    now() - (%(count)s - n) * interval '1 second',
    (ARRAY['issues.opened','push','pull_request.closed','check_run.completed','star.created'])[1 + n % 5],
    CASE WHEN n % 3 = 0 THEN 'no handler for it' END,
    CASE WHEN n % 1000 = 0 THEN 'dead' WHEN n % 3 = 0 THEN 'ignored' ELSE 'processed' END,
    CASE WHEN n % 3 = 1 THEN ARRAY['issues:' || n / 10] END
FROM generate_series(1, %(count)s) AS n
"""
SPLIT = """
INSERT INTO deliveries (source, dedup_key, position, parent, received_at, event, status, moved_rows)
SELECT source, dedup_key, part, id, received_at, 'story.update', 'processed', ARRAY['patch_sessions:' || id]
FROM deliveries, generate_series(1, 5) AS part WHERE source = 'shortcut' AND id % 50 = 0
"""
FILTERS: dict[str, dict[str, Any]] = {
    "source": {"source": "shortcut"},
    "event": {"event": "pull_request.closed"},
    "status, rare": {"disposition": "dead"},
    "status, common": {"disposition": "processed"},
    "time, an hour": {"since": timedelta(hours=1)},
    "time, all": {"since": timedelta(days=365)},
    "row": {"row": "issues:123"},
    "everything": {},
    "a value in the body": {"where_json": (JsonFilter.read("$.repository.full_name=acme/7"),)},
}
INDEXES = ("deliveries_received_at", "deliveries_feed", "deliveries_replays")
Figures = dict[str, float]


def consumer() -> Consumer:
    return Consumer(gates=[], sources=[GitHub(), Shortcut()])


class Memory:
    """How much more this process holds than when it was made."""

    def __init__(self) -> None:
        gc.collect()
        self._process = psutil.Process()
        self._before = self._process.memory_info().rss
        self.seen: list[float] = []

    def sample(self, *_: object) -> None:
        self.seen.append((self._process.memory_info().rss - self._before) / 2**20)

    def figures(self) -> Figures:
        """The most in the first quarter, and the most of all, in MiB."""
        quarter = self.seen[: max(1, len(self.seen) // 4)]
        return {"first_quarter_mib": max(quarter, default=0.0), "peak_mib": max(self.seen, default=0.0)}


async def dry_runs(pool: Pool, rounds: int) -> dict[str, Figures]:
    """The median of some rounds, in milliseconds, and how many deliveries there were."""
    found: dict[str, Figures] = {}
    for name, filters in FILTERS.items():
        slow = "where_json" in filters
        units: tuple[Unit, ...] = ("run",) if slow else ("run", "original")
        for unit in units:
            took: list[float] = []
            total = 0
            for _ in range(1 if slow else rounds):
                started = time.perf_counter()
                total = (await planned(pool, consumer().sources, Selection(**filters), unit)).total
                took.append((time.perf_counter() - started) * 1000)
            found[name + (", to be exported" if unit == "original" else "")] = {
                "deliveries": total,
                "ms": statistics.median(took),
            }
    return found


async def timed(memory: Memory, work: Awaitable[Report | Export]) -> Figures:
    started = time.perf_counter()
    done = await work
    seconds = time.perf_counter() - started
    count = done.total if isinstance(done, Report) else done.lines
    return {"deliveries": count, "per_second": count / seconds, **memory.figures()}


async def ways(pool: Pool, directory: Path, some: int) -> dict[str, Figures]:
    """Each way of replaying, and exporting."""
    found: dict[str, Figures] = {}
    sources = consumer().sources

    async def within(how: How, unit: Unit) -> Figures:
        memory = Memory()
        async with pool.transaction() as tx:
            scope = await chosen(tx, Selection(), unit)
        request = Again(how=how, decided_by="bench")
        return await timed(memory, again(pool, sources, scope, request, Limits(), memory.sample))

    file = directory / "deliveries.ndjson"
    memory = Memory()
    async with pool.transaction() as tx:
        scope = await chosen(tx, Selection(), "original")
    with file.open("wb") as lines:

        async def write(line: bytes) -> None:
            lines.write(line)

        found["export to a file"] = await timed(memory, export(pool, sources, scope, Redaction(), write, memory.sample))
    found["again, the same"] = await within("same", "run")
    found["again, as new"] = await within("new", "request")

    desk = Desk(sources=sources, secrets={name: [SECRET] for name in sources}, resign=True)
    async with pool.connection() as connection:
        await connection.execute("TRUNCATE deliveries")
    memory = Memory()
    read = arrivals(captures(file, sources), desk, limit=some)
    found["out of a file"] = await timed(
        memory, imported(pool, consumer(), read, desk, Limits(at_once=50), memory.sample)
    )
    return found


async def serve(url: str, ready: Pipe) -> None:
    async with Pool.open(url) as pool:
        accepter = Accepter(pool, consumer(), lambda moved: None)
        await accepter.start()
        secrets = {name: [SECRET] for name in consumer().sources}
        app = Receiver(consumer().sources, secrets, accepter, max_body_bytes=1 << 20)
        listener = socket.create_server(("127.0.0.1", 0))
        async with serving(app, [listener], "bench"):
            ready.send(listener.getsockname()[1])
            await asyncio.to_thread(ready.recv)
        await accepter.stop()


def receiver(url: str, ready: Pipe) -> None:
    configure_logging(level=logging.WARNING)
    uvloop.run(serve(url, ready))


async def by_http(pool: Pool, url: str, some: int) -> Figures:
    """To a receiver in a process of its own, on the same database, where all of them are duplicates."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receiver, args=(url, there))
    process.start()
    try:
        port = await asyncio.to_thread(here.recv)
        desk = Desk(sources=consumer().sources)
        async with pool.transaction() as tx:
            await tx.execute("UPDATE deliveries SET origin = 'received'")
            await tx.execute("ANALYZE deliveries")  # the inbox was emptied and filled again within seconds
            scope = await chosen(tx, Selection(limit=some), "original")
        memory = Memory()
        found = stored(pool, scope, desk)
        figures = await timed(memory, sent(f"http://127.0.0.1:{port}", found, Limits(at_once=8), memory.sample))
        here.send("stop")
        process.join(15)
        return figures
    finally:
        if process.is_alive():
            process.kill()


async def accepting(pool: Pool, count: int, rounds: int) -> dict[str, Figures]:
    """Inserts a second, two hundred at a time as the accept path does, with the indexes of a selection and without."""
    found: dict[str, list[float]] = {"with": [], "without": []}
    body = b"x" * 3000

    headers = tuple((name, value) for name, value in HEADERS)

    async def filled(name: str) -> None:
        started = time.perf_counter()
        for _ in range(count // 200):
            async with pool.transaction() as tx:
                keys = (f"101:{uuid.uuid4()}" for _ in range(200))
                await insert(tx, [Delivery("github", key, headers, body) for key in keys])
        found[name].append(count / (time.perf_counter() - started))

    async with pool.connection() as connection:
        rows = await connection.execute(
            "SELECT indexname, indexdef FROM pg_indexes WHERE indexname = ANY(%(names)s)", {"names": list(INDEXES)}
        )
        made = {row["indexname"]: row["indexdef"] for row in await rows.fetchall()}
        for _ in range(rounds + 1):
            for name in found:
                await connection.execute("TRUNCATE deliveries")
                for index in made if name == "without" else ():
                    await connection.execute(f"DROP INDEX {index}".encode())
                await connection.execute("CHECKPOINT")  # what came before is not to be paid for here
                await filled(name)
                await connection.execute("TRUNCATE deliveries")
                for statement in made.values() if name == "without" else ():
                    await connection.execute(statement.encode())
        for figures in found.values():
            del figures[0]  # the warm-up
    return {name: {"per_second": statistics.median(figures)} for name, figures in found.items()}


async def fill(url: str, count: int) -> str:
    async with await psycopg.AsyncConnection[Any].connect(url, autocommit=True, row_factory=psycopg.rows.dict_row) as c:
        await migrate(c)
        fill = FILL.replace(" % ", " %% ")
        await c.execute(fill.encode(), {"count": count, "headers": json.dumps(HEADERS)})
        await c.execute(SPLIT)
        await c.execute("VACUUM ANALYZE deliveries")
        row = await (await c.execute("SHOW server_version")).fetchone()
        return str(row["server_version"] if row else "?")


async def main(arguments: Sequence[str]) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--count", type=int, default=100_000, help="how many deliveries the inbox holds")
    options.add_argument("--some", type=int, default=10_000, help="how many are imported, and sent")
    options.add_argument("--rounds", type=int, default=3, help="how often each dry run is measured")
    options.add_argument("--json", type=Path, help="where to write the figures")
    given = options.parse_args(arguments)
    console = Console()
    with tempfile.TemporaryDirectory() as home:
        async with embedded(Path(home)) as url:
            with console.status(f"filling an inbox with {given.count:,} deliveries"):
                version = await fill(url, given.count)
            async with Pool.open(url, settings=Settings()) as pool:
                with console.status("dry runs"):
                    dry = await dry_runs(pool, given.rounds)
                with console.status("replaying"):
                    each = await ways(pool, Path(home), given.some)
                with console.status("sending"):
                    each["to a receiver"] = await by_http(pool, url, given.some)
                with console.status("accepting"):
                    accepted = await accepting(pool, given.some, given.rounds)
    report(console, dry, each, accepted, version, given)


def report(
    console: Console,
    dry: dict[str, Figures],
    each: dict[str, Figures],
    accepted: dict[str, Figures],
    version: str,
    given: argparse.Namespace,
) -> None:
    table = Table("dry run by", "deliveries", "ms")
    for name, figures in dry.items():
        table.add_row(name, f"{figures['deliveries']:,.0f}", f"{figures['ms']:,.0f}")
    console.print(table)
    table = Table("way", "deliveries", "a second", "MiB, first quarter", "MiB, most")
    for name, figures in each.items():
        memory = [f"{figures[column]:,.0f}" for column in ("first_quarter_mib", "peak_mib")]
        table.add_row(name, f"{figures['deliveries']:,.0f}", f"{figures['per_second']:,.0f}", *memory)
    console.print(table)
    ratio = accepted["with"]["per_second"] / accepted["without"]["per_second"]
    console.print(f"inserts with the indexes of a selection and the feed: {ratio:.2f} x those without")
    console.print(
        f"{given.count:,} deliveries of 3 kB; PostgreSQL {version}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores"
    )
    if given.json is not None:
        machine = {"postgresql": version, "python": platform.python_version(), "cores": os.cpu_count()}
        setting = {"count": given.count, "some": given.some}
        found = {"dry_runs": dry, "ways": each, "inserts": accepted}
        given.json.write_text(json.dumps({"setting": setting, "machine": machine, **found}, indent=2) + "\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
