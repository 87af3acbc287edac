"""Tables and columns may be called as they like: a reserved word, in capitals, or as an alias of our own."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from datetime import timedelta
from typing import Any, LiteralString

import pytest
from gates import ENVIRONMENT, elsewhere, sql
from psycopg.sql import SQL, Identifier
from pydantic import BaseModel

from webhooks import retention
from webhooks.consumer import Consumer
from webhooks.errors import ConfigurationError, Escalate
from webhooks.escalation import escalated, matching
from webhooks.gate import Gate
from webhooks.phase import Order
from webhooks.pool import Pool
from webhooks.retention import Ages
from webhooks.status import status
from webhooks.verify import tries, verify
from webhooks.why import why

DAY = timedelta(days=1)
# Reserved words, names of functions, aliases of ours, and what differs from another in the case of its letters only.
WORDS = (
    "order",
    "user",
    "place",
    "due",
    "mark_0",
    "t",
    "a",
    "m",
    "key",
    "claimed",
    "moved",
    "current_date",
    "createdAt",
)
TABLES: list[tuple[LiteralString, LiteralString, LiteralString]] = [
    ("order", "user", "user"),
    ("user", "place", "priority DESC, place"),
    ("due", "due", "due"),
    ("placed", "mark_0, place", "mark_0, place"),
    ("claimed", "claimed", "not_before, claimed"),
    ("moved", "t", "order desc nulls last, t"),
    ("late", "moved", '"user", moved'),
    ("freed", "m", "coalesce(priority, 0) DESC, m"),
    ("Orders", "orderId", "createdAt, orderId"),
    ("CamelCase", "tenant, orderId", '"createdAt", tenant, orderId'),
    ("größe", "straße", "straße"),
    ("t", "a, t, key", "key, createdAt"),
    ("select", "current_date", "current_date"),
]


def a_gate(name: LiteralString, key: LiteralString, order_by: LiteralString) -> Gate[dict[str, Any]]:
    gate = Gate(name, key=key, order_by=order_by)
    gate.phase("new", claimed="working", done="done", max_attempts=2)
    gate.phase("again", claimed="repeating", done="end", max_attempts=2)
    return gate


async def make(pool: Pool, gate: Gate[Any]) -> None:
    key = gate.key.columns
    columns = [SQL("{} text").format(Identifier(column)) for column in key]
    others = [*(column for column in WORDS if column not in key), "priority"]
    columns += [SQL("{} integer DEFAULT 7").format(Identifier(column)) for column in others]
    await sql(
        pool,
        SQL("CREATE TABLE {} ({}, PRIMARY KEY ({}), LIKE gated INCLUDING ALL)").format(
            Identifier(gate.table), SQL(", ").join(columns), SQL(", ").join(map(Identifier, key))
        ),
    )


async def mend(pool: Pool, url: str, gate: Gate[Any]) -> int:
    """Run what `check` prints, as a person would; return how much that was."""
    async with pool.transaction() as tx:
        faults = await gate.check(tx)
    async with await elsewhere(url) as connection:
        for fault in faults:
            await connection.execute(fault.split(": ", 2)[2].encode())
    async with pool.transaction() as tx:
        assert await gate.check(tx) == []
    return len(faults)


def a_row(gate: Gate[Any], number: int) -> dict[str, str]:
    return {column: f"{column} {number}" for column in gate.key.columns}


async def answer() -> int:
    return 1


@pytest.mark.parametrize(("name", "key", "order_by"), TABLES, ids=[name for name, _, _ in TABLES])
async def test_a_row_lives_its_whole_life_whatever_its_table_and_columns_are_called(
    pool: Pool, database_url: str, name: LiteralString, key: LiteralString, order_by: LiteralString
) -> None:
    gate = a_gate(name, key, order_by)
    consumer = Consumer(sources=[], gates=[gate])
    await make(pool, gate)
    assert await mend(pool, database_url, gate) == 3  # an index each for two ready statuses, one for the claimed ones
    keys = {number: gate.key.value(a_row(gate, number)) for number in range(1, 7)}
    async with pool.transaction() as tx:
        for number in keys:
            assert await gate.open(tx, **a_row(gate, number))
        assert not await gate.open(tx, **a_row(gate, 1))

    async with gate.claim(pool, "working", keys[1]) as claim:
        assert claim is not None
        assert (claim.key, claim.row["priority"]) == (keys[1], 7)
        assert await claim.once("call", answer) == 1
        async with claim.transaction() as tx:
            await tx.execute("SELECT 1")
        await claim.complete(priority=8)
    async with gate.claim_next(pool, "working", priority=7) as claim:
        assert claim is not None
        assert {claim.row[column] for column in WORDS if column not in gate.key.columns} == {7}
        await claim.complete()
    [known] = await gate.take_next(pool, "working", 1, keys=[keys[6]])
    assert known.key == keys[6]
    held = await gate.take_next(pool, "working", 5)
    assert len({one.key for one in [*held, known]}) == 4

    phase = gate.phases["working"]
    params = {**gate.key.lists([keys[6]]), "claim_seqs": [known.claim_seq], "lease": DAY}
    renew, still_held = gate.statements.renew(phase), gate.statements.still_held(phase)
    assert await sql(pool, still_held, **params) == [{"claim_seq": known.claim_seq}]
    assert await sql(pool, renew, **params) == [{"claim_seq": known.claim_seq}]

    async with held[0].held():
        raise Escalate("a person is to look")
    with pytest.raises(ValueError, match="broken"):
        async with held[1].held():
            raise ValueError("broken")

    async def put(text: LiteralString) -> None:
        await sql(pool, SQL("UPDATE {} SET {}").format(Identifier(name), SQL(text)))

    await put("lease_until = now() WHERE status = 'working'")
    assert await gate.sweep(pool, "working") == 2
    await put("status = 'working' WHERE status = 'new'")
    assert await gate.sweep(pool, "working") == 3
    await put("status = 'new', attempt_count = 2, claim_seq = NULL, lease_until = NULL WHERE status = 'working'")
    assert await gate.sweep(pool, "working") == 3

    label = held[0].label
    async with pool.transaction() as tx:
        assert (await why(tx, consumer, label, pool.settings)).row is not None
        [packet] = [packet for packet in await escalated(tx, consumer, of=name) if packet.row == label]
        assert packet.last_error == "a person is to look"
        assert label in await matching(tx, consumer, {gate.key.columns[0]: gate.key.values(held[0].key)[0]}, of=name)
        assert [line.escalated for line in await status(tx, consumer) if line.table == name] == [4, 0]
        assert all(check.holds for check in await verify(tx, consumer, pool.settings))
        assert sum((await tries(tx, consumer))[name].values()) == 6
        assert await gate.retry(tx, held[0].key, decided_by="Ann", reason="seen")
        assert await gate.advance(tx, held[0].key, ("new", "x"), "again")
    async with gate.claim(pool, "repeating", held[0].key) as claim:
        assert claim is not None
        await claim.complete()

    await sql(pool, "UPDATE effects SET ended_at = ended_at - interval '9 d'")
    await retention.prune(pool.transaction, consumer, Ages(effects=DAY), dry=False)
    assert await sql(pool, "SELECT * FROM effects") == []


@pytest.mark.parametrize(("name", "key", "order_by"), TABLES, ids=[name for name, _, _ in TABLES])
async def test_every_way_to_claim_is_read_by_the_server(
    pool: Pool, name: LiteralString, key: LiteralString, order_by: LiteralString
) -> None:
    gate = a_gate(name, key, order_by)
    await make(pool, gate)
    composed, phase = gate.statements, gate.phases["working"]
    marked = bool(composed.marks)
    rows = gate.key.lists([gate.key.value(a_row(gate, 1))])
    params: dict[str, Any] = {**dict.fromkeys(("fence", "count", "limit", "equal_order", "equal_user"), 1), **rows}
    params |= {"refusing": [], "table": name, "claimed_by": "x", "lease": DAY} | {
        f"mark_{n}": "infinity" if column == "not_before" else "1" for n, column in enumerate(composed.marks)
    }
    for statement in (
        composed.claim_next(phase, "last attempt", left_out=True, marked=marked),
        composed.claim_next(phase, "last chance", known=True),
        composed.waiting(phase, "last chance"),
        composed.last_chance_waits(phase),
        composed.give_back(phase),
        composed.release(phase, notify=True),
        composed.expire(phase, notify=True),
        composed.exhausted(phase, notify=True),
    ):
        texts = {**params, "first": DAY, "longest": DAY, "factor": 1, "delay": DAY, "refund": 0, "claim_seq": 1}
        texts |= {} if b"ANY(%(key" in statement else gate.key.params(gate.key.value(a_row(gate, 1)))
        await sql(pool, b"EXPLAIN " + statement, **{**texts, "escalate": False, "error": "", "outcome": "error"})


async def test_a_look_from_the_mark_gives_a_row_all_of_its_own_columns(pool: Pool) -> None:
    gate = a_gate("order", "user", "mark_0, user")
    await make(pool, gate)
    async with pool.transaction() as tx:
        await gate.open(tx, **a_row(gate, 1))
    assert gate.statements.marks == ("mark_0", "user")
    async with gate.claim_next(pool, "working") as claim:
        assert claim is not None
        assert claim.row == {"user": "user 1", "priority": 7} | dict.fromkeys({*WORDS} - {"user"}, 7)


class Line(BaseModel):
    user: str
    order: int
    createdAt: int


async def test_a_model_reads_columns_called_as_they_like(pool: Pool) -> None:
    gate = Gate("Orders", key="user", row=Line, order_by="order, createdAt")
    gate.phase("new", claimed="working", done="done")
    await make(pool, gate)
    async with pool.transaction() as tx:
        await gate.open(tx, user="a")
    async with gate.claim_next(pool, "working") as claim:
        assert claim is not None
        assert claim.row == Line(user="a", order=7, createdAt=7)


IN_A_SCHEMA = """
import asyncio, sys
import psycopg
from webhooks.consumer import Consumer
from webhooks.errors import Escalate
from webhooks.escalation import escalated
from webhooks.gate import Gate
from webhooks.migrate import migrate
from webhooks.pool import Pool
from webhooks.status import status
from webhooks.verify import verify

