"""What a person decides about an escalated row, or a parked delivery: another set of attempts, or an end by hand.

A decision is taken in one transaction, changes a row only while it is escalated or parked, and is written down with who
took it and why.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import psycopg
from psycopg.errors import CheckViolation
from pydantic import JsonValue

from webhooks.consumer import Consumer
from webhooks.db import Transaction, clean, compose
from webhooks.db.batch import savepoint
from webhooks.db.sqlstate import is_about_the_row
from webhooks.errors import ConfigurationError, WebhooksError
from webhooks.gate import Gate
from webhooks.inbox import inbox
from webhooks.inbox.parked import apply_parked, end_parked, wait_anew
from webhooks.near import there_are
from webhooks.nesting import check
from webhooks.rows import named
from webhooks.shape import lists
from webhooks.statements import RECORD_DECISION
from webhooks.text import message_of

# A recorded result is not a person's to change, unless a person gave it.
TELL = compose(
    "UPDATE {effects} SET state = %(state)s, result = %(result)s, error = %(error)s, told_by = %(told_by)s,\n"
    "    not_done = not_done - (state = 'failed')::integer + (%(state)s = 'failed')::integer,\n"
    "    ended_at = statement_timestamp()\n"
    "WHERE idempotency_key = %(idempotency_key)s AND (state = 'intended' OR told_by IS NOT NULL)"
)
FIND = compose("SELECT state FROM {effects} WHERE idempotency_key = %(idempotency_key)s")


class NotEscalated(WebhooksError):
    """A person's decision does not fit the row as it stands; nothing was changed."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a person says became of an effect whose answer nobody recorded.

    Args:
        result: the JSON that the call returned; None when it did not happen, so that the next attempt calls again.
    """

    result: str | None


async def retry(
    tx: Transaction,
    consumer: Consumer,
    name: str,
    *,
    decided_by: str,
    reason: str,
    value: JsonValue = None,
    effects: Mapping[str, Told] | None = None,
) -> str:
    """Give an escalated row a new set of attempts; its visit stays, so that recorded effects are not called again. A
    parked delivery is applied now.

    Args:
        tx: the row's new place is in its `moved`.
        consumer: whose gates.
        name: `table:key`, or the number of a delivery.
        decided_by: who.
        reason: why.
        value: what the phase is told, as `claim.decision.value`.
        effects: by name, what became of effects whose answer nobody recorded.

    Returns:
        The status that the row waits in now.

    Raises:
        NotEscalated: it is neither escalated nor parked, or no phase to go back to is known.
        ConfigurationError: it is not a name, or an effect is not one that a person can tell of.
    """
    found = await named(tx, consumer, name)
    gate, label = found.gate, found.label
    told = {"decided_by": clean(decided_by), "reason": clean(reason)}
    if found.row is None or not (
        await gate.retry(tx, found.key, **told, value=value)
        or (gate is inbox and value is None and await _apply_parked(tx, found.key, **told))  # it asked nobody
    ):
        _refuse(gate, label, found.row)
    if gate is inbox and found.row["status"] == gate.escalated:
        await wait_anew(tx, found.key)
    # Read again, now that nobody else can move it.
    row = (await named(tx, consumer, label)).row
    phase = gate.entered(row["status"]) if row is not None else None
    if row is None or phase is None:
        raise NotEscalated(f"{label} came from {row and row['status']}, where no phase waits any more: resolve it")
    for effect, happened in (effects or {}).items():
        key = f"{label}:{phase.claimed}:{row['visit']}:{effect}"
        await _tell(tx, gate, found.key, key, effect, happened, **told)
    return str(row["status"])


async def retry_each(
    tx: Transaction,
    consumer: Consumer,
    names: Iterable[str],
    *,
    decided_by: str,
    reason: str,
    value: JsonValue = None,
) -> tuple[list[str], dict[str, str]]:
    """Retry several rows; see `retry`.

    Returns:
        The names of those that were still escalated, and by name why the database refused to let others go.
    """
    retried: list[str] = []
    refused: dict[str, str] = {}
    for name in names:
        try:
            async with savepoint(tx):
                await retry(tx, consumer, name, decided_by=decided_by, reason=reason, value=value)
            retried.append(name)
        except NotEscalated:
            continue
        except psycopg.Error as error:
            if not is_about_the_row(error):
                raise
            refused[name] = message_of(error)
    return retried, refused


async def resolve(
    tx: Transaction, consumer: Consumer, name: str, *, to: str, decided_by: str, reason: str, force: bool = False
) -> None:
    """Close an escalated row by hand: move it on, to another status. A parked delivery ends as `ignored` or
    `processed`.

    Args:
        tx: where; a phase that waits in that status is in its `moved`.
        consumer: whose gates.
        name: `table:key`, or the number of a delivery.
        to: the status: one that a phase waits or ends in, or that a check of the table names. In one that a phase waits
            in, a new visit starts.
        decided_by: who.
        reason: why.
        force: take any other status as well, as far as the table takes it.

    Raises:
        NotEscalated: it is not escalated, nor parked.
        ConfigurationError: it is not a name, or no such status is known, or a claim alone moves a row there.
    """
    found = await named(tx, consumer, name)
    gate, label = found.gate, found.label
    if to == gate.escalated:
        raise ConfigurationError(f"{label} is to be resolved, not to stay {to}")
    if found.row is not None and to == found.row["claimed_from"]:
        raise ConfigurationError(f"that would run it again as new, with its effects: webhooks retry {label} keeps them")
    if not force:
        await _check_known(tx, gate, to)
    told = {"reason": f"{clean(decided_by)}: {clean(reason)}"} if gate is inbox else {}
    try:
        moved = found.row is not None and await gate.advance(tx, found.key, gate.escalated, to, **told)
    except CheckViolation:
        raise ConfigurationError(f"{gate.table} takes no status {to!r}: a check of the table refuses it") from None
    if not moved and not (gate is inbox and await end_parked(tx, found.key, to, told["reason"])):
        _refuse(gate, label, found.row)
    await _record(tx, gate, found.key, f"resolve as {to}", decided_by=clean(decided_by), reason=clean(reason))


async def _check_known(tx: Transaction, gate: Gate[Any], to: str) -> None:
    """Refuse a status that nothing names: a row there would be found by nobody.

    Raises:
        ConfigurationError: it says what there is, what is like it first.
    """
    phases = gate.phases.values()
    known = {phase.ready for phase in phases} | {status for phase in phases for status in phase.done}
    # What claims alone move a row to is told by whoever moves it.
    if to in known or to in gate.phases or await lists(tx, gate.table, to):
        return
    meant = 'to mean it all the same: --force, or "force": true'
    raise ConfigurationError(f"{gate.table} knows no status {to!r}: {there_are(to, known)}; {meant}")


def told(text: str) -> tuple[str, Told]:
    """Read `NAME=done:JSON` or `NAME=not-done`.

    Raises:
        ValueError: it is neither.
    """
    name, _, said = text.partition("=")
    if name and said == "not-done":
        return name, Told(None)
    if not name or not said.startswith("done:"):
        raise ValueError(f"{text!r}: write NAME=not-done, or NAME=done:JSON with what the call returned")
    return name, Told(as_result(said.removeprefix("done:")))


def as_result(text: str) -> str:
    """Return JSON as an effect's result is kept.

    Raises:
        ValueError: it is not JSON.
    """
    return clean(json.dumps(as_value(text), ensure_ascii=False))


def as_value(text: str) -> JsonValue:
    """Read JSON that a person gave.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        check(text)
        value: JsonValue = json.loads(text, parse_constant=_no_number)
        return value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{text[:100]!r} is not JSON ({error}); a text needs its quotes, nothing is null") from None


