"""Absurd: `Absurd(url).start_worker()`; its schema comes from `absurdctl`. A task without steps is a plain job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import absurdctl
import psycopg
from absurd_sdk import Absurd, AsyncAbsurd

from peers import Enqueue, Go, Mode, Peer
from peers.ran import ran


async def fill(url: str, jobs: int) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(absurdctl.BUNDLED_SCHEMA_SQL)
        app = Absurd(connection)
        app.create_queue("default")
        with connection.transaction():
            for number in range(1, jobs + 1):
                app.spawn("noop", {"number": number}, queue="default")


async def work(url: str, mode: Mode, jobs: int, go: Go) -> None:
    if mode == "tuned":
        await _work_fifty(url, go)
        return
    app = Absurd(url)

    @app.register_task("noop")
    def noop(params: dict[str, Any], ctx: Any) -> None:
        ran(params["number"])

    await go()
    try:
        await asyncio.to_thread(app.start_worker)
    finally:
        app.stop_worker()


async def _work_fifty(url: str, go: Go) -> None:
    app = AsyncAbsurd(url)

    @app.register_task("noop")
    async def noop(params: dict[str, Any], ctx: Any) -> None:
        ran(params["number"])

    await go()
    await app.start_worker(concurrency=50, batch_size=50)


@asynccontextmanager
async def enqueueing(url: str) -> AsyncGenerator[Enqueue]:
    app = AsyncAbsurd(url)

    async def enqueue(number: int) -> None:
        await app.spawn("noop", {"number": number}, queue="default")

    yield enqueue
    await app.close()


peer = Peer(
    name="absurd-sdk",
    distributions=("absurd-sdk", "psycopg"),
    fill=fill,
    done="SELECT count(*) FROM absurd.r_default WHERE state = 'completed'",
    work=work,
    enqueueing=enqueueing,
    settings={
        "single": "concurrency 1, one connection",
        "default": "concurrency 1, one connection",
        "tuned": "async, concurrency and batch_size 50, one connection",
        "pickup": "the defaults, polled every 0.25 s",
    },
    uvloop=False,
)
