"""Whether a gated table has the columns and indexes its gate needs, and the statement that adds what it lacks.

`LIKE gated INCLUDING ALL` copies the columns once; a later change of `gated` reaches no table made before. What is
printed runs as it is, top down, on the table there is: an enum's column becomes text together with the indexes and
checks that compare it, and no index of a partitioned table is built CONCURRENTLY, which PostgreSQL cannot do.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.sql import SQL, Literal

from webhooks.db import SCHEMA, Transaction, regclass
from webhooks.db.sqlstate import is_about_the_row, is_about_the_work
from webhooks.phase import GATE_COLUMNS, LONGEST_NAME, Conflict, Key, Order, Phase

COLUMNS = (
    "SELECT a.attname AS name, format_type(a.atttypid, a.atttypmod) AS type, a.attnotnull AS not_null,\n"
    "    pg_get_expr(d.adbin, d.adrelid) AS default, t.typtype = 'e' AS is_enum,\n"
    "    format_type(coalesce(nullif(t.typbasetype, 0), t.oid), NULL) AS base_type,\n"
    "    coalesce(c.collisdeterministic, true) AS is_deterministic\n"
    "FROM pg_attribute AS a JOIN pg_type AS t ON t.oid = a.atttypid\n"
    "LEFT JOIN pg_collation AS c ON c.oid = a.attcollation\n"
    "LEFT JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum\n"
    "WHERE a.attrelid = to_regclass(%(table)s) AND a.attnum > 0 AND NOT a.attisdropped"
)
INDEXES = (
    "SELECT c.relname AS name, i.indisvalid AS valid, i.indisunique AS is_unique, i.indisprimary AS is_primary,\n"
    "    i.indimmediate AS is_immediate, i.indnkeyatts AS keys, pg_get_expr(i.indpred, i.indrelid) AS predicate,\n"
    "    pg_get_indexdef(i.indexrelid) AS definition,\n"
    "    ARRAY(\n"
    "        SELECT coalesce(a.attname::text, '') FROM unnest(i.indkey::int2[]) WITH ORDINALITY AS k (number, place)\n"
    "        LEFT JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = k.number ORDER BY k.place\n"
    "    ) AS columns\n"
    "FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid\n"
    "WHERE i.indrelid = to_regclass(%(table)s) ORDER BY c.relname"
)
# The columns it is partitioned by, with '' for an expression; and what else is called as an index of ours would be.
TABLE = (
    "SELECT c.relkind = 'p' AS is_partitioned, ARRAY(\n"
    "        SELECT coalesce(a.attname::text, '') FROM pg_partitioned_table AS p,\n"
    "            unnest(p.partattrs::int2[]) WITH ORDINALITY AS k (number, place)\n"
    "        LEFT JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = k.number\n"
    "        WHERE p.partrelid = c.oid ORDER BY k.place\n"
    "    ) AS partitioned_by, ARRAY(\n"
    "        SELECT o.relname::text FROM pg_class AS o\n"
    "        WHERE o.relnamespace = c.relnamespace AND starts_with(o.relname, %(prefix)s)\n"
    "    ) AS taken\n"
    "FROM pg_class AS c WHERE c.oid = to_regclass(%(table)s)"
)
# Checks of the status and nothing else, which say without a row whether a status is allowed. (PostgreSQL 18 can leave
# a check unenforced; older ones have no such column.)
CHECKS = (
    "SELECT c.conname AS name, pg_get_expr(c.conbin, c.conrelid) AS condition FROM pg_constraint AS c\n"
    "JOIN pg_attribute AS a ON a.attrelid = c.conrelid AND a.attname = 'status' AND c.conkey = ARRAY[a.attnum]\n"
    "WHERE c.conrelid = to_regclass(%(table)s) AND c.contype = 'c'\n"
    "    AND coalesce((to_jsonb(c) ->> 'conenforced')::boolean, true) ORDER BY c.conname"
)
# What compares a column with values of its type, in the table or in a partition of it: an index or a check, with its
# definition; and what keeps the type as it is until somebody drops it.
USES = (
    "WITH relations AS (\n"
    "    SELECT to_regclass(%(table)s) AS relid\n"
    "    UNION SELECT relid FROM pg_partition_tree(to_regclass(%(table)s))\n"
    "), uses AS (\n"
    "    SELECT DISTINCT d.classid, d.objid, d.refobjid AS relid FROM relations AS r\n"
    "    JOIN pg_attribute AS a ON a.attrelid = r.relid AND a.attname = %(column)s\n"
    "    JOIN pg_depend AS d ON d.refclassid = 'pg_class'::regclass AND d.refobjid = r.relid\n"
    "        AND d.refobjsubid = a.attnum\n"
    ")\n"
    "SELECT 'index' AS what, c.relname AS name, NULL AS of_table, pg_get_indexdef(u.objid) AS definition\n"
    "FROM uses AS u JOIN pg_index AS i ON u.classid = 'pg_class'::regclass AND i.indexrelid = u.objid\n"
    "JOIN pg_class AS c ON c.oid = i.indexrelid\n"
    "WHERE NOT EXISTS (SELECT FROM pg_inherits WHERE inhrelid = u.objid)\n"
    "UNION ALL\n"
    "SELECT 'check', c.conname, r.relname, pg_get_constraintdef(c.oid)\n"
    "FROM uses AS u JOIN pg_constraint AS c ON u.classid = 'pg_constraint'::regclass AND c.oid = u.objid\n"
    "JOIN pg_class AS r ON r.oid = c.conrelid\n"
    "WHERE c.contype = 'c' AND c.coninhcount = 0\n"
    "UNION ALL\n"
    "SELECT 'other', CASE WHEN u.classid = 'pg_rewrite'::regclass\n"
    "        THEN (SELECT pg_describe_object('pg_class'::regclass, ev_class, 0) FROM pg_rewrite WHERE oid = u.objid)\n"
    "        ELSE pg_describe_object(u.classid, u.objid, 0) END, NULL, NULL\n"
    "FROM uses AS u LEFT JOIN pg_attrdef AS v ON u.classid = 'pg_attrdef'::regclass AND v.oid = u.objid\n"
    "LEFT JOIN pg_attribute AS a ON a.attrelid = v.adrelid AND a.attnum = v.adnum\n"
    "WHERE u.classid IN ('pg_rewrite'::regclass, 'pg_trigger'::regclass, 'pg_policy'::regclass)\n"
    "    OR a.attname <> %(column)s\n"
    "ORDER BY 1, 2"
)
ELSEWHERE = (
    "SELECT n.nspname AS schema, current_setting('search_path') AS path\n"
    "FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace\n"
    "WHERE c.relname = %(name)s AND c.relkind IN ('r', 'p') AND n.nspname !~ '^pg_' ORDER BY n.nspname"
)
# Types of which a value is written in one way, by PostgreSQL and by Python, whatever the settings are, and which hold
# two values for equal only if they are written alike.
KEY_TYPES = ("smallint", "integer", "bigint", "text", "character varying", "uuid")
# What `quote_ident()` quotes besides names that are not plain.
KEYWORDS = "SELECT word FROM pg_get_keywords() WHERE catcode <> 'U'"
NOT_A_STATUS = "what no status is called"
_PLAIN = re.compile(r"[a-z_][a-z0-9_]*")
# `::text`, `::character varying(20)`, `::shop."Order state"[]`
_CAST = re.compile(r'::(?:(?:\w+|"(?:[^"]|"")+")\.)?(?:character varying|\w+|"(?:[^"]|"")+")(?:\(\d+\))?(?:\[\])?')


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


@dataclass(frozen=True, slots=True)
class Table:
    """A table as it is.

    Args:
        name: its name.
        names: how names are printed.
        partitioned_by: the columns that its rows are partitioned by, with `''` for an expression.
        is_partitioned: whether it is.
        taken: what other tables and indexes are called.
    """

    name: str
    names: Names
    partitioned_by: Sequence[str]
    is_partitioned: bool
    taken: Collection[str]

    @property
    def printed(self) -> str:
        return self.names.relation(self.name)

    @property
    def concurrently(self) -> str:
        """How an index is built or dropped without holding up who writes; impossible where there are partitions."""
        return "" if self.is_partitioned else "CONCURRENTLY "


async def faults(
    tx: Transaction,
    table: str,
    key: Key,
    order: Order,
    phases: Sequence[Phase],
    escalated: str,
    reserved: str | None = None,
    read: Sequence[str] = (),
    uniques: Iterable[tuple[str, ...]] = (),
) -> list[str]:
    """Return one sentence for each thing the table lacks, ending in the statement to run. See `Gate.check`."""
    await tx.execute("SET LOCAL quote_all_identifiers = off")
    wanted = {column["name"]: column for column in await _read(tx, COLUMNS, "gated")}
    if not wanted:
        return ["the table gated does not exist; run: webhooks migrate"]
    found = {column["name"]: column for column in await _read(tx, COLUMNS, table)}
    names = Names({row["word"] for row in await (await tx.execute(KEYWORDS)).fetchall()})
    name = names.relation(table)
    if not found and (elsewhere := await (await tx.execute(ELSEWHERE, {"name": table})).fetchall()):
        schemas = ", ".join(row["schema"] for row in elsewhere)
        given = f"search_path is {elsewhere[0]['path']}" if SCHEMA is None else f"WEBHOOKS_SCHEMA is {SCHEMA}"
        return [
            f"the table {name} is not found, because {given}; one of that name is in the schema {schemas}: "
            "name that in the role's search_path or in WEBHOOKS_SCHEMA"
        ]
    if not found:
        keys = "".join(f"{names.column(column)} …, " for column in key.columns)
        return [
            f"the table {name} does not exist: CREATE TABLE {name} ({keys}…, "
            f"PRIMARY KEY ({names.columns(key.columns)}), LIKE gated INCLUDING ALL) WITH (fillfactor = 80);"
        ]
    [here] = await _read(tx, TABLE, table, prefix=_plain_name(table))
    seen = Table(table, names, **here)
    if own := sorted(set(seen.partitioned_by) & set(GATE_COLUMNS)):
        return [f"{name} is partitioned by {', '.join(own)}, which claims change: partition it by what stays the same"]
    first_ready = phases[0].ready if phases else ""
    told = [
        f"{name}: {what}: {statement};"
        for column in GATE_COLUMNS
        for what, statement in _column(name, wanted[column], found.get(column), first_ready)
    ]
    for column in (column for column in found.values() if column["is_enum"] and column["name"] in GATE_COLUMNS):
        uses = await _read(tx, USES, table, column=column["name"])
        told.append(f"{name}: {_from_enum(seen, column, wanted[column['name']]['type'], uses)};")
    used = {
        **{column: f"open(unique={unique}) names" for unique in uniques for column in unique},
        **dict.fromkeys(read, "its gate's row= names"),
        **dict.fromkeys(order.columns, "its gate orders by"),
        **dict.fromkeys(key.columns, "is its gate's key"),
    }
    told += [
        _absent(name, column, use, found)
        for column, use in used.items()
        if column not in found.keys() | set(GATE_COLUMNS)
    ]
    keyed = [found[column] for column in key.columns if column in found]
    told += [f"{name}: {fault};" for column in keyed for fault in _key_type(seen, column)]
    if "status" in found:
        told += [fault async for fault in _checks(tx, seen, found["status"], phases, escalated)]
    indexes = await _read(tx, INDEXES, table)
    if reserved is not None:  # reserved rows have an index of their own
        plain = f" AND ({names.column(reserved)} IS NULL)"
        indexes = [{**index, "predicate": (index["predicate"] or "").replace(plain, "") or None} for index in indexes]
    told += [f"{name}: {what}: {statement};" for what, statement in _indexes(seen, key, order, phases, indexes)]
    if _conflict(indexes, key.columns, exactly=False) is None:
        told.append(f"{name}: {_uniqueness(seen, key, indexes)}")
    for unique in uniques:
        if set(unique) <= found.keys() and _conflict(indexes, unique, exactly=True) is None:
            told.append(f"{name}: {_not_unique(seen, unique)}")
    return told


async def conflict(tx: Transaction, table: str, columns: Sequence[str], *, exactly: bool) -> Conflict | None:
    """Find what makes rows unique by some columns; None where nothing does.

    Args:
        tx: where to look.
        table: the table.
        columns: those columns.
        exactly: whether it has to be these columns, if only among some rows; otherwise some of them do, among all.
    """
    return _conflict(await _read(tx, INDEXES, table), columns, exactly=exactly)


def _absent(table: str, column: str, use: str, found: Collection[str]) -> str:
    same = [other for other in found if other.lower() == column.lower()]
    hint = f": it has {same[0]}; names are written as the database has them" if same else ""
    return f"{table} has no column {column}, which {use}{hint}"


async def _read(tx: Transaction, query: Any, table: str, **more: object) -> list[dict[str, Any]]:
    return await (await tx.execute(query, {"table": regclass(table), **more})).fetchall()


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
    if found["type"] != wanted["type"] and not found["is_enum"]:
        yield f"column {name} is {found['type']}, not {wanted['type']}", f"{alter} TYPE {wanted['type']}"
    if wanted["not_null"] and not found["not_null"]:
        yield f"column {name} may be NULL", f"{alter} SET NOT NULL"
    if found["not_null"] and not wanted["not_null"]:
        yield f"column {name} may not be NULL, but is when nobody holds the row", f"{alter} DROP NOT NULL"
    if default is not None and (found["default"] is None or "nextval" in default) and found["default"] != default:
        yield f"column {name} has another default", f"{alter} SET DEFAULT {default}"


def _key_type(table: Table, column: dict[str, Any]) -> Iterator[str]:
    """Say of a key's column how it comes to a type of which each value is written in one way."""
    if column["base_type"] in KEY_TYPES and column["is_deterministic"]:
        return
    name, to = table.names.column(column["name"]), "bigint" if column["base_type"] == "numeric" else "text"
    what = f"is {column['type']}, of which one value may be written in several ways"
    if not column["is_deterministic"]:
        what, to = "has a collation that holds different texts for equal", 'text COLLATE "default"'
    yield (
        f"column {name} is in the key and {what} (name a column of {', '.join(KEY_TYPES[:-1])} or {KEY_TYPES[-1]} "
        f"instead, or change its type): ALTER TABLE {table.printed} ALTER COLUMN {name} TYPE {to}"
    )


