"""A wire to the database that a test can cut, hold, silence or lead elsewhere: an answer is lost or late at exactly one
point, or a proxy goes over to another server."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from webhooks.pool import Pool
from webhooks.settings import Settings

PORT = "5432"
COMMIT = "COMMIT\0"  # as a whole query: READ COMMITTED is part of every BEGIN
How = Literal["cut before", "cut after", "hold"]


class Wire:
    """Forwards connections to the server.

    Attributes:
        url: the address that goes through the wire.
        held: set once an answer is being held.
        freed: set to let held answers pass.
        cuts: how many connections were cut.
        passing: while it is not set, no byte is passed on any connection, though new ones are taken.
    """

    def __init__(self, url: str, directory: str) -> None:
        self.lead_to(url)
        self.url = make_conninfo(url, host=directory, port=PORT)
        self.held = asyncio.Event()
        self.freed = asyncio.Event()
        self.cuts = 0
        self.passing = asyncio.Event()
        self.passing.set()
        self._plans: list[tuple[bytes, How]] = []
        self._ends: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()

    def lead_to(self, url: str) -> None:
        """Lead new connections to this server; those that stand stay with theirs."""
        target = conninfo_to_dict(url)
        self._host, self._port = str(target["host"]), str(target.get("port") or PORT)

    def at(self, statement: str, how: How, *, times: int = 1) -> None:
        """Do this with the next connection that sends a statement: cut it before the server hears of it, or after the
        server has done it, or hold the answer."""
        self._plans += [(statement.encode(), how)] * times

    async def serve(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        if self._host.startswith("/"):
            from_server, to_server = await asyncio.open_unix_connection(f"{self._host}/.s.PGSQL.{self._port}")
        else:
            from_server, to_server = await asyncio.open_connection(self._host, int(self._port))
        self._ends |= {to_client, to_server}
        await self._join(from_client, to_client, from_server, to_server)
        for end in (to_client, to_server):
            end.transport.abort()
            self._ends.discard(end)

    async def _join(
        self,
        from_client: asyncio.StreamReader,
        to_client: asyncio.StreamWriter,
        from_server: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
    ) -> None:
        now: list[How] = []

        async def answers() -> None:
            while data := await from_server.read(65536):
                await self.passing.wait()
                if now == ["cut after"]:
                    return
                if now:
                    self.held.set()
                    await self.freed.wait()
                    now.clear()
                to_client.write(data)
                await to_client.drain()

        async def asks() -> None:
            while data := await from_client.read(65536):
                await self.passing.wait()
                plan = next((plan for plan in self._plans if plan[0] in data), None)
                if plan is not None:
                    self._plans.remove(plan)
                    now.append(plan[1])
                    self.cuts += plan[1] != "hold"
                if now == ["cut before"]:
                    return
                to_server.write(data)
                await to_server.drain()

        both = {asyncio.create_task(answers()), asyncio.create_task(asks())}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)

    async def close(self) -> None:
        self.freed.set()
        self.passing.set()
        for end in self._ends:
            end.transport.abort()
        await asyncio.gather(*self._serving)


@asynccontextmanager
async def pool_over_a_wire(url: str) -> AsyncGenerator[tuple[Pool, Wire]]:
    """The connections of another process, whose answers can be lost."""
    async with wired(url) as wire, Pool.open(wire.url, settings=Settings()) as pool:
        yield pool, wire


@asynccontextmanager
async def wired(url: str) -> AsyncGenerator[Wire]:
    with tempfile.TemporaryDirectory(prefix="wire-") as directory:
        wire = Wire(url, directory)
        server = await asyncio.start_unix_server(wire.serve, Path(directory) / f".s.PGSQL.{PORT}")
        try:
            yield wire
        finally:
            server.close()
            await wire.close()
