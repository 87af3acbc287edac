"""Which columns handlers and phases name where they write, read from their source before anything runs.

What stands as a keyword in `claim.done(patch=…)`, `claim.complete(…)` and `tx.done(…)` of a phase, and in `open` and
`advance` of a gate, is compared with the table on start: a misspelt column is not found out by the first row that comes
so far. What is passed on as `**columns`, or called by another function, is found at the first
attempt, which then escalates at once.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

from webhooks.db import Transaction, regclass
from webhooks.errors import ConfigurationError
from webhooks.phase import GATE_COLUMNS, Phase, name_of

UNKNOWN = "?"

# A trigger may give what the INSERT does not.
COLUMNS = (
    "SELECT a.attname AS name, a.attnotnull AND d.adbin IS NULL AND a.attidentity = '' AND a.attgenerated = ''\n"
    "    AND t.typdefault IS NULL AND NOT EXISTS (\n"
    "        SELECT FROM pg_trigger AS g WHERE g.tgrelid = a.attrelid AND g.tgtype & 6 = 6 AND NOT g.tgisinternal\n"
    "    ) AS needed\n"
    "FROM pg_attribute AS a JOIN pg_type AS t ON t.oid = a.atttypid\n"
    "    LEFT JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum\n"
    "WHERE a.attrelid = to_regclass(%(table)s) AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum"
)


@dataclass(frozen=True, slots=True)
class Write:
    """A call in a function's source that writes columns.

    Args:
        of: the gate it is called on; None for the function's own claim.
        text: the call's beginning as it stands there.
        where: the function, for a person.
        columns: the columns named as keywords.
        makes: whether it makes a row of these columns and no others.
        status: the status named first; None where there is none, `UNKNOWN` where it is not a plain text.
    """

    of: object
    text: str
    where: str
    columns: tuple[str, ...]
    makes: bool
    status: str | None


def writes(function: Callable[..., Any], gates: type[object] | None = None) -> Iterator[Write]:
    """Find where a function writes columns; nothing where its source cannot be read.

    Args:
        function: a phase's work, or a handler.
        gates: the class of what `open` and `advance` are looked for on; without it only a phase's own ends are found.
    """
    plain = inspect.unwrap(function)
    tree = _tree(plain)
    if tree is None:
        return
    claims = _claims(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        method, on = node.func.attr, node.func.value
        of: object = None
        options: Collection[str] = ()
        if gates is not None and method in ("open", "advance"):
            of = _object(plain, on)
            if not isinstance(of, gates):
                continue
            parameters = inspect.signature(getattr(gates, method)).parameters.values()
            options = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
        elif method not in ("done", "complete") or not isinstance(on, ast.Name) or on.id not in claims:
            continue
        first = node.args[0] if node.args else ast.Constant(None)
        status = first.value if isinstance(first, ast.Constant) else UNKNOWN
        yield Write(
            of=of,
            text=f"{ast.unparse(node.func)}()",
            where=name_of(plain),
            columns=tuple(word.arg for word in node.keywords if word.arg is not None and word.arg not in options),
            makes=method == "open" and all(word.arg is not None for word in node.keywords),
            status=status if isinstance(status, str) else None,
        )


def check_statuses(table: str, phase: Phase, function: Callable[..., Any]) -> None:
    """Refuse a phase's function that ends in a status which is none of the phase's.

    Raises:
        ConfigurationError: the message names the function.
    """
    for write in writes(function):
        if write.of is None and write.status != UNKNOWN:
            try:
                phase.ending(write.status)
            except ConfigurationError as error:
                raise ConfigurationError(f"{table}: {write.text} in {write.where}: {error}") from None


async def lacking(tx: Transaction, table: str, found: Collection[Write]) -> list[str]:
    """Return one sentence for each column that a table lacks, and each that a new row needs and is not given."""
    if not found:
        return []
    rows = await (await tx.execute(COLUMNS, {"table": regclass(table)})).fetchall()
    known = {row["name"] for row in rows}
    needed = [row["name"] for row in rows if row["needed"] and row["name"] not in GATE_COLUMNS]
    faults: list[str] = []
    for write in found:
        absent = [column for column in write.columns if column not in known]
        if known and absent:
            faults.append(f"{table} has no column {', '.join(absent)}, which {write.text} in {write.where} writes")
        missing = [column for column in needed if column not in write.columns]
        if write.makes and missing:
            faults.append(f"{write.text} in {write.where} does not give {', '.join(missing)}, which {table} needs")
    return faults


def _tree(function: Callable[..., Any]) -> ast.AsyncFunctionDef | None:
    try:
        [node, *_] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return node if isinstance(node, ast.AsyncFunctionDef) else None


def _claims(tree: ast.AsyncFunctionDef) -> set[str]:
    """Return the names of a phase's claim, its second argument, and of the transactions opened under it."""
    arguments = [argument.arg for argument in (*tree.args.posonlyargs, *tree.args.args) if argument.arg != "self"]
    if len(arguments) != 2:
        return set()
    claim = arguments[1]
    meant, all_meanings = Counter([claim]), Counter[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.withitem) and isinstance(node.optional_vars, ast.Name):
            meant[node.optional_vars.id] += ast.unparse(node.context_expr) == f"{claim}.transaction()"
        elif isinstance(node, ast.arg):
            all_meanings[node.arg] += 1
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            all_meanings[node.id] += 1
    # A name that stands for something else as well says nothing.
    return {name for name, times in meant.items() if times == all_meanings[name]}


def _object(function: Callable[..., Any], node: ast.expr) -> object:
    """Return what a name stands for within a function, `module.name` too; None where that is not known."""
    if isinstance(node, ast.Attribute):
        module = _object(function, node.value)
        return vars(module).get(node.attr) if isinstance(module, ModuleType) else None
    if not isinstance(node, ast.Name):
        return None
    code = function.__code__
    if node.id in code.co_freevars:
        cells = cast("tuple[Any, ...]", function.__closure__ or ())
        try:
            return cells[code.co_freevars.index(node.id)].cell_contents
        except ValueError:  # not assigned yet
            return None
    return None if node.id in code.co_varnames + code.co_cellvars else function.__globals__.get(node.id)
