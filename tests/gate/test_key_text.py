"""One row, one name: the text of a key, whoever writes it, and the types that have one."""

from __future__ import annotations

import enum
import uuid
from decimal import Decimal
from typing import Any, LiteralString

import pytest
from consumers import arrival, arrived, stories
from gates import elsewhere, make_tickets, sql, tickets_gate

from webhooks import Consumer, Event, Gate, Park, Shortcut, Transaction, apply
from webhooks.decision import retry
from webhooks.errors import ConfigurationError
from webhooks.escalation import escalated
from webhooks.inbox import inbox
from webhooks.phase import Key
from webhooks.pool import Pool
from webhooks.rows import named
from webhooks.selection import Selection
from webhooks.selection.choice import chosen
from webhooks.selection.names import Names, unknown
from webhooks.selection.reader import Reader
from webhooks.settings import Settings
from webhooks.verify import verify
from webhooks.why import why

UUID = uuid.UUID("0f6c1a2e-9d5b-4a3c-8b7d-112233445566")


class Number(enum.IntEnum):
    SEVEN = 7


def things(key: LiteralString = "key") -> Gate[dict[str, Any]]:
    gate: Gate[dict[str, Any]] = Gate("things", key=key)
    gate.phase("new", claimed="making", done="made", max_attempts=2)
    return gate


async def table(pool: Pool, *columns: str, key: str = "key") -> None:
    lines = ", ".join([*columns, f"PRIMARY KEY ({key})", "LIKE gated INCLUDING ALL"])
    await sql(pool, f"CREATE TABLE things ({lines})".encode())
    await sql(pool, f"CREATE INDEX ON things (not_before, {key}) WHERE status = 'new'".encode())
    await sql(pool, f"CREATE INDEX ON things ({key}) WHERE status = 'making'".encode())


async def called(amount: int) -> int:
    return amount


# ---- which types


@pytest.mark.parametrize(
    "column",
    [
        "key smallint",
        "key integer",
        "key bigint",
        "key text",
        "key varchar(20)",
        'key varchar COLLATE "C"',
        "key uuid",
        "key code",
    ],
)
async def test_a_type_of_which_each_value_is_written_in_one_way_may_be_a_key(pool: Pool, column: str) -> None:
    await sql(pool, "CREATE DOMAIN code AS text CHECK (value <> '')")
    await table(pool, column)
    async with pool.transaction() as tx:
        assert await things().check(tx) == []


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("key timestamptz", "2026-06-12 10:00+02"),
        ("key timestamp", "2026-06-12"),
        ("key date", "2026-06-12"),
        ("key char(5)", "abc"),
        ("key boolean", "yes"),
        ("key bytea", "abc"),
        ("key inet", "10.0.0.1"),
        ("key numeric", "7"),
        ("key double precision", "7"),
        ("key interval", "1 day"),
        ("key name", "abc"),
        ("key mood", "fine"),
    ],
)
async def test_any_other_type_is_refused_with_what_mends_it(
    pool: Pool, database_url: str, column: str, value: str
) -> None:
    await sql(pool, "CREATE TYPE mood AS ENUM ('fine')")
    await table(pool, column)
    await sql(pool, "INSERT INTO things (key, status) VALUES (%(value)s, 'new')", value=value)
    async with pool.transaction() as tx:
        [fault] = await things().check(tx)
    assert fault.startswith("things: column key is in the key and ")
    async with await elsewhere(database_url) as connection:
        await connection.execute(fault[fault.index("ALTER TABLE") :].encode())
    async with pool.transaction() as tx:
        assert await things().check(tx) == []


async def test_texts_that_differ_and_are_equal_are_no_keys(pool: Pool, database_url: str) -> None:
    # Not every server is built with ICU, which alone has such collations.
    await sql(pool, 'CREATE COLLATION either FROM "C"')
    await table(pool, "key varchar(20) COLLATE either")
    await sql(pool, "UPDATE pg_collation SET collisdeterministic = false WHERE collname = 'either'")
    async with pool.transaction() as tx:
        [fault] = await things().check(tx)
    assert "has a collation that holds different texts for equal" in fault
    async with await elsewhere(database_url) as connection:
        await connection.execute(fault[fault.index("ALTER TABLE") :].encode())
    async with pool.transaction() as tx:
        assert await things().check(tx) == []


async def test_each_part_of_a_key_is_looked_at(pool: Pool) -> None:
    await table(pool, "a bigint", "b date", "c text", key="a, b, c")
    async with pool.transaction() as tx:
        [fault] = await things("a, b, c").check(tx)
    assert "column b is in the key and is date" in fault


# ---- the text is the row's, not the caller's


