"""Rows that refuse to be claimed hold up no other, are named, and are left out for a while."""

from __future__ import annotations

import psycopg
import pytest
from gates import a_gate, opened, sql, status_of

from webhooks.consumer import Consumer
from webhooks.escalation import Escalated, escalated
from webhooks.pool import Pool
from webhooks.stuck import LONGEST_PAUSE_S, Stuck


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def clock(pool: Pool) -> Clock:
    clock = Clock()
    pool.stuck = Stuck(clock)
    return clock


async def refusing(pool: Pool, condition: str, code: str = "P0001") -> None:
    """A trigger by which some rows refuse to be claimed; it counts how often it was asked, for good."""
    await sql(pool, "CREATE SEQUENCE asked")
    await sql(
        pool,
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF NEW.status = 'drafting' AND {condition} THEN PERFORM nextval('asked');"
        f" RAISE EXCEPTION 'not this one' USING ERRCODE = '{code}'; END IF; RETURN NEW; END $$".encode(),
    )
    await sql(pool, "CREATE TRIGGER refuse BEFORE UPDATE ON patch_sessions FOR EACH ROW EXECUTE FUNCTION refuse()")


async def asked(pool: Pool) -> int:
    [row] = await sql(pool, "SELECT CASE WHEN is_called THEN last_value ELSE 0 END AS times FROM asked")
    return int(row["times"])


async def listed(pool: Pool) -> list[Escalated]:
    async with pool.transaction() as tx:
        return await escalated(tx, Consumer(sources=[], gates=[a_gate()]))


async def claimed(pool: Pool, limit: int = 10, **how: object) -> list[object]:
    return [claim.key for claim in await a_gate().take_next(pool, "drafting", limit, **how)]  # type: ignore[arg-type]


async def test_more_rows_than_a_page_that_refuse_do_not_hide_the_ones_behind(pool: Pool, clock: Clock) -> None:
    await opened(pool, a_gate(), *range(1, 126))
    await refusing(pool, "NEW.sc_id <= 120")
    assert await claimed(pool, 3) == [121, 122, 123]
    # From now on they are left out, and the others are claimed as if those were not there.
    times = await asked(pool)
    assert times == 121  # each by itself, after the batch met the first
    assert await claimed(pool) == [124, 125]
    assert await claimed(pool) == []
    assert await asked(pool) == times
    packets = await listed(pool)
    assert len(packets) == 100
    assert {packet.cannot for packet in packets} == {"be claimed"}
    assert packets[0].refusal is not None
    assert packets[0].refusal.startswith("not this one (PL/pgSQL function refuse()")


@pytest.mark.parametrize("known", [False, True], ids=["looked for", "known"])
async def test_a_row_that_was_mended_is_claimed_after_its_pause(pool: Pool, clock: Clock, known: bool) -> None:
    keys = {"keys": [1, 2]} if known else {}
    gate = a_gate()
    await opened(pool, gate, 1, 2)
    await sql(pool, "ALTER TABLE patch_sessions ADD CONSTRAINT never CHECK (status <> 'drafting' OR sc_id <> 1)")
    assert await claimed(pool, **keys) == [2]
    [packet] = await listed(pool)
    assert (packet.row, packet.phase, packet.constraint) == ("patch_sessions:1", "drafting", "never")
    await gate.sweep(pool, "drafting")
    assert pool.health.degraded["patch_sessions.drafting.stuck"].startswith("1 row cannot be claimed")
    await sql(pool, "ALTER TABLE patch_sessions DROP CONSTRAINT never")
    assert await claimed(pool, **keys) == []
    clock.now += LONGEST_PAUSE_S
    assert await claimed(pool, **keys) == [1]
    assert await listed(pool) == []
    assert await sql(pool, "SELECT * FROM stuck") == []
    assert pool.health.degraded == {}


async def test_a_row_that_is_refused_for_the_moment_is_claimed_a_second_later(pool: Pool, clock: Clock) -> None:
    """A unique index by which one row of a kind is worked on at a time."""
    gate = a_gate()
    await opened(pool, gate, 1, 2)
    await sql(pool, "UPDATE patch_sessions SET title = 'one customer'")
    await sql(pool, "CREATE UNIQUE INDEX one ON patch_sessions (title) WHERE status = 'drafting'")
    [claim] = await gate.take_next(pool, "drafting", 2)
    async with claim.held():
        assert await claimed(pool) == []
        await claim.complete()
    assert claim.key == 1
    clock.now += 2.0
    assert await claimed(pool) == [2]


@pytest.mark.parametrize("code", ["40001", "53100", "57014", "25006", "42501"])
async def test_an_error_that_is_not_about_a_row_is_not_asked_of_each_row(pool: Pool, clock: Clock, code: str) -> None:
    await opened(pool, a_gate(), *range(1, 6))
    await refusing(pool, "true", code)
    with pytest.raises(psycopg.Error, match="not this one"):
        await claimed(pool)
    assert await asked(pool) == 1
    assert await sql(pool, "SELECT * FROM stuck") == []
    assert await status_of(pool, 1) == "clarified"
