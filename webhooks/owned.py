"""A phase of a gate as its claims need it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, LiteralString

from pydantic import TypeAdapter

from webhooks.phase import Key, Phase
from webhooks.renewer import Renewal
from webhooks.statements import Statements


class Owned:
    """The statements of one phase, composed for one length of lease, and where a done status leads."""

    def __init__(
        self,
        table: LiteralString,
        key: Key,
        statements: Statements,
        phase: Phase,
        lease: timedelta,
        entered: Callable[[str], Phase | None],
        row: TypeAdapter[Any],
        notify: bool,
    ) -> None:
        self.table = table
        self.key = key
        self.phase = phase
        self.statements = statements
        self.lease = lease
        self.entered = entered
        self.row = row
        self.notify = notify
        self.claim = statements.claim(phase)
        self.hold = statements.hold(phase)
        self.give_back = statements.give_back(phase)
        self.sweeps = statements.sweeps(phase, notify)
        self.renewal = Renewal(table, phase.claimed, key, statements.renew(phase), statements.still_held(phase), lease)
