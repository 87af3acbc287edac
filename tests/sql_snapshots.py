"""Every composed statement as it runs, in `tests/sql/<table>.<phase>.<statement>.sql`.

A statement of no one phase has `any` in its place. `python -m tests.sql_snapshots` writes them anew; a test compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, LiteralString

from handlers.issues import EXTERNAL, issues
from handlers.patch_sessions import sessions
from webhooks import effects, statements
from webhooks import inbox as inbox_statements
from webhooks.gate import Gate
from webhooks.inbox import inbox, wants
from webhooks.phase import Conflict, Phase

DIRECTORY = Path(__file__).parent / "sql"

# What moves a row from outside, with the columns it writes: a snapshot is of what really runs.
OPENED: dict[str, tuple[LiteralString, ...]] = {
    "patch_sessions": ("sc_id", "title", "story_url"),
    "issues": ("company_id", "assigned_agent_id", "title", "body", "priority", "created_at", "external_ref", "told_at"),
}
FOUND_BY = {"issues": Conflict(EXTERNAL)}
ADVANCED: dict[str, list[tuple[tuple[str, ...], str, tuple[str, ...]]]] = {
    "patch_sessions": [
        (("asked",), "clarified", ("answer", "answered_by")),
        (("in_review", "closed"), "merged", ("merged_at",)),
    ],
    "deliveries": [],
    "issues": [
        (("open", "claimed", "escalated"), "resolved", ()),
        (("resolved",), "open", ("result", "assigned_agent_id", "title", "body", "priority", "told_at")),
    ],
}
COMPLETED: dict[str, tuple[str, ...]] = {
    "asked": ("question", "question_comment_id", "asked_at"),
    "drafted": ("patch", "base_commit"),
    "in_review": ("pull_request_number", "pull_request_url"),
    "processed": ("event", "reason", "parked_on", "parked_since", "wants", "moved_rows"),
    "resolved": ("result",),
    "ignored": ("event", "reason", "parked_on", "parked_since", "wants"),
}
# What code with a loop of its own claims by.
EQUAL: dict[str, tuple[str, ...]] = {"issues": ("company_id", "assigned_agent_id"), "deliveries": ("wants",)}
NOTED: dict[str, tuple[str, ...]] = {"deliveries": ("event",)}


def snapshots() -> dict[str, str]:
    """Return every statement by the name of its file."""
    texts = {name: statement.decode() + "\n" for gate in (sessions, issues, inbox) for name, statement in of_gate(gate)}
    shared = {
        "attempts.any.record": statements.RECORD_ATTEMPT,
        "attempts.any.close": statements.CLOSE_ATTEMPT,
        "attempts.any.read": statements.READ_ATTEMPT,
        "decisions.any.record": statements.RECORD_DECISION,
        "decisions.any.read": statements.READ_DECISION,
        "deliveries.any.wake_parked": statements.WAKE_PARKED,
        "deliveries.any.wanted": wants.WANTED,
        "deliveries.any.handled": wants.HANDLED,
        "deliveries.any.end_unhandled": wants.END_UNHANDLED,
        "deliveries.applying.split": inbox_statements.SPLIT,
        "deliveries.any.parked": statements.PARKED,
        "deliveries.any.wake": statements.WAKE,
        "effects.any.intend": effects.INTEND,
        "effects.any.find": effects.FIND,
        "effects.any.intend_again": effects.INTEND_AGAIN,
        "effects.any.record": effects.RECORD,
    }
    return texts | {f"{name}.sql": statement.decode() + "\n" for name, statement in shared.items()}


def of_gate(gate: Gate[Any]) -> Iterator[tuple[str, bytes]]:
    for phase in gate.phases.values():
        for name, statement in of_phase(gate, phase):
            yield f"{gate.table}.{phase.claimed}.{name}.sql", statement
    composed = gate.statements
    first = next(iter(gate.phases.values()))
    there = FOUND_BY.get(gate.table, Conflict(gate.key.columns))
    if opened := OPENED.get(gate.table):
        yield f"{gate.table}.{first.claimed}.open.sql", composed.open(first.ready, opened, first, there)
    for from_, to, columns in ADVANCED[gate.table]:
        entered = gate.entered(to)
        place = "any" if entered is None else entered.claimed
        yield f"{gate.table}.{place}.advance.sql", composed.advance(from_, to, columns, entered)
    yield f"{gate.table}.any.retry.sql", composed.retry(tuple(gate.phases.values()))
    yield f"{gate.table}.any.status.sql", composed.status()


def of_phase(gate: Gate[Any], phase: Phase) -> Iterator[tuple[str, bytes]]:
    composed = gate.statements
    yield "claim", composed.claim(phase)
    yield "claim_next", composed.claim_next(phase)
    yield "claim_next.no_last_chance", composed.claim_next(phase, "last chance")
    yield "claim_next.no_last_attempt", composed.claim_next(phase, "last attempt")
    yield "claim_next.marked", composed.claim_next(phase, marked=True)
    yield "last_chance_waits", composed.last_chance_waits(phase)
    if equal := EQUAL.get(gate.table):
        yield "claim_next.equal", composed.claim_next(phase, equal=equal, due_by=True)
        yield "claim_next.equal_marked", composed.claim_next(phase, equal=equal, due_by=True, marked=True)
    yield "claim_next.known", composed.claim_next(phase, known=True)
    yield "claim_next.left_out", composed.claim_next(phase, left_out=True)
    yield "renew", composed.renew(phase)
    yield "still_held", composed.still_held(phase)
    yield "hold", composed.hold(phase)
    for status in phase.done:
        columns = COMPLETED.get(status, ())
        yield f"complete.{status}", composed.complete(phase, status, columns, gate.entered(status))
    yield "release", composed.release(phase, NOTED.get(gate.table, ()))
    yield "give_back", composed.give_back(phase)
    yield "expire", composed.expire(phase)
    yield "adopt", composed.adopt(phase)
    yield "exhausted", composed.exhausted(phase)
    yield "notify_release", composed.release(phase, NOTED.get(gate.table, ()), notify=True)
    yield "notify_expire", composed.expire(phase, notify=True)
    yield "notify_exhausted", composed.exhausted(phase, notify=True)


def write() -> None:
    DIRECTORY.mkdir(exist_ok=True)
    wanted = snapshots()
    for path in DIRECTORY.glob("*.sql"):
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (DIRECTORY / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
