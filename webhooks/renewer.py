"""Keeps this process's leases alive, in a thread with a connection of its own, so that a blocked event loop cannot
lose them; and tells the loop which claims are lost or have run too long.

The database's clock decides when a lease is over. The process's own judgement uses `CLOCK_BOOTTIME`, which goes on
while a laptop sleeps, counted from *before* a renewal was asked for.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import groupby
from typing import Any

import psycopg
import structlog

from webhooks.db import BEGIN
from webhooks.db.sqlstate import is_about_the_row
from webhooks.outcome import Stop
from webhooks.phase import Key
from webhooks.text import message_of

log = structlog.get_logger(__name__)

CHECK_EVERY_S = 0.25
LOOK_EVERY_S = 1.0
STAND_IN_EVERY_S = 4.0
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boottime() -> float:
    """Seconds since the machine started, sleep included where the system can tell."""
    return time.clock_gettime(_CLOCK)


@dataclass(frozen=True, slots=True)
class Renewal:
    """How the claims of one phase are renewed."""

    table: str
    phase: str
    key: Key
    renew: bytes
    still_held: bytes
    lease: timedelta


@dataclass(slots=True, eq=False)
class Lease:
    """One claim as the renewer sees it. `until`, `renew_at` and `lost` are written by the thread, read by the loop.

    Args:
        renewal: how it is renewed.
        row_key: the row.
        claim_seq: the fence.
        until: when, by this process's clock, the lease is over unless renewed.
        stop_at: when its phase's timeout is over; renewals stop then.
        locked: whether a transaction of our own locks the row: a renewal skips it then, and nobody else can take it.
        owed: whether a renewal was skipped for that reason, and has to be made up for.
        cancel: called in the loop when the claim has to end, with why: once for its timeout, once for its loss.
    """

    renewal: Renewal
    row_key: object
    claim_seq: int
    until: float
    stop_at: float
    cancel: Callable[[Stop], None]
    renew_at: float = 0.0
    lost: bool = False
    locked: bool = False
    owed: bool = False
    told: Stop | None = field(default=None, repr=False)

    def renewed(self, asked_at: float) -> None:
        seconds = self.renewal.lease.total_seconds()
        self.until = asked_at + seconds
        self.renew_at = asked_at + seconds / 3

    def try_again_soon(self) -> None:
        self.renew_at = boottime() + min(1.0, self.renewal.lease.total_seconds() / 6)

    def tell(self, now: float) -> None:
        """Cancel the claim's work once it is lost, or has run too long; a loss is told even after a timeout was."""
        why = Stop.LOST if self.lost or now >= self.until else Stop.TIMEOUT if now >= self.stop_at else None
        if why is not None and self.told not in (why, Stop.LOST):
            self.told = why
            self.cancel(why)


@dataclass(frozen=True, slots=True)
class StandIn:
    """What the thread says for an event loop that a handler blocks: a statement, and from when on."""

    statement: bytes
    params: Mapping[str, object]
    at: float


