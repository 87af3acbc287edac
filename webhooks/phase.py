"""What a gate knows of one of its phases, and of a row's key."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, LiteralString, TypeAlias, cast

from psycopg.sql import SQL, Composable, Identifier

from webhooks.errors import ConfigurationError

if TYPE_CHECKING:
    from webhooks.claim import Claim


@dataclass(frozen=True, slots=True)
class Done:
    """What a phase returns: the done status (None: the only one) and the columns of the fenced UPDATE."""

    status: str | None = None
    columns: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True)
class Moved:
    """The answer of `advance`: truthy when the row moved; `found` is the status seen otherwise, None for no row."""

    moved: bool
    found: str | None

    def __bool__(self) -> bool:
        return self.moved


PhaseFunction: TypeAlias = "Callable[[Any, Claim[Any]], Coroutine[Any, Any, Done]]"

GATE_COLUMNS: tuple[LiteralString, ...] = (
    "status",
    "claimed_from",
    "visit",
    "attempt_count",
    "max_attempts",
    "not_before",
    "claim_seq",
    "claimed_by",
    "claimed_at",
    "lease_until",
    "last_error",
)


def check_function(function: Callable[..., object], what: str, *given: object) -> None:
    """Refuse a function that is not `async def`, or does not take what it is called with.

    Args:
        function: a handler, a phase's work, or an effect.
        what: what it is, for the message.
        given: the arguments it is called with; of handlers and phases what they are called.

    Raises:
        ConfigurationError: the message says how it is written.
    """
    name = name_of(function)
    plain = inspect.unwrap(function)
    while isinstance(plain, functools.partial):
        plain = inspect.unwrap(plain.func)
    routine: object = plain if inspect.isroutine(plain) else type(plain).__call__
    if not inspect.iscoroutinefunction(routine):
        raise ConfigurationError(f"{what}: {name} cannot be awaited: declare it with `async def`")
    with suppress(ValueError):  # what it takes cannot be known
        try:
            inspect.signature(function).bind(*given)
        except TypeError as error:
            raise ConfigurationError(f"{what}: {name} is called with {len(given)} arguments: {error}") from None


def name_of(function: object) -> str:
    """Return a function's name as a person finds it."""
    while isinstance(function, functools.partial):
        function = cast("functools.partial[object]", function).func
    module = getattr(function, "__module__", None) or "?"
    return f"{module}.{getattr(function, '__qualname__', repr(function))}"


def check_columns(table: str, columns: Iterable[str]) -> None:
    """Refuse to write what only claims and moves write.

    Raises:
        ConfigurationError: one of the columns is the gate's own.
    """
    own = sorted(set(columns) & set(GATE_COLUMNS))
    if own:
        raise ConfigurationError(f"{table}: {', '.join(own)} is the gate's own, it cannot be written")


@dataclass(frozen=True, slots=True)
class Phase:
    """Ready status → claimed status → done statuses, and the function that does the work.

    Args:
        ready: the status in which a row waits.
        claimed: the status while somebody works on it; names the phase.
        done: the statuses it can end in.
        lease: how long a claim lasts without renewal; None for the setting's.
        timeout: how long the function may run.
        max_attempts: charged attempts before a person has to decide.
        concurrency: claims at once in one process.
        function: the work; None when only code with a loop of its own claims this phase.
    """

    ready: LiteralString
    claimed: LiteralString
    done: tuple[LiteralString, ...]
    lease: timedelta | None
    timeout: timedelta
    max_attempts: int
    concurrency: int
    function: PhaseFunction | None = None

    def ending(self, status: str | None) -> str:
        """Return the done status meant by `status`.

        Raises:
            ConfigurationError: it is not one of the phase's, or there are several and none was named.
        """
        if status is None and len(self.done) == 1:
            return self.done[0]
        if status not in self.done:
            choices = ", ".join(self.done)
            raise ConfigurationError(f"phase {self.claimed} ends in one of {choices}: name one, not {status!r}")
        return status


NAME = re.compile(r"[^\W\d]\w*")
LONGEST_NAME = 63
_STATUS = re.compile(r"[A-Za-z0-9_.-]+")


def checked_name(name: LiteralString) -> LiteralString:
    if not NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name!r} cannot be a gate's table or key: letters, digits and underscores only, written as the database "
            "has them (psql's \\d shows it); rename it there"
        )
    if len(name.encode()) > LONGEST_NAME:
        raise ConfigurationError(f"{name!r} is longer than {LONGEST_NAME} bytes, where PostgreSQL cuts a name off")
    return name


def checked_status(status: LiteralString) -> LiteralString:
    if not _STATUS.fullmatch(status):
        raise ConfigurationError(f"{status!r} is not a plain status: letters, digits, dot, dash and underscore only")
    return status


_TERM = re.compile(
    rf'\s*(?:"(?P<quoted>[^"%]+)"|(?P<plain>{NAME.pattern}))'
    r"\s*(?P<direction>\b(?:asc|desc))?\s*(?P<nulls>\bnulls\s+(?:first|last))?\s*",
    re.IGNORECASE,
)
_DIRECTIONS: dict[str, LiteralString] = {"ASC": "", "DESC": " DESC"}
_NULLS: dict[str, LiteralString] = {"FIRST": " NULLS FIRST", "LAST": " NULLS LAST"}


