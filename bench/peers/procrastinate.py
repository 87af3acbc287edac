"""Procrastinate: `App`, `PsycopgConnector` and `run_worker_async`; its worker's default is one job at a time."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from procrastinate import App, PsycopgConnector

from peers import Enqueue, Go, Mode, Peer
from peers.ran import ran

BATCH = 1000


def _app(url: str, **pool: int) -> tuple[App, Any]:
    app = App(connector=PsycopgConnector(conninfo=url, **pool))

    @app.task(name="noop")
    async def noop(number: int) -> None:
        ran(number)

    return app, noop


async def fill(url: str, jobs: int) -> None:
    app, noop = _app(url)
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        for first in range(1, jobs + 1, BATCH):
            await noop.batch_defer_async(*({"number": n} for n in range(first, min(first + BATCH, jobs + 1))))


async def work(url: str, mode: Mode, jobs: int, go: Go) -> None:
    pool: dict[str, int] = {}
    options: dict[str, Any] = {}
    if mode == "single":
        pool, options = {"min_size": 1, "max_size": 1}, {"concurrency": 1, "listen_notify": False}
    if mode == "tuned":
        pool, options = {"min_size": 20, "max_size": 20}, {"concurrency": 50}
    app, _ = _app(url, **pool)
    async with app.open_async():
        await go()
        await app.run_worker_async(install_signal_handlers=False, **options)


@asynccontextmanager
async def enqueueing(url: str) -> AsyncGenerator[Enqueue]:
    app, noop = _app(url)
    async with app.open_async():

        async def enqueue(number: int) -> None:
            await noop.defer_async(number=number)

        yield enqueue


peer = Peer(
    name="procrastinate",
    distributions=("procrastinate", "psycopg"),
    fill=fill,
    done="SELECT count(*) FROM procrastinate_jobs WHERE status = 'succeeded'",
    work=work,
    enqueueing=enqueueing,
    settings={
        "single": "concurrency 1, a pool of one",
        "default": "concurrency 1, a pool of 4",
        "tuned": "concurrency 50, a pool of 20",
        "pickup": "the defaults, LISTEN",
    },
    uvloop=False,
)
