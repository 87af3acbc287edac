"""Opening a row: what means that it is there already, and that everything else is an error with its name."""

from __future__ import annotations

from typing import Any, LiteralString

import pytest
from consumers import arrival, arrived, stories
from gates import ROOT, elsewhere, sql
from psycopg.errors import CheckViolation, ExclusionViolation, ForeignKeyViolation, UniqueViolation

from handlers.issues import EXTERNAL, issues
from webhooks import Consumer, Event, Gate, Shortcut, Transaction, apply
from webhooks.errors import ConfigurationError
from webhooks.inbox import inbox
from webhooks.pool import Pool

EMAIL = ("company", "email")


def people(key: LiteralString = "id", **options: Any) -> Gate[dict[str, Any]]:
    gate: Gate[dict[str, Any]] = Gate("people", key=key, **options)
    gate.phase("new", claimed="greeting", done="greeted")
    return gate


async def table(pool: Pool, *lines: str) -> None:
    columns = ", ".join(["id bigint", "company text", "email text", *lines, "LIKE gated INCLUDING ALL"])
    await sql(pool, f"CREATE TABLE people ({columns})".encode())
    await sql(pool, "CREATE INDEX ON people (not_before, id) WHERE status = 'new'")
    await sql(pool, "CREATE INDEX ON people (id) WHERE status = 'greeting'")


async def opens(pool: Pool, gate: Gate[Any], **columns: Any) -> bool:
    async with pool.transaction() as tx:
        return await gate.open(tx, **columns)


async def count(pool: Pool) -> int:
    [row] = await sql(pool, "SELECT count(*) AS rows FROM people")
    return int(row["rows"])


# ---- by the key


async def test_a_row_with_the_same_key_is_there_already(pool: Pool) -> None:
    await table(pool, "PRIMARY KEY (id)", "UNIQUE (email)")
    assert await opens(pool, people(), id=1, email="a@b")
    assert not await opens(pool, people(), id=1, email="a@b")
    assert not await opens(pool, people(), id=1, email="other@b")


@pytest.mark.parametrize(
    ("line", "columns", "error", "name"),
    [
        ("CONSTRAINT one_email UNIQUE (email)", {"id": 2, "email": "a@b"}, UniqueViolation, "one_email"),
        ("CONSTRAINT few CHECK (id < 2)", {"id": 2}, CheckViolation, "few"),
        ("CONSTRAINT alone EXCLUDE (company WITH =)", {"id": 2, "company": "acme"}, ExclusionViolation, "alone"),
        ("CONSTRAINT known FOREIGN KEY (id) REFERENCES people (id) DEFERRABLE", {"id": 2}, None, ""),
        ("boss bigint CONSTRAINT known REFERENCES people", {"id": 2, "boss": 3}, ForeignKeyViolation, "known"),
    ],
)
async def test_whatever_else_the_table_forbids_is_an_error_with_its_name(
    pool: Pool, line: str, columns: dict[str, Any], error: type[Exception] | None, name: str
) -> None:
    await table(pool, "PRIMARY KEY (id)", line)
    assert await opens(pool, people(), id=1, company="acme", email="a@b")
    if error is None:
        assert await opens(pool, people(), **columns)
        return
    with pytest.raises(error, match=name):
        await opens(pool, people(), **columns)
    assert await count(pool) == 1


async def test_an_identity_that_is_behind_its_data_is_no_row_that_is_there(pool: Pool) -> None:
    await sql(pool, "CREATE TABLE people (id serial PRIMARY KEY, company text, email text, LIKE gated INCLUDING ALL)")
    await sql(pool, "INSERT INTO people (id, status) VALUES (1, 'greeted')")
    with pytest.raises(UniqueViolation, match="people_pkey"):
        await opens(pool, people(), email="a@b")
    assert await opens(pool, people(), email="a@b")  # the next number is free


