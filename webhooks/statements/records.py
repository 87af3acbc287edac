"""What is written beside a gated row: attempts, decisions, and the deliveries that waited for it."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from typing import cast

from psycopg.errors import NotNullViolation, UndefinedColumn
from psycopg.types.json import Jsonb

from webhooks.db import clean, compose
from webhooks.errors import ConfigurationError
from webhooks.text import message_of

RECORD_ATTEMPT = compose(
    "INSERT INTO {attempts} (claim_seq, table_name, key, phase, visit, attempt, claimed_by, claimed_at)\n"
    "VALUES (%(claim_seq)s, %(table)s, %(key)s, %(phase)s, %(visit)s, %(attempt)s, %(claimed_by)s, %(claimed_at)s)"
)
CLOSE_ATTEMPT = compose(
    "UPDATE {attempts} SET ended_at = statement_timestamp(), outcome = %(outcome)s, error = %(error)s\n"
    "WHERE claim_seq = %(claim_seq)s AND ended_at IS NULL"
)
READ_ATTEMPT = compose("SELECT outcome FROM {attempts} WHERE claim_seq = %(claim_seq)s")
TIMES_PUT_BACK = compose(
    "SELECT count(*) AS times FROM {attempts} AS a JOIN {attempts} AS o\n"
    "    ON o.table_name = a.table_name AND o.key = a.key AND o.phase = a.phase AND o.visit = a.visit\n"
    "WHERE a.claim_seq = %(claim_seq)s AND o.outcome = 'snoozed' AND o.error IS NOT NULL"
)
WAKE_PARKED = compose(
    "WITH parked AS MATERIALIZED (\n"
    "    SELECT id FROM {deliveries} WHERE parked_on = ANY(%(rows)s) AND status = 'received'\n"
    "    FOR NO KEY UPDATE SKIP LOCKED\n"
    ")\n"
    "UPDATE {deliveries} AS t SET not_before = statement_timestamp()\n"
    "FROM parked WHERE t.id = parked.id AND t.status = 'received' RETURNING t.id, t.parked_on"
)
PARKED = compose("SELECT id FROM {deliveries} WHERE parked_on = ANY(%(rows)s) AND status = 'received' ORDER BY id")
WAKE = compose(
    "WITH parked AS MATERIALIZED (\n"
    "    SELECT id FROM {deliveries} WHERE id = ANY(%(ids)s) AND parked_on IS NOT NULL AND status = 'received'\n"
    "    FOR NO KEY UPDATE SKIP LOCKED\n"
    ")\n"
    "UPDATE {deliveries} AS t SET not_before = statement_timestamp()\n"
    "FROM parked WHERE t.id = parked.id AND t.status = 'received' RETURNING t.id, t.parked_on"
)
RECORD_DECISION = compose(
    "INSERT INTO {decisions} (table_name, key, visit, decision, decided_by, reason, value)\n"
    "VALUES (%(table)s, %(key)s, %(visit)s, %(decision)s, %(decided_by)s, %(reason)s, %(value)s)"
)
# A value stays what was said until another is.
READ_DECISION = compose(
    "SELECT decided_by, reason, decided_at, value FROM {decisions}\n"
    "WHERE table_name = %(table)s AND key = %(key)s AND visit = %(visit)s AND decision = 'retry'\n"
    "ORDER BY value IS NULL, id DESC LIMIT 1"
)


@contextmanager
def columns_known(table: str, call: str, columns: Collection[str]) -> Generator[None]:
    """Tell of a column that a table lacks, or needs and is not given, as of a mistake in what called us.

    Args:
        table: which is written.
        call: by what, for the message.
        columns: what is written.

    Raises:
        ConfigurationError: trying again changes nothing.
    """
    try:
        yield
    except UndefinedColumn as error:
        raise ConfigurationError(f"{call} of {table}: {message_of(error)}") from error
    except NotNullViolation as error:
        column = error.diag.column_name
        if column in columns or error.diag.table_name != table:
            raise
        raise ConfigurationError(f"{call} of {table} was not given {column}, which every row needs") from error


def column_params(columns: Mapping[str, object]) -> dict[str, object]:
    """Return the parameters `set_<column>` of columns to write; text is rid of what PostgreSQL cannot store."""
    return {f"set_{column}": _storable(value) for column, value in columns.items()}


def _storable(value: object) -> object:
    """Return a value with its texts cleaned, those in a list or in JSON too; `json`, unlike `jsonb`, takes any."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Jsonb):
        return Jsonb(_storable_json(value.obj), value.dumps)
    if isinstance(value, list):
        return [_storable(part) for part in cast("list[object]", value)]
    return value


def _storable_json(value: object) -> object:
    if isinstance(value, dict):
        return {
            clean(name) if isinstance(name, str) else name: _storable_json(part)
            for name, part in cast("dict[object, object]", value).items()
        }
    if isinstance(value, (list, tuple)):
        return [_storable_json(part) for part in cast("list[object]", value)]
    return clean(value) if isinstance(value, str) else value
