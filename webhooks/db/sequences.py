"""Sequences that are behind the data of their columns, as in a logical replica or after a restore by hand.

The next numbers that such a sequence hands out are taken: every insert fails until it has passed them all. A number of
a claim that comes twice would not even fail where the lines of the first one are gone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, LiteralString

from psycopg.sql import SQL, Identifier

from webhooks.db import Transaction, regclass

OURS = ("deliveries", "attempts", "decisions", "notifications", "rejections", "heartbeat_runs")
"""The library's own tables whose lines are numbered."""

# Visits have their numbers from the sequence of the claims, and no index tells the highest: so many are passed over.
CLAIMS_PASSED_OVER = 1_000_000

# Columns that a sequence numbers (an identity, `serial`, or a plain default) and whose highest value an index tells.
NUMBERED = """
WITH columns AS (
    SELECT t.name, a.attrelid, a.attnum, a.attname
    FROM unnest(%(names)s::text[], %(relations)s::text[]) AS t (name, relation)
    JOIN pg_attribute AS a ON a.attrelid = to_regclass(t.relation) AND a.attnum > 0 AND NOT a.attisdropped
    WHERE has_table_privilege(a.attrelid, 'SELECT') AND EXISTS (
        SELECT FROM pg_index AS i JOIN pg_class AS x ON x.oid = i.indexrelid JOIN pg_am AS m ON m.oid = x.relam
        WHERE i.indrelid = a.attrelid AND i.indkey[0] = a.attnum AND i.indisvalid AND i.indpred IS NULL
            AND m.amname = 'btree')
), numbered AS (
    SELECT c.*, d.objid AS sequence FROM columns AS c JOIN pg_depend AS d
        ON d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_class'::regclass
        AND d.refobjid = c.attrelid AND d.refobjsubid = c.attnum AND d.deptype IN ('a', 'i')
    UNION
    SELECT c.*, d.refobjid FROM columns AS c
    JOIN pg_attrdef AS f ON f.adrelid = c.attrelid AND f.adnum = c.attnum
        AND pg_get_expr(f.adbin, f.adrelid) ~ '^nextval[(][^()]*[)]$'
    JOIN pg_depend AS d
        ON d.classid = 'pg_attrdef'::regclass AND d.objid = f.oid AND d.refclassid = 'pg_class'::regclass
)
SELECT n.name, tn.nspname AS table_schema, t.relname AS table_name, n.attrelid::regclass::text AS relation,
    n.attname AS column_name, quote_ident(n.attname) AS quoted_column,
    sn.nspname AS sequence_schema, s.relname AS sequence_name, q.seqincrement AS step,
    format('SELECT setval(%%L, (SELECT max(%%I)%%s FROM %%s));', s.oid::regclass, n.attname,
        CASE WHEN s.relname = 'claim_seq' THEN ' + ' || %(passed_over)s::bigint END, n.attrelid::regclass) AS remedy
FROM numbered AS n
JOIN pg_sequence AS q ON q.seqrelid = n.sequence
JOIN pg_class AS s ON s.oid = n.sequence JOIN pg_namespace AS sn ON sn.oid = s.relnamespace
JOIN pg_class AS t ON t.oid = n.attrelid JOIN pg_namespace AS tn ON tn.oid = t.relnamespace
WHERE q.seqincrement > 0 AND has_sequence_privilege(s.oid, 'SELECT')
ORDER BY n.name, n.attname
"""
# One statement, whose snapshot is older than what it reads of the sequence: who inserts meanwhile raises no alarm.
COMPARE: LiteralString = (
    "SELECT h.highest, s.last_value + CASE WHEN s.is_called THEN %(step)s ELSE 0 END AS following\n"
    "FROM {sequence} AS s, (SELECT max({column}) AS highest FROM {table}) AS h"
)


@dataclass(frozen=True, slots=True)
class Behind:
    """A sequence whose next number is not above what its column holds.

    Args:
        table: the column's table, by its plain name.
        told: what is wrong, for a person.
        remedy: the statement that mends it.
    """

    table: str
    told: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.told}: {self.remedy}"


async def behind(tx: Transaction, tables: Collection[str]) -> list[Behind]:
    """Compare the sequences of some tables with what their columns hold.

    A table that does not exist has none, and one of a sequence that this role may not read is not known.

    Args:
        tx: where to look; nothing is written.
        tables: their plain names.
    """
    names = {"names": list(tables), "relations": [regclass(name) for name in tables]}
    params = {**names, "passed_over": CLAIMS_PASSED_OVER}
    found: list[Behind] = []
    for numbered in await (await tx.execute(NUMBERED, params)).fetchall():
        highest, following = await _compared(tx, numbered)
        if highest is not None and highest >= following:
            found.append(_behind(numbered, highest, following))
    return found


async def _compared(tx: Transaction, numbered: dict[str, Any]) -> tuple[int | None, int]:
    query = SQL(COMPARE).format(
        sequence=Identifier(numbered["sequence_schema"], numbered["sequence_name"]),
        column=Identifier(numbered["column_name"]),
        table=Identifier(numbered["table_schema"], numbered["table_name"]),
    )
    row = await (await tx.execute(query, {"step": numbered["step"]})).fetchone()
    if row is None:
        raise RuntimeError(f"the sequence {numbered['sequence_name']} is empty")
    return row["highest"], row["following"]


def _behind(numbered: dict[str, Any], highest: int, following: int) -> Behind:
    relation, column = numbered["relation"], numbered["quoted_column"]
    return Behind(
        numbered["name"],
        f"the sequence of {relation}.{column} is behind its data: it goes on at {following}, and {highest} is taken",
        numbered["remedy"],
    )