def _from_enum(table: Table, found: dict[str, Any], wanted: str, uses: Sequence[dict[str, Any]]) -> str:
    """Say how a column of an enum becomes one of text, in one transaction with what compares it with the enum's values.

    What cannot be made again from its definition (a view, a trigger, a policy, a generated column) is named.
    """
    column, names = table.names.column(found["name"]), table.names
    compared = [use for use in uses if use["definition"] and _retyped(use["definition"], found) != use["definition"]]
    indexes = [use for use in compared if use["what"] == "index"]
    checks = [use for use in compared if use["what"] == "check"]
    default = found["default"]
    changes = [f"ALTER COLUMN {column} DROP DEFAULT"] if default else []
    changes.append(f"ALTER COLUMN {column} TYPE {wanted} USING {column}::{wanted}")
    changes += [f"ALTER COLUMN {column} SET DEFAULT {_retyped(default, found)}"] if default else []
    alter = "ALTER TABLE {} {} CONSTRAINT {}"
    statements = [
        "BEGIN",
        *(f"DROP INDEX {names.relation(index['name'])}" for index in indexes),
        *(alter.format(names.relation(use["of_table"]), "DROP", names.column(use["name"])) for use in checks),
        f"ALTER TABLE {table.printed} {', '.join(changes)}",
        *(
            f"{alter.format(names.relation(use['of_table']), 'ADD', names.column(use['name']))} "
            f"{_retyped(use['definition'], found)}"
            for use in checks
        ),
        *(_retyped(index["definition"], found).replace(" ON ONLY ", " ON ") for index in indexes),
        "COMMIT",
    ]
    others = [use["name"] for use in uses if use["what"] == "other"]
    first = f" (drop before, and make again afterwards: {', '.join(others)})" if others else ""
    return f"column {column} is {found['type']}, not {wanted}{first}: {'; '.join(statements)}"


