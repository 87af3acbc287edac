"""The fleet: which processes live on this database, what each handles, and what this one has to leave to others.

Each process registers before it takes anything, and says every few seconds that it lives. A delivery that this process
cannot apply is left for one that can (`inbox.wants`); of two processes that disagree about what becomes of a row in a
ready status, the one whose declaration was first seen later goes on, and the other claims nothing there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta

import psycopg
import structlog
from psycopg.types.json import Jsonb
from psycopg_pool import PoolTimeout

from webhooks.consumer import Consumer
from webhooks.db import Statement, compose
from webhooks.db.sqlstate import is_about_the_work
from webhooks.gate import Gate
from webhooks.inbox import wants
from webhooks.inbox.wants import LIVING_FOR, MOST_ENDED, WANTED, want, wants_of
from webhooks.phase import Phase
from webhooks.pool import Pool
from webhooks.renewer import boottime

log = structlog.get_logger(__name__)

# Less than the five seconds within which a flow that is not in force any more stops claiming.
HEARTBEAT_S = 4.0
LOOK_AGAIN_AFTER_S = 0.1
JOIN_AGAIN_AFTER_S = 2.0
LEAVE_WITHIN_S = 2.0
# A handler that blocks the event loop holds up the heartbeat, too: then the thread that renews its lease says it.
STAND_IN_AFTER_S = 10.0
MISSED = timedelta(seconds=15)
"""Who was not heard of for as long itself knows nothing of the others' silence: the database may have been away."""

HEARTBEAT = compose(
    "WITH spared AS MATERIALIZED (\n"
    "    SELECT other.id FROM {processes} AS me JOIN {processes} AS other ON other.id <> me.id\n"
    "    WHERE me.id = %(id)s AND me.seen_at < now() - %(missed)s\n"
    "        AND other.seen_at < now() - %(missed)s AND other.seen_at > me.seen_at - %(living)s\n"
    "    FOR NO KEY UPDATE OF other SKIP LOCKED\n"
    "), living AS (\n"
    "    UPDATE {processes} AS t SET seen_at = statement_timestamp() FROM spared WHERE t.id = spared.id\n"
    ")\n"
    "INSERT INTO {processes} AS t (id, app, handles, accepts, flows, degraded)\n"
    "VALUES (%(id)s, %(app)s, %(handles)s, %(accepts)s, %(flows)s, %(degraded)s)\n"
    "ON CONFLICT (id) DO UPDATE SET seen_at = statement_timestamp(), degraded = excluded.degraded"
)
DECLARE = compose(
    "INSERT INTO {flow_declarations} (table_name, ready, declaration)\n"
    "SELECT * FROM unnest(%(tables)s::text[], %(readies)s::text[], %(declarations)s::text[]) AS d (a, b, c)\n"
    "WHERE NOT EXISTS (SELECT FROM {flow_declarations} AS f\n"
    "    WHERE f.table_name = d.a AND f.ready = d.b AND f.declaration = d.c)\n"
    "ON CONFLICT (table_name, ready, declaration) DO NOTHING"
)
IN_FORCE = compose(
    "SELECT DISTINCT ON (f.table_name, f.ready) f.table_name, f.ready, f.declaration, f.first_seen, p.app, p.id\n"
    "FROM {processes} AS p CROSS JOIN jsonb_each(p.flows) AS g (table_name, flow)\n"
    "CROSS JOIN jsonb_each_text(g.flow -> 'phases') AS x (ready, declaration)\n"
    "JOIN {flow_declarations} AS f\n"
    "    ON f.table_name = g.table_name AND f.ready = x.ready AND f.declaration = x.declaration\n"
    "WHERE p.stopped_at IS NULL AND p.seen_at > now() - %(living)s\n"
    "ORDER BY f.table_name, f.ready, f.first_seen DESC, f.declaration DESC"
)
STAND_IN = compose("UPDATE {processes} SET seen_at = statement_timestamp() WHERE id = %(id)s")
LEAVE = compose("UPDATE {processes} SET stopped_at = statement_timestamp() WHERE id = %(id)s")
FORGET = compose("DELETE FROM {processes} WHERE seen_at < now() - interval '1 day'")


