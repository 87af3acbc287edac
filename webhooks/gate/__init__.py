"""The gate: conditional updates over one table. The row is the lock."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime, timedelta
from typing import Any, ClassVar, Generic, LiteralString, TypeAlias, cast, overload

import structlog
from psycopg.errors import InvalidColumnReference
from pydantic import BaseModel, JsonValue, TypeAdapter

from webhooks import taking
from webhooks.claim import Claim, Row, wake_parked
from webhooks.db import Ready, Transaction, clean, draw
from webhooks.errors import ConfigurationError
from webhooks.gate.columns import check_statuses, lacking, writes
from webhooks.gate.sweep import sweep
from webhooks.owned import Owned
from webhooks.phase import (
    GATE_COLUMNS,
    Conflict,
    Done,
    Key,
    Moved,
    Order,
    Phase,
    check_columns,
    check_function,
    checked_name,
    checked_status,
)
from webhooks.pool import Pool
from webhooks.settings import Settings
from webhooks.shape import conflict, faults
from webhooks.statements import (
    CLOSE_ATTEMPT,
    KEY_TEXT,
    RECORD_DECISION,
    Barred,
    Statements,
    column_params,
    columns_known,
)
from webhooks.taking import Batch

log = structlog.get_logger(__name__)

Statuses: TypeAlias = "str | tuple[str, ...]"
Function: TypeAlias = Callable[[Row, Claim[Row]], Coroutine[Any, Any, Done]]

# What a claim itself reads, whatever the row's model says.
CLAIM_COLUMNS = (
    "visit",
    "attempt_count",
    "max_attempts",
    "claim_seq",
    "lease_until",
    "claimed_by",
    "claimed_at",
    "last_error",
)
GIVE_BACK_WITHIN_S = 5.0


class Gate(Generic[Row]):
    """The conditional updates over one gated table.

    Args:
        table: the table; it has the columns of `gated`.
        key: its key column, or several joined by a comma; whole numbers, text under a deterministic collation, or uuid.
        row: the pydantic model (or dataclass) of the columns a phase reads; dicts of all columns without it.
        order_by: what `claim_next` orders by; by default what has been due for longest. Columns with their directions
            are quoted as names are; anything more (`lower(name)`) is taken as SQL, as it is written.
        escalated: the status of a row whose attempts ran out.
        unique: other columns that identify a row, as `open(unique=…)` names them; `check` looks whether something
            makes them unique.

    Names are written as the database has them, letter case included, and quoted: a table may be called `order`.

    Raises:
        ConfigurationError: a name is more than letters, digits and underscores, or `row` names a column of the gate's
            own: its value changes from attempt to attempt, and an effect's arguments must not.
    """

    reserved: ClassVar[LiteralString | None] = None
    """A column that keeps a row, where it is not NULL, for whoever asks for its value."""

    @overload
    def __init__(
        self: Gate[dict[str, Any]],
        table: LiteralString,
        *,
        key: LiteralString,
        order_by: LiteralString | None = None,
        escalated: LiteralString = "escalated",
        statuses: tuple[LiteralString, ...] = (),
        unique: tuple[LiteralString, ...] = (),
    ) -> None: ...
    @overload
    def __init__(
        self,
        table: LiteralString,
        *,
        key: LiteralString,
        row: type[Row],
        order_by: LiteralString | None = None,
        escalated: LiteralString = "escalated",
        statuses: tuple[LiteralString, ...] = (),
        unique: tuple[LiteralString, ...] = (),
    ) -> None: ...
    def __init__(
        self,
        table: LiteralString,
        *,
        key: LiteralString,
        row: type[Any] = dict,
        order_by: LiteralString | None = None,
        escalated: LiteralString = "escalated",
        statuses: tuple[LiteralString, ...] = (),
        unique: tuple[LiteralString, ...] = (),
    ) -> None:
        self.table: LiteralString = checked_name(table)
        self.key = Key.of(key)
        self.escalated = checked_status(escalated)
        self._statuses = frozenset(checked_status(status) for status in statuses)
        self.phases: dict[str, Phase] = {}
        self._row: TypeAdapter[Any] = TypeAdapter(dict[str, Any] if row is dict else row)
        self._columns = columns = _columns_of(row)
        own = sorted(set(columns) & set(GATE_COLUMNS))
        if own:
            raise ConfigurationError(f"{table}: row= names the gate's own {', '.join(own)}: leave them out")
        read = tuple(dict.fromkeys((*self.key.columns, *columns, *CLAIM_COLUMNS))) if columns else ()
        self.order = Order.of(order_by or "not_before, " + ", ".join(self.key.columns))
        self.statements = Statements(self.table, self.key, read, self.order, self.escalated, self.reserved)
        self._owned: dict[tuple[str, timedelta, bool], Owned] = {}
        self._uniques = dict.fromkeys([unique] if unique else [])
        self._conflicts: dict[tuple[str, ...], Conflict] = {}

    def __repr__(self) -> str:
        return f"<Gate {self.table}>"

    def phase(
        self,
        ready: LiteralString,
        *,
        claimed: LiteralString,
        done: LiteralString | tuple[LiteralString, ...],
        lease: timedelta | None = None,
        timeout: timedelta = timedelta(minutes=15),
        max_attempts: int | None = None,
        concurrency: int | None = None,
    ) -> Callable[[Function[Row]], Function[Row]]:
        """Declare a phase; as a decorator, with the function that does its work.

        Args:
            ready: the status in which a row waits for it.
            claimed: the status while it runs, which also names the phase.
            done: the status it ends in, or several.
            lease: how long a claim lasts without renewal; the setting `WEBHOOKS_LEASE_S` by default.
            timeout: how long the function may run.
            max_attempts: charged attempts before a person has to decide; `WEBHOOKS_MAX_ATTEMPTS` (5) by default.
            concurrency: claims at once in one process; `WEBHOOKS_CONCURRENCY` (4) by default.

        Raises:
            ConfigurationError: the phase contradicts one declared before, or itself; or its function is not `async def`
                with two arguments, or ends in a status that is none of the phase's.
        """
        settings = _settings()
        endings = (done,) if isinstance(done, str) else done
        phase = Phase(
            checked_status(ready),
            checked_status(claimed),
            tuple(checked_status(status) for status in endings),
            lease,
            timeout,
            settings.max_attempts if max_attempts is None else max_attempts,
            settings.concurrency if concurrency is None else concurrency,
        )
        self._declare(phase)

        def with_function(function: Function[Row]) -> Function[Row]:
            check_function(function, f"{self.table}: phase {phase.claimed}", "row", "claim")
            check_statuses(self.table, phase, function)
            self.phases[phase.claimed] = dataclasses.replace(phase, function=function)
            return function

        return with_function

    def _declare(self, phase: Phase) -> None:
        where = f"{self.table}: phase {phase.claimed}"
        if phase.claimed in self.phases:
            raise ConfigurationError(f"{where} is declared twice")
        if any(phase.ready == other.ready for other in self.phases.values()):
            raise ConfigurationError(f"{where}: another phase waits in {phase.ready} already")
        claimed = {phase.claimed, *self.phases}
        ready_or_done = {phase.ready, *phase.done, self.escalated}
        for other in self.phases.values():
            ready_or_done |= {other.ready, *other.done}
        if claimed & ready_or_done:
            both = ", ".join(sorted(claimed & ready_or_done))
            raise ConfigurationError(f"{where}: {both} would be a claimed status and another one at once")
        if not phase.done:
            raise ConfigurationError(f"{where} has no done status")
        if phase.max_attempts < 1 or phase.concurrency < 1:
            raise ConfigurationError(f"{where}: max_attempts and concurrency are at least 1")
        if phase.lease is not None and phase.lease < timedelta(seconds=1):
            raise ConfigurationError(f"{where}: a lease lasts at least a second, or it cannot be renewed in time")
        self.phases[phase.claimed] = phase

    @property
    def statuses(self) -> frozenset[str]:
        """Every status that the gate knows."""
        of_phases = {status for phase in self.phases.values() for status in (phase.ready, phase.claimed, *phase.done)}
        return self._statuses | of_phases | {self.escalated}

    def entered(self, status: str) -> Phase | None:
        """Return the phase that waits in a status, if one does."""
        return next((phase for phase in self.phases.values() if phase.ready == status), None)

    def owned(self, phase: str, pool: Pool) -> Owned:
        """Return a phase with its statements composed, for this pool's settings.

        Raises:
            ConfigurationError: the gate has no such phase.
        """
        declared = self.phases.get(phase)
        if declared is None:
            known = ", ".join(self.phases) or "none"
            raise ConfigurationError(
                f"{self.table} has no phase {phase!r}; a phase is named by its claimed status: {known}"
            )
        lease = declared.lease or pool.settings.lease
        # A notification that cannot be sent is told of by nothing but the list of escalations.
        notify = pool.settings.notify_url is not None and self.table != "notifications"
        owned = self._owned.get((phase, lease, notify))
        if owned is None or owned.phase is not declared:
            owned = Owned(self.table, self.key, self.statements, declared, lease, self.entered, self._row, notify)
            self._owned[phase, lease, notify] = owned
        return owned

    async def check(self, tx: Transaction) -> list[str]:
        """Compare the table and its indexes with what the gate needs, and with the columns that its phases write.

        Returns:
            One sentence a fault, each ending in the statement that mends it; empty when all is well.
        """
        phases = tuple(self.phases.values())
        told = await faults(
            tx,
            self.table,
            self.key,
            self.order,
            phases,
            self.escalated,
            self.reserved,
            self._columns,
            self._uniques,
        )
        functions = [phase.function for phase in phases if phase.function is not None]
        ends = [write for function in functions for write in writes(function)]
        return told + await lacking(tx, self.table, ends)

    # ---- from outside, in somebody's transaction

    async def open(
        self,
        tx: Transaction,
        /,
        *,
        to: str | None = None,
        unique: tuple[LiteralString, ...] | None = None,
        **columns: object,
    ) -> bool:
        """Insert a row in the ready status of the phase declared first, unless it is there already.

        It is there already when another row has the same key, or the same values in the columns that `unique` names. A
        key that the database makes itself (an identity) is never there already. Whatever else the table refuses is an
        error, with the name of the constraint.

        Args:
            tx: the transaction of the event that opens it.
            to: another status to open it in.
            unique: the columns that identify the row instead of its key, those of a unique constraint or index.
            columns: its columns, the key among them unless the database makes it.

        Returns:
            Whether the row is new.

        Raises:
            ConfigurationError: nothing makes the columns of `unique`, or of the key, unique.
            psycopg.IntegrityError: a constraint refuses the row.
        """
        check_columns(self.table, columns)
        status = to or next(iter(self.phases.values())).ready
        self._check_target(status)
        entered = self.entered(status)
        there = await self._conflict(tx, unique, columns)
        statement = self.statements.open(status, tuple(columns), entered, there)
        try:
            with columns_known(self.table, "open()", columns):
                row = await (await tx.execute(statement, column_params(columns))).fetchone()
        except InvalidColumnReference as error:
            self._conflicts.clear()
            gone = f"{self.table}: the index is gone by which open() finds a row, or it is another one now"
            raise ConfigurationError(gone) from error
        if row is None:
            return False
        await self._moved(tx, row, entered)
        return True

    async def _conflict(
        self, tx: Transaction, unique: tuple[LiteralString, ...] | None, columns: Mapping[str, object]
    ) -> Conflict | None:
        """Return what means that a row is there already, looked up once; None where its key is not known yet.

        Raises:
            ConfigurationError: nothing makes such rows unique.
        """
        if unique is None and not columns.keys() >= set(self.key.columns):
            return None
        named = unique or self.key.columns
        if unique:
            self._uniques[unique] = None
        if named not in self._conflicts:
            found = await conflict(tx, self.table, named, exactly=unique is not None)
            if found is None:
                told = await self.check(tx)
                raise ConfigurationError(" ".join([fault for fault in told if "unique" in fault] or told))
            self._conflicts[named] = found
        return self._conflicts[named]

    async def advance(self, tx: Transaction, key: object, from_: Statuses, to: str, /, **columns: object) -> Moved:
        """Move a row on, if it is in one of some statuses.

        Args:
            tx: the transaction of the event that moves it.
            key: the row.
            from_: the status, or statuses, it may be moved from; a claimed status stops the work there.
            to: where to; never a claimed status.
            columns: what else to write.

        Returns:
            Whether it moved, and the status seen where it did not.
        """
        check_columns(self.table, columns)
        self._check_target(to)
        statuses = (from_,) if isinstance(from_, str) else from_
        entered = self.entered(to)
        params = {**self.key.params(key), **column_params(columns)}
        if entered is not None:
            params["visit"] = await draw(tx)
        statement = self.statements.advance(statuses, to, tuple(columns), entered)
        with columns_known(self.table, "advance()", columns):
            row = await (await tx.execute(statement, params)).fetchone()
        if row is None:
            found = await (await tx.execute(self.statements.status(), params)).fetchone()
            return Moved(False, None if found is None else found["status"])
        if not self.phases.keys().isdisjoint(statuses):
            reason = f"moved to {to} while it was being worked on"
            lost = {"claim_seq": row["claim_seq"], "outcome": "lost", "error": reason}
            await tx.execute(CLOSE_ATTEMPT, lost)
        await self._moved(tx, row, entered)
        return Moved(True, None)

    async def retry(
        self, tx: Transaction, key: object, /, *, decided_by: str, reason: str, value: JsonValue = None
    ) -> bool:
        """Give an escalated row a new set of attempts, and record who decided it and why.

        Args:
            tx: where.
            key: the row.
            decided_by: who.
            reason: why.
            value: what the phase is told, as `claim.decision.value`, such as that something is approved.

        Returns:
            Whether the row was escalated.
        """
        params = self.key.params(key)
        row = await (await tx.execute(self.statements.retry(tuple(self.phases.values())), params)).fetchone()
        if row is None:
            return False
        entered = self.entered(row["status"])
        decision = {
            "decision": "retry",
            "decided_by": decided_by,
            "reason": reason,
            "value": None if value is None else clean(json.dumps(value, ensure_ascii=False)),
        }
        of = {"table": self.table, "key": row[KEY_TEXT], "visit": row["visit"]}
        await tx.execute(RECORD_DECISION, {**of, **decision})
        await self._moved(tx, row, entered)
        return True

    async def _moved(self, tx: Transaction, row: Mapping[str, Any], entered: Phase | None) -> None:
        if entered is not None:
            tx.moved.append(Ready(self.table, entered.claimed, self.key.value(row)))
        label = f"{self.table}:{row[KEY_TEXT]}"
        tx.touched.append(label)
        await wake_parked(tx, label)

    async def label(self, tx: Transaction, key: object) -> str:
        """Return a row as people name it, `table:key`, whether it is there or not."""
        row = await (await tx.execute(self.statements.spelled(), self.key.params(key))).fetchone()
        return f"{self.table}:{row[KEY_TEXT] if row is not None else self.key.text(key)}"

    def _check_target(self, status: str) -> None:
        if status in self.phases:
            raise ConfigurationError(f"{self.table}: {status} is a claimed status, only a claim moves a row there")

    # ---- claims

    def claim(
        self, pool: Pool, phase: str, key: object, /, *, claimed_by: str | None = None
    ) -> AbstractAsyncContextManager[Claim[Row] | None, bool]:
        """Claim a known row for the block, or get None: somebody else has it, or it is not due.

        `Snooze` and `Escalate` raised in the block end it and are swallowed; other exceptions release the row and are
        raised again. A block left without `complete()` releases it uncharged, due in a second.

        Args:
            pool: the connections.
            phase: named by its claimed status.
            key: the row.
            claimed_by: a name for `attempts`; the process's by default.
        """
        return cast("AbstractAsyncContextManager[Claim[Row] | None, bool]", self._claim(pool, phase, key, claimed_by))

    @asynccontextmanager
    async def _claim(
        self, pool: Pool, phase: str, key: object, claimed_by: str | None
    ) -> AsyncGenerator[Claim[Row] | None]:
        claim = await self.take(pool, phase, key, claimed_by=claimed_by)
        if claim is None:
            yield None
            return
        async with claim.held():
            yield claim

    def claim_next(
        self,
        pool: Pool,
        phase: str,
        /,
        *,
        claimed_by: str | None = None,
        due_by: datetime | None = None,
        **equal: object,
    ) -> AbstractAsyncContextManager[Claim[Row] | None, bool]:
        """Claim the next available row for the block, or get None; otherwise like `claim`.

        Args:
            pool: the connections.
            phase: named by its claimed status.
            claimed_by: a name for `attempts`; the process's by default.
            due_by: only rows that were due at that time.
            equal: columns and the values they must have.
        """
        taking = self._claim_next(pool, phase, claimed_by, due_by, equal)
        return cast("AbstractAsyncContextManager[Claim[Row] | None, bool]", taking)

    @asynccontextmanager
    async def _claim_next(
        self, pool: Pool, phase: str, claimed_by: str | None, due_by: datetime | None, equal: Mapping[str, object]
    ) -> AsyncGenerator[Claim[Row] | None]:
        claims = await self.take_next(pool, phase, 1, claimed_by=claimed_by, due_by=due_by, equal=equal)
        if not claims:
            yield None
            return
        async with claims[0].held():
            yield claims[0]

    async def take(self, pool: Pool, phase: str, key: object, *, claimed_by: str | None = None) -> Claim[Row] | None:
        """Claim a known row; the caller holds it (`async with claim.held()`). None: not ours, back off."""
        return await taking.take(pool, self.owned(phase, pool), key, claimed_by)

    async def take_next(
        self,
        pool: Pool,
        phase: str,
        limit: int,
        *,
        barred: Barred = "nothing",
        keys: Sequence[object] | None = None,
        claimed_by: str | None = None,
        due_by: datetime | None = None,
        equal: Mapping[str, object] | None = None,
    ) -> Batch:
        """Claim up to `limit` (at most 100) rows in their order; the caller holds each.

        A row whose last charged attempt expired comes alone: it may end its worker, and is to take no other with it.

        Args:
            pool: the connections.
            phase: named by its claimed status.
            limit: how many at most.
            barred: which rows are left.
            keys: only rows with these keys.
            claimed_by: a name for `attempts`; the process's by default.
            due_by: only rows that were due at that time.
            equal: columns and the values they must have.
        """
        owned = self.owned(phase, pool)
        return await taking.take_next(pool, owned, limit, barred, keys, claimed_by, due_by, equal or {})

    async def last_chance_waits(self, pool: Pool, phase: str, equal: Mapping[str, object] | None = None) -> bool:
        """Whether a row that expired and has one attempt left is due, and not far from its turn."""
        return await taking.last_chance_waits(pool, self.owned(phase, pool), equal or {})

    async def sweep(self, pool: Pool, phase: str) -> int:
        """Free rows whose lease is over, give a lease to by-hand claims, escalate exhausted rows; return how many."""
        return await sweep(pool, self.owned(phase, pool))


def _settings() -> Settings:
    """The settings as far as they can be read while modules are imported; what is wrong is told by who starts."""
    try:
        return Settings.load()
    except ConfigurationError:
        return Settings.model_construct()


def _columns_of(row: type[Any]) -> tuple[str, ...]:
    if row is dict:
        return ()
    if issubclass(row, BaseModel):
        return tuple(row.model_fields)
    if dataclasses.is_dataclass(row):
        return tuple(field.name for field in dataclasses.fields(row))
    raise ConfigurationError(f"row={row!r}: give a pydantic model or a dataclass of the columns to read")
