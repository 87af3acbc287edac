from __future__ import annotations

import psycopg
import pytest
from psycopg import errors
from psycopg_pool import PoolTimeout

from webhooks.db.sqlstate import is_about_the_row, is_about_the_work

ROW = [errors.UniqueViolation, errors.CheckViolation, errors.RaiseException, errors.NumericValueOutOfRange]
ROW += [errors.ProgramLimitExceeded]  # a value too long for an index
WORK = [errors.UndefinedColumn, errors.SyntaxError, errors.CardinalityViolation, errors.InsufficientPrivilege]
NOT_NOW = [
    errors.ReadOnlySqlTransaction,
    errors.AdminShutdown,
    errors.CannotConnectNow,
    errors.DiskFull,
    errors.InvalidCatalogName,
    errors.LockNotAvailable,
    errors.SerializationFailure,
    errors.TooManyConnections,
]


@pytest.mark.parametrize("kind", ROW)
def test_a_value_that_is_refused_is_about_the_row(kind: type[psycopg.Error]) -> None:
    assert is_about_the_row(kind())
    assert is_about_the_work(kind())


@pytest.mark.parametrize("kind", WORK)
def test_a_statement_that_is_refused_is_about_the_work(kind: type[psycopg.Error]) -> None:
    assert not is_about_the_row(kind())
    assert is_about_the_work(kind())


@pytest.mark.parametrize("kind", NOT_NOW)
def test_a_server_that_cannot_just_now_says_nothing_about_the_work(kind: type[psycopg.Error]) -> None:
    assert not is_about_the_row(kind())
    assert not is_about_the_work(kind())


def test_what_the_driver_cannot_send_is_about_the_row() -> None:
    assert is_about_the_row(psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes"))
    assert not is_about_the_work(psycopg.OperationalError("server closed the connection unexpectedly"))
    assert not is_about_the_work(PoolTimeout())
    assert not is_about_the_work(TimeoutError())
