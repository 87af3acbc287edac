"""What happened to a row or a delivery, as one timeline, and whether it could be claimed now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from webhooks.consumer import Consumer
from webhooks.db import Transaction, compose, database_time
from webhooks.deliveries import as_json as plain
from webhooks.inbox import inbox
from webhooks.rows import Named, effect_name, named
from webhooks.settings import Settings
from webhooks.standing import Standing, standing
from webhooks.stuck import OF_ROW

MOST = 500

ATTEMPTS = compose(
    "SELECT claim_seq, phase, visit, attempt, claimed_by, claimed_at, ended_at, outcome, error FROM {attempts}\n"
    "WHERE table_name = %(table)s AND key = %(key)s ORDER BY claimed_at DESC LIMIT %(most)s"
)
# Found by their claims: a key may hold what separates the parts of an idempotency key.
EFFECTS = compose(
    "SELECT e.idempotency_key, e.claim_seq, e.state, e.result, e.error, e.calls, e.not_done, e.told_by,\n"
    "    e.intended_at, e.call_until, e.ended_at, a.phase, a.visit\n"
    "FROM {attempts} AS a JOIN {effects} AS e ON e.claim_seq = a.claim_seq\n"
    "WHERE a.table_name = %(table)s AND a.key = %(key)s ORDER BY e.intended_at DESC LIMIT %(most)s"
)
DECISIONS = compose(
    "SELECT decision, decided_by, reason, decided_at, value FROM {decisions}\n"
    "WHERE table_name = %(table)s AND key = %(key)s ORDER BY decided_at DESC LIMIT %(most)s"
)
MOVED_BY = compose(
    "SELECT d.id, d.source, d.event, d.received_at, (\n"
    "    SELECT max(a.ended_at) FROM {attempts} AS a\n"
    "    WHERE a.table_name = 'deliveries' AND a.key = d.id::text AND a.outcome = 'done'\n"
    ") AS applied_at\n"
    "FROM {deliveries} AS d WHERE d.moved_rows @> ARRAY[%(label)s::text] ORDER BY d.received_at DESC LIMIT %(most)s"
)
WAITING = compose(
    "SELECT id, source, event, parked_since FROM {deliveries} WHERE parked_on = %(label)s\n"
    "ORDER BY parked_since DESC LIMIT %(most)s"
)
PARTS = compose("SELECT id, event, received_at FROM {deliveries} WHERE parent = %(id)s ORDER BY position")


@dataclass(frozen=True, slots=True)
class Moment:
    """One line of a timeline.

    Args:
        at: when, by the database's clock.
        what: `delivery`, `claim`, `end`, `effect`, `decision` or `refusal`.
        told: the line for a person.
        claim_seq: the claim it belongs to.
    """

    at: datetime
    what: str
    told: str
    claim_seq: int | None = None


@dataclass(frozen=True, slots=True)
class Why:
    """The answer.

    Args:
        label: `table:key`.
        now: the database's time.
        row: the key and the gate's columns; None where there is no such row.
        standing: what would become of a claim made now.
        timeline: what is recorded, in time order.
        cut: whether there is more than is shown.
    """

    label: str
    now: datetime
    row: dict[str, Any] | None
    standing: Standing
    timeline: tuple[Moment, ...]
    cut: bool


async def why(tx: Transaction, consumer: Consumer, name: str, settings: Settings) -> Why:
    """Tell what happened to a row.

    Args:
        tx: where to look; nothing is written.
        consumer: whose gates.
        name: `table:key`, or the number of a delivery.
        settings: how long a lease lasts.

    Raises:
        ConfigurationError: it is not a name, or of a table without a gate.
    """
    found = await named(tx, consumer, name)
    now = await database_time(tx)
    moments = sorted(await _moments(tx, found), key=lambda moment: moment.at)
    return Why(
        found.label,
        now,
        found.row,
        standing(found.gate, found.label, found.row, now, settings.lease),
        tuple(moments[-MOST:]),
        len(moments) > MOST,
    )


def as_json(answer: Why) -> dict[str, Any]:
    """Return an answer as plain values."""
    return plain(
        {
            "row": answer.label,
            "now": answer.now,
            "columns": answer.row,
            "claim": {
                "claimable": answer.standing.claimable,
                "reason": answer.standing.reason,
                "told": answer.standing.told,
                "do": answer.standing.do,
            },
            "timeline": [
                {"at": moment.at, "what": moment.what, "told": moment.told, "claim_seq": moment.claim_seq}
                for moment in answer.timeline
            ],
            "cut": answer.cut,
        }
    )


async def _moments(tx: Transaction, found: Named) -> list[Moment]:
    """Read what is recorded. A row that is gone has left its attempts, effects and decisions behind."""
    params = {"table": found.gate.table, "key": found.label.partition(":")[2], "label": found.label, "most": MOST + 1}

    async def rows(query: bytes) -> Sequence[dict[str, Any]]:
        return await (await tx.execute(query, params)).fetchall()

    moments = [moment for attempt in await rows(ATTEMPTS) for moment in _attempt(attempt)]
    moments += [moment for effect in await rows(EFFECTS) for moment in _effect(found.label, effect)]
    moments += [_decision(decision) for decision in await rows(DECISIONS)]
    moments += [_moved(delivery) for delivery in await rows(MOVED_BY)]
    moments += [_waits(delivery) for delivery in await rows(WAITING)]
    moments += [_refuses(line) for line in await rows(OF_ROW)]
    if found.gate is inbox and found.row is not None:
        parts = await (await tx.execute(PARTS, {"id": found.row["id"]})).fetchall()
        moments += _delivery(found.row, parts)
    return moments


def _attempt(attempt: dict[str, Any]) -> Iterator[Moment]:
    seq, number = attempt["claim_seq"], f"attempt {attempt['attempt']} at {attempt['phase']}"
    by = attempt["claimed_by"] or "somebody"
    yield Moment(attempt["claimed_at"], "claim", f"{number}: claimed by {by}", seq)
    if attempt["ended_at"] is not None:
        error = f": {attempt['error']}" if attempt["error"] else ""
        yield Moment(attempt["ended_at"], "end", f"{number}: {attempt['outcome']}{error}", seq)


def _effect(label: str, effect: dict[str, Any]) -> Iterator[Moment]:
    seq = effect["claim_seq"]
    name = f"effect {effect_name(label, effect, effect)!r}"
    again = _after_others(effect)  # each call writes over the line of the last
    if effect["state"] == "intended":
        until = effect["call_until"].isoformat(sep=" ", timespec="seconds")
        told = f"{name}: about to be called{again}; no answer is recorded, and after {until} nobody knows"
        yield Moment(effect["intended_at"], "effect", told, seq)
        return
    yield Moment(effect["intended_at"], "effect", f"{name}: about to be called{again}", seq)
    result = f", {_short(effect['result'])}" if effect["result"] is not None else ""
    error = f", {effect['error']}" if effect["error"] else ""
    by = f", as {effect['told_by']} said" if effect["told_by"] else ""
    yield Moment(effect["ended_at"], "effect", f"{name}: {effect['state']}{result}{error}{by}", seq)


def _after_others(effect: dict[str, Any]) -> str:
    """Say of a call that was not the first what became of those before it."""
    earlier = effect["calls"] - 1
    not_done = effect["not_done"] - (effect["state"] == "failed")
    told = [f"{not_done} before it certainly did not happen"] if not_done else []
    told += [f"of {earlier - not_done} before it no answer was recorded"] if earlier > not_done else []
    return f", call number {effect['calls']} ({', '.join(told)})" if earlier else ""


def _decision(decision: dict[str, Any]) -> Moment:
    value = "" if decision["value"] is None else f", with {_short(decision['value'])}"
    told = f"{decision['decided_by']} decided: {decision['decision']}{value} ({decision['reason']})"
    return Moment(decision["decided_at"], "decision", told)


def _moved(delivery: dict[str, Any]) -> Moment:
    told = f"delivery {delivery['id']} ({_named(delivery)}) moved it"
    return Moment(delivery["applied_at"] or delivery["received_at"], "delivery", told)


def _waits(delivery: dict[str, Any]) -> Moment:
    return Moment(delivery["parked_since"], "delivery", f"delivery {delivery['id']} ({_named(delivery)}) waits for it")


def _refuses(line: dict[str, Any]) -> Moment:
    told = f"cannot be {line['what']}, last tried at {line['seen_at']:%Y-%m-%d %H:%M:%S%z}: {line['reason']}"
    return Moment(line["since"], "refusal", told)


def _delivery(row: dict[str, Any], parts: Sequence[dict[str, Any]]) -> Iterator[Moment]:
    part = f", event {row['position']} of delivery {row['parent']}" if row["parent"] is not None else ""
    again = f", a replay of delivery {row['replay_of']}" if row["replay_of"] is not None else ""
    yield Moment(row["received_at"], "delivery", f"{row['origin']} from {_named(row)}{part}{again}")
    if row["parked_on"] is not None:
        yield Moment(row["parked_since"], "delivery", f"parked on {row['parked_on']}: {row['reason']}")
    for what, at in (("body was", row["pruned_at"]), ("headers were", row["headers_pruned_at"])):
        if at is not None:
            yield Moment(at, "delivery", f"its {what} pruned, so it cannot be run again")
    for each in parts:
        yield Moment(each["received_at"], "delivery", f"split: delivery {each['id']} is its {each['event']}")


def _named(delivery: dict[str, Any]) -> str:
    return f"{delivery['source']} {delivery['event']}" if delivery["event"] else str(delivery["source"])


def _short(text: str, most: int = 200) -> str:
    return text if len(text) <= most else f"{text[:most]}…"
