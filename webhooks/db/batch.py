"""A batch of rows of which one refuses: then each is done by itself."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import psycopg

from webhooks.db import Transaction
from webhooks.db.sqlstate import is_about_the_row

T = TypeVar("T")
R = TypeVar("R")


async def each(
    items: Sequence[T], run: Callable[[Sequence[T]], Awaitable[R]], refused: Callable[[T, psycopg.Error], Any]
) -> list[R]:
    """Do something to all of them at once, or, where one row refuses, to each by itself.

    Args:
        items: what it is done to.
        run: does it to some of them, in a transaction or a savepoint of its own.
        refused: told of each that refuses.

    Returns:
        The answers of those runs that went well.

    Raises:
        psycopg.Error: an error that says nothing of a row, such as a database that is away.
    """
    try:
        return [await run(items)] if items else []
    except psycopg.Error as error:
        if not is_about_the_row(error):
            raise
    answers: list[R] = []
    for item in items:
        try:
            answers.append(await run([item]))
        except psycopg.Error as error:
            if not is_about_the_row(error):
                raise
            refused(item, error)
    return answers


@asynccontextmanager
async def savepoint(tx: Transaction) -> AsyncGenerator[None]:
    """Have an error inside undo what was done inside, and no more; constraints that wait for the COMMIT speak now."""
    async with tx.connection.transaction():
        yield
        await tx.execute("SET CONSTRAINTS ALL IMMEDIATE")