def _retyped(definition: str, column: dict[str, Any]) -> str:
    """Return a definition as it reads once the column is text."""
    if not column["is_enum"]:
        return definition
    return re.sub(rf"::{re.escape(column['type'])}(?![\w.])", "::text", definition)


async def _checks(
    tx: Transaction, table: Table, status: dict[str, Any], phases: Sequence[Phase], escalated: str
) -> AsyncIterator[str]:
    """Try the gate's statuses against the checks that read the status alone; nothing is written."""
    given = [each for phase in phases for each in (phase.ready, phase.claimed, *phase.done)]
    statuses = list(dict.fromkeys([*given, escalated] if phases else []))
    for check in await _read(tx, CHECKS, table.name):
        condition = _retyped(check["condition"], status)
        if refused := [each for each in statuses if not await _allows(tx, condition, each)]:
            name, values = table.names.column(check["name"]), ", ".join(f"'{each}'" for each in refused)
            yield (
                f"{table.printed}: the check {name} does not allow the status {', '.join(refused)}: "
                f"ALTER TABLE {table.printed} DROP CONSTRAINT {name}, "
                f"ADD CONSTRAINT {name} CHECK ({condition} OR status IN ({values}));"
            )


async def _allows(tx: Transaction, condition: str, status: str) -> bool:
    """Evaluate a check. What it says of NULL counts as yes, as everywhere."""
    query = SQL("SELECT coalesce({}, true) AS allowed FROM (VALUES ({}::text)) AS tried (status)").format(
        # As PostgreSQL itself prints it, and without parameters, so that no percent sign means anything.
        SQL(condition),  # pyright: ignore[reportArgumentType]
        Literal(status),
    )
    try:
        async with tx.connection.transaction(force_rollback=True):
            row = await (await tx.execute(query)).fetchone()
    except psycopg.Error as error:
        if not is_about_the_work(error):
            raise
        return not is_about_the_row(error)  # a function that raises refuses; one that is not found says nothing
    return row is None or bool(row["allowed"])


