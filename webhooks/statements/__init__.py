"""Every statement of a gate, composed once.

Each carries its guard in the WHERE and is read by its row count; a later write carries the fence (`claim_seq`).
Statuses are literals, because a plan made for a parameter cannot use the partial index on one status. Leases are set
with `statement_timestamp()` and compared with `now()`: a transaction that waited for a lock would otherwise grant a
lease that is over already. No UPDATE contains a volatile function.
"""

from dataclasses import dataclass

from webhooks.phase import Phase
from webhooks.statements.claiming import DUE, GIVEN_BACK, IS_SUSPECT, Barred, Claiming, bare, mark_name
from webhooks.statements.ending import NOTIFICATION_ATTEMPTS, Ending, late, spent
from webhooks.statements.gated import KEY_TEXT
from webhooks.statements.moving import Moving
from webhooks.statements.records import (
    CLOSE_ATTEMPT,
    PARKED,
    READ_ATTEMPT,
    READ_DECISION,
    RECORD_ATTEMPT,
    RECORD_DECISION,
    TIMES_PUT_BACK,
    WAKE,
    WAKE_PARKED,
    column_params,
    columns_known,
)

__all__ = [
    "CLOSE_ATTEMPT",
    "DUE",
    "GIVEN_BACK",
    "IS_SUSPECT",
    "KEY_TEXT",
    "NOTIFICATION_ATTEMPTS",
    "PARKED",
    "READ_ATTEMPT",
    "READ_DECISION",
    "RECORD_ATTEMPT",
    "RECORD_DECISION",
    "TIMES_PUT_BACK",
    "WAKE",
    "WAKE_PARKED",
    "Barred",
    "Statements",
    "Sweep",
    "column_params",
    "columns_known",
    "mark_name",
]


@dataclass(frozen=True, slots=True)
class Sweep:
    """One thing that a sweep does to rows whose claim or whose attempts are over.

    Args:
        batch: does it to a hundred of them.
        alone: does it to one, by its key.
        listed: reads which ones the batch would take.
    """

    batch: bytes
    alone: bytes
    listed: bytes


class Statements(Claiming, Ending, Moving):
    """The statements of one gate over one table: how its rows are claimed, how claims end, and what others may do."""

    def sweeps(self, phase: Phase, notify: bool) -> tuple[Sweep, ...]:
        """Free rows whose lease is over, give a lease to by-hand claims, escalate exhausted rows."""
        return (
            Sweep(self.expire(phase, notify), self.expire(phase, notify, alone=True), self.listed(late(phase))),
            Sweep(self.adopt(phase), self.adopt(phase, alone=True), self.listed(bare(phase))),
            Sweep(self.exhausted(phase, notify), self.exhausted(phase, notify, alone=True), self.listed(spent(phase))),
        )