class Renewer:
    """The thread that renews, and the task that tells claims what became of them."""

    def __init__(self, connect: Callable[[], psycopg.Connection[dict[str, Any]]]) -> None:
        self._connect = connect
        self._connection: psycopg.Connection[dict[str, Any]] | None = None
        self._leases: set[Lease] = set()
        self._changed = threading.Condition()
        self._stopping = False
        self._stand_in: StandIn | None = None
        self._thread = threading.Thread(target=self._renew_for_ever, name="webhooks-renewer", daemon=True)
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._thread.start()
        self._watch = asyncio.create_task(self._watch_for_ever(), name="webhooks-leases")

    async def stop(self) -> None:
        """End the thread and the task; leases still held are left to run out."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
        # Against a frozen server the thread cannot be joined; it is a daemon and dies with the process.
        await asyncio.to_thread(self._thread.join, 2)

    def add(self, lease: Lease) -> None:
        with self._changed:
            self._leases.add(lease)
            # The thread looks again within a second by itself; waking it for every claim costs more than the claim.
            if lease.renew_at < boottime() + LOOK_EVERY_S:
                self._changed.notify()

    def remove(self, lease: Lease) -> None:
        with self._changed:
            self._leases.discard(lease)

    def keep(self, lease: Lease) -> None:
        """Renew it past its phase's timeout, too."""
        with self._changed:
            lease.stop_at = math.inf
            self._changed.notify()

    def unlocked(self, lease: Lease, *, renew: bool) -> None:
        """The transaction of our own is over: renew at once what it made us skip, or what its rollback took back."""
        with self._changed:
            lease.locked = False
            if lease.owed or renew:
                lease.owed = False
                lease.renew_at = 0.0
                self._changed.notify()

    def stand_in(self, statement: bytes, params: Mapping[str, object], at: float) -> None:
        """Have a statement run again and again from a time on, while a claim is held, unless this is called before."""
        with self._changed:
            self._stand_in = StandIn(statement, params, at)

    def __len__(self) -> int:
        return len(self._leases)

    # ---- in the loop

    async def _watch_for_ever(self) -> None:
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            now = boottime()
            with self._changed:
                leases = list(self._leases)
            for lease in leases:
                lease.tell(now)

    # ---- in the thread

    def _renew_for_ever(self) -> None:
        while True:
            with self._changed:
                if self._stopping:
                    break
                due = [lease for lease in self._leases if self._due(lease)]
                stand_in = self._due_stand_in()
                if not due and stand_in is None:
                    self._changed.wait(self._until_next())
                    continue
            self._renew(due)
            if stand_in is not None:
                self._say(stand_in)
        self._drop_connection()

    def _due(self, lease: Lease) -> bool:
        now = boottime()
        return not lease.lost and lease.renew_at <= now < lease.stop_at

    def _due_stand_in(self) -> StandIn | None:
        """What is to be said for the loop. One that is blocked for longer than its work may take says nothing."""
        now = boottime()
        if self._stand_in is None or now < self._stand_in.at:
            return None
        works = any(not lease.lost and now < lease.stop_at for lease in self._leases)
        return self._stand_in if works else None

    def _say(self, stand_in: StandIn) -> None:
        with self._changed:
            if self._stand_in is stand_in:
                self._stand_in = replace(stand_in, at=boottime() + STAND_IN_EVERY_S)
        try:
            self._connected().execute(stand_in.statement, stand_in.params)
        except Exception as error:  # the thread must outlive it: leases come first
            log.warning("the others cannot hear of this process", error=str(error).strip())
            self._drop_connection()

    def _until_next(self) -> float:
        """How long nothing is due, in seconds; a machine that slept is noticed within a second."""
        now = boottime()
        waits = [lease.renew_at - now for lease in self._leases if not lease.lost and now < lease.stop_at]
        return max(0.01, min([*waits, LOOK_EVERY_S]))

    def _renew(self, due: list[Lease]) -> None:
        """Renew phase by phase: one whose table is locked or broken must not cost the others their leases."""
        for renewal, leases in groupby(sorted(due, key=_place), key=lambda lease: lease.renewal):
            self._renew_together(renewal, list(leases))

    def _renew_together(self, renewal: Renewal, leases: list[Lease]) -> None:
        """Renew claims of one phase, each by itself where the row of one of them refuses."""
        try:
            self._renew_phase(renewal, leases)
        except Exception as error:  # the thread must outlive whatever happens to one phase
            if is_about_the_row(error):
                self._roll_back()
                if len(leases) > 1:
                    for lease in leases:
                        self._renew_together(renewal, [lease])
                    return
            else:
                self._drop_connection()
            log.warning(
                "leases could not be renewed, trying again",
                rows=[renewal.key.label(renewal.table, lease.row_key) for lease in leases[:10]],
                phase=renewal.phase,
                claims=len(leases),
                error=message_of(error),
            )
            for lease in leases:
                lease.try_again_soon()

    def _renew_phase(self, renewal: Renewal, leases: list[Lease]) -> None:
        params: dict[str, object] = {
            **renewal.key.lists([lease.row_key for lease in leases]),
            "claim_seqs": [lease.claim_seq for lease in leases],
            "lease": renewal.lease,
        }
        asked_at = boottime()
        connection = self._connected()
        connection.execute(BEGIN, prepare=False)
        renewed = {row["claim_seq"] for row in connection.execute(renewal.renew, params)}
        connection.execute("COMMIT", prepare=False)
        missing = [lease for lease in leases if lease.claim_seq not in renewed]
        held: set[int] = set()
        if missing:
            # A row somebody locks just now is skipped, not lost: only another status or fence says that it was taken.
            connection.execute(BEGIN, prepare=False)
            held = {row["claim_seq"] for row in connection.execute(renewal.still_held, params)}
            connection.execute("COMMIT", prepare=False)
        for lease in leases:
            if lease.claim_seq in renewed:
                lease.renewed(asked_at)
            elif lease.claim_seq in held:
                self._skipped(lease, asked_at)
            else:
                lease.lost = True

    def _skipped(self, lease: Lease, asked_at: float) -> None:
        with self._changed:
            if lease.locked:
                lease.renewed(asked_at)
                lease.owed = True
            else:
                lease.try_again_soon()

    def _roll_back(self) -> None:
        try:
            if self._connection is not None:
                self._connection.rollback()
        except psycopg.Error:
            self._drop_connection()

    def _connected(self) -> psycopg.Connection[dict[str, Any]]:
        if self._connection is None or self._connection.closed:
            self._connection = self._connect()
        return self._connection

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error):
                connection.close()


def _place(lease: Lease) -> tuple[str, str]:
    return lease.renewal.table, lease.renewal.phase
