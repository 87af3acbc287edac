"""Whose turn it is to reconcile, where many processes do so on a schedule.

A lock cannot do it: none of ours outlives its transaction, and no transaction may span a call to a provider. So the
turn is a row, and whoever moves its `next_at` on has it; the row count decides. A process that dies in its turn costs
that one round. Should a round last longer than the interval, another process begins the next one beside it: that is
harmless, because each delivery is claimed before it is asked for, and the inbox knows a copy from what is new.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from webhooks.db import Transaction, compose, table

TAKE = compose(
    "INSERT INTO {turns} AS t (scope, taken_by, next_at)\n"
    "VALUES (%(scope)s, %(taken_by)s, statement_timestamp() + %(every)s::interval)\n"
    "ON CONFLICT (scope) DO UPDATE SET taken_by = %(taken_by)s, taken_at = statement_timestamp(),\n"
    "    next_at = statement_timestamp() + %(every)s::interval\n"
    "WHERE t.next_at <= statement_timestamp()\n"
    "RETURNING t.taken_at, t.whole_until",
    turns=table("reconcile_turns"),
)
WHOLE = compose(
    "UPDATE {turns} SET whole_until = greatest(whole_until, %(until)s) WHERE scope = %(scope)s",
    turns=table("reconcile_turns"),
)


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn that is ours.

    Args:
        began_at: when it began, by the database's clock.
        whole_until: up to when nothing was missing after an earlier turn; None: no turn has ended so.
    """

    began_at: datetime
    whole_until: datetime | None


async def take(tx: Transaction, scope: str, taken_by: str, every: timedelta) -> Turn | None:
    """Take the turn if it is due; None where another process has had it within `every`."""
    params = {"scope": scope, "taken_by": taken_by, "every": every}
    row = await (await tx.execute(TAKE, params)).fetchone()
    return None if row is None else Turn(row["taken_at"], row["whole_until"])


async def whole(tx: Transaction, scope: str, until: datetime) -> None:
    """Note that nothing up to `until` is missing, so that the next turn need not look at it again."""
    await tx.execute(WHOLE, {"scope": scope, "until": until})