async def lists(tx: Transaction, table: str, status: str) -> bool:
    """Say whether the table itself names a status: in a check of the status alone that does not take just any."""
    for check in await _read(tx, CHECKS, table):
        condition = check["condition"]
        if await _allows(tx, condition, status) and not await _allows(tx, condition, NOT_A_STATUS):
            return True
    return False


def _indexes(
    table: Table, key: Key, order: Order, phases: Sequence[Phase], indexes: list[dict[str, Any]]
) -> Iterator[tuple[str, str]]:
    names, concurrently = table.names, table.concurrently
    for index in indexes:
        if "lease_until" in index["columns"]:
            yield (
                f"index {index['name']} makes every renewal slow",
                f"DROP INDEX {concurrently}{names.relation(index['name'])}",
            )
    covered = {status: index for index in indexes for status in statuses_of(index["predicate"])}
    covered |= {status: index for index in indexes if index["valid"] for status in statuses_of(index["predicate"])}
    for phase in phases:
        if phase.ready not in covered:
            columns, where = order.written(names.column), f"status = '{phase.ready}'"
            yield f"no index finds the rows in {phase.ready}", _create(table, phase.ready, columns, where)
    claimed = [phase.claimed for phase in phases]
    if missing := [status for status in claimed if status not in covered]:
        where = "status IN ({})".format(", ".join(f"'{status}'" for status in missing))
        columns = names.columns(key.columns)
        yield f"no index finds the rows in {', '.join(missing)}", _create(table, "claimed", columns, where)
    waited_for = [*(phase.ready for phase in phases), *claimed]
    invalid = [covered[status] for status in waited_for if status in covered and not covered[status]["valid"]]
    for name, definition in sorted({index["name"]: index["definition"] for index in invalid}.items()):
        # Of a partitioned table it is one that not every partition has a part of; building parts anew adds none.
        again = f"DROP INDEX {names.relation(name)}; {definition.replace(' ON ONLY ', ' ON ')}"
        anew = f"REINDEX INDEX CONCURRENTLY {names.relation(name)}"
        yield f"index {name} was never finished", again if table.is_partitioned else anew


