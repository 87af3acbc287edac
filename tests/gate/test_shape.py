"""Tables that were there before their gate: what `check` prints runs on them as it is, and mends them."""

from __future__ import annotations

from typing import Any, LiteralString

import pytest
from gates import elsewhere, sql

from webhooks.gate import Gate
from webhooks.pool import Pool


def orders(key: LiteralString = "id", **options: Any) -> Gate[dict[str, Any]]:
    gate: Gate[dict[str, Any]] = Gate("orders", key=key, **options)
    gate.phase("new", claimed="packing", done=("packed", "cancelled"))
    gate.phase("packed", claimed="sending", done="sent")
    return gate


async def check(pool: Pool, gate: Gate[Any]) -> list[str]:
    async with pool.transaction() as tx:
        return await gate.check(tx)


async def pasted(pool: Pool, url: str, gate: Gate[Any]) -> list[str]:
    """Run what `check` prints, top down, as it is printed; return it."""
    faults = await check(pool, gate)
    async with await elsewhere(url) as connection:
        for fault in faults:
            statement = fault.split(": ", 2)[2]
            if "CONCURRENTLY" in statement:  # which cannot be one of several in a message
                for part in statement.rstrip(";").split("; "):
                    await connection.execute(part.encode())
            else:
                await connection.execute(statement.encode())
    assert await check(pool, gate) == []
    return faults


async def lives(pool: Pool, gate: Gate[Any], **columns: object) -> None:
    """A row is opened, claimed, swept, escalated and retried."""
    async with pool.transaction() as tx:
        assert await gate.open(tx, **columns)
    async with gate.claim_next(pool, "packing") as claim:
        assert claim is not None
        await claim.complete("packed")
    [held] = await gate.take_next(pool, "sending", 1)
    await sql(pool, "UPDATE orders SET lease_until = now() - interval '1 s', attempt_count = max_attempts")
    assert await gate.sweep(pool, "sending") == 1
    async with pool.transaction() as tx:
        assert await gate.retry(tx, held.key, decided_by="Ann", reason="mended")


# ---- statuses that a check forbids


async def plain(pool: Pool, *constraints: LiteralString) -> None:
    await sql(pool, "CREATE TABLE orders (id bigint PRIMARY KEY, total integer, LIKE gated INCLUDING ALL)")
    await sql(pool, "CREATE INDEX ON orders (not_before, id) WHERE status = 'new'")
    await sql(pool, "CREATE INDEX ON orders (not_before, id) WHERE status = 'packed'")
    await sql(pool, "CREATE INDEX ON orders (id) WHERE status IN ('packing', 'sending')")
    for constraint in constraints:
        await sql(pool, f"ALTER TABLE orders ADD CONSTRAINT {constraint}".encode())


@pytest.mark.parametrize(
    ("constraint", "missing"),
    [
        ("known CHECK (status IN ('new', 'packing', 'packed', 'cancelled', 'sending', 'sent'))", "escalated"),
        ("known CHECK (status IN ('new', 'packed', 'cancelled', 'sent', 'escalated'))", "packing, sending"),
        ("known CHECK (length(status) < 8) NOT VALID", "cancelled, escalated"),
        ("\"Known one\" CHECK (status ~ '^[a-s]' AND status <> 'sent')", "sent"),
        ("known CHECK (status::varchar(3) NOT LIKE 'can%%')", "cancelled"),
        ("known CHECK (allowed(status))", "escalated"),
    ],
)
async def test_a_status_that_a_check_forbids_is_named_with_what_allows_it(
    pool: Pool, database_url: str, constraint: LiteralString, missing: str
) -> None:
    await sql(
        pool,
        "CREATE FUNCTION allowed(text) RETURNS boolean IMMUTABLE LANGUAGE plpgsql AS $$ BEGIN"
        " IF $1 = 'escalated' THEN RAISE EXCEPTION 'unknown %%', $1; END IF; RETURN true; END $$",
    )
    await plain(pool, constraint)
    gate = orders()
    if "allowed" in constraint:
        [fault] = await check(pool, gate)
        assert f"does not allow the status {missing}: ALTER TABLE orders DROP CONSTRAINT" in fault
        return
    [fault] = await pasted(pool, database_url, gate)
    assert f"does not allow the status {missing}: ALTER TABLE orders DROP CONSTRAINT" in fault
    assert await sql(pool, "SELECT * FROM orders") == []
    await lives(pool, gate, id=1)