async def main() -> None:
    async with await psycopg.AsyncConnection.connect(sys.argv[1], autocommit=True) as connection:
        await migrate(connection, schema="Order")
        table = '"Order"."order" ("user" text PRIMARY KEY, LIKE "Order".gated INCLUDING ALL)'
        await connection.execute("CREATE TABLE " + table)
    gate = Gate("order", key="user")
    gate.phase("new", claimed="working", done="done")
    async with Pool.open(sys.argv[1]) as pool:
        async with pool.transaction() as tx:
            for fault in await gate.check(tx):
                print(fault)
            await gate.open(tx, user="a")
        async with gate.claim_next(pool, "working") as claim:
            raise Escalate("look")
        async with pool.transaction() as tx:
            [packet] = await escalated(tx, Consumer(sources=[], gates=[gate]))
            assert packet.row == "order:a"
            assert all(check.holds for check in await verify(tx, Consumer(sources=[], gates=[gate]), pool.settings))

asyncio.run(main())
"""


async def test_a_schema_may_be_a_reserved_word_in_capitals(database_url: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-c", IN_A_SCHEMA, database_url),
        env={**ENVIRONMENT, "WEBHOOKS_SCHEMA": "Order"},
        stdout=PIPE,
    )
    async with asyncio.timeout(30):
        output, _ = await process.communicate()
    assert process.returncode == 0
    assert output.decode().splitlines()[0] == (
        '"Order"."order": no index finds the rows in new: CREATE INDEX CONCURRENTLY order_new'
        ' ON "Order"."order" (not_before, "user") WHERE status = \'new\';'
    )


async def test_a_name_in_another_letter_case_is_told_as_the_database_has_it(pool: Pool) -> None:
    await make(pool, a_gate("Orders", "orderId", "orderId"))
    gate = a_gate("Orders", "orderid", "PRIORITY DESC, orderid, missing")
    async with pool.transaction() as tx:
        faults = await gate.check(tx)
    assert (
        '"Orders" has no column orderid, which is its gate\'s key: it has orderId; names are written as the '
        + ("database has them")
        in faults
    )
    assert any("no column PRIORITY, which its gate orders by: it has priority" in fault for fault in faults)
    assert any(fault.endswith("has no column missing, which its gate orders by") for fault in faults)


@pytest.mark.parametrize("key", ["status", "id, claim_seq"])
def test_a_key_that_changes_from_claim_to_claim_is_refused(key: LiteralString) -> None:
    with pytest.raises(ConfigurationError, match="gate's own"):
        Gate("orders", key=key)


@pytest.mark.parametrize(
    ("text", "columns", "ascending", "sql"),
    [
        ("order", ("order",), True, '"order"'),
        ("a ASC, b", ("a", "b"), True, '"a", "b"'),
        ("user desc , id", ("user", "id"), False, '"user" DESC, "id"'),
        ("a nulls  first", ("a",), False, '"a" NULLS FIRST'),
        ('"a b" Desc Nulls Last', ("a b",), False, '"a b" DESC NULLS LAST'),
        ("desc", ("desc",), True, '"desc"'),
        ("lower(a), b", (), False, "lower(a), b"),
        ("coalesce(a, b) desc", (), False, "coalesce(a, b) desc"),
        ("a + 1", (), False, "a + 1"),
        ("t.a", (), False, "t.a"),
    ],
)
def test_an_order_of_plain_columns_is_quoted_and_anything_else_is_sql(
    text: LiteralString, columns: tuple[str, ...], ascending: bool, sql: str
) -> None:
    order = Order.of(text)
    assert (order.columns, order.ascending, order.sql.as_string(None)) == (columns, ascending, sql)