@pytest.mark.parametrize(
    ("column", "given", "text"),
    [
        ("key bigint", "007", "7"),
        ("key bigint", " 7 ", "7"),
        ("key integer", Decimal("7.0"), "7"),
        ("key bigint", 7.0, "7"),
        ("key smallint", Number.SEVEN, "7"),
        ("key uuid", str(UUID).upper(), str(UUID)),
        ("key uuid", f"{{{UUID.hex}}}", str(UUID)),
        ("key uuid", UUID, str(UUID)),
        ("key text", "100%/a", "100%/a"),
    ],
)
async def test_whatever_a_caller_writes_all_records_have_the_rows_own_text(
    pool: Pool, column: str, given: Any, text: str
) -> None:
    await table(pool, column)
    gate = things()
    await sql(pool, "INSERT INTO things (key, status) VALUES (%(key)s, 'new')", key=text)
    async with pool.transaction() as tx:
        assert not await gate.open(tx, key=given)
    async with gate.claim(pool, "making", given) as claim:
        assert claim is not None
        assert claim.label == f"things:{text}"
        assert await claim.once("call", called, 1) == 1
        await claim.complete()
    async with pool.transaction() as tx:
        assert await gate.advance(tx, given, "made", "new")
        assert tx.touched == [f"things:{text}"]
        [ready] = tx.moved
    [claim] = await gate.take_next(pool, "making", 1, keys=[ready.key])
    await sql(pool, "UPDATE things SET lease_until = now() - interval '1 s', attempt_count = max_attempts")
    await gate.sweep(pool, "making")
    async with pool.transaction() as tx:
        assert await gate.retry(tx, given, decided_by="Ann", reason="mended")
        assert tx.touched == [f"things:{text}"]
    records = await sql(
        pool,
        "SELECT key FROM attempts UNION SELECT key FROM decisions UNION SELECT split_part(idempotency_key,"
        " ':making:', 1) FROM effects",
    )
    assert {row["key"] for row in records} == {text, f"things:{text}"}


@pytest.mark.parametrize("there", [True, False])
async def test_what_a_delivery_waits_for_is_named_as_its_row_is(pool: Pool, there: bool) -> None:
    await table(pool, "key bigint")
    gate, shortcut = things(), Shortcut()

    @shortcut.on("story.update")
    async def handle(event: Event, tx: Transaction) -> None:
        raise Park(gate, "007", while_in=("new",))

    if there:
        await sql(pool, "INSERT INTO things (key, status) VALUES (7, 'new')")
    [id_] = await arrived(pool, arrival(stories(1)))
    claim = await inbox.take(pool, "applying", id_)
    assert claim is not None
    async with claim.held():
        await apply.apply(Consumer(gates=[gate], sources=[shortcut]), claim)
    [row] = await sql(pool, "SELECT reason, parked_on FROM deliveries")
    assert "things:7" in row["reason"]
    assert row["parked_on"] == "things:7"


# ---- keys of several columns

TWINS = (("x/y", "z"), ("x", "y/z"), ("x%2Fy", "z"), ("x", "y%2Fz"), ("x%", "y"), ("x", "%y"))
TEXTS = ("x%2Fy/z", "x/y%2Fz", "x%252Fy/z", "x/y%252Fz", "x%25/y", "x/%25y")


async def twins(pool: Pool) -> Gate[dict[str, Any]]:
    await table(pool, "a text", "b text", key="a, b")
    gate = things("a, b")
    async with pool.transaction() as tx:
        for a, b in TWINS:
            assert await gate.open(tx, a=a, b=b)
        assert tx.touched == [f"things:{text}" for text in TEXTS]
    return gate


async def test_two_rows_never_have_one_name(pool: Pool) -> None:
    gate = await twins(pool)
    for number, key in enumerate(TWINS):
        async with gate.claim(pool, "making", key) as claim:
            assert claim is not None
            assert claim.label == f"things:{TEXTS[number]}"
            assert await claim.once("call", called, number) == number  # nobody else's answer
            await claim.complete()
    effects = await sql(pool, "SELECT idempotency_key, calls FROM effects")
    assert [effect["calls"] for effect in effects] == [1] * len(TWINS)
    async with pool.transaction() as tx:
        checks = await verify(tx, Consumer(gates=[gate], sources=[]), Settings())
        assert [check.name for check in checks if check.offences] == []


