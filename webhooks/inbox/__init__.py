"""The inbox: `deliveries` as a gated table, and every statement about a copy that arrives again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from typing import Literal as OneOf

from psycopg.errors import UniqueViolation
from psycopg.sql import Literal
from pydantic_core import to_json

from webhooks.db import Ready, Transaction, clean, compose, draw, regclass
from webhooks.delivery import Delivery, Headers
from webhooks.errors import Unreadable
from webhooks.gate import Gate
from webhooks.inbox.parts import Parts

MOST_NAME = 500
"""How much of an event's name is stored."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A delivery as its handler's transaction needs it; headers and body are read there.

    A further event of a request has the `parent` that holds them, and its place among the events, from 1.
    """

    id: int
    source: str
    dedup_key: str
    position: int
    parent: int | None
    origin: str
    received_at: datetime
    parked_since: datetime | None
    reason: str | None = None
    wants: str | None = None


DEDUP = ("source", "dedup_key", "position")
"""What identifies a delivery: another one with the same is a copy."""


class Inbox(Gate[Stored]):
    """What is wanted of a process with another handler is left to such a one; see `inbox.wants`."""

    reserved = "wants"


inbox = Inbox("deliveries", key="id", row=Stored, escalated="dead", unique=DEDUP)
inbox.phase(
    "received",
    claimed="applying",
    done=("processed", "ignored"),
    timeout=timedelta(minutes=2),
)
MAX_ATTEMPTS = inbox.phases["applying"].max_attempts

ACCEPT = compose(
    "INSERT INTO {deliveries} (source, dedup_key, origin, headers, body, status, max_attempts)\n"
    "SELECT new.source, new.dedup_key, new.origin, new.headers::jsonb, new.body, 'received', %(max_attempts)s\n"
    "FROM unnest(%(sources)b::text[], %(keys)b::text[], %(origins)b::text[], %(headers)b::text[],\n"
    "    %(bodies)b::bytea[]) AS new (source, dedup_key, origin, headers, body)\n"
    "ON CONFLICT (source, dedup_key, position) DO NOTHING\n"
    "RETURNING id, source, dedup_key"
)
FIND = compose(
    "SELECT d.id, d.source, d.dedup_key, d.status, d.reason\n"
    "FROM unnest(%(sources)s::text[], %(keys)s::text[]) AS copy (source, dedup_key)\n"
    "JOIN {deliveries} AS d ON d.source = copy.source AND d.dedup_key = copy.dedup_key AND d.position = 0"
)
# Both of the following find a request's further events with it, and never wait for whoever works on one.
REARM = compose(
    "WITH again AS MATERIALIZED (\n"
    "    SELECT d.id FROM unnest(%(sources)s::text[], %(keys)s::text[]) AS copy (source, dedup_key)\n"
    "    JOIN {deliveries} AS d ON d.source = copy.source AND d.dedup_key = copy.dedup_key\n"
    "    WHERE (d.status = 'dead' OR d.id = ANY(%(ignored)s))\n"
    "        AND d.pruned_at IS NULL AND d.headers_pruned_at IS NULL\n"
    "    FOR NO KEY UPDATE OF d SKIP LOCKED\n"
    ")\n"
    "UPDATE {deliveries} AS t SET status = 'received', claimed_from = NULL, visit = %(visit)s, attempt_count = 0,\n"
    "    max_attempts = %(max_attempts)s, not_before = statement_timestamp(), last_error = NULL, reason = NULL,\n"
    "    parked_on = NULL, parked_since = NULL, wants = NULL\n"
    "FROM again WHERE t.id = again.id RETURNING t.id, t.source, t.dedup_key"
)
NUDGE = compose(
    "WITH again AS MATERIALIZED (\n"
    "    SELECT d.id FROM unnest(%(sources)s::text[], %(keys)s::text[]) AS copy (source, dedup_key)\n"
    "    JOIN {deliveries} AS d ON d.source = copy.source AND d.dedup_key = copy.dedup_key\n"
    "    WHERE d.status = 'received' AND d.not_before > now()\n"
    "    FOR NO KEY UPDATE OF d SKIP LOCKED\n"
    ")\n"
    "UPDATE {deliveries} AS t SET not_before = statement_timestamp()\n"
    "FROM again WHERE t.id = again.id AND t.status = 'received' RETURNING t.id"
)
# What belongs to an event that was split off is small; the body is read only where it is needed.
LOAD = compose(
    "SELECT held.id, held.headers, held.pruned_at, held.headers_pruned_at, held.part AS shared,\n"
    "    CASE WHEN d.parent IS NOT NULL THEN d.part END AS own,\n"
    "    ROW(held.id, held.received_at, held.accepted_xid)::text AS proof\n"
    "FROM {deliveries} AS d JOIN {deliveries} AS held ON held.id = coalesce(d.parent, d.id)\n"
    "WHERE d.id = %(id)s"
)
LOAD_BODY = compose("SELECT body FROM {deliveries} WHERE id = %(id)s AND pruned_at IS NULL")
# In one statement, however many there are, and in the order of their places. Whatever else than the place of an event
# is there already is an error.
SPLIT = compose(
    "INSERT INTO {deliveries} (source, dedup_key, position, parent, origin, received_at, event, wants, part,\n"
    "    status, max_attempts, not_before)\n"
    "SELECT d.source, d.dedup_key, new.position, d.id, d.origin, d.received_at, new.event, new.wants,\n"
    "    new.part, 'received', %(max_attempts)s,\n"
    "    statement_timestamp() + greatest(new.place - %(at_once)s, 0) * %(apart)s::interval\n"
    "FROM {deliveries} AS d, unnest(%(positions)b::integer[], %(events)b::text[], %(wants)b::text[],\n"
    "    %(parts)b::bytea[]) WITH ORDINALITY AS new (position, event, wants, part, place)\n"
    "WHERE d.id = %(id)s ORDER BY new.place\n"
    "ON CONFLICT (source, dedup_key, position) DO NOTHING\n"
    "RETURNING id, wants IS NULL AND not_before <= statement_timestamp() AS due"
)
# What is due comes before whatever arrives later: so of many events only the first are due at once, the others one
# after the other, and other deliveries have their turns between them.
DUE_AT_ONCE = 50
DUE_APART = timedelta(milliseconds=5)


ABOVE_THE_DATA = compose(
    "SELECT setval(pg_get_serial_sequence({name}, 'id'), (SELECT max(id) FROM {deliveries}));",
    name=Literal(regclass("deliveries")),
)

Status = OneOf["accepted", "duplicate", "rearmed"]


@dataclass(frozen=True, slots=True)
class Accepted:
    """What became of an arrival: the delivery's id, and whether it is new."""

    delivery: int
    status: Status


