"""A server that takes no writes for a while, as the old primary of a switchover."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gates import elsewhere, until


@asynccontextmanager
async def read_only(url: str) -> AsyncIterator[None]:
    """The whole server takes no writes while the block runs, from old connections and new ones."""
    await _tell(url, "ALTER SYSTEM SET default_transaction_read_only = on", "on")
    try:
        yield
    finally:
        await _tell(url, "ALTER SYSTEM RESET default_transaction_read_only", "off")


async def _tell(url: str, statement: str, wanted: str) -> None:
    async with await elsewhere(url) as admin:
        await admin.execute(statement.encode())
        await admin.execute("SELECT pg_reload_conf()")

    async def is_told() -> bool:
        async with await elsewhere(url) as fresh:
            row = await (await fresh.execute("SHOW default_transaction_read_only")).fetchone()
            return row == {"default_transaction_read_only": wanted}

    await until(is_told)
