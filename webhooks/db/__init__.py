"""Transactions as we open them, and the names of our tables."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from typing import Any, LiteralString, NamedTuple, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

import psycopg
from psycopg import AsyncConnection, AsyncCursor
from psycopg.sql import SQL, Composable, Composed, Identifier, Literal

from webhooks.db.sqlstate import is_about_the_server
from webhooks.errors import WebhooksError

T = TypeVar("T")

Connection = AsyncConnection[dict[str, Any]]
Cursor = AsyncCursor[dict[str, Any]]
Query = LiteralString | bytes | SQL | Composed
Statement = tuple[Query, Mapping[str, object] | None]

# Nothing but what poolers keep per client is set on a session (`db.connect`): behind one it would reach other clients
# and be lost to us. So every transaction sets what our statements, and the driver that reads values, depend on: the
# role, the database or the server may have set it otherwise.
START: LiteralString = "BEGIN ISOLATION LEVEL READ COMMITTED"
_COMMON: LiteralString = (
    "set_config('synchronous_commit', 'on', true), set_config('statement_timeout', '0', true),"
    # For a client that stopped inside a transaction (frozen, or its machine is gone): its locks must not outlive its
    # leases.
    " set_config('idle_in_transaction_session_timeout', '60s', true),"
    " set_config('IntervalStyle', 'postgres', true), set_config('extra_float_digits', '1', true),"
    # PostgreSQL 17 and later have it.
    " CASE WHEN current_setting('transaction_timeout', true) <> '0'"
    " THEN set_config('transaction_timeout', '0', true) END"
)
LIMITS: LiteralString = "SELECT set_config('lock_timeout', '1s', true), " + _COMMON
IMPATIENT: LiteralString = "SELECT set_config('lock_timeout', '100ms', true), " + _COMMON
BEGIN: LiteralString = START + "; " + LIMITS


class Watcher(Protocol):
    """Who is told what becomes of a connection's transactions."""

    def answered(self) -> None: ...

    def failed(self, error: psycopg.Error) -> None: ...


WATCHERS: WeakKeyDictionary[Connection, Watcher] = WeakKeyDictionary()

SCHEMA = os.environ.get("WEBHOOKS_SCHEMA") or None


def table(name: str) -> Identifier:
    """Return a table's name, quoted, and qualified where `WEBHOOKS_SCHEMA` is set."""
    return Identifier(name) if SCHEMA is None else Identifier(SCHEMA, name)


def regclass(name: str) -> str:
    """Return a name the way `to_regclass()` and `nextval()` take it, qualified where `WEBHOOKS_SCHEMA` is set."""
    return table(name).as_string(None)


def named(text: LiteralString, **parts: Composable) -> Composed:
    """Compose a statement whose `{attempts}`, `{deliveries}`, … stand for the library's own tables."""
    return SQL(text).format(
        attempts=table("attempts"),
        effects=table("effects"),
        decisions=table("decisions"),
        deliveries=table("deliveries"),
        notifications=table("notifications"),
        stuck=table("stuck"),
        processes=table("processes"),
        flow_declarations=table("flow_declarations"),
        claim_seq=Literal(regclass("claim_seq")),
        **parts,
    )


def compose(text: LiteralString, **parts: Composable) -> bytes:
    """Compose a whole statement, once, into the form psycopg takes without further work."""
    return named(text, **parts).as_bytes(None)


NEXT_BLOCK = compose("SELECT nextval({claim_seq}) AS first")
BLOCK = 100


class Ready(NamedTuple):
    """A row that was brought into a ready status: who waits there can claim it by its key."""

    table: str
    phase: str
    key: object


