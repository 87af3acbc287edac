"""What the tests of replay and export share: a consumer that counts what it applied, and deliveries in every state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from consumers import arrival, arrived, stories
from gates import sql, until

from webhooks import Consumer, Event, Gate, GitHub, Ignore, Park, Pool, Shortcut, StandardWebhooks, Transaction
from webhooks.delivery import Delivery
from webhooks.selection import Found, Reader, Selection, Unit, chosen

Bodies = list[bytes]


@dataclass
class Applied:
    """A consumer, what its handlers were called with, and what they are to do about it."""

    deliveries: list[int] = field(default_factory=list[int])
    failing: set[str] = field(default_factory=set[str])

    def consumer(self) -> Consumer:
        shortcut, github, shop = Shortcut(), GitHub(), StandardWebhooks("shop")
        sessions = Gate("patch_sessions", key="sc_id")
        sessions.phase("received", claimed="clarifying", done="clarified")

        @shortcut.on("story.update")
        async def open_session(event: Event, tx: Transaction) -> None:
            self._note(event)
            await sessions.open(tx, sc_id=event.data["story_id"], title=event.data["name"])

        @shortcut.on("story-comment.create")
        async def wait(event: Event, tx: Transaction) -> None:
            self._note(event)
            raise Park(sessions, event.data["story_id"], while_in=("received", "clarifying"))

        @github.on("push")
        async def push(event: Event, tx: Transaction) -> None:
            self._note(event)

        @github.on("star.created")
        async def star(event: Event, tx: Transaction) -> None:
            self._note(event)
            raise Ignore("nobody minds")

        @shop.on("order.paid")
        async def paid(event: Event, tx: Transaction) -> None:
            self._note(event)

        return Consumer(gates=[sessions], sources=[shortcut, github, shop])

    def _note(self, event: Event) -> None:
        self.deliveries.append(event.delivery)
        if event.name in self.failing:
            raise ValueError(f"{event.name} fails")


def pushed(repository: str = "acme/app", **columns: object) -> bytes:
    import json

    return json.dumps({"repository": {"full_name": repository}, **columns}).encode()


async def github(pool: Pool, *bodies: bytes, event: str = "push") -> list[int]:
    """Deliveries of GitHub's, one after the other, so that their ids are in that order."""
    return [(await arrived(pool, arrival(body, source="github", event=event)))[0] for body in bodies]


async def ended(pool: Pool, id: int, status: str, **columns: object) -> None:
    """Bring a delivery to where it is not without a worker."""
    values = {"event": None, "reason": None, "last_error": None, "moved_rows": None, "parked_on": None, **columns}
    await sql(
        pool,
        "UPDATE deliveries SET status = %(status)s, attempt_count = 1, event = %(event)s, reason = %(reason)s,"
        " last_error = %(last_error)s, moved_rows = %(moved_rows)s, parked_on = %(parked_on)s,"
        " parked_since = CASE WHEN %(parked_on)s::text IS NOT NULL THEN now() END,"
        " claimed_from = CASE WHEN %(status)s IN ('dead', 'applying') THEN 'received' END,"
        " lease_until = CASE WHEN %(status)s = 'applying' THEN now() + interval '1 hour' END WHERE id = %(id)s",
        id=id,
        status=status,
        **values,
    )


async def split(pool: Pool, *keys: int) -> tuple[int, list[int]]:
    """A bulk edit that was split, and its parts."""
    [parent] = await arrived(pool, arrival(stories(*keys)))
    names = ", ".join(dict.fromkeys(["story.update"] * len(keys)))
    await ended(pool, parent, "processed", event=names, reason=f"split into {len(keys)} events")
    parts: list[int] = []
    for position, key in enumerate(keys, 1):
        [row] = await sql(
            pool,
            "INSERT INTO deliveries (source, dedup_key, position, parent, received_at, event, status, moved_rows)"
            " SELECT source, dedup_key, %(position)s, id, received_at, 'story.update', 'processed', %(moved)s"
            " FROM deliveries WHERE id = %(parent)s RETURNING id",
            parent=parent,
            position=position,
            moved=[f"patch_sessions:{key}"],
        )
        parts.append(row["id"])
    return parent, parts


async def prune(pool: Pool, id: int) -> None:
    await sql(pool, "UPDATE deliveries SET body = NULL, pruned_at = now() WHERE id = %(id)s", id=id)


async def selected(
    pool: Pool, wanted: Selection, unit: Unit = "run", *, consumer: Consumer | None = None, **how: Any
) -> list[Found]:
    async with pool.transaction() as tx:
        scope = await chosen(tx, wanted, unit)
    reader = Reader(pool, {} if consumer is None else consumer.sources, scope)
    return [found async for batch in reader.batches(**how) for found in batch]


async def ids(pool: Pool, unit: Unit = "run", **filters: Any) -> list[int]:
    return [found.id for found in await selected(pool, Selection(**filters), unit)]


async def row_of(pool: Pool, id: int) -> dict[str, Any]:
    [row] = await sql(pool, "SELECT * FROM deliveries WHERE id = %(id)s", id=id)
    return row


async def settled(pool: Pool) -> None:
    """Wait until nothing waits or runs."""

    async def done() -> bool:
        rows = await sql(
            pool,
            "SELECT 1 FROM deliveries WHERE status = 'applying' OR (status = 'received' AND parked_on IS NULL) LIMIT 1",
        )
        return not rows

    await until(done)


def of(delivery: Delivery) -> tuple[str, str]:
    return delivery.source, delivery.dedup_key