@pytest.mark.parametrize(
    "constraint",
    [
        "wider CHECK (status <> 'escalated' OR total > 0)",
        "unsure CHECK (nullif(status, 'escalated') <> 'x')",
        "other CHECK (total > 0)",
        "fine CHECK (status <> 'gone')",
    ],
)
async def test_a_check_that_only_a_row_can_break_is_left_to_the_sweep(pool: Pool, constraint: LiteralString) -> None:
    await plain(pool, constraint)
    assert await check(pool, orders()) == []


async def test_a_check_that_is_not_enforced_forbids_nothing(pool: Pool) -> None:
    [server] = await sql(pool, "SELECT current_setting('server_version_num')::int AS version")
    if server["version"] < 180_000:
        pytest.skip("PostgreSQL 18 is the first that can leave a check unenforced")
    await plain(pool, "known CHECK (status = 'new') NOT ENFORCED")
    assert await check(pool, orders()) == []


async def test_the_status_of_escalated_rows_is_the_gates_own(pool: Pool) -> None:
    await plain(pool, "known CHECK (status <> 'escalated')")
    assert await check(pool, orders(escalated="stuck")) == []


# ---- an enum


LABELS = "('new', 'packing', 'packed', 'cancelled', 'sending', 'sent')"


@pytest.mark.parametrize("type_", ["order_status", '"Order status"', 'shop."Order status"'])
async def test_a_status_that_is_an_enum_becomes_text_with_all_that_compares_it(
    pool: Pool, database_url: str, type_: LiteralString
) -> None:
    async def run(text: str) -> None:
        await sql(pool, text.replace("ENUM_TYPE", type_).encode())

    await run("CREATE SCHEMA shop")
    await run(f"CREATE TYPE ENUM_TYPE AS ENUM {LABELS}")
    await run(
        "CREATE TABLE orders (id bigint PRIMARY KEY, note text, status ENUM_TYPE NOT NULL DEFAULT 'new',"
        " CONSTRAINT noted CHECK (status <> 'cancelled' OR note IS NOT NULL),"
        " CONSTRAINT known CHECK (status IN ('new', 'packing', 'packed', 'cancelled', 'sending', 'sent')))"
    )
    await run("CREATE INDEX \"orders new\" ON orders (id) WHERE status = 'new'")
    await run("CREATE UNIQUE INDEX one_note ON orders (note) WHERE status IN ('new', 'packed')")
    await run("CREATE INDEX by_status ON orders (status, id)")
    await run("CREATE INDEX sent ON orders ((status = 'sent'::ENUM_TYPE), id)")
    await run("INSERT INTO orders SELECT n, 'note ' || n, 'sent' FROM generate_series(1, 3) AS n")
    before = await sql(pool, "SELECT indexname FROM pg_indexes WHERE tablename = 'orders' ORDER BY 1")
    gate = orders()
    faults = await pasted(pool, database_url, gate)
    assert [fault for fault in faults if f"column status is {type_}, not text: BEGIN" in fault]
    assert not [fault for fault in faults if "the rows in new" in fault]  # there was an index, and there is
    after = {row["indexname"] for row in await sql(pool, "SELECT indexname FROM pg_indexes WHERE tablename = 'orders'")}
    assert {row["indexname"] for row in before} < after
    assert await sql(pool, "SELECT DISTINCT status FROM orders") == [{"status": "sent"}]
    await run("DROP TYPE ENUM_TYPE")
    await sql(pool, "UPDATE orders SET note = NULL WHERE id = 1")
    await lives(pool, gate, id=9, note="note 9")