def _uniqueness(table: Table, key: Key, indexes: Sequence[dict[str, Any]]) -> str:
    keys = table.names.columns(key.columns)
    if missing := [column for column in table.partitioned_by if column not in key.columns]:
        by = ", ".join(column or "an expression" for column in table.partitioned_by)
        wider = ", ".join((*key.columns, *missing))
        remedy = f'name it in the gate\'s key too (key="{wider}"), or ' if all(missing) else ""
        return (
            f"({keys}) is not unique, and cannot be, as the table is partitioned by {by}: {remedy}"
            f"partition it by ({keys})"
        )
    what = "UNIQUE" if any(index["is_primary"] for index in indexes) else "PRIMARY KEY"
    return f"({keys}) is not unique: ALTER TABLE {table.printed} ADD {what} ({keys});"


def _not_unique(table: Table, columns: Sequence[str]) -> str:
    names, printed = ", ".join(columns), table.names.columns(columns)
    if missing := [column for column in table.partitioned_by if column not in columns]:
        by = ", ".join(column or "an expression" for column in missing)
        return f"open(unique=…) names ({names}), which cannot be unique, as the table is partitioned by {by}"
    made = _create(table, "_".join(columns), printed).replace("CREATE INDEX", "CREATE UNIQUE INDEX", 1)
    return f"open(unique=…) names ({names}), which nothing makes unique: {made};"


