"""Rows that refuse what has to be done to them: a trigger raises, a constraint forbids the status they would get.

One of them fails the statement for a whole batch, so the batch is then tried row by row, each in a transaction of its
own, and what refuses is written into the table `stuck`, where `webhooks escalations` finds it. For a while the process
leaves such a row out of its batches; after that it tries again, because somebody may have mended it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import psycopg
import structlog

from webhooks.db import Transaction, clean, compose
from webhooks.text import message_of

log = structlog.get_logger(__name__)

What = Literal["claimed", "freed"]
"""What a row refuses: to be claimed, or to go back, or to a person, when its claim or its attempts are over."""

# The first pause and the longest, in seconds. A claim may be refused for the moment only: by a unique index of the rows
# that are worked on, which allows one of a kind at a time.
PAUSES_S: dict[What, tuple[float, float]] = {"claimed": (1.0, 60.0), "freed": (15.0, 120.0)}
LONGEST_PAUSE_S = 120.0
OUTDATED = timedelta(minutes=5)
MOST = 10_000
"""How many rows of a phase are left out at most before the rest has to wait for the next round."""

# What no process has seen to refuse for longer than the longest pause is well again, or gone.
RECORD = compose(
    "INSERT INTO {stuck} AS s (table_name, key, phase, what, reason, constraint_name)\n"
    "VALUES (%(table)s, %(key)s, %(phase)s, %(what)s, %(reason)s, %(constraint)s)\n"
    "ON CONFLICT (table_name, key) DO UPDATE SET phase = excluded.phase, what = excluded.what,\n"
    "    reason = excluded.reason, constraint_name = excluded.constraint_name, seen_at = statement_timestamp()\n"
    "RETURNING since = seen_at AS new"
)
FORGET = compose(
    "DELETE FROM {stuck} WHERE table_name = %(table)s AND key = ANY(%(keys)s)\n"
    "    OR seen_at < statement_timestamp() - %(outdated)s"
)
COUNT = compose(
    "SELECT count(*) AS rows, string_agg(DISTINCT what, ' or ') AS what, max(reason) AS reason FROM {stuck}\n"
    "WHERE table_name = %(table)s AND phase = %(phase)s"
)
OF_TABLE = compose(
    "SELECT key, phase, what, reason, constraint_name, since, seen_at FROM {stuck}\n"
    "WHERE table_name = %(table)s ORDER BY since, key LIMIT %(limit)s"
)
OF_ROW = compose(
    "SELECT key, phase, what, reason, constraint_name, since, seen_at FROM {stuck}\n"
    "WHERE table_name = %(table)s AND key = %(key)s"
)


@dataclass(slots=True)
class _Pause:
    tries: int = 0
    until: float = 0.0


class Stuck:
    """The rows that refused something in this process, so that they are left out of its batches for a while.

    Args:
        clock: seconds that only ever grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pauses: dict[tuple[str, str, What], dict[str, _Pause]] = {}

    def left_out(self, table: str, phase: str, what: What) -> list[str]:
        """Return the keys, as text, of rows that are not tried just now."""
        now, known = self._clock(), self._pauses.get((table, phase, what), {})
        for key in [key for key, pause in known.items() if pause.until + LONGEST_PAUSE_S < now]:
            del known[key]  # it was tried since, and went, or is gone
        return [key for key, pause in known.items() if now < pause.until]

    def refused(self, table: str, phase: str, what: What, key: str) -> None:
        """Leave a row out for a while, longer each time."""
        known = self._pauses.setdefault((table, phase, what), {})
        pause = known.setdefault(key, _Pause())
        first, longest = PAUSES_S[what]
        pause.until = self._clock() + min(longest, first * 2 ** min(pause.tries, 10))
        pause.tries += 1

    def went(self, table: str, phase: str, what: What, keys: Iterable[str]) -> list[str]:
        """Forget rows that did what was asked of them, and return those that had refused it before."""
        known = self._pauses.get((table, phase, what))
        return [] if not known else [key for key in keys if known.pop(key, None) is not None]


async def record(tx: Transaction, table: str, key: str, phase: str, what: What, error: BaseException) -> None:
    """Write down that a row refuses, and log it the first time."""
    reason = _reason(error)
    constraint = error.diag.constraint_name if isinstance(error, psycopg.Error) else None
    params = {"table": table, "key": key, "phase": phase, "what": what, "reason": clean(reason)}
    row = await (await tx.execute(RECORD, {**params, "constraint": constraint})).fetchone()
    if row is not None and row["new"]:
        log.error(f"this row cannot be {what}: mend it by hand", row=f"{table}:{key}", phase=phase, reason=reason)


async def review(tx: Transaction, table: str, phase: str, went: Sequence[str]) -> str | None:
    """Remove the lines of rows that are well again, and say what is the matter with those that are left.

    Args:
        tx: where.
        table: whose rows.
        phase: named by its claimed status.
        went: the keys of those that did what they had refused.
    """
    await tx.execute(FORGET, {"table": table, "keys": list(went), "outdated": OUTDATED})
    found = await (await tx.execute(COUNT, {"table": table, "phase": phase})).fetchone()
    if found is None or not found["rows"]:
        return None
    rows = "1 row" if found["rows"] == 1 else f"{found['rows']} rows"
    return f"{rows} cannot be {found['what']} ({found['reason']}): webhooks escalations"


def _reason(error: BaseException) -> str:
    """Say in one line what refused a row: the constraint or the trigger's function, and no value of the row's."""
    told = message_of(error)
    if isinstance(error, psycopg.Error):
        constraint, context = error.diag.constraint_name, error.diag.context
        if constraint is not None and constraint not in told:
            told += f" (constraint {constraint})"
        if context and error.sqlstate is not None and error.sqlstate.startswith("P0"):
            told += f" ({context.splitlines()[0]})"
    return " ".join(told.split())
