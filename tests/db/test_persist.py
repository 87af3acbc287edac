"""What must not be forgotten is written again after every error but those about the statement or a value."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import errors
from psycopg_pool import PoolClosed, PoolTimeout

from webhooks.db import persist as module
from webhooks.db.persist import persist

LOST = psycopg.OperationalError("server closed the connection unexpectedly")
NOT_NOW = [
    LOST,
    PoolTimeout("none was free"),
    errors.ReadOnlySqlTransaction("cannot execute UPDATE in a read-only transaction"),
    errors.AdminShutdown(),
    errors.QueryCanceled(),
    errors.LockNotAvailable(),
    errors.DeadlockDetected(),
    errors.SerializationFailure(),
    errors.DiskFull(),
    errors.OutOfMemory(),
    errors.CannotConnectNow(),
    errors.InvalidCatalogName(),
    errors.IoError(),
    errors.InternalError_("XX000"),
]
FINAL = [
    errors.UniqueViolation(),
    errors.NumericValueOutOfRange(),
    errors.UndefinedColumn(),
    errors.RaiseException(),
    errors.CardinalityViolation(),
    psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes"),
    PoolClosed("the pool is closed"),
]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.0)


async def tries(error: Exception, times: int, over_after: int) -> int:
    """How often it was tried to write what is refused that often, when the time is over after so many tries."""
    tried = 0

    async def write() -> None:
        nonlocal tried
        tried += 1
        if tried <= times:
            raise error

    try:
        await persist(write, lambda: tried > over_after, what="an end", about="orders:1")
    except type(error):
        assert tried <= times
    return tried


@pytest.mark.parametrize("error", NOT_NOW, ids=lambda error: type(error).__name__)
async def test_what_is_not_now_is_tried_until_it_is_written(error: Exception) -> None:
    assert await tries(error, 20, 100) == 21


@pytest.mark.parametrize("error", FINAL, ids=lambda error: type(error).__name__)
async def test_what_is_refused_for_good_is_tried_once(error: Exception) -> None:
    assert await tries(error, 20, 100) == 1


@pytest.mark.parametrize("error", [errors.LockNotAvailable(), PoolTimeout(), errors.QueryCanceled()])
async def test_others_are_waited_for_until_somebody_else_may_own_the_row(error: Exception) -> None:
    assert await tries(error, 20, 5) == 6


@pytest.mark.parametrize("error", [LOST, errors.ReadOnlySqlTransaction(), errors.AdminShutdown(), errors.DiskFull()])
async def test_while_the_server_can_do_nothing_nobody_else_can_have_claimed(error: Exception) -> None:
    assert await tries(error, 20, 5) == 21