@dataclass(frozen=True, slots=True)
class Copy:
    """A delivery that was here already, as it stands."""

    id: int
    status: str
    reason: str | None


Identity = tuple[str, str]


def identity(delivery: Delivery) -> Identity:
    return delivery.source, delivery.dedup_key


async def insert(tx: Transaction, arrivals: Sequence[Delivery]) -> dict[Identity, int]:
    """Store what is new, in one statement, and return the ids by (source, dedup key).

    They go in by that order, so that two receivers with the same copies cannot deadlock. What has the same key is a
    copy; anything else that the database refuses is an error.
    """
    ordered = sorted(arrivals, key=identity)
    params: dict[str, object] = {
        "sources": [delivery.source for delivery in ordered],
        "keys": [delivery.dedup_key for delivery in ordered],
        "origins": [delivery.origin for delivery in ordered],
        "headers": [to_json(delivery.headers).decode() for delivery in ordered],
        "bodies": [delivery.body for delivery in ordered],
        "max_attempts": MAX_ATTEMPTS,
    }
    cursor = await tx.execute(ACCEPT, params)
    return {(row["source"], row["dedup_key"]): row["id"] for row in await cursor.fetchall()}


def advice(error: BaseException) -> str | None:
    """Say how to mend what keeps deliveries from being stored, where that is known."""
    taken = isinstance(error, UniqueViolation) and error.diag.constraint_name == "deliveries_pkey"
    return f"The sequence of its id is behind the data: {ABOVE_THE_DATA.decode()}" if taken else None


