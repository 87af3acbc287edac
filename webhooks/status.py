"""How much waits, runs and needs a person: per gate and phase, the inbox included."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from psycopg.sql import SQL, Composable, Identifier, Literal

from webhooks.consumer import Consumer
from webhooks.db import Transaction, compose, table
from webhooks.gate import Gate
from webhooks.inbox import inbox
from webhooks.inbox.wants import LIVING_FOR, NO_HANDLER, NO_SOURCE
from webhooks.notify import notifications
from webhooks.phase import Phase

# Each count has a partial index of its own: a status is a literal, so that it is used.
PHASE = (
    "SELECT waiting.backlog, waiting.parked, waiting.oldest_s, running.in_progress, reserved.wanting\n"
    "FROM (\n"
    "    SELECT count(*) FILTER (WHERE NOT {parked}) AS backlog, count(*) FILTER (WHERE {parked}) AS parked,\n"
    "        extract(epoch FROM now() - min(not_before) FILTER (WHERE NOT {parked} AND not_before <= now()))::float8\n"
    "            AS oldest_s\n"
    "    FROM {gated} WHERE status = {ready}{unreserved}\n"
    ") AS waiting,\n"
    "(SELECT count(*) AS in_progress FROM {gated} WHERE status = {claimed}) AS running,\n"
    "(SELECT count(*) AS wanting FROM {gated} WHERE status = {ready} AND {is_reserved}) AS reserved"
)
PROCESSES = compose(
    "SELECT id, app, started_at, seen_at, degraded FROM {processes}\n"
    "WHERE stopped_at IS NULL AND seen_at > now() - %(living)s ORDER BY started_at, id"
)
UNKNOWN = (
    "SELECT status::text AS status, count(*) AS count FROM {gated}\n"
    "WHERE status::text <> ALL(%(known)s::text[] || ARRAY(\n"
    "    SELECT s.status FROM {processes} AS p\n"
    "    CROSS JOIN jsonb_array_elements_text(p.flows -> %(table)s -> 'statuses') AS s (status)\n"
    "    WHERE p.stopped_at IS NULL AND p.seen_at > now() - %(living)s\n"
    "))\n"
    "GROUP BY status::text ORDER BY status::text"
)
ESCALATED = "SELECT claimed_from, count(*) AS escalated FROM {gated} WHERE status = {escalated} GROUP BY claimed_from"
IGNORED = compose(
    "SELECT source, event, count(*) AS ignored FROM {deliveries}\n"
    "WHERE status = 'ignored' AND pruned_at IS NULL\n"
    "    AND (starts_with(reason, %(no_handler)s) OR starts_with(reason, %(no_source)s))\n"
    "GROUP BY source, event ORDER BY source, event"
)


@dataclass(frozen=True, slots=True)
class PhaseStatus:
    """One phase as its table has it now.

    Args:
        table: the gated table.
        phase: named by its claimed status; None stands for escalated rows that belong to no phase.
        ready: the status in which its rows wait.
        backlog: rows that wait, those resting after a failure included; deliveries that are parked are not.
        parked: deliveries put aside until their row moves.
        wanting: deliveries left for another process, which has a handler for them; they are not in the backlog.
        oldest_s: seconds that the row which is due for longest has waited; None when none is due.
        in_progress: rows that are claimed.
        escalated: rows of this phase that a person has to decide about (`dead` deliveries).
    """

    table: str
    phase: str | None
    ready: str | None
    backlog: int
    parked: int
    wanting: int
    oldest_s: float | None
    in_progress: int
    escalated: int


async def status(tx: Transaction, consumer: Consumer) -> list[PhaseStatus]:
    """Count the rows of every phase, the inbox first; notifications last, and only where some are under way."""
    lines = [line for gate in (inbox, *consumer.gates.values()) for line in await _gate_status(tx, gate)]
    told = await _gate_status(tx, notifications)
    return lines + [line for line in told if line.backlog or line.in_progress or line.escalated]


def as_json(lines: Iterable[PhaseStatus], living: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the whole of it as plain values."""
    times = ("started_at", "seen_at")
    shown = [{**one, **{time: one[time].isoformat() for time in times}} for one in living]
    return {"phases": [asdict(line) for line in lines], "processes": shown}


async def _gate_status(tx: Transaction, gate: Gate[Any]) -> list[PhaseStatus]:
    query = compose(ESCALATED, gated=table(gate.table), escalated=Literal(gate.escalated))
    rows = await (await tx.execute(query)).fetchall()
    escalated: dict[str | None, int] = {row["claimed_from"]: row["escalated"] for row in rows}
    lines = [await _phase_status(tx, gate, phase, escalated.pop(phase.ready, 0)) for phase in gate.phases.values()]
    if escalated:
        lines.append(PhaseStatus(gate.table, None, None, 0, 0, 0, None, 0, sum(escalated.values())))
    return lines


async def _phase_status(tx: Transaction, gate: Gate[Any], phase: Phase, escalated: int) -> PhaseStatus:
    parked: Composable = SQL("parked_on IS NOT NULL") if gate is inbox else SQL("false")
    query = compose(
        PHASE,
        gated=table(gate.table),
        ready=Literal(phase.ready),
        claimed=Literal(phase.claimed),
        parked=SQL("({})").format(parked),
        unreserved=gate.statements.unreserved,
        is_reserved=SQL("false") if gate.reserved is None else SQL("{} IS NOT NULL").format(Identifier(gate.reserved)),
    )
    row = await (await tx.execute(query)).fetchone()
    if row is None:
        raise RuntimeError("a count returned no row")
    return PhaseStatus(gate.table, phase.claimed, phase.ready, **row, escalated=escalated)


async def processes(tx: Transaction) -> list[dict[str, Any]]:
    """Return the processes that live, the oldest first, each with what is at fault in it, by name."""
    return await (await tx.execute(PROCESSES, {"living": LIVING_FOR})).fetchall()


async def unknown(tx: Transaction, gate: Gate[Any]) -> Mapping[str, int]:
    """Count the rows in a status that neither this gate nor another living process knows: nothing moves them on.

    It reads the whole table, so nothing should wait for it.
    """
    query = compose(UNKNOWN, gated=table(gate.table))
    params = {"known": sorted(gate.statuses), "table": gate.table, "living": LIVING_FOR}
    return {row["status"]: row["count"] for row in await (await tx.execute(query, params)).fetchall()}


async def applicable(tx: Transaction, consumer: Consumer) -> Mapping[tuple[str, str | None], int]:
    """Count the deliveries ignored for want of a handler that this consumer has, by source and event.

    The event is None where nobody knew the source, and so could read the event. It reads all deliveries, so nothing
    should wait for it.
    """
    rows = await (await tx.execute(IGNORED, {"no_handler": NO_HANDLER, "no_source": NO_SOURCE})).fetchall()
    return {
        (row["source"], row["event"]): row["ignored"]
        for row in rows
        if (row["event"] is None and row["source"] in consumer.sources)
        or any(consumer.handler(row["source"], event) for event in (row["event"] or "").split(", "))
    }
