"""The composed statements: as they are kept in tests/sql, and as the server plans them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from gates import Session
from sql_snapshots import DIRECTORY, snapshots

from webhooks.errors import ConfigurationError
from webhooks.gate import Gate
from webhooks.phase import Key
from webhooks.pool import Pool
from webhooks.statements import column_params

SNAPSHOTS = snapshots()
PARAMS: dict[str, Any] = {
    "fence": 1,
    "refusing": [],
    "count": 1,
    "limit": 1,
    "claim_seq": 1,
    "claim_seqs": [1],
    "claimed_by": "test",
    "claimed_at": datetime.now(UTC),
    "lease": timedelta(minutes=1),
    "delay": timedelta(0),
    "first": timedelta(seconds=5),
    "longest": timedelta(minutes=10),
    "timeout": timedelta(minutes=1),
    "factor": 1.0,
    "visit": 1,
    "attempt": 1,
    "escalate": False,
    "refund": 0,
    "error": None,
    "outcome": "done",
    "retry_safe": False,
    "calls": 1,
    "not_done": 0,
    "phase": "drafting",
    "table": "patch_sessions",
    "rows": ["patch_sessions:1"],
    "ids": [1],
    "decision": "retry",
    "value": None,
    "decided_by": "somebody",
    "reason": "why",
    "input_hash": "",
    "state": "done",
    "result": "1",
    "found_seq": 1,
    "equal_wants": "shortcut/story.update",
    "process": "here",
    "living": timedelta(seconds=30),
    "wants": ["shortcut/story.update"],
    "no_source": "",
    "no_handler": "",
    "equal_company_id": "acme",
    "equal_assigned_agent_id": "coder",
    "due_by": datetime.now(UTC),
    "mark_0": "2026-01-01",
    "mark_1": "1",
    "id": 1,
    "positions": [1],
    "events": ["story.update"],
    "parts": [b"{}"],
    "max_attempts": 5,
    "at_once": 50,
    "apart": timedelta(milliseconds=5),
}
TEXT_KEYED = ("attempts.", "effects.", "decisions.")


def test_every_statement_is_kept_as_it_runs() -> None:
    kept = {path.name: path.read_text(encoding="utf-8") for path in DIRECTORY.glob("*.sql")}
    assert kept == SNAPSHOTS, "a statement changed: look at it, then run python -m tests.sql_snapshots"


@pytest.mark.invariant(4)
def test_the_claim_is_the_one_conditional_update() -> None:
    claim = SNAPSHOTS["patch_sessions.drafting.claim.sql"]
    assert any(line.startswith("UPDATE \"patch_sessions\" SET status = 'drafting'") for line in claim.splitlines())
    assert "WHERE \"sc_id\" = %(key)s AND status = 'clarified'" in claim
    assert claim.count("UPDATE") == 1
    assert "SELECT" not in claim


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_no_update_contains_a_volatile_function_and_none_is_without_a_guard(name: str) -> None:
    text = SNAPSHOTS[name]
    assert not re.search(r"nextval|random|clock_timestamp|gen_random|txid", text)
    assert "public." not in text
    for update in re.findall(r"(?<!KEY )UPDATE (?:.|\n)*?(?:RETURNING|\n\)|$)", text):
        assert "WHERE" in update, update


@pytest.mark.invariant(5)
@pytest.mark.parametrize("name", [name for name in SNAPSHOTS if re.search(r"\.(hold|complete|release|renew)\b", name)])
def test_every_write_of_an_owner_names_the_claim_and_its_status(name: str) -> None:
    for table, text in re.findall(r'UPDATE "(\w+)" ((?:.|\n)*?WHERE .*)', SNAPSHOTS[name]):
        where = text.rpartition("WHERE ")[2]
        assert "claim_seq = " in where
        # The attempt's own line is closed only if the row was ours.
        assert 'FROM "moved rows"' in text if table == "attempts" else "status = '" in where


async def test_the_server_plans_every_statement_and_none_needs_to_read_a_whole_table(pool: Pool) -> None:
    async with pool.transaction() as tx:
        await tx.execute("SET LOCAL enable_seqscan = off")
        for name, text in SNAPSHOTS.items():
            key = "text" if name.startswith(TEXT_KEYED) else [1] if "ANY(%(key)s)" in text else 1
            columns = dict.fromkeys(re.findall(r"%\((set_\w+)\)s", text))
            cursor = await tx.execute(f"EXPLAIN {text}".encode(), {**PARAMS, **columns, "key": key})
            plan = "\n".join(row["QUERY PLAN"] for row in await cursor.fetchall())
            whole = plan.replace("Seq Scan on processes", "")  # a line for each that runs
            assert "Seq Scan" not in whole, f"{name}: {plan}"


@pytest.mark.parametrize("statement", ["claim_next", "exhausted"])
async def test_the_queue_is_read_through_the_partial_index_of_its_status(statement: str, pool: Pool) -> None:
    text = SNAPSHOTS[f"patch_sessions.drafting.{statement}.sql"]
    async with pool.transaction() as tx:
        await tx.execute("SET LOCAL enable_seqscan = off")
        await tx.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        cursor = await tx.execute(f"EXPLAIN {text}".encode(), PARAMS)
        plan = "\n".join(row["QUERY PLAN"] for row in await cursor.fetchall())
    assert "patch_sessions_clarified" in plan


def test_text_on_its_way_into_a_column_is_rid_of_what_postgres_refuses() -> None:
    assert column_params({"answer": "a\x00b\ud83d", "number": 3}) == {
        "set_answer": "a\ufffdb\ufffd",
        "set_number": 3,
    }


@pytest.mark.parametrize(("key", "values"), [("sc_id", 7), ("sc_id", (7,)), ("company, number", ("acme", 7))], ids=str)
def test_a_key_is_one_value_or_a_tuple_of_its_columns(key: Any, values: object) -> None:
    assert len(Key.of(key).values(values)) == len(Key.of(key).columns)


@pytest.mark.parametrize(
    ("key", "values"), [("sc_id", (1, 2)), ("company, number", 7), ("company, number", ("acme",))], ids=str
)
def test_a_key_with_another_number_of_parts_is_refused(key: Any, values: object) -> None:
    with pytest.raises(ValueError, match="the key is"):
        Key.of(key).values(values)


def test_a_name_that_is_no_plain_name_is_refused() -> None:
    for table in ("patch_sessions; DROP TABLE x", 'a"b', "public.patch_sessions", "", "a b", "a" * 64):
        with pytest.raises(ConfigurationError):
            Gate(table, key="id", row=Session)
    for status in ("it's", "a b", "", "a%s", "a\\"):
        with pytest.raises(ConfigurationError):
            Gate("patch_sessions", key="sc_id").phase(status, claimed="drafting", done="drafted")
