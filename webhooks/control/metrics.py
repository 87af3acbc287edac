"""The gauges that are read from the tables when somebody asks for them."""

from __future__ import annotations

from collections.abc import Iterable

from webhooks import observe
from webhooks.status import PhaseStatus

GAUGES = (
    observe.BACKLOG,
    observe.PARKED,
    observe.WANTING,
    observe.OLDEST_SECONDS,
    observe.IN_PROGRESS,
    observe.ESCALATED,
)


def show(lines: Iterable[PhaseStatus] | None) -> None:
    """Set the gauges to what was counted; None: the database did not answer, and an old count would be a lie."""
    for gauge in GAUGES:
        gauge.clear()
    observe.DATABASE_UP.set(0 if lines is None else 1)
    for line in lines or ():
        labels = (line.table, line.phase or "")
        observe.ESCALATED.labels(*labels).set(line.escalated)
        if line.phase is not None:
            observe.BACKLOG.labels(*labels).set(line.backlog)
            observe.PARKED.labels(*labels).set(line.parked)
            observe.WANTING.labels(*labels).set(line.wanting)
            observe.OLDEST_SECONDS.labels(*labels).set(line.oldest_s or 0)
            observe.IN_PROGRESS.labels(*labels).set(line.in_progress)
