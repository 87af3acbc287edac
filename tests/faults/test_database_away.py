"""A database that freezes, dies or is cut off under load: refused within three seconds and then at once, accepting
again within five seconds of its return, and nothing that was answered with 2xx is lost.

The server is this module's own, because it is frozen and killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import psycopg
import pytest
from consumers import Stack, from_shortcut, patching, quick, stack, stories
from gates import elsewhere, until

from webhooks import Pool
from webhooks.embedded import EmbeddedServer
from webhooks.migrate import migrate
from webhooks.wire import Wire

ANSWERED_WITHIN_S = 3.5  # three seconds, and what a busy machine adds
BACK_WITHIN_S = 5
SENDERS = 8


class Server:
    """A PostgreSQL to be cruel to.

    Attributes:
        url: where it is reached, whenever it runs.
    """

    def __init__(self, home: Path) -> None:
        # What a process had written when it was killed is in the system's hands; only a power cut would need fsync.
        self._embedded = EmbeddedServer(home, {"fsync": "off", "full_page_writes": "off"})
        self._data = home.resolve() / "postgres"
        self.url = self._embedded.start()

    def _signal(self, number: signal.Signals) -> None:
        for process in psutil.process_iter(["name", "cwd"]):
            if process.info["name"] == "postgres" and process.info["cwd"] == str(self._data):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """None of its processes runs while the block does."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """All its processes die at once."""
        self._signal(signal.SIGKILL)

    def stop_at_once(self) -> None:
        """What `pg_ctl stop -m immediate` does: no checkpoint, no good-bye."""
        os.kill(int((self._data / "postmaster.pid").read_text().split()[0]), signal.SIGQUIT)

    async def start(self) -> None:
        """Start it again where it is gone."""
        await self._embedded.ensure_running()

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self._embedded.close()


@pytest.fixture(scope="module")
def only_server() -> Iterator[Server]:
    # Not pytest's own directory: PostgreSQL, as its own user, could not pass through it.
    with tempfile.TemporaryDirectory(prefix="webhooks-faults-") as home:
        server = Server(Path(home))
        try:
            asyncio.run(_migrated(server.url))
            yield server
        finally:
            server.close()


async def _migrated(url: str) -> None:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await migrate(connection)


@pytest.fixture
async def server(only_server: Server) -> Server:
    """The server, running and empty."""
    await only_server.start()
    async with await elsewhere(only_server.url) as connection:
        await connection.execute("TRUNCATE deliveries, attempts, effects, patch_sessions")
    return only_server


@dataclass(frozen=True)
class Answer:
    key: str
    status: int
    asked_at: float
    took_s: float


class Load:
    """Senders that post one new delivery after the other, and what they were answered."""

    def __init__(self, running: Stack) -> None:
        self.answers: list[Answer] = []
        self.over = False
        self._running = running
        self._loop = asyncio.get_running_loop()

    async def send(self) -> None:
        while not self.over:
            key = f"delivery-{len(self.answers)}-{self._loop.time()}"
            asked_at = self._loop.time()
            answer = await self._running.send(from_shortcut(stories(len(self.answers), id=key)))
            self.answers.append(Answer(key, answer.status_code, asked_at, self._loop.time() - asked_at))
            await asyncio.sleep(0.05)

    def since(self, moment: float) -> list[Answer]:
        """Answers to what was sent after a moment."""
        return [answer for answer in self.answers if answer.asked_at > moment]

    def acked(self) -> set[str]:
        return {answer.key for answer in self.answers if answer.status in (200, 202)}


@asynccontextmanager
async def load(running: Stack) -> AsyncIterator[Load]:
    """Senders at work while the block runs; at least some of what they sent is stored before it starts."""
    senders = Load(running)
    tasks = [asyncio.create_task(senders.send()) for _ in range(SENDERS)]
    try:
        await until(lambda: len(senders.acked()) > 50)
        yield senders
    finally:
        senders.over = True
        await asyncio.gather(*tasks)


async def stored(url: str) -> Counter[str]:
    async with await elsewhere(url) as connection:
        rows = await (await connection.execute("SELECT dedup_key FROM deliveries")).fetchall()
    return Counter(row["dedup_key"] for row in rows)


async def nothing_is_lost(server: Server, senders: Load) -> None:
    assert {answer.status for answer in senders.answers} <= {200, 202, 503}
    found = await stored(server.url)
    assert senders.acked() <= found.keys()
    assert set(found.values()) == {1}


async def refused(senders: Load, since: float) -> None:
    """Wait for the first refusal, and see that everything after it is refused at once."""
    await until(lambda: any(answer.status == 503 for answer in senders.since(since)), within_s=10)
    left = asyncio.get_running_loop().time()
    await until(lambda: len(senders.since(left)) > 20)
    assert max(answer.took_s for answer in senders.since(left)) < 0.5
    assert {answer.status for answer in senders.since(left)} == {503}
    assert max(answer.took_s for answer in senders.answers) < ANSWERED_WITHIN_S


async def accepting_again(senders: Load) -> None:
    back = asyncio.get_running_loop().time()
    await until(lambda: any(answer.status == 202 for answer in senders.since(back)), within_s=BACK_WITHIN_S)
    again = asyncio.get_running_loop().time()
    await until(lambda: len(senders.since(again)) > 50)
    assert {answer.status for answer in senders.since(again)} == {202}


async def until_worked_off(running: Stack) -> None:
    """The worker, too, goes on: wait until it has applied all."""

    async def all_have_ended() -> bool:
        with suppress(psycopg.Error):
            return await running.sql("SELECT id FROM deliveries WHERE status IN ('received', 'applying')") == []
        return False

    await until(all_have_ended, within_s=20)


@pytest.mark.invariant(2)
async def test_a_frozen_database_is_refused_within_three_seconds_and_accepted_from_again_within_five(
    server: Server,
) -> None:
    async with stack(server.url, patching(), settings=quick(lease_s=5)) as running:
        async with load(running) as senders:
            frozen = asyncio.get_running_loop().time()
            with server.frozen():
                await refused(senders, frozen)
            await accepting_again(senders)
        await until_worked_off(running)
        await nothing_is_lost(server, senders)


async def test_one_request_finds_out_for_all_that_the_database_is_frozen(server: Server) -> None:
    async with stack(server.url, patching(), work=False) as running:
        loop = asyncio.get_running_loop()
        with server.frozen():
            for key, (least_s, most_s) in enumerate([(2.5, ANSWERED_WITHIN_S), (0, 0.5), (0, 0.5)]):
                asked_at = loop.time()
                assert (await running.send(from_shortcut(stories(key)))).status_code == 503
                assert least_s < loop.time() - asked_at < most_s
            # Nor does anything go on waiting behind the answer.
            assert not [task for task in asyncio.all_tasks() if "_flush" in repr(task.get_coro())]


async def test_connecting_to_a_frozen_database_takes_no_longer_than_asked(server: Server) -> None:
    async with Pool.open(server.url, settings=quick()) as pool:
        wire = Wire(pool)
        assert await wire.connect(1)
        with server.frozen():
            asked_at = asyncio.get_running_loop().time()
            assert not await wire.connect(0.2)
            assert asyncio.get_running_loop().time() - asked_at < 1
        assert await wire.connect(5)
        await wire.close()


@pytest.mark.invariant(2)
@pytest.mark.parametrize("end", [Server.kill, Server.stop_at_once])
async def test_a_database_that_dies_under_load_loses_nothing_that_was_acked(
    server: Server, end: Callable[[Server], None]
) -> None:
    async with stack(server.url, patching(), settings=quick(lease_s=5)) as running:
        async with load(running) as senders:
            died = asyncio.get_running_loop().time()
            end(server)
            await refused(senders, died)
            await server.start()
            await accepting_again(senders)
        await until_worked_off(running)
        await nothing_is_lost(server, senders)


@pytest.mark.invariant(2)
@pytest.mark.invariant(3)
async def test_connections_killed_at_any_moment_cost_no_delivery_and_no_refusal(server: Server) -> None:
    async with stack(server.url, patching(), work=False) as running, await elsewhere(server.url) as other:
        async with load(running) as senders:
            kills = 0
            while kills < 30:
                killed = await other.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'webhooks'"
                )
                kills += killed.rowcount
                # As many answers on, at another place within a flush.
                count = len(senders.answers)
                await until(lambda count=count: len(senders.answers) > count + 3)
        await nothing_is_lost(server, senders)
        assert 503 not in {answer.status for answer in senders.answers}


async def test_an_accepter_that_starts_before_its_database_takes_deliveries_once_it_is_there(server: Server) -> None:
    server.kill()
    async with stack(server.url, patching(), work=False) as running:
        assert running.accepter.away
        assert (await running.send(from_shortcut(stories(1)))).status_code == 503
        await server.start()
        await until(lambda: not running.accepter.away, within_s=BACK_WITHIN_S)
        assert (await running.send(from_shortcut(stories(1)))).status_code == 202


async def test_everything_stops_though_the_database_is_frozen(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webhooks.accept.WITHIN_S", 1)
    monkeypatch.setattr("webhooks.gate.GIVE_BACK_WITHIN_S", 0.5)
    async with stack(server.url, patching(), settings=quick(drain_s=0)) as running:
        await running.send(from_shortcut(stories(1)))
        await until_worked_off(running)
        with server.frozen():
            answers = await asyncio.gather(*(running.send(from_shortcut(stories(key))) for key in range(2, 5)))
            assert {answer.status_code for answer in answers} == {503}
            # By now every lane waits for an answer of the database.
            assert running.worker is not None
            async with asyncio.timeout(15):
                await running.worker.stop()
                await running.accepter.stop()
            ours = ("lane ", "sweep", "hear", "webhooks-accept", "webhooks-listen", "webhooks-notify")
            assert not [task for task in asyncio.all_tasks() if task.get_name().startswith(ours)]
