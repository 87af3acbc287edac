"""Whether this process can do its work: what `/readyz` says."""

from __future__ import annotations

from dataclasses import dataclass

import psycopg

from webhooks.accept import Accepter
from webhooks.control.ask import Asker
from webhooks.db import Transaction
from webhooks.errors import SchemaBehind, Unavailable
from webhooks.migrate import require_current
from webhooks.settings import Settings
from webhooks.worker import Worker

OK = "ok"


@dataclass(frozen=True, slots=True)
class Process:
    """What runs in this process, as far as it can be asked.

    Args:
        asker: the way to the database.
        settings: the environment.
        worker: None under `--no-worker`.
        accepter: None where no receiver runs.
    """

    asker: Asker
    settings: Settings
    worker: Worker | None
    accepter: Accepter | None


async def checks(process: Process) -> dict[str, str]:
    """Return each check with `ok`, or with what is wrong."""
    found = await _database(process)
    if process.asker.pool.health.leaving:
        found["stopping"] = "this process was asked to stop"
    if process.worker is not None:
        found["worker"] = OK if process.worker.alive else "not at work"
    if process.accepter is not None:
        found["inbox"] = "deliveries are refused with 503" if process.accepter.away else OK
    return found


async def _database(process: Process) -> dict[str, str]:
    async def schema(tx: Transaction) -> None:
        await require_current(tx.connection, schema=process.settings.schema_name)

    try:
        await process.asker.ask(schema)
    except Unavailable as error:
        return {"database": str(error), "schema": "unknown"}
    except SchemaBehind as error:
        return {"database": OK, "schema": str(error)}
    except psycopg.Error as error:
        return {"database": " ".join(str(error).split()), "schema": "unknown"}
    return {"database": OK, "schema": OK}
