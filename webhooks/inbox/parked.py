"""What a person decides about a delivery that is parked."""

from __future__ import annotations

from webhooks.db import Ready, Transaction, compose
from webhooks.inbox import inbox

APPLY = compose(
    "UPDATE {deliveries} SET not_before = statement_timestamp()\n"
    "WHERE id = %(id)s AND status = 'received' AND parked_on IS NOT NULL"
)
END = compose(
    "UPDATE {deliveries} SET status = %(to)s, reason = %(reason)s, parked_on = NULL, parked_since = NULL\n"
    "WHERE id = %(id)s AND status = 'received' AND parked_on IS NOT NULL"
)
WAIT_ANEW = compose("UPDATE {deliveries} SET parked_on = NULL, parked_since = NULL WHERE id = %(id)s")


async def apply_parked(tx: Transaction, id: object) -> bool:
    """Make a parked delivery due now; return whether it was parked."""
    if (await tx.execute(APPLY, {"id": id})).rowcount != 1:
        return False
    tx.moved.append(Ready(inbox.table, "applying", id))
    return True


async def end_parked(tx: Transaction, id: object, to: str, reason: str) -> bool:
    """End a parked delivery by hand, in one of the inbox's done statuses; return whether it was parked."""
    if to not in inbox.phases["applying"].done:
        return False
    return (await tx.execute(END, {"id": id, "to": to, "reason": reason})).rowcount == 1


async def wait_anew(tx: Transaction, id: object) -> None:
    """Forget that a delivery was parked, so that it may wait as long again."""
    await tx.execute(WAIT_ANEW, {"id": id})
