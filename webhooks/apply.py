"""Applying a delivery: its event handler's writes and `processed`, in one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import psycopg
from psycopg.errors import DeadlockDetected, SerializationFailure
from psycopg.sql import SQL
from pydantic import ValidationError

from webhooks.claim import Claim, ClaimTransaction, wake_parked
from webhooks.consumer import Consumer
from webhooks.db import clean, database_time
from webhooks.db.sqlstate import is_about_the_server
from webhooks.delivery import Event, Headers, RawEvent
from webhooks.errors import Escalate, Ignore, Park, Unreadable
from webhooks.inbox import MOST_NAME, Content, Stored, load, load_body, parts, split
from webhooks.inbox.parts import Parts
from webhooks.inbox.wants import NO_HANDLER, NO_SOURCE, handled_elsewhere, want
from webhooks.outcome import Release, gravest
from webhooks.sources import Handler, Source
from webhooks.text import members, message_of, shortened

HANDLER_LIMIT_S = 30.0
AT_ONCE = 5
# A longer body is read beside the event loop, where others have their turns meanwhile.
LONG = 256 * 1024
# How long a body is kept at hand for the next events that were split from it.
KEPT_S = 30.0
PARK_CHECK = timedelta(seconds=15)
LEFT_AGAIN = timedelta(seconds=5)
# Of what a handler moved, this much is kept with the delivery; a longer name does not fit into the index.
MOST_LABELS = 100
LONGEST_LABEL = 500

READ_SHARED = SQL("SELECT status FROM {table} WHERE {is_key} FOR SHARE")


async def apply(consumer: Consumer, claim: Claim[Stored], process: str = "", most_events: int = 10_000) -> bool:
    """Apply one claimed delivery; it ends processed, ignored, split, parked, left, or by the exception raised.

    A deadlock or a serialization failure runs the transaction again at once, without charge, five times at most.

    Args:
        consumer: its sources and handlers.
        claim: the delivery.
        process: this process, as it is registered.
        most_events: the events that one delivery may be split into.

    Returns:
        Whether it, or a part of it, was left for another process.

    Raises:
        Escalate: the body cannot be read, holds too many events, or its data does not fit the handler's model: trying
            again is of no use.
        TimeoutError: the handler ran longer than 30 seconds.
        Exception: whatever the handler raised. What lies with the database's server is not charged.
    """
    parked_before: str | None = None
    failures = 0
    while True:
        try:
            return await _apply(consumer, claim, process, most_events)
        except _Aside as aside:
            if isinstance(aside.why, Ignore):
                await claim.complete("ignored", **_columns(aside.event.name, reason=message_of(aside.why)))
                return False
            found = await _park(claim, aside.event, aside.why)
            if found is None:
                return False
            if found == parked_before:
                reason = f"{found}: nothing there waits for {aside.event.name}"
                await claim.complete("ignored", **_columns(aside.event.name, reason=reason))
                return False
            # The row moved between the handler's look and ours: the handler decides again, on what is there now.
            parked_before = found
        except Exception as error:
            failures += 1
            if failures > AT_ONCE or not _is_in_the_way(error):
                if is_about_the_server(counts := gravest(error)):
                    claim.not_now = counts
                raise


def _is_in_the_way(error: Exception) -> bool:
    """Whether another transaction was in the way; in a group, what the others then met is the database's refusal."""
    errors = members(error)
    return all(isinstance(one, psycopg.Error) for one in errors) and any(
        isinstance(one, (DeadlockDetected, SerializationFailure)) for one in errors
    )


@dataclass(slots=True, eq=False)
class _Aside(Exception):
    """Carries `Ignore` and `Park` out of the handler's transaction, so that it rolls back."""

    event: RawEvent
    why: Ignore | Park