async def test_an_enum_is_recognised_in_an_index_so_that_no_other_is_printed(pool: Pool) -> None:
    await sql(pool, f"CREATE TYPE status AS ENUM {LABELS}".encode())
    await sql(pool, "CREATE TABLE orders (id bigint PRIMARY KEY, LIKE gated INCLUDING ALL)")
    await sql(pool, "ALTER TABLE orders ALTER COLUMN status TYPE status USING status::status")
    await sql(pool, "CREATE INDEX ON orders (id) WHERE status = 'new'")
    await sql(pool, "CREATE INDEX ON orders (id) WHERE status = ANY ('{packed}')")
    await sql(pool, "CREATE INDEX ON orders (id) WHERE status IN ('packing', 'sending')")
    [fault] = await check(pool, orders())
    assert "column status is status, not text" in fault
    assert fault.count("CREATE INDEX") == 3


async def test_what_cannot_be_made_again_from_its_definition_is_named(pool: Pool, database_url: str) -> None:
    await sql(pool, f"CREATE TYPE status AS ENUM {LABELS}".encode())
    await plain(pool)
    await sql(pool, "ALTER TABLE orders DROP COLUMN status")
    await sql(pool, "ALTER TABLE orders ADD COLUMN status status NOT NULL DEFAULT 'new'")
    await sql(pool, "CREATE VIEW open_orders AS SELECT id FROM orders WHERE status = 'new'")
    await sql(pool, "CREATE POLICY seen ON orders USING (status <> 'sent')")
    await sql(pool, "ALTER TABLE orders ADD COLUMN gone boolean GENERATED ALWAYS AS (status = 'sent') STORED")
    fault = (await check(pool, orders()))[0]
    assert (
        "not text (drop before, and make again afterwards: default value for column gone of table orders, "
        "policy seen on table orders, view open_orders): BEGIN"
    ) in fault
    await sql(pool, "DROP VIEW open_orders")
    await sql(pool, "DROP POLICY seen ON orders")
    await sql(pool, "ALTER TABLE orders DROP COLUMN gone")
    await pasted(pool, database_url, orders())


# ---- a partitioned table


async def partitioned(pool: Pool, by: LiteralString, *partitions: LiteralString, primary: LiteralString | None) -> None:
    key = "" if primary is None else f"PRIMARY KEY ({primary}), "
    await sql(
        pool,
        f"CREATE TABLE orders (id bigint NOT NULL, tenant integer NOT NULL, {key}LIKE gated INCLUDING ALL)"
        f" PARTITION BY {by}".encode(),
    )
    for number, values in enumerate(partitions):
        await sql(pool, f"CREATE TABLE orders_{number} PARTITION OF orders FOR VALUES {values}".encode())


HASHED: tuple[LiteralString, ...] = ("WITH (MODULUS 2, REMAINDER 0)", "WITH (MODULUS 2, REMAINDER 1)")


@pytest.mark.parametrize(
    ("by", "partitions", "key"),
    [("HASH (id)", HASHED, "id"), ("LIST (tenant)", ("IN (1)", "IN (2)"), "id, tenant")],
    ids=["by its key", "by a tenant"],
)
async def test_what_a_partitioned_table_lacks_is_printed_as_it_can_be_run_there(
    pool: Pool, database_url: str, by: LiteralString, partitions: tuple[LiteralString, ...], key: LiteralString
) -> None:
    await partitioned(pool, by, *partitions, primary=None)
    await sql(pool, "CREATE INDEX slow ON orders (lease_until)")
    await sql(pool, "CREATE INDEX half ON ONLY orders (id) WHERE status = 'packed'")
    gate = orders(key)
    faults = await pasted(pool, database_url, gate)
    assert [fault for fault in faults if "no index finds the rows in new: CREATE INDEX orders_new ON orders (" in fault]
    assert [fault for fault in faults if "slow makes every renewal slow: DROP INDEX slow" in fault]
    assert [fault for fault in faults if "half was never finished: DROP INDEX half; CREATE INDEX half ON " in fault]
    assert [fault for fault in faults if f"({key}) is not unique: ALTER TABLE orders ADD PRIMARY KEY ({key})" in fault]
    await lives(pool, gate, id=1, tenant=1)
    # A partition that comes later has all of them by itself.
    if "LIST" in by:
        await sql(pool, "CREATE TABLE orders_9 PARTITION OF orders FOR VALUES IN (9)")
        assert await check(pool, gate) == []