def _conflict(indexes: Sequence[dict[str, Any]], columns: Sequence[str], *, exactly: bool) -> Conflict | None:
    """Choose among indexes. A deferrable one, checked when a transaction ends, finds no conflict."""
    usable = [index for index in indexes if index["is_unique"] and index["valid"] and index["is_immediate"]]
    found = [Conflict(tuple(index["columns"][: index["keys"]]), index["predicate"]) for index in usable]
    same = [each for each in found if set(each.columns) == set(columns)]
    fewer = [each for each in found if set(each.columns) < set(columns)]
    candidates = [*(each for each in same if each.where is None), *(same if exactly else fewer)]
    return next((each for each in candidates if exactly or each.where is None), None)


def _create(table: Table, of: str, columns: str, where: str | None = None) -> str:
    taken, number, name = table.taken, 1, _plain_name(f"{table.name}_{of}")
    while name in taken:
        number += 1
        name = _plain_name(f"{table.name}_{of}", f"_{number}")
    index = f"CREATE INDEX {table.concurrently}{table.names.column(name)} ON {table.printed} ({columns})"
    return index if where is None else f"{index} WHERE {where}"


def _plain_name(text: str, end: str = "") -> str:
    """Return a name that needs no quotes as far as its letters go, not longer than PostgreSQL keeps one."""
    room = LONGEST_NAME - len(end)
    return re.sub(r"\W", "_", text).encode()[:room].decode(errors="ignore") + end


def statuses_of(predicate: str | None) -> set[str]:
    """Return the statuses that a partial index covers, from its predicate as PostgreSQL prints it.

    A predicate that says more than which statuses (`… AND parked_on IS NULL`) covers none of them wholly.
    """
    if predicate is None:
        return set()
    bare = _CAST.sub("", re.sub(r"'[^']*'", "", predicate))
    if set(re.findall(r"\w+", bare)) - {"status", "ANY", "ARRAY", "OR"}:
        return set()
    if re.search(r"[<>!~]", bare):
        return set()
    return {status for text in re.findall(r"'([^']*)'", predicate) for status in text.strip("{}").split(",")}