async def find(tx: Transaction, identities: Sequence[Identity]) -> dict[Identity, Copy]:
    """Read deliveries that were here already."""
    cursor = await tx.execute(FIND, _lists(identities))
    return {
        (row["source"], row["dedup_key"]): Copy(row["id"], row["status"], row["reason"])
        for row in await cursor.fetchall()
    }


async def rearm(tx: Transaction, identities: Sequence[Identity], ignored: Sequence[int]) -> set[Identity]:
    """Give dead deliveries among these, and the ignored ones named, a new set of attempts; return which."""
    params = {**_lists(identities), "ignored": list(ignored), "visit": await draw(tx), "max_attempts": MAX_ATTEMPTS}
    rows = await (await tx.execute(REARM, params)).fetchall()
    tx.moved += [Ready(inbox.table, "applying", row["id"]) for row in rows]
    return {(row["source"], row["dedup_key"]) for row in rows}


async def nudge(tx: Transaction, identities: Sequence[Identity]) -> None:
    """Make unfinished deliveries due now; their attempts stay as they are."""
    rows = await (await tx.execute(NUDGE, _lists(identities))).fetchall()
    tx.moved += [Ready(inbox.table, "applying", row["id"]) for row in rows]


@dataclass(frozen=True, slots=True)
class Content:
    """What a delivery says, except for the bytes of its body.

    Args:
        id: the delivery that holds headers and body: itself, or the one it was split from.
        headers: its header lines.
        own: what is kept of an event that was split off.
        shared: what is kept with its request of all of these.
        proof: a text that no other delivery has, not in another database either.
    """

    id: int
    headers: Headers
    own: bytes | None
    shared: bytes | None
    proof: str


async def load(tx: Transaction, stored: Stored) -> Content:
    """Read what a delivery says, from its parent where it is a further event of a request.

    Raises:
        Unreadable: its body or its headers were pruned.
        LookupError: there is no such delivery any more.
    """
    row = await (await tx.execute(LOAD, {"id": stored.id})).fetchone()
    if row is None:
        raise _gone(stored.parent or stored.id)
    if told := pruned(row["id"], row["pruned_at"], row["headers_pruned_at"]):
        raise Unreadable(told)
    headers = tuple((name, value) for name, value in row["headers"])
    return Content(row["id"], headers, row["own"], row["shared"], row["proof"])


async def load_body(tx: Transaction, id: int) -> bytes:
    """Read the exact bytes of a request.

    Raises:
        LookupError: they are not there any more.
    """
    row = await (await tx.execute(LOAD_BODY, {"id": id})).fetchone()
    if row is None:
        raise _gone(id)
    return bytes(row["body"])


async def split(
    tx: Transaction, id: int, positions: Sequence[int], names: Sequence[str], wants: Sequence[str | None], parts: Parts
) -> None:
    """Store the events of a delivery as deliveries of their own, in one statement; those that are there stay.

    Args:
        tx: the transaction that ends the delivery. Its `moved` is told of those that are due at once, and ours.
        id: the delivery.
        positions: of each event among all of the body's, from 1.
        names: of each.
        wants: of each, what it wants of another process; None: this one has its handler.
        parts: what is kept of each.
    """
    params = {
        "id": id,
        "positions": positions,
        "events": [clean(name)[:MOST_NAME] for name in names],
        "wants": wants,
        "parts": parts.own,
        "max_attempts": MAX_ATTEMPTS,
        "at_once": DUE_AT_ONCE,
        "apart": DUE_APART,
    }
    rows = await (await tx.execute(SPLIT, params)).fetchall()
    tx.moved += [Ready(inbox.table, "applying", row["id"]) for row in rows if row["due"]]


def _gone(id: int) -> LookupError:
    return LookupError(f"delivery {id} is gone: its body cannot be read")


def pruned(id: int, body_at: datetime | None, headers_at: datetime | None) -> str | None:
    """Say what retention has taken from a delivery, None where it has all it came with."""
    gone = {"its body was": body_at, "its headers were": headers_at}
    told = [f"{what} pruned on {at:%Y-%m-%d}" for what, at in gone.items() if at is not None]
    return f"delivery {id} cannot be run again: {' and '.join(told)}" if told else None


def _lists(identities: Sequence[Identity]) -> dict[str, Any]:
    return {"sources": [source for source, _ in identities], "keys": [key for _, key in identities]}
