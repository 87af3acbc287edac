"""A claim: ownership of one row for one attempt, and every way it can end."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Generic, TypeVarTuple

import psycopg
import structlog
from typing_extensions import TypeVar

from webhooks import effects
from webhooks.db import Ready, Transaction, clean, finished, outlasted
from webhooks.db.persist import persist
from webhooks.db.sqlstate import is_about_the_work
from webhooks.delivery import Decision
from webhooks.errors import Escalate, LostClaim, Snooze
from webhooks.outcome import Outcome, Release, Stop, gravest, release_for
from webhooks.owned import Owned
from webhooks.phase import GATE_COLUMNS, Done, check_columns
from webhooks.pool import Pool
from webhooks.renewer import Lease, boottime
from webhooks.settling import Ending, read, statements, wake
from webhooks.statements import (
    CLOSE_ATTEMPT,
    KEY_TEXT,
    READ_ATTEMPT,
    READ_DECISION,
    TIMES_PUT_BACK,
    column_params,
    columns_known,
)
from webhooks.text import describe, members
from webhooks.threads import Running

Row = TypeVar("Row", default=Any)
R = TypeVar("R")
Ts = TypeVarTuple("Ts")

log = structlog.get_logger(__name__)

CLOSE_WITHIN_S = 30.0
GONE_WITHIN = timedelta(seconds=5)
"""How long a row rests that is let go while a thread works for it, because its process is about to be gone."""


class Claim(Generic[Row]):
    """Ownership of one row for one attempt.

    Attributes:
        row: the row as it was claimed; there once the claim is held.
        key: its key; a tuple where the gate has several key columns.
        label: the row as people name it, `table:key`.
        phase: the claimed status.
        claim_seq: the fence, in the WHERE of every later write.
        visit: the row's stay in this phase; a retry keeps it.
        attempt: the number of this attempt, from 1.
        lease_until: when the lease ended as it was claimed; renewals move it on.
        moved: the rows brought into a ready status under this claim, for the worker to claim next.
        outcome: how it ended, once that is written; None while it runs, and for good when it was lost.
        decision: what a person decided in this visit when they had the row tried again: the last decision that said a
            value, else the last; None where nobody did. There once the claim is held.
        noted: columns to write if the claim is released, so that a row which failed shows what it was about.
        effects: the names of the effects that this attempt has begun.
        suspect: whether the last charged attempt before this one expired, so that this one may end its worker, too;
            known where the row was not claimed by its key.
        not_now: an error that lies with the database; where that is how the block ends, the attempt is not charged.
    """

    row: Row

    def __init__(self, pool: Pool, owned: Owned, columns: dict[str, Any], asked_at: float) -> None:
        self.key: object = owned.key.value(columns)
        self.label: str = f"{owned.table}:{columns.pop(KEY_TEXT)}"
        self.phase: str = owned.phase.claimed
        self.claim_seq: int = columns["claim_seq"]
        self.visit: int = columns["visit"]
        self.attempt: int = columns["attempt_count"]
        self.max_attempts: int = columns["max_attempts"]
        self.lease_until: datetime = columns["lease_until"]
        self._pool = pool
        self._owned = owned
        self._columns = columns
        self._threads = Running()
        self._inside: set[asyncio.Task[Any] | None] = set()  # the tasks with a transaction() of ours open
        self._stop: Stop | None = None
        self.not_now: BaseException | None = None
        self._ending = False
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._cancelled = 0
        self.moved: list[Ready] = []
        self.noted: dict[str, object] = {}
        self.effects: set[str] = set()
        self.suspect = False
        self.outcome: Outcome | None = None
        self.decision: Decision | None = None
        self._lease = Lease(
            renewal=owned.renewal,
            row_key=self.key,
            claim_seq=self.claim_seq,
            until=asked_at + owned.lease.total_seconds(),
            renew_at=asked_at + owned.lease.total_seconds() / 3,
            stop_at=asked_at + owned.phase.timeout.total_seconds(),
            cancel=self.stop,
        )

    def __repr__(self) -> str:
        return f"<Claim {self.label} {self.phase} attempt {self.attempt}>"

    def done(self, status: str | None = None, /, **columns: object) -> Done:
        """Return what a phase returns: the done status (may be left out when there is one) and columns to write.

        Raises:
            ConfigurationError: the status is not one of the phase's, or a column is the gate's own.
        """
        check_columns(self._owned.table, columns)
        return Done(self._owned.phase.ending(status), columns)

    async def complete(self, status: str | None = None, /, **columns: object) -> Done:
        """Move the row to its done status and write columns, in one fenced UPDATE, and return what a phase returns.
        Inside a phase, `return claim.done()` does the same.

        Raises:
            ConfigurationError: the status is not one of the phase's.
            LostClaim: the row is somebody else's by now; nothing was written.
            RuntimeError: called inside `transaction()`, which has a `done` of its own.
        """
        self._not_inside("complete()")
        done = self.done(status, **columns)
        await self.settle(done)
        return done

    def idempotency_key(self, name: str) -> str:
        """Return the key of an effect: `table:key:phase:visit:name`, the same on every attempt of this visit."""
        return f"{self.label}:{self.phase}:{self.visit}:{name}"

    async def once(
        self,
        name: str,
        fn: Callable[[*Ts], Awaitable[R]],
        *args: *Ts,
        reconcile: Callable[[], Awaitable[R | None]] | None = None,
        retry_safe: bool = False,
        timeout: timedelta = timedelta(seconds=30),  # noqa: ASYNC109 - the public name
    ) -> R:
        """Call the outside world once a visit, and remember the result.

        A retry of the phase gets the recorded result instead of a second call. `fn` must be annotated; arguments and
        result go through pydantic, and the first attempt, too, gets the value that went through JSON.

        Args:
            name: the effect's name, one a phase; `idempotency_key(name)` is what the other side may be given.
            fn: the call. It raises `NotDone` when it certainly did not happen.
            args: its arguments, the same on every attempt; keyword arguments through `functools.partial`.
            reconcile: asks the other side what became of a call whose answer nobody knows: its result, or None when it
                certainly did not happen and may be made again. Without it such a call escalates the row.
            retry_safe: whether a repetition is harmless (local work, or a receiver that honours the key). Otherwise a
                call whose answer nobody knows escalates the row rather than run again.
            timeout: how long the call may take.

        Raises:
            LostClaim: the row is somebody else's; the call was not made.
            Snooze: an earlier call may still be under way.
            Escalate: an earlier call's outcome is unknown, or it had other arguments.
            RuntimeError: called inside `transaction()`, where it would wait for itself.
        """
        self._not_inside(f"once({name!r})")
        return await effects.once(
            self._pool, self, name, fn, args, reconcile=reconcile, retry_safe=retry_safe, timeout=timeout
        )

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[ClaimTransaction]:
        """Open a transaction that holds the row by its fence; what it writes is committed only while the row is ours.

        Raises:
            LostClaim: the row is somebody else's by now; nothing was written.
        """
        self._check()
        self._not_inside("transaction()")
        task = asyncio.current_task()
        self._inside.add(task)
        tx: ClaimTransaction | None = None
        ending: Done | Release | None = None
        until, committed = self._lease.until, False
        try:
            async with self._pool.transaction() as plain:
                tx = ClaimTransaction(plain, self)
                asked_at = boottime()
                held = await tx.execute(self._owned.hold, {**self._fence, "lease": self._owned.lease})
                if held.rowcount != 1:
                    raise self._lost()
                self._lease.locked = True
                self._lease.renewed(asked_at)
                yield tx
                if tx.ending is not None:
                    ending, self._ending = tx.ending, True
                    await self._write(tx, ending)
            committed = True
        except psycopg.Error as error:
            if tx is None or ending is None or not await self._may_be_recorded(error, ending):
                raise
        finally:
            self._inside.discard(task)
            if not committed:
                # The longer lease was rolled back; give the renewal that follows a moment to find out what is left.
                self._lease.until = max(until, boottime() + 1)
            self._pool.renewer.unlocked(self._lease, renew=not committed)
            if ending is not None:
                self._ending = False
        self.moved += tx.moved
        self.outcome = _outcome(ending)

    @asynccontextmanager
    async def afterwards(self) -> AsyncGenerator[Transaction]:
        """Open a transaction of its own after the claim has ended; what it moves is claimed next, too."""
        async with self._pool.transaction() as tx:
            yield tx
        self.moved += tx.moved

    def _not_inside(self, what: str) -> None:
        if asyncio.current_task() in self._inside:
            raise RuntimeError(f"{what} inside claim.transaction() would wait for itself: call it before or after")

    # ---- endings

    @property
    def settled(self) -> bool:
        """Whether its end is written."""
        return self.outcome is not None

    def stop(self, why: Stop) -> None:
        """Cancel the task that works under this claim and note why. While its end is being written, do nothing: it is
        up to the fence how that goes, and a claim that was completed must not be told as lost."""
        if self.settled or self._ending:
            return
        self._stop = Stop.LOST if why is Stop.LOST else self._stop or why
        if self._task is not None:
            self._task.cancel(why.value)
            self._cancelled += why is not Stop.DRAIN

    async def settle(self, ending: Done | Release) -> None:
        """Write how this claim ended. It is not cut short by a cancellation, which is raised afterwards.

        Raises:
            LostClaim: the row is somebody else's by now.
        """
        self._check()
        was_ending, self._ending = self._ending, True
        try:
            written = self._written(ending)
            grouped = self._pool.settling.submit(written)
            cancelled = await outlasted(grouped)
            if not grouped.result():
                self.moved += await finished(self._settled_alone(ending))
            elif written.status is None:
                raise self._lost()
            else:
                self.moved += self._told(ending, written)
            self.outcome = _outcome(ending)
        finally:
            self._ending = was_ending
        if cancelled is not None:
            raise cancelled

    async def _settled_alone(self, ending: Done | Release) -> list[Ready]:
        """Write the end by itself, as long as nobody else can have claimed the row."""

        async def write() -> list[Ready]:
            self._check()
            return await self._write_alone(ending)

        return await persist(write, self.is_over, what="a claim's end", about=self.label)

    def is_over(self) -> bool:
        """Whether the lease is over by this machine's clock, so that somebody else may own the row."""
        return boottime() >= self._lease.until

    @asynccontextmanager
    async def held(self) -> AsyncGenerator[Claim[Row]]:
        """Hold this claim for the block: renew its lease, and settle it however the block ends.

        `Snooze` and `Escalate`, and a group of nothing else, end the block and are swallowed; everything else is raised
        again, a lost lease as `LostClaim` and a phase's time-out as `TimeoutError`.
        """
        self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task is not None else 0
        self._pool.renewer.add(self._lease)
        if self._stop is not None:
            self.stop(self._stop)  # asked for before there was a task to cancel
        try:
            self.row = self._owned.row.validate_python(
                {column: value for column, value in self._columns.items() if column not in GATE_COLUMNS}
            )
            self.decision = await self._decided()
            with self._threads.noted():
                yield self
            if not self.settled:
                log.warning("left without complete(): released", row=self.label, phase=self.phase)
                await self._end(None)
        except BaseException as error:
            raised = self._raised(error)
            if not self.settled:
                await self._end(error)
            if all(isinstance(member, (Snooze, Escalate)) for member in members(error)):
                return
            if raised is error:
                raise
            raise raised from error
        finally:
            self._take_back()
            self._pool.renewer.remove(self._lease)

    async def _decided(self) -> Decision | None:
        if self._columns["last_error"] is None:
            return None  # it never went wrong in this visit, so there was nothing to decide
        of = {"table": self._owned.table, "key": self._owned.key.text(self.key), "visit": self.visit}
        async with self._pool.transaction() as tx:
            row = await (await tx.execute(READ_DECISION, of)).fetchone()
        if row is None:
            return None
        value = None if row["value"] is None else json.loads(row["value"])
        return Decision(row["decided_by"], row["reason"], row["decided_at"], value)

    async def _end(self, error: BaseException | None) -> None:
        """Release as the block's ending demands. Nothing that goes wrong here hides the error that led here."""
        self._ending = True
        times, cancelled = None, None
        if error is not None and self.not_now is gravest(error):
            looking = asyncio.ensure_future(self._times_put_back())
            cancelled = await outlasted(looking)
            times = looking.result()
        release = release_for(error, self._stop, self.attempt, self._pool.backoff, random.random(), put_back=times)
        if release is not None and self._threads.calls:
            await finished(self._end_after_threads(release))
        elif release is None or await self._released(release):
            await finished(self._close_as_lost(), CLOSE_WITHIN_S)
        if cancelled is not None:
            raise cancelled

    async def _end_after_threads(self, release: Release) -> None:
        """Keep the row until no thread works for it; one that ends with the process has that long to be gone."""
        self._pool.renewer.keep(self._lease)
        with self._pool.threads.kept(self.label):
            if not await self._pool.threads.ended(self._threads):
                release = replace(release, delay=max(release.delay, GONE_WITHIN))
            if await self._released(release):
                await finished(self._close_as_lost(), CLOSE_WITHIN_S)

    async def _released(self, release: Release) -> bool:
        """Write a release, with less text where the database refuses it; return whether the row was lost meanwhile."""
        noted = replace(release, columns={**self.noted, **release.columns})
        failure: Exception | None = None
        for written in noted.with_less_text():
            try:
                await finished(self.settle(written))
            except LostClaim:
                log.warning("lost before it could be released", row=self.label, phase=self.phase)
                return True
            except Exception as refused:
                failure = refused
                if isinstance(refused, (psycopg.Error, TimeoutError)) and not is_about_the_work(refused):
                    break
                log.warning("the end is refused, trying with less text", row=self.label, error=describe(refused))
            else:
                return False
        error = None if failure is None else describe(failure)
        log.error("could not be released, the lease will run out", row=self.label, error=error)
        return False

    def _raised(self, error: BaseException) -> BaseException:
        """Return what the block's caller sees: a cancellation of our own making is told as what it was."""
        others = self._take_back()
        if isinstance(counts := gravest(error), LostClaim):
            return counts
        if not isinstance(error, asyncio.CancelledError) or self._stop in (None, Stop.DRAIN) or others:
            return error
        if self._stop is Stop.TIMEOUT:
            return TimeoutError(f"{self.label} in {self.phase}: {Stop.TIMEOUT.value}")
        return self._lost()

    def _take_back(self) -> bool:
        """Take back the cancellations that we asked for; return whether somebody else asked for one as well."""
        if self._task is None:
            return False
        while self._cancelled:
            self._task.uncancel()
            self._cancelled -= 1
        return self._task.cancelling() > self._cancelling

    async def _write(self, tx: Transaction, ending: Done | Release) -> None:
        written = await self._written_in(tx, ending)
        if written.status is None:
            raise self._lost()
        tx.moved += self._told(ending, written)

    async def _written_in(self, tx: Transaction, ending: Done | Release) -> Ending:
        written = self._written(ending)
        visit = await self._pool.fences(tx=tx) if written.entered else 0
        with columns_known(self._owned.table, "done()", ending.columns):
            cursors = [await tx.execute(*statement) for statement in statements([[written]], visit)]
        await read([[written]], cursors, await wake(tx, written.row))
        return written

    def _written(self, ending: Done | Release) -> Ending:
        owned = self._owned
        if isinstance(ending, Done):
            status = owned.phase.ending(ending.status)
            entered = owned.entered(status)
            statement = owned.statements.complete(owned.phase, status, tuple(ending.columns), entered)
            params = {"outcome": "done", "error": None, **column_params(ending.columns)}
            lists = {**owned.key.params(self.key), "claim_seqs": self.claim_seq}
            ready = None if entered is None else Ready(owned.table, entered.claimed, self.key)
            return Ending(self.label, self.claim_seq, statement, params, lists, bool(ending.columns), ready)
        params = {
            "outcome": ending.outcome,
            "error": None if ending.error is None else clean(ending.error),
            "escalate": ending.escalate,
            "refund": 0 if ending.charged else 1,
            "delay": ending.delay,
            **column_params(ending.columns),
        }
        statement = owned.statements.release(owned.phase, tuple(ending.columns), owned.notify)
        return Ending(self.label, self.claim_seq, statement, {**self._fence, **params}, {}, alone=True, entered=None)

    def _told(self, ending: Done | Release, written: Ending) -> list[Ready]:
        """Log a release, and return what the end moved."""
        if isinstance(ending, Release):
            error = written.params["error"]
            log.info("released", row=self.label, outcome=ending.outcome, status=written.status, error=error)
        return written.moved

    async def _write_alone(self, ending: Done | Release) -> list[Ready]:
        async with self._pool.transaction() as tx:
            written = await self._written_in(tx, ending)
            # The answer to an earlier COMMIT may have been lost: then the attempt's own line says that it happened.
            if written.status is None and not await self._recorded(tx, ending):
                raise self._lost()
        return self._told(ending, written)

    async def _may_be_recorded(self, error: psycopg.Error, ending: Done | Release) -> bool:
        """Whether the end was committed, though the answer to that was an error."""
        if is_about_the_work(error):
            return False

        async def look() -> bool:
            async with self._pool.transaction() as tx:
                return await self._recorded(tx, ending)
            return False

        try:
            return await persist(look, self.is_over, what="whether a claim has ended", about=self.label)
        except psycopg.Error:
            return False  # the fence tells, when the row is released

    async def _times_put_back(self) -> int:
        """How often in this visit the row was put back for a reason that lies with the database."""

        async def read_times() -> int:
            async with self._pool.transaction() as tx:
                row = await (await tx.execute(TIMES_PUT_BACK, {"claim_seq": self.claim_seq})).fetchone()
            return 0 if row is None else int(row["times"])

        try:
            return await persist(read_times, self.is_over, what="how a claim is released", about=self.label)
        except psycopg.Error:
            return 0

    async def _recorded(self, tx: Transaction, ending: Done | Release) -> bool:
        row = await (await tx.execute(READ_ATTEMPT, {"claim_seq": self.claim_seq})).fetchone()
        return row is not None and row["outcome"] == _outcome(ending)

    async def _close_as_lost(self) -> None:
        """Whoever took the row usually closed our line; where the row was deleted or set by hand, we do."""
        with suppress(psycopg.Error):
            async with self._pool.transaction() as tx:
                await tx.execute(CLOSE_ATTEMPT, {"claim_seq": self.claim_seq, "outcome": "lost", "error": None})

    @property
    def _fence(self) -> dict[str, object]:
        return {**self._owned.key.params(self.key), "claim_seq": self.claim_seq}

    def _check(self) -> None:
        if self._stop is Stop.LOST or self.settled:
            raise self._lost()

    def _lost(self) -> LostClaim:
        return LostClaim(f"{self.label} is not ours any more in {self.phase}: nothing was written")


class ClaimTransaction(Transaction):
    """A transaction that holds the claim's row; `done` completes the row in it, as its last statement."""

    def __init__(self, plain: Transaction, claim: Claim[Any]) -> None:
        super().__init__(plain.connection)
        self._claim = claim
        self.ending: Done | Release | None = None

    async def done(self, status: str | None = None, /, **columns: object) -> Done:
        """Complete the claim in this transaction: all of it commits, or none. Return the value from the phase.

        Raises:
            ConfigurationError: the status is not one of the phase's.
        """
        done = self._claim.done(status, **columns)
        self.ending = done
        return done

    def release(self, release: Release) -> None:
        """Release the claim in this transaction, as its last statement."""
        self.ending = release


def _outcome(ending: Done | Release | None) -> Outcome | None:
    return "done" if isinstance(ending, Done) else None if ending is None else ending.outcome


async def wake_parked(tx: Transaction, label: str) -> None:
    """Make the deliveries due that wait for a row, because it moved."""
    tx.moved += [Ready("deliveries", "applying", row["id"]) for row in await wake(tx, label)]
