"""Which deliveries each filter selects, and that a selection is read without holding it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from consumers import arrival, arrived, stories
from gates import sql
from replays import Applied, ended, github, ids, prune, pushed, selected, split

from webhooks import Pool
from webhooks.errors import ConfigurationError
from webhooks.selection import JsonFilter, Reader, Selection, Unit, chosen, counted
from webhooks.selection import reader as reading
from webhooks.selection.statements import BATCH, COUNT


async def test_each_filter_lets_its_own_pass_and_together_they_must_all(pool: Pool) -> None:
    push, star, dead = await github(pool, pushed(), pushed(), pushed())
    [story] = await arrived(pool, arrival(stories(7)))
    await ended(pool, push, "processed", event="push", moved_rows=["issues:1"])
    await ended(pool, star, "ignored", event="star.created")
    await ended(pool, dead, "dead", event="push")
    await ended(pool, story, "received", event="story.update", parked_on="issues:1")
    [fresh] = await github(pool, pushed())

    assert await ids(pool) == [push, star, dead, story, fresh]
    assert await ids(pool, source="GitHub") == [push, star, dead, fresh]
    assert await ids(pool, event="PUSH") == [push, dead]
    assert await ids(pool, event="star") == [star]
    assert await ids(pool, disposition="dead") == [dead]
    assert await ids(pool, disposition="parked") == [story]
    assert await ids(pool, disposition="received") == [fresh]
    assert await ids(pool, row="issues:1") == [push, story]
    assert await ids(pool, row="issues:1", source="shortcut") == [story]
    assert await ids(pool, ids=(dead, push)) == [push, dead]
    assert await ids(pool, limit=2) == [push, star]
    assert await ids(pool, after=star, upto=story) == [dead, story]
    assert await ids(pool, event="push", disposition="ignored") == []


async def test_times_are_compared_with_the_databases_clock(pool: Pool) -> None:
    old, middle, new = await github(pool, pushed(), pushed(), pushed())
    for id, hours in ((old, 5), (middle, 3)):
        at = timedelta(hours=hours)
        await sql(pool, "UPDATE deliveries SET received_at = now() - %(at)s WHERE id = %(id)s", id=id, at=at)

    hour = timedelta(hours=1)
    assert await ids(pool, since=4 * hour) == [middle, new]
    assert await ids(pool, until=2 * hour) == [old, middle]
    assert await ids(pool, since=4 * hour, until=2 * hour) == [middle]
    assert await ids(pool, since=datetime.now(UTC) + hour) == []
    assert await ids(pool, until=datetime.now(UTC) - 9 * hour) == []


async def test_a_split_delivery_runs_as_its_events_and_is_exported_as_itself(pool: Pool) -> None:
    parent, parts = await split(pool, 7, 8)
    await ended(pool, parts[1], "dead", event="story.update")

    assert await ids(pool) == parts
    assert await ids(pool, ids=(parent,)) == parts
    assert await ids(pool, ids=(parts[1],)) == [parts[1]]
    assert await ids(pool, disposition="dead") == [parts[1]]
    assert await ids(pool, row="patch_sessions:7") == [parts[0]]
    assert await ids(pool, "request") == [parent]
    assert await ids(pool, "original", disposition="dead") == [parent]
    assert await ids(pool, "original", row="patch_sessions:7") == [parent]
    assert await ids(pool, "original", ids=(parts[0], parts[1])) == [parent]


async def test_an_event_that_was_split_off_cannot_be_repeated_as_new_and_the_message_says_what_can(pool: Pool) -> None:
    parent, parts = await split(pool, 7, 8)

    with pytest.raises(ConfigurationError) as refused:
        await ids(pool, "request", ids=(parts[1],))
    assert f"delivery {parts[1]} is event 2 of delivery {parent}" in str(refused.value)
    assert f"webhooks replay {parent} --as new" in str(refused.value)


async def test_replays_are_no_originals_and_stand_for_what_they_repeat_when_named(pool: Pool) -> None:
    [first] = await github(pool, pushed())
    copy = "INSERT INTO deliveries (source, dedup_key, replay_of, origin, body, status) VALUES"
    [second] = await sql(pool, copy + " ('github', 'a', %(of)s, 'replay', 'x', 'processed') RETURNING id", of=first)
    [third] = await sql(
        pool, copy + " ('github', 'b', %(of)s, 'replay', 'x', 'processed') RETURNING id", of=second["id"]
    )
    [filed] = await sql(pool, copy + " ('github', 'c', NULL, 'replay', 'x', 'processed') RETURNING id")

    assert await ids(pool) == [first, second["id"], third["id"], filed["id"]]
    assert await ids(pool, "request") == [first, filed["id"]]
    assert await ids(pool, "request", ids=(third["id"],)) == [third["id"]]
    assert await ids(pool, "original") == [first]
    assert await ids(pool, "original", ids=(third["id"],)) == [first]
    assert await ids(pool, "original", ids=(filed["id"],)) == [filed["id"]]


async def test_a_delivery_that_is_not_there_is_named(pool: Pool) -> None:
    [here] = await github(pool, pushed())
    with pytest.raises(ConfigurationError, match=r"^there is no delivery 998, 999$"):
        await ids(pool, ids=(998, here, 999))


@pytest.mark.parametrize("row", ["123", "patch_sessions:", ":123", ""])
async def test_a_row_is_named_by_table_and_key(pool: Pool, row: str) -> None:
    with pytest.raises(ConfigurationError, match="names no row"):
        await ids(pool, row=row)


async def test_what_arrives_after_the_start_is_left_out(pool: Pool) -> None:
    before = await github(pool, pushed(), pushed())
    async with pool.transaction() as tx:
        scope = await chosen(tx, Selection(), "run")
    await github(pool, pushed())

    reader = Reader(pool, {}, scope)
    assert [found.id async for batch in reader.batches(at_once=1) for found in batch] == before
    assert reader.after == before[-1]
    async with pool.connection() as connection:
        assert sum(group.count for group in await counted(connection, scope)) == 2


@pytest.mark.parametrize("unit", ["run", "request", "original"])
async def test_the_count_agrees_with_what_is_read(pool: Pool, unit: Unit) -> None:
    push, star = await github(pool, pushed(), pushed())
    await split(pool, 7, 8, 9)
    await ended(pool, push, "processed", event="push")
    await ended(pool, star, "ignored", event="star.created")
    await prune(pool, star)
    for limit in (None, 2):
        async with pool.transaction() as tx:
            scope = await chosen(tx, Selection(limit=limit), unit)
        read = [found async for batch in Reader(pool, {}, scope).batches(at_once=2) for found in batch]
        async with pool.connection() as connection:
            groups = await counted(connection, scope)
        alike = {(group.source, group.event, group.disposition, group.pruned): group.count for group in groups}
        assert alike == {
            key: sum((found.source, found.event, found.disposition, found.pruned) == key for found in read)
            for key in alike
        }
        assert sum(alike.values()) == len(read)


async def test_the_parts_of_a_pruned_delivery_are_pruned_with_it(pool: Pool) -> None:
    parent, _ = await split(pool, 7, 8)
    await prune(pool, parent)

    assert [found.pruned for found in await selected(pool, Selection(), bodies=True)] == [True, True]


async def test_bodies_are_read_a_few_megabytes_at_a_time_and_one_that_is_larger_alone(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MOST_BYTES", 1000)
    bodies = [b"a" * 400, b"b" * 400, b"c" * 400, b"d" * 5000, b"e"]
    await github(pool, *bodies)
    async with pool.transaction() as tx:
        scope = await chosen(tx, Selection(), "run")

    batches = [batch async for batch in Reader(pool, {}, scope).batches(bodies=True)]

    assert [[found.size for found in batch] for batch in batches] == [[400, 400], [400], [5000], [1]]
    assert [found.body for batch in batches for found in batch] == bodies


async def test_the_events_of_one_body_count_it_once(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    parent, parts = await split(pool, *range(5))
    [row] = await sql(pool, "SELECT octet_length(body) AS size FROM deliveries WHERE id = %(id)s", id=parent)
    monkeypatch.setattr(reading, "MOST_BYTES", row["size"])

    async with pool.transaction() as tx:
        scope = await chosen(tx, Selection(), "run")
    batches = [batch async for batch in Reader(pool, {}, scope).batches(bodies=True)]
    assert [[found.id for found in batch] for batch in batches] == [parts]


async def test_a_body_is_looked_into_as_its_source_reads_it(pool: Pool) -> None:
    from urllib.parse import urlencode

    consumer = Applied().consumer()
    wanted, other = await github(pool, pushed("acme/app"), pushed("acme/other"))
    form = arrival(urlencode({"payload": pushed("acme/app").decode()}).encode(), source="github")
    headers = (*form.headers, ("content-type", "application/x-www-form-urlencoded"))
    [as_form] = await arrived(pool, type(form)(form.source, form.dedup_key, headers, form.body))
    await github(pool, b"\xff", b"")
    where = (JsonFilter.read("$.repository.full_name=acme/app"),)

    async with pool.transaction() as tx:
        scope = await chosen(tx, Selection(where_json=where), "run")
    reader = Reader(pool, consumer.sources, scope)
    found = [found.id async for batch in reader.batches(at_once=2) for found in batch]

    assert found == [wanted, as_form]
    assert (reader.looked_at, reader.unreadable) == (5, 2)
    assert other not in found
    limited = await selected(pool, Selection(where_json=where, limit=1), consumer=consumer)
    assert [one.id for one in limited] == [wanted]


@pytest.mark.parametrize(
    ("text", "body", "passes"),
    [
        ("$.a=5", {"a": 5}, True),
        ("$.a=5", {"a": "5"}, True),
        ("$.a=5", {"a": 5.0}, True),
        ("$.a=1", {"a": True}, False),
        ("$.a=true", {"a": True}, True),
        ("$.a=true", {"a": 1}, False),
        ("$.a=null", {"a": None}, True),
        ("$.a=null", {}, False),
        ("$.a=", {"a": ""}, True),
        ("$.a=b=c", {"a": "b=c"}, True),
        ("$.a", {"a": None}, True),
        ("$.a", {"b": 1}, False),
        ("$.n=12345678901234567890", {"n": 12345678901234567890}, True),
        ("$.n=12345678901234567890", {"n": 12345678901234567891}, False),
        ("$.a[?@.b=='x'].c=y", {"a": [{"b": "x", "c": "y"}]}, True),
        ("$.a[?@.b=='x'].c=y", {"a": [{"b": "z", "c": "y"}]}, False),
        ("$..login=ann", {"a": {"b": [{"login": "ann"}]}}, True),
        ('$.a={"b": 1}', {"a": {"b": 1}}, True),
        ("$.a=5", [], False),
        ("$.a=5", "x", False),
    ],
)
def test_a_path_and_a_value(text: str, body: Any, passes: bool) -> None:
    assert JsonFilter.read(text).passes(body) is passes


def test_a_body_nested_past_looking_through_does_not_pass() -> None:
    body: dict[str, Any] = {}
    inside = body
    for _ in range(2000):
        inside["a"] = {}
        inside = inside["a"]
    assert JsonFilter.read("$..b=1").passes(body) is False


@pytest.mark.parametrize("text", ["", "a=1", "repository.full_name=x", "$.a[=1", "=", "$."])
def test_what_is_no_path_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigurationError, match="no JSONPath such as"):
        JsonFilter.read(text)


@pytest.mark.parametrize(
    ("text", "has_pattern"),
    [
        ("$[?match(@.a, '(a+)+b')]", True),
        ("$..[?search(@.a, 'x')]=1", True),
        ("$.a[0, ?@.b == 1 && !(@.c || match(@.d, $.e))]", True),
        ("$[?count(@[?search(@, 'x')]) > 1]", True),
        ("$[?length(value(@[?match(@, 'b')])) == 1]", True),
        ("$[?length(@.a) == 5].match", False),
        ("$['match(@)']", False),
        ("$.title=a search (or a match(x))", False),
    ],
)
def test_a_filter_says_whether_a_regular_expression_is_in_it(text: str, has_pattern: bool) -> None:
    assert JsonFilter.read(text).has_pattern is has_pattern


MANY = """
INSERT INTO deliveries (source, dedup_key, body, received_at, event, status, moved_rows)
SELECT 'github', n::text, 'x', now() - (20000 - n) * interval '1 second', 'push',
    CASE WHEN n % 1000 = 0 THEN 'dead' ELSE 'processed' END, ARRAY['issues:' || n]
FROM generate_series(1, 20000) AS n
"""


@pytest.mark.parametrize(
    ("filters", "index"),
    [
        ({"disposition": "dead"}, "deliveries_dead"),
        ({"row": "issues:77"}, "deliveries_moved_rows"),
        ({"since": timedelta(minutes=1)}, "deliveries_pkey"),
        ({"ids": (5, 6)}, "deliveries_pkey"),
    ],
)
async def test_a_filter_uses_its_index(pool: Pool, filters: dict[str, Any], index: str) -> None:
    async with pool.connection() as connection:
        await connection.execute(MANY)
        await connection.execute("ANALYZE deliveries")
    async with pool.transaction() as tx:
        scope = await chosen(tx, Selection(**filters), "run")
        for statement in (COUNT["run"], BATCH["run"]):
            params = {**scope.params, "after": scope.after, "upto": scope.upto, "limit": 500}
            cursor = await tx.connection.execute(b"EXPLAIN " + statement, params, prepare=False)
            plan = "\n".join(row["QUERY PLAN"] for row in await cursor.fetchall())
            scans = [line for line in plan.splitlines() if " on deliveries d" in line or "Index Scan on" in line]
            assert index in plan, plan
            assert not any("Seq Scan on deliveries d" in line for line in scans), plan