async def test_a_partitioned_table_with_an_enum_is_mended_with_what_its_partitions_have_of_their_own(
    pool: Pool, database_url: str
) -> None:
    await sql(pool, f"CREATE TYPE state AS ENUM {LABELS}".encode())
    await sql(
        pool,
        "CREATE TABLE orders (id bigint PRIMARY KEY, tenant integer, status state NOT NULL DEFAULT 'new',"
        " CONSTRAINT kept CHECK (status <> 'cancelled' OR id > 0)) PARTITION BY HASH (id)",
    )
    for number, values in enumerate(HASHED):
        await sql(pool, f"CREATE TABLE orders_{number} PARTITION OF orders FOR VALUES {values}".encode())
    await sql(pool, "CREATE INDEX everywhere ON orders (id) WHERE status = 'new'")
    await sql(pool, "CREATE INDEX here_alone ON orders_1 (tenant) WHERE status = 'sent'")
    await sql(pool, "ALTER TABLE orders_0 ADD CONSTRAINT zero CHECK (status <> 'sent' OR tenant IS NOT NULL)")
    gate = orders()
    await pasted(pool, database_url, gate)
    names = {row["name"] for row in await sql(pool, "SELECT indexname AS name FROM pg_indexes")}
    assert {"everywhere", "here_alone"} <= names
    await lives(pool, gate, id=1, tenant=1)


@pytest.mark.parametrize(
    ("by", "told"),
    [
        (
            "LIST (tenant)",
            'by tenant: name it in the gate\'s key too (key="id, tenant"), or partition it by',
        ),
        ("HASH ((tenant %% 7))", "by an expression: partition it by (id)"),
    ],
)
async def test_a_key_that_cannot_be_unique_because_of_the_partitions_is_told_what_can(
    pool: Pool, by: LiteralString, told: str
) -> None:
    await partitioned(pool, by, primary=None)
    assert told in (await check(pool, orders()))[-1]


async def test_a_table_partitioned_by_what_claims_change_is_refused(pool: Pool) -> None:
    await partitioned(pool, "LIST (status)", primary=None)
    [fault] = await check(pool, orders())
    assert fault.startswith("orders is partitioned by status, which claims change")


# ---- names of what is to be made


async def test_an_index_is_called_as_nothing_else_is_and_no_longer_than_postgresql_keeps(
    pool: Pool, database_url: str
) -> None:
    name: LiteralString = "a_table_whose_name_leaves_no_room_for_the_name_of_a_status_at_all"[:60]  # type: ignore[assignment]
    gate: Gate[dict[str, Any]] = Gate(name, key="id")
    gate.phase("waiting", claimed="working", done="done")
    gate.phase("done", claimed="checking", done="checked")
    await sql(pool, f"CREATE TABLE {name} (id bigint PRIMARY KEY, LIKE gated INCLUDING ALL)".encode())
    assert len(await pasted(pool, database_url, gate)) == 3
    await sql(pool, "CREATE TABLE orders (id bigint PRIMARY KEY, LIKE gated INCLUDING ALL)")
    await sql(pool, "CREATE TABLE orders_new (id bigint)")
    await sql(pool, "CREATE VIEW orders_new_2 AS SELECT 1")
    faults = await pasted(pool, database_url, orders())
    assert "CREATE INDEX CONCURRENTLY orders_new_3 ON orders" in faults[0]


async def test_a_key_beside_the_primary_key_is_made_unique(pool: Pool, database_url: str) -> None:
    await sql(pool, "CREATE TABLE orders (number uuid PRIMARY KEY, id bigint, LIKE gated INCLUDING ALL)")
    await sql(pool, "ALTER TABLE orders ALTER COLUMN number SET DEFAULT gen_random_uuid()")
    faults = await pasted(pool, database_url, orders())
    assert faults[-1] == "orders: (id) is not unique: ALTER TABLE orders ADD UNIQUE (id);"
    await lives(pool, orders(), id=1)
