"""What the way through a feed adds, in one run: latency and rate, against posting directly to the same receiver.

Two consumers on one machine, each a `webhooks serve` of its own, and between them a `webhooks tunnel`. Latency is taken
at a steady trickle, as webhooks come, from the moment of sending to the moment at which the receiver here has stored a
delivery (`received_at`; all clocks are this machine's). The rate is that of catching up: deliveries wait on the other
side and come as fast as they do, one after the other, which is what keeps their order. Posting directly one after the
other is the limit of that; what many connections reach is shown beside it.

    .venv/bin/python bench/tunnel.py --trickle 20 --seconds 4 --waiting 1000 --rounds 3 --json bench/tunnel.json

What counts is the ratio within the run: the machine is noisy.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import hmac
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
from psycopg.sql import SQL, Identifier
from rich.console import Console
from rich.table import Table

from webhooks.embedded import EmbeddedServer
from webhooks.migrate import migrate

ROOT = Path(__file__).parent.parent
SECRET = "bench-secret"  # noqa: S105 - of this run only
APP = "from webhooks import Consumer, GitHub\n\nconsumer = Consumer(gates=[], sources=[GitHub()])\n"
BODY = json.dumps({"zen": "Keep it logically awesome.", "padding": "x" * 4040}).encode()
SIGNATURE = "sha256=" + hmac.new(SECRET.encode(), BODY, hashlib.sha256).hexdigest()
AT_ONCE = 32
WITHIN_S = 120.0
DIRECT, FEED, MANY = "direct", "through the feed", f"direct, {AT_ONCE} at once"


class Consumer:
    """A database, and later a `webhooks serve` on it."""

    def __init__(self, stack: ExitStack, home: Path, name: str, server: str) -> None:
        self.directory = home / name
        self.directory.mkdir()
        (self.directory / "benched.py").write_text(APP)
        with psycopg.connect(server, autocommit=True) as admin:
            admin.execute(SQL("CREATE DATABASE {}").format(Identifier(name)))
        self.url = psycopg.conninfo.make_conninfo(server, dbname=name)
        asyncio.run(self._migrate())
        self.port, self.control_port = free_port(), free_port()
        arguments = ("serve", "--port", str(self.port), "--control-port", str(self.control_port), "--no-worker")
        stack.enter_context(run(self.directory, self.url, *arguments))
        eventually(lambda: answers(f"http://127.0.0.1:{self.control_port}/readyz"))
        self.connection = stack.enter_context(psycopg.connect(self.url, autocommit=True))

    async def _migrate(self) -> None:
        async with await psycopg.AsyncConnection[Any].connect(
            self.url, autocommit=True, row_factory=psycopg.rows.dict_row
        ) as connection:
            await migrate(connection)

    def stored(self, prefix: str) -> dict[str, float]:
        """When each delivery of a run was stored, by its key."""
        found = self.connection.execute(
            "SELECT dedup_key, extract(epoch FROM received_at)::float8 FROM deliveries WHERE dedup_key LIKE %s",
            (f"1:{prefix}-%",),
        )
        return dict(found.fetchall())

    def count(self, prefix: str) -> int:
        row = self.connection.execute(
            "SELECT count(*) FROM deliveries WHERE dedup_key LIKE %s", (f"1:{prefix}-%",)
        ).fetchone()
        return int(row[0]) if row else 0


@contextmanager
def run(directory: Path, url: str, *arguments: str) -> Generator[subprocess.Popen[bytes]]:
    variables = {"DATABASE_URL": url, "WEBHOOKS_SECRET_GITHUB": SECRET, "WEBHOOKS_APP": "benched:consumer"}
    with (directory / f"{arguments[0]}.log").open("ab") as log:
        process = subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, "-m", "webhooks", *arguments],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
            stdout=log,
            stderr=log,
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WITHIN_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("it did not come true in time")
        time.sleep(0.05)


class Sender:
    """A provider that sends to one receiver, and notes when."""

    def __init__(self, port: int, prefix: str) -> None:
        self.sent: dict[str, float] = {}
        self._url = f"http://127.0.0.1:{port}/webhooks/github"
        self._prefix = prefix

    async def post(self, client: httpx.AsyncClient, number: int) -> None:
        headers = {
            "content-type": "application/json",
            "x-github-event": "ping",
            "x-github-hook-id": "1",
            "x-github-delivery": f"{self._prefix}-{number}",
            "x-hub-signature-256": SIGNATURE,
        }
        self.sent[f"1:{self._prefix}-{number}"] = time.time()
        answer = await client.post(self._url, content=BODY, headers=headers)
        if answer.status_code != 202:
            raise RuntimeError(f"the receiver answered {answer.status_code}")

    async def trickle(self, a_second: float, seconds: float) -> None:
        """Send so many a second, whatever becomes of those before."""
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client, asyncio.TaskGroup() as group:
            start = time.perf_counter()
            for number in range(int(a_second * seconds)):
                await asyncio.sleep(max(0.0, start + number / a_second - time.perf_counter()))
                group.create_task(self.post(client, number))

    async def all(self, count: int, at_once: int) -> float:
        """Send so many as fast as they are taken, and return how many a second that was."""
        numbers = iter(range(count))

        async def some(client: httpx.AsyncClient) -> None:
            for number in numbers:
                await self.post(client, number)

        start = time.perf_counter()
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            await asyncio.gather(*(some(client) for _ in range(at_once)))
        return count / (time.perf_counter() - start)


def latency(seconds: Sequence[float]) -> dict[str, float]:
    taken = sorted(seconds)
    return {"p50_ms": taken[len(taken) // 2] * 1000, "p99_ms": taken[int(len(taken) * 0.99)] * 1000}


def measure(given: argparse.Namespace, console: Console, home: Path, server: str) -> dict[str, dict[str, float]]:
    with ExitStack() as stack:
        there, here = (Consumer(stack, home, name, server) for name in ("there", "here"))
        tunnel = ("tunnel", f"http://127.0.0.1:{there.control_port}", "--to", f"http://127.0.0.1:{here.port}")
        taken: dict[str, list[float]] = {DIRECT: [], FEED: []}
        with run(here.directory, here.url, *tunnel):
            eventually(lambda: "waiting" in (here.directory / "tunnel.log").read_text())
            for round_ in range(given.rounds + 1):  # the first one warms up
                for number, (way, port) in enumerate(((DIRECT, here.port), (FEED, there.port))):
                    name = f"trickle-{round_}-{number}"
                    with console.status(f"{given.trickle:g} a second, {way}, round {round_} of {given.rounds}"):
                        sender = Sender(port, name)
                        asyncio.run(sender.trickle(given.trickle, given.seconds))
                        eventually(lambda name=name, sender=sender: here.count(name) == len(sender.sent))
                    stored = here.stored(name)
                    taken[way] += [stored[key] - at for key, at in sender.sent.items() if round_]
        rates: dict[str, list[float]] = {DIRECT: [], FEED: [], MANY: []}
        for round_ in range(given.rounds):
            with console.status(f"{given.waiting} waiting, round {round_ + 1} of {given.rounds}"):
                rates[DIRECT].append(asyncio.run(Sender(here.port, f"one-{round_}").all(given.waiting, 1)))
                rates[MANY].append(asyncio.run(Sender(here.port, f"many-{round_}").all(given.waiting, AT_ONCE)))
                name = f"waiting-{round_}"
                asyncio.run(Sender(there.port, name).all(given.waiting, AT_ONCE))
                with run(here.directory, here.url, *tunnel):
                    eventually(lambda name=name: here.count(name) == given.waiting)
                times = sorted(here.stored(name).values())
                rates[FEED].append((len(times) - 1) / (times[-1] - times[0]))
    figures = {way: {"per_second": statistics.median(found)} for way, found in rates.items()}
    for way, found in taken.items():
        figures[way] |= latency(found)
    for name in ("p50_ms", "p99_ms"):
        figures[FEED][f"added_{name}"] = figures[FEED][name] - figures[DIRECT][name]
    return figures


def report(console: Console, figures: dict[str, dict[str, float]], version: str, given: argparse.Namespace) -> None:
    table = Table("way", "p50 ms", "p99 ms", "added p50", "added p99", "a second", "of direct")
    direct = figures[DIRECT]["per_second"]
    for way, found in figures.items():
        cells = [f"{found[name]:.1f}" if name in found else "" for name in ("p50_ms", "p99_ms")]
        cells += [f"{found[name]:.1f}" if name in found else "" for name in ("added_p50_ms", "added_p99_ms")]
        table.add_row(way, *cells, f"{found['per_second']:,.0f}", f"{found['per_second'] / direct:.2f} x")
    console.print(table)
    console.print(
        f"{given.rounds} rounds; latency at {given.trickle:g} a second for {given.seconds:g} s, rate of "
        f"{given.waiting} waiting (median); bodies of {len(BODY)} bytes; "
        f"PostgreSQL {version}, Python {platform.python_version()}, {os.cpu_count()} cores"
    )
    if given.json is not None:
        names = ("trickle", "seconds", "waiting", "rounds")
        setting = {**{name: getattr(given, name) for name in names}, "body_bytes": len(BODY)}
        machine = {"postgresql": version, "python": platform.python_version(), "cores": os.cpu_count()}
        given.json.write_text(json.dumps({"setting": setting, "machine": machine, "ways": figures}, indent=2) + "\n")


def main(arguments: Sequence[str]) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--trickle", type=float, default=20.0, help="deliveries a second while latency is taken")
    options.add_argument("--seconds", type=float, default=4.0, help="for how long in each round")
    options.add_argument("--waiting", type=int, default=1000, help="how many wait when the rate is taken")
    options.add_argument("--rounds", type=int, default=3, help="how often each way is measured")
    options.add_argument("--json", type=Path, help="where to write the figures")
    given = options.parse_args(arguments)
    console = Console()
    with tempfile.TemporaryDirectory() as directory:
        server = EmbeddedServer(Path(directory))
        try:
            url = server.start()
            with psycopg.connect(url) as connection:
                version = connection.info.parameter_status("server_version") or "?"
            figures = measure(given, console, Path(directory), url)
        finally:
            server.close()
    report(console, figures, version, given)


if __name__ == "__main__":
    main(sys.argv[1:])
