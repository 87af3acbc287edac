"""Whether what is recorded about a row can still be needed: by how the row itself stands now."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

import psycopg
from psycopg.sql import SQL, Composable

from webhooks.db import Transaction, compose, named, table
from webhooks.gate import Gate
from webhooks.inbox import inbox
from webhooks.notify import notifications
from webhooks.retention.ages import Before, old
from webhooks.retention.deliveries import FINAL, FOLLOWED


@dataclass(frozen=True, slots=True)
class Row:
    """How a row stands.

    Args:
        unfinished: whether it waits for a phase, is in one, or waits for a person.
        visit: since it last entered a ready status from outside; never one that it had before.
        claim_seq: the number of its last claim.
        source: of a delivery, whose it is.
        ages_since: of a row that retention removes, since when it ages.
    """

    unfinished: bool
    visit: int
    claim_seq: int | None
    source: str | None
    ages_since: datetime | None

    def goes(self, before: Before) -> bool:
        """Say whether retention removes the row itself."""
        if self.ages_since is None:
            return False
        if self.source is not None:
            return before.key_goes(self.source, self.ages_since)
        return old(self.ages_since, before.attempts)


def effect_is_over(row: Row | None, visit: int) -> bool:
    """Say whether no attempt can ever ask for an effect of that visit again.

    A visit's number is drawn anew whenever a row enters a ready status from outside and never comes back, so an effect
    is needed only while its row is still in that visit and unfinished.
    """
    return row is None or row.visit != visit or not row.unfinished


def attempt_is_over(row: Row | None, claim_seq: int) -> bool:
    """Say whether the line of a claim that ended is mere history: not its row's last claim, nor unfinished work's."""
    return row is None or (not row.unfinished and row.claim_seq != claim_seq)


# Since when a row ages that retention itself removes, a request together with its events.
AGES_SINCE: dict[str, Composable] = {
    inbox.table: SQL(
        "g.source, CASE WHEN coalesce(g.parent, g.id) IS DISTINCT FROM {followed} THEN (\n"
        "        SELECT CASE WHEN bool_and({final}) THEN max(received_at) END FROM {deliveries}\n"
        "        WHERE id = coalesce(g.parent, g.id) OR parent = coalesce(g.parent, g.id)) END AS ages_since"
    ).format(final=FINAL, followed=FOLLOWED, deliveries=table("deliveries")),
    notifications.table: SQL(
        "NULL AS source, CASE WHEN g.status IN ('notified', 'dropped') THEN g.escalated_at END AS ages_since"
    ),
}
NEVER = SQL("NULL AS source, NULL::timestamptz AS ages_since")


async def rows_of(tx: Transaction, gate: Gate[Any], keys: Collection[str], *, ages: bool) -> dict[str, Row]:
    """Read rows by their keys as text, as they stand in `attempts`; one that is gone is not among them.

    Args:
        tx: where they are read.
        gate: over their table.
        keys: which.
        ages: whether to work out since when they age; only a dry run has to know, which leaves them in place.
    """
    by_key, by_text = _statements(gate, ages)
    parts = [part for key in keys if (part := _parsed(gate, key)) is not None]
    columns = {name: _array(part[place] for part in parts) for place, name in enumerate(gate.key.names())}
    params = {**columns, "keys": list(keys)}
    try:
        # A text that is no value of its column's type must not end the transaction.
        async with tx.connection.transaction():
            found = await (await tx.execute(by_key, params)).fetchall()
    except psycopg.DataError:
        found = await (await tx.execute(by_text, params)).fetchall()
    unfinished = {gate.escalated, *gate.phases, *(phase.ready for phase in gate.phases.values())}
    return {
        row["key"]: Row(row["status"] in unfinished, row["visit"], row["claim_seq"], row["source"], row["ages_since"])
        for row in found
    }


@lru_cache(maxsize=64)
def _statements(gate: Gate[Any], ages: bool) -> tuple[bytes, bytes]:
    """Compose the lookup by the key's columns, which have an index, and the one by its text, which reads all rows."""
    key_text = gate.statements.key_text
    parts = {
        "key_text": key_text,
        "gated": table(gate.table),
        "ages_since": AGES_SINCE.get(gate.table, NEVER) if ages else NEVER,
        "among": gate.statements.among(),
    }
    select = named(
        "SELECT {key_text} AS key, g.status, g.visit, g.claim_seq, {ages_since}\nFROM {gated} AS g\n", **parts
    )
    return (
        compose("{select}WHERE {among} AND {key_text} = ANY(%(keys)s::text[])", select=select, **parts),
        compose("{select}WHERE {key_text} = ANY(%(keys)s::text[])", select=select, **parts),
    )


def _parsed(gate: Gate[Any], key: str) -> tuple[str, ...] | None:
    """Read a key as it was recorded; None where its gate had another number of columns then, and no row has it now."""
    try:
        return gate.key.parsed(key)
    except ValueError:
        return None


def _array(texts: Iterable[str]) -> str:
    """Write an array as PostgreSQL reads it. As text it takes the type of the column that it is compared with."""
    escaped = (text.replace("\\", "\\\\").replace('"', '\\"') for text in texts)
    return "{" + ",".join(f'"{text}"' for text in escaped) + "}"
