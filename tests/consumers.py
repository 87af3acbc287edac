"""What the tests of receiver, inbox and worker share: requests signed as their providers sign them, the parts put
together as `serve` does, and workers in processes of their own that a test may stop or kill.

As a script (`python tests/consumers.py NAME`) it is such a worker: it runs one of `CONSUMERS` on `DATABASE_URL` until
SIGTERM.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import psycopg
from gates import until
from starlette.types import ASGIApp

from webhooks import Claim, Consumer, Done, Event, Gate, GitHub, Ignore, Pool, Shortcut, Transaction
from webhooks.accept import Accepter
from webhooks.db import Ready
from webhooks.delivery import Delivery
from webhooks.inbox import insert
from webhooks.receiver import Receiver
from webhooks.serve.http import Connections, Limits
from webhooks.serve.servers import listen, serving
from webhooks.settings import Settings
from webhooks.worker import Worker

ROOT = Path(__file__).parent.parent
SECRET = "an invented secret"
LABEL = "patch"


# Requests


@dataclass(frozen=True)
class Request:
    """A request as a provider makes it."""

    path: str
    headers: list[tuple[str, str]]
    body: bytes

    def raw(self, *, length: int | None = None) -> bytes:
        """The request as it goes over the wire, with a Content-Length that may be wrong."""
        lines = [f"POST {self.path} HTTP/1.1", "Host: test", f"Content-Length: {length or len(self.body)}"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + self.body


def digest(body: bytes, secret: str = SECRET) -> str:
    return hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


def from_shortcut(body: bytes, *, signature: str | None = None, source: str = "shortcut") -> Request:
    headers = [("Content-Type", "application/json"), ("Payload-Signature", signature or digest(body))]
    return Request(f"/webhooks/{source}", headers, body)


def from_github(
    body: bytes,
    *,
    event: str = "push",
    guid: str | None = None,
    hook: str | None = "101",
    content_type: str = "application/json",
    signature: str | None = None,
    source: str = "github",
) -> Request:
    headers = [
        ("Content-Type", content_type),
        ("X-GitHub-Event", event),
        ("X-GitHub-Delivery", guid or str(uuid.uuid4())),
        ("X-Hub-Signature-256", signature or f"sha256={digest(body)}"),
    ]
    return Request(f"/webhooks/{source}", headers + ([("X-GitHub-Hook-ID", hook)] if hook else []), body)


def stories(*keys: int, id: str | None = None, action: str = "update", **columns: object) -> bytes:
    """A v1 body of Shortcut's: one story changed, or many in a bulk edit."""
    entries = [{"id": key, "entity_type": "story", "action": action, "name": f"story {key}", **columns} for key in keys]
    envelope = {"id": id or str(uuid.uuid4()), "version": "v1", "changed_at": "2026-06-12T10:00:00Z"}
    return json.dumps({**envelope, "actions": entries, "references": []}).encode()


def arrival(body: bytes, *, source: str = "shortcut", key: str | None = None, event: str = "push") -> Delivery:
    """A delivery past verification."""
    name = "x-github-event"
    headers = ((name, event),) if source == "github" else ()
    return Delivery(source, key or f"key-{uuid.uuid4()}", headers, body)


async def arrived(pool: Pool, *deliveries: Delivery) -> list[int]:
    """Store deliveries, and return their ids in that order."""
    async with pool.transaction() as tx:
        ids = await insert(tx, deliveries)
    return [ids[delivery.source, delivery.dedup_key] for delivery in deliveries]


# The parts together


def quick(**settings: Any) -> Settings:
    """Settings under which a test need not wait."""
    return Settings(**{"poll_s": 0.1, "backoff_base_s": 0.1, "backoff_max_s": 0.2, "drain_s": 5, **settings})


@dataclass
class Stack:
    """Receiver, inbox and worker of one process."""

    pool: Pool
    accepter: Accepter
    receiver: Receiver
    worker: Worker | None
    client: httpx.AsyncClient
    told: list[Ready] = field(default_factory=list[Ready])

    async def send(self, request: Request) -> httpx.Response:
        return await self.client.post(request.path, headers=request.headers, content=request.body)

    async def sql(self, text: Any, **params: object) -> list[dict[str, Any]]:
        async with self.pool.transaction() as tx:
            cursor = await tx.execute(text, params)
            return await cursor.fetchall() if cursor.description else []

    async def deliveries(self) -> list[dict[str, Any]]:
        return await self.sql("SELECT * FROM deliveries ORDER BY id")