async def _tell(
    tx: Transaction,
    gate: Gate[Any],
    key: object,
    idempotency_key: str,
    name: str,
    told: Told,
    *,
    decided_by: str,
    reason: str,
) -> None:
    params = {
        "idempotency_key": idempotency_key,
        "state": "failed" if told.result is None else "done",
        "result": told.result,
        "error": f"{decided_by} said that it did not happen" if told.result is None else None,
        "told_by": decided_by,
    }
    if (await tx.execute(TELL, params)).rowcount != 1:
        found = await (await tx.execute(FIND, params)).fetchone()
        state = "there is none" if found is None else f"it is {found['state']}"
        raise ConfigurationError(f"effect {name!r} is not one whose answer is missing ({idempotency_key}): {state}")
    said = "not done" if told.result is None else f"done, {told.result}"
    await _record(tx, gate, key, f"effect {name}: {said}", decided_by=decided_by, reason=reason)


async def _apply_parked(tx: Transaction, key: object, *, decided_by: str, reason: str) -> bool:
    parked = await apply_parked(tx, key)
    if parked:
        await _record(tx, inbox, key, "retry", decided_by=decided_by, reason=reason)
    return parked


async def _record(
    tx: Transaction, gate: Gate[Any], key: object, decision: str, *, decided_by: str, reason: str
) -> None:
    params = {"table": gate.table, "key": gate.key.text(key), "visit": None, "decision": decision, "value": None}
    await tx.execute(RECORD_DECISION, {**params, "decided_by": decided_by, "reason": reason})


def _refuse(gate: Gate[Any], label: str, row: Mapping[str, Any] | None) -> NoReturn:
    if row is None:
        raise NotEscalated(f"there is no row {label}")
    if row["status"] != gate.escalated:
        raise NotEscalated(f"{label} is not {gate.escalated} but {row['status']}: webhooks why {label}")
    raise NotEscalated(f"{label} was not in a phase when it was moved here: webhooks resolve {label} --to STATUS")


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number in JSON")
