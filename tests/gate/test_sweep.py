"""The sweep: one row that refuses to be freed holds up no other, and is named."""

from __future__ import annotations

import json
from typing import Any, LiteralString

import psycopg
import pytest
from gates import a_gate, make_tickets, opened, sql, status_of, tickets_gate

from webhooks.cli.escalations import _print
from webhooks.consumer import Consumer
from webhooks.escalation import Escalated, as_json, escalated
from webhooks.gate import Gate
from webhooks.pool import Pool
from webhooks.stuck import LONGEST_PAUSE_S, Stuck
from webhooks.why import why

REFUSE: LiteralString = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM nextval('tries');
    IF NEW.sc_id = 5 AND NEW.status <> OLD.status THEN
        RAISE EXCEPTION 'five stays where it is' USING ERRCODE = '{}', DETAIL = 'a value: 4711';
    END IF;
    RETURN NEW;
END $$
"""
TRIGGER = (
    "CREATE SEQUENCE tries",
    REFUSE.replace("{}", "P0001"),
    "CREATE TRIGGER refuse BEFORE UPDATE ON patch_sessions FOR EACH ROW EXECUTE FUNCTION refuse()",
)
# What each forbids row 5, and what mends it.
KINDS: dict[str, tuple[tuple[LiteralString, ...], LiteralString, str]] = {
    "a unique index": (
        (
            "CREATE UNIQUE INDEX one_ready ON patch_sessions (title) WHERE status = 'clarified'",
            "UPDATE patch_sessions SET title = 'story 99' WHERE sc_id = 5",
        ),
        "DROP INDEX one_ready",
        "one_ready",
    ),
    "a trigger": (TRIGGER, "DROP TRIGGER refuse ON patch_sessions", "five stays where it is"),
    "a trigger at the commit": (
        (
            *TRIGGER[:2],
            "CREATE CONSTRAINT TRIGGER refuse AFTER UPDATE ON patch_sessions DEFERRABLE INITIALLY DEFERRED"
            " FOR EACH ROW EXECUTE FUNCTION refuse()",
        ),
        "DROP TRIGGER refuse ON patch_sessions",
        "five stays where it is",
    ),
    "a check of more than the status": (
        ("ALTER TABLE patch_sessions ADD CONSTRAINT kept CHECK (status <> 'clarified' OR sc_id <> 5) NOT VALID",),
        "ALTER TABLE patch_sessions DROP CONSTRAINT kept",
        "kept",
    ),
    "a check that an old row breaks already": (
        ("ALTER TABLE patch_sessions ADD CONSTRAINT titled CHECK (title <> 'story 5') NOT VALID",),
        "ALTER TABLE patch_sessions DROP CONSTRAINT titled",
        "titled",
    ),
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def clock(pool: Pool) -> Clock:
    clock = Clock()
    pool.stuck = Stuck(clock)
    return clock


async def listed(pool: Pool, gate: Gate[Any]) -> list[Escalated]:
    async with pool.transaction() as tx:
        return await escalated(tx, Consumer(sources=[], gates=[gate]))


async def ten_expired(pool: Pool, gate: Gate[Any]) -> None:
    await opened(pool, gate, *range(1, 11))
    assert len(await gate.take_next(pool, "drafting", 10)) == 10
    await sql(pool, "UPDATE patch_sessions SET lease_until = now() - interval '1 second'")


async def statuses(pool: Pool) -> dict[int, str]:
    return {row["sc_id"]: row["status"] for row in await sql(pool, "SELECT sc_id, status FROM patch_sessions")}


@pytest.mark.invariant(6)
@pytest.mark.parametrize("kind", KINDS)
async def test_one_expired_row_that_may_not_go_back_holds_up_none_of_the_others(
    pool: Pool, clock: Clock, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = a_gate()
    await ten_expired(pool, gate)
    await opened(pool, gate, 99)
    statements, mend, told = KINDS[kind]
    for statement in statements:
        await sql(pool, statement)
    assert await gate.sweep(pool, "drafting") == 9
    assert [key for key, status in (await statuses(pool)).items() if status == "drafting"] == [5]
    # It is left out for a while, and a second sweep says the same.
    assert await gate.sweep(pool, "drafting") == 0

    [packet] = await listed(pool, gate)
    assert (packet.row, packet.phase, packet.cannot) == ("patch_sessions:5", "drafting", "be freed")
    assert packet.refusal is not None
    assert told in packet.refusal
    assert "4711" not in packet.refusal
    assert packet.constraint == (None if "trigger" in kind else told)
    assert [attempt["outcome"] for attempt in packet.attempts] == [None]
    assert json.loads(json.dumps(as_json([packet])))[0]["cannot"] == "be freed"
    _print(packet)
    assert f"cannot be freed: {packet.refusal}" in capsys.readouterr().out
    reason = pool.health.degraded["patch_sessions.drafting.stuck"]
    assert reason.startswith("1 row cannot be freed")
    assert told in reason
    async with pool.transaction() as tx:
        story = await why(tx, Consumer(sources=[], gates=[gate]), "patch_sessions:5", pool.settings)
    assert any(moment.what == "refusal" and told in moment.told for moment in story.timeline)

    await sql(pool, mend)
    clock.now += LONGEST_PAUSE_S
    assert await gate.sweep(pool, "drafting") == 1
    assert await status_of(pool, 5) == "clarified"
    assert await listed(pool, gate) == []
    assert "patch_sessions.drafting.stuck" not in pool.health.degraded
    assert await sql(pool, "SELECT * FROM stuck") == []


async def test_a_row_that_may_not_be_escalated_stays_and_the_others_reach_a_person(pool: Pool, clock: Clock) -> None:
    gate = a_gate()
    await ten_expired(pool, gate)
    await sql(pool, "UPDATE patch_sessions SET attempt_count = 3")
    await sql(pool, "ALTER TABLE patch_sessions ADD CONSTRAINT never CHECK (status <> 'escalated' OR sc_id <> 5)")
    assert await gate.sweep(pool, "drafting") == 9
    packets = await listed(pool, gate)
    assert len(packets) == 10
    assert [packet.row for packet in packets if packet.cannot] == ["patch_sessions:5"]


async def test_rows_without_an_attempt_left_are_escalated_past_one_that_refuses(pool: Pool, clock: Clock) -> None:
    gate = a_gate()
    await opened(pool, gate, *range(1, 11))
    await sql(pool, "UPDATE patch_sessions SET attempt_count = 3")
    await sql(pool, "ALTER TABLE patch_sessions ADD CONSTRAINT never CHECK (status <> 'escalated' OR sc_id <> 5)")
    assert await gate.sweep(pool, "drafting") == 9
    assert [packet.cannot for packet in await listed(pool, gate) if packet.row == "patch_sessions:5"] == ["be freed"]


async def test_claims_by_hand_get_a_lease_past_one_that_refuses(pool: Pool, clock: Clock) -> None:
    gate = a_gate()
    await opened(pool, gate, *range(1, 11))
    await sql(pool, "UPDATE patch_sessions SET status = 'drafting'")
    await sql(pool, "ALTER TABLE patch_sessions ADD CONSTRAINT bare CHECK (lease_until IS NULL OR sc_id <> 5)")
    assert await gate.sweep(pool, "drafting") == 9
    assert [row["sc_id"] for row in await sql(pool, "SELECT sc_id FROM patch_sessions WHERE lease_until IS NULL")] == [
        5
    ]
    assert [packet.row for packet in await listed(pool, gate)] == ["patch_sessions:5"]


async def test_more_rows_than_a_batch_that_refuse_do_not_hide_the_ones_behind(pool: Pool, clock: Clock) -> None:
    gate = a_gate()
    await sql(
        pool,
        "INSERT INTO patch_sessions (sc_id, title, status, claimed_from, lease_until, claim_seq)"
        " SELECT n, 'story', 'drafting', 'clarified', now() - interval '1 s', -n FROM generate_series(1, 260) AS n",
    )
    await sql(
        pool,
        "ALTER TABLE patch_sessions ADD CONSTRAINT early CHECK (status <> 'clarified' OR sc_id > 250) NOT VALID",
    )
    assert await gate.sweep(pool, "drafting") == 10
    [count] = await sql(pool, "SELECT count(*) AS rows FROM stuck")
    assert count["rows"] == 250
    assert pool.health.degraded["patch_sessions.drafting.stuck"].startswith("250 rows cannot be freed")
    assert len(await listed(pool, gate)) == 100


async def test_a_key_of_several_columns_is_named_and_paged(pool: Pool, clock: Clock) -> None:
    await make_tickets(pool)
    gate = tickets_gate()
    async with pool.transaction() as tx:
        for number in range(1, 6):
            await gate.open(tx, company="acme", number=number)
    await sql(
        pool, "UPDATE tickets SET status = 'claimed', claimed_from = 'open', lease_until = now() - interval '1 s'"
    )
    await sql(pool, "ALTER TABLE tickets ADD CONSTRAINT kept CHECK (status <> 'open' OR number <> 3) NOT VALID")
    assert await gate.sweep(pool, "claimed") == 4
    assert [packet.row for packet in await listed(pool, gate)] == ["tickets:acme/3"]


@pytest.mark.parametrize("code", ["40001", "53100", "57014", "25006", "08006", "42501"])
async def test_an_error_that_is_not_about_a_row_is_not_asked_of_each_row(pool: Pool, clock: Clock, code: str) -> None:
    gate = a_gate()
    await ten_expired(pool, gate)
    await sql(pool, TRIGGER[0])
    await sql(pool, REFUSE.replace("{}", code).encode())
    await sql(pool, TRIGGER[2])
    with pytest.raises(psycopg.Error, match="five stays"):
        await gate.sweep(pool, "drafting")
    # Sequences are not rolled back: five rows were tried, once each.
    [tries] = await sql(pool, "SELECT last_value AS tries FROM tries")
    assert tries["tries"] == 5
    assert await sql(pool, "SELECT * FROM stuck") == []


async def test_a_refusal_that_is_over_is_not_listed(pool: Pool, clock: Clock) -> None:
    gate = a_gate()
    await ten_expired(pool, gate)
    await sql(pool, KINDS["a check of more than the status"][0][0])
    await gate.sweep(pool, "drafting")
    assert len(await listed(pool, gate)) == 1
    async with pool.transaction() as tx:
        await gate.advance(tx, 5, "drafting", "closed")
    assert await listed(pool, gate) == []
    await sql(
        pool,
        "UPDATE patch_sessions SET status = 'drafting', lease_until = now() + interval '1 h',"
        " claimed_from = 'clarified' WHERE sc_id = 5",
    )
    assert await listed(pool, gate) == []
    await sql(pool, "DELETE FROM patch_sessions WHERE sc_id = 5")
    assert await listed(pool, gate) == []
    await sql(pool, "UPDATE stuck SET seen_at = seen_at - interval '1 h'")
    await gate.sweep(pool, "drafting")
    assert await sql(pool, "SELECT * FROM stuck") == []


async def test_a_row_that_refuses_is_left_out_longer_each_time_and_tried_in_the_end() -> None:
    clock = Clock()
    known = Stuck(clock)
    assert known.left_out("t", "p", "freed") == []
    for pause in (15, 30, 60, 120, 120):
        known.refused("t", "p", "freed", "1")
        assert known.left_out("t", "p", "freed") == ["1"]
        assert known.left_out("t", "p", "claimed") == []
        clock.now += pause - 0.1
        assert known.left_out("t", "p", "freed") == ["1"]
        clock.now += 0.1
        assert known.left_out("t", "p", "freed") == []
    assert known.went("t", "p", "freed", ["2", "1"]) == ["1"]
    known.refused("t", "p", "freed", "1")
    clock.now += 15
    assert known.left_out("t", "p", "freed") == []