@dataclass(frozen=True, slots=True)
class Order:
    """What `claim_next` orders by.

    Args:
        text: as it was declared.
        terms: each column with its direction; none where it is more than that, which is taken as SQL, as written.
    """

    text: LiteralString
    terms: tuple[tuple[str, LiteralString], ...]

    @classmethod
    def of(cls, text: LiteralString) -> Order:
        """Read `"priority DESC, id"`."""
        terms: list[tuple[str, LiteralString]] = []
        for part in text.split(","):
            term = _TERM.fullmatch(part)
            if term is None:
                return cls(text, ())
            how = _DIRECTIONS[(term["direction"] or "ASC").upper()]
            if term["nulls"]:
                how += _NULLS[term["nulls"].split()[-1].upper()]
            terms.append((term["quoted"] or term["plain"], how))
        return cls(text, tuple(terms))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns it names, as far as that is known."""
        return tuple(column for column, _ in self.terms)

    @property
    def ascending(self) -> bool:
        """Whether it is columns and nothing else, so that a place in it can be compared with `>=`."""
        return bool(self.terms) and not any(how for _, how in self.terms)

    @property
    def sql(self) -> Composable:
        """What stands after ORDER BY, with the columns quoted."""
        return (
            SQL(", ").join(Identifier(column) + SQL(how) for column, how in self.terms)
            if self.terms
            else SQL(self.text)
        )

    def written(self, quoted: Callable[[str], str]) -> str:
        """Return it as a person reads it, with columns quoted by `quoted`."""
        return ", ".join(quoted(column) + how for column, how in self.terms) or self.text


@dataclass(frozen=True, slots=True)
class Conflict:
    """What it means that a row is there already: another one has the same values.

    Args:
        columns: in which columns, those of a unique index.
        where: among which rows, where that index has only some; as PostgreSQL prints it.
    """

    columns: tuple[str, ...]
    where: str | None = None


@dataclass(frozen=True, slots=True)
class Key:
    """The columns that name a row, and its values in the forms statements and people need."""

    columns: tuple[LiteralString, ...]

    @classmethod
    def of(cls, text: LiteralString) -> Key:
        """Read `"sc_id"` or `"company_id, id"`.

        Raises:
            ConfigurationError: a name is no column's, or the gate's own: that changes from claim to claim.
        """
        columns: tuple[LiteralString, ...] = tuple(checked_name(column.strip()) for column in text.split(","))
        if own := sorted(set(columns) & set(GATE_COLUMNS)):
            raise ConfigurationError(f"key= names the gate's own {', '.join(own)}: name what stays the same of a row")
        return cls(columns)

    def values(self, key: object) -> tuple[object, ...]:
        """Return a key as a tuple of its columns' values.

        Raises:
            ValueError: it has another number of parts.
        """
        parts = cast("tuple[object, ...]", key) if isinstance(key, tuple) else (key,)
        if len(parts) != len(self.columns):
            raise ValueError(f"the key is ({', '.join(self.columns)}), not {key!r}")
        return parts

    def value(self, row: Mapping[str, object]) -> object:
        """Return a row's key: the value itself for one column, a tuple for several."""
        values = tuple(row[column] for column in self.columns)
        return values[0] if len(values) == 1 else values

    def names(self) -> tuple[LiteralString, ...]:
        """Return the parameter of each column: `key`, or `key1`, `key2`, …"""
        if len(self.columns) == 1:
            return ("key",)
        numbers: tuple[LiteralString, ...] = ("key1", "key2", "key3", "key4", "key5", "key6")
        return numbers[: len(self.columns)]

    def params(self, key: object) -> dict[str, object]:
        return dict(zip(self.names(), self.values(key), strict=True))

    def lists(self, keys: list[object]) -> dict[str, object]:
        """Return the parameters of a statement over many rows: one list a column, and `keys`, the rows as text."""
        rows = [self.values(key) for key in keys]
        columns = {name: [row[place] for row in rows] for place, name in enumerate(self.names())}
        return {**columns, "keys": [self.text(key) for key in keys]}

    def text(self, key: object) -> str:
        """Return the key of a row that was read as it stands in `attempts` and `effects`, which SQL writes there.

        Several parts are joined by `/`, and escaped, so that no two rows have one text.
        """
        parts = [str(value) for value in self.values(key)]
        return parts[0] if len(parts) == 1 else "/".join(map(_escaped, parts))

    def parsed(self, text: str) -> tuple[str, ...]:
        """Read a key that somebody wrote, and return its parts.

        Raises:
            ValueError: it has another number of parts; the message says how a key is written.
        """
        parts = [text] if len(self.columns) == 1 else text.split("/")
        if len(parts) != len(self.columns):
            columns = "/".join(self.columns).upper()
            raise ValueError(f"{text!r} is no key of {len(self.columns)} parts: write {columns}, and a / in one as %2F")
        return tuple(parts) if len(parts) == 1 else tuple(map(_unescaped, parts))

    def label(self, table: str, key: object) -> str:
        """Return a row as people name it: `table:key`."""
        return f"{table}:{self.text(key)}"


def _escaped(part: str) -> str:
    return part.replace("%", "%25").replace("/", "%2F")


def _unescaped(part: str) -> str:
    """Read an escaped part; a percent sign that begins no escape stands for itself, as people write it."""
    return re.sub("%2F", "/", part, flags=re.IGNORECASE).replace("%25", "%")