async def test_a_key_may_be_wider_than_what_makes_it_unique(pool: Pool) -> None:
    await table(pool, "PRIMARY KEY (id)", "UNIQUE (email)")
    gate = people("company, id")
    assert await opens(pool, gate, company="acme", id=1)
    assert not await opens(pool, gate, company="acme", id=1)
    assert not await opens(pool, gate, company="other", id=1)


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["PRIMARY KEY (id) DEFERRABLE"],
        ["UNIQUE (id, email)"],
        ["EXCLUDE (id WITH =)"],
    ],
)
async def test_a_key_that_nothing_makes_unique_opens_nothing(pool: Pool, lines: list[str]) -> None:
    await table(pool, *lines)
    with pytest.raises(ConfigurationError, match=r"\(id\) is not unique: ALTER TABLE people ADD"):
        await opens(pool, people(), id=1)
    assert await count(pool) == 0


# ---- by other columns


@pytest.mark.parametrize(
    "made",
    [
        "ALTER TABLE people ADD CONSTRAINT one UNIQUE (company, email)",
        "CREATE UNIQUE INDEX one ON people (email, company)",
        "CREATE UNIQUE INDEX one ON people (company, email) INCLUDE (id)",
        "CREATE UNIQUE INDEX one ON people (company, email) WHERE email LIKE '%@%'",
        "CREATE UNIQUE INDEX one ON people (company, email) WHERE status <> 'greeted'",
    ],
)
async def test_a_row_with_the_same_values_is_there_already(pool: Pool, made: LiteralString) -> None:
    await table(pool, "PRIMARY KEY (id)")
    await sql(pool, made.replace("%", "%%"))
    gate = people(unique=EMAIL)
    async with pool.transaction() as tx:
        assert await gate.check(tx) == []
    assert await opens(pool, gate, unique=EMAIL, id=1, company="acme", email="a@b")
    assert not await opens(pool, gate, unique=EMAIL, id=2, company="acme", email="a@b")
    assert await opens(pool, gate, unique=EMAIL, id=2, company="acme", email="c@d")
    with pytest.raises(UniqueViolation, match="people_pkey"):
        await opens(pool, gate, unique=EMAIL, id=2, company="acme", email="e@f")
    with pytest.raises(UniqueViolation, match='"one"'):
        await opens(pool, gate, id=3, company="acme", email="a@b")


async def test_only_the_rows_that_an_index_has_are_there_already(pool: Pool) -> None:
    await table(pool, "PRIMARY KEY (id)")
    await sql(pool, "CREATE UNIQUE INDEX one ON people (company, email) WHERE status <> 'greeted'")
    gate = people()
    assert await opens(pool, gate, unique=EMAIL, to="greeted", id=1, company="acme", email="a@b")
    assert await opens(pool, gate, unique=EMAIL, id=2, company="acme", email="a@b")
    assert not await opens(pool, gate, unique=EMAIL, id=3, company="acme", email="a@b")


@pytest.mark.parametrize("unique", [EMAIL, ("email",), ("company", "email", "id")])
async def test_columns_that_nothing_makes_unique_are_named_with_what_does(
    pool: Pool, database_url: str, unique: tuple[LiteralString, ...]
) -> None:
    await table(pool, "PRIMARY KEY (id)", "UNIQUE (company)")
    declared, used = people(unique=unique), people()
    with pytest.raises(ConfigurationError, match="which nothing makes unique: CREATE UNIQUE INDEX"):
        await opens(pool, used, unique=unique, id=1, company="acme", email="a@b")
    async with pool.transaction() as tx:
        [fault] = await declared.check(tx)
        assert await used.check(tx) == [fault]
    async with await elsewhere(database_url) as connection:
        await connection.execute(fault.split(": ", 2)[2].encode())
    assert await opens(pool, used, unique=unique, id=1, company="acme", email="a@b")
    async with pool.transaction() as tx:
        assert await declared.check(tx) == []


async def test_columns_that_are_not_there_are_named(pool: Pool) -> None:
    await table(pool, "PRIMARY KEY (id)")
    async with pool.transaction() as tx:
        [fault] = await people(unique=("company", "Email")).check(tx)
    assert "no column Email, which open(unique=('company', 'Email')) names: it has email" in fault