async def _apply(consumer: Consumer, claim: Claim[Stored], process: str, most_events: int) -> bool:
    stored = claim.row
    source = consumer.sources.get(stored.source)
    async with claim.transaction() as tx:
        if source is None:
            if await handled_elsewhere(tx, process, stored.source, [None]):
                return _leave(tx, stored, None)
            await tx.done("ignored", **_columns(None, reason=f"{NO_SOURCE}{stored.source} any more"))
            return False
        try:
            content = await load(tx, stored)
            body, chosen = await _read(tx, source, stored, content)
        except Unreadable as error:
            raise Escalate(f"the body cannot be read: {error}") from error
        unknown = {event.name for _, event in chosen} - source.handlers.keys()
        theirs = await handled_elsewhere(tx, process, stored.source, unknown) if unknown else set[str | None]()
        routed = [(place, event) for place, event in chosen if event.name not in unknown or event.name in theirs]
        wanted = [(place, event) for place, event in routed if event.ignored is None]
        if not wanted:
            event = routed[0][1] if routed else None
            names = _names(chosen)
            reason = event.ignored if event is not None else (NO_HANDLER + names if names else "it holds no event")
            await tx.done("ignored", **_columns(names or None, reason=reason))
        elif len(wanted) > most_events:
            raise Escalate(
                f"it holds {len(wanted)} events and is split into {most_events} at most: raise WEBHOOKS_MAX_EVENTS "
                f"and run webhooks replay {stored.id}, or have it sent in smaller pieces"
            )
        elif len(wanted) > 1:
            BODIES.keep(content.proof, body)  # its events come next, and some handlers read it
            await _split(tx, stored, wanted, theirs, content.shared)
        elif (event := wanted[0][1]).name in theirs:
            return _leave(tx, stored, event.name)
        else:
            claim.noted["event"] = clean(event.name)[:MOST_NAME]
            await _run(tx, source.handlers[event.name], claim, event, body)
        return len(wanted) > 1 and bool(theirs)


def _leave(tx: ClaimTransaction, stored: Stored, event: str | None) -> bool:
    """Give a delivery back, uncharged, for a process that has a handler for it."""
    wants = want(stored.source, event)
    # One that was left before, and by its event, is read in another way there: no two processes toss it to and fro.
    again = stored.wants not in (None, want(stored.source, None))
    columns = {"event": None if event is None else clean(event)[:MOST_NAME], "wants": wants}
    tx.release(
        Release(
            "snoozed",
            charged=False,
            escalate=False,
            delay=LEFT_AGAIN if again else timedelta(0),
            error=None,
            columns={
                **columns,
                "reason": f"waits for a process that handles {wants}",
                "parked_on": None,
                "parked_since": None,
            },
        )
    )
    return True


class _Body:
    """A delivery's body, parsed when somebody first wants it so.

    Args:
        source: who reads it.
        headers: its header lines.
        body: its exact bytes.
    """

    def __init__(self, source: Source, headers: Headers, body: bytes) -> None:
        self._source = source
        self._headers = headers
        self.body = body

    @cached_property
    def parsed(self) -> Any:
        return self._source.read(self._headers, self.body)

    def events(self) -> list[tuple[int, RawEvent]]:
        return list(enumerate(self._source.events(self._headers, self.parsed), 1))


class _Given(Event[Any]):
    """An event whose delivery's body is parsed when its handler first reads that."""

    __slots__ = ("_whole",)

    @classmethod
    def of(cls, whole: _Body, **fields: object) -> _Given:
        given = cls.__new__(cls)
        for name, value in [*fields.items(), ("_whole", whole)]:
            object.__setattr__(given, name, value)
        return given

    def __getattr__(self, name: str) -> Any:
        if name != "body":
            raise AttributeError(name)
        object.__setattr__(self, "body", self._whole.parsed)
        return self.body


class _Bodies:
    """The body whose events were applied last: they follow one another, and none of them should have to fetch it."""

    def __init__(self) -> None:
        self._last: tuple[str, _Body] | None = None
        self._forgetting: asyncio.TimerHandle | None = None

    def keep(self, proof: str, body: _Body) -> None:
        if self._forgetting is not None:
            self._forgetting.cancel()
        self._last = proof, body
        self._forgetting = asyncio.get_running_loop().call_later(KEPT_S, self.forget)

    def find(self, proof: str) -> _Body | None:
        return self._last[1] if self._last is not None and self._last[0] == proof else None

    def forget(self) -> None:
        self._last = None


BODIES = _Bodies()


async def _read(
    tx: ClaimTransaction, source: Source, stored: Stored, content: Content
) -> tuple[_Body, list[tuple[int, RawEvent]]]:
    """Return a delivery's body and its events by their places, or the one event that it is itself.

    Raises:
        Unreadable: with the reason for a person.
    """
    body = BODIES.find(content.proof) if stored.position else None
    if body is None:
        body = _Body(source, content.headers, await load_body(tx, content.id))
    if stored.position:
        BODIES.keep(content.proof, body)
    if content.own is not None:
        return body, [(stored.position, parts.read(content.own, content.shared))]
    # A thread does not keep the parser from holding the interpreter, but all the rest takes turns with the loop.
    events = await asyncio.to_thread(body.events) if len(body.body) > LONG else body.events()
    return body, [one for one in events if stored.position in (0, one[0])]


