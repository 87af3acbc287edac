"""Chancy: `Queue("default")` and a `Worker`.

Its default executor is a process pool that is looked at every five seconds; for short asynchronous work its guide names
the executor on the event loop, and eager polling.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from chancy import Chancy, Job, Queue, Worker

from peers import Enqueue, Go, Mode, Peer
from peers.ran import ran

CONCURRENCY: dict[Mode, int] = {"single": 1, "tuned": 50, "pickup": 50}


async def noop(*, number: int) -> None:
    ran(number)


def _chancy(url: str) -> Chancy:
    return Chancy(url, log=logging.getLogger("chancy"))


def _job(number: int) -> Job:
    return Job.from_func(noop, kwargs={"number": number})


async def fill(url: str, jobs: int) -> None:
    async with _chancy(url) as chancy:
        await chancy.migrate()
        await chancy.declare(Queue("default"))
        async for _ in chancy.push_many([_job(n) for n in range(1, jobs + 1)]):
            pass


async def work(url: str, mode: Mode, jobs: int, go: Go) -> None:
    async with _chancy(url) as chancy:
        if mode in CONCURRENCY:
            queue = Queue("default", executor=Chancy.Executor.Async, concurrency=CONCURRENCY[mode], eager_polling=True)
            await chancy.declare(queue, upsert=True)
        await go()
        async with Worker(chancy, register_signal_handlers=False, shutdown_timeout=5) as worker:
            await worker.wait_for_shutdown()


@asynccontextmanager
async def enqueueing(url: str) -> AsyncGenerator[Enqueue]:
    async with _chancy(url) as chancy:

        async def enqueue(number: int) -> None:
            await chancy.push(_job(number))

        yield enqueue


peer = Peer(
    name="chancy",
    distributions=("chancy", "psycopg"),
    fill=fill,
    done="SELECT count(*) FROM chancy_jobs WHERE state = 'succeeded'",
    work=work,
    enqueueing=enqueueing,
    settings={
        "single": "async executor, concurrency 1, eager polling",
        "default": "process executor, a process a core, polled every 5 s",
        "tuned": "async executor, concurrency 50, eager polling",
        "pickup": "as tuned, LISTEN; its defaults take two jobs every 5 s",
    },
    uvloop=False,
)
