"""Every connection of ours is opened here: it finds out soon that its server is gone, reads and writes in one way
whatever the role's or the server's settings are, and can be dropped at once together with all others of its process.

Each new connection asks one question before it is used, in the same trip that sets how dates are written. A database
that is not in UTF8 is refused by name; so is, for whoever writes, a server that takes no writes: behind a service name
or a proxy the next try may lead to the right one.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, LiteralString
from weakref import WeakKeyDictionary

import psycopg
from psycopg import AsyncConnection
from psycopg.conninfo import conninfo_to_dict
from psycopg.errors import ReadOnlySqlTransaction
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool

from webhooks.db import WATCHERS, Connection
from webhooks.errors import ConfigurationError

BlockingConnection = psycopg.Connection[dict[str, Any]]

ANSWERED_WITHIN_S = 2.0
# Poolers such as PgBouncer keep these per client, and refuse what comes in `options`. What they do not keep is set in
# each transaction, by `db.BEGIN` and `db.LIMITS`.
GREETING: LiteralString = (
    "SELECT set_config('DateStyle', 'ISO, MDY', false), set_config('TimeZone', 'UTC', false),"
    " current_database() AS database, getdatabaseencoding() AS encoding,"
    " pg_is_in_recovery() AS standby, current_setting('transaction_read_only')::boolean AS read_only,"
    " pg_postmaster_start_time()::text AS server"
)


def parameters(url: str) -> dict[str, Any]:
    """Return what a connection is opened with. A time-out or a name that the address itself gives is kept.

    Raises:
        ConfigurationError: the address cannot be read.
    """
    try:
        given = conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        # libpq's own message repeats the address, and with it the password.
        raise ConfigurationError("DATABASE_URL: write postgresql://user:password@host:port/database") from None
    wanted: dict[str, Any] = {
        "connect_timeout": 2,
        "keepalives": 1,
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": 5000,
        "application_name": "webhooks",
    }
    if "," in str(given.get("host", "")):
        wanted["target_session_attrs"] = "read-write"
    # Whatever the address, the role or PGCLIENTENCODING say: texts are sent and read as UTF-8.
    return {**{name: value for name, value in wanted.items() if name not in given}, "client_encoding": "utf8"}


class Connections:
    """The connections of one process.

    Args:
        url: the database's address.
        prepare: whether statements are prepared; not behind a transaction pooler.
        writes: whether a server that takes no writes is refused.

    Attributes:
        failure: why the last try to connect failed; empty when it did not.
        answered_at: when a transaction was last committed, by the monotonic clock.
        on_failure: told of transactions that failed for a reason that lies with the server.

    Raises:
        ConfigurationError: the address cannot be read.
    """

    def __init__(self, url: str, *, prepare: bool = True, writes: bool = True) -> None:
        self.url = url
        self.failure = ""
        self.answered_at = 0.0
        self.on_failure: Callable[[psycopg.Error], None] | None = None
        self._parameters = parameters(url)
        self._prepare_threshold = 5 if prepare else None
        self._writes = writes
        # Each with the start of the server that it leads to, once that is known.
        self._open: WeakKeyDictionary[psycopg.BaseConnection[Any], str | None] = WeakKeyDictionary()
        self._opening = threading.Lock()  # the lease renewer connects in a thread of its own

    async def connect(self, url: str | None = None) -> Connection:
        """Open one connection, in autocommit, with rows as dicts.

        Args:
            url: another address of the same database, past a pooler: nothing is prepared there.

        Raises:
            ConfigurationError: the address cannot be read, or the database cannot be used.
            psycopg.Error: nobody answers there, not us, or it takes no writes.
        """
        try:
            connection = await AsyncConnection[dict[str, Any]].connect(
                url or self.url,
                autocommit=True,
                row_factory=dict_row,
                prepare_threshold=self._prepare_threshold if url is None else None,
                **(self._parameters if url is None else parameters(url)),
            )
        except Exception as error:
            self.failure = one_line(error)
            raise
        await self.greet(connection)
        return connection

    def connect_in_thread(self) -> BlockingConnection:
        """Open one connection for a thread: the same, for code that blocks."""
        connection = BlockingConnection.connect(
            self.url,
            autocommit=True,
            row_factory=dict_row,
            prepare_threshold=self._prepare_threshold,
            **self._parameters,
        )
        given_up = threading.Timer(ANSWERED_WITHIN_S, shut, [connection])
        given_up.start()
        try:
            self._register(connection)
            self._judge(connection, connection.execute(GREETING, prepare=False).fetchone())
        except BaseException:
            connection.close()
            raise
        finally:
            given_up.cancel()
        return connection

    def pool(self, most: int) -> AsyncConnectionPool[Connection]:
        """Make a pool of at most so many connections; it is not open yet."""
        return AsyncConnectionPool(
            self.url,
            connection_class=AsyncConnection[dict[str, Any]],
            kwargs={
                "autocommit": True,
                "row_factory": dict_row,
                "prepare_threshold": self._prepare_threshold,
                **self._parameters,
            },
            configure=self.greet,
            min_size=1,
            max_size=most,
            open=False,
            timeout=3,
            # After this long it stops trying by itself, and tries again at once for whoever asks next.
            reconnect_timeout=2,
        )

    async def greet(self, connection: Connection) -> None:
        """Set how a new connection reads and writes, and see that its database can be used; else it is closed.

        Raises:
            ConfigurationError: the database cannot be used.
            psycopg.Error: it does not answer, or takes no writes.
        """
        self._register(connection)
        # Against a server that froze just now, no time-out around the driver's call ends it.
        given_up = asyncio.get_running_loop().call_later(ANSWERED_WITHIN_S, shut, connection)
        try:
            self._judge(connection, await (await connection.execute(GREETING, prepare=False)).fetchone())
        except BaseException as error:
            self.failure = one_line(error)
            await connection.close()
            raise
        finally:
            given_up.cancel()
        self.failure = ""

    def drop(self, *, but: str | None = None) -> None:
        """Shut the sockets of all connections there are: whatever waits on them ends at once, and their owners connect
        anew.

        Args:
            but: the start of a server: connections that lead there are left alone, and those that are just being made.
        """
        with self._opening:
            connections = [made for made, server in self._open.items() if but is None or server not in (None, but)]
        for connection in connections:
            shut(connection)

    def answered(self) -> None:
        """Take note that a transaction was committed."""
        self.answered_at = time.monotonic()

    def failed(self, error: psycopg.Error) -> None:
        """Take note that a transaction failed for a reason that lies with the server."""
        if self.on_failure is not None:
            self.on_failure(error)

    def _register(self, connection: psycopg.BaseConnection[Any]) -> None:
        self._lead(connection, None)
        if isinstance(connection, AsyncConnection):
            WATCHERS[connection] = self

    def _lead(self, connection: psycopg.BaseConnection[Any], server: str | None) -> None:
        with self._opening:
            self._open[connection] = server

    def _judge(self, connection: psycopg.BaseConnection[Any], answer: Mapping[str, Any] | None) -> None:
        if answer is None:
            raise RuntimeError("the database answered nothing")
        if answer["encoding"] != "UTF8":
            raise ConfigurationError(
                f"the encoding of database {answer['database']} is {answer['encoding']}, and UTF8 is needed: make "
                "one with CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0, and name it in DATABASE_URL"
            )
        if self._writes and (reason := takes_no_writes(answer)):
            raise ReadOnlySqlTransaction(reason)
        self._lead(connection, answer["server"])


def takes_no_writes(answer: Mapping[str, Any]) -> str | None:
    """Return why a server that was asked takes no writes; None when it does."""
    if answer["standby"]:
        return "the server is a standby and takes no writes"
    return "the server is set to be read-only (default_transaction_read_only)" if answer["read_only"] else None


def shut(connection: psycopg.BaseConnection[Any]) -> None:
    """Shut a connection's socket, which ends at once whatever waits on it. It stays to be closed by its owner."""
    with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def is_lost(connection: Connection) -> bool:
    """Whether an idle connection's server has closed it, or it was dropped, as far as that is known without a trip."""
    try:
        connection.pgconn.consume_input()
        connection.pgconn.consume_input()  # what was said in closing comes before the end
    except psycopg.Error:
        return True
    return connection.closed


def one_line(error: BaseException) -> str:
    """Return an error's message as one line."""
    return " ".join(str(error).split()) or type(error).__name__
