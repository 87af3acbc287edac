"""Rows that a person has to decide about, each with what the person needs to know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from psycopg.sql import SQL, Composable, Identifier, Literal, Placeholder

from webhooks.consumer import Consumer
from webhooks.db import Transaction, clean, compose, table
from webhooks.deliveries import as_json as plain
from webhooks.errors import ConfigurationError
from webhooks.gate import Gate
from webhooks.rows import columns_of, effect_name, gate_of, gates_of, row_by_text
from webhooks.stuck import OF_TABLE

# Of the visit that escalated: what earlier ones did is settled.
ATTEMPTS = compose(
    "SELECT key, visit, claim_seq, phase, attempt, claimed_by, claimed_at, ended_at, outcome, error FROM {attempts}\n"
    "WHERE table_name = %(table)s AND key = ANY(%(keys)s) AND visit = ANY(%(visits)s) ORDER BY claimed_at"
)
EFFECTS = compose(
    "SELECT claim_seq, idempotency_key, state, result, error, calls, told_by, intended_at, ended_at FROM {effects}\n"
    "WHERE claim_seq = ANY(%(claim_seqs)s) ORDER BY intended_at"
)


@dataclass(frozen=True, slots=True)
class Escalated:
    """What a person needs to decide about a row.

    Args:
        row: `table:key`.
        phase: what it was in, named by its claimed status; None where the row was moved here from outside a phase.
        since: when its last attempt ended; None where none is recorded.
        attempt_count: how many were charged, of `max_attempts`.
        last_error: why it is here.
        attempts: those of this visit, with their errors.
        effects: what those attempts did to the outside world, as far as is known.
        cannot: `be freed` or `be claimed` where the row is not escalated, but refuses that; then `since` is since when.
        refusal: what it was refused by.
        constraint: the constraint among that; None where it was something else, such as a trigger.
    """

    row: str
    phase: str | None
    since: datetime | None
    attempt_count: int
    max_attempts: int
    last_error: str | None
    attempts: tuple[dict[str, Any], ...]
    effects: tuple[dict[str, Any], ...]
    cannot: str | None = None
    refusal: str | None = None
    constraint: str | None = None


async def escalated(tx: Transaction, consumer: Consumer, *, of: str | None = None, limit: int = 100) -> list[Escalated]:
    """Return the rows that a person has to decide about, `dead` deliveries and rows that refuse among them.

    Args:
        tx: where to look.
        consumer: whose gates.
        of: only those of this table.
        limit: how many of a table at most.

    Raises:
        ConfigurationError: there is no gate over that table.
    """
    gates = gates_of(consumer).values() if of is None else [gate_of(consumer, of)]
    return [
        packet
        for gate in gates
        for packet in [
            *await _packets(tx, gate, await _rows(tx, gate, limit, {})),
            *await _stuck(tx, gate, limit),
        ]
    ]


async def matching(tx: Transaction, consumer: Consumer, where: Mapping[str, str], *, of: str | None) -> list[str]:
    """Return the names of all escalated rows that a person can retry and whose columns have certain values.

    Args:
        tx: where to look.
        consumer: whose gates.
        where: columns and their values, written as PostgreSQL reads them.
        of: only those of this table.

    Raises:
        ConfigurationError: there is no gate over that table, or no such column in one.
        psycopg.DataError: a value is none of its column's type.
    """
    gates = gates_of(consumer).values() if of is None else [gate_of(consumer, of)]
    names: list[str] = []
    for gate in gates:
        await _check_columns(tx, gate, where)
        rows = await _rows(tx, gate, None, where)
        names += [gate.key.label(gate.table, gate.key.value(row)) for row in rows if row["claimed_from"] is not None]
    return names


def as_json(packets: Sequence[Escalated]) -> list[dict[str, Any]]:
    """Return packets as plain values."""
    return [
        plain({**asdict(packet), "attempts": [*packet.attempts], "effects": [*packet.effects]}) for packet in packets
    ]


async def _stuck(tx: Transaction, gate: Gate[Any], limit: int) -> list[Escalated]:
    """Return the rows that refuse to be claimed or freed, as far as they still stand where they did."""
    lines = await (await tx.execute(OF_TABLE, {"table": gate.table, "limit": limit})).fetchall()
    found = [(line, await row_by_text(tx, gate, line["key"])) for line in lines]
    here = [(line, row) for line, row in found if row is not None and _waits_for(gate, line, row)]
    packets = await _packets(tx, gate, [row for _, row in here])
    return [
        replace(
            packet,
            phase=line["phase"],
            since=line["since"],
            cannot=f"be {line['what']}",
            refusal=line["reason"],
            constraint=line["constraint_name"],
        )
        for (line, _), packet in zip(here, packets, strict=True)
    ]


def _waits_for(gate: Gate[Any], line: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Whether a row still waits for what it refused."""
    phase = gate.phases.get(line["phase"])
    if phase is None:
        return False
    if line["what"] == "freed" and row["status"] == phase.claimed:
        return row["lease_until"] is None or bool(row["lease_until"] <= line["seen_at"])
    spent = row["attempt_count"] >= row["max_attempts"]
    return bool(row["status"] == phase.ready and spent == (line["what"] == "freed"))


