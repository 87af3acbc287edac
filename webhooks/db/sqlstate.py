"""What an error of the database says: something about the work itself, or only that it cannot be done just now."""

from __future__ import annotations

import psycopg
from psycopg_pool import PoolClosed, PoolTimeout, TooManyRequests

_ABOUT_THE_ROW = frozenset({"22", "23", "54", "P0"})
_ABOUT_THE_WORK = _ABOUT_THE_ROW | {"21", "42"}
# Lost, full, out of memory, starting, stopping, a file that cannot be read, no such database, only for reading.
_ABOUT_THE_SERVER = ("08", "53", "57P", "58", "3D000", "25006")
# Raised by the driver itself, before anything is sent: a value that it cannot turn into what the server reads.
_OF_THE_DRIVER = (psycopg.DataError, psycopg.ProgrammingError, psycopg.IntegrityError, psycopg.NotSupportedError)
# Said of the pool's own connections, all of which may be at work.
_OF_THE_POOL = (PoolTimeout, PoolClosed, TooManyRequests)


def is_about_the_row(error: BaseException) -> bool:
    """Whether a row's own values were refused (classes 22, 23, 54 and P0), so that the next row may well be taken."""
    return _is_of(error, _ABOUT_THE_ROW)


def is_about_the_work(error: BaseException) -> bool:
    """Whether the statement or a value was refused (classes 21, 22, 23, 42, 54 and P0): trying again changes nothing.

    Everything else says "not now": no answer, a server that is read-only (25006), starting, stopping or full, a lock,
    no free connection. https://www.postgresql.org/docs/current/errcodes-appendix.html lists the classes.
    """
    return _is_of(error, _ABOUT_THE_WORK)


def is_about_the_server(error: BaseException) -> bool:
    """Whether the server cannot do now what was asked, whatever it is: it only reads, is full, starts or stops, or the
    connection was lost. The connection is then of no more use: the next one may lead to another server."""
    if not isinstance(error, psycopg.Error):
        return False
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError) and not isinstance(error, _OF_THE_POOL)
    return error.sqlstate.startswith(_ABOUT_THE_SERVER)


def _is_of(error: BaseException, classes: frozenset[str]) -> bool:
    if not isinstance(error, psycopg.Error):
        return False
    if error.sqlstate is None:
        return isinstance(error, _OF_THE_DRIVER)
    return error.sqlstate[:2] in classes
