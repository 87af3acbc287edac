"""Issues: the work of agents, claimed by heartbeats.

::

    open ── claimed ──┬── resolved
                      └── escalated        attempts ran out, or only a person can go on

The phase is declared without a function: no worker runs it, heartbeats claim what is next (`handlers.heartbeat`).
Next is what `rank_at` says: the creation time less the priority's head start (critical 30 days, high 14, medium 7).
So an urgent issue comes first, and none waits longer than the head start of those that overtake it.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Literal, TypeAlias, get_args

from pydantic import BaseModel

from webhooks import Gate

Priority: TypeAlias = Literal["critical", "high", "medium", "low"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
"""The most urgent first."""

ONGOING = ("open", "claimed", "escalated")
"""Where an issue is that is not resolved."""

LONGEST_CALL = timedelta(hours=1)
"""How long an agent may take at most, whatever its settings say."""


class Issue(BaseModel):
    """A row of `issues`: the columns that agents are told of."""

    id: int
    company_id: str
    assigned_agent_id: str | None = None
    title: str
    body: str = ""
    priority: Priority
    created_at: datetime
    external_ref: str | None = None


EXTERNAL = ("company_id", "external_ref")
"""What identifies an issue that is known elsewhere too; the id is ours."""

issues = Gate("issues", key="id", row=Issue, order_by="rank_at, id", unique=EXTERNAL)

# Twice the longest call: one that has to run alone may wait for another to end.
issues.phase("open", claimed="claimed", done="resolved", timeout=2 * LONGEST_CALL + timedelta(minutes=15))