async def test_of_a_partitioned_table_it_is_said_what_cannot_be(pool: Pool) -> None:
    await sql(
        pool,
        "CREATE TABLE people (id bigint, company text, email text, PRIMARY KEY (company, id),"
        " LIKE gated INCLUDING ALL) PARTITION BY LIST (company)",
    )
    await sql(pool, "CREATE TABLE acme PARTITION OF people FOR VALUES IN ('acme')")
    await sql(pool, "CREATE UNIQUE INDEX ON people (company, email)")
    await sql(pool, "CREATE INDEX ON people (not_before, company, id) WHERE status = 'new'")
    await sql(pool, "CREATE INDEX ON people (company, id) WHERE status = 'greeting'")
    gate = people("company, id")
    assert await opens(pool, gate, unique=EMAIL, id=1, company="acme", email="a@b")
    assert not await opens(pool, gate, unique=EMAIL, id=2, company="acme", email="a@b")
    async with pool.transaction() as tx:
        [fault] = await people("company, id", unique=("email",)).check(tx)
    assert "cannot be unique, as the table is partitioned by company" in fault


async def test_an_index_that_is_exchanged_under_a_running_process_is_found_anew(pool: Pool) -> None:
    await table(pool, "PRIMARY KEY (id)", "CONSTRAINT one UNIQUE (company, email)")
    gate = people()
    assert await opens(pool, gate, unique=EMAIL, id=1, company="acme", email="a@b")
    await sql(pool, "ALTER TABLE people DROP CONSTRAINT one")
    await sql(pool, "CREATE UNIQUE INDEX one ON people (company, email) WHERE email <> ''")
    with pytest.raises(ConfigurationError, match="another one now"):
        await opens(pool, gate, unique=EMAIL, id=2, company="acme", email="a@b")
    assert not await opens(pool, gate, unique=EMAIL, id=2, company="acme", email="a@b")


# ---- what a delivery comes to


async def test_a_delivery_whose_row_another_column_forbids_fails_with_the_constraint(pool: Pool) -> None:
    await table(pool, "PRIMARY KEY (id)", "CONSTRAINT one_email UNIQUE (email)")
    gate, shortcut = people(), Shortcut()

    @shortcut.on("story.update")
    async def handle(event: Event, tx: Transaction) -> None:
        await gate.open(tx, id=event.data["story_id"], email="always@the.same")

    consumer = Consumer(gates=[gate], sources=[shortcut])
    told = [arrival(stories(key), key=f"delivery-{place}") for place, key in enumerate((1, 1, 2))]
    ids = await arrived(pool, *told)
    for id_ in ids:
        claim = await inbox.take(pool, "applying", id_)
        assert claim is not None
        try:
            async with claim.held():
                await apply.apply(consumer, claim)
        except UniqueViolation:
            assert id_ == ids[2]
    rows = await sql(pool, "SELECT status, last_error FROM deliveries ORDER BY id")
    assert [row["status"] for row in rows] == ["processed", "processed", "received"]
    assert "one_email" in rows[2]["last_error"]


async def test_an_issue_is_known_by_its_company_and_its_reference(pool: Pool) -> None:
    told = {"company_id": "acme", "title": "x", "external_ref": "github#7"}
    assert await opens(pool, issues, unique=EXTERNAL, **told)
    assert not await opens(pool, issues, unique=EXTERNAL, **told)
    await sql(pool, "SELECT setval(pg_get_serial_sequence('issues', 'id'), 1, false)")
    with pytest.raises(UniqueViolation, match="issues_pkey"):
        await opens(pool, issues, unique=EXTERNAL, **{**told, "external_ref": "github#8"})


def test_every_statement_says_what_it_takes_for_there_already() -> None:
    without = [
        (path.name, path.read_text().count("ON CONFLICT DO NOTHING"))
        for folder in ("webhooks", "handlers")
        for path in (ROOT / folder).rglob("*.py")
        if "ON CONFLICT DO NOTHING" in path.read_text()
    ]
    assert without == [("companies.py", 1)]  # which looks afterwards what it was
