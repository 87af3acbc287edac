"""Whether a gated table has the columns and indexes its gate needs, and the statement that adds what it lacks.

`LIKE gated INCLUDING ALL` copies the columns once; a later change of `gated` reaches no table made before.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from webhooks.db import SCHEMA, Transaction, regclass
from webhooks.phase import GATE_COLUMNS, Key, Order, Phase

COLUMNS = (
    "SELECT a.attname AS name, format_type(a.atttypid, a.atttypmod) AS type, a.attnotnull AS not_null,\n"
    "    pg_get_expr(d.adbin, d.adrelid) AS default\n"
    "FROM pg_attribute AS a LEFT JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum\n"
    "WHERE a.attrelid = to_regclass(%(table)s) AND a.attnum > 0 AND NOT a.attisdropped"
)
INDEXES = (
    "SELECT c.relname AS name, i.indisvalid AS valid, i.indisunique AS is_unique, i.indnkeyatts AS keys,\n"
    "    pg_get_expr(i.indpred, i.indrelid) AS predicate,\n"
    "    ARRAY(\n"
    "        SELECT coalesce(a.attname::text, '') FROM unnest(i.indkey::int2[]) WITH ORDINALITY AS k (number, place)\n"
    "        LEFT JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = k.number ORDER BY k.place\n"
    "    ) AS columns\n"
    "FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid\n"
    "WHERE i.indrelid = to_regclass(%(table)s) ORDER BY c.relname"
)
# What `quote_ident()` quotes besides names that are not plain.
KEYWORDS = "SELECT word FROM pg_get_keywords() WHERE catcode <> 'U'"
_PLAIN = re.compile(r"[a-z_][a-z0-9_]*")


class Names:
    """Names as they are printed for a person: quoted only where they have to be.

    Args:
        keywords: the words that cannot be a name as they are.
    """

    def __init__(self, keywords: Collection[str]) -> None:
        self._keywords = keywords

    def column(self, name: str) -> str:
        plain = _PLAIN.fullmatch(name) and name not in self._keywords
        return name if plain else '"{}"'.format(name.replace('"', '""'))

    def columns(self, names: Iterable[str]) -> str:
        return ", ".join(map(self.column, names))

    def relation(self, name: str) -> str:
        """Return the name of a table or index, qualified where `WEBHOOKS_SCHEMA` is set."""
        return self.column(name) if SCHEMA is None else f"{self.column(SCHEMA)}.{self.column(name)}"


async def faults(tx: Transaction, table: str, key: Key, order: Order, phases: Sequence[Phase]) -> list[str]:
    """Return one sentence for each thing the table lacks, ending in the statement to run. See `Gate.check`."""
    wanted = {column["name"]: column for column in await _read(tx, COLUMNS, "gated")}
    if not wanted:
        return ["the table gated does not exist; run: webhooks migrate"]
    found = {column["name"]: column for column in await _read(tx, COLUMNS, table)}
    names = Names({row["word"] for row in await (await tx.execute(KEYWORDS)).fetchall()})
    name = names.relation(table)
    if not found:
        keys = "".join(f"{names.column(column)} …, " for column in key.columns)
        return [
            f"the table {name} does not exist: CREATE TABLE {name} ({keys}…, "
            f"PRIMARY KEY ({names.columns(key.columns)}), LIKE gated INCLUDING ALL) WITH (fillfactor = 80);"
        ]
    first_ready = phases[0].ready if phases else ""
    told = [
        f"{name}: {what}: {statement};"
        for column in GATE_COLUMNS
        for what, statement in _column(name, wanted[column], found.get(column), first_ready)
    ]
    used = dict.fromkeys(order.columns, "its gate orders by") | dict.fromkeys(key.columns, "is its gate's key")
    told += [
        _absent(name, column, use, found)
        for column, use in used.items()
        if column not in found.keys() | set(GATE_COLUMNS)
    ]
    indexes = await _read(tx, INDEXES, table)
    told += [f"{name}: {what}: {statement};" for what, statement in _indexes(names, table, key, order, phases, indexes)]
    return told


def _absent(table: str, column: str, use: str, found: Collection[str]) -> str:
    same = [other for other in found if other.lower() == column.lower()]
    hint = f": it has {same[0]}; names are written as the database has them" if same else ""
    return f"{table} has no column {column}, which {use}{hint}"


async def _read(tx: Transaction, query: Any, table: str) -> list[dict[str, Any]]:
    return await (await tx.execute(query, {"table": regclass(table)})).fetchall()


def _column(
    table: str, wanted: dict[str, Any], found: dict[str, Any] | None, first_ready: str
) -> Iterator[tuple[str, str]]:
    name, default = wanted["name"], wanted["default"]
    alter = f"ALTER TABLE {table} ALTER COLUMN {name}"
    if found is None:
        # A constant for the rows there are, so that none is rewritten; then the default of new ones.
        constant = f"'{first_ready}'" if name == "status" else "0" if "nextval" in (default or "") else default
        statement = f"ALTER TABLE {table} ADD COLUMN {name} {wanted['type']}"
        if wanted["not_null"]:
            statement += f" NOT NULL DEFAULT {constant}"
            if constant != default:
                statement += f"; {alter} " + ("DROP DEFAULT" if default is None else f"SET DEFAULT {default}")
        yield f"column {name} is missing", statement
        return
    if found["type"] != wanted["type"]:
        yield f"column {name} is {found['type']}, not {wanted['type']}", f"{alter} TYPE {wanted['type']}"
    if wanted["not_null"] and not found["not_null"]:
        yield f"column {name} may be NULL", f"{alter} SET NOT NULL"
    if found["not_null"] and not wanted["not_null"]:
        yield f"column {name} may not be NULL, but is when nobody holds the row", f"{alter} DROP NOT NULL"
    if default is not None and (found["default"] is None or "nextval" in default) and found["default"] != default:
        yield f"column {name} has another default", f"{alter} SET DEFAULT {default}"


def _indexes(
    naming: Names, table: str, key: Key, order: Order, phases: Sequence[Phase], indexes: list[dict[str, Any]]
) -> Iterator[tuple[str, str]]:
    keys = naming.columns(key.columns)
    if not any(_makes_unique(index, key) for index in indexes):
        yield f"({keys}) is not unique", f"ALTER TABLE {naming.relation(table)} ADD PRIMARY KEY ({keys})"
    for index in indexes:
        if "lease_until" in index["columns"]:
            yield (
                f"index {index['name']} makes every renewal slow",
                f"DROP INDEX CONCURRENTLY {naming.relation(index['name'])}",
            )
    names = {index["name"] for index in indexes}
    covered = {status: index for index in indexes for status in statuses_of(index["predicate"])}
    covered |= {status: index for index in indexes if index["valid"] for status in statuses_of(index["predicate"])}
    for phase in phases:
        if phase.ready not in covered:
            columns, where = order.written(naming.column), f"status = '{phase.ready}'"
            yield (
                f"no index finds the rows in {phase.ready}",
                _create(naming, table, phase.ready, columns, where, names),
            )
    claimed = [phase.claimed for phase in phases]
    if missing := [status for status in claimed if status not in covered]:
        where = "status IN ({})".format(", ".join(f"'{status}'" for status in missing))
        yield f"no index finds the rows in {', '.join(missing)}", _create(naming, table, "claimed", keys, where, names)
    waited_for = [*(phase.ready for phase in phases), *claimed]
    invalid = {covered[status]["name"] for status in waited_for if status in covered and not covered[status]["valid"]}
    for name in sorted(invalid):
        yield f"index {name} was never finished", f"REINDEX INDEX CONCURRENTLY {naming.relation(name)}"


def _makes_unique(index: dict[str, Any], key: Key) -> bool:
    return (
        index["is_unique"]
        and index["valid"]
        and index["predicate"] is None
        and set(index["columns"][: index["keys"]]) <= set(key.columns)
    )


def _create(naming: Names, table: str, of: str, columns: str, where: str, taken: set[str]) -> str:
    name = plain = re.sub(r"\W", "_", f"{table}_{of}")
    number = 1
    while name in taken:
        number += 1
        name = f"{plain}_{number}"
    return f"CREATE INDEX CONCURRENTLY {naming.column(name)} ON {naming.relation(table)} ({columns}) WHERE {where}"


def statuses_of(predicate: str | None) -> set[str]:
    """Return the statuses that a partial index covers, from its predicate as PostgreSQL prints it.

    A predicate that says more than which statuses (`… AND parked_on IS NULL`) covers none of them wholly.
    """
    if predicate is None:
        return set()
    bare = re.sub(r"'[^']*'", "", predicate)
    if set(re.findall(r"\w+", bare)) - {"status", "ANY", "ARRAY", "OR", "text", "character", "varying"}:
        return set()
    if re.search(r"[<>!~]", bare):
        return set()
    return {status for text in re.findall(r"'([^']*)'", predicate) for status in text.strip("{}").split(",")}