@asynccontextmanager
async def stack(
    url: str,
    consumer: Consumer,
    *,
    work: bool = True,
    most_bytes: int = 1 << 20,
    settings: Settings | None = None,
    secrets: Mapping[str, Sequence[str]] | None = None,
    now: Callable[[], float] | None = None,
) -> AsyncIterator[Stack]:
    """Run a consumer on a database, with a client that speaks to its receiver without a socket."""
    async with AsyncExitStack() as ending:
        pool = await ending.enter_async_context(Pool.open(url, settings=settings or quick()))
        worker = Worker(pool, consumer) if work else None
        told: list[Ready] = []

        def moved(ready: Sequence[Ready]) -> None:
            told.extend(ready)
            if worker is not None:
                worker.know(ready)

        accepter = Accepter(pool, consumer, moved)
        if worker is not None:
            worker.start()
            ending.push_async_callback(worker.stop)
        await accepter.start()
        ending.push_async_callback(accepter.stop)
        signing: dict[str, Sequence[str]] = dict.fromkeys(consumer.sources, (SECRET,))
        signing.update(secrets or {})
        timed = {} if now is None else {"now": now}
        receiver = Receiver(consumer.sources, signing, accepter, max_body_bytes=most_bytes, **timed)
        client = httpx.AsyncClient(transport=httpx.ASGITransport(receiver), base_url="http://test", timeout=30)
        await ending.enter_async_context(client)
        yield Stack(pool, accepter, receiver, worker, client, told)


@asynccontextmanager
async def served(app: ASGIApp, limits: Limits | None = None) -> AsyncIterator[int]:
    """Serve an application on a socket of this machine, and yield the port."""
    sock = listen("127.0.0.1", 0, "--port")
    async with serving(app, [sock], "test", Connections(limits or Limits())):
        yield sock.getsockname()[1]


# Consumers, and workers in processes of their own

RUNS = "CREATE TABLE IF NOT EXISTS runs (what text NOT NULL, key bigint NOT NULL, pid integer NOT NULL)"


async def ran(what: str, key: int) -> None:
    """Note that something ran, whatever becomes of it: past any transaction and any fence."""
    async with await psycopg.AsyncConnection.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        await connection.execute("INSERT INTO runs (what, key, pid) VALUES (%s, %s, %s)", (what, key, os.getpid()))


def patching(held_by: Path | None = None) -> Consumer:
    """Sessions that are clarified and drafted; a draft is not finished while the file `held_by` exists."""
    shortcut, sessions = Shortcut(), Gate("patch_sessions", key="sc_id")

    @shortcut.on("story.update")
    async def open_session(event: Event, tx: Transaction) -> None:
        if LABEL not in event.data.get("labels", ()):
            raise Ignore(f"the label {LABEL} was not added")
        await sessions.open(tx, sc_id=event.data["story_id"], title=event.data["name"])

    @sessions.phase("received", claimed="clarifying", done=("clarified", "asked"))
    async def clarify(session: dict[str, Any], claim: Claim) -> Done:
        await ran("clarify", session["sc_id"])
        return claim.done("clarified")

    async def write_patch(key: int) -> str:
        await ran("draft", key)
        await until(lambda: held_by is None or not held_by.exists(), within_s=60)
        return f"diff by {os.getpid()}"

    @sessions.phase("clarified", claimed="drafting", done="drafted", lease=timedelta(seconds=1), max_attempts=3)
    async def draft(session: dict[str, Any], claim: Claim) -> Done:
        return claim.done(patch=await claim.once("draft", write_patch, session["sc_id"], retry_safe=True))

    return Consumer(gates=[sessions], sources=[shortcut, GitHub()])


def poisoned(*_: Path) -> Consumer:
    """A delivery about story 13 ends the process of whoever applies it."""
    shortcut, sessions = Shortcut(), Gate("patch_sessions", key="sc_id")
    sessions.phase("received", claimed="clarifying", done="clarified")

    @shortcut.on("story.update")
    async def open_session(event: Event, tx: Transaction) -> None:
        await sessions.open(tx, sc_id=event.data["story_id"], title=event.data["name"])
        if event.data["story_id"] == 13:
            os._exit(7)

    return Consumer(gates=[sessions], sources=[shortcut])


CONSUMERS: dict[str, Callable[..., Consumer]] = {"patching": patching, "poisoned": poisoned}


@contextmanager
def worker_process(url: str, name: str, *args: Path, **settings: object) -> Iterator[subprocess.Popen[str]]:
    """Run a worker in a process of its own; it is killed at the end if it still lives."""
    variables = {f"WEBHOOKS_{setting.upper()}": str(value) for setting, value in settings.items()}
    process = subprocess.Popen(
        [sys.executable, __file__, name, *map(str, args)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "DATABASE_URL": url, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        # A process that is stopped can be killed all the same.
        process.kill()
        process.communicate(timeout=10)


async def work(name: str, *args: str) -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    async with Pool.open() as pool:
        worker = Worker(pool, CONSUMERS[name](*map(Path, args)))
        worker.start()
        await stopping.wait()
        await worker.stop()


if __name__ == "__main__":
    asyncio.run(work(*sys.argv[1:]))
