"""`/readyz`: 503 exactly while a process cannot do what it is there for, which is found out by trying."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from typing import Any, LiteralString

import httpx
import psycopg
import pytest
from consumers import from_shortcut, quick, stack, stories
from gates import sql, until

from webhooks import Claim, Consumer, Done, Event, Gate, Pool, Shortcut, Transaction
from webhooks.control import Control
from webhooks.control.ask import Asker
from webhooks.control.health import Process
from webhooks.worker import Worker

HERE = ("127.0.0.1", 40_000)
ELSEWHERE = ("192.0.2.7", 40_000)


def consumer() -> Consumer:
    shortcut, sessions = Shortcut(), Gate("patch_sessions", key="sc_id")

    @shortcut.on("story.update")
    async def opened(event: Event, tx: Transaction) -> None:
        await sessions.open(tx, sc_id=event.data["story_id"], title="a story")

    @sessions.phase("received", claimed="clarifying", done="clarified")
    async def clarify(row: dict[str, Any], claim: Claim) -> Done:
        return claim.done()

    return Consumer(gates=[sessions], sources=[shortcut])


class Asked:
    """A process and a client of its control plane."""

    def __init__(self, pool: Pool, client: httpx.AsyncClient, receiver: httpx.AsyncClient | None = None) -> None:
        self.pool = pool
        self.client = client
        self.receiver = receiver

    async def ready(self) -> tuple[int, dict[str, Any]]:
        answer = await self.client.get("/readyz")
        return answer.status_code, answer.json()

    async def stores(self) -> bool:
        assert self.receiver is not None
        request = from_shortcut(stories(1))
        answer = await self.receiver.post(request.path, headers=request.headers, content=request.body)
        return answer.status_code == 202


@asynccontextmanager
async def client_of(
    process: Process, used: Consumer, peer: tuple[str, int] = HERE
) -> AsyncGenerator[httpx.AsyncClient]:
    control = Control(process, used)
    transport = httpx.ASGITransport(control.app(), client=peer)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:3100") as client:
            yield client
    finally:
        await control.close()
        await process.asker.close()


@asynccontextmanager
async def serving(
    url: str, *, work: bool = True, peer: tuple[str, int] = HERE, **settings: Any
) -> AsyncGenerator[Asked]:
    """As `serve` runs it."""
    used = consumer()
    async with stack(url, used, work=work, settings=quick(sweep_s=0.1, **settings)) as running:
        process = Process(Asker(running.pool), running.pool.settings, running.worker, running.accepter)
        async with client_of(process, used, peer) as client:
            asked = Asked(running.pool, client, running.client)
            if work:
                await until(lambda: running.worker is not None and running.worker.alive)
            yield asked


@asynccontextmanager
async def working(url: str) -> AsyncGenerator[Asked]:
    """As `work` runs it."""
    used = consumer()
    async with Pool.open(url, settings=quick(sweep_s=0.1)) as pool:
        worker = Worker(pool, used)
        worker.start()
        try:
            async with client_of(Process(Asker(pool), quick(), worker, None), used) as client:
                await until(lambda: worker.alive)
                yield Asked(pool, client)
        finally:
            await worker.stop()


def refusing(what: LiteralString, table: LiteralString, code: LiteralString = "P0001") -> list[LiteralString]:
    """A trigger that stands for whatever refuses."""
    return [
        f"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" RAISE EXCEPTION 'no room' USING ERRCODE = '{code}'; END $$",
        f"CREATE TRIGGER refuse BEFORE {what} ON {table} FOR EACH STATEMENT EXECUTE FUNCTION refuse()",
    ]


async def run(pool: Pool, statements: list[LiteralString]) -> None:
    for statement in statements:
        await sql(pool, statement)


@pytest.fixture
def role(database_url: str) -> Iterator[str]:
    """A role that may do what a process does, and owns nothing."""
    with psycopg.connect(database_url, autocommit=True) as owner:
        name = f"plain_{owner.info.dbname}"
        owner.execute(f"CREATE ROLE {name} LOGIN")
        owner.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {name}")
        owner.execute(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {name}")
    yield name
    with psycopg.connect(database_url, autocommit=True) as owner:
        owner.execute(f"DROP OWNED BY {name}")
        owner.execute(f"DROP ROLE {name}")


def as_role(url: str, role: str) -> str:
    return psycopg.conninfo.make_conninfo(url, user=role)


# ---- a receiver

NOT_STORED: dict[str, tuple[list[LiteralString], list[LiteralString], str]] = {
    "a trigger": (refusing("INSERT", "deliveries"), ["DROP TRIGGER refuse ON deliveries"], "no room"),
    "a full disk": (refusing("INSERT", "deliveries", "53100"), ["DROP TRIGGER refuse ON deliveries"], "no room"),
    "a check": (
        ["ALTER TABLE deliveries ADD CONSTRAINT never CHECK (origin <> 'received') NOT VALID"],
        ["ALTER TABLE deliveries DROP CONSTRAINT never"],
        "never",
    ),
    "no table": (
        ["ALTER TABLE deliveries RENAME TO elsewhere"],
        ["ALTER TABLE elsewhere RENAME TO deliveries"],
        "does not exist",
    ),
    "no index that says what a copy is": (
        ["ALTER TABLE deliveries DROP CONSTRAINT deliveries_once"],
        ["ALTER TABLE deliveries ADD CONSTRAINT deliveries_once UNIQUE (source, dedup_key, position)"],
        "ON CONFLICT",
    ),
    "no sequence": (
        ["ALTER SEQUENCE claim_seq MAXVALUE 1000 START 1 RESTART 901", "SELECT nextval('claim_seq')"],
        ["ALTER SEQUENCE claim_seq NO MAXVALUE"],
        "claim_seq",
    ),
}


@pytest.mark.parametrize("why", NOT_STORED)
async def test_a_receiver_that_cannot_store_is_not_ready_until_it_can(database_url: str, why: str) -> None:
    broken, mended, reason = NOT_STORED[why]
    async with serving(database_url, work=False) as asked, Pool.open(database_url, settings=quick()) as other:
        assert (await asked.ready())[0] == 200
        await run(other, broken)
        status, told = await asked.ready()
        assert (status, told["ready"], await asked.stores()) == (503, False, False)
        assert reason in told["checks"]["inbox"]
        await run(other, mended)

        async def back() -> bool:
            return (await asked.ready())[0] == 200

        await until(back)
        assert await asked.stores()


async def test_a_receiver_without_a_grant_is_not_ready(database_url: str, role: str) -> None:
    async with (
        Pool.open(database_url, settings=quick()) as owner,
        serving(as_role(database_url, role), work=False) as asked,
    ):
        assert (await asked.ready())[0] == 200
        await run(owner, [f"REVOKE INSERT ON deliveries FROM {role}"])
        status, told = await asked.ready()
        assert (status, told["checks"]["inbox"]) == (503, "permission denied for table deliveries")
        assert not await asked.stores()


async def test_a_receiver_of_a_database_that_only_reads_is_not_ready(database_url: str) -> None:
    async with serving(database_url, work=False) as asked:
        with psycopg.connect(database_url, autocommit=True) as owner:
            owner.execute(f"ALTER DATABASE {owner.info.dbname} SET default_transaction_read_only = on")
        await sql(
            asked.pool,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )
        status, told = await asked.ready()
        assert (status, told["ready"]) == (503, False)
        assert told["checks"]["database"] != "ok"
        assert not await asked.stores()


async def test_what_is_tried_leaves_nothing_and_uses_up_no_number_of_a_delivery(database_url: str) -> None:
    async with serving(database_url, work=False) as asked:
        for _ in range(3):
            assert (await asked.ready())[0] == 200
        assert await sql(asked.pool, "SELECT count(*) FROM deliveries") == [{"count": 0}]
        assert await asked.stores()
        assert await sql(asked.pool, "SELECT id FROM deliveries") == [{"id": 1}]
        assert await sql(asked.pool, "SELECT count(*) FROM attempts") == [{"count": 0}]


# ---- a worker

NOT_CLAIMED: dict[str, tuple[list[LiteralString], str]] = {
    "attempts cannot be written": (refusing("INSERT", "attempts"), "no room"),
    "deliveries cannot be moved": (refusing("UPDATE", "deliveries"), "no room"),
    "no attempts": (["ALTER TABLE attempts RENAME TO elsewhere"], "does not exist"),
}


@pytest.mark.parametrize("why", NOT_CLAIMED)
async def test_work_that_cannot_claim_is_not_ready_and_serve_is_and_says_so(database_url: str, why: str) -> None:
    broken, reason = NOT_CLAIMED[why]
    async with working(database_url) as work, serving(database_url) as serve:
        assert [(await asked.ready())[0] for asked in (work, serve)] == [200, 200]
        await run(serve.pool, broken)
        status, told = await work.ready()
        assert (status, told["ready"]) == (503, False)
        assert reason in told["checks"]["worker"]
        status, told = await serve.ready()
        assert (status, told["ready"]) == (200, True)
        assert reason in told["degraded"]["worker"]
        assert await serve.stores()


async def test_a_worker_that_is_not_at_work_leaves_a_receiver_ready_and_degraded(database_url: str) -> None:
    used = consumer()
    async with stack(database_url, used) as running:
        assert running.worker is not None
        await running.worker.stop()
        for accepter, status in ((running.accepter, 200), (None, 503)):
            process = Process(Asker(running.pool), quick(), running.worker, accepter)
            async with client_of(process, used) as client:
                answer = await client.get("/readyz")
                assert (answer.status_code, answer.json()["checks"]["worker"]) == (status, "not at work")
                assert answer.json().get("degraded", {}) == ({"worker": "not at work"} if accepter else {})


@pytest.mark.parametrize("start", [serving, working])
async def test_a_phase_that_can_be_neither_claimed_nor_swept_degrades_a_process_that_is_ready(
    database_url: str, start: Any
) -> None:
    names = {"patch_sessions.clarifying.claim", "patch_sessions.clarifying.sweep"}
    async with start(database_url) as asked:
        await sql(asked.pool, "ALTER TABLE patch_sessions RENAME TO elsewhere")

        async def degraded() -> set[str]:
            status, told = await asked.ready()
            assert (status, told["ready"]) == (200, True)
            return set(told.get("degraded", {}))

        async def told_of() -> bool:
            return names <= await degraded()

        await until(told_of)
        metrics = (await asked.client.get("/metrics")).text
        assert all(f'webhooks_degraded{{name="{name}"}} 1.0' in metrics for name in names)
        await sql(asked.pool, "ALTER TABLE elsewhere RENAME TO patch_sessions")

        async def well() -> bool:
            return not names & await degraded()

        await until(well)


# ---- who may know


@pytest.mark.parametrize(
    ("peer", "headers"),
    [
        (ELSEWHERE, {"host": "10.0.0.7:3100"}),
        (ELSEWHERE, {"host": "10.0.0.7:3100", "authorization": "Bearer wrong"}),
        (ELSEWHERE, {"host": "consumer.internal", "origin": "https://evil.example"}),
        (HERE, {"host": "10.0.0.7:3100"}),
        (HERE, {"x-forwarded-for": "192.0.2.7"}),
    ],
)
@pytest.mark.parametrize("token", [None, "right"])
async def test_anybody_may_ask_by_address_and_learns_names_true_and_false(
    database_url: str, peer: tuple[str, int], headers: dict[str, str], token: str | None
) -> None:
    async with serving(database_url, work=False, peer=peer, control_token=token) as asked:
        asked.pool.health.report("orders.packing", "the row 7 of Ms. Smith refuses")
        answer = await asked.client.get("/readyz", headers=headers)
        assert answer.json() == {
            "ready": True,
            "checks": {"database": True, "schema": True, "inbox": True},
            "degraded": {"orders.packing": True},
        }
        await run(asked.pool, refusing("INSERT", "deliveries"))
        asked.client.headers.update(headers)
        await until(lambda: _is(asked, 503))
        answer = await asked.client.get("/readyz")
        assert answer.json()["checks"] == {"database": True, "schema": True, "inbox": False}
        assert (await asked.client.post("/readyz")).status_code in (401, 403, 421)


async def _is(asked: Asked, status: int) -> bool:
    return (await asked.client.get("/readyz")).status_code == status


async def test_whoever_presents_the_token_learns_why(database_url: str) -> None:
    async with serving(database_url, work=False, peer=ELSEWHERE, control_token="right") as asked:
        asked.pool.health.report("orders.packing", "cannot be swept")
        answer = await asked.client.get(
            "/readyz", headers={"host": "10.0.0.7:3100", "authorization": "Bearer right", "x-forwarded-for": "x"}
        )
        assert answer.json() == {
            "ready": True,
            "checks": {"database": "ok", "schema": "ok", "inbox": "ok"},
            "degraded": {"orders.packing": "cannot be swept"},
        }


async def test_however_many_ask_without_a_token_it_is_tried_once_a_second(database_url: str) -> None:
    """Each trial takes a number for its visit, which is not given back."""

    async def tried(pool: Pool) -> int:
        return int((await sql(pool, "SELECT last_value / 100 AS n FROM claim_seq"))[0]["n"])

    async with serving(database_url, work=False, peer=ELSEWHERE) as asked:
        await asked.client.get("/readyz")
        before, began = await tried(asked.pool), asyncio.get_running_loop().time()
        for _ in range(5):
            await asyncio.gather(*(asked.client.get("/readyz") for _ in range(20)))
        took = asyncio.get_running_loop().time() - began
        assert await tried(asked.pool) - before <= 1 + took