class Transaction:
    """One open database transaction. Rows are dicts.

    Attributes:
        moved: the rows brought into a ready status here, so that the worker claims them next.
        touched: the rows opened or moved here, as `table:key`, so that their history can name who did it.
        ended: what COMMIT answered, once it was sent.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.moved: list[Ready] = []
        self.touched: list[str] = []
        self.ended: str | None = None

    async def execute(self, query: Query, params: Mapping[str, object] | None = None) -> Cursor:
        """Run one statement with named parameters.

        Raises:
            psycopg.Error: what the database refused; the transaction is then over.
        """
        return await self.connection.execute(query, params)

    async def finish(self, query: Query, params: Mapping[str, object] | None = None) -> None:
        """Run the transaction's last statement, sent together with its COMMIT.

        Raises:
            psycopg.Error: what the database refused; nothing is committed.
        """
        async with self.connection.pipeline():
            await self.connection.execute(query, params)
            commit = await self.connection.execute("COMMIT", prepare=False)
        self.ended = commit.statusmessage


async def at_once(
    connection: Connection, statements: Sequence[Statement], limits: LiteralString = LIMITS
) -> list[Cursor]:
    """Run a whole transaction of ours in one trip, and return its statements' cursors once it is committed.

    Args:
        connection: not in a transaction.
        statements: none may depend on another's answer.
        limits: what is set first: `LIMITS`, or `IMPATIENT` where a lock is better not waited for.

    Raises:
        psycopg.Error: what the database refused; nothing is committed.
    """
    try:
        async with connection.pipeline():
            await connection.execute(START, prepare=False)
            await connection.execute(limits)
            cursors = [await connection.execute(query, params) for query, params in statements]
            await connection.execute("COMMIT", prepare=False)
    except BaseException as error:
        await _rolled_back(connection, error)
        raise
    _answered(connection)
    return cursors


async def _rolled_back(connection: Connection, error: BaseException) -> None:
    """Leave a connection ready for the next transaction, or closed where the server is not to be asked again."""
    if isinstance(error, psycopg.Error) and is_about_the_server(error):
        if (watcher := WATCHERS.get(connection)) is not None:
            watcher.failed(error)
        if error.sqlstate is not None:
            await connection.close()
    if not connection.closed:
        with suppress(psycopg.Error):
            await connection.execute("ROLLBACK", prepare=False)


def _answered(connection: Connection) -> None:
    if (watcher := WATCHERS.get(connection)) is not None:
        watcher.answered()


async def draw(tx: Transaction) -> int:
    """Return the first of a hundred numbers that nobody ever had."""
    row = await (await tx.execute(NEXT_BLOCK)).fetchone()
    if row is None:
        raise RuntimeError("nextval() returned no row")
    return int(row["first"])


async def database_time(tx: Transaction) -> datetime:
    """Return the database's clock, the only one that schedules go by."""
    row = await (await tx.execute("SELECT statement_timestamp() AS now")).fetchone()
    if row is None:
        raise RuntimeError("the database did not tell the time")
    return cast("datetime", row["now"])


class RolledBack(WebhooksError):
    """COMMIT was answered with ROLLBACK: an earlier statement had failed and its error was swallowed."""


@asynccontextmanager
async def transaction(connection: Connection, limits: LiteralString = "") -> AsyncGenerator[Transaction]:
    """Open one of our transactions on an autocommit connection; commit at the end, roll back on any exception.

    Args:
        connection: not in a transaction.
        limits: further `SET LOCAL` statements, each after a semicolon, sent with the BEGIN.

    Raises:
        RolledBack: a statement failed inside, its error was swallowed, and so nothing could be committed.
    """
    try:
        await connection.execute(BEGIN + limits, prepare=False)
        tx = Transaction(connection)
        yield tx
        if tx.ended is None:
            tx.ended = (await connection.execute("COMMIT", prepare=False)).statusmessage
    except BaseException as error:
        await _rolled_back(connection, error)
        raise
    _answered(connection)
    if tx.ended != "COMMIT":
        raise RolledBack("nothing was committed: a statement failed and its error was swallowed")


async def finished(work: Coroutine[Any, Any, T], within_s: float | None = None) -> T:
    """Run `work` to its end though the calling task is cancelled meanwhile; the cancellation is raised afterwards.

    Args:
        work: what must not be cut short, such as writing a result.
        within_s: seconds to wait at most; past that `TimeoutError` is raised and `work` is cancelled.
    """
    task = asyncio.ensure_future(work)
    cancelled = await outlasted(task, within_s)
    if not task.done():
        task.cancel()
        task.add_done_callback(_forget)
        raise cancelled or TimeoutError("the database did not answer in time")
    if cancelled is not None:
        _forget(task)
        raise cancelled
    return task.result()


async def outlasted(work: asyncio.Future[Any], within_s: float | None = None) -> asyncio.CancelledError | None:
    """Wait until `work` is done, or the time is over, though the calling task is cancelled meanwhile; return that."""
    loop = asyncio.get_running_loop()
    until = None if within_s is None else loop.time() + within_s
    cancelled: asyncio.CancelledError | None = None
    while not work.done() and (until is None or loop.time() < until):
        try:
            await asyncio.wait({work}, timeout=None if until is None else until - loop.time())
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


async def ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended, ten seconds at most.

    They are cancelled again every second: told once, a driver that waits for a silent server asks that server to stop,
    for another ten seconds.
    """
    left = set(tasks)
    for _ in range(10):
        for task in left:
            task.cancel()
        if left:
            _, left = await asyncio.wait(left, timeout=1)


def _forget(task: asyncio.Future[Any]) -> None:
    """Read a result nobody waits for, so that asyncio does not complain of it."""
    if not task.cancelled():
        task.exception()


def clean(text: str) -> str:
    """Return a text PostgreSQL can store: NUL and lone surrogates become U+FFFD."""
    return text.replace("\x00", "\ufffd").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