async def test_a_person_finds_and_decides_about_the_row_that_is_meant(pool: Pool) -> None:
    gate = await twins(pool)
    consumer = Consumer(gates=[gate], sources=[])
    await gate.take_next(pool, "making", len(TWINS))
    await sql(pool, "UPDATE things SET lease_until = now() - interval '1 s', attempt_count = max_attempts")
    assert await gate.sweep(pool, "making") == len(TWINS)
    async with pool.transaction() as tx:
        packets = await escalated(tx, consumer, of="things")
    assert {packet.row for packet in packets} == {f"things:{text}" for text in TEXTS}
    assert all(len(packet.attempts) == 1 for packet in packets)
    for number, text in enumerate(TEXTS):
        async with pool.transaction() as tx:
            answer = await why(tx, consumer, f"things:{text}", Settings())
            assert answer.row is not None
            assert (answer.row["a"], answer.row["b"]) == TWINS[number]
            assert [moment.what for moment in answer.timeline] == ["claim", "end"]
            await retry(tx, consumer, f"things:{text}", decided_by="Ann", reason="mended")
        [row] = await sql(pool, "SELECT a, b FROM things WHERE status = 'new'")
        assert (row["a"], row["b"]) == TWINS[number]
        await sql(pool, "DELETE FROM things WHERE a = %(a)s AND b = %(b)s", **row)
    decisions = await sql(pool, "SELECT key FROM decisions ORDER BY id")
    assert [decision["key"] for decision in decisions] == list(TEXTS)


async def test_only_the_known_rows_are_claimed(pool: Pool) -> None:
    gate = await twins(pool)
    for number, key in enumerate(TWINS):
        [claim] = await gate.take_next(pool, "making", len(TWINS), keys=[key])
        assert claim.label == f"things:{TEXTS[number]}"


async def test_a_number_of_parts_that_is_no_keys_is_refused_with_how_one_is_written(pool: Pool) -> None:
    await make_tickets(pool)
    consumer = Consumer(gates=[tickets_gate()], sources=[])
    for name in ("tickets:acme", "tickets:acme/web/7"):
        async with pool.transaction() as tx:
            with pytest.raises(ConfigurationError, match=r"write COMPANY/NUMBER, and a / in one as %2F"):
                await named(tx, consumer, name)


@pytest.mark.parametrize("typed", ["tickets:acme%2fweb/7", "tickets:acme%2Fweb/007", "tickets:acme%2Fweb/ 7"])
@pytest.mark.parametrize("there", [True, False])
async def test_what_people_type_is_read_and_answered_as_it_is_recorded(pool: Pool, typed: str, there: bool) -> None:
    await make_tickets(pool)
    gate = tickets_gate()
    if there:
        async with pool.transaction() as tx:
            await gate.open(tx, company="acme/web", number=7)
    async with pool.transaction() as tx:
        found = await named(tx, Consumer(gates=[gate], sources=[]), typed)
    assert (found.label, found.row is not None) == ("tickets:acme%2Fweb/7", there)


async def test_a_filter_by_row_takes_its_name_and_tells_it_where_it_is_typed_otherwise(pool: Pool) -> None:
    await make_tickets(pool)
    gate, shortcut = tickets_gate(), Shortcut()

    @shortcut.on("story.update")
    async def handle(event: Event, tx: Transaction) -> None:
        await gate.open(tx, company="acme/web", number=event.data["story_id"])

    consumer = Consumer(gates=[gate], sources=[shortcut])
    ids = await arrived(pool, arrival(stories(7), key="a"), arrival(stories(8), key="b"))
    for id_ in ids:
        claim = await inbox.take(pool, "applying", id_)
        assert claim is not None
        async with claim.held():
            await apply.apply(consumer, claim)
    expected = {"7": ids[:1], "8": ids[1:], "07": []}
    for row, selected in ((f"tickets:acme%2Fweb/{number}", each) for number, each in expected.items()):
        async with pool.transaction() as tx:
            scope = await chosen(tx, Selection(row=row), "run")
        batches = Reader(pool, consumer.sources, scope).batches()
        assert [found.id async for batch in batches for found in batch] == selected
    async with pool.transaction() as tx:
        [note] = await unknown(tx, consumer, Names(row="tickets:acme%2Fweb/07"))
    assert note.endswith("that row is written tickets:acme%2Fweb/7")


# ---- one text, in SQL and in Python

PARTS = ("", "/", "%", "%%", "%2F", "%25", "a b", "ä\u2028", "'\"\\", "%2f", "{}", "\x7f")


async def test_sql_and_python_write_the_same_text_and_it_is_read_back(pool: Pool) -> None:
    await table(pool, "a text", "b bigint", "c uuid", key="a, b, c")
    key = Key.of("a, b, c")
    gate = things("a, b, c")
    for number, part in enumerate(PARTS):
        async with pool.transaction() as tx:
            assert await gate.open(tx, a=part, b=-number, c=UUID)
            text = tx.touched[0].removeprefix("things:")
        assert text == key.text((part, -number, UUID))
        assert key.parsed(text) == (part, str(-number), str(UUID))
    assert len({key.text((one, two, UUID)) for one in PARTS for two in PARTS}) == len(PARTS) ** 2
    single = Key.of("a")
    assert [single.parsed(single.text(part)) for part in PARTS] == [(part,) for part in PARTS]
    assert [single.text(part) for part in PARTS] == list(PARTS)
    assert Key.of("a, b").text(("acme", 7)) == "acme/7"  # as ever, where nothing is escaped