async def _split(
    tx: ClaimTransaction,
    stored: Stored,
    events: list[tuple[int, RawEvent]],
    theirs: Collection[str | None],
    shared_before: bytes | None,
) -> None:
    """One line per event, so that one that fails or parks holds no other up; some are for another process."""
    kept = await asyncio.to_thread(parts.written, [event for _, event in events])
    if shared_before is not None and shared_before != kept.shared:
        # It was split before, and by another version of its source: what its events have in common stays as it was.
        kept = Parts(shared_before, [None] * len(events))
    wants = [want(stored.source, event.name) if event.name in theirs else None for _, event in events]
    await split(tx, stored.id, [place for place, _ in events], [event.name for _, event in events], wants, kept)
    columns = _columns(_names(events), reason=f"split into {len(events)} events")
    await tx.done("processed", **columns, part=kept.shared)


def _names(events: list[tuple[int, RawEvent]]) -> str:
    return ", ".join(dict.fromkeys(event.name for _, event in events))


async def _run(tx: ClaimTransaction, handler: Handler, claim: Claim[Stored], event: RawEvent, body: _Body) -> None:
    stored = claim.row
    try:
        data = event.data if handler.model is None else handler.model.model_validate(event.data)
    except ValidationError as error:
        raise Escalate(f"the data of {event.name} does not fit {_named(handler.model)}: {_short(error)}") from error
    given = _Given.of(
        body,
        source=stored.source,
        name=event.name,
        data=data,
        delivery=stored.id,
        received_at=stored.received_at,
        occurred_at=event.occurred_at,
        decision=claim.decision,
    )
    try:
        async with asyncio.timeout(HANDLER_LIMIT_S):
            await handler.function(given, tx)
    except Exception as error:
        if isinstance(why := gravest(error), (Ignore, Park)):
            raise _Aside(event, why) from None
        raise
    moved = [label for label in dict.fromkeys(tx.touched) if len(label) <= LONGEST_LABEL][:MOST_LABELS]
    # A replay that moves nothing leaves it known what the delivery moved at first.
    await tx.done("processed", **_columns(event.name, reason=None), **({"moved_rows": moved} if moved else {}))


async def _park(claim: Claim[Stored], event: RawEvent, park: Park) -> str | None:
    """Put the delivery aside, unless its row has left the statuses that it would wait through.

    The row is read last and locked against moving, so that whoever moves it next sees the parked delivery. A row that
    is not there cannot be locked: whether it came meanwhile is looked at once more afterwards.

    Returns:
        None when it is parked; else which row it is, and the status found, `missing` for no row where it is not waited
        for.

    Raises:
        Escalate: it has waited long enough.
    """
    waiting_in = ", ".join(sorted(park.while_in))
    statements = park.gate.statements
    read = READ_SHARED.format(table=statements.table, is_key=statements.is_key)
    async with claim.transaction() as tx:
        row = await (await tx.execute(read, park.gate.key.params(park.key))).fetchone()
        label = await park.gate.label(tx, park.key)
        if row is None and park.missing == "ignore":
            return f"{label} is missing"
        if row is not None and row["status"] not in park.while_in:
            return f"{label} is {row['status']}"
        now = await database_time(tx)
        missing = f"waits for {label}, which is not there yet"
        reason = missing if row is None else f"waits while {label} is {waiting_in}"
        # Once the row has come, it has its own time to move.
        came = row is not None and claim.row.reason == missing
        since = now if came or claim.row.parked_since is None else claim.row.parked_since
        if now - since >= park.for_:
            late = "come" if row is None else f"leave {waiting_in}"
            raise Escalate(f"parked too long: {label} did not {late} within {park.for_}")
        tx.release(
            Release(
                "snoozed",
                charged=False,
                escalate=False,
                delay=PARK_CHECK,
                error=None,
                columns={
                    "event": clean(event.name),
                    "parked_on": label,
                    "parked_since": since,
                    "reason": reason,
                },
            )
        )
    if row is None:
        with suppress(psycopg.Error):  # it is due in a moment all the same
            async with claim.afterwards() as tx:
                if await (await tx.execute(park.gate.statements.status(), park.gate.key.params(park.key))).fetchone():
                    await wake_parked(tx, label)
    return None


def _columns(event: str | None, *, reason: str | None) -> dict[str, object]:
    return {
        "event": None if event is None else clean(event)[:MOST_NAME],
        "reason": None if reason is None else clean(shortened(reason, 2_000)),
        "parked_on": None,
        "parked_since": None,
        "wants": None,
    }


def _named(model: type[Any] | None) -> str:
    return "the handler's model" if model is None else model.__name__


def _short(error: ValidationError) -> str:
    faults = error.errors(include_url=False, include_input=False)
    told = [f"{'.'.join(map(str, fault['loc'])) or 'the whole'}: {fault['msg']}" for fault in faults[:5]]
    return "; ".join(told) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
