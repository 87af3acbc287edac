"""A wire to the database that a test can cut or hold, so that an answer is lost at exactly one point."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict, make_conninfo

PORT = "5432"


class Wire:
    """Forwards connections to the server, and loses answers on request.

    Attributes:
        url: the address that goes through the wire.
        passes: set while anything passes; cleared, both sides wait.
        cuts: how many connections were cut.
    """

    def __init__(self, url: str, directory: str) -> None:
        target = conninfo_to_dict(url)
        self._host, self._port = str(target["host"]), str(target.get("port") or PORT)
        self.url = make_conninfo(url, host=directory, port=PORT)
        self.passes = asyncio.Event()
        self.passes.set()
        self.cuts = 0
        self._lost: list[tuple[bytes, bool]] = []
        self._serving: set[asyncio.Task[None]] = set()

    def lose_answer(self, to: str, *, times: int = 1, after: bool = True) -> None:
        """Cut the connection that sends `to`: after the server has done it, or before it hears of it."""
        self._lost += [(to.encode(), after)] * times

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            if self._host.startswith("/"):
                there = await asyncio.open_unix_connection(f"{self._host}/.s.PGSQL.{self._port}")
            else:
                there = await asyncio.open_connection(self._host, int(self._port))
            try:
                await self._join(reader, writer, *there)
            finally:
                there[1].close()
        finally:
            writer.close()
            self._serving.discard(task)

    async def _join(
        self,
        from_client: asyncio.StreamReader,
        to_client: asyncio.StreamWriter,
        from_server: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
    ) -> None:
        deaf = asyncio.Event()

        async def answers() -> None:
            while data := await from_server.read(65536):
                await self.passes.wait()
                if deaf.is_set():
                    self.cuts += 1
                    return
                to_client.write(data)
                await to_client.drain()

        async def asks() -> None:
            while data := await from_client.read(65536):
                await self.passes.wait()
                wanted = next((loss for loss in self._lost if loss[0] in data), None)
                if wanted is not None:
                    self._lost.remove(wanted)
                    if not wanted[1]:
                        self.cuts += 1
                        return
                    deaf.set()
                to_server.write(data)
                await to_server.drain()

        both = {asyncio.create_task(answers()), asyncio.create_task(asks())}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            with suppress(ConnectionError):
                await asyncio.gather(*both, return_exceptions=True)

    async def close(self) -> None:
        self.passes.set()
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)


@asynccontextmanager
async def wired(url: str) -> AsyncIterator[Wire]:
    with tempfile.TemporaryDirectory(prefix="wire-") as directory:
        wire = Wire(url, directory)
        server = await asyncio.start_unix_server(wire.serve, Path(directory) / f".s.PGSQL.{PORT}")
        try:
            yield wire
        finally:
            server.close()
            await wire.close()