async def _packets(tx: Transaction, gate: Gate[Any], rows: Sequence[Mapping[str, Any]]) -> list[Escalated]:
    keys = [gate.key.text(gate.key.value(row)) for row in rows]
    visits = [row["visit"] for row in rows]
    params = {"table": gate.table, "keys": keys, "visits": visits}
    attempts = await (await tx.execute(ATTEMPTS, params)).fetchall() if rows else []
    seqs = {"claim_seqs": [attempt["claim_seq"] for attempt in attempts]}
    effects = await (await tx.execute(EFFECTS, seqs)).fetchall() if attempts else []
    packets: list[Escalated] = []
    for key, row in zip(keys, rows, strict=True):
        label = f"{gate.table}:{key}"
        own = [attempt for attempt in attempts if (attempt["key"], attempt["visit"]) == (key, row["visit"])]
        claims = {attempt["claim_seq"]: attempt for attempt in own}
        ended = [attempt["ended_at"] for attempt in own if attempt["ended_at"] is not None]
        phase = gate.entered(row["claimed_from"])
        packets.append(
            Escalated(
                row=label,
                phase=None if phase is None else phase.claimed,
                since=max(ended, default=None),
                attempt_count=row["attempt_count"],
                max_attempts=row["max_attempts"],
                last_error=row["last_error"],
                attempts=tuple(own),
                effects=tuple(
                    {"name": effect_name(label, claims[effect["claim_seq"]], effect), **effect}
                    for effect in effects
                    if effect["claim_seq"] in claims
                ),
            )
        )
    return packets


async def _rows(tx: Transaction, gate: Gate[Any], limit: int | None, where: Mapping[str, str]) -> list[dict[str, Any]]:
    filters: list[Composable] = [
        SQL(" AND {} = {}").format(Identifier(column), Placeholder(f"is_{number}"))
        for number, column in enumerate(where)
    ]
    query = compose(
        "SELECT {columns} FROM {gated} WHERE status = {escalated}{filters} ORDER BY {keys} LIMIT %(limit)s",
        columns=SQL(", ").join(map(Identifier, columns_of(gate))),
        gated=table(gate.table),
        escalated=Literal(gate.escalated),
        filters=SQL("").join(filters),
        keys=gate.statements.key_list,
    )
    params = {f"is_{number}": clean(value) for number, value in enumerate(where.values())}
    return await (await tx.execute(query, {**params, "limit": limit})).fetchall()


async def _check_columns(tx: Transaction, gate: Gate[Any], where: Mapping[str, str]) -> None:
    cursor = await tx.execute(compose("SELECT * FROM {gated} WHERE false", gated=table(gate.table)))
    known = [column.name for column in cursor.description or ()]
    for column in where:
        if column not in known:
            raise ConfigurationError(f"{gate.table} has no column {column!r}; it has {', '.join(known)}")
