"""A row as a person names it: `table:key`, or the number of a delivery alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.sql import SQL, Identifier

from webhooks.consumer import Consumer
from webhooks.db import Transaction, clean, compose, table
from webhooks.errors import ConfigurationError
from webhooks.gate import Gate
from webhooks.inbox import inbox
from webhooks.notify import notifications
from webhooks.phase import GATE_COLUMNS

# Not the body, which may be long.
OF_A_DELIVERY = (
    "source",
    "event",
    "received_at",
    "origin",
    "parent",
    "position",
    "replay_of",
    "reason",
    "parked_on",
    "parked_since",
    "wants",
    "moved_rows",
    "pruned_at",
    "headers_pruned_at",
)


@dataclass(frozen=True, slots=True)
class Named:
    """A row that somebody named.

    Args:
        gate: the gate over its table.
        label: `table:key`.
        key: its key, in the types of its columns; None where there is no such row.
        row: the key and the gate's columns (of a delivery also what it is); None where there is no such row.
    """

    gate: Gate[Any]
    label: str
    key: object
    row: dict[str, Any] | None


def gates_of(consumer: Consumer) -> Mapping[str, Gate[Any]]:
    """Return every gate by its table, the library's own first."""
    return {inbox.table: inbox, notifications.table: notifications, **consumer.gates}


def gate_of(consumer: Consumer, name: str) -> Gate[Any]:
    """Return the gate over a table.

    Raises:
        ConfigurationError: there is none.
    """
    gates = gates_of(consumer)
    if name not in gates:
        raise ConfigurationError(f"there is no gate over a table {name!r}; there are: {', '.join(gates)}")
    return gates[name]


def columns_of(gate: Gate[Any]) -> tuple[str, ...]:
    """Return the columns of a row that say how it stands."""
    return (*gate.key.columns, *GATE_COLUMNS, *(OF_A_DELIVERY if gate is inbox else ()))


async def named(tx: Transaction, consumer: Consumer, name: str) -> Named:
    """Find the row that somebody named.

    Args:
        tx: where to look.
        consumer: whose gates.
        name: `table:key`, the parts of a key of several columns joined by `/` (one within a part is `%2F`); digits
            alone name a delivery.

    Raises:
        ConfigurationError: it is not a name, or of a table without a gate, or its key has another number of parts.
    """
    of, colon, text = ("deliveries", ":", name) if name.isascii() and name.isdigit() else name.partition(":")
    if not colon or not text:
        raise ConfigurationError(f"{name!r} names no row: write TABLE:KEY, or the number of a delivery")
    gate = gate_of(consumer, of)
    try:
        key = gate.key.parsed(clean(text))
    except ValueError as error:
        raise ConfigurationError(f"{of}: {error}") from None
    row = await _read(tx, gate, key)
    if row is None:
        return Named(gate, await _label(tx, gate, key), None, None)
    found = gate.key.value(row)
    return Named(gate, gate.key.label(of, found), found, row)


async def row_by_text(tx: Transaction, gate: Gate[Any], text: str) -> dict[str, Any] | None:
    """Read a row by its key as text; None where there is none."""
    try:
        return await _read(tx, gate, gate.key.parsed(text))
    except ValueError:
        return None


def effect_name(label: str, attempt: Mapping[str, Any], effect: Mapping[str, Any]) -> str:
    """Return the name under which a phase calls an effect, given an attempt that called it."""
    return str(effect["idempotency_key"]).removeprefix(f"{label}:{attempt['phase']}:{attempt['visit']}:")


async def _read(tx: Transaction, gate: Gate[Any], key: tuple[str, ...]) -> dict[str, Any] | None:
    query = compose(
        "SELECT {columns} FROM {gated} WHERE {is_key}",
        columns=SQL(", ").join(map(Identifier, columns_of(gate))),
        gated=table(gate.table),
        is_key=gate.statements.is_key,
    )
    try:
        # A text that is no value of the column's type names no row, and must not end the transaction.
        async with tx.connection.transaction():
            return await (await tx.execute(query, gate.key.params(key))).fetchone()
    except psycopg.DataError:
        return None


async def _label(tx: Transaction, gate: Gate[Any], key: tuple[str, ...]) -> str:
    """Return the name of a row that is not there, as one that was there is recorded."""
    try:
        async with tx.connection.transaction():
            return await gate.label(tx, key)
    except psycopg.DataError:
        return gate.key.label(gate.table, key)
