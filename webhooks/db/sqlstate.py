"""What an error of the database says: something about the work itself, or only that it cannot be done just now."""

from __future__ import annotations

import psycopg

_ABOUT_THE_ROW = frozenset({"22", "23", "54", "P0"})
_ABOUT_THE_WORK = _ABOUT_THE_ROW | {"21", "42"}
# Raised by the driver itself, before anything is sent: a value that it cannot turn into what the server reads.
_OF_THE_DRIVER = (psycopg.DataError, psycopg.ProgrammingError, psycopg.IntegrityError, psycopg.NotSupportedError)


def is_about_the_row(error: BaseException) -> bool:
    """Whether a row's own values were refused (classes 22, 23, 54 and P0), so that the next row may well be taken."""
    return _is_of(error, _ABOUT_THE_ROW)


def is_about_the_work(error: BaseException) -> bool:
    """Whether the statement or a value was refused (classes 21, 22, 23, 42, 54 and P0): trying again changes nothing.

    Everything else says "not now": no answer, a server that is read-only (25006), starting, stopping or full, a lock,
    no free connection. https://www.postgresql.org/docs/current/errcodes-appendix.html lists the classes.
    """
    return _is_of(error, _ABOUT_THE_WORK)


def _is_of(error: BaseException, classes: frozenset[str]) -> bool:
    if not isinstance(error, psycopg.Error):
        return False
    if error.sqlstate is None:
        return isinstance(error, _OF_THE_DRIVER)
    return error.sqlstate[:2] in classes
