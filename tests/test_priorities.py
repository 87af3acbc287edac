"""What a heartbeat claims next: urgent first, then oldest; nothing waits for ever, and to find it is always quick."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from heartbeats import open_issue, open_many, sql

from handlers.issues import PRIORITIES, issues
from webhooks import Pool

NOW = datetime(2026, 6, 12, 12, tzinfo=UTC)
HEAD_STARTS = {
    "critical": timedelta(days=30),
    "high": timedelta(days=14),
    "medium": timedelta(days=7),
    "low": timedelta(0),
}


async def created(pool: Pool, priority: str, ago: timedelta, **columns: object) -> int:
    return await open_issue(pool, priority=priority, created_at=NOW - ago, **columns)


async def claimed_in_turn(pool: Pool) -> list[int]:
    """The issues of one agent in the order in which they are claimed, one after the other."""
    order: list[int] = []
    while True:
        async with issues.claim_next(pool, "claimed", company_id="acme", assigned_agent_id="coder") as claim:
            if claim is None:
                return order
            order.append(claim.row.id)
            await claim.complete(result="{}")


# The order


async def test_of_what_was_created_within_a_week_the_urgent_comes_first_and_then_the_oldest(pool: Pool) -> None:
    hours = [150, 1, 75]
    ids = {
        (priority, ago): await created(pool, priority, timedelta(hours=ago)) for ago in hours for priority in PRIORITIES
    }
    wanted = [ids[priority, ago] for priority in PRIORITIES for ago in sorted(hours, reverse=True)]
    assert await claimed_in_turn(pool) == wanted


async def test_issues_of_one_moment_are_claimed_in_the_order_of_their_numbers(pool: Pool) -> None:
    ids = [await created(pool, "low", timedelta(0)) for _ in range(5)]
    assert await claimed_in_turn(pool) == ids


async def test_nothing_waits_longer_than_the_head_start_of_what_overtakes_it(pool: Pool) -> None:
    """The bound: it is before every issue created later by more than their head starts differ."""
    second = timedelta(seconds=1)
    for low in PRIORITIES:
        for urgent in PRIORITIES[: PRIORITIES.index(low)]:
            bound = HEAD_STARTS[urgent] - HEAD_STARTS[low]
            overtaking = await created(pool, urgent, timedelta(0))
            waited_long = await created(pool, low, bound + second)
            waited_less = await created(pool, low, bound - second)
            assert await claimed_in_turn(pool) == [waited_long, overtaking, waited_less], (low, urgent)


async def test_a_stream_of_critical_issues_that_never_ends_does_not_starve_a_low_one(pool: Pool) -> None:
    low = await created(pool, "low", timedelta(0))
    for day in range(1, 60):
        # Every day as many critical issues come in as there is time for.
        for _ in range(2):
            await created(pool, "critical", -timedelta(days=day))
        for _ in range(2):
            async with issues.claim_next(pool, "claimed", company_id="acme", assigned_agent_id="coder") as claim:
                assert claim is not None
                if claim.row.id == low:
                    assert 30 <= day <= 31
                    return
                await claim.complete(result="{}")
    pytest.fail("the low one was never claimed")


async def test_a_changed_priority_changes_the_rank(pool: Pool) -> None:
    first, second = [await created(pool, "low", timedelta(minutes=ago)) for ago in (2, 1)]
    await sql(pool, "UPDATE issues SET priority = 'high' WHERE id = %(id)s", id=second)
    assert await claimed_in_turn(pool) == [second, first]


async def test_the_rank_is_the_same_in_every_time_zone(pool: Pool) -> None:
    async with pool.transaction() as tx:
        await tx.execute("SET LOCAL TimeZone = 'America/New_York'")
        # Within thirty days a clock here is changed, so that in local time the head start would be an hour off.
        await tx.execute(
            "INSERT INTO issues (company_id, title, priority, created_at) VALUES ('acme', 't', 'critical', %(at)s)",
            {"at": datetime(2026, 3, 20, tzinfo=UTC)},
        )
    [row] = await sql(pool, "SELECT created_at - rank_at AS head_start FROM issues")
    assert row["head_start"] == timedelta(days=30)


async def test_the_head_starts_can_be_changed(pool: Pool) -> None:
    """What docs/claims.md says to run."""
    old = await created(pool, "low", timedelta(days=2))
    new = await created(pool, "medium", timedelta(0))
    text = (Path(__file__).parent.parent / "docs" / "claims.md").read_text(encoding="utf-8")
    [statements] = re.findall(r"```sql\n(ALTER TABLE issues DROP COLUMN rank_at;.*?)```", text, re.DOTALL)
    for statement in statements.split(";"):
        if statement.strip():
            await sql(pool, statement.strip())
    async with pool.transaction() as tx:
        assert await issues.check(tx) == []
    assert await claimed_in_turn(pool) == [old, new]


@pytest.mark.parametrize(
    ("columns", "constraint"),
    [
        ({"priority": "urgent"}, "issues_priority"),
        ({"status": "done"}, "issues_status"),
        ({"external_ref": "github#1"}, "issues_reference"),
    ],
)
async def test_the_table_refuses_what_is_impossible(columns: dict[str, str], constraint: str, pool: Pool) -> None:
    await open_issue(pool, external_ref="github#1")
    await open_issue(pool, external_ref="github#1", company="another")
    names = ", ".join(columns)
    with pytest.raises(psycopg.errors.IntegrityError, match=constraint):
        await sql(
            pool,
            f"INSERT INTO issues (company_id, title, {names}) VALUES ('acme', 't', %(value)s)",  # noqa: S608
            value=next(iter(columns.values())),
        )


async def test_an_issue_inserted_by_hand_needs_only_a_company_an_agent_and_a_title(pool: Pool) -> None:
    await sql(pool, "INSERT INTO issues (company_id, assigned_agent_id, title) VALUES ('acme', 'coder', 'by hand')")
    [id] = await claimed_in_turn(pool)
    [row] = await sql(pool, "SELECT * FROM issues WHERE id = %(id)s", id=id)
    assert (row["status"], row["priority"], row["attempt_count"]) == ("resolved", "medium", 1)


async def test_the_table_fits_its_gate(pool: Pool) -> None:
    async with pool.transaction() as tx:
        assert await issues.check(tx) == []


# The time it takes


def claim_statement() -> bytes:
    """What a run sends."""
    return issues.statements.claim_next(
        issues.phases["claimed"], "nothing", ("company_id", "assigned_agent_id"), due_by=True
    )


async def planned(pool: Pool, *, generic: bool = False) -> tuple[str, int]:
    """How a claim runs, and how many pages it touches to find its row; nothing is claimed."""
    params = {
        "fence": 1,
        "table": "issues",
        "claimed_by": "run:1",
        "lease": timedelta(minutes=1),
        "limit": 1,
        "due_by": datetime.now(UTC) + timedelta(minutes=1),
        "equal_company_id": "acme",
        "equal_assigned_agent_id": "agent-1",
    }
    async with pool.transaction() as tx:
        await tx.execute(f"SET LOCAL plan_cache_mode = {'force_generic_plan' if generic else 'auto'}".encode())
        pages, plan = 0, ""
        for _ in range(2):  # the first one may tidy the index up
            await tx.execute("SAVEPOINT before")
            cursor = await tx.connection.execute(
                b"EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF) " + claim_statement(), params, prepare=True
            )
            plan = "\n".join(row["QUERY PLAN"] for row in await cursor.fetchall())
            await tx.execute("ROLLBACK TO before")
        due = plan[plan.index("CTE due") : plan.index("CTE claimed")]
        pages = int(re.findall(r"shared hit=(\d+)", due)[0])
    return due, pages


async def test_a_claim_reads_as_little_among_a_hundred_thousand_open_issues_as_among_a_thousand(pool: Pool) -> None:
    await open_many(pool, 1_000, agents=10)
    _, among_few = await planned(pool)
    await open_many(pool, 99_000, agents=10)
    for generic in (False, True):
        plan, among_many = await planned(pool, generic=generic)
        assert "Index Scan using issues_open" in plan
        assert "Sort" not in plan
        assert among_many <= among_few + 3, plan  # a deeper index is a page or two more


async def test_issues_that_rest_at_the_head_of_a_queue_are_passed_over_in_the_index(pool: Pool) -> None:
    await open_many(pool, 20_000, agents=10)
    _, before = await planned(pool)
    await sql(
        pool,
        "UPDATE issues SET not_before = now() + interval '1 hour', attempt_count = 1 WHERE id IN ("
        "SELECT id FROM issues WHERE assigned_agent_id = 'agent-1' ORDER BY rank_at, id LIMIT 1000)",
    )
    plan, after = await planned(pool)
    assert re.search(r"Index Cond: .*not_before <= now\(\)", plan)
    assert after < before + 100, plan  # a look at each of them would be a thousand


async def test_a_sweep_reads_none_of_the_open_issues(pool: Pool) -> None:
    await open_many(pool, 20_000, agents=10)
    phase = issues.phases["claimed"]
    wait = {"first": timedelta(seconds=5), "longest": timedelta(minutes=1), "factor": 1.0}
    lease: dict[str, Any] = {"lease": timedelta(minutes=1)}
    async with pool.transaction() as tx:
        for statement, params in (
            (issues.statements.exhausted(phase), {}),
            (issues.statements.expire(phase), wait),
            (issues.statements.adopt(phase), lease),
        ):
            cursor = await tx.execute(
                b"EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF) " + statement, {**params, "refusing": list[str]()}
            )
            plan = "\n".join(row["QUERY PLAN"] for row in await cursor.fetchall())
            pages = sum(map(int, re.findall(r"shared hit=(\d+)", plan)[:1]))
            assert pages < 10, plan
            assert "Seq Scan on issues" not in plan
