"""Oban: a worker class and `async with Oban(pool=…, queues={"default": 10})`, as its guides write it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import orjson
from oban import Job, Oban, worker
from oban.schema import install
from psycopg.types.json import set_json_dumps, set_json_loads

from peers import Enqueue, Go, Mode, Peer
from peers.ran import ran

LIMITS: dict[Mode, int] = {"single": 1, "default": 10, "tuned": 50, "pickup": 10}


@worker()
class Noop:
    async def process(self, job: Job) -> None:
        ran(job.args["number"])


async def fill(url: str, jobs: int) -> None:
    pool = await Oban.create_pool(url)
    await install(pool)
    await Oban(pool=pool).enqueue_many(Noop.new({"number": n}) for n in range(1, jobs + 1))
    await pool.close()


async def work(url: str, mode: Mode, jobs: int, go: Go) -> None:
    # Its own command does the same.
    set_json_dumps(orjson.dumps)
    set_json_loads(orjson.loads)
    pool = await Oban.create_pool(url)
    await go()
    try:
        async with Oban(pool=pool, queues={"default": LIMITS[mode]}):
            await asyncio.Event().wait()
    finally:
        await pool.close()


@asynccontextmanager
async def enqueueing(url: str) -> AsyncGenerator[Enqueue]:
    pool = await Oban.create_pool(url)
    oban = Oban(pool=pool)

    async def enqueue(number: int) -> None:
        await oban.enqueue(Noop.new({"number": number}))

    yield enqueue
    await pool.close()


peer = Peer(
    name="oban",
    distributions=("oban", "psycopg"),
    fill=fill,
    done="SELECT count(*) FROM oban_jobs WHERE state = 'completed'",
    work=work,
    enqueueing=enqueueing,
    settings={
        "single": "queue limit 1, a pool of 10",
        "default": "queue limit 10, a pool of 10",
        "tuned": "queue limit 50, a pool of 10",
        "pickup": "the defaults, LISTEN",
    },
    uvloop=True,
)
