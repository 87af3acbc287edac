"""Every statement of a gate, composed once.

Each carries its guard in the WHERE and is read by its row count; a later write carries the fence (`claim_seq`).
Statuses are literals, because a plan made for a parameter cannot use the partial index on one status. Leases are set
with `statement_timestamp()` and compared with `now()`: a transaction that waited for a lock would otherwise grant a
lease that is over already. No UPDATE contains a volatile function.
"""

from webhooks.statements.claiming import GIVEN_BACK, Claiming, Which, mark_name
from webhooks.statements.ending import NOTIFICATION_ATTEMPTS, Ending
from webhooks.statements.moving import Moving
from webhooks.statements.records import (
    CLOSE_ATTEMPT,
    READ_ATTEMPT,
    RECORD_ATTEMPT,
    RECORD_DECISION,
    WAKE_PARKED,
    column_params,
)

__all__ = [
    "CLOSE_ATTEMPT",
    "GIVEN_BACK",
    "NOTIFICATION_ATTEMPTS",
    "READ_ATTEMPT",
    "RECORD_ATTEMPT",
    "RECORD_DECISION",
    "WAKE_PARKED",
    "Statements",
    "Which",
    "column_params",
    "mark_name",
]


class Statements(Claiming, Ending, Moving):
    """The statements of one gate over one table: how its rows are claimed, how claims end, and what others may do."""
