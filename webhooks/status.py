"""How much waits, runs and needs a person: per gate and phase, the inbox included."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from psycopg.sql import SQL, Composable, Literal

from webhooks.consumer import Consumer
from webhooks.db import Transaction, compose, table
from webhooks.gate import Gate
from webhooks.inbox import inbox
from webhooks.inbox.wants import NO_HANDLER, NO_SOURCE
from webhooks.notify import notifications
from webhooks.phase import Phase

# Each count has a partial index of its own: a status is a literal, so that it is used.
PHASE = (
    "SELECT waiting.backlog, waiting.parked, waiting.oldest_s, running.in_progress\n"
    "FROM (\n"
    "    SELECT count(*) FILTER (WHERE NOT {parked}) AS backlog, count(*) FILTER (WHERE {parked}) AS parked,\n"
    "        extract(epoch FROM now() - min(not_before) FILTER (WHERE NOT {parked} AND not_before <= now()))::float8\n"
    "            AS oldest_s\n"
    "    FROM {gated} WHERE status = {ready}\n"
    ") AS waiting,\n"
    "(SELECT count(*) AS in_progress FROM {gated} WHERE status = {claimed}) AS running"
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
        oldest_s: seconds that the row which is due for longest has waited; None when none is due.
        in_progress: rows that are claimed.
        escalated: rows of this phase that a person has to decide about (`dead` deliveries).
    """

    table: str
    phase: str | None
    ready: str | None
    backlog: int
    parked: int
    oldest_s: float | None
    in_progress: int
    escalated: int


async def status(tx: Transaction, consumer: Consumer) -> list[PhaseStatus]:
    """Count the rows of every phase, the inbox first; notifications last, and only where some are under way."""
    lines = [line for gate in (inbox, *consumer.gates.values()) for line in await _gate_status(tx, gate)]
    told = await _gate_status(tx, notifications)
    return lines + [line for line in told if line.backlog or line.in_progress or line.escalated]


def as_json(lines: Iterable[PhaseStatus]) -> list[dict[str, Any]]:
    """Return the lines as plain values."""
    return [asdict(line) for line in lines]


async def _gate_status(tx: Transaction, gate: Gate[Any]) -> list[PhaseStatus]:
    query = compose(ESCALATED, gated=table(gate.table), escalated=Literal(gate.escalated))
    rows = await (await tx.execute(query)).fetchall()
    escalated: dict[str | None, int] = {row["claimed_from"]: row["escalated"] for row in rows}
    lines = [await _phase_status(tx, gate, phase, escalated.pop(phase.ready, 0)) for phase in gate.phases.values()]
    if escalated:
        lines.append(PhaseStatus(gate.table, None, None, 0, 0, None, 0, sum(escalated.values())))
    return lines


async def _phase_status(tx: Transaction, gate: Gate[Any], phase: Phase, escalated: int) -> PhaseStatus:
    parked: Composable = SQL("parked_on IS NOT NULL") if gate is inbox else SQL("false")
    query = compose(
        PHASE,
        gated=table(gate.table),
        ready=Literal(phase.ready),
        claimed=Literal(phase.claimed),
        parked=SQL("({})").format(parked),
    )
    row = await (await tx.execute(query)).fetchone()
    if row is None:
        raise RuntimeError("a count returned no row")
    return PhaseStatus(gate.table, phase.claimed, phase.ready, **row, escalated=escalated)


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
