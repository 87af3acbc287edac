"""Writing what must not be forgotten: how a claim ended, and what a call to the outside came to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import psycopg
import structlog
from psycopg.errors import LockNotAvailable
from psycopg_pool import PoolClosed

from webhooks.db.sqlstate import is_about_the_server, is_about_the_work

T = TypeVar("T")

log = structlog.get_logger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0


async def persist(write: Callable[[], Awaitable[T]], is_over: Callable[[], bool], *, what: str, about: str) -> T:
    """Write something, again and again on a new connection, after every error but those about the statement or a value.

    Past the time, it is tried on only while the server itself can do nothing: nobody else can have claimed meanwhile.
    Whoever was wrong about that is stopped by the fence, so a late write is safe.

    Args:
        write: one try, in a transaction of its own. An earlier one may have been committed though nobody said so.
        is_over: whether somebody else may own by now what is written to.
        what: is to be written, for the log.
        about: whose it is.

    Raises:
        psycopg.Error: it was refused, or the time is over.
    """
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return await write()
        except psycopg.Error as error:
            if is_about_the_work(error) or isinstance(error, PoolClosed):
                raise
            if is_over() and not is_about_the_server(error):
                raise
            if pause_s == FIRST_PAUSE_S and not isinstance(error, LockNotAvailable):
                log.warning(f"{what} could not be written, trying on", about=about, error=" ".join(str(error).split()))
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
