"""Acked-and-durable deliveries a second, in one run, side by side.

Three servers, one after the other and round after round, each with the same receiver: ours (grouped commits), the same
with the database call removed (the limit), and one INSERT a request on a pool (the plain way). One load process sends
signed GitHub deliveries of about 4 KB over kept-alive connections, every one with a new id.

    .venv/bin/python bench/accept.py --seconds 5 --rounds 3 --json bench/accept.json

What counts is the ratio within the run: the machine is noisy.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import hmac
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
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, cast

import psycopg
import uvloop
from rich.console import Console
from rich.table import Table

from webhooks import Consumer, GitHub, Pool
from webhooks.accept import Accepter
from webhooks.delivery import Delivery
from webhooks.embedded import embedded
from webhooks.inbox import ACCEPT, MAX_ATTEMPTS, Accepted
from webhooks.migrate import migrate
from webhooks.observe import configure_logging
from webhooks.receiver import Receiver
from webhooks.serve.servers import serving

SECRET = "bench-secret"  # noqa: S105 - of this run only
BODY = json.dumps({"zen": "Keep it logically awesome.", "padding": "x" * 4040}).encode()
SIGNATURE = "sha256=" + hmac.new(SECRET.encode(), BODY, hashlib.sha256).hexdigest()
REQUEST = (
    "POST /webhooks/github HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    "User-Agent: GitHub-Hookshot/bench\r\nX-GitHub-Event: ping\r\nX-GitHub-Hook-ID: 1\r\n"
    f"X-Hub-Signature-256: {SIGNATURE}\r\nContent-Length: {len(BODY)}\r\nX-GitHub-Delivery: "
).encode()
VARIANTS = ("no database", "grouped", "one INSERT each")


class NoDatabase:
    """Answers as if it had stored."""

    async def accept(self, delivery: Delivery) -> Accepted:
        return Accepted(1, "accepted")


class OneInsertEach:
    """Stores each delivery by itself, on whatever connection of the pool is free."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def accept(self, delivery: Delivery) -> Accepted:
        params = {
            "sources": [delivery.source],
            "keys": [delivery.dedup_key],
            "origins": [delivery.origin],
            "headers": [json.dumps(delivery.headers)],
            "bodies": [delivery.body],
            "max_attempts": MAX_ATTEMPTS,
        }
        async with self._pool.connections.connection() as connection:
            row = await (await connection.execute(ACCEPT, params)).fetchone()
        return Accepted(0, "duplicate") if row is None else Accepted(row["id"], "accepted")


async def serve(variant: str, url: str, ready: Pipe) -> None:
    """Run one variant on a free port until told to stop."""
    consumer = Consumer(gates=[], sources=[GitHub()])
    async with Pool.open(url) as pool:
        accepter: Any
        if variant == "grouped":
            accepter = Accepter(pool, consumer, lambda moved: None)
            await accepter.start()
        else:
            accepter = NoDatabase() if variant == "no database" else OneInsertEach(pool)
        app = Receiver(consumer.sources, {"github": [SECRET]}, accepter, max_body_bytes=1 << 20)
        listener = socket.create_server(("127.0.0.1", 0))
        async with serving(app, [listener], variant):
            ready.send(listener.getsockname()[1])
            await asyncio.to_thread(ready.recv)
        if isinstance(accepter, Accepter):
            await accepter.stop()


def server_process(variant: str, url: str, ready: Pipe) -> None:
    configure_logging(level=logging.WARNING)
    uvloop.run(serve(variant, url, ready))


class Client(asyncio.Protocol):
    """One kept-alive connection: a request, its answer, the next request."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._send()

    def _send(self) -> None:
        if time.perf_counter() >= self.run.until:
            self.transport.close()
            return
        self.run.sent += 1
        self.started = time.perf_counter()
        self.transport.write(REQUEST + f"{self.run.name}-{self.run.sent}\r\n\r\n".encode() + BODY)

    def data_received(self, data: bytes) -> None:
        self.received += data
        if b"}" not in self.received:
            return
        if not self.received.startswith(b"HTTP/1.1 202"):
            self.run.failed += 1
        self.run.seconds.append(time.perf_counter() - self.started)
        self.received = b""
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        self.run.open -= 1
        if self.run.open == 0:
            self.run.over.set()


class Run:
    """One measurement: how many answers, how late, how many that were no 202."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name = name
        self.until = time.perf_counter() + seconds
        self.sent = self.failed = self.open = 0
        self.seconds: list[float] = []
        self.over = asyncio.Event()


