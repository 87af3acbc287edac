"""Two consumers on one machine, one as deployed; deliveries go from it to the other through everything that happens.

The follower is killed, its connection is cut, the laptop sleeps, and each of the two consumers is restarted and killed,
while the provider keeps sending. In the suite there are some hundreds of deliveries. `TUNNEL_FULL=1` runs it with ten
thousand, and with a connection that dies without a word.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from consumers import Request, digest, from_github
from feeds import Line, lined
from gates import until
from processes import SECRETS, Process, empty_database, started, webhooks

FULL = bool(os.environ.get("TUNNEL_FULL"))
COUNT = 10_000 if FULL else 900
AT_ONCE = 8
AHEAD = 60
SECRET = SECRETS["WEBHOOKS_SECRET_GITHUB"]


@pytest.fixture
def local_url(server_url: str, tmp_path: Path) -> Iterator[str]:
    """A second database, for the consumer on the laptop."""
    with empty_database(server_url) as url:
        assert webhooks(tmp_path, "migrate", DATABASE_URL=url).returncode == 0
        yield url


def bodies(count: int) -> list[bytes]:
    """What senders send: spelling that no serialiser repeats, several encodings, all sizes, and nothing twice."""
    chance = random.Random(7)
    found: list[bytes] = []
    for number in range(count):
        shape = number % 5
        text = "é😊\\u00e9" * chance.randrange(1, 60)
        if number % 97 == 13:
            text *= 400
        if shape == 0:
            body = f'{{\n  "number":{number} , "text": "{text}", "f": 1.0, "big": 12345678901234567890}}\r\n'.encode()
        elif shape == 1:
            body = b"payload=%7B%22n%22%3A+" + str(number).encode() + b"%7D&more=%C3%A9+x"
        elif shape == 2:
            body = b"\xef\xbb\xbf" + json.dumps({"number": number}).encode()
        elif shape == 3:
            body = b"\xff\x00\r\n\n" + str(number).encode() + chance.randbytes(200)
        else:
            body = f"[{number}]".encode()
        found.append(body)
    found[count // 2] = b'{"large": "' + chance.randbytes(1 << 21).hex().encode() + b'"}'
    return found


def signed(number: int, body: bytes) -> Request:
    form = body.startswith(b"payload=")
    content_type = "application/x-www-form-urlencoded" if form else "application/json"
    signature = f"sha256={digest(body, SECRET)}"
    return from_github(body, guid=f"guid-{number}", content_type=content_type, signature=signature)


class Provider:
    """Sends each delivery until it is taken, as it is, several at once; not far ahead of what has been passed on, so
    that it still sends when things happen later.

    Attributes:
        taken: how many were.
        refused: how often one was not.
        ahead: how far it may be ahead.
    """

    def __init__(self, requests: list[Request], port: int, passed_on: Callable[[], int]) -> None:
        self.taken = 0
        self.refused = 0
        self.ahead = AHEAD
        self._passed_on = passed_on
        self._turn = asyncio.Lock()
        self._waiting = requests[::-1]
        self._url = f"http://127.0.0.1:{port}"

    async def run(self) -> None:
        async with httpx.AsyncClient(timeout=20, trust_env=False) as client:
            await asyncio.gather(*(self._send(client) for _ in range(AT_ONCE)))

    async def _send(self, client: httpx.AsyncClient) -> None:
        while True:
            async with self._turn:
                await until(lambda: self.taken - self._passed_on() < self.ahead, within_s=120)
            if not self._waiting:
                return
            request = self._waiting.pop()
            while not await self._is_taken(client, request):
                self.refused += 1
                await asyncio.sleep(0.1)
            self.taken += 1

    async def _is_taken(self, client: httpx.AsyncClient, request: Request) -> bool:
        try:
            answer = await client.post(self._url + request.path, headers=request.headers, content=request.body)
        except httpx.TransportError:
            return False
        assert answer.status_code in (200, 202, 503), answer.text
        return answer.status_code != 503


class Consumer:
    """A consumer on ports of its own, which it keeps when it is started again."""

    def __init__(self, stack: ExitStack, directory: Path, url: str, *options: str) -> None:
        directory.mkdir()
        self.port, self.control_port = free_port(), free_port()
        self._stack = stack
        self._directory = directory
        self._arguments = ("serve", "--port", str(self.port), "--control-port", str(self.control_port), *options)
        self._variables = {**SECRETS, "DATABASE_URL": url, "WEBHOOKS_POLL_S": "0.5"}
        self.starts = 0
        self.process = self._start()

    def _start(self) -> Process:
        self.starts += 1
        process = self._stack.enter_context(
            started(self._directory, *self._arguments, name=f"serve-{self.starts}", **self._variables)
        )
        process.says("control plane  http://")
        return process

    def restart(self, how: signal.Signals) -> None:
        self.process.signal(how)
        code = self.process.ends(30)
        assert code == (0 if how is signal.SIGTERM else -how)
        self.process = self._start()


class Laptop:
    """Where the tunnel runs, which may be killed, and sleep."""

    def __init__(self, stack: ExitStack, directory: Path, url: str, to: int) -> None:
        directory.mkdir()
        self._stack = stack
        self._directory = directory
        self._arguments = ("tunnel", url, "--to", f"http://127.0.0.1:{to}", "--source", "github")
        self.runs: list[Process] = []
        self.start("--since", "all")

    def start(self, *options: str) -> None:
        name = f"tunnel-{len(self.runs)}"
        self.runs.append(self._stack.enter_context(started(self._directory, *self._arguments, *options, name=name)))

    @property
    def tunnel(self) -> Process:
        return self.runs[-1]

    def kill(self) -> None:
        self.tunnel.signal(signal.SIGKILL)
        assert self.tunnel.ends() == -signal.SIGKILL
        self.start()

    @property
    def said(self) -> str:
        return "".join(run.output for run in self.runs)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def rows(url: str, order: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(
            "SELECT dedup_key, encode(sha256(body), 'hex'), headers::text FROM deliveries"  # noqa: S608 - of this test
            f" WHERE parent IS NULL ORDER BY {order}"
        ).fetchall()


@pytest.mark.invariant(12)
async def test_nothing_is_lost_and_nothing_changed_whatever_happens_on_the_way(
    database_url: str, local_url: str, tmp_path: Path
) -> None:
    sent = bodies(COUNT)
    chance = random.Random(11)
    with ExitStack() as stack, psycopg.connect(local_url, autocommit=True) as look:
        there = Consumer(stack, tmp_path / "there", database_url)
        here = Consumer(stack, tmp_path / "here", local_url, "--no-worker")

        def passed_on() -> int:
            row = look.execute("SELECT count(*) FROM deliveries").fetchone()
            return int(row[0]) if row else 0

        provider = Provider([signed(number, body) for number, body in enumerate(sent)], there.port, passed_on)
        async with lined(there.control_port) as (line, url):
            laptop = Laptop(stack, tmp_path / "laptop", url, here.port)

            async def sleeps(line: Line, *, half_open: bool) -> None:
                """The lid is closed; the world goes on; nobody told the other end, or nobody told us."""
                laptop.tunnel.signal(signal.SIGSTOP)
                provider.ahead = COUNT
                if half_open:
                    line.freeze()
                else:
                    line.cut()
                more = min(provider.taken + 30, COUNT)
                await until(lambda: provider.taken >= more, within_s=60)
                provider.ahead = AHEAD
                laptop.tunnel.signal(signal.SIGCONT)
                if half_open:
                    opened = line.opened
                    await until(lambda: line.opened > opened, within_s=60)  # its silence was noticed
                    line.thaw()

            async def kills() -> None:
                await asyncio.to_thread(laptop.kill)

            async def cuts() -> None:
                opened = line.opened
                line.cut()
                await until(lambda: line.opened > opened, within_s=60)

            faults: list[Any] = [
                kills,
                cuts,
                lambda: sleeps(line, half_open=False),
                lambda: asyncio.to_thread(there.restart, signal.SIGTERM),
                cuts,
                kills,
                lambda: asyncio.to_thread(here.restart, signal.SIGTERM),
                cuts,
                lambda: asyncio.to_thread(there.restart, signal.SIGKILL),
                lambda: sleeps(line, half_open=False),
                kills,
                lambda: asyncio.to_thread(here.restart, signal.SIGKILL),
            ]
            if FULL:
                faults = [*faults * 3, lambda: sleeps(line, half_open=True)]
            sending = asyncio.create_task(provider.run())
            for number, fault in enumerate(faults):
                enough = int((number + chance.random()) * COUNT * 0.9 / len(faults))
                await until(lambda enough=enough: passed_on() >= enough, within_s=120)
                await fault()
            await asyncio.wait_for(sending, 300)
            await until(lambda: passed_on() >= COUNT, within_s=300)
            laptop.tunnel.signal(signal.SIGINT)
            assert await asyncio.to_thread(laptop.tunnel.ends) == 0

        in_the_feed = rows(database_url, "accepted_xid, id")
        arrived = rows(local_url, "id")

    became = Counter(line.partition("→ ")[2][:13].strip() for line in laptop.said.splitlines() if "→ 20" in line)
    print(f"{COUNT} deliveries, {line.opened} connections, {provider.refused} posts repeated by the provider, {became}")
    # Nothing lost, nothing twice, nothing changed, and the order is the feed's.
    assert len(in_the_feed) == len(arrived) == COUNT
    assert [row[0] for row in arrived] == [row[0] for row in in_the_feed]
    assert arrived == in_the_feed
    right = {f"101:guid-{number}": hashlib.sha256(body).hexdigest() for number, body in enumerate(sent)}
    assert {key: sha256 for key, sha256, _ in arrived} == right
    # All of it happened, and what was in the middle of a kill was posted again.
    assert (there.starts, here.starts) == ((7, 7) if FULL else (3, 3))
    assert len(laptop.runs) == (10 if FULL else 4)
    assert line.opened > len(laptop.runs) + 3
    assert provider.refused > 0
    assert "is away, waiting for it" in laptop.said
    assert "going on where it left off" in laptop.said
    assert " waiting, the first since" in laptop.said
    assert "skipped" not in laptop.said
    assert all("Traceback" not in run.log for run in laptop.runs)
