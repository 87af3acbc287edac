"""What the inbox keeps of a delivery, and what its statements say of a copy."""

from __future__ import annotations

import psycopg
import pytest
from consumers import arrival, arrived
from gates import sql

from webhooks import Pool
from webhooks.delivery import Delivery
from webhooks.inbox import Copy, find, inbox, insert, load, load_body, nudge, rearm

HEADERS = (("content-type", "application/json"), ("x-github-event", "push"), ("x-github-event", "é\xff"))


@pytest.mark.invariant(12)
async def test_the_bytes_and_the_header_lines_come_back_as_they_were(pool: Pool) -> None:
    body = bytes(range(256)) * 3
    [id_] = await arrived(pool, Delivery("github", "one", HEADERS, body))
    claim = await inbox.take(pool, "applying", id_)
    assert claim is not None
    async with claim.held(), pool.transaction() as tx:
        content = await load(tx, claim.row)
        assert (content.headers, await load_body(tx, content.id)) == (HEADERS, body)
        await tx.execute("SELECT 1")
        assert (claim.row.source, claim.row.dedup_key, claim.row.origin) == ("github", "one", "received")
        await claim.complete("processed")


async def test_a_further_event_of_a_request_reads_the_body_of_its_parent(pool: Pool) -> None:
    [parent] = await arrived(pool, Delivery("github", "one", HEADERS, b"the body"))
    async with pool.transaction() as tx:
        await inbox.open(tx, source="github", dedup_key="one", position=1, parent=parent)
    await sql(pool, "UPDATE deliveries SET status = 'processed' WHERE id = %(id)s", id=parent)
    [claim] = await inbox.take_next(pool, "applying", 1)
    async with claim.held(), pool.transaction() as tx:
        assert claim.row.parent == parent
        content = await load(tx, claim.row)
        assert (content.headers, await load_body(tx, content.id)) == (HEADERS, b"the body")
        await claim.complete("processed")


async def test_a_body_that_was_removed_is_an_error_that_says_so(pool: Pool) -> None:
    [parent] = await arrived(pool, arrival(b"x", key="one"))
    async with pool.transaction() as tx:
        await inbox.open(tx, source="shortcut", dedup_key="one", position=1, parent=parent)
    await sql(pool, "DELETE FROM deliveries WHERE id = %(id)s", id=parent)
    [claim] = await inbox.take_next(pool, "applying", 1)
    with pytest.raises(LookupError, match=f"delivery {parent} is gone"):
        async with claim.held(), pool.transaction() as tx:
            await load(tx, claim.row)


@pytest.mark.invariant(3)
async def test_only_what_is_new_is_inserted_and_named(pool: Pool) -> None:
    [first] = await arrived(pool, arrival(b"x", key="one"))
    async with pool.transaction() as tx:
        new = await insert(tx, [arrival(b"y", key=key) for key in ("two", "one")])
        found = await find(tx, [("shortcut", "one"), ("shortcut", "nowhere")])
    assert list(new) == [("shortcut", "two")]
    assert found == {("shortcut", "one"): Copy(first, "received", None)}


async def test_one_key_of_two_sources_is_two_deliveries(pool: Pool) -> None:
    await arrived(pool, arrival(b"x", key="one"), arrival(b"x", source="github", key="one"))
    assert len(await sql(pool, "SELECT id FROM deliveries")) == 2


async def test_a_new_set_of_attempts_is_for_the_named_and_the_dead_alone(pool: Pool) -> None:
    ids = await arrived(pool, *(arrival(b"x", key=key) for key in ("dead", "ignored", "other", "processed")))
    for id_, status in zip(ids, ("dead", "ignored", "ignored", "processed"), strict=True):
        await sql(pool, "UPDATE deliveries SET status = %(to)s, attempt_count = 5 WHERE id = %(id)s", id=id_, to=status)
    async with pool.transaction() as tx:
        keys = [("shortcut", key) for key in ("dead", "ignored", "other", "processed")]
        assert await rearm(tx, keys, [ids[1]]) == {("shortcut", "dead"), ("shortcut", "ignored")}
        assert sorted(row.key for row in tx.moved) == ids[:2]  # type: ignore[type-var]
    statuses = await sql(pool, "SELECT status, attempt_count FROM deliveries ORDER BY id")
    assert [row["status"] for row in statuses] == ["received", "received", "ignored", "processed"]
    assert [row["attempt_count"] for row in statuses] == [0, 0, 5, 5]


async def test_only_what_waits_is_made_due(pool: Pool) -> None:
    ids = await arrived(pool, *(arrival(b"x", key=key) for key in ("waits", "due", "applying")))
    await sql(pool, "UPDATE deliveries SET not_before = now() + interval '1 hour' WHERE dedup_key <> 'due'")
    await sql(pool, "UPDATE deliveries SET status = 'applying' WHERE dedup_key = 'applying'")
    async with pool.transaction() as tx:
        await nudge(tx, [("shortcut", key) for key in ("waits", "due", "applying")])
        assert [row.key for row in tx.moved] == ids[:1]


async def test_a_row_without_a_body_has_a_parent(pool: Pool) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        await sql(pool, "INSERT INTO deliveries (source, dedup_key, status) VALUES ('s', 'k', 'received')")