class Fleet:
    """This process among those that share its database.

    Args:
        pool: the connections.
        consumer: what this process handles.
        app: its name for a person, such as `handlers:consumer`.
        works: whether it runs a worker, and so claims.

    Attributes:
        outranked: why this process claims nothing in a phase, by its table and claimed status.
        wanted: what deliveries wait for that this process can give.
        on_change: called when it was looked what the others do.
    """

    def __init__(self, pool: Pool, consumer: Consumer, *, app: str = "", works: bool = True) -> None:
        self.outranked: dict[tuple[str, str], str] = {}
        self.wanted: tuple[str, ...] = ()
        self.on_change: Callable[[], None] = lambda: None
        self._pool = pool
        self._works = works
        self._gates = consumer.gates if works else {}
        self._wants = wants_of(consumer.sources)
        self._look = asyncio.Event()
        self._away = False
        self._poll_s = pool.settings.poll_s
        self._params = {
            "id": pool.process,
            "app": app,
            "handles": [want(name, event) for name, source in consumer.sources.items() for event in source.handlers],
            "accepts": list(consumer.sources),
            "flows": Jsonb({table: _flow(gate) for table, gate in self._gates.items()}),
            "missed": MISSED,
            "living": LIVING_FOR,
        }

    async def join(self) -> None:
        """Register this process, however long that takes: nobody may be sent anything before the others know.

        Raises:
            psycopg.Error: the database refuses it, and would again.
        """
        while True:
            try:
                await self._pool.at_once([(FORGET, None)])
                await self._beat()
                return
            except (psycopg.Error, PoolTimeout) as error:
                if is_about_the_work(error):
                    raise
                log.warning("this process cannot register yet, trying again", error=str(error).strip())
            await asyncio.sleep(JOIN_AGAIN_AFTER_S)

    async def run(self) -> None:
        """Register, and keep on saying that this process lives."""
        await self.join()
        await self.keep_going()

    def look(self) -> None:
        """Look at once what others have left: one of them rang."""
        self._look.set()

    async def keep_going(self) -> None:
        """Say every few seconds that this process lives, and look what others have left, until cancelled."""
        loop = asyncio.get_running_loop()
        beat_at = loop.time() + HEARTBEAT_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(self._poll_s, max(beat_at - loop.time(), 0))):
                    await self._look.wait()
            self._look.clear()
            try:
                if loop.time() >= beat_at:
                    await self._beat()
                    beat_at = loop.time() + HEARTBEAT_S
                if self._works:
                    await self._look_for_wanted()
            except Exception as error:  # whatever it is, the next one may be heard
                if not self._away:
                    log.warning("the others cannot hear of this process", error=str(error).strip())
                self._away = True
            await asyncio.sleep(LOOK_AGAIN_AFTER_S)

    async def end_unhandled(self) -> None:
        """End the deliveries that want what no living process has."""
        while True:
            async with self._pool.transaction() as tx:
                ended = await wants.end_unhandled(tx, self._pool.process)
            for row in ended:
                log.warning("ignored: no living process handles it any more", delivery=row["id"], reason=row["reason"])
            if len(ended) < MOST_ENDED:
                return

    async def leave(self) -> None:
        """Say that this process has ended, if that can be said within two seconds."""
        with suppress(psycopg.Error, PoolTimeout, TimeoutError):
            async with asyncio.timeout(LEAVE_WITHIN_S):
                await self._pool.at_once([(LEAVE, self._params)])

    async def _look_for_wanted(self) -> None:
        [found] = await self._pool.at_once([(WANTED, None)])
        before, rows = self.wanted, await found.fetchall()
        self.wanted = tuple(row["wants"] for row in rows if row["wants"] in self._wants)
        if before or self.wanted:
            self.on_change()

    async def _beat(self) -> None:
        asked_at = boottime()
        flows = [(table, phase) for table, gate in self._gates.items() for phase in gate.phases.values()]
        declared = {
            "tables": [table for table, _ in flows],
            "readies": [phase.ready for _, phase in flows],
            "declarations": [declaration(phase) for _, phase in flows],
        }
        params = {**self._params, "degraded": Jsonb(self._pool.health.degraded)}
        statements: list[Statement] = [(HEARTBEAT, params), (DECLARE, declared), (IN_FORCE, params)]
        *_, found = await self._pool.at_once(statements)
        self._away = False
        self._pool.renewer.stand_in(STAND_IN, self._params, asked_at + STAND_IN_AFTER_S)
        in_force = {(row["table_name"], row["ready"]): row for row in await found.fetchall()}
        outranked: dict[tuple[str, str], str] = {}
        for table, phase in flows:
            other = in_force.get((table, phase.ready))
            if other is not None and other["declaration"] != declaration(phase):
                outranked[table, phase.claimed] = (
                    f"{other['app'] or 'another process'} ({other['id']}) declares {phase.ready} → "
                    f"{other['declaration']}, first seen later, at {other['first_seen']:%Y-%m-%d %H:%M:%S%z}; "
                    f"{phase.ready} → {declaration(phase)} is not claimed here while it runs"
                )
        if outranked.keys() != self.outranked.keys():
            self._tell(outranked)
        self.outranked = outranked
        self.on_change()

    def _tell(self, outranked: Mapping[tuple[str, str], str]) -> None:
        for (table, phase), reason in outranked.items():
            if (table, phase) not in self.outranked:
                self._pool.health.report(f"{table}.{phase}.flow", reason)
                log.warning(
                    "a newer flow is in force: nothing is claimed here", table=table, phase=phase, reason=reason
                )
        for table, phase in self.outranked.keys() - outranked.keys():
            self._pool.health.report(f"{table}.{phase}.flow", None)
            log.warning("no newer flow is in force any more: claiming again", table=table, phase=phase)


def declaration(phase: Phase) -> str:
    """What becomes of a row in the phase's ready status; what differs in it cannot run side by side."""
    return f"{phase.claimed}: {', '.join(sorted(phase.done))}"


def _flow(gate: Gate[object]) -> dict[str, object]:
    return {
        "statuses": sorted(gate.statuses),
        "phases": {phase.ready: declaration(phase) for phase in gate.phases.values()},
    }
