"""PgQueuer: `PgQueuer(AsyncpgDriver(connection)).run()`, after `install` and the autovacuum settings it recommends."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from peers import Enqueue, Go, Mode, Peer
from peers.ran import ran

BATCH = 1000


async def fill(url: str, jobs: int) -> None:
    connection = await asyncpg.connect(url)
    queries = Queries(AsyncpgDriver(connection))
    await queries.install()
    await queries.optimize_autovacuum()
    for first in range(1, jobs + 1, BATCH):
        payloads: list[bytes | None] = [b"%d" % n for n in range(first, min(first + BATCH, jobs + 1))]
        await queries.enqueue(["noop"] * len(payloads), payloads, [0] * len(payloads))
    await connection.close()


async def work(url: str, mode: Mode, jobs: int, go: Go) -> None:
    connection = await asyncpg.connect(url)
    pgqueuer = PgQueuer(AsyncpgDriver(connection))

    @pgqueuer.entrypoint("noop")
    async def noop(job: Job) -> None:
        ran(int(job.payload or b"0"))

    await go()
    if mode == "single":
        await pgqueuer.run(batch_size=1)
    elif mode == "tuned":
        await pgqueuer.run(batch_size=50)
    else:
        await pgqueuer.run()


@asynccontextmanager
async def enqueueing(url: str) -> AsyncGenerator[Enqueue]:
    connection = await asyncpg.connect(url)
    queries = Queries(AsyncpgDriver(connection))

    async def enqueue(number: int) -> None:
        await queries.enqueue("noop", b"%d" % number)

    yield enqueue
    await connection.close()


peer = Peer(
    name="pgqueuer",
    distributions=("pgqueuer", "asyncpg"),
    fill=fill,
    done="SELECT count(*) FROM pgqueuer_log WHERE status = 'successful'",
    work=work,
    enqueueing=enqueueing,
    settings={
        "single": "batch_size 1, one connection",
        "default": "batch_size 10, one connection",
        "tuned": "batch_size 50, one connection",
        "pickup": "the defaults, LISTEN",
    },
    uvloop=True,
)