async def load(port: int, name: str, seconds: float, connections: int) -> Run:
    run = Run(name, seconds)
    run.open = connections
    loop = asyncio.get_running_loop()
    for _ in range(connections):
        await loop.create_connection(lambda: Client(run), "127.0.0.1", port)
    await asyncio.wait_for(run.over.wait(), seconds + 30)
    return run


def measure(variant: str, url: str, seconds: float, connections: int) -> dict[str, float]:
    """Start a server, warm it up for a second, and measure."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=server_process, args=(variant, url, there))
    process.start()
    try:
        if not here.poll(30):
            raise TimeoutError(f"the server for {variant} did not start")
        port = here.recv()
        uvloop.run(load(port, f"warm-{os.getpid()}-{time.time_ns()}", 1.0, connections))
        run = uvloop.run(load(port, f"{os.getpid()}-{time.time_ns()}", seconds, connections))
        here.send("stop")
        process.join(15)
    finally:
        if process.is_alive():
            process.kill()
    ordered = sorted(run.seconds)
    return {
        "per_second": len(ordered) / seconds,
        "p50_ms": ordered[len(ordered) // 2] * 1000,
        "p99_ms": ordered[int(len(ordered) * 0.99)] * 1000,
        "failed": run.failed,
    }


async def prepare(url: str) -> str:
    async with await psycopg.AsyncConnection[Any].connect(url, autocommit=True, row_factory=psycopg.rows.dict_row) as c:
        await migrate(c)
        row = await (await c.execute("SHOW server_version")).fetchone()
        return str(row["server_version"])


async def main(arguments: Sequence[str]) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=5.0, help="how long each measurement lasts")
    options.add_argument("--rounds", type=int, default=3, help="how often each variant is measured")
    options.add_argument("--connections", type=int, default=64)
    options.add_argument("--json", type=Path, help="where to write the figures")
    given = options.parse_args(arguments)
    console = Console()
    rounds: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory() as home:
        async with embedded(Path(home)) as url:
            version = await prepare(url)
            for number in range(given.rounds):
                for variant in VARIANTS:
                    with console.status(f"round {number + 1} of {given.rounds}: {variant}"):
                        result = await asyncio.to_thread(measure, variant, url, given.seconds, given.connections)
                    rounds[variant].append(result)
    report(console, rounds, version, given)


def report(
    console: Console, rounds: dict[str, list[dict[str, float]]], version: str, given: argparse.Namespace
) -> None:
    medians = {
        variant: {name: statistics.median(result[name] for result in results) for name in results[0]}
        for variant, results in rounds.items()
    }
    ours = medians["grouped"]["per_second"]
    table = Table("variant", "a second", "p50 ms", "p99 ms", "not 202", "ours is")
    for variant, figures in medians.items():
        table.add_row(
            variant,
            f"{figures['per_second']:,.0f}",
            f"{figures['p50_ms']:.1f}",
            f"{figures['p99_ms']:.1f}",
            f"{figures['failed']:.0f}",
            f"{ours / figures['per_second']:.2f} x",
        )
    console.print(table)
    console.print(
        f"{given.connections} connections, bodies of {len(BODY)} bytes, {given.rounds} rounds of {given.seconds:g} s, "
        f"medians; PostgreSQL {version}, Python {platform.python_version()}, {os.cpu_count()} cores"
    )
    if given.json is not None:
        setting = {"connections": given.connections, "body_bytes": len(BODY), "seconds": given.seconds}
        machine = {"postgresql": version, "python": platform.python_version(), "cores": os.cpu_count()}
        given.json.write_text(
            json.dumps({"setting": setting, "machine": machine, "medians": medians, "rounds": rounds}, indent=2) + "\n"
        )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
