"""A database that was restored from another server's dump: what `serve` does about it, once, beside everything else."""

from __future__ import annotations

import psycopg
import structlog
from psycopg_pool import PoolTimeout

from webhooks import feed
from webhooks.pool import Pool

log = structlog.get_logger(__name__)


async def put_restored_behind(pool: Pool) -> None:
    """Let the feed serve deliveries that came with a dump; without one this is a look at the end of an index."""
    count = 0
    try:
        while True:
            async with pool.transaction() as tx:
                found = await feed.put_behind(tx)
            if not found:
                break
            count += found
    except (psycopg.Error, PoolTimeout) as error:
        log.warning("cannot look for restored deliveries", error=str(error).strip())
    if count:
        log.warning("restored from another server: the feed serves these behind what was here", deliveries=count)
